"""Join links: the one line of text that lets a device find a swarm and know it again.

`http://HOST:PORT#ROOT`: the market's address, and the swarm's root key in base58. A browser never sends the
part after `#`, so a proxy on the way does not learn it. Without it, the root is taken on first use and its
fingerprint shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from .errors import ConfigError, IdentityError
from .identity import PublicKey, address_of, parse_address


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A market's base `url` (no trailing slash) and the swarm's `root`, or None if it is not pinned."""

    url: str
    root: PublicKey | None

    @property
    def text(self) -> str:
        """The link as a person passes it on."""
        return self.url if self.root is None else f"{self.url}#{address_of(self.root)}"

    def __str__(self) -> str:
        return self.text


def parse_join_link(text: str) -> JoinLink:
    """Read a join link. Raises `ConfigError` saying what is wrong with it."""
    text = text.strip()
    if any(character.isspace() or ord(character) < 0x20 for character in text):
        raise ConfigError("a join link is one word without spaces: copy it again")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a join link: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text!r} is not a join link: it looks like http://HOST:PORT#SWARM")
    if parts.username is not None or parts.password is not None or parts.query:
        raise ConfigError("a join link carries no user name, password or query")
    if port == 0:
        raise ConfigError("a join link names a port from 1 to 65535")
    url = urlunsplit((parts.scheme, parts.netloc.lower(), parts.path.rstrip("/"), "", ""))
    if not parts.fragment:
        return JoinLink(url, None)
    try:
        return JoinLink(url, parse_address(parts.fragment))
    except IdentityError as error:
        raise ConfigError(f"the part after # in the join link is not a swarm's key: {error}") from None

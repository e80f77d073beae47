"""The wallet proof: the text a wallet signs, and the grant that the signed text is.

The text has the form of CAIP-122 (https://chainagnostic.org/CAIPs/caip-122) as Solana wallets show it.
Signed once, it lets a device (its Ed25519 and X25519 keys) serve for the wallet for 30 days at most.
Client and market each build the text from what they know and compare it byte for byte, so neither has to
trust what the other shows.

Knows the text, its checks and wallet files. Time and nonces are arguments; who has used a nonce is the
store's business.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from relay.errors import ConfigError, IdentityError
from relay.identity import (
    MAX_CERTIFICATE_LIFETIME_S,
    ExchangePublic,
    PublicKey,
    SigningKey,
    address_of,
    parse_address,
    verify,
)
from relay.keyfiles import read_secret, write_secret

CHAIN_ID: Final = "5eykt4UsFv8P8NJdTREpY1vzqKqZKvdp"
"""Solana's mainnet, as CAIP-2 names it: wallets are Solana key pairs."""

CHALLENGE_LIFETIME_S: Final = 300
"""A challenge is answered within 300 s of its issued-at, or never."""

MAX_GRANT_LIFETIME_S: Final = MAX_CERTIFICATE_LIFETIME_S
CLOCK_SKEW_S: Final = 60
SCOPES: Final = ("serve",)
"""What a grant may allow: "serve" lets the device hold windows and earn for the wallet."""

STATEMENT: Final = (
    "Let the device named below hold expert windows and earn credit for this wallet. "
    "This moves no funds and costs nothing."
)
MAX_TEXT_BYTES: Final = 2048

_DOMAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9a-fA-F:.]{2,45}\](:[0-9]{1,5})?")
_PATH: Final = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){0,8}")
_NONCE: Final = re.compile(r"[A-Za-z0-9]{22,64}")
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_TEXT: Final = re.compile(
    r"(?P<domain>[^\s]+) wants you to sign in with your Solana account:\n"
    r"(?P<wallet>[1-9A-HJ-NP-Za-km-z]{32,44})\n"
    r"\n"
    r"(?P<statement>[^\n]+)\n"
    r"\n"
    r"URI: (?P<uri>[^\s]+)\n"
    r"Version: 1\n"
    r"Chain ID: (?P<chain>[^\s]+)\n"
    r"Nonce: (?P<nonce>[A-Za-z0-9]{22,64})\n"
    r"Issued At: (?P<issued_at>[0-9TZ:-]{20})\n"
    r"Expiration Time: (?P<expires_at>[0-9TZ:-]{20})\n"
    r"Resources:\n"
    r"- urn:kvasir:swarm:(?P<swarm>[1-9A-HJ-NP-Za-km-z]{32,44})\n"
    r"- urn:kvasir:device:(?P<device>[1-9A-HJ-NP-Za-km-z]{32,44})\n"
    r"- urn:kvasir:exchange:(?P<exchange>[0-9a-f]{64})\n"
    r"- urn:kvasir:scope:(?P<scope>[a-z]{1,16})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Challenge:
    """All that one challenge text says. `url` is a market's public base URL, times are Unix seconds."""

    url: str
    wallet: PublicKey
    device: PublicKey
    exchange: ExchangePublic
    swarm: PublicKey
    scope: str
    nonce: str
    issued_at: int
    expires_at: int

    @property
    def domain(self) -> str:
        """Host and port of `url`, as the text shows them."""
        return urlsplit(self.url).netloc

    @property
    def text(self) -> str:
        """The exact text to sign. Raises `IdentityError` if a part could not be shown safely in it."""
        _check_parts(self)
        return (
            f"{self.domain} wants you to sign in with your Solana account:\n"
            f"{address_of(self.wallet)}\n\n{STATEMENT}\n\n"
            f"URI: {self.url}/market/v1\nVersion: 1\nChain ID: {CHAIN_ID}\nNonce: {self.nonce}\n"
            f"Issued At: {format_time(self.issued_at)}\nExpiration Time: {format_time(self.expires_at)}\n"
            f"Resources:\n- urn:kvasir:swarm:{address_of(self.swarm)}\n"
            f"- urn:kvasir:device:{address_of(self.device)}\n"
            f"- urn:kvasir:exchange:{self.exchange.hex()}\n- urn:kvasir:scope:{self.scope}"
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """A wallet's signed word for a device. `hash` is the SHA-256 of `text`; times are Unix seconds."""

    hash: bytes
    text: str
    signature: bytes
    wallet: PublicKey
    device: PublicKey
    exchange: ExchangePublic
    scope: str
    issued_at: int
    expires_at: int
    swarm: PublicKey


def new_nonce() -> str:
    """A challenge nonce: 128 random bits in letters and digits."""
    return secrets.token_hex(16)


def grant_hash(text: str) -> bytes:
    """The SHA-256 of a grant's text: what claims and sessions name it by."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def parse_challenge(text: str) -> Challenge:
    """Read a challenge text. Raises `IdentityError` unless it is exactly what `Challenge.text` writes."""
    if not isinstance(text, str) or len(text) > MAX_TEXT_BYTES:
        raise IdentityError(f"a challenge text has at most {MAX_TEXT_BYTES} characters")
    match = _TEXT.fullmatch(text)
    if match is None:
        raise IdentityError("the text is not a Kvasir sign-in text of version 1")
    parts = match.groupdict()
    if parts["chain"] != CHAIN_ID:
        raise IdentityError(f"the text is for chain {parts['chain']!r}, expected {CHAIN_ID}")
    challenge = Challenge(
        url=parts["uri"].removesuffix("/market/v1"),
        wallet=parse_address(parts["wallet"]),
        device=parse_address(parts["device"]),
        exchange=ExchangePublic(bytes.fromhex(parts["exchange"])),
        swarm=parse_address(parts["swarm"]),
        scope=parts["scope"],
        nonce=parts["nonce"],
        issued_at=parse_time(parts["issued_at"]),
        expires_at=parse_time(parts["expires_at"]),
    )
    if challenge.text != text:
        raise IdentityError("the sign-in text differs from the one its own parts make: do not sign it")
    return challenge


def check_challenge(text: str, expected: Challenge, *, now: float, lifetime_s: int) -> None:
    """The client's check before its wallet signs: `expected` holds what it asked for, the URL it dialled
    included; nonce and times are the market's. Raises `IdentityError` for any difference.
    """
    offered = parse_challenge(text)
    if offered.url != expected.url:
        raise IdentityError(
            f"the market answered with a sign-in text for {offered.url}, and you dialled {expected.url}: "
            "it may be passing on another market's text; do not trust it"
        )
    if abs(now - offered.issued_at) > CLOCK_SKEW_S:
        raise IdentityError(
            "the market's clock and this one differ by more than 60 s: set them", code="expired"
        )
    if offered.expires_at - offered.issued_at != lifetime_s or offered.text != text:
        raise IdentityError("the market offers another lifetime than was asked for")
    if (offered.wallet, offered.device, offered.exchange, offered.swarm, offered.scope) != (
        expected.wallet,
        expected.device,
        expected.exchange,
        expected.swarm,
        expected.scope,
    ):
        raise IdentityError("the market answered with a sign-in text for other keys: do not trust it")


def sign_challenge(text: str, wallet: SigningKey) -> bytes:
    """The wallet's 64-byte signature over the text's UTF-8 bytes, as Solana wallets sign messages."""
    return wallet.sign(text.encode("utf-8"))


def open_grant(text: str, signature: bytes, *, root: bytes, now: float) -> Grant:
    """Verify a grant: the wallet signed it, for this swarm, and it has not run out.

    Raises `IdentityError`. Whether its nonce was issued and unused is for the market alone.
    """
    challenge = parse_challenge(text)
    if challenge.swarm != root:
        raise IdentityError(
            f"the grant is for swarm {address_of(challenge.swarm)}, not {address_of(root)}",
            code="wrong_swarm",
        )
    if now > challenge.expires_at:
        raise IdentityError("the grant has expired: sign in again (kvasir-node login)", code="expired")
    if now + CLOCK_SKEW_S < challenge.issued_at:
        raise IdentityError("the grant is not valid yet: check both clocks", code="expired")
    verify(challenge.wallet, signature, text.encode("utf-8"))
    return Grant(
        hash=grant_hash(text),
        text=text,
        signature=bytes(signature),
        wallet=challenge.wallet,
        device=challenge.device,
        exchange=challenge.exchange,
        scope=challenge.scope,
        issued_at=challenge.issued_at,
        expires_at=challenge.expires_at,
        swarm=challenge.swarm,
    )


def normalise_url(url: str) -> str:
    """A market's base URL as texts show it: lower-case scheme and host, no trailing slash, no query.

    Raises `ConfigError` for anything but http or https.
    """
    parts = urlsplit(url.strip())
    path = parts.path.rstrip("/")
    host = parts.netloc.lower()
    if parts.scheme not in ("http", "https") or not _DOMAIN.fullmatch(host) or not _PATH.fullmatch(path):
        raise ConfigError(f"{url!r} is not a market's URL such as http://192.168.1.5:8420")
    return f"{parts.scheme}://{host}{path}"


def format_time(moment: int) -> str:
    """Unix seconds as an RFC 3339 time in UTC, whole seconds."""
    return time.strftime(_TIME, time.gmtime(moment))


def parse_time(text: str) -> int:
    """The Unix seconds of `format_time`'s text. Raises `IdentityError`."""
    try:
        moment = calendar.timegm(time.strptime(text, _TIME))
    except ValueError:
        raise IdentityError(f"{text!r} is not a time such as 2026-01-31T12:00:00Z") from None
    return moment


def _check_parts(challenge: Challenge) -> None:
    """No part may carry a line feed or anything else that would change how the text reads."""
    parts = urlsplit(challenge.url)
    safe_url = (
        challenge.url == f"{parts.scheme}://{parts.netloc}{parts.path}"
        and parts.scheme in ("http", "https")
        and _DOMAIN.fullmatch(parts.netloc)
        and _PATH.fullmatch(parts.path)
    )
    if not safe_url or not _NONCE.fullmatch(challenge.nonce) or challenge.scope not in SCOPES:
        raise IdentityError("the sign-in text would carry an unsafe URL, nonce or scope")
    lifetime = challenge.expires_at - challenge.issued_at
    if len(challenge.exchange) != 32 or not 0 < lifetime <= MAX_GRANT_LIFETIME_S:
        raise IdentityError("a grant names a 32-byte X25519 key and lives 30 days at most")


# --- wallet files ------------------------------------------------------------------------------------


def create_wallet(path: str | Path, *, passphrase: bytes | None = None) -> SigningKey:
    """Make a wallet and store it as Solana's tools do (`id.json`: 64 numbers), mode 0600.

    With `passphrase` the file is encrypted. Raises `IdentityError` if the file exists already.
    """
    key = SigningKey.generate()
    text = json.dumps(list(key.seed + key.public), separators=(",", ":"))
    write_secret(path, text.encode("ascii"), passphrase=passphrase)
    return key


def load_wallet(path: str | Path, *, passphrase: bytes | None = None) -> SigningKey:
    """Read a wallet file. Raises `IdentityError` for one that is unsafe, damaged or not a key pair."""
    data = read_secret(path, passphrase=passphrase)
    try:
        numbers = json.loads(data)
    except (ValueError, RecursionError):
        numbers = None
    if (
        not isinstance(numbers, list)
        or len(numbers) != 64
        or not all(type(number) is int and 0 <= number < 256 for number in numbers)
    ):
        raise IdentityError(f"{path} is not a wallet: expected the 64 numbers of a Solana id.json")
    seed, public = bytes(numbers[:32]), bytes(numbers[32:])
    key = SigningKey(seed)
    if key.public != public:
        raise IdentityError(f"{path} is damaged: its two halves are not one key pair")
    return key

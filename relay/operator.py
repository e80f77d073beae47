"""A relay's own keys on disk: `relay.key` (secret) and `relay.cert`, in one folder.

The key file is msgpack {v, role, id, ed25519, x25519}, the same that `kvasir-backbone up` keeps for its
embedded relay; the certificate is the signed document that the holder of the swarm's root made of the
request. Knows files and certificates only.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, IdentityError, RemoteProtocolError
from .identity import (
    Certificate,
    ExchangeKey,
    PublicKey,
    SignedDocument,
    SigningKey,
    open_certificate,
    pack,
    require,
    unpack_canonical,
)
from .keyfiles import load_or_create

KEY_FILE = "relay.key"
CERTIFICATE_FILE = "relay.cert"


@dataclass(frozen=True, slots=True)
class OperatorKey:
    """A relay's id (16 bytes) and key pairs."""

    id: bytes
    signing: SigningKey
    exchange: ExchangeKey

    def request(self) -> str:
        """What the holder of the swarm's root is asked to certify, as one word of URL-safe base64."""
        fields = {
            "v": 1,
            "role": "relay",
            "id": self.id,
            "ed25519": self.signing.public,
            "x25519": self.exchange.public,
        }
        return base64.urlsafe_b64encode(pack(fields)).rstrip(b"=").decode("ascii")


def load_key(folder: Path) -> OperatorKey:
    """The keys in `folder`, made at the first call. Raises `IdentityError`."""

    def make() -> bytes:
        drawn = {"id": secrets.token_bytes(16), "ed25519": secrets.token_bytes(32)}
        return pack({"v": 1, "role": "relay", **drawn, "x25519": secrets.token_bytes(32)})

    path = folder / KEY_FILE
    try:
        fields = unpack_canonical(load_or_create(path, make), max_bytes=4096)
        if not isinstance(fields, dict) or fields.get("v") != 1 or fields.get("role") != "relay":
            raise RemoteProtocolError("another content")
        return OperatorKey(
            require(fields, "id", bytes, size=16),
            SigningKey(require(fields, "ed25519", bytes, size=32)),
            ExchangeKey(require(fields, "x25519", bytes, size=32)),
        )
    except RemoteProtocolError as error:
        raise IdentityError(f"{path} is not a relay's key file of version 1: {error}") from None


def load_certificate(folder: Path, key: OperatorKey, *, root: PublicKey, now: float) -> Certificate:
    """The certificate in `folder`, checked against the swarm's root and the key. `now` in Unix seconds.

    Raises `ConfigError` saying how to get one, or `IdentityError` why the one there cannot be used.
    """
    path = folder / CERTIFICATE_FILE
    try:
        document = SignedDocument.from_bytes(path.read_bytes()[:65_536])
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: have this relay certified where the swarm's root key is "
            f"(kvasir-market swarm certify {key.request()} --out relay.cert) and put that file there"
        ) from None
    except RemoteProtocolError as error:
        raise IdentityError(f"{path} is not a certificate: {error}") from None
    certificate = open_certificate(document, swarm=root, now=now, role="relay")
    if certificate.ed25519 != key.signing.public or certificate.id != key.id:
        raise IdentityError(f"{path} is not of the key in {folder / KEY_FILE}: certify the relay again")
    return certificate

"""Keys, base58 addresses, signed documents and the swarm's certificates.

A key pair is Ed25519 (RFC 8032) for signatures or X25519 (RFC 7748) for Noise. An address is the base58
form of an Ed25519 public key, as Solana wallets print it. A signed document is a kind, a canonical
msgpack body and a signature over both, so a signature made for one kind never passes for another.

Knows formats and signatures. Knows no clock (time is an argument), no files and no sockets.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, NewType

import base58
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from .errors import IdentityError, RemoteProtocolError, version_refusal

PROTOCOL_VERSION: Final = 1
"""The version of every format on the wire and on disk. A peer of another version gets a clear refusal."""

MAX_DOCUMENT_BYTES: Final = 64 * 1024 * 1024
"""Bound on a signed document's body; only plans come near it."""

MAX_CERTIFICATE_LIFETIME_S: Final = 30 * 24 * 3600
"""Certificates and grants live 30 days at most."""

PublicKey = NewType("PublicKey", bytes)
"""A 32-byte Ed25519 public key."""

ExchangePublic = NewType("ExchangePublic", bytes)
"""A 32-byte X25519 public key."""

Role = Literal["market", "backbone", "relay"]
ROLES: Final[tuple[Role, ...]] = ("market", "backbone", "relay")

_P: Final = 2**255 - 19
_L: Final = 2**252 + 27742317777372353535851937790883648493
_ORDER_8_Y: Final = 55188659117513257062467267217118295137698188065244968500265048394206261417927
# y coordinates of the eight points of small order (RFC 8032 curve; see "Taming the many EdDSAs", 2020).
_SMALL_ORDER_Y: Final = frozenset(
    {
        0,
        1,
        _P - 1,
        _ORDER_8_Y,
        _P - _ORDER_8_Y,
    }
)


# --- canonical bytes ---------------------------------------------------------------------------------


def pack(value: object) -> bytes:
    """Canonical msgpack: map keys are str or int and sorted, floats are 64 bits, bytes are bin.

    Raises `TypeError` for a value that msgpack cannot carry.
    """
    packed: bytes = msgpack.packb(_sorted(value), use_bin_type=True)
    return packed


def unpack(data: bytes | memoryview, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Decode msgpack from a peer, within `max_bytes`. Raises `RemoteProtocolError` on anything malformed."""
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"a message of {len(data)} bytes is over the bound of {max_bytes}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not well-formed msgpack: {error}") from None


def unpack_canonical(data: bytes | memoryview, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Like `unpack`, and refuses bytes that `pack` would not have produced."""
    value = unpack(data, max_bytes=max_bytes)
    try:
        canonical = pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"not canonical msgpack: {error}") from None
    if canonical != data:
        raise RemoteProtocolError("the document's bytes are not canonical")
    return value


def _sorted(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


# --- keys --------------------------------------------------------------------------------------------


class SigningKey:
    """An Ed25519 key pair. `public` is the 32-byte public key, `seed` the 32-byte secret."""

    __slots__ = ("_private", "public", "seed")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise IdentityError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public = PublicKey(self._private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key from the system's randomness."""
        return cls(secrets.token_bytes(32))

    @property
    def address(self) -> str:
        """The base58 form of `public`."""
        return address_of(self.public)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `message`, as it is: callers separate domains."""
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"SigningKey({self.address})"


class ExchangeKey:
    """An X25519 key pair for Noise. `public` is the 32-byte public key, `secret` the 32-byte scalar."""

    __slots__ = ("_private", "public", "secret")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise IdentityError(f"an X25519 secret has 32 bytes, not {len(secret)}")
        self._private = X25519PrivateKey.from_private_bytes(secret)
        self.secret = secret
        self.public = ExchangePublic(self._private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> ExchangeKey:
        """A new key from the system's randomness."""
        return cls(secrets.token_bytes(32))

    def exchange(self, peer: bytes) -> bytes:
        """The 32-byte shared secret with `peer`. Raises `IdentityError` for a small-order peer key."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise IdentityError(f"the peer's X25519 key cannot be used: {error}") from None

    def __repr__(self) -> str:
        return "ExchangeKey(...)"


def address_of(public: bytes) -> str:
    """The base58 address of a 32-byte public key."""
    encoded: bytes = base58.b58encode(bytes(public))
    return encoded.decode("ascii")


def parse_address(address: str) -> PublicKey:
    """The public key behind a base58 address.

    Raises `IdentityError` unless it is canonical base58 of a usable 32-byte Ed25519 key.
    """
    if not isinstance(address, str) or not 32 <= len(address) <= 44:
        raise IdentityError("an address is 32 to 44 base58 characters")
    try:
        public = base58.b58decode(address)
    except ValueError:
        raise IdentityError(f"{address!r} is not base58") from None
    if len(public) != 32 or address_of(public) != address:
        raise IdentityError(f"{address!r} is not the base58 form of 32 bytes")
    return check_public_key(public)


@lru_cache(maxsize=4096)
def check_public_key(public: bytes) -> PublicKey:
    """Refuse Ed25519 keys that are not 32 bytes, not canonical, not on the curve or of small order.

    Raises `IdentityError`. Source: RFC 8032 section 5.1.3, with the strict reading of its encoding.
    """
    if len(public) != 32:
        raise IdentityError(f"an Ed25519 public key has 32 bytes, not {len(public)}")
    y = int.from_bytes(public, "little") & ((1 << 255) - 1)
    if y >= _P:
        raise IdentityError("the Ed25519 public key is not canonical")
    if y in _SMALL_ORDER_Y:
        raise IdentityError("the Ed25519 public key has small order")
    d = -121665 * pow(121666, -1, _P) % _P
    x2 = (y * y - 1) * pow(d * y * y + 1, -1, _P) % _P
    if pow(x2, (_P - 1) // 2, _P) != 1:
        raise IdentityError("the Ed25519 public key is not a point of the curve")
    return PublicKey(bytes(public))


def verify(public: bytes, signature: bytes, message: bytes) -> None:
    """Check an Ed25519 signature strictly. Raises `IdentityError` for any reason to doubt it."""
    key = check_public_key(bytes(public))
    if len(signature) != 64:
        raise IdentityError(f"an Ed25519 signature has 64 bytes, not {len(signature)}")
    if int.from_bytes(signature[32:], "little") >= _L:
        raise IdentityError("the signature is malleable (S >= L)")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(bytes(signature), message)
    except InvalidSignature:
        raise IdentityError(f"the signature does not verify under {address_of(key)}") from None


# --- signed documents --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignedDocument:
    """A document of one `kind`: canonical msgpack `body`, the 32-byte `signer` and its 64-byte `signature`.

    The signature covers `pre_authentication(kind, body)`. The body always has "v", the version.
    """

    kind: str
    body: bytes
    signer: PublicKey
    signature: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the body: independent of who signed it."""
        return hashlib.sha256(self.body).digest()

    def to_bytes(self) -> bytes:
        """The envelope: a msgpack array of kind, body, signer and signature."""
        return pack([self.kind, self.body, self.signer, self.signature])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SignedDocument:
        """Parse an envelope without trusting it. Raises `RemoteProtocolError`."""
        parts = unpack(data)
        match parts:
            case [str(kind), bytes(body), bytes(signer), bytes(signature)]:
                return cls(kind, body, PublicKey(signer), signature)
        raise RemoteProtocolError("not a signed document")


def pre_authentication(kind: str, body: bytes) -> bytes:
    """What a document's signature covers: a fixed tag, then kind and body, each with its length."""
    name = kind.encode("utf-8")
    return b"kvasir document\n" + struct.pack(">I", len(name)) + name + struct.pack(">Q", len(body)) + body


def sign_document(kind: str, fields: Mapping[str, object], key: SigningKey) -> SignedDocument:
    """Sign `fields` (without "v", which is added) as a document of `kind`."""
    body = pack({"v": PROTOCOL_VERSION, **fields})
    return SignedDocument(kind, body, key.public, key.sign(pre_authentication(kind, body)))


def open_document(document: SignedDocument, kind: str, signer: bytes) -> dict[str, Any]:
    """Verify that `signer` signed `document` as a `kind`, and return its fields, "v" included.

    Raises `IdentityError` (wrong kind, signer or signature), `Refused` (another version) or
    `RemoteProtocolError` (a body that is not a canonical map).
    """
    if document.kind != kind:
        raise IdentityError(f"expected a signed {kind}, got a signed {document.kind!r}")
    if document.signer != signer:
        raise IdentityError(
            f"the {kind} is signed by {address_of(document.signer)}, not by {address_of(signer)}"
        )
    verify(document.signer, document.signature, pre_authentication(kind, document.body))
    fields = unpack_canonical(document.body)
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise RemoteProtocolError(f"the {kind} is not a map")
    if fields.get("v") != PROTOCOL_VERSION:
        raise version_refusal(PROTOCOL_VERSION, fields.get("v"))
    return fields


def require(
    fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], *, size: int | None = None
) -> Any:
    """`fields[name]`, checked to be of type `kind` (and `size` bytes long). Raises `RemoteProtocolError`."""
    value = fields.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise RemoteProtocolError(f"field {name!r} is missing or not a {'/'.join(k.__name__ for k in kinds)}")
    if size is not None and isinstance(value, bytes | str) and len(value) != size:
        raise RemoteProtocolError(f"field {name!r} has {len(value)} bytes, expected {size}")
    return value


# --- certificates ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certificate:
    """An operating key that the swarm's root vouches for.

    `id` (16 bytes) names the market, backbone or relay and survives renewal; `serial` rises with each
    renewal, and the two highest serials of an id are valid. Times are Unix seconds.
    """

    swarm: PublicKey
    role: Role
    id: bytes
    serial: int
    ed25519: PublicKey
    x25519: ExchangePublic
    issued_at: int
    expires_at: int
    document: SignedDocument = field(repr=False, compare=False)

    @property
    def hash(self) -> bytes:
        """SHA-256 of the signed body; part of every Noise prologue."""
        return self.document.digest


def issue_certificate(
    root: SigningKey,
    *,
    role: Role,
    id: bytes,
    serial: int,
    ed25519: PublicKey,
    x25519: ExchangePublic,
    now: int,
    lifetime_s: int = MAX_CERTIFICATE_LIFETIME_S,
) -> Certificate:
    """Certify an operating key with the swarm's root key. Times in Unix seconds."""
    assert role in ROLES
    assert len(id) == 16
    assert 0 < lifetime_s <= MAX_CERTIFICATE_LIFETIME_S
    assert serial >= 0
    document = sign_document(
        "certificate",
        {
            "swarm": root.public,
            "role": role,
            "id": id,
            "serial": serial,
            "ed25519": ed25519,
            "x25519": x25519,
            "issued_at": now,
            "expires_at": now + lifetime_s,
        },
        root,
    )
    return open_certificate(document, swarm=root.public, now=now)


def open_certificate(
    document: SignedDocument, *, swarm: bytes, now: float, role: Role | None = None, skew_s: float = 60.0
) -> Certificate:
    """Verify a certificate against the pinned swarm root and the time.

    Raises `IdentityError` (another root, another role, expired, not yet valid, too long a life) and
    `RemoteProtocolError` (fields missing).
    """
    if document.signer != swarm:
        raise IdentityError(
            f"the certificate belongs to swarm {address_of(document.signer)}, and this side trusts swarm "
            f"{address_of(swarm)}: check the join link",
            code="wrong_swarm",
        )
    fields = open_document(document, "certificate", swarm)
    certificate = Certificate(
        swarm=PublicKey(require(fields, "swarm", bytes, size=32)),
        role=require(fields, "role", str),
        id=require(fields, "id", bytes, size=16),
        serial=require(fields, "serial", int),
        ed25519=check_public_key(require(fields, "ed25519", bytes, size=32)),
        x25519=ExchangePublic(require(fields, "x25519", bytes, size=32)),
        issued_at=require(fields, "issued_at", int),
        expires_at=require(fields, "expires_at", int),
        document=document,
    )
    if certificate.swarm != swarm:
        raise IdentityError("the certificate names another swarm", code="wrong_swarm")
    if certificate.role not in ROLES or (role is not None and certificate.role != role):
        raise IdentityError(f"expected the certificate of a {role}, got that of a {certificate.role!r}")
    if certificate.expires_at - certificate.issued_at > MAX_CERTIFICATE_LIFETIME_S:
        raise IdentityError("the certificate's life is over 30 days")
    if now > certificate.expires_at:
        raise IdentityError(
            f"the {certificate.role}'s certificate has expired: its operator must renew it", code="expired"
        )
    if now + skew_s < certificate.issued_at:
        raise IdentityError("the certificate is not valid yet: check both clocks", code="expired")
    return certificate


class SerialBook:
    """Remembers the highest serials seen of each id, and refuses all but the two highest."""

    def __init__(self) -> None:
        self._highest: dict[bytes, int] = {}

    def accept(self, certificate: Certificate) -> None:
        """Note a verified certificate. Raises `IdentityError` if two higher serials are known."""
        highest = self._highest.get(certificate.id, certificate.serial)
        if certificate.serial < highest - 1:
            raise IdentityError(
                f"certificate serial {certificate.serial} was replaced; {highest} is current", code="expired"
            )
        self._highest[certificate.id] = max(highest, certificate.serial)


def fingerprint(root: bytes) -> str:
    """A swarm root in groups of four characters, for a person to compare."""
    text = address_of(root)
    return " ".join(text[i : i + 4] for i in range(0, len(text), 4))

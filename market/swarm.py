"""A swarm's own keys: the root, and the operating keys that it certifies for market, backbone and relay.

Kept in one folder, each secret a file of its own (see `relay.keyfiles`). The root may live elsewhere: then
the folder has only `root.pub`, and certificates come from `kvasir-market swarm certify` on the machine that
has the root. Knows files and certificates; nothing of what the keys are used for.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from relay.errors import ConfigError, IdentityError, RemoteProtocolError
from relay.identity import (
    MAX_CERTIFICATE_LIFETIME_S,
    ROLES,
    Certificate,
    ExchangeKey,
    ExchangePublic,
    PublicKey,
    Role,
    SignedDocument,
    SigningKey,
    address_of,
    check_public_key,
    issue_certificate,
    open_certificate,
    pack,
    parse_address,
    require,
    unpack_canonical,
)
from relay.keyfiles import load_or_create, read_secret

from .requests import encode_bytes

RENEW_BEFORE_S: Final = MAX_CERTIFICATE_LIFETIME_S // 2
"""A certificate with less than this left is renewed."""


@dataclass(frozen=True, slots=True)
class OperatingKey:
    """The keys of one market, backbone or relay, and the certificate that the root gave them."""

    role: Role
    id: bytes
    signing: SigningKey
    exchange: ExchangeKey
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """What an operating key's holder asks the root's holder to certify. Carries no secret."""

    role: Role
    id: bytes
    ed25519: PublicKey
    x25519: ExchangePublic

    def to_bytes(self) -> bytes:
        """Canonical msgpack with a version."""
        return pack(
            {"v": 1, "role": self.role, "id": self.id, "ed25519": self.ed25519, "x25519": self.x25519}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> CertificateRequest:
        """Parse what `to_bytes` wrote. Raises `RemoteProtocolError` or `IdentityError`."""
        fields = unpack_canonical(data, max_bytes=4096)
        if not isinstance(fields, dict) or fields.get("v") != 1 or fields.get("role") not in ROLES:
            raise RemoteProtocolError("not a certificate request of version 1")
        return cls(
            role=fields["role"],
            id=require(fields, "id", bytes, size=16),
            ed25519=check_public_key(require(fields, "ed25519", bytes, size=32)),
            x25519=ExchangePublic(require(fields, "x25519", bytes, size=32)),
        )


class SwarmKeys:
    """All keys of one swarm that this machine has. Make it with `load_or_create`; renew with `renew`."""

    def __init__(
        self, folder: Path, root_public: PublicKey, root: SigningKey | None, keys: Mapping[Role, OperatingKey]
    ) -> None:
        self.folder = folder
        self.root_public = root_public
        self.root = root
        self._keys = dict(keys)

    @classmethod
    def load_or_create(
        cls, state_dir: str | Path, *, now: float, roles: tuple[Role, ...] = ROLES
    ) -> SwarmKeys:
        """The swarm in `state_dir`/swarm, made at the first call. `now` is in Unix seconds.

        Raises `IdentityError` for unsafe or damaged key files, and `ConfigError` where the root is kept
        elsewhere and a certificate is missing or has run out.
        """
        folder = Path(state_dir) / "swarm"
        root, public = _load_root(folder)
        keys = cls(folder, public, root, {})
        for role in roles:
            keys._keys[role] = keys._load(role, now)
        keys.renew(now)
        return keys

    @property
    def market(self) -> OperatingKey:
        """The market's current operating key."""
        return self.key("market")

    @property
    def backbone(self) -> OperatingKey:
        """The backbone's current operating key."""
        return self.key("backbone")

    @property
    def relay(self) -> OperatingKey:
        """The relay's current operating key."""
        return self.key("relay")

    def key(self, role: Role) -> OperatingKey:
        """The current operating key of `role`. Raises `ConfigError` if this machine has none."""
        if role not in self._keys:
            raise ConfigError(f"{self.folder} has no key for a {role}")
        return self._keys[role]

    def renew(self, now: float) -> tuple[Role, ...]:
        """Certify again, with the next serial, every key that has run half its life; say which.

        Does nothing where the root is kept elsewhere.
        """
        if self.root is None:
            return ()
        due = [r for r, k in self._keys.items() if k.certificate.expires_at - now < RENEW_BEFORE_S]
        for role in due:
            key = self._keys[role]
            certificate = certify(self.root, request_of(key), serial=key.certificate.serial + 1, now=now)
            store_certificate(self.folder, certificate)
            self._keys[role] = replace(key, certificate=certificate)
        return tuple(due)

    def _load(self, role: Role, now: float) -> OperatingKey:
        id_, signing, exchange = load_operating_secret(self.folder, role)
        request = CertificateRequest(role, id_, signing.public, exchange.public)
        certificate = _load_certificate(self.folder, request, self.root_public, now)
        if certificate is None:
            if self.root is None:
                word = encode_bytes(request.to_bytes())
                raise ConfigError(
                    f"{self.folder / role}.cert is missing or has run out, and the root key is kept "
                    f"elsewhere: run `kvasir-market swarm certify {word} --out {role}.cert` there, and put "
                    "the answer here"
                )
            certificate = certify(self.root, request, serial=_next_serial(self.folder, role), now=now)
            store_certificate(self.folder, certificate)
        return OperatingKey(role, id_, signing, exchange, certificate)


def certify(root: SigningKey, request: CertificateRequest, *, serial: int, now: float) -> Certificate:
    """Certify an operating key for 30 days from `now` (Unix seconds)."""
    return issue_certificate(
        root,
        role=request.role,
        id=request.id,
        serial=serial,
        ed25519=request.ed25519,
        x25519=request.x25519,
        now=int(now),
    )


def request_of(key: OperatingKey) -> CertificateRequest:
    """The certificate request for a key's renewal."""
    return CertificateRequest(key.role, key.id, key.signing.public, key.exchange.public)


def load_operating_secret(folder: Path, role: Role) -> tuple[bytes, SigningKey, ExchangeKey]:
    """The id and keys in `folder`/ROLE.key, made at the first call. Raises `IdentityError`."""

    def make() -> bytes:
        drawn = {"id": secrets.token_bytes(16), "ed25519": secrets.token_bytes(32)}
        return pack({"v": 1, "role": role, **drawn, "x25519": secrets.token_bytes(32)})

    path = folder / f"{role}.key"
    try:
        fields = unpack_canonical(load_or_create(path, make), max_bytes=4096)
        if not isinstance(fields, dict) or fields.get("v") != 1 or fields.get("role") != role:
            raise RemoteProtocolError("another content")
        id_ = require(fields, "id", bytes, size=16)
        signing = SigningKey(require(fields, "ed25519", bytes, size=32))
        return id_, signing, ExchangeKey(require(fields, "x25519", bytes, size=32))
    except RemoteProtocolError as error:
        raise IdentityError(f"{path} is not a {role}'s key file of version 1: {error}") from None


def store_certificate(folder: Path, certificate: Certificate) -> None:
    """Put a certificate at `folder`/ROLE.cert, replacing the older one in a single step."""
    target = folder / f"{certificate.role}.cert"
    staging = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    staging.write_bytes(certificate.document.to_bytes())
    os.replace(staging, target)


def _load_root(folder: Path) -> tuple[SigningKey | None, PublicKey]:
    """The root key, or only its public half where `root.pub` stands alone."""
    secret, public = folder / "root.key", folder / "root.pub"
    if public.exists() and not secret.exists():
        return None, parse_address(public.read_text("ascii").strip())
    seed = load_or_create(secret, lambda: secrets.token_bytes(32))
    root = SigningKey(seed)
    if not public.exists():
        public.write_text(address_of(root.public) + "\n", "ascii")
    elif public.read_text("ascii").strip() != address_of(root.public):
        raise IdentityError(f"{secret} and {public} are not of one swarm: restore the right files")
    return root, root.public


def load_root(folder: Path) -> SigningKey:
    """The root key in `folder`. Raises `IdentityError`, or `ConfigError` if it is not here."""
    try:
        return SigningKey(read_secret(folder / "root.key"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no root key: this swarm's root is kept elsewhere") from None


def _stored_certificate(folder: Path, role: Role) -> SignedDocument | None:
    try:
        data = (folder / f"{role}.cert").read_bytes()
    except FileNotFoundError:
        return None
    return SignedDocument.from_bytes(data[:65536])


def _load_certificate(
    folder: Path, request: CertificateRequest, root: PublicKey, now: float
) -> Certificate | None:
    """The stored certificate, or None if there is none for these keys that is still valid."""
    try:
        document = _stored_certificate(folder, request.role)
        if document is None:
            return None
        certificate = open_certificate(document, swarm=root, now=now, role=request.role)
    except (IdentityError, RemoteProtocolError) as error:
        if error.code == "wrong_swarm":
            raise
        return None
    found = CertificateRequest(certificate.role, certificate.id, certificate.ed25519, certificate.x25519)
    return certificate if found == request else None


def _next_serial(folder: Path, role: Role) -> int:
    """One above the serial of whatever certificate is stored, valid or not; 1 if there is none."""
    try:
        document = _stored_certificate(folder, role)
        if document is None:
            return 1
        serial: int = require(unpack_canonical(document.body, max_bytes=4096), "serial", int)
    except (RemoteProtocolError, AttributeError):
        return 1
    return serial + 1

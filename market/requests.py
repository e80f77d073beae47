"""Signed HTTP requests: who asks, proved for each request on its own.

A request's signature covers method, path with query, the body's SHA-256, the time and a nonce. Devices
sign with their device key; backbones and relays sign with their operating key and send their certificate
along. The body's SHA-256 is in a header too, so that a server can verify the author before it reads a body.
Pure: the clock and the memory of nonces are arguments.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from relay.errors import IdentityError, Refused, RemoteProtocolError
from relay.identity import (
    Certificate,
    PublicKey,
    SerialBook,
    SignedDocument,
    open_certificate,
    parse_address,
    verify,
)
from relay.requests import (
    BODY_HEADER,
    CERTIFICATE_HEADER,
    KEY_HEADER,
    NONCE_BYTES,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    decode_bytes,
    encode_bytes,
    request_message,
    sign_request,
)

__all__ = [
    "BODY_HEADER",
    "CERTIFICATE_HEADER",
    "KEY_HEADER",
    "MAX_CERTIFICATE_BYTES",
    "NONCE_BYTES",
    "NONCE_HEADER",
    "SIGNATURE_HEADER",
    "SKEW_S",
    "TIME_HEADER",
    "Author",
    "Claim",
    "NonceBook",
    "decode_bytes",
    "encode_bytes",
    "read_claim",
    "request_message",
    "sign_request",
    "verify_request",
]

SKEW_S: Final = 60
"""How far the two clocks may differ, and how long a nonce is remembered on either side of the time."""

MAX_CERTIFICATE_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class Author:
    """Who signed a request: the key, and the verified certificate if it is an operating key.

    `nonce` and `time` are the request's; a server with several replicas remembers the nonce in its store
    until `nonce_expires_at` (Unix seconds).
    """

    key: PublicKey
    certificate: Certificate | None
    nonce: bytes
    time: int

    @property
    def nonce_expires_at(self) -> int:
        """When the request's time alone refuses it."""
        return self.time + 2 * SKEW_S

    @property
    def role(self) -> str:
        """ "device", or the certificate's role."""
        return "device" if self.certificate is None else self.certificate.role


class NonceBook:
    """Remembers the nonces of one process for as long as their time could be accepted, within a bound."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._seen: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()
        self._capacity = capacity

    def use(self, key: bytes, nonce: bytes, *, now: float) -> None:
        """Note a nonce. Raises `Refused` if it was used before, or if too many are remembered."""
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        if (key, nonce) in self._seen:
            raise Refused("replay", "this request was sent before: sign a new one")
        if len(self._seen) >= self._capacity:
            raise Refused("overloaded", "too many requests within two minutes", retry_after_s=5)
        self._seen[key, nonce] = now + 2 * SKEW_S


def verify_request(
    headers: Mapping[str, str],
    method: str,
    target: str,
    body: bytes = b"",
    *,
    now: float,
    root: bytes,
    nonces: NonceBook | None,
    serials: SerialBook | None = None,
) -> Author:
    """Who signed this request. `target` is the raw path with its query, as received.

    `nonces` is None where the caller remembers `Author.nonce` itself. Raises `IdentityError` (no or a bad
    signature, a clock more than 60 s off, a certificate of another swarm), `Refused` (code "replay") or
    `RemoteProtocolError` (malformed headers).
    """
    claim = read_claim(headers, now=now, root=root)
    return claim.verify(
        method, target, hashlib.sha256(body).digest(), now=now, nonces=nonces, serials=serials
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """Who a request says it is from. Its certificate is the swarm's; its signature is not verified yet.

    `body_hash` is the SHA-256 that the headers give for the body, or None where they give none.
    """

    key: PublicKey
    certificate: Certificate | None
    nonce: bytes
    time: int
    signature: bytes
    body_hash: bytes | None

    @property
    def role(self) -> str:
        """ "device", or the certificate's role."""
        return "device" if self.certificate is None else self.certificate.role

    def check_body(self, body_hash: bytes) -> None:
        """Raises `IdentityError` if the headers name another SHA-256 for the body."""
        if self.body_hash is not None and self.body_hash != body_hash:
            raise IdentityError(f"the body is not the one that {BODY_HEADER} names")

    def verify(
        self,
        method: str,
        target: str,
        body_hash: bytes,
        *,
        now: float,
        nonces: NonceBook | None,
        serials: SerialBook | None = None,
    ) -> Author:
        """The author, if the signature covers a body of that SHA-256. Raises as `verify_request` does."""
        self.check_body(body_hash)
        verify(self.key, self.signature, request_message(method, target, body_hash, self.time, self.nonce))
        if serials is not None and self.certificate is not None:
            serials.accept(self.certificate)
        if nonces is not None:
            nonces.use(self.key, self.nonce, now=now)
        return Author(self.key, self.certificate, self.nonce, self.time)


def read_claim(headers: Mapping[str, str], *, now: float, root: bytes) -> Claim:
    """The signature headers of a request, before its body was read. Raises as `verify_request` does."""
    if SIGNATURE_HEADER not in headers:
        raise IdentityError("this request must be signed (Kvasir-Key, -Time, -Nonce, -Signature headers)")
    key = parse_address(headers.get(KEY_HEADER, ""))
    nonce = decode_bytes(headers.get(NONCE_HEADER, ""), NONCE_HEADER, NONCE_BYTES)
    signature = decode_bytes(headers[SIGNATURE_HEADER], SIGNATURE_HEADER, 64)
    moment = _parse_moment(headers.get(TIME_HEADER, ""))
    if abs(now - moment) > SKEW_S:
        raise IdentityError(
            f"the request's time is {abs(now - moment):.0f} s away from this side's: set the clock",
            code="expired",
        )
    named = headers.get(BODY_HEADER)
    body_hash = None if named is None else decode_bytes(named, BODY_HEADER, 32)
    certificate = _read_certificate(headers.get(CERTIFICATE_HEADER), key, root, now)
    return Claim(key, certificate, nonce, moment, signature, body_hash)


def _parse_moment(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise RemoteProtocolError(f"{TIME_HEADER} is not a Unix time in whole seconds")
    return int(text)


def _read_certificate(text: str | None, key: PublicKey, root: bytes, now: float) -> Certificate | None:
    if text is None:
        return None
    document = SignedDocument.from_bytes(decode_bytes(text, CERTIFICATE_HEADER))
    certificate = open_certificate(document, swarm=root, now=now)
    if certificate.ed25519 != key:
        raise IdentityError("the request is signed by another key than its certificate names")
    return certificate

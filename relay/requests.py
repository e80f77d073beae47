"""How a request to the market is signed, and how bytes are written in headers and JSON.

A request's signature covers method, path with query, the body's SHA-256, the time and a nonce. Verifying is
`market.requests`'. Pure: time and nonce are arguments.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from typing import Final

from .errors import RemoteProtocolError
from .identity import Certificate, SigningKey, address_of, pre_authentication

KEY_HEADER: Final = "Kvasir-Key"
TIME_HEADER: Final = "Kvasir-Time"
NONCE_HEADER: Final = "Kvasir-Nonce"
SIGNATURE_HEADER: Final = "Kvasir-Signature"
CERTIFICATE_HEADER: Final = "Kvasir-Certificate"
BODY_HEADER: Final = "Kvasir-Body"

NONCE_BYTES: Final = 16


def request_message(method: str, target: str, body_hash: bytes, time: int, nonce: bytes) -> bytes:
    """What a request's signature covers. `target` is the path with its query, `body_hash` a SHA-256."""
    lines = (method.upper(), target, body_hash.hex(), str(time), encode_bytes(nonce))
    return pre_authentication("http-request", "\n".join(lines).encode("utf-8"))


def sign_request(
    key: SigningKey,
    method: str,
    target: str,
    body: bytes = b"",
    *,
    now: float,
    nonce: bytes | None = None,
    certificate: Certificate | None = None,
) -> dict[str, str]:
    """The headers that sign a request. `target` is the path with its query, percent-encoded as sent.

    `now` is in Unix seconds; `nonce` (16 bytes) is drawn at random if None; `certificate` goes along where
    `key` is an operating key.
    """
    nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
    moment = int(now)
    body_hash = hashlib.sha256(body).digest()
    message = request_message(method, target, body_hash, moment, nonce)
    headers = {
        KEY_HEADER: address_of(key.public),
        TIME_HEADER: str(moment),
        NONCE_HEADER: encode_bytes(nonce),
        SIGNATURE_HEADER: encode_bytes(key.sign(message)),
    }
    if body:
        headers[BODY_HEADER] = encode_bytes(body_hash)
    if certificate is not None:
        headers[CERTIFICATE_HEADER] = encode_bytes(certificate.document.to_bytes())
    return headers


def encode_bytes(data: bytes) -> str:
    """URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decode_bytes(text: str, what: str, size: int | None = None) -> bytes:
    """The bytes behind `encode_bytes`. Raises `RemoteProtocolError` naming `what`."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise RemoteProtocolError(f"{what} is not URL-safe base64") from None
    if (size is not None and len(data) != size) or encode_bytes(data) != text:
        raise RemoteProtocolError(f"{what} is not {size or 'canonical'} bytes of URL-safe base64")
    return data

"""Noise KK: the handshake and transport ciphers of `Noise_KK_25519_ChaChaPoly_SHA256`, without I/O.

Both static keys are known beforehand (from the backbone's certificate and the device's grant), so one round
trip makes a session and a stranger fails at the first message:

    -> s        (pre-message)
    <- s        (pre-message)
    -> e, es, ss
    <- e, ee, se

Source: The Noise Protocol Framework, revision 34; names follow it. Handshake payloads are supported because
the published vectors need them; `session.py` refuses them. Randomness is an argument (the ephemeral key).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from .errors import LocalProtocolError, RemoteProtocolError
from .identity import ExchangeKey, ExchangePublic

PROTOCOL_NAME: Final = b"Noise_KK_25519_ChaChaPoly_SHA256"
MAX_NOISE_MESSAGE: Final = 65_535
"""Longest Noise message (section 3 of the framework)."""

TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct("<4xQ")
_MAX_NONCE: Final = (1 << 64) - 1


class CipherState:
    """One direction's key and counter. Section 5.1 of the framework."""

    __slots__ = ("_cipher", "_key", "nonce")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = ChaCha20Poly1305(key)
        self.nonce = 0

    def encrypt(self, plaintext: bytes | memoryview, ad: bytes = b"") -> bytes:
        """Seal `plaintext` under the next nonce. Raises `LocalProtocolError` once nonces are used up."""
        nonce = self.nonce
        if nonce >= _MAX_NONCE:
            raise LocalProtocolError("the cipher's nonces are used up: handshake again")
        sealed = self._cipher.encrypt(_NONCE.pack(nonce), plaintext, ad)
        self.nonce = nonce + 1
        return sealed

    def encrypt_into(self, plaintext: bytes | memoryview, buffer: memoryview) -> None:
        """Seal `plaintext` under the next nonce into `buffer`, of exactly its size and `TAG_BYTES` more."""
        nonce = self.nonce
        if nonce >= _MAX_NONCE:
            raise LocalProtocolError("the cipher's nonces are used up: handshake again")
        self._cipher.encrypt_into(_NONCE.pack(nonce), plaintext, None, buffer)
        self.nonce = nonce + 1

    def decrypt(self, ciphertext: bytes | memoryview, ad: bytes = b"") -> bytes:
        """Open the next message. Raises `RemoteProtocolError` if it is not exactly that; nothing advances."""
        nonce = self.nonce
        if nonce >= _MAX_NONCE:
            raise LocalProtocolError("the cipher's nonces are used up: handshake again")
        if not TAG_BYTES <= len(ciphertext) <= MAX_NOISE_MESSAGE:
            raise RemoteProtocolError(f"a Noise message of {len(ciphertext)} bytes")
        try:
            opened = self._cipher.decrypt(_NONCE.pack(nonce), ciphertext, ad)
        except InvalidTag:
            raise RemoteProtocolError(
                "a message does not decrypt: altered, replayed, reordered or of another session",
                code="bad_signature",
            ) from None
        self.nonce = nonce + 1
        return opened

    def rekey(self) -> None:
        """Replace the key by its one-way successor (section 4.2, REKEY); the counter goes on."""
        self._key = self._cipher.encrypt(_NONCE.pack(_MAX_NONCE), bytes(32), b"")[:32]
        self._cipher = ChaCha20Poly1305(self._key)


class HandshakeState:
    """One side of a KK handshake. Write and read in turn; then `split` gives the two directions.

    `static` is this side's key, `remote_static` the peer's, `ephemeral` a fresh key for this handshake alone.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        prologue: bytes,
        static: ExchangeKey,
        remote_static: ExchangePublic,
        ephemeral: ExchangeKey,
    ) -> None:
        self._initiator = initiator
        self._s, self._e = static, ephemeral
        self._rs, self._re = remote_static, ExchangePublic(b"")
        self._step = 0
        name = PROTOCOL_NAME
        self._h = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self._ck = self._h
        self._cipher: CipherState | None = None
        self._mix_hash(prologue)
        first, second = (static.public, remote_static) if initiator else (remote_static, static.public)
        self._mix_hash(first)
        self._mix_hash(second)

    @property
    def hash(self) -> bytes:
        """The 32-byte transcript hash; a channel binding once the handshake is complete."""
        return self._h

    @property
    def complete(self) -> bool:
        """Whether both messages have passed."""
        return self._step == 2

    def write_message(self, payload: bytes = b"") -> bytes:
        """This side's next handshake message. Raises `LocalProtocolError` out of turn."""
        self._turn(writing=True)
        self._mix_hash(self._e.public)
        if self._step == 0:
            self._mix_key(self._e.exchange(self._rs))  # es
            self._mix_key(self._s.exchange(self._rs))  # ss
        else:
            self._mix_key(self._e.exchange(self._re))  # ee
            self._mix_key(self._e.exchange(self._rs))  # se, seen by the responder
        message = self._e.public + self._encrypt_and_hash(payload)
        self._step += 1
        return message

    def read_message(self, message: bytes | memoryview) -> bytes:
        """The payload of the peer's next message.

        Raises `RemoteProtocolError` if it was not made for this handshake, `IdentityError` for an
        unusable key, `LocalProtocolError` out of turn.
        """
        self._turn(writing=False)
        if not 32 + TAG_BYTES <= len(message) <= MAX_NOISE_MESSAGE:
            raise RemoteProtocolError(f"a handshake message of {len(message)} bytes")
        self._re = ExchangePublic(bytes(message[:32]))
        self._mix_hash(self._re)
        if self._step == 0:
            self._mix_key(self._s.exchange(self._re))  # es, seen by the responder
            self._mix_key(self._s.exchange(self._rs))  # ss
        else:
            self._mix_key(self._e.exchange(self._re))  # ee
            self._mix_key(self._s.exchange(self._re))  # se
        payload = self._decrypt_and_hash(bytes(message[32:]))
        self._step += 1
        return payload

    def split(self) -> tuple[CipherState, CipherState]:
        """The ciphers for sending and for receiving. Raises `LocalProtocolError` before the end."""
        if not self.complete:
            raise LocalProtocolError("the handshake is not complete")
        first, second = _hkdf(self._ck, b"")
        pair = CipherState(first), CipherState(second)
        return pair if self._initiator else (pair[1], pair[0])

    def _turn(self, *, writing: bool) -> None:
        mine = self._initiator == (self._step == 0)
        if self.complete or mine != writing:
            raise LocalProtocolError("a handshake message out of turn")

    def _mix_hash(self, data: bytes) -> None:
        self._h = hashlib.sha256(self._h + data).digest()

    def _mix_key(self, secret: bytes) -> None:
        self._ck, key = _hkdf(self._ck, secret)
        self._cipher = CipherState(key)

    def _encrypt_and_hash(self, plaintext: bytes) -> bytes:
        assert self._cipher is not None
        sealed = self._cipher.encrypt(plaintext, self._h)
        self._mix_hash(sealed)
        return sealed

    def _decrypt_and_hash(self, sealed: bytes) -> bytes:
        assert self._cipher is not None
        opened = self._cipher.decrypt(sealed, self._h)
        self._mix_hash(sealed)
        return opened


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    """HKDF with two outputs (section 4.3)."""
    temporary = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")

"""Secure sessions between a backbone and a device, without I/O.

Theory of operation. The backbone sends an offer in clear (its certificate, the device's grant hash, a session
generation, the first Noise message); the device checks all of it against its pinned root and answers with the
second Noise message or a refusal. From then on each packet is one Noise transport message whose plaintext is
one record: a type byte and a body. The backbone sends an empty message at once; the device works only after
its first packet has decrypted, so a replayed offer starts nothing.

Knows handshake rules, records, fragmentation and rekeying. Time (`now`: Unix seconds where certificates are
checked, any steady clock elsewhere) and randomness (the ephemeral key) are arguments. A core that has raised
once stays ended.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from .errors import IdentityError, KvasirError, LocalProtocolError, Refused, RemoteProtocolError
from .identity import Certificate, ExchangeKey, ExchangePublic, PublicKey, SerialBook, open_certificate
from .messages import SessionAnswer, SessionOffer, pack_close_record, unpack_close_record
from .noise import MAX_NOISE_MESSAGE, TAG_BYTES, HandshakeState

MAX_RECORD: Final = MAX_NOISE_MESSAGE - TAG_BYTES
"""Longest plaintext record, its type byte included: 65,519 bytes."""

MAX_BODY: Final = MAX_RECORD - 1
MAX_MESSAGE: Final = 64 * 1024 * 1024
"""Longest message of a session; longer ones are refused by both sides."""

MAX_AGE_S: Final = 3600.0
"""After this a new handshake is due."""

Message = bytes | bytearray | memoryview | Sequence[bytes | memoryview]
"""One message, whole or as parts that are sent as if joined."""


class Record(IntEnum):
    """The type byte of a record."""

    LAST = 0  # the only or last part of a message
    MORE = 1  # a part of a message; more parts follow
    REKEY = 2  # the last record of its direction under the present key
    CLOSE = 3  # the session ends in order; nothing follows
    ABORT = 4  # the parts sent so far are void: their sender gave the message up


_LAST: Final = b"\0"
_MORE: Final = b"\1"
_REKEY: Final = b"\2"
_CLOSE: Final = b"\3"
_ABORT: Final = b"\4"


@dataclass(frozen=True, slots=True)
class RekeyLimits:
    """When a direction takes a new key: after so many records, bytes or seconds, whichever is first."""

    records: int = 1 << 20
    bytes: int = 1 << 30
    seconds: float = 600.0


class GenerationBook:
    """The device's memory of the last completed session generation of each backbone, by its 16-byte id."""

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}

    def check(self, backbone: bytes, generation: int) -> None:
        """Raises `Refused` (code "replay") unless `generation` is above the last completed one."""
        last = self._last.get(backbone)
        if last is not None and generation <= last:
            raise Refused("replay", f"session generation {generation} is not above {last}: handshake again")

    def complete(self, backbone: bytes, generation: int) -> None:
        """Note that a session came up. Raises as `check` does, if a newer one was faster."""
        self.check(backbone, generation)
        self._last[backbone] = generation


class GenerationClock:
    """The backbone's source of session generations: rising, and across restarts too, as time does."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, now: float) -> int:
        """A generation above every earlier one; `now` in Unix seconds."""
        self._last = max(self._last + 1, int(now * 1_000_000))
        return self._last


def prologue(root: bytes, certificate_hash: bytes, grant_hash: bytes, generation: int) -> bytes:
    """What both sides must agree on before the first key: each part behind its length as a u16."""
    parts = (b"kvasir/1", root, certificate_hash, grant_hash, struct.pack(">Q", generation))
    return b"".join(struct.pack(">H", len(part)) + part for part in parts)


class Initiator:
    """The backbone's side of a handshake. `ephemeral` is a fresh key for this handshake alone."""

    def __init__(
        self,
        *,
        certificate: Certificate,
        key: ExchangeKey,
        device_key: ExchangePublic,
        root: PublicKey,
        grant_hash: bytes,
        generation: int,
        ephemeral: ExchangeKey,
    ) -> None:
        self._certificate = certificate
        self._grant_hash = grant_hash
        self._generation = generation
        self._handshake = HandshakeState(
            initiator=True,
            prologue=prologue(root, certificate.hash, grant_hash, generation),
            static=key,
            remote_static=device_key,
            ephemeral=ephemeral,
        )

    def offer(self) -> bytes:
        """The first packet. Raises `IdentityError` for an unusable device key."""
        noise = self._handshake.write_message()
        document = self._certificate.document
        return SessionOffer(document, self._grant_hash, self._generation, noise).to_bytes()

    def receive_answer(
        self, packet: bytes | memoryview, now: float, limits: RekeyLimits | None = None
    ) -> SessionCore:
        """The session behind the device's answer.

        Raises `Refused` (the device said no), `RemoteProtocolError` or `IdentityError`.
        """
        answer = SessionAnswer.from_bytes(packet)
        if answer.refusal is not None:
            raise answer.refusal
        if self._handshake.read_message(answer.noise):
            raise RemoteProtocolError("the handshake carries a payload")
        return SessionCore(
            self._handshake, self._certificate, self._generation, now, confirmed=True, limits=limits
        )


class Responder:
    """The device's side of a handshake: one offer in, one answer out, and the session."""

    def __init__(
        self,
        *,
        key: ExchangeKey,
        root: PublicKey,
        grant_hash: bytes,
        generations: GenerationBook,
        serials: SerialBook,
        ephemeral: ExchangeKey,
    ) -> None:
        self._key, self._ephemeral = key, ephemeral
        self._root, self._grant_hash = root, grant_hash
        self._generations, self._serials = generations, serials

    def receive_offer(
        self, packet: bytes | memoryview, *, unix_now: float, now: float, limits: RekeyLimits | None = None
    ) -> tuple[bytes, SessionCore]:
        """Check an offer; the answer to send, and the session, not confirmed yet.

        `unix_now` is checked against the certificate; `now` starts the session's age. Raises
        `RemoteProtocolError`, `IdentityError` or `Refused`; send `refusal(error)` then.
        """
        offer = SessionOffer.from_bytes(packet)
        certificate = open_certificate(offer.certificate, swarm=self._root, now=unix_now, role="backbone")
        self._serials.accept(certificate)
        if offer.grant != self._grant_hash:
            raise IdentityError("the offer names another grant than this device's: fetch its grant again")
        self._generations.check(certificate.id, offer.generation)
        handshake = HandshakeState(
            initiator=False,
            prologue=prologue(self._root, certificate.hash, offer.grant, offer.generation),
            static=self._key,
            remote_static=certificate.x25519,
            ephemeral=self._ephemeral,
        )
        if handshake.read_message(offer.noise):
            raise RemoteProtocolError("the handshake carries a payload")
        answer = SessionAnswer(handshake.write_message()).to_bytes()
        core = SessionCore(handshake, certificate, offer.generation, now, confirmed=False, limits=limits)
        return answer, core

    @staticmethod
    def refusal(error: KvasirError) -> bytes:
        """The answer that tells the backbone why not."""
        return SessionAnswer(b"", Refused(error.code, error.message)).to_bytes()


class SessionCore:
    """Records, fragments and keys of one session that has shaken hands.

    To send: for each record of `records(message)`, `seal` it and put the packet on the link, in order;
    before each, if `rekey_due`, send what `seal_rekey` gives. To receive: `receive` each packet in order.
    """

    def __init__(
        self,
        handshake: HandshakeState,
        certificate: Certificate,
        generation: int,
        now: float,
        *,
        confirmed: bool,
        limits: RekeyLimits | None = None,
    ) -> None:
        self.certificate = certificate
        self.generation = generation
        self.binding = handshake.hash
        self.confirmed = confirmed
        self.peer_close: tuple[str, str] | None = None
        self._limits = limits or RekeyLimits()
        self._sending, self._receiving = handshake.split()
        self._started = now
        self._sent = _Use(now)
        self._received = _Use(now)
        self._partial = False
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._small = MAX_MESSAGE
        self._allowance: Callable[[], int] = lambda: MAX_MESSAGE
        self._ended: KvasirError | None = None

    def needs_handshake(self, now: float) -> bool:
        """Whether the session is old enough that a new one should take over."""
        return now - self._started >= MAX_AGE_S

    def bound_messages(self, small: int, allowance: Callable[[], int]) -> None:
        """Refuse messages over `small` bytes that are also over what `allowance` gives at that moment."""
        self._small, self._allowance = small, allowance

    # --- sending ---

    def pack(self, message: Message, now: float, headroom: int = 0) -> bytearray | None:
        """The one packet that carries `message`, as `seal` gives it; None where the message takes more.

        That is where it is too long for one record, or a rekey or the end of a message given up comes first.
        """
        used, limits = self._sent, self._limits
        if (
            self._partial
            or used.records >= limits.records
            or used.bytes >= limits.bytes
            or (now - used.since >= limits.seconds and used.records)
        ):
            return None
        if isinstance(message, bytes):
            record = _LAST + message
        elif isinstance(message, bytearray | memoryview):
            record = b"".join((_LAST, message))
        else:
            record = b"".join((_LAST, *message))
        size = len(record) + TAG_BYTES
        if size > MAX_NOISE_MESSAGE:
            return None
        packet = bytearray(headroom + size)
        self._sending.encrypt_into(record, memoryview(packet)[headroom:])
        used.records += 1
        used.bytes += size
        return packet

    def records(self, message: Message) -> Iterator[bytes]:
        """The plaintext records that carry `message`. Raises `LocalProtocolError` above 64 MiB.

        If an earlier message was given up between its records, the first record says so.
        """
        if self._partial:
            yield _ABORT
        parts = (message,) if isinstance(message, bytes | bytearray | memoryview) else message
        size = sum(map(len, parts))
        if size <= MAX_BODY:
            yield b"".join((_LAST, *parts))
            return
        if size > MAX_MESSAGE:
            raise LocalProtocolError(f"a message of {size} bytes is over the bound of {MAX_MESSAGE}")
        whole = memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).cast("B")
        for start in range(0, size, MAX_BODY):
            end = start + MAX_BODY
            yield b"".join((_LAST if end >= size else _MORE, whole[start:end]))

    def rekey_due(self, now: float) -> bool:
        """Whether this direction's key has served long enough: send `seal_rekey` before the next record."""
        used, limits = self._sent, self._limits
        return used.records > 0 and (
            used.records >= limits.records or used.bytes >= limits.bytes or now - used.since >= limits.seconds
        )

    def close_record(self, code: str, message: str) -> bytes:
        """The record that ends the session in order."""
        return _CLOSE + pack_close_record(code, message)

    def seal(self, record: bytes, headroom: int = 0) -> bytearray:
        """The packet of one record, behind `headroom` free bytes; it must be sent, and before any other."""
        packet = bytearray(headroom + len(record) + TAG_BYTES)
        self._sending.encrypt_into(record, memoryview(packet)[headroom:])
        used = self._sent
        used.records += 1
        used.bytes += len(packet) - headroom
        self._partial = record[0] == 1
        return packet

    def seal_rekey(self, now: float, headroom: int = 0) -> bytearray:
        """The packet that announces this direction's new key, the last under the old one."""
        packet = bytearray(headroom) + self._sending.encrypt(_REKEY)
        self._sending.rekey()
        self._sent = _Use(now)
        return packet

    # --- receiving ---

    def receive(self, packet: bytes | memoryview, now: float) -> bytes | None:
        """Take the next packet; a finished message, or None.

        After a CLOSE record `peer_close` has its code and message. Empty messages confirm a session and
        are not handed on. Raises `RemoteProtocolError`; the session is over then.
        """
        if self._ended is not None:
            raise self._ended
        try:
            record = self._receiving.decrypt(packet)
            used, limits = self._received, self._limits
            if (
                self.confirmed
                and record
                and not record[0]  # the usual: a whole message in one record
                and not self._parts
                and self.peer_close is None
                and used.records < limits.records
                and used.bytes < limits.bytes
            ):
                used.records += 1
                used.bytes += len(packet)
                return record[1:] or None
            return self._take(record, len(packet), now)
        except KvasirError as error:
            self._ended = error
            self._parts.clear()
            raise

    def _take(self, record: bytes, size: int, now: float) -> bytes | None:
        if not record or self.peer_close is not None:
            raise RemoteProtocolError("an empty record, or one after CLOSE")
        self.confirmed = True
        kind = record[0]
        if kind == Record.LAST:
            self._count(size)
            return self._finish(record)
        if kind == Record.MORE:
            self._count(size)
            self._add(record[1:])
        elif kind == Record.REKEY and len(record) == 1:
            self._receiving.rekey()
            self._received = _Use(now)
        elif kind == Record.ABORT and len(record) == 1:
            self._parts.clear()
            self._parts_bytes = 0
        elif kind == Record.CLOSE:
            self.peer_close = unpack_close_record(record[1:])
        else:
            raise RemoteProtocolError(f"a record of type {kind} with {len(record) - 1} bytes")
        return None

    def _finish(self, record: bytes) -> bytes | None:
        if not self._parts:
            return record[1:] if len(record) > 1 else None
        self._add(record[1:])
        message = b"".join(self._parts)
        self._parts.clear()
        self._parts_bytes = 0
        return message

    def _add(self, part: bytes) -> None:
        self._parts_bytes += len(part)
        if not part or self._parts_bytes > MAX_MESSAGE:
            raise RemoteProtocolError(f"an empty part, or a message over {MAX_MESSAGE} bytes")
        if self._parts_bytes > self._small and self._parts_bytes > self._allowance():
            raise RemoteProtocolError(f"a message over {self._small} bytes that nothing was asked for")
        self._parts.append(part)

    def _count(self, size: int) -> None:
        """Count a packet; a peer that never takes a new key is refused at twice the limit."""
        used, limits = self._received, self._limits
        used.records += 1
        used.bytes += size
        if used.records > 2 * limits.records or used.bytes > 2 * limits.bytes + MAX_NOISE_MESSAGE:
            raise RemoteProtocolError("the peer does not take new keys as the protocol asks")


class _Use:
    """What one direction has carried under its present key."""

    __slots__ = ("bytes", "records", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.records = 0
        self.bytes = 0

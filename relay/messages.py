"""What relays and sessions say in msgpack: a frozen dataclass for each payload, and its bytes.

Every message carries "v". A message of another version raises `Refused` naming both; one that is malformed
or out of range raises `RemoteProtocolError`. Unknown fields are ignored, so a later version of a message may
add some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .errors import CODES, Refused, RemoteProtocolError, version_refusal
from .frames import MAX_FRAME
from .identity import PROTOCOL_VERSION, PublicKey, SignedDocument, pack, require, unpack
from .tickets import PEER_ROLES, PeerRole

MAX_MESSAGE_BYTES: Final = 16_384
"""Bound on any of these payloads."""

MAX_TEXT: Final = 500
"""Longest text for a person in any of these payloads; longer ones are cut by the sender."""


def _fields(data: bytes | memoryview, what: str) -> dict[str, Any]:
    fields = unpack(data, max_bytes=MAX_MESSAGE_BYTES)
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"the {what} message is not a map")
    if fields.get("v") != PROTOCOL_VERSION:
        raise version_refusal(PROTOCOL_VERSION, fields.get("v"))
    return fields


def _pack(fields: Mapping[str, object]) -> bytes:
    return pack({"v": PROTOCOL_VERSION, **fields})


def _text(fields: Mapping[str, Any], name: str) -> str:
    return str(require(fields, name, str))[:MAX_TEXT]


def _code(fields: Mapping[str, Any], name: str = "code") -> str:
    code = require(fields, name, str)
    return code if code in CODES else "internal"


def _number(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value: int = require(fields, name, int)
    if not low <= value <= high:
        raise RemoteProtocolError(f"field {name!r} is {value}, expected {low} to {high}")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float | None:
    if fields.get(name) is None:
        return None
    value = float(require(fields, name, (int, float)))
    if not 0 <= value <= 86_400:
        raise RemoteProtocolError(f"field {name!r} is out of range")
    return value


@dataclass(frozen=True, slots=True)
class Hello:
    """HELLO, relay to client: the relay's `certificate` and a fresh 32-byte `nonce`."""

    certificate: SignedDocument
    nonce: bytes

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack({"certificate": self.certificate.to_bytes(), "nonce": self.nonce})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Hello:
        """Parse a payload."""
        fields = _fields(data, "HELLO")
        certificate = SignedDocument.from_bytes(require(fields, "certificate", bytes))
        return cls(certificate, require(fields, "nonce", bytes, size=32))


@dataclass(frozen=True, slots=True)
class Auth:
    """AUTH, client to relay: `ticket`, its start `generation`, and the subject's 64-byte `signature`."""

    ticket: SignedDocument
    generation: int
    signature: bytes

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack(
            {
                "ticket": self.ticket.to_bytes(),
                "generation": self.generation,
                "signature": self.signature,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Auth:
        """Parse a payload."""
        fields = _fields(data, "AUTH")
        ticket = SignedDocument.from_bytes(require(fields, "ticket", bytes))
        generation = _number(fields, "generation", 0, (1 << 64) - 1)
        return cls(ticket, generation, require(fields, "signature", bytes, size=64))


@dataclass(frozen=True, slots=True)
class Welcome:
    """WELCOME, relay to client: the rules of this connection, and the relay's `proof` that it is who it is.

    `ping_s` is the shortest pause between the relay's pings, `window_bytes` each circuit's window a
    direction, `max_frame` the longest frame, `peer_limit` the most circuits of this peer; `proof` is the
    relay key's signature over `tickets.welcome_message`.
    """

    ping_s: float
    window_bytes: int
    max_frame: int
    peer_limit: int
    proof: bytes

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack(
            {
                "ping_s": float(self.ping_s),
                "window_bytes": self.window_bytes,
                "max_frame": self.max_frame,
                "peer_limit": self.peer_limit,
                "proof": self.proof,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Welcome:
        """Parse a payload."""
        fields = _fields(data, "WELCOME")
        ping_s = float(require(fields, "ping_s", (int, float)))
        if not 0 < ping_s <= 3600:
            raise RemoteProtocolError("field 'ping_s' is out of range")
        return cls(
            ping_s,
            _number(fields, "window_bytes", 2 * MAX_FRAME, 1 << 30),
            _number(fields, "max_frame", 1 << 10, 1 << 24),
            _number(fields, "peer_limit", 1, 1 << 31),
            require(fields, "proof", bytes, size=64),
        )


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """REFUSED, relay to client: why, and when to come back (seconds). The relay closes after it."""

    code: str
    message: str
    retry_after_s: float | None = None

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack(
            {"code": self.code, "message": self.message[:MAX_TEXT], "retry_after_s": self.retry_after_s}
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RefusedMessage:
        """Parse a payload."""
        fields = _fields(data, "REFUSED")
        return cls(_code(fields), _text(fields, "message"), _seconds(fields, "retry_after_s"))


@dataclass(frozen=True, slots=True)
class Open:
    """OPEN, backbone to relay: a circuit to the device whose Ed25519 key is `to`."""

    to: PublicKey

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack({"to": self.to})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Open:
        """Parse a payload."""
        return cls(PublicKey(require(_fields(data, "OPEN"), "to", bytes, size=32)))


@dataclass(frozen=True, slots=True)
class Incoming:
    """INCOMING, relay to device: a circuit from the peer whose ticket names key `source` and `role`."""

    source: PublicKey
    role: PeerRole

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack({"from": self.source, "role": self.role})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Incoming:
        """Parse a payload."""
        fields = _fields(data, "INCOMING")
        role = require(fields, "role", str)
        if role not in PEER_ROLES:
            raise RemoteProtocolError(f"role {role!r} is unknown")
        return cls(PublicKey(require(fields, "from", bytes, size=32)), role)


@dataclass(frozen=True, slots=True)
class Close:
    """CLOSE, either way: the circuit has ended. `outcome` is one of `circuit.OUTCOMES`."""

    code: str
    message: str
    outcome: str

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack({"code": self.code, "message": self.message[:MAX_TEXT], "outcome": self.outcome})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Close:
        """Parse a payload. The code "closed" is an end in order; others are of `errors.CODES`."""
        fields = _fields(data, "CLOSE")
        code = "closed" if fields.get("code") == "closed" else _code(fields)
        return cls(code, _text(fields, "message"), _text(fields, "outcome"))


@dataclass(frozen=True, slots=True)
class GoAway:
    """GOAWAY, relay to client: the connection ends in order; dial again after `retry_after_s` seconds."""

    reason: str
    retry_after_s: float | None

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack({"reason": self.reason[:MAX_TEXT], "retry_after_s": self.retry_after_s})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> GoAway:
        """Parse a payload."""
        fields = _fields(data, "GOAWAY")
        return cls(_text(fields, "reason"), _seconds(fields, "retry_after_s"))


@dataclass(frozen=True, slots=True)
class Renewal:
    """TICKET, client to relay: a newer ticket of the same subject for the same relay and generation."""

    ticket: SignedDocument

    def to_bytes(self) -> bytes:
        """The payload."""
        return _pack({"ticket": self.ticket.to_bytes()})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Renewal:
        """Parse a payload."""
        return cls(SignedDocument.from_bytes(require(_fields(data, "TICKET"), "ticket", bytes)))


# --- sessions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionOffer:
    """A session's first packet, backbone to device, in clear.

    Whole `certificate`, 32-byte `grant` hash, session `generation` (u64) and the first Noise message.
    """

    certificate: SignedDocument
    grant: bytes
    generation: int
    noise: bytes

    def to_bytes(self) -> bytes:
        """The packet."""
        return _pack(
            {
                "certificate": self.certificate.to_bytes(),
                "grant": self.grant,
                "generation": self.generation,
                "noise": self.noise,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SessionOffer:
        """Parse a packet."""
        fields = _fields(data, "session offer")
        return cls(
            SignedDocument.from_bytes(require(fields, "certificate", bytes)),
            require(fields, "grant", bytes, size=32),
            _number(fields, "generation", 0, (1 << 64) - 1),
            require(fields, "noise", bytes),
        )


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """The device's reply: the second Noise message, or a refusal (then `noise` is empty)."""

    noise: bytes
    refusal: Refused | None = None

    def to_bytes(self) -> bytes:
        """The packet."""
        if self.refusal is None:
            return _pack({"noise": self.noise})
        return _pack({"refused": self.refusal.code, "message": self.refusal.message[:MAX_TEXT]})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SessionAnswer:
        """Parse a packet."""
        fields = _fields(data, "session answer")
        if "refused" in fields:
            return cls(b"", Refused(_code(fields, "refused"), _text(fields, "message")))
        return cls(require(fields, "noise", bytes))


def pack_close_record(code: str, message: str) -> bytes:
    """The body of a session's CLOSE record."""
    return _pack({"code": code, "message": message[:MAX_TEXT]})


def unpack_close_record(body: bytes | memoryview) -> tuple[str, str]:
    """Read the body of a CLOSE record: code ("closed", or one of `errors.CODES`) and message."""
    fields = _fields(body, "session CLOSE")
    code = "closed" if fields.get("code") == "closed" else _code(fields)
    return code, _text(fields, "message")

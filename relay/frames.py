"""Relay frames: one WebSocket binary message is one frame, `u8 type | u32 circuit | payload`, big endian.

Knows the framing and the caps. WebSocket messages are in `websocket.py`, what payloads mean in `messages.py`,
who may send what in `circuit.py`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from .errors import RemoteProtocolError

MAX_PACKET: Final = 65_535
"""Longest DATA payload: one Noise message."""

MAX_FRAME: Final = 66_000
"""Longest frame, header included; anything longer ends the connection."""

WINDOW_BYTES: Final = 1 << 20
"""What a circuit's sender may have outstanding in one direction, by default."""

MIN_COST: Final = 64
"""A DATA frame uses up at least this much of its circuit's window, so that tiny frames are bounded too."""

HEADER: Final = struct.Struct(">BI")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")


class FrameType(IntEnum):
    """Every type of frame. Circuit 0 means the connection itself."""

    HELLO = 1
    AUTH = 2
    WELCOME = 3
    REFUSED = 4
    OPEN = 5
    INCOMING = 6
    OPENED = 7
    DATA = 8
    CREDIT = 9
    CLOSE = 10
    BUSY = 11
    PING = 12
    PONG = 13
    GOAWAY = 14
    TICKET = 15


_TYPES: Final[dict[int, FrameType]] = {int(kind): kind for kind in FrameType}
_ON_CIRCUIT: Final = frozenset(
    {
        FrameType.OPEN,
        FrameType.INCOMING,
        FrameType.OPENED,
        FrameType.DATA,
        FrameType.CREDIT,
        FrameType.CLOSE,
        FrameType.BUSY,
    }
)


def cost(size: int) -> int:
    """What a DATA payload of `size` bytes uses up of the window."""
    return size if size > MIN_COST else MIN_COST


def encode(kind: int, circuit: int = 0, payload: bytes | memoryview = b"") -> bytes:
    """One frame's bytes."""
    return HEADER.pack(kind, circuit) + payload


def decode(frame: bytes | bytearray | memoryview) -> tuple[FrameType, int, memoryview]:
    """Split one frame into type, circuit and payload (a view, not a copy).

    Raises `RemoteProtocolError` for a partial, oversized or unknown frame, or one on the wrong circuit.
    """
    size = len(frame)
    if size < HEADER.size or size > MAX_FRAME:
        raise RemoteProtocolError(f"a frame has {HEADER.size} to {MAX_FRAME} bytes, not {size}")
    number, circuit = HEADER.unpack_from(frame)
    kind = _TYPES.get(number)
    if kind is None:
        raise RemoteProtocolError(f"frame type {number} is unknown")
    if (circuit != 0) != (kind in _ON_CIRCUIT):
        raise RemoteProtocolError(f"a {kind.name} frame does not belong on circuit {circuit}")
    if kind is FrameType.DATA and not 0 < size - HEADER.size <= MAX_PACKET:
        raise RemoteProtocolError(f"a DATA frame carries 1 to {MAX_PACKET} bytes")
    return kind, circuit, memoryview(frame)[HEADER.size :]


def encode_u32(value: int) -> bytes:
    """The payload of CREDIT and BUSY."""
    return _U32.pack(value)


def decode_u32(payload: bytes | memoryview) -> int:
    """Read the payload of CREDIT or BUSY. Raises `RemoteProtocolError` unless it is a positive u32."""
    if len(payload) != _U32.size:
        raise RemoteProtocolError("expected a payload of 4 bytes")
    value: int = _U32.unpack(payload)[0]
    if value == 0:
        raise RemoteProtocolError("an amount of zero bytes")
    return value


def encode_u64(value: int) -> bytes:
    """The payload of PING and PONG."""
    return _U64.pack(value)


def decode_u64(payload: bytes | memoryview) -> int:
    """Read the payload of PING or PONG. Raises `RemoteProtocolError` unless it has 8 bytes."""
    if len(payload) != _U64.size:
        raise RemoteProtocolError("expected a payload of 8 bytes")
    value: int = _U64.unpack(payload)[0]
    return value

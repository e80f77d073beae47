"""WebSocket messages without I/O (RFC 6455): bytes in, whole binary messages out, and the other way round.

Knows framing, masks and the protocol's own limits, for either side; no extensions. One read of a socket may
hold many messages, and one message many reads: each payload byte is copied once, and unmasked in place by
compiled code. A payload for keeps may lie behind `FRONT` free bytes, for the header with which it is written
on. What messages mean is elsewhere.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from itertools import chain
from typing import Final

from aiohttp._websocket.helpers import websocket_mask

from .errors import LocalProtocolError, RemoteProtocolError

Buffer = bytes | bytearray | memoryview
"""Bytes that are read, never changed."""

BINARY: Final = 0x2
CLOSE: Final = 0x8
PING: Final = 0x9
PONG: Final = 0xA

mask_in_place: Final[Callable[[bytes, bytearray], None]] = websocket_mask
"""Mask or unmask a payload with a 4-byte mask: aiohttp's compiled loop, or its Python where that lacks."""

FRONT: Final = 8
"""Free bytes before a payload: the size of a usual masked header. A multiple of 4, so that masking all of it
masks the payload as it should."""

_CONTINUATION: Final = 0x0
_TEXT: Final = 0x1
_WHOLE_BINARY: Final = 0x82  # final fragment, binary
_MAX_CONTROL: Final = 125
_SHORT: Final = struct.Struct(">BB")
_LONG: Final = struct.Struct(">BBQ")
_USUAL: Final = struct.Struct(">BBH0s")  # the header of a whole message of 126 to 65,535 bytes
_USUAL_MASKED: Final = struct.Struct(">BBH4s")
_MASKS_AT_ONCE: Final = 1024


class MessageReader:
    """What arrives from one peer, cut into messages.

    `deliver(payload)` is called for each binary message, `control(opcode, payload)` for close, ping and pong,
    both within `feed`. From a client (`masked`) a payload is a bytearray for keeps, behind `front` free bytes
    (0 or `FRONT`); from a server it may be a view of what was fed, valid during the call alone. `max_bytes`:
    longest message.
    """

    __slots__ = (
        "_body",
        "_control",
        "_deliver",
        "_filled",
        "_first",
        "_front",
        "_mask",
        "_masked",
        "_max_bytes",
        "_message",
        "_second",
        "_stopped",
        "_tail",
        "_unpack",
        "_usual_bytes",
    )

    def __init__(
        self,
        deliver: Callable[[bytearray | memoryview], None],
        control: Callable[[int, bytes], None],
        *,
        masked: bool,
        max_bytes: int,
        front: int = 0,
    ) -> None:
        if front not in (0, FRONT) or (front and not masked):
            raise LocalProtocolError(f"a client's payloads may lie behind {FRONT} free bytes or none")
        self._deliver, self._control = deliver, control
        self._masked, self._max_bytes, self._front = masked, max_bytes, front
        usual = _USUAL_MASKED if masked else _USUAL
        self._unpack, self._usual_bytes, self._second = usual.unpack_from, usual.size, 0xFE if masked else 126
        self._stopped = False
        self._tail = b""  # the beginning of a header
        self._body: bytearray | None = None  # a payload that is not complete yet, behind what is free
        self._filled = 0
        self._first = 0
        self._mask = b""
        self._message: bytearray | None = None  # the fragments so far of one message

    def stop(self) -> None:
        """Read nothing more, not even what has arrived."""
        self._stopped = True

    def let_go(self) -> None:
        """The end: read nothing more, and hold nobody who was given messages."""
        self._stopped = True
        self._deliver, self._control = _dropped, _dropped

    def hand_to(self, deliver: Callable[[bytearray | memoryview], None]) -> None:
        """Give messages to another from now on."""
        self._deliver = deliver

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the stream. Raises `RemoteProtocolError`; nothing more is read then."""
        stopped = self._stopped
        if stopped:
            return
        if not isinstance(data, memoryview):
            data = memoryview(data)
        position = 0
        try:
            if self._body is not None:
                position = self._fill(data)
                if self._body is not None:
                    return
            if self._tail:
                data, self._tail = memoryview(self._tail + data), b""
            end, usual_bytes, front = len(data), self._usual_bytes, self._front
            while end - position >= usual_bytes:
                first, second, size, mask = self._unpack(data, position)
                if (
                    first == _WHOLE_BINARY
                    and second == self._second
                    and 126 <= size <= self._max_bytes
                    and self._message is None
                ):
                    start = position + usual_bytes
                    position = start + size
                    if position > end:
                        self._begin(first, mask, size, data[start:])
                        return
                    if mask:
                        body = bytearray(data[start - front : position])
                        mask_in_place(mask, body)
                        self._deliver(body)
                    else:
                        self._deliver(data[start:position])
                else:
                    position = self._unusual(data, position)
                    if position < 0:
                        return
                if self._stopped:
                    return
            if position < end:
                self._rest(data, position)
        except RemoteProtocolError:
            self._stopped = True
            raise

    def _rest(self, data: memoryview, position: int) -> None:
        """Take the last bytes of a read, too few for a usual message."""
        end = len(data)
        while end - position >= 2 and not self._stopped:
            position = self._unusual(data, position)
            if position < 0:
                return
        if position < end:
            self._keep(data, position)

    def _unusual(self, data: memoryview, position: int) -> int:
        """Take one frame of any kind; where the next begins, or -1 if this one is not all here."""
        end = len(data)
        first, second = data[position], data[position + 1]
        size, start = second & 0x7F, position + 2
        if size >= 126:
            start += 2 if size == 126 else 8
            if start > end:
                return self._keep(data, position)
            size = self._long_size(size, int.from_bytes(data[position + 2 : start], "big"))
        self._check(first, size)
        if (second >= 0x80) is not self._masked:
            raise RemoteProtocolError("a malformed WebSocket message: clients mask and servers do not")
        mask = b""
        if self._masked:
            mask = bytes(data[start : start + 4])
            start += 4
            if start > end:
                return self._keep(data, position)
        if start + size > end:
            self._begin(first, mask, size, data[start:])
            return -1
        body: bytearray | memoryview = data[start : start + size]
        if self._masked:
            body = bytearray(self._front) + body
            mask_in_place(mask, body)
        self._take(first, body)
        return start + size

    def _keep(self, data: memoryview, position: int) -> int:
        """The rest is the beginning of a header."""
        self._tail = bytes(data[position:])
        return -1

    def _long_size(self, kind: int, size: int) -> int:
        if size < (126 if kind == 126 else 1 << 16):
            raise RemoteProtocolError("a malformed WebSocket message: its length is not in the shortest form")
        return size

    def _check(self, first: int, size: int) -> None:
        """Everything that first byte and size can get wrong."""
        if size > self._max_bytes:
            raise RemoteProtocolError(f"a message of {size} bytes: the bound is {self._max_bytes}")
        opcode, final = first & 0x0F, first >= 0x80
        if first & 0x70 or opcode not in (_CONTINUATION, _TEXT, BINARY, CLOSE, PING, PONG):
            raise RemoteProtocolError(f"a malformed WebSocket message: its first byte is {first:#04x}")
        if opcode >= CLOSE:
            if not final or size > _MAX_CONTROL:
                raise RemoteProtocolError("a malformed WebSocket message: a fragmented or long control frame")
        elif opcode == _TEXT:
            raise RemoteProtocolError("frames are binary messages")
        elif (opcode == _CONTINUATION) is (self._message is None):
            raise RemoteProtocolError("a malformed WebSocket message: fragments out of order")
        elif self._message is not None and len(self._message) - self._front + size > self._max_bytes:
            raise RemoteProtocolError(f"a message of more than {self._max_bytes} bytes")

    def _begin(self, first: int, mask: bytes, size: int, part: memoryview) -> None:
        """Keep the first part of a payload whose rest is still on its way."""
        front = self._front
        self._body = body = bytearray(front + size)
        self._first, self._mask, self._filled = first, mask, front + len(part)
        body[front : self._filled] = part

    def _fill(self, data: bytes | memoryview) -> int:
        """Add to the payload that is not complete; how many bytes of `data` it took."""
        body = self._body
        assert body is not None
        taken = min(len(body) - self._filled, len(data))
        body[self._filled : self._filled + taken] = data if taken == len(data) else memoryview(data)[:taken]
        self._filled += taken
        if self._filled == len(body):
            self._body = None
            if self._masked:
                mask_in_place(self._mask, body)
            self._take(self._first, body)
        return taken

    def _take(self, first: int, body: bytearray | memoryview) -> None:
        """A frame that is whole, and its payload unmasked."""
        if first == _WHOLE_BINARY:
            self._deliver(body)
            return
        opcode, payload = first & 0x0F, memoryview(body)[self._front :]
        if opcode >= CLOSE:
            self._control(opcode, bytes(payload))
            return
        if self._message is None:
            self._message = bytearray(self._front)
        self._message += payload
        if first >= 0x80:
            whole, self._message = self._message, None
            self._deliver(whole)


def _fresh_masks() -> list[bytes]:
    return [mask for (mask,) in struct.iter_unpack("4s", os.urandom(4 * _MASKS_AT_ONCE))]


class MaskSource:
    """Masking keys that cannot be foreseen (RFC 6455 section 5.3), drawn from the system many at a time.

    `next()` gives four fresh random bytes.
    """

    __slots__ = ("next",)

    def __init__(self) -> None:
        never: object = None
        self.next: Final[Callable[[], bytes]] = chain.from_iterable(iter(_fresh_masks, never)).__next__


def header(size: int, opcode: int = BINARY, mask: bytes = b"") -> bytes:
    """What goes before the `size` payload bytes of a whole message; a client gives its 4-byte `mask`."""
    masked = 0x80 if mask else 0
    if 126 <= size < 1 << 16:
        return _USUAL_MASKED.pack(0x80 | opcode, masked | 126, size, mask)[: 8 if mask else 4]
    if size < 126:
        return _SHORT.pack(0x80 | opcode, masked | size) + mask
    return _LONG.pack(0x80 | opcode, masked | 127, size) + mask


def close_payload(status: int, reason: bytes = b"") -> bytes:
    """The payload of a close frame (RFC 6455 section 5.5.1)."""
    return status.to_bytes(2, "big") + reason[: _MAX_CONTROL - 2]


def _dropped(*_: object) -> None:
    """Takes what comes after the end."""

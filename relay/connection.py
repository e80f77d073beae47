"""One peer's WebSocket as the relay sees it: writes that never wait, a bound, fair turns, and timers.

Frames go straight to the transport, so a peer that does not read delays nobody else: what it leaves is
counted and bounded, its circuits take turns, and after `write_timeout_s` without progress it is cut off.
Knows nothing of circuits but their ids.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from typing import Final

from .config import RelayConfig
from .errors import Unreachable
from .fairness import FairQueue
from .frames import HEADER, FrameType, encode
from .messages import GoAway, RefusedMessage
from .websocket import FRONT
from .wire import GOING_AWAY, NORMAL, POLICY, WRITE_HIGH, WebSocket

_ID: Final = struct.Struct(">I")
_ID_AT: Final = FRONT + 1  # where the circuit's id lies in a frame behind free bytes
_CLOSE: Final = int(FrameType.CLOSE)
_DATA: Final = int(FrameType.DATA)
_FORWARDED: Final = struct.Struct(">BBHBI")  # WebSocket header, type and circuit of a usual DATA frame
_HEADER_AT: Final = FRONT - 4

CONTROL_SLACK: Final = 1 << 20
"""Control frames that a peer may leave unread beyond its bound; then it is cut off."""


class Connection:
    """A peer's WebSocket. `outcome` says why the relay ended it, or is None while it has not."""

    def __init__(self, socket: WebSocket, address: str, config: RelayConfig) -> None:
        self.socket = socket
        self.address = address
        self.outcome: str | None = None
        self.bound = config.device_outstanding_bytes
        self.ticket_expires_at = 0
        self.rtt_s: float | None = None
        self._transport = socket.transport
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._fair = FairQueue()
        self._written = 0
        self._stall: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._ping_id = 0
        self._pinged_at: float | None = None
        self._pause: Callable[[], float] | None = None
        self._on_tick: Callable[[], None] | None = None

    # --- writing ---

    @property
    def outstanding(self) -> int:
        """Bytes that wait here for the peer's link to take them."""
        return self._transport.get_write_buffer_size() + self.socket.corked + self._fair.bytes

    def write(self, frame: bytes) -> None:
        """Write a control frame; a connection that is over drops it.

        It goes before DATA that waits, except that a CLOSE stays behind its own circuit's.
        """
        if self.outcome is not None or self.socket.end is not None:
            return
        if self.outstanding > self.bound + CONTROL_SLACK:
            self.abort("timeout")
            return
        self._written += len(frame)
        if self._fair and frame[0] == _CLOSE:
            circuit: int = _ID.unpack_from(frame, 1)[0]
            if circuit in self._fair:
                self._fair.put(circuit, bytearray(FRONT) + frame)
                return
        self.socket.write(frame)
        if self._stall is None:
            self._watch()

    def forward(self, id: int, frame: bytearray) -> bool:
        """Write a peer's DATA frame for circuit `id` here; False, and nothing written, if it is too much.

        The frame lies behind `FRONT` free bytes; it is changed (it gets this side's id) and must not be used
        again.
        """
        size, socket, transport = len(frame) - FRONT, self.socket, self._transport
        waiting = transport.get_write_buffer_size() + socket.corked
        if (
            self._fair.bytes
            or waiting + size > WRITE_HIGH
            or self.outcome is not None
            or socket.end is not None
        ):
            return self._forward_later(id, frame, waiting)
        self._written += size
        if 125 < size < 65_536:
            _FORWARDED.pack_into(frame, _HEADER_AT, 0x82, 126, size, _DATA, id)
            del frame[:_HEADER_AT]
            if socket.fresh:
                socket.fresh = False
                transport.write(frame)
            else:
                socket.cork(frame)
        else:
            _ID.pack_into(frame, _ID_AT, id)
            socket.put(frame)
        if waiting and self._stall is None:
            self._watch()
        return True

    def _forward_later(self, id: int, frame: bytearray, waiting: int) -> bool:
        """`forward` where the link is behind, or gone."""
        if self.outcome is not None or self.socket.end is not None:
            return True  # its circuits are about to end, and their peers to be told
        size = len(frame) - FRONT
        if waiting + self._fair.bytes + size - HEADER.size > self.bound:
            return False
        _ID.pack_into(frame, _ID_AT, id)
        self._written += size
        self._fair.put(id, frame)
        if not self.socket.paused:
            self.on_writable()
        if self._stall is None:
            self._watch()
        return True

    def on_writable(self) -> None:
        """The link has room: the circuits that wait take their turns."""
        fair, socket = self._fair, self.socket
        while fair and not socket.paused and socket.end is None:
            socket.put(fair.take())
            if self._transport.get_write_buffer_size() + socket.corked > WRITE_HIGH:
                socket.flush()

    def _watch(self) -> None:
        left = self.outstanding
        if self._stall is None and left:
            self._stall = self._loop.call_later(
                self._config.write_timeout_s, self._check_stall, self._written - left
            )

    def _check_stall(self, taken_before: int) -> None:
        self._stall = None
        left = self.outstanding
        if left and self._written - left <= taken_before:
            self.abort("timeout")
        else:
            self._watch()

    # --- pings ---

    def start_pings(self, pause: Callable[[], float], on_tick: Callable[[], None]) -> None:
        """Ping the peer for as long as the connection stands, `pause()` seconds apart.

        `on_tick` runs before each ping and may close the connection.
        """

        self._pause, self._on_tick = pause, on_tick
        self._tick = self._loop.call_later(pause(), self._ping)

    def _ping(self) -> None:
        if self._on_tick is not None:
            self._on_tick()
        if self.outcome is not None:
            return
        self._ping_id += 1
        self._pinged_at = time.perf_counter()  # uvloop's own time counts milliseconds only
        self._tick = self._loop.call_later(self._config.pong_timeout_s, self._check_pong)
        self.write(encode(FrameType.PING, 0, self._ping_id.to_bytes(8, "big")))

    def _check_pong(self) -> None:
        if self._pinged_at is not None:
            self.abort("timeout")
        elif self._pause is not None:
            rest = max(0.0, self._pause() - self._config.pong_timeout_s)
            self._tick = self._loop.call_later(rest, self._ping)

    def pong(self, ping_id: int) -> None:
        """The peer answered ping `ping_id`."""
        if ping_id == self._ping_id and self._pinged_at is not None:
            self.rtt_s = time.perf_counter() - self._pinged_at
            self._pinged_at = None

    # --- ending ---

    def refuse(self, code: str, message: str, retry_after_s: float | None, outcome: str) -> None:
        """Tell the peer why, and close."""
        self.write(encode(FrameType.REFUSED, 0, RefusedMessage(code, message, retry_after_s).to_bytes()))
        self._close(POLICY, outcome)

    def go_away(self, reason: str, retry_after_s: float) -> None:
        """Tell the peer that the connection will end, and when to come back."""
        self.write(encode(FrameType.GOAWAY, 0, GoAway(reason, retry_after_s).to_bytes()))

    def close(self, outcome: str) -> None:
        """Close in order."""
        self._close(GOING_AWAY if outcome == "drained" else NORMAL, outcome)

    def abort(self, outcome: str) -> None:
        """Cut the connection off: whatever waits for it is dropped."""
        if self.outcome is None:
            self.outcome = outcome
        self.stop()
        self.socket.abort(Unreachable(f"cut off ({outcome})"))

    def stop(self) -> None:
        """The connection is over; nothing of it runs or waits any more."""
        for timer in (self._stall, self._tick):
            if timer is not None:
                timer.cancel()
        self._stall = self._tick = None
        self._pause = self._on_tick = None  # they hold this connection
        self._fair.clear()

    def _close(self, status: int, outcome: str) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        while self._fair and self.socket.end is None:  # the transport has a second or two to write them
            self.socket.put(self._fair.take())
        self.stop()
        self.socket.close(status)

"""One peer's WebSocket as the relay sees it: writes that never wait, a bound, and timers.

Frames go straight to the transport behind a WebSocket header, so a peer that does not read delays nobody
else: what it leaves is counted, bounded, and after `write_timeout_s` without progress it is cut off. Knows
nothing of circuits.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final

from aiohttp import web

from .config import RelayConfig
from .frames import HEADER, FrameType, encode, websocket_header
from .messages import GoAway, RefusedMessage

_DATA_HEADER: Final = struct.Struct(">BBHBI")  # WebSocket header for 126..65535 bytes, then the frame's own
_DATA: Final = int(FrameType.DATA)
_WS_CLOSE: Final = struct.Struct(">BBH")

GOING_AWAY: Final = 1001
POLICY: Final = 1008
NORMAL: Final = 1000


class Connection:
    """A prepared WebSocket. `outcome` says why the relay ended it, or is None while it has not."""

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.Transport, address: str, config: RelayConfig
    ) -> None:
        self.socket = socket
        self.transport = transport
        self.address = address
        self.outcome: str | None = None
        self.bound = config.device_outstanding_bytes
        self.ticket_expires_at = 0
        self.rtt_s: float | None = None
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._written = 0
        self._stall: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._ping_id = 0
        self._pinged_at: float | None = None

    # --- writing ---

    @property
    def outstanding(self) -> int:
        """Bytes written here that the operating system has not taken yet."""
        return self.transport.get_write_buffer_size()

    def write(self, frame: bytes) -> None:
        """Write a control frame; a connection that is closing drops it."""
        if self.outcome is None and not self.transport.is_closing():
            header = websocket_header(len(frame))
            self._written += len(header) + len(frame)
            self.transport.write(header + frame)
            self._watch()

    def forward(self, id: int, frame: bytes) -> bool:
        """Write a peer's DATA frame for circuit `id` here; False, and nothing written, if it is too much."""
        transport = self.transport
        if self.outcome is not None or transport.is_closing():
            return True  # its circuits are about to end, and their peers to be told
        size = len(frame)
        if transport.get_write_buffer_size() + size > self.bound:
            return False
        if 126 <= size < 65_536:
            header = _DATA_HEADER.pack(0x82, 126, size, _DATA, id)
        else:
            header = websocket_header(size) + HEADER.pack(_DATA, id)
        self._written += len(header) + size - HEADER.size
        transport.writelines((header, memoryview(frame)[HEADER.size :]))
        if self._stall is None:
            self._watch()
        return True

    def _watch(self) -> None:
        if self._stall is None and self.transport.get_write_buffer_size():
            taken = self._written - self.transport.get_write_buffer_size()
            self._stall = self._loop.call_later(self._config.write_timeout_s, self._check_stall, taken)

    def _check_stall(self, taken_before: int) -> None:
        self._stall = None
        left = self.transport.get_write_buffer_size()
        if left and self._written - left <= taken_before:
            self.abort("timeout")
        else:
            self._watch()

    # --- pings ---

    def start_pings(self, pause: Callable[[], float], on_tick: Callable[[], None]) -> None:
        """Ping the peer for as long as the connection stands, `pause()` seconds apart.

        `on_tick` runs before each ping and may close the connection.
        """

        def tick() -> None:
            on_tick()
            if self.outcome is not None:
                return
            self._ping_id += 1
            self._pinged_at = self._loop.time()
            self.write(encode(FrameType.PING, 0, self._ping_id.to_bytes(8, "big")))
            self._tick = self._loop.call_later(self._config.pong_timeout_s, check)

        def check() -> None:
            if self._pinged_at is not None:
                self.abort("timeout")
                return
            rest = max(0.0, pause() - self._config.pong_timeout_s)
            self._tick = self._loop.call_later(rest, tick)

        self._tick = self._loop.call_later(pause(), tick)

    def pong(self, ping_id: int) -> None:
        """The peer answered ping `ping_id`."""
        if ping_id == self._ping_id and self._pinged_at is not None:
            self.rtt_s = self._loop.time() - self._pinged_at
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
        """Cut the connection off: whatever is still in its buffer is dropped."""
        if self.outcome is None:
            self.outcome = outcome
        self.stop_timers()
        self.transport.abort()

    def stop_timers(self) -> None:
        """The connection is over; nothing of it runs any more."""
        for timer in (self._stall, self._tick):
            if timer is not None:
                timer.cancel()
        self._stall = self._tick = None

    def _close(self, status: int, outcome: str) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.stop_timers()
        if not self.transport.is_closing():
            self.transport.write(_WS_CLOSE.pack(0x88, 2, status))
            self.transport.close()
            # A peer that does not read would keep a closing transport for ever.
            self._loop.call_later(self._config.write_timeout_s, self.transport.abort)

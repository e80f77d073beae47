"""A pair of connected sessions in memory, with the methods of `relay.transport.SecureSession`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

from relay.errors import Unreachable


class MemorySession:
    """One end. `delivered` records every message that `receive` returned; `closed_with` what `close` said.

    The queue to the other end holds `bound` messages; `send` waits while it is full.
    """

    def __init__(self, bound: int) -> None:
        self.path = "direct"
        self.delivered: list[bytes] = []
        self.closed_with: tuple[str, str] | None = None
        self.peer: MemorySession
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(bound)
        self._ended = asyncio.Event()
        self._handler: Callable[[bytes], None]
        self._reading = asyncio.Event()
        self._reading.set()

    async def send(self, message: bytes | Sequence[bytes | memoryview]) -> None:
        """Send one message. Raises `Unreachable` once either end has closed."""
        if self._ended.is_set() or self.peer._ended.is_set():
            raise Unreachable("the session has ended")
        data = message if isinstance(message, bytes) else b"".join(message)
        put = asyncio.ensure_future(self.peer._queue.put(data))
        ended = asyncio.ensure_future(self.peer._ended.wait())
        try:
            await asyncio.wait({put, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not put.done():
                raise Unreachable("the session has ended")
        finally:
            put.cancel()
            ended.cancel()

    def try_send(self, message: bytes | Sequence[bytes | memoryview]) -> bool:
        """Send one message at once, if there is room and nobody waits to send."""
        if self._ended.is_set() or self.peer._ended.is_set() or self.peer._queue.full():
            return False
        self.peer._queue.put_nowait(message if isinstance(message, bytes) else b"".join(message))
        return True

    def listen(self, handler: Callable[[bytes], None]) -> None:
        """From now on `handler` is given each message, while `ended` is awaited."""
        self._handler = handler

    def hold(self) -> None:
        """Give the handler nothing until `read_on`."""
        self._reading.clear()

    def read_on(self) -> None:
        """The end of `hold`."""
        self._reading.set()

    async def ended(self) -> NoReturn:
        """Hand messages on until the session ends. Raises why it did, or what the handler raised."""
        while True:
            message = await self.receive()
            await self._reading.wait()
            self._handler(message)

    async def receive(self) -> bytes:
        """The next message. Raises `Unreachable` after the other end has closed and all is read."""
        get = asyncio.ensure_future(self._queue.get())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({get, ended}, return_when=asyncio.FIRST_COMPLETED)
            data = get.result() if get.done() else None
        finally:
            get.cancel()
            ended.cancel()
        if data is None:
            raise Unreachable("the session has ended")
        self.delivered.append(data)
        return data

    async def close(self, code: str = "closed", message: str = "") -> None:
        """End both ends; what was sent before can still be read."""
        if self.closed_with is None:
            self.closed_with = (code, message)
        self._ended.set()
        if not self.peer._ended.is_set():
            try:
                self.peer._queue.put_nowait(None)
            except asyncio.QueueFull:
                self.peer._ended.set()


def session_pair(*, bound: int = 1024) -> tuple[MemorySession, MemorySession]:
    """(backbone's end, device's end)."""
    a, b = MemorySession(bound), MemorySession(bound)
    a.peer, b.peer = b, a
    return a, b

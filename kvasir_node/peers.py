"""One session while it is served: what its peer announced, what is in flight, what waits to be sent.

Knows a session's state and its writer. Knows no experts and no leases' contents.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from .calls import Buffers, Message, Reference, encode
from .holdings import Served

if TYPE_CHECKING:
    from .compute import Job

OUTBOX_LIMIT: Final = 256
"""Answers waiting for one session to take them; beyond it the session is not read."""

RECEIPT_LIMIT: Final = 16
"""Receipts of one session waiting to be acknowledged; beyond it the session is not read."""


class Session(Protocol):
    """What serving needs of `relay.transport.SecureSession`."""

    async def send(self, message: bytes | Sequence[bytes | memoryview]) -> None:
        """Send one message. Raises `Unreachable`."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises `Unreachable` when the session has ended."""
        ...

    async def close(self, code: str = "closed", message: str = "") -> None:
        """End the session, telling the peer why."""
        ...


class Peer:
    """One session: the references it announced, its jobs in flight, and the answers it has not taken."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.refs: dict[int, Reference] = {}
        self.jobs: set[Job] = set()
        self.served = Served()
        self.receipts: asyncio.Queue[bytes] = asyncio.Queue(RECEIPT_LIMIT)
        self.room = asyncio.Event()
        self.room.set()
        self.flushed = asyncio.Event()
        self.flushed.set()
        self._outbox: deque[Buffers] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def learn(self, refs: tuple[Reference, ...]) -> None:
        """Add, replace or take back references."""
        for reference in refs:
            if reference.epoch is None:
                self.refs.pop(reference.ref, None)
            else:
                self.refs[reference.ref] = reference

    def put(self, message: Message) -> None:
        """Queue an answer. The reader waits while too many are queued, so the queue is bounded."""
        if self._closed:
            return
        self._outbox.append(encode(message))
        self._wake.set()
        self.flushed.clear()
        if len(self._outbox) >= OUTBOX_LIMIT:
            self.room.clear()

    async def write(self) -> None:
        """Send answers as they come, until cancelled."""
        while True:
            await self._wake.wait()
            while self._outbox:
                buffers = self._outbox.popleft()
                if len(self._outbox) < OUTBOX_LIMIT:
                    self.room.set()
                await self.session.send(buffers)
            self._wake.clear()
            self.flushed.set()

    def cancel(self) -> None:
        """The session is over: nothing more is computed or sent for it."""
        self._closed = True
        self._outbox.clear()
        self.flushed.set()
        for job in self.jobs:
            job.cancel()

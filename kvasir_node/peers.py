"""One session while it is served: what its peer announced, what is in flight, what waits to be sent.

Knows a session's state and its writer. Knows no experts and no leases' contents.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

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

    def try_send(self, message: bytes | Sequence[bytes | memoryview]) -> bool:
        """Send one message at once, or return False: only `send` can, and may have to wait."""
        ...

    def listen(self, handler: Callable[[bytes], None]) -> None:
        """From now on `handler` is given each message as it arrives."""
        ...

    def hold(self) -> None:
        """Give the handler nothing until `read_on`."""
        ...

    def read_on(self) -> None:
        """The end of `hold`."""
        ...

    async def ended(self) -> NoReturn:
        """Wait for the end. Raises what the handler raised, or `Unreachable`."""
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
        self.flushed = asyncio.Event()
        self.flushed.set()
        self._outbox: deque[Buffers] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._full: set[str] = set()  # what has no room, so that the session is not read

    @property
    def has_room(self) -> bool:
        """Whether the session is read."""
        return not self._full

    def hold(self, what: str) -> None:
        """`what` has no room: read nothing more of the session."""
        self._full.add(what)
        self.session.hold()

    def read_on(self, what: str) -> None:
        """`what` has room again."""
        if what in self._full:
            self._full.remove(what)
            if not self._full:
                self.session.read_on()

    def learn(self, refs: tuple[Reference, ...]) -> None:
        """Add, replace or take back references."""
        for reference in refs:
            if reference.epoch is None:
                self.refs.pop(reference.ref, None)
            else:
                self.refs[reference.ref] = reference

    def put(self, message: Message) -> None:
        """Send an answer, or queue it. The session is not read while too many are queued."""
        if self._closed:
            return
        buffers = encode(message)
        if self.flushed.is_set() and self.session.try_send(buffers):
            return
        self._outbox.append(buffers)
        self._wake.set()
        self.flushed.clear()
        if len(self._outbox) >= OUTBOX_LIMIT:
            self.hold("answers")

    async def write(self) -> None:
        """Send answers as they come, until cancelled."""
        while True:
            await self._wake.wait()
            while self._outbox:
                buffers = self._outbox.popleft()
                if len(self._outbox) < OUTBOX_LIMIT:
                    self.read_on("answers")
                await self.session.send(buffers)
            self._wake.clear()
            self.flushed.set()

    def cancel_call(self, call: int) -> None:
        """The peer waits for this call no more; one that is not in flight is no harm."""
        for job in self.jobs:
            if job.call.id == call:
                job.cancel()

    def cancel(self) -> None:
        """The session is over: nothing more is computed or sent for it."""
        self._closed = True
        self._outbox.clear()
        self.flushed.set()
        for job in self.jobs:
            job.cancel()

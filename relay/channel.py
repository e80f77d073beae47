"""What a session runs over: an ordered, reliable, bounded link of packets to one peer.

Knows queues, windows and deadlines; not what packets mean, nor how they travel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from .errors import KvasirError, Unreachable
from .frames import cost
from .identity import PublicKey
from .websocket import Buffer

Path = Literal["relay", "direct"]
"""How packets travel: through a relay, or straight to the peer."""

Packet = bytes | memoryview
"""What arrives, to be read."""


class Channel(Protocol):
    """A link to one peer, for packets of 1 to 65,535 bytes.

    `peer` is who the relay says it is; a session proves it. Packets come by `receive`, one task at a time,
    or, once attached, to a callback. `reserve` and `put` belong together and to one task at a time (a session
    holds a lock over both).
    """

    @property
    def peer(self) -> PublicKey:
        """The peer's Ed25519 key (32 bytes); empty where only the session will tell."""

    @property
    def path(self) -> Path:
        """How packets travel."""

    @property
    def headroom(self) -> int:
        """Bytes that `put` wants free in front of a packet."""

    def room(self, size: int) -> bool:
        """Whether a packet of `size` bytes may be put now, without waiting."""

    def put(self, packet: bytearray) -> None:
        """Write a packet for which there is room; it lies behind `headroom` free bytes and is changed.

        Raises `Unreachable` at the end of the link.
        """

    async def reserve(self, size: int) -> None:
        """Wait until there is room for a packet of `size` bytes; cancelling it changes nothing.

        Raises `Unreachable` at the end of the link, and (code "busy") at its deadline.
        """

    async def send(self, packet: Buffer) -> None:
        """`reserve` and `put`."""

    async def receive(self) -> Packet:
        """The next packet. Raises `Unreachable` (the message has the reason) when there are no more."""

    def attach(self, take: Callable[[Packet], None], on_end: Callable[[Unreachable], None]) -> None:
        """From now on `take` is given each packet as it arrives, those that wait first.

        What `take` is given is valid during the call alone. A `KvasirError` that it raises ends the link.
        `on_end` runs once, when no more come. Who attaches says what is `consumed`.
        """

    def consumed(self, cost: int) -> None:
        """Packets of that cost (see `frames.cost`) wait here no longer: the peer may send as much more."""

    def end(self, code: str = "closed", message: str = "") -> None:
        """End the link and tell the peer; again, or after it ended, does nothing."""

    async def close(self, code: str = "closed", message: str = "") -> None:
        """`end`, and wait for what a link has to do for it."""


class Inbox:
    """Packets that have arrived and wait for their one reader; the writer keeps the bound."""

    __slots__ = ("_end", "_packets", "_waiter")

    def __init__(self) -> None:
        self._packets: deque[Packet] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._end: KvasirError | None = None

    @property
    def end(self) -> KvasirError | None:
        """Why no more packets come, once that is so."""
        return self._end

    def take_all(self) -> list[Packet]:
        """What waits, which waits no longer."""
        waiting = list(self._packets)
        self._packets.clear()
        return waiting

    def put(self, packet: Packet) -> None:
        """Add a packet; after `finish` it is dropped."""
        if self._end is None:
            self._packets.append(packet)
            self._wake()

    def finish(self, error: KvasirError) -> None:
        """No more packets come; those that are here can still be read. The first reason stays."""
        if self._end is None:
            self._end = error
            self._wake()

    async def get(self) -> Packet:
        """The next packet, waiting for it. Raises `Unreachable` once all are read and no more come."""
        while not self._packets:
            if self._end is not None:
                raise Unreachable(str(self._end), code=self._end.code)
            assert self._waiter is None, "a channel has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._packets.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SendWindow:
    """How much may still be sent on a circuit (`left`, bytes); waits for more under a deadline."""

    __slots__ = ("_end", "_waiter", "left")

    def __init__(self, size: int) -> None:
        self.left = size
        self._waiter: asyncio.Future[None] | None = None
        self._end: KvasirError | None = None

    def add(self, amount: int) -> None:
        """The peer has consumed `amount` bytes."""
        if self._end is None:
            self.left += amount
            self._wake()

    def finish(self, error: KvasirError) -> None:
        """Nothing more may be sent."""
        if self._end is None:
            self._end = error
            self.left = 0
            self._wake()

    def fits(self, size: int) -> bool:
        """Whether a packet of `size` bytes fits now."""
        return self.left >= cost(size) and self._end is None

    def take(self, size: int) -> None:
        """Use up what a packet of `size` bytes costs."""
        self.left -= cost(size)

    async def wait(self, size: int, timeout: float) -> None:
        """Return once a packet of `size` bytes fits. Raises `Unreachable` at the end or after `timeout` s."""
        if self.fits(size):
            return
        try:
            async with asyncio.timeout(timeout):
                while self._end is None and self.left < cost(size):
                    assert self._waiter is None, "a channel has one writer"
                    self._waiter = asyncio.get_running_loop().create_future()
                    try:
                        await self._waiter
                    finally:
                        self._waiter = None
        except TimeoutError:
            raise Unreachable(f"the peer has not read for {timeout:g} s", code="busy") from None
        if self._end is not None:
            raise Unreachable(str(self._end), code=self._end.code)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

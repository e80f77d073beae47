"""A pair of channels in memory: what one side writes, the other receives; every packet is on record."""

from __future__ import annotations

from collections.abc import Callable

from relay.channel import Inbox, Path, SendWindow
from relay.errors import Unreachable
from relay.frames import WINDOW_BYTES, cost
from relay.identity import PublicKey


class FakeChannel:
    """One end of a memory link; a `relay.channel.Channel`.

    `sent` records every packet written. `tamper`, if set, maps each packet to the packets that arrive in its
    place, so that a test may alter, drop, repeat or reorder them.
    """

    path: Path = "direct"

    def __init__(self, peer: PublicKey, window: int = WINDOW_BYTES, timeout: float = 5.0) -> None:
        self.peer = peer
        self.sent: list[bytes] = []
        self.tamper: Callable[[bytes], list[bytes]] | None = None
        self.other: FakeChannel
        self._inbox = Inbox()
        self._window = SendWindow(window)
        self._timeout = timeout

    async def reserve(self, size: int) -> None:
        await self._window.wait(size, self._timeout)

    async def write(self, packet: bytes) -> None:
        if self._inbox.end is not None:
            raise Unreachable(str(self._inbox.end))
        self._window.take(len(packet))
        self.sent.append(packet)
        for arriving in [packet] if self.tamper is None else self.tamper(packet):
            self.other._inbox.put(arriving)

    async def send(self, packet: bytes) -> None:
        await self.reserve(len(packet))
        await self.write(packet)

    async def receive(self) -> bytes:
        packet = await self._inbox.get()
        self.other._window.add(cost(len(packet)))
        return packet

    async def close(self, code: str = "closed", message: str = "") -> None:
        self.cut(Unreachable(message or "closed", code=None if code == "closed" else code))

    def cut(self, error: Unreachable | None = None) -> None:
        """End the link both ways; packets that have arrived can still be read."""
        error = error or Unreachable("the link was cut")
        for side in (self, self.other):
            side._inbox.finish(error)
            side._window.finish(error)


def channel_pair(
    first: bytes = b"\1" * 32, second: bytes = b"\2" * 32, *, window: int = WINDOW_BYTES
) -> tuple[FakeChannel, FakeChannel]:
    """Two ends of one link: that of `first` (its `peer` is `second`), and the other way round."""
    left, right = FakeChannel(PublicKey(second), window), FakeChannel(PublicKey(first), window)
    left.other, right.other = right, left
    return left, right

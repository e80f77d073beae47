"""A pair of channels in memory: what one side writes, the other receives; every packet is on record."""

from __future__ import annotations

from collections.abc import Callable

from relay.channel import Inbox, Packet, Path, SendWindow
from relay.errors import KvasirError, Unreachable
from relay.frames import WINDOW_BYTES, cost
from relay.identity import PublicKey
from relay.websocket import Buffer


class FakeChannel:
    """One end of a memory link; a `relay.channel.Channel`.

    `sent` records every packet written. `tamper`, if set, maps each packet to the packets that arrive in its
    place, so that a test may alter, drop, repeat or reorder them.
    """

    path: Path = "direct"
    headroom = 0

    def __init__(self, peer: PublicKey, window: int = WINDOW_BYTES, timeout: float = 5.0) -> None:
        self.peer = peer
        self.sent: list[bytes] = []
        self.tamper: Callable[[bytes], list[bytes]] | None = None
        self.other: FakeChannel
        self._inbox = Inbox()
        self._window = SendWindow(window)
        self._timeout = timeout
        self._take: Callable[[Packet], None] | None = None
        self._on_end: Callable[[Unreachable], None] | None = None

    def room(self, size: int) -> bool:
        return self._window.fits(size)

    def put(self, packet: bytearray) -> None:
        if self._inbox.end is not None:
            raise Unreachable(str(self._inbox.end))
        self._window.take(len(packet))
        self.sent.append(bytes(packet))
        for arriving in [bytes(packet)] if self.tamper is None else self.tamper(bytes(packet)):
            self.other._arrived(arriving)

    async def reserve(self, size: int) -> None:
        await self._window.wait(size, self._timeout)

    async def send(self, packet: Buffer) -> None:
        await self.reserve(len(packet))
        self.put(bytearray(packet))

    async def receive(self) -> Packet:
        packet = await self._inbox.get()
        self.consumed(cost(len(packet)))
        return packet

    def attach(self, take: Callable[[Packet], None], on_end: Callable[[Unreachable], None]) -> None:
        self._take, self._on_end = take, on_end
        for packet in self._inbox.take_all():
            self._arrived(packet)
        if self._inbox.end is not None:
            on_end(Unreachable(str(self._inbox.end), code=self._inbox.end.code))

    def consumed(self, cost: int) -> None:
        self.other._window.add(cost)

    def _arrived(self, packet: Packet) -> None:
        if self._take is None:
            self._inbox.put(packet)
        elif self._inbox.end is None:
            try:
                self._take(packet)
            except KvasirError as error:
                self.end(error.code, "the session was broken")

    async def close(self, code: str = "closed", message: str = "") -> None:
        self.end(code, message)

    def end(self, code: str = "closed", message: str = "") -> None:
        self.cut(Unreachable(message or "closed", code=None if code == "closed" else code))

    def cut(self, error: Unreachable | None = None) -> None:
        """End the link both ways; packets that have arrived can still be read."""
        error = error or Unreachable("the link was cut")
        for side in (self, self.other):
            side._inbox.finish(error)
            side._window.finish(error)
            if side._on_end is not None:
                on_end, side._on_end = side._on_end, None
                on_end(error)


def channel_pair(
    first: bytes = b"\1" * 32, second: bytes = b"\2" * 32, *, window: int = WINDOW_BYTES
) -> tuple[FakeChannel, FakeChannel]:
    """Two ends of one link: that of `first` (its `peer` is `second`), and the other way round."""
    left, right = FakeChannel(PublicKey(second), window), FakeChannel(PublicKey(first), window)
    left.other, right.other = right, left
    return left, right

"""One connection to a relay that is up, and the circuits it carries, as its client sees them.

`Link` is the socket with its rules; `RelayChannel` is one circuit, a `Channel`. The link's reader (in
`transport.py`) fills each channel's inbox and never waits for it: the credit window bounds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from .channel import Inbox, Packet, Path, SendWindow
from .config import TransportConfig
from .errors import KvasirError, Unreachable
from .frames import HEADER, MIN_COST, FrameType, cost, encode, encode_u32
from .identity import PublicKey, SignedDocument
from .messages import Close, GoAway, Welcome
from .websocket import FRONT, Buffer
from .wire import WebSocket

_DATA: Final = int(FrameType.DATA)
_BEFORE_DATA: Final = FRONT + HEADER.size


class RelayChannel:
    """One circuit through a relay; a `Channel`."""

    path: Path = "relay"
    headroom: Final = FRONT + HEADER.size

    def __init__(self, link: Link, id: int, peer: PublicKey) -> None:
        self.peer = peer
        self.id = id
        self._link = link
        self._socket = link.socket
        self._inbox = Inbox()
        self._window = SendWindow(link.window_bytes)
        self._take: Callable[[Packet], None] | None = None
        self._on_end: Callable[[Unreachable], None] | None = None
        self._granted = link.window_bytes  # what the peer may still send
        self._consumed = 0  # read here, not granted anew yet
        self._threshold = link.window_bytes // 2
        self._over = False

    # --- sending ---

    def room(self, size: int) -> bool:
        """See `Channel.room`."""
        return self._window.left >= size + MIN_COST and not self._socket.paused

    def put(self, packet: bytearray) -> None:
        """See `Channel.put`."""
        HEADER.pack_into(packet, FRONT, _DATA, self.id)
        size = len(packet) - _BEFORE_DATA
        self._window.left -= size if size > MIN_COST else MIN_COST
        self._socket.put(packet)

    async def reserve(self, size: int) -> None:
        """See `Channel.reserve`."""
        timeout = self._link.config.send_timeout_s
        while True:
            await self._window.wait(size, timeout)
            if not self._link.socket.paused:
                return
            try:
                async with asyncio.timeout(timeout):
                    await self._link.socket.drain()
            except TimeoutError:
                raise Unreachable(f"the relay has not read for {timeout:g} s", code="busy") from None

    async def send(self, packet: Buffer) -> None:
        """See `Channel.send`."""
        await self.reserve(len(packet))
        self.put(bytearray(self.headroom) + packet)

    # --- receiving ---

    async def receive(self) -> Packet:
        """See `Channel.receive`."""
        packet = await self._inbox.get()
        self.consumed(cost(len(packet)))
        return packet

    def attach(self, take: Callable[[Packet], None], on_end: Callable[[Unreachable], None]) -> None:
        """See `Channel.attach`."""
        self._take, self._on_end = take, on_end
        try:
            for packet in self._inbox.take_all():
                take(packet)
        except KvasirError as error:
            self.end(error.code, "the session was broken")
        if self._inbox.end is not None:
            self.ended(self._inbox.end)

    def consumed(self, cost: int) -> None:
        """See `Channel.consumed`. Told to the peer once half of the window is consumed."""
        self._consumed += cost
        if self._consumed >= self._threshold and not self._over and self._link.socket.end is None:
            amount, self._consumed = self._consumed, 0
            self._granted += amount
            self._link.write(encode(FrameType.CREDIT, self.id, encode_u32(amount)))

    def arrived(self, packet: memoryview) -> bool:
        """The link has read a packet for this channel; False if its sender went over the window.

        The packet is valid during this call alone.
        """
        size = len(packet)
        self._granted -= size if size > MIN_COST else MIN_COST
        if self._granted < 0:
            return False
        if self._take is None:
            self._inbox.put(bytes(packet))
        elif not self._over:
            try:
                self._take(packet)
            except KvasirError as error:
                self.end(error.code, "the session was broken")
        return True

    def credited(self, amount: int) -> None:
        """The peer consumed `amount` bytes."""
        self._window.add(amount)

    # --- the end ---

    async def close(self, code: str = "closed", message: str = "") -> None:
        """See `Channel.close`."""
        self.end(code, message)

    def end(self, code: str = "closed", message: str = "") -> None:
        """See `Channel.end`."""
        if self._inbox.end is not None:
            return
        self.ended(Unreachable(message or "closed by this side", code=None if code == "closed" else code))
        self._link.forget(self.id)
        outcome = {"closed": "closed", "draining": "drained"}.get(code, "refused")
        try:
            self._link.write(encode(FrameType.CLOSE, self.id, Close(code, message, outcome).to_bytes()))
        except Unreachable:
            return

    def ended(self, error: KvasirError) -> None:
        """No more either way, because of `error`; what has arrived can still be read."""
        self._over = True
        self._inbox.finish(error)
        self._window.finish(error)
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(Unreachable(str(error), code=error.code))


class Link:
    """One connection that is up: its socket, its rules and its channels."""

    def __init__(
        self,
        socket: WebSocket,
        welcome: Welcome,
        key: PublicKey,
        ticket: SignedDocument,
        config: TransportConfig,
    ) -> None:
        self.socket = socket
        self.welcome = welcome
        self.key = key
        self.ticket = ticket
        self.config = config
        self.window_bytes = welcome.window_bytes
        self.channels: dict[int, RelayChannel] = {}
        self.opening: dict[int, asyncio.Future[None]] = {}
        self.goaway: GoAway | None = None
        self.pong: asyncio.Event = asyncio.Event()
        self.ping_id = 0
        self._next_id = 1

    def write(self, frame: bytes) -> None:
        """Write a control frame. Raises `Unreachable`."""
        self.socket.write(frame)

    def take_id(self) -> int:
        """The next odd circuit id."""
        id, self._next_id = self._next_id, self._next_id + 2
        return id

    def forget(self, id: int) -> None:
        """A channel ended here; frames still on their way to it are dropped."""
        self.channels.pop(id, None)

    def lost(self, error: KvasirError) -> None:
        """The connection ended: so do all channels."""
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.ended(error)
        for waiting in self.opening.values():
            if not waiting.done():
                waiting.set_exception(Unreachable(str(error)))

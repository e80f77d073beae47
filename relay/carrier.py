"""One connection to a relay that is up, and the circuits it carries, as its client sees them.

`Link` is the socket with its rules; `RelayChannel` is one circuit, a `Channel`. The link's reader (in
`transport.py`) fills each channel's inbox and never waits for it: the credit window bounds it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from .channel import Inbox, Packet, Path, SendWindow
from .config import TransportConfig
from .errors import KvasirError, Unreachable
from .frames import HEADER, FrameType, cost, encode, encode_u32
from .identity import PublicKey, SignedDocument
from .messages import Close, GoAway, Welcome
from .websocket import Buffer
from .wire import WebSocket

_DATA: Final = int(FrameType.DATA)


class RelayChannel:
    """One circuit through a relay; a `Channel`."""

    path: Path = "relay"

    def __init__(self, link: Link, id: int, peer: PublicKey) -> None:
        self.peer = peer
        self.id = id
        self._link = link
        self._header = HEADER.pack(_DATA, id)
        self._inbox = Inbox()
        self._window = SendWindow(link.window_bytes)
        self._granted = link.window_bytes  # what the peer may still send
        self._consumed = 0  # read here, not granted anew yet
        self._threshold = link.window_bytes // 4

    async def reserve(self, size: int) -> None:
        """See `Channel.reserve`."""
        await self._window.wait(size, self._link.config.send_timeout_s)

    async def write(self, packet: Buffer) -> None:
        """See `Channel.write`."""
        self._window.take(len(packet))
        socket = self._link.socket
        socket.write(self._header, packet)
        if socket.paused:
            await socket.drain()

    async def send(self, packet: Buffer) -> None:
        """See `Channel.send`."""
        await self.reserve(len(packet))
        await self.write(packet)

    async def receive(self) -> Packet:
        """See `Channel.receive`."""
        if self._consumed >= self._threshold and self._inbox.end is None:
            amount, self._consumed = self._consumed, 0
            self._granted += amount
            self._link.write(encode(FrameType.CREDIT, self.id, encode_u32(amount)))
        packet = await self._inbox.get()
        self._consumed += cost(len(packet))
        return packet

    async def close(self, code: str = "closed", message: str = "") -> None:
        """See `Channel.close`."""
        self.end(code, message)

    def end(self, code: str, message: str) -> None:
        """`close`, which has nothing to wait for here."""
        if self._inbox.end is not None:
            return
        self.ended(Unreachable(message or "closed by this side", code=None if code == "closed" else code))
        self._link.forget(self.id)
        outcome = {"closed": "closed", "draining": "drained"}.get(code, "refused")
        try:
            self._link.write(encode(FrameType.CLOSE, self.id, Close(code, message, outcome).to_bytes()))
        except Unreachable:
            return

    def arrived(self, packet: Packet) -> bool:
        """The link has read a packet for this channel; False if its sender went over the window."""
        self._granted -= cost(len(packet))
        if self._granted < 0:
            return False
        self._inbox.put(packet)
        return True

    def credited(self, amount: int) -> None:
        """The peer consumed `amount` bytes."""
        self._window.add(amount)

    def ended(self, error: KvasirError) -> None:
        """No more either way, because of `error`; what has arrived can still be read."""
        self._inbox.finish(error)
        self._window.finish(error)


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

"""The direct path: a session's packets over a WebSocket straight to a device that can be reached.

One binary message is one packet; TCP bounds what is outstanding, WebSocket pings notice a dead link. Who the
peer is only the session tells, so `DirectChannel.peer` is whom the dialler meant, and empty on the listening
side. Knows nothing of what packets mean.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import structlog
from aiohttp import web

from .channel import Channel, Packet, Path
from .circuit import Admission, Rules
from .errors import ConfigError, KvasirError, Refused, RemoteProtocolError, Unreachable
from .frames import MAX_PACKET, WINDOW_BYTES, cost
from .identity import PublicKey
from .websocket import FRONT, Buffer
from .wire import NORMAL, POLICY, WebSocket, accept, dial

SESSION_PATH: Final = "/session/v1"
HEARTBEAT_S: Final = 15.0
"""Pause between WebSocket pings; the answer must come within half of it."""

SILENCE_S: Final = 0.2
"""After a packet was put and nothing came for so long, the link is asked whether it is there."""

WATCH_S: Final = 10.0
"""How long after the last packet that goes on."""

CUT_S: Final = 0.5
"""How long what was sent may stay unacknowledged before the link counts as cut."""

UNREAD_BYTES: Final = WINDOW_BYTES
"""What may wait for a session's reader before the link is not read any more."""

SEND_TIMEOUT_S: Final = 10.0
"""How long a sender waits for a peer that does not read."""

log = structlog.get_logger("relay")


class DirectChannel:
    """A `Channel` over one WebSocket of either side."""

    path: Path = "direct"
    headroom: Final = FRONT

    def __init__(self, socket: WebSocket, peer: PublicKey) -> None:
        self.peer = peer
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[Packet], None] | None = None
        self._unread = 0  # cost of what was given to `_take` and is not consumed
        self._answered = True
        socket.watch_pongs(self._pong)
        self._timer = self._loop.call_later(HEARTBEAT_S, self._heartbeat)
        self._watch: asyncio.TimerHandle | None = None
        self._put_at = 0.0
        _notice_cuts(socket)

    # --- sending ---

    def room(self, size: int) -> bool:
        """See `Channel.room`. TCP bounds what is outstanding."""
        return not self._socket.paused and self._socket.end is None

    def put(self, packet: bytearray) -> None:
        """See `Channel.put`."""
        self._socket.put(packet)
        self._put_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(SILENCE_S, self._listen_in, self._socket.bytes_read)

    async def reserve(self, size: int) -> None:
        """See `Channel.reserve`. A peer that does not read is `busy`."""
        socket = self._socket
        if socket.paused and socket.end is None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await socket.drain()
            except TimeoutError:
                raise Unreachable(f"the peer has not read for {SEND_TIMEOUT_S:g} s", code="busy") from None
        if socket.end is not None:
            raise Unreachable(str(socket.end), code=socket.end.code)

    async def send(self, packet: Buffer) -> None:
        """See `Channel.send`."""
        await self.reserve(len(packet))
        self.put(bytearray(FRONT) + packet)

    # --- receiving ---

    async def receive(self) -> Packet:
        """See `Channel.receive`."""
        try:
            packet = await self._socket.receive()
        except KvasirError as error:
            raise self._ended(error) from None
        if not packet:
            self.end("bad_request")
            raise Unreachable("the direct link broke: something else than a packet came")
        return memoryview(packet)

    def attach(self, take: Callable[[Packet], None], on_end: Callable[[Unreachable], None]) -> None:
        """See `Channel.attach`."""
        self._take = take
        self._socket.attach(self._arrived, on_end=lambda error: on_end(self._ended(error)))

    def consumed(self, cost: int) -> None:
        """See `Channel.consumed`: reading goes on once half of `UNREAD_BYTES` is consumed."""
        self._unread -= cost
        if self._unread < UNREAD_BYTES // 2:
            self._socket.read_on()

    def _arrived(self, packet: bytearray | memoryview) -> None:
        if not packet:
            raise RemoteProtocolError("the direct link broke: something else than a packet came")
        assert self._take is not None
        self._unread += cost(len(packet))
        if self._unread > UNREAD_BYTES:
            self._socket.hold()
        self._take(memoryview(packet))

    # --- the end ---

    async def close(self, code: str = "closed", message: str = "") -> None:
        """See `Channel.close`."""
        self.end(code, message)

    def end(self, code: str = "closed", message: str = "") -> None:
        """See `Channel.end`. The reason travels as a WebSocket close code and text (RFC 6455)."""
        self._stop()
        if self._socket.end is None:
            self._socket.close(NORMAL if code == "closed" else POLICY, code.encode())

    def _ended(self, error: KvasirError) -> Unreachable:
        self._stop()
        return Unreachable(f"the direct link ended: {error}", code=error.code)

    def _stop(self) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _listen_in(self, read_before: int) -> None:
        """Something was put a moment ago. If nothing has come since, ask: what asks must be acknowledged."""
        self._watch = None
        socket = self._socket
        now = self._loop.time()
        if socket.end is not None or now - self._put_at > WATCH_S:
            return
        if socket.bytes_read == read_before:
            socket.ping()
        self._watch = self._loop.call_later(SILENCE_S, self._listen_in, socket.bytes_read)

    def _heartbeat(self) -> None:
        if self._socket.end is not None:
            return
        if not self._answered:
            self._socket.abort(Unreachable("the peer answers no pings"))
            return
        self._answered = False
        self._socket.ping()
        self._timer = self._loop.call_later(HEARTBEAT_S / 2, self._heartbeat)

    def _pong(self) -> None:
        if not self._answered:
            self._answered = True
            self._timer.cancel()
            self._timer = self._loop.call_later(HEARTBEAT_S, self._heartbeat)


def _notice_cuts(socket: WebSocket) -> None:
    """Have the system end the link once what was sent stays unacknowledged for `CUT_S` (Linux)."""
    raw = socket.transport.get_extra_info("socket")
    if raw is not None and hasattr(sockets, "TCP_USER_TIMEOUT"):
        raw.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, int(CUT_S * 1000))


def session_endpoint(url: str) -> str:
    """The WebSocket address of a device's listener at `url` (http or https). Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a device's address: it looks like http://HOST:PORT")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") + SESSION_PATH, "", ""))


async def connect_direct(
    url: str, peer: PublicKey, *, http: aiohttp.ClientSession, timeout: float
) -> DirectChannel:
    """Dial the device `peer` at `url`. Raises `Unreachable` within `timeout` seconds, or `ConfigError`."""
    endpoint = session_endpoint(url)
    try:
        async with asyncio.timeout(timeout):
            return DirectChannel(await dial(http, endpoint, max_bytes=MAX_PACKET), peer)
    except TimeoutError:
        raise Unreachable(f"{url} did not answer within {timeout:g} s") from None
    except Refused as error:
        raise Unreachable(f"cannot reach {url}: {error}", code=error.code) from None


class DirectListener:
    """Takes direct links and hands each to `on_channel`, which serves it to its end and may raise."""

    def __init__(
        self, on_channel: Callable[[Channel], Awaitable[None]], *, rules: Rules | None = None
    ) -> None:
        self._on_channel = on_channel
        self._admission = Admission(rules or Rules(connections=256, address_connections=16))
        self._open: set[DirectChannel] = set()

    @property
    def routes(self) -> list[web.RouteDef]:
        """The listener's one route."""
        return [web.get(SESSION_PATH, self._handle, allow_head=False)]

    def attach(self, app: web.Application) -> None:
        """Mount it in `app`; open links are closed when that shuts down."""
        app.router.add_routes(self.routes)

        async def close(_: web.Application) -> None:
            for channel in list(self._open):
                await channel.close("draining", "this device is going away")

        app.on_shutdown.append(close)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        address = request.remote or "unknown"
        try:
            self._admission.enter(address)
        except Refused as error:
            return web.json_response({"error": {"code": error.code, "message": error.message}}, status=429)
        try:
            response, socket = await accept(request, max_bytes=MAX_PACKET)
            await self._serve(DirectChannel(socket, PublicKey(b"")), address)
            await socket.lost
            return response
        finally:
            self._admission.leave(address)

    async def _serve(self, channel: DirectChannel, address: str) -> None:
        """The one boundary of a link: whatever its handler raises ends this link alone."""
        self._open.add(channel)
        code = "closed"
        try:
            await self._on_channel(channel)
        except (KvasirError, OSError) as error:
            code = error.code if isinstance(error, KvasirError) else "internal"
            log.info("link.failed", address=address, code=code, reason=str(error))
        except Exception:
            code = "internal"
            log.exception("link.crashed", address=address)
        finally:
            self._open.discard(channel)
            await channel.close(code)

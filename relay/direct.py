"""The direct path: a session's packets over a WebSocket straight to a device that can be reached.

One binary message is one packet; TCP bounds what is outstanding, WebSocket pings notice a dead link. Who the
peer is only the session tells, so `DirectChannel.peer` is whom the dialler meant, and empty on the listening
side. Knows nothing of what packets mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import structlog
from aiohttp import WSMsgType, web

from .channel import Channel, Path
from .circuit import Admission, Rules
from .errors import ConfigError, KvasirError, Refused, Unreachable
from .frames import MAX_PACKET
from .identity import PublicKey

SESSION_PATH: Final = "/session/v1"
HEARTBEAT_S: Final = 15.0
"""Pause between WebSocket pings; the answer must come within half of it."""

CLOSE_S: Final = 2.0
_LOST: Final = (aiohttp.ClientError, OSError, RuntimeError)  # RuntimeError: the socket is closed already

log = structlog.get_logger("relay")


class DirectChannel:
    """A `Channel` over one WebSocket of either side."""

    path: Path = "direct"

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse, peer: PublicKey
    ) -> None:
        self.peer = peer
        self._socket: Any = socket  # both sides' sockets have the few methods used here
        self._end: Unreachable | None = None

    async def reserve(self, size: int) -> None:
        """See `Channel.reserve`: TCP holds the writer back in `write`."""
        if self._end is not None:
            raise self._end

    async def write(self, packet: bytes) -> None:
        """See `Channel.write`."""
        try:
            await self._socket.send_bytes(packet)
        except _LOST as error:
            raise self._lost(f"the direct link is gone: {error}") from None

    async def send(self, packet: bytes) -> None:
        """See `Channel.send`."""
        await self.reserve(len(packet))
        await self.write(packet)

    async def receive(self) -> bytes:
        """See `Channel.receive`."""
        if self._end is not None:
            raise self._end
        try:
            message = await self._socket.receive()
        except _LOST as error:
            raise self._lost(f"the direct link is gone: {error}") from None
        if message.type is WSMsgType.BINARY and message.data:
            packet: bytes = message.data
            return packet
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            raise self._lost("the peer closed the direct link")
        await self.close("bad_request")
        raise self._lost("the direct link broke: something else than a packet came")

    async def close(self, code: str = "closed", message: str = "") -> None:
        """See `Channel.close`. The reason travels as a WebSocket close code and text (RFC 6455)."""
        if self._end is None:
            self._lost(message or "closed by this side")
        status = aiohttp.WSCloseCode.OK if code == "closed" else aiohttp.WSCloseCode.POLICY_VIOLATION
        await self._socket.close(code=status, message=code.encode())

    def _lost(self, reason: str) -> Unreachable:
        if self._end is None:
            self._end = Unreachable(reason)
        return self._end


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
            socket = await http.ws_connect(
                endpoint,
                max_msg_size=MAX_PACKET + 1,  # aiohttp refuses what reaches its bound
                compress=0,
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
    except TimeoutError:
        raise Unreachable(f"{url} did not answer within {timeout:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"cannot reach {url}: {error}") from None
    return DirectChannel(socket, peer)


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
            socket = web.WebSocketResponse(
                max_msg_size=MAX_PACKET + 1, compress=False, heartbeat=HEARTBEAT_S, timeout=CLOSE_S
            )
            await socket.prepare(request)
            await self._serve(DirectChannel(socket, PublicKey(b"")), address)
            return socket
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

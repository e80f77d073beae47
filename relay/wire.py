"""One WebSocket connection, either side, without tasks: messages in by a callback, writes straight out.

Theory of operation. aiohttp carries the HTTP request that asks for the upgrade (TLS, proxies, redirects and
headers are its business). Then `accept` and `dial` take the transport over: what it reads goes through a
`MessageReader` to a handler within the same call, and what is written goes to it behind a header, so a frame
crosses a relay without a task, a queue or a lock. The first message after something was read is written at
once; those that follow it within one turn of the event loop are written together at its end, in one system
call. Until a handler is attached, messages wait for `receive`, and reading pauses while many do.

Knows nothing of what messages mean.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import aiohttp
import structlog
from aiohttp import web

from .errors import KvasirError, Refused, RemoteProtocolError, Unreachable
from .websocket import (
    BINARY,
    CLOSE,
    FRONT,
    PING,
    PONG,
    Buffer,
    MaskSource,
    MessageReader,
    close_payload,
    header,
    mask_in_place,
)

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
POLICY: Final = 1008

WRITE_HIGH: Final = 256 * 1024
"""Bytes the transport may hold before writers are asked to wait; also what it writes in one system call."""

QUEUE_HIGH: Final = 1 << 20
"""Bytes that may wait for `receive` before reading pauses."""

CLOSE_GRACE_S: Final = 2.0
"""How long a closing connection may take to write what is left."""

CORK_BYTES: Final = 128 * 1024
"""Bytes of messages that are written together in the middle of a turn of the event loop."""

CORK_PIECES: Final = 512
"""Pieces that one system call writes, at most."""

TURN_BYTES: Final = 1 << 20
"""What one connection may hand on before the others get their turn."""

READ_BYTES: Final = 256 * 1024
"""Most bytes of one read."""

Handler = Callable[[bytearray | memoryview], None]
"""Takes one message; a view is valid during the call alone."""

_TURN, _QUEUE, _OWNER = 1, 2, 4  # why reading pauses
_USUAL: Final = struct.Struct(">BBH")  # the header of a whole binary message of 126 to 65,535 bytes
_USUAL_MASKED: Final = struct.Struct(">BBH4s")
_ACCEPT_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

_next_mask = MaskSource().next
_local = threading.local()
log = structlog.get_logger("relay")


class _Scratch(dict[int, memoryview]):
    """One buffer, whatever size is hinted at: `__getitem__` gives it without a call of Python code."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        super().__init__({-1: self.buffer, 65_536: self.buffer})  # what asyncio and uvloop hint at

    def __missing__(self, hint: int) -> memoryview:
        return self.buffer


def _scratch() -> _Scratch:
    """This thread's read buffer: what is read is handed on before anything else can read."""
    found = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = _Scratch()
    assert isinstance(found, _Scratch)
    return found


class WebSocket(asyncio.BufferedProtocol):
    """A connection after its upgrade. `end` is why it is over, or None; `status` the peer's close code.

    `bytes_read` counts all that came. `paused`: the transport holds so much that writers should wait.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        client: bool,
        max_bytes: int,
        release: Callable[[Exception | None], None],
        front: int = 0,
    ) -> None:
        self.transport = transport
        self.end: KvasirError | None = None
        self.status: int | None = None
        self._client = client
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader(
            self._arrived, self._control, masked=not client, max_bytes=max_bytes, front=front
        )
        self._handler: Handler | None = None
        self._on_error: Callable[[Exception], None] | None = None
        self._on_end: Callable[[KvasirError], None] | None = None
        self._on_pong: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._queue: deque[bytes | bytearray] = deque()
        scratch = _scratch()
        self._scratch = scratch.buffer
        self.get_buffer = scratch.__getitem__  # type: ignore[method-assign, assignment]
        """See `asyncio.BufferedProtocol`: all connections of a thread read into one buffer, in turn."""
        self._queued = 0
        self._waiter: asyncio.Future[None] | None = None
        self.paused = False
        self.corked = 0  # bytes of messages that wait for the end of the loop's turn
        self._corked: list[Buffer] = []
        self._turning = False
        self.fresh = True  # the next message is written at once, and nothing waits
        self._writable: list[asyncio.Future[None]] = []
        self.bytes_read = 0
        self._turn_ends = TURN_BYTES
        self._held = 0  # why reading pauses, as bits
        self._closing: asyncio.TimerHandle | None = None
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done once the transport is gone."""

    # --- reading ---

    def attach(
        self,
        handler: Handler,
        *,
        on_error: Callable[[Exception], None] | None = None,
        on_end: Callable[[KvasirError], None] | None = None,
        on_writable: Callable[[], None] | None = None,
    ) -> None:
        """From now on `handler` takes each message as it arrives, those that wait first.

        `on_error` is told what the handler raised, or what the peer's bytes broke, while it can still be
        answered; nothing more is read, and the connection closes. `on_end` runs once, at the end, with the
        reason; `on_writable` whenever there is room to write again.
        """
        self._handler, self._on_error, self._on_end = handler, on_error, on_end
        self._on_writable = on_writable
        self._reader.hand_to(handler)
        waiting, self._queue = self._queue, deque()
        self._queued = 0
        try:
            while waiting and self.end is None:
                message = waiting.popleft()
                handler(message if isinstance(message, bytearray) else memoryview(message))
        except Exception as error:
            self._failed(error)
        self._read_on(_QUEUE)
        if self.lost.done() or (self.end is not None and self._closing is not None):
            self._finish(Unreachable("the connection was closed"))

    def watch_pongs(self, on_pong: Callable[[], None]) -> None:
        """Have `on_pong` run at each WebSocket pong."""
        self._on_pong = on_pong

    async def receive(self) -> bytes | bytearray:
        """The next message, while no handler is attached. Raises why there are no more."""
        while not self._queue:
            if self.end is not None:
                raise self.end
            assert self._waiter is None, "a connection has one reader"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._queue.popleft()
        self._queued -= len(message)
        if self._queued < QUEUE_HIGH // 2:
            self._read_on(_QUEUE)
        return message

    def take(self, data: bytes) -> None:
        """Take what was read before the connection became this."""
        try:
            self._reader.feed(data)
        except Exception as error:
            self._failed(error)

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        if self.end is not None:
            return
        self.fresh = not self.corked
        self.bytes_read += nbytes
        if self.bytes_read > self._turn_ends and self._handler is not None:
            self._turn_ends = self.bytes_read + TURN_BYTES
            self._hold(_TURN)
            self._loop.call_soon(self._read_on, _TURN)
        try:
            self._reader.feed(self._scratch[:nbytes])
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """The boundary of this peer: whatever its bytes set off ends this connection alone."""
        self._reader.stop()
        if self._on_error is not None:
            self._on_error(error)
        elif not isinstance(error, KvasirError):
            log.error("peer.crashed", exc_info=error)
        if self.end is None:
            self._finish(
                error
                if isinstance(error, KvasirError)
                else RemoteProtocolError("an internal error", code="internal")
            )
            self.close(POLICY)

    def _arrived(self, message: bytearray | memoryview) -> None:
        """Let a message wait for `receive`."""
        self._queue.append(message if isinstance(message, bytearray) else bytes(message))
        self._queued += len(message)
        if self._queued > QUEUE_HIGH:
            self._hold(_QUEUE)
        self._wake()

    def hold(self) -> None:
        """Read nothing more until `read_on`; what was read already is still handed on."""
        self._hold(_OWNER)

    def read_on(self) -> None:
        """The end of `hold`."""
        self._read_on(_OWNER)

    def _hold(self, reason: int) -> None:
        if not self._held and not self.transport.is_closing():
            self.transport.pause_reading()
        self._held |= reason

    def _read_on(self, reason: int) -> None:
        if self._held:
            self._held &= ~reason
            if not self._held and not self.transport.is_closing():
                self.transport.resume_reading()

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            self._write(PONG, payload)
        elif opcode == PONG:
            if self._on_pong is not None:
                self._on_pong()
        elif opcode == CLOSE:
            self.status = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
            self.close(self.status if self.status != 1005 else NORMAL)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- writing ---

    def write(self, message: bytes) -> None:
        """Write one binary message. Raises `Unreachable` once the connection is over."""
        self.put(bytearray(FRONT) + message)

    def put(self, packet: bytearray) -> None:
        """Write the message behind `FRONT` free bytes of `packet`, which is changed and not to be used again.

        Raises `Unreachable` once the connection is over.
        """
        if self.end is not None:
            raise Unreachable(str(self.end), code=self.end.code)
        size = len(packet) - FRONT
        if not 125 < size < 65_536:
            self._put_unusual(packet, size)
            return
        data: bytearray | memoryview = packet
        if self._client:
            mask = _next_mask()
            mask_in_place(mask, packet)
            _USUAL_MASKED.pack_into(packet, 0, 0x82, 0xFE, size, mask)
        else:
            _USUAL.pack_into(packet, 4, 0x82, 126, size)
            data = memoryview(packet)[4:]
        if self.fresh:
            self.fresh = False
            self.transport.write(data)
        else:
            self.cork(data)

    def _put_unusual(self, packet: bytearray, size: int) -> None:
        """`put` where the header has another size than usual."""
        mask = b""
        if self._client:
            mask = _next_mask()
            mask_in_place(mask, packet)
        head = header(size, BINARY, mask)
        if len(head) > FRONT:
            self.cork(head)
            self.cork(memoryview(packet)[FRONT:])
            return
        start = FRONT - len(head)
        packet[start:FRONT] = head
        if self.fresh:
            self.fresh = False
            self.transport.write(memoryview(packet)[start:])
        else:
            self.cork(memoryview(packet)[start:])

    def cork(self, data: Buffer) -> None:
        """Write `data` at the end of the loop's turn, or once there is enough to write."""
        self.fresh = False
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn_ended)
        self._corked.append(data)
        self.corked += len(data)
        if self.corked >= CORK_BYTES or len(self._corked) >= CORK_PIECES:
            self.flush()

    def _turn_ended(self) -> None:
        self._turning = False
        self.flush()
        self.fresh = True

    def flush(self) -> None:
        """Hand all to the transport that was written so far."""
        if self.corked:
            corked, self._corked, self.corked = self._corked, [], 0
            if len(corked) == 1:
                self.transport.write(corked[0])
            else:
                self.transport.writelines(corked)

    async def drain(self) -> None:
        """Return once the transport has room. Raises `Unreachable` if the connection ends before."""
        while self.paused and self.end is None:
            waiter = self._loop.create_future()
            self._writable.append(waiter)
            await waiter
        if self.end is not None:
            raise Unreachable(str(self.end), code=self.end.code)

    def ping(self) -> None:
        """Send a WebSocket ping; a connection that is over drops it."""
        if self.end is None:
            self._write(PING, b"")

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self.paused = True

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self.paused = False
        self._release_writers()
        if self._on_writable is not None:
            self._on_writable()

    def _release_writers(self) -> None:
        waiting, self._writable = self._writable, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _write(self, opcode: int, payload: bytes) -> None:
        if self.transport.is_closing():
            return
        self.flush()
        mask, body = b"", bytearray(payload)
        if self._client:
            mask = _next_mask()
            mask_in_place(mask, body)
        self.transport.write(header(len(body), opcode, mask) + body)

    # --- the end ---

    def close(self, status: int = NORMAL, reason: bytes = b"") -> None:
        """Close in order: what was written is still sent, for `CLOSE_GRACE_S` at most."""
        if not self.transport.is_closing():
            self._write(CLOSE, close_payload(status, reason))
            self.transport.close()
            self._closing = self._loop.call_later(CLOSE_GRACE_S, self.transport.abort)
        self._finish(Unreachable("the connection was closed"))

    def abort(self, error: KvasirError | None = None) -> None:
        """Cut the connection off; what waits to be written is dropped. `on_end` runs a little later."""
        if self.end is None:
            self.end = error or Unreachable("the connection was cut off")
            self._reader.stop()
        self._drop()
        self.transport.abort()

    def _drop(self) -> None:
        """Forget what waits for the end of the turn."""
        self._corked.clear()
        self.corked = 0

    def eof_received(self) -> bool:
        """See `asyncio.BaseProtocol`: half of a connection is none."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._closing is not None:
            self._closing.cancel()
        self._drop()
        self._finish(Unreachable(f"the connection was lost: {exc}" if exc else "the connection was closed"))
        if not self.lost.done():
            self.lost.set_result(None)
        release, self._release = self._release, _nothing
        # Whoever attached holds this socket, mostly: let go, or each waits for the collector of cycles.
        self._handler = self._on_error = self._on_writable = self._on_pong = None
        self._reader.let_go()
        release(exc)

    async def wait_closed(self) -> None:
        """Return once the transport is gone."""
        await asyncio.shield(self.lost)

    def _finish(self, error: KvasirError) -> None:
        if self.end is None:
            self.end = error
            self._reader.stop()
        self._wake()
        self._release_writers()
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self.end)


def _nothing(_: object) -> None:
    """Nobody is told."""


class _Rest:
    """Takes what aiohttp has read beyond the upgrade; it wants a parser's methods."""

    def __init__(self) -> None:
        self.data = b""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        pass

    def set_exception(self, *_: object) -> None:
        pass


def _take_over(
    transport: asyncio.Transport, protocol: Any, socket_of: Callable[[Callable[[Any], None]], WebSocket]
) -> WebSocket:
    """Put a WebSocket in the place of aiohttp's `protocol`, which is told of the end of the connection."""
    rest = _Rest()
    if isinstance(protocol, aiohttp.client_proto.ResponseHandler):
        protocol.set_parser(rest, rest)
    else:
        protocol.set_parser(rest)
    before = transport.get_protocol()
    assert before is not None
    socket = socket_of(before.connection_lost)
    transport.pause_reading()  # event loops look at the kind of protocol when reading starts
    transport.set_protocol(socket)
    transport.resume_reading()
    transport.set_write_buffer_limits(high=WRITE_HIGH)
    if rest.data:
        socket.take(rest.data)
    return socket


async def accept(
    request: web.Request, *, max_bytes: int, front: int = 0
) -> tuple[web.StreamResponse, WebSocket]:
    """Answer a request for an upgrade; the response for the handler to return at the end, and the socket.

    `front`: free bytes before each message that the socket hands on, 0 or `websocket.FRONT`.
    Raises `web.HTTPException` for a request that is none, and `Unreachable` if the peer is gone already.
    """
    key = request.headers.get("Sec-WebSocket-Key", "")
    if (
        request.headers.get("Upgrade", "").strip().lower() != "websocket"
        or "upgrade" not in request.headers.get("Connection", "").lower()
        or request.headers.get("Sec-WebSocket-Version") != "13"
        or len(key) != 24
    ):
        raise web.HTTPUpgradeRequired(
            text="this address speaks WebSocket (RFC 6455), version 13\n",
            headers={"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"},
        )
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": _accept_of(key)}
    response = web.StreamResponse(status=101, headers=headers)
    await response.prepare(request)
    transport = request.transport
    if transport is None or transport.is_closing():
        raise Unreachable("the peer left during its upgrade")

    def make(lost: Callable[[Any], None]) -> WebSocket:
        return WebSocket(transport, client=False, max_bytes=max_bytes, release=lost, front=front)

    return response, _take_over(transport, request.protocol, make)


async def dial(http: aiohttp.ClientSession, url: str, *, max_bytes: int) -> WebSocket:
    """Ask the server at `url` for an upgrade.

    Raises `Refused` (HTTP 429 and 503, with their Retry-After) or `Unreachable`. The caller has a deadline.
    """
    key = base64.b64encode(os.urandom(16)).decode()
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
    }
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        response = await http.request(  # a redirect is a refusal: who is asked is the caller's choice alone
            "GET", url, headers=headers, read_until_eof=False, timeout=timeout, allow_redirects=False
        )
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"cannot reach {url}: {error}") from None
    connection = response.connection
    if (
        response.status != 101
        or connection is None
        or response.headers.get("Upgrade", "").lower() != "websocket"
        or response.headers.get("Sec-WebSocket-Accept") != _accept_of(key)
    ):
        response.close()
        raise _http_refusal(url, response.status, response.headers.get("Retry-After", ""))
    transport = cast(asyncio.Transport, connection.transport)
    protocol = connection.protocol

    def make(lost: Callable[[Any], None]) -> WebSocket:
        def release(exc: Exception | None) -> None:
            lost(exc)
            response.close()

        return WebSocket(transport, client=True, max_bytes=max_bytes, release=release)

    if transport is None or transport.is_closing():
        response.close()
        raise Unreachable(f"{url} closed the connection at once")
    return _take_over(transport, protocol, make)


def _accept_of(key: str) -> str:
    return base64.b64encode(hashlib.sha1(key.encode() + _ACCEPT_GUID).digest()).decode()


def _http_refusal(url: str, status: int, after: str) -> KvasirError:
    """What an HTTP status in place of a WebSocket means."""
    retry_after = min(3600.0, float(after)) if after.isdigit() else None
    if status == 429:
        return Refused(
            "quota", f"{url} has too many connections from here (HTTP status 429)", retry_after_s=retry_after
        )
    if status == 503:
        return Refused(
            "overloaded", f"{url} takes no connections now (HTTP status 503)", retry_after_s=retry_after
        )
    if status == 101:
        return RemoteProtocolError(f"{url} answered the upgrade with a wrong key")
    return Unreachable(f"{url} takes no WebSocket: it answered with HTTP status {status}")


__all__ = ["BINARY", "GOING_AWAY", "NORMAL", "POLICY", "WebSocket", "accept", "dial"]

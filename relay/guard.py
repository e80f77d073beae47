"""A listener that bounds connections before their first request: how many, and how long they dawdle.

aiohttp counts nothing before it has a request, so 10,000 connections that say nothing, or say it a byte a
minute, would cost a relay its file descriptors. `ListenerGuard` stands between the listening socket and any
`web.AppRunner`: it admits by address, cuts off what has not sent the head of a request in time, and is out of
the way afterwards. Knows nothing of relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, cast

import structlog
from aiohttp import web

from .addresses import Network, client_address, quota_key
from .circuit import Admission, Rules
from .errors import Refused

HEAD_S: Final = 10.0
"""How long a connection may take for the head of its first request."""

HEAD_BYTES: Final = 32_768
"""Longest head; aiohttp's own bounds on lines and fields are stricter."""

REFUSAL: Final = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 30\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)

log = structlog.get_logger("relay")


RESERVED_DESCRIPTORS: Final = 256
"""Descriptors that a daemon needs for its files, databases and own connections."""


def bounded_rules(rules: Rules | None = None, descriptors: int | None = None) -> Rules:
    """`rules`, with no more connections than a process with so many `descriptors` can have.

    Three quarters of the descriptors at most, half of that for one address: connections alone cannot use them
    up. `descriptors` None: what the system allows this process.
    """
    rules = rules or Rules()
    descriptors = descriptor_limit() if descriptors is None else descriptors
    if descriptors is None:
        return rules
    room = max(16, min(descriptors - RESERVED_DESCRIPTORS, descriptors // 2 + descriptors // 4))
    return replace(
        rules,
        connections=min(rules.connections, room),
        address_connections=min(rules.address_connections, max(8, room // 2)),
    )


def descriptor_limit() -> int | None:
    """How many files and sockets this process may have open, or None where the system has no such bound."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process have so many files and sockets open, as far as the system's hard limit allows it."""
    try:
        import resource
    except ImportError:  # Windows has no such bound
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class ListenerGuard:
    """Bounds on the connections of one listener. `refused` counts those not let in, by code."""

    def __init__(
        self, rules: Rules | None = None, *, trusted: Sequence[Network] = (), head_s: float = HEAD_S
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._admission = Admission(rules or Rules())
        self._trusted = tuple(trusted)
        self._head_s = head_s

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return self._admission.total

    async def listen(
        self,
        runner: web.AppRunner,
        *,
        host: str | None = None,
        port: int = 0,
        sock: sockets.socket | None = None,
        backlog: int = 1024,
    ) -> asyncio.Server:
        """Listen for `runner`, which has been set up; at `host` and `port`, or on `sock`. Raises `OSError`.

        The caller closes the server before it cleans up the runner.
        """
        server = runner.server
        assert server is not None, "set the runner up first"
        make = cast(Callable[[], asyncio.Protocol], server)

        def protocol() -> asyncio.Protocol:
            return _Guarded(self, make)

        loop = asyncio.get_running_loop()
        if sock is not None:
            return await loop.create_server(protocol, sock=sock, backlog=backlog)
        return await loop.create_server(protocol, host, port, backlog=backlog)

    def enter(self, remote: str) -> str | None:
        """Count a connection; what to `leave` later, None for a trusted proxy's. Raises `Refused`."""
        if self._trusted and client_address(remote, ("0.0.0.0",), self._trusted) == "0.0.0.0":
            return None  # it speaks for many; its clients are counted by their requests
        address = quota_key(remote)
        try:
            self._admission.enter(address)
        except Refused as error:
            self.refused[error.code] += 1
            raise
        return address

    def leave(self, address: str | None) -> None:
        """A counted connection ended."""
        if address is not None:
            self._admission.leave(address)

    def dawdled(self) -> None:
        """A connection was cut off before its first request."""
        self.refused["expired"] += 1


class _Guarded(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, once it is let in."""

    __slots__ = ("_address", "_deadline", "_guard", "_inner", "_make", "_seen", "_size", "_transport")

    def __init__(self, guard: ListenerGuard, make: Callable[[], asyncio.Protocol]) -> None:
        self._guard, self._make = guard, make
        self._inner: asyncio.Protocol | None = None
        self._address: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._seen = b""  # the last bytes of a head that is not complete
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        try:
            self._address = self._guard.enter(peer[0] if peer else "unknown")
        except Refused:
            stream = cast(asyncio.WriteTransport, transport)
            stream.write(REFUSAL)
            stream.close()
            return
        self._inner = self._make()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._guard._head_s, self._cut_off)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None:
            self._watch_head(data)
        if self._inner is not None:
            self._inner.data_received(data)

    def _watch_head(self, data: bytes) -> None:
        self._size += len(data)
        if b"\r\n\r\n" in self._seen + data:
            assert self._deadline is not None
            self._deadline.cancel()
            self._deadline, self._seen = None, b""
        elif self._size > HEAD_BYTES:
            self._cut_off()
        else:
            self._seen = (self._seen + data)[-3:]

    def _cut_off(self) -> None:
        self._guard.dawdled()
        cast(asyncio.WriteTransport, self._transport).abort()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else False

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._inner is not None:
            self._guard.leave(self._address)
            self._inner.connection_lost(exc)

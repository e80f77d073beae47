"""Where this node can be dialled directly: a listener, its addresses, and their announcement on the LAN.

By default the listener is on a free port of every interface, or of loopback alone where the market is on this
machine; where the owner wants it, the router is asked for a port that leads there (`mapping`). The addresses
go to the market with each heartbeat, and by multicast DNS to the LAN. They only say where to try: whoever
connects must be a certified backbone of the swarm, or the handshake ends it, and that costs a few bounds'
worth of connections at most.

Knows sockets and interfaces. What happens on a link is `circuits`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from random import Random
from typing import Final

import psutil
import structlog
from aiohttp import web

from relay import discovery
from relay.channel import Channel
from relay.circuit import Rules
from relay.direct import DirectListener
from relay.errors import ConfigError, KvasirError
from relay.guard import ListenerGuard
from relay.identity import PublicKey

from . import mapping
from .config import NodeConfig, parse_endpoint
from .mapping import PortMapper

log = structlog.get_logger("node")

MAX_ADDRESSES: Final = 8
"""Addresses announced; a backbone tries a few of them."""

RULES: Final = Rules(connections=256, address_connections=32)
"""Connections to the listener, in all and from one address."""

LOOK_S: Final = 10.0
"""How often the announcement is compared with the addresses that there are."""


class Listener:
    """The node's own door. An asynchronous context; without `--no-direct` it is open inside.

    `on_channel` serves each link to its end; `key` is the device's. `local`: the market is on this machine.
    Raises `ConfigError` if the address that the owner named cannot be listened on.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        on_channel: Callable[[Channel], Awaitable[None]],
        key: PublicKey,
        local: bool,
    ) -> None:
        self._config = config
        self._key = key
        self._local = local
        self._links = DirectListener(on_channel, rules=RULES)
        self._guard = ListenerGuard(RULES)
        self._stack = contextlib.AsyncExitStack()
        self._host = ""
        self._mapper: PortMapper | None = None
        self.port = 0
        """The TCP port, once it listens."""

    async def __aenter__(self) -> Listener:
        if not self._config.direct:
            return self
        if self._config.upnp and not mapping.available():
            raise ConfigError("--upnp needs async-upnp-client: pip install 'kvasir[upnp]'")
        try:
            await self._listen()
        except OSError as error:
            await self._stack.aclose()
            if self._config.listen:
                raise ConfigError(
                    f"cannot listen on {self._config.listen} ({error.strerror or error}): change --listen"
                ) from None
            log.warning("listener.unavailable", reason=str(error))
            return self
        log.info("listener.opened", port=self.port, addresses=self.addresses())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.port = 0
        await self._stack.aclose()

    def addresses(self) -> tuple[str, ...]:
        """URLs at which a backbone may try to dial this node now; none without a listener."""
        if not self.port:
            return ()
        urls = [_url(address, self.port) for address in self._own()]
        if self._mapper is not None and self._mapper.url:
            urls.insert(0, self._mapper.url)
        if self._config.public_address:
            urls.insert(0, f"http://{self._config.public_address}")
        return tuple(dict.fromkeys(urls))[:MAX_ADDRESSES]

    def _own(self) -> list[str]:
        """The addresses that the listener has now."""
        if not ip_address(self._host).is_unspecified:
            return [self._host]
        versions = {4} if self._host == "0.0.0.0" else {4, 6}
        return [text for text in interface_addresses() if ip_address(text).version in versions]

    async def _listen(self) -> None:
        sock = self._socket()
        self._stack.callback(sock.close)
        app = web.Application()
        self._links.attach(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        server = await self._guard.listen(runner, sock=sock, backlog=128)
        self._stack.callback(server.close)
        self._host, self.port = sock.getsockname()[:2]

    def _socket(self) -> socket.socket:
        """The listening socket. Raises `OSError`."""
        if self._config.listen:
            host, port = parse_endpoint(self._config.listen)
            return _bound(host, port)
        if self._local:
            return _bound("127.0.0.1", 0)
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return _bound("::", 0)
        return _bound("0.0.0.0", 0)

    async def map_port(self, rng: Random, target: tuple[str, int] | None = None) -> None:
        """Have the router open a port for the listener, until cancelled, where the owner wants that.

        `target` as in `mapping.PortMapper`.
        """
        if not self._config.upnp or self._local or not self.port:
            return
        self._mapper = PortMapper(port=self.port, rng=rng, target=target)
        await self._mapper.run()

    async def announce(self) -> None:
        """Say on the LAN where this node is, until cancelled; again whenever its addresses have changed.

        Needs `zeroconf`, a listener and a LAN; returns at once where one of them is not there.
        """
        if self._local or not self.port or not discovery.available():
            return
        while True:
            near = self._near()
            try:
                async with discovery.Announcer(self._key, self.port, near):
                    while self._near() == near:  # noqa: ASYNC110 - no event tells of interfaces
                        await asyncio.sleep(LOOK_S)
            except (KvasirError, OSError) as error:
                log.warning("discovery.unavailable", reason=str(error))
                return

    def _near(self) -> list[str]:
        return [text for text in self._own() if not ip_address(text).is_loopback]


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to `host`; one for :: takes IPv4 too. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def interface_addresses() -> list[str]:
    """This machine's addresses that others on its networks may dial; IPv4 first."""
    found = []
    up = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in up and not up[name].isup:
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            with contextlib.suppress(ValueError):
                address = ip_address(entry.address)
                if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                    found.append(str(address))
    return sorted(dict.fromkeys(found), key=lambda text: ":" in text)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

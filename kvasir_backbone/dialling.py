"""The direct ways to devices: which addresses there are, dialled within bounds, their failures on record.

A device's addresses come from its heartbeats through the market and from the LAN by multicast DNS. All of
them pass `reaching`; the session then proves who answers. How direct links and relays are tried in turn is
`relay.paths`'.
"""

from __future__ import annotations

import asyncio
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from ipaddress import ip_address, ip_network
from typing import Final

import aiohttp
import psutil
import structlog

from relay import discovery
from relay.addresses import Network
from relay.channel import Channel
from relay.direct import connect_direct
from relay.errors import KvasirError, Unreachable
from relay.identity import PublicKey, address_of

from .reaching import DialBook, Reach, Target, check_address, choose_targets

_log = structlog.get_logger("backbone")

CONNECT_S: Final = 2.0
"""How long an address may take to accept a WebSocket."""

AT_ONCE: Final = 32
"""Addresses dialled at the same time, of all devices."""


class Dialler:
    """Dials devices directly. Enter it before use; `on_found` runs when a device's LAN address is heard.

    `local` as in `reaching.Reach`. With `lan` it listens for announcements, where `zeroconf` is installed.
    """

    def __init__(
        self,
        *,
        http: aiohttp.ClientSession,
        local: bool,
        lan: bool,
        on_found: Callable[[PublicKey], None] | None = None,
        look: Callable[[], Reach] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._look = look or (lambda: look_around(local=local))
        self._lan = lan and not local and discovery.available()
        self._on_found = on_found
        self._clock = clock
        self._book = DialBook()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._dialled: weakref.WeakKeyDictionary[Channel, Target] = weakref.WeakKeyDictionary()
        self._said: dict[PublicKey, str] = {}
        self._finder: discovery.Finder | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Dialler:
        if self._lan:
            finder = discovery.Finder(self._on_found)
            try:
                self._finder = await self._stack.enter_async_context(finder)
            except OSError as error:
                _log.warning("discovery.unavailable", reason=str(error))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def urls(self, device: PublicKey, announced: Iterable[str]) -> list[str]:
        """Where `device` may be dialled now: what was heard on the LAN, then what it announced."""
        heard = () if self._finder is None else self._finder.addresses(device)
        targets, refused = choose_targets((*heard, *announced), self._look())
        if refused:
            self._say(device, "; ".join(error.message for error in refused))
        now = self._clock()
        return [target.url for target in targets if self._book.allows(device, target, now)]

    async def dial(self, device: PublicKey, url: str) -> Channel:
        """A link to an address that `urls` gave. Raises `KvasirError`."""
        target = check_address(url, self._look())
        async with self._places:
            if not self._book.allows(device, target, self._clock()):
                raise Unreachable(f"too many dials to {url} failed lately")
            try:
                channel = await connect_direct(url, device, http=self._http, timeout=CONNECT_S)
            except KvasirError:
                self._book.failed(device, target, self._clock())
                raise
        self._dialled[channel] = target
        return channel

    def shaken(self, channel: Channel, *, device_answered: bool) -> None:
        """How the handshake on a channel ended; one that goes through a relay does not matter here."""
        target = self._dialled.pop(channel, None)
        if target is None:
            return
        if device_answered:
            self._book.succeeded(target)
        else:
            self._book.failed(channel.peer, target, self._clock())

    def _say(self, device: PublicKey, reason: str) -> None:
        """Once for each new reason, or a device could fill the log."""
        if self._said.get(device) != reason:
            self._said[device] = reason
            _log.info("address.refused", device=address_of(device), reason=reason)

    def forget(self, device: PublicKey) -> None:
        """The device is kept no more."""
        self._said.pop(device, None)


def look_around(*, local: bool) -> Reach:
    """This machine's addresses and networks, as its interfaces say now; `local` as in `Reach`."""
    own, networks = set(), []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                address = ip_address(entry.address.partition("%")[0])
                own.add(address)
                if entry.netmask and not address.is_loopback and not address.is_link_local:
                    networks.append(_network(str(address), entry.netmask))
            except ValueError:
                continue
    return Reach(frozenset(own), tuple(networks), local)


def _network(address: str, netmask: str) -> Network:
    """The network of an interface's address. Raises `ValueError`."""
    return ip_network((address, int(ip_address(netmask)).bit_count()), strict=False)

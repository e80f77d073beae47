"""Dialling a device directly: its addresses in turn, the first that is the device wins.

The addresses are tried as RFC 8305 ("happy eyeballs") does it: the next one starts when the one before it
has failed, or after 250 ms. Handshakes are made one after another, because a later one takes over from an
earlier one at the device. Whoever accepts a connection without being the device fails the handshake, and the
next address has its turn.

Knows sockets and this machine's addresses. Which addresses may be dialled is `reaching`'s.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Final

import aiohttp
import psutil
import structlog

from relay.addresses import Network
from relay.channel import Channel
from relay.direct import connect_direct
from relay.errors import KvasirError, Unreachable
from relay.identity import PublicKey, address_of
from relay.secure import SecureSession

from .reaching import DialBook, Reach, Target, choose_targets

_log = structlog.get_logger("backbone")

CONNECT_S: Final = 2.0
"""How long one address may take to accept a WebSocket."""

STAGGER_S: Final = 0.25
"""Pause between the starts of two dials (RFC 8305, Connection Attempt Delay)."""

AT_ONCE: Final = 16
"""Devices dialled at the same time."""

Shake = Callable[[Channel], Awaitable[SecureSession]]
"""Makes the session over a channel; raises `KvasirError` if whoever is there is not the device."""


class DirectDialler:
    """Makes direct sessions. `reach` says what this machine is at the moment."""

    def __init__(
        self,
        reach: Callable[[], Reach],
        *,
        http: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reach = reach
        self._http = http
        self._clock = clock
        self._book = DialBook()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._said: dict[PublicKey, str] = {}

    async def dial(self, device: PublicKey, urls: Iterable[str], shake: Shake) -> SecureSession:
        """A session with `device` at one of `urls`. Raises `Unreachable`, saying why of each address."""
        targets, refused = choose_targets(urls, self._reach())
        allowed = [target for target in targets if self._book.allows(target, self._clock())]
        if refused:
            self._say(device, "; ".join(error.message for error in refused))
        if not allowed:
            why = refused[0].message if refused else "too many dials failed there" if targets else "none known"
            raise Unreachable(f"no address to dial: {why}")
        async with self._places:
            return await _Race(self._http, self._book, self._clock, device, allowed).run(shake)

    def _say(self, device: PublicKey, reason: str) -> None:
        """Once for each new reason, or any device could fill the log."""
        if self._said.get(device) != reason:
            self._said[device] = reason
            _log.info("address.refused", device=address_of(device), reason=reason)


class _Race:
    """One dial of all addresses of a device."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        book: DialBook,
        clock: Callable[[], float],
        device: PublicKey,
        targets: Sequence[Target],
    ) -> None:
        self._http, self._book, self._clock = http, book, clock
        self._device, self._targets = device, targets
        self._starts = [asyncio.Event() for _ in targets]
        self._connected: asyncio.Queue[tuple[Target, Channel | KvasirError]] = asyncio.Queue()
        self._reasons: list[str] = []

    async def run(self, shake: Shake) -> SecureSession:
        """The first session. Raises `Unreachable` if no address led to one."""
        session: SecureSession | None = None
        async with asyncio.TaskGroup() as tasks:
            dials = [tasks.create_task(self._connect(number)) for number in range(len(self._targets))]
            try:
                session = await self._first(shake)
            finally:
                for dial in dials:
                    dial.cancel()
        while not self._connected.empty():
            _, other = self._connected.get_nowait()
            if not isinstance(other, KvasirError):
                await other.close()
        if session is None:
            raise Unreachable("; ".join(self._reasons))
        return session

    async def _first(self, shake: Shake) -> SecureSession | None:
        for _ in self._targets:
            target, found = await self._connected.get()
            if isinstance(found, KvasirError):
                self._failed(target, found)
                continue
            try:
                session = await shake(found)
            except KvasirError as error:
                await found.close()
                self._failed(target, error)
                continue
            self._book.succeeded(target)
            return session
        return None

    async def _connect(self, number: int) -> None:
        target = self._targets[number]
        try:
            async with asyncio.timeout(number * STAGGER_S):
                await self._starts[number].wait()
        except TimeoutError:
            pass
        found: Channel | KvasirError
        try:
            found = await connect_direct(target.url, self._device, http=self._http, timeout=CONNECT_S)
        except KvasirError as error:
            found = error
            if number + 1 < len(self._starts):
                self._starts[number + 1].set()
        self._connected.put_nowait((target, found))

    def _failed(self, target: Target, error: KvasirError) -> None:
        self._book.failed(target, self._clock())
        self._reasons.append(f"{target.url}: {error.message}")


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
    mask = ip_address(netmask)
    prefix = bin(int(mask)).count("1")
    return ip_network((address, prefix), strict=False)

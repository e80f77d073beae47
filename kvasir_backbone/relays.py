"""The relays that the backbone is connected to: all that the market lists, and all that a claim names.

Asks the market for its list, keeps one connection to each, and leaves those that are gone. What a relay's
coming or going means for devices is its owner's.

Knows relays and the market. Knows no devices, sessions or windows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

import aiohttp
import structlog

from market.client import MarketClient
from market.messages import RelayInfo
from market.swarm import OperatingKey
from relay.errors import KvasirError, Refused
from relay.identity import PublicKey
from relay.transport import RelayClient, relay_endpoint

_log = structlog.get_logger("backbone")

RELAYS_S: Final = 10.0
RELIST_S: Final = 1.0
"""How often the market is asked for its list of relays, and how soon again when one comes or goes."""

LONGEST_PAUSE_S: Final = 16.0
"""Bound of the pause before a market that does not answer is asked again."""


class Relays:
    """See the module docstring. All methods belong to the loop's thread.

    `named` gives the relays that claims name, `on_change` hears of a relay that was connected or is going
    away. `start_generation` rises with each start of the daemon.
    """

    def __init__(
        self,
        *,
        market: MarketClient,
        keys: Callable[[], OperatingKey],
        start_generation: int,
        http: aiohttp.ClientSession,
        rng: random.Random,
        named: Callable[[], Collection[PublicKey]],
        on_change: Callable[[RelayClient], None],
    ) -> None:
        self.listed: dict[PublicKey, RelayInfo] = {}
        """What the market said last."""
        self._market = market
        self._keys = keys
        self._start_generation = start_generation
        self._http = http
        self._rng = rng
        self._named = named
        self._on_change = on_change
        self._clients: dict[PublicKey, RelayClient] = {}
        self._tasks: dict[PublicKey, asyncio.Task[None]] = {}
        self._relist = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    @property
    def clients(self) -> list[RelayClient]:
        """The connections that are kept, connected or not."""
        return list(self._clients.values())

    @property
    def connected(self) -> int:
        """How many of them are connected."""
        return sum(client.connected for client in self._clients.values())

    def client(self, key: PublicKey) -> RelayClient | None:
        """The connection to one relay, if it is kept."""
        return self._clients.get(key)

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Follow the market's list until cancelled; the connections are tasks of `group`."""
        self._group = group
        pause = 0.2
        while True:
            self._relist.clear()
            try:
                swarm = await self._market.swarm()
            except KvasirError as error:
                _log.warning("market.unreachable", reason=str(error), code=error.code)
                await asyncio.sleep(self._rng.uniform(0.0, pause))
                pause = min(LONGEST_PAUSE_S, 2 * pause)
                continue
            pause = 0.2
            self.listed = {relay.key: relay for relay in swarm.relays}
            for relay in swarm.relays:
                self.keep(relay)
            self._leave_gone()
            await asyncio.sleep(RELIST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(RELAYS_S):
                    await self._relist.wait()

    def keep(self, relay: RelayInfo) -> None:
        """Be connected to a relay; once, wherever it is. `run` has begun."""
        assert self._group is not None
        client = self._clients.get(relay.key)
        if client is not None and client.url == relay_endpoint(relay.url):
            return
        if client is not None:
            self._tasks[relay.key].cancel()
        self._clients[relay.key] = client = self._connect(relay.url, relay.key)
        self._tasks[relay.key] = self._group.create_task(self._run(relay.key, client))

    def _leave_gone(self) -> None:
        """Try no longer to reach relays that are gone: not connected, not listed, named by no claim."""
        named = self._named()
        for key, client in list(self._clients.items()):
            if not client.connected and key not in self.listed and key not in named:
                self._tasks[key].cancel()

    def _changed(self, key: PublicKey) -> None:
        self._relist.set()
        client = self._clients.get(key)
        if client is not None and client.connected:
            self._on_change(client)

    def _connect(self, url: str, key: PublicKey) -> RelayClient:
        return RelayClient(
            url,
            self._keys().signing,
            role="backbone",
            root=self._keys().certificate.swarm,
            ticket=lambda: self._market.ticket(key, start_generation=self._start_generation),
            start_generation=self._start_generation,
            on_change=lambda: self._changed(key),
            http=self._http,
        )

    async def _run(self, key: PublicKey, client: RelayClient) -> None:
        """The boundary for one relay: one that refuses us for good is left; a duplicate of us ends us."""
        try:
            await client.run()
        except* KvasirError as group:
            error = group.exceptions[0]
            if isinstance(error, Refused) and error.code == "duplicate":
                raise Refused(
                    "duplicate", "another backbone runs with the keys of this state directory: stop one"
                ) from None
            _log.error("relay.refused", relay=client.url, reason=str(error))
        finally:
            if self._clients.get(key) is client:
                del self._clients[key], self._tasks[key]

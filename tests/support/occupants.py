"""Devices of nobody's that hold a window without serving it, so that others take another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from market.client import MarketClient
from market.messages import Lease, Offer
from market.plans import PlanId
from market.windows import Window
from relay.identity import ExchangeKey, SigningKey
from relay.links import JoinLink


class Occupants:
    """Claims that stay HELD, each of a wallet and a device of its own."""

    def __init__(self, link: JoinLink, http: aiohttp.ClientSession) -> None:
        self._link, self._http = link, http
        self._claims: list[tuple[MarketClient, Lease]] = []

    async def hold(self, plan: PlanId, window: Window) -> None:
        """One more replica of that window, for as long as a claim may load."""
        key = SigningKey.generate()
        client = MarketClient(self._link.url, http=self._http, root=self._link.root, key=key)
        await client.login(SigningKey.generate(), key, ExchangeKey.generate())
        offer = Offer(plan, window, "stored", 0, 0, "")
        lease = await client.claim(offer, numerics="none", start_generation=1)
        self._claims.append((client, lease))

    async def leave(self) -> None:
        """Give all of it back."""
        for client, lease in self._claims:
            await client.release(lease.id, lease.epoch, reason="gone")
        self._claims.clear()


@asynccontextmanager
async def occupants(link: JoinLink, plan: PlanId, window: Window, count: int = 2) -> AsyncIterator[Occupants]:
    """`count` occupants of one window."""
    async with aiohttp.ClientSession() as http:
        made = Occupants(link, http)
        for _ in range(count):
            await made.hold(plan, window)
        yield made

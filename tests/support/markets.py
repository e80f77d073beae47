"""A real market on port 0 for tests, with its swarm's keys, and small plans to trade."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from market.admission import store_grant
from market.client import MarketClient
from market.config import MarketConfig
from market.messages import Abilities, Offer, RelayListing
from market.plans import (
    GateFormula,
    LayerRecipe,
    Plan,
    PlanFile,
    PlanId,
    Source,
    TensorRecipe,
    sign_plan,
)
from market.server import Market, serving
from market.store import Session
from market.swarm import SwarmKeys
from market.wallet import Challenge, new_nonce, open_grant, sign_challenge
from market.windows import cut_windows
from relay.identity import ExchangeKey, SigningKey

WIDTH, INNER, EXPERTS = 8, 4, 8
NUMERICS = "stored/none/float32/fixed/test"


def small_plan(
    *, layers: int = 2, experts: int = EXPERTS, windows_a_layer: int = 1, model: str = "small"
) -> Plan:
    """A plan of fused fp32 tensors: `layers` MoE layers, each cut into `windows_a_layer` windows."""
    size = WIDTH * INNER * 4
    recipes = []
    start = 0
    for layer in range(layers):
        tensors = []
        for role, shape in (("gate", (INNER, WIDTH)), ("up", (INNER, WIDTH)), ("down", (WIDTH, INNER))):
            tensors.append(TensorRecipe(role, shape, (Source(0, "F32", shape, start, size),)))
            start += experts * size
        formula = GateFormula("swiglu", "silu")
        recipes.append(LayerRecipe(layer, experts, 2, formula, tuple(tensors)))
    counts = {recipe.layer: recipe.experts for recipe in recipes}
    sizes = {recipe.layer: recipe.expert_bytes for recipe in recipes}
    return Plan(
        model=model,
        revision="test",
        source="local",
        architecture="test",
        files=(PlanFile("model.safetensors", max(start, 1)),),
        width=WIDTH,
        wire_dtype="float32",
        precisions=("stored", "int8"),
        weighted=False,
        windows=cut_windows(counts, sizes, max(1, experts * 3 * size // windows_a_layer)),
        layers=tuple(recipes),
    )


def abilities(budget_bytes: int = 1 << 40, **changes: object) -> Abilities:
    """A device that can serve any window of `small_plan`."""
    made = Abilities(budget_bytes, ("stored",), ("float32",), {"stored": NUMERICS}, "", ("swiglu",))
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass(slots=True)
class Clock:
    """A clock that stands in for the database's time: real time plus what tests add."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass(slots=True)
class Device:
    """A device with its wallet and a market client that signs with the device's key."""

    wallet: SigningKey
    key: SigningKey
    exchange: ExchangeKey
    client: MarketClient
    start_generation: int = 1

    async def take(self, offer: Offer) -> tuple[bytes, int]:
        """Claim an offer and load it: HELD, then LOADED. Returns the lease and its epoch."""
        lease = await self.client.claim(offer, numerics=NUMERICS, start_generation=self.start_generation)
        await self.client.loaded(
            lease.id, lease.epoch, numerics=NUMERICS, quantised_hash=bytes(32), kept_bytes=offer.kept_bytes
        )
        return lease.id, lease.epoch


@dataclass(slots=True)
class Stall:
    """One market that runs, its swarm's keys, and who trades there."""

    market: Market
    keys: SwarmKeys
    url: str
    http: aiohttp.ClientSession
    clock: Clock

    def client(self, **options: object) -> MarketClient:
        """A client of nobody's."""
        given = {
            "http": self.http,
            "root": self.keys.root_public,
            "clock": self.clock,
            "timeout": 60.0,
            **options,
        }
        return MarketClient(self.url, **given)  # type: ignore[arg-type]

    def backbone(self) -> MarketClient:
        """A client that speaks as the swarm's backbone."""
        key = self.keys.backbone
        return self.client(key=key.signing, certificate=key.certificate)

    async def device(self, wallet: SigningKey | None = None) -> Device:
        """A new device, signed in for `wallet` (a new one if None)."""
        wallet = wallet or SigningKey.generate()
        key, exchange = SigningKey.generate(), ExchangeKey.generate()
        client = self.client(key=key)
        await client.login(wallet, key, exchange)
        return Device(wallet, key, exchange, client)

    async def devices(self, count: int) -> list[Device]:
        """Many devices, each with a wallet of its own, their grants put straight into the store."""
        made, grants = [], []
        now = int(self.clock())
        for _ in range(count):
            wallet, key, exchange = SigningKey.generate(), SigningKey.generate(), ExchangeKey.generate()
            keys = (wallet.public, key.public, exchange.public, self.keys.root_public)
            text = Challenge(self.url, *keys, "serve", new_nonce(), now, now + 86_400).text
            signature = sign_challenge(text, wallet)
            grants.append(open_grant(text, signature, root=self.keys.root_public, now=now))
            made.append(Device(wallet, key, exchange, self.client(key=key)))

        def store(session: Session) -> None:
            for grant in grants:
                store_grant(session, grant)

        await self.market._store.write(store)
        return made

    async def publish(self, plan: Plan | None = None) -> tuple[PlanId, Plan]:
        """Publish a plan as the swarm's backbone."""
        plan = plan or small_plan()
        return await self.backbone().publish_plan(sign_plan(plan, self.keys.backbone.signing)), plan


@asynccontextmanager
async def stall(
    folder: Path,
    *,
    database: str | None = None,
    clock: Clock | None = None,
    relays: bool = True,
    sweeping: bool = True,
    configure: Callable[[MarketConfig], MarketConfig] = lambda config: config,
) -> AsyncIterator[Stall]:
    """Run a market with its state in `folder`, for as long as the block lasts."""
    clock = clock or Clock()
    keys = SwarmKeys.load_or_create(folder, now=clock())
    listing = RelayListing("/relay/v1", keys.relay.certificate.document)
    config = MarketConfig(
        database=database or f"sqlite:///{folder / 'market.db'}",
        public_urls=(),
        host="127.0.0.1",
        port=0,
        sweep_s=0.05,
        target_s=0.1,
        move_s=0.1,
        gaps_s=0.0,
    )
    market = Market(
        configure(config),
        root=keys.root_public,
        keys=lambda: keys.market,
        relays=lambda: (listing,) if relays else (),
        clock=clock,
    )
    await market.open()
    try:
        async with serving(market) as url, aiohttp.ClientSession(connector=_connector()) as http:
            running = asyncio.create_task(market.run()) if sweeping else None
            try:
                yield Stall(market, keys, url, http, clock)
            finally:
                if running is not None:
                    running.cancel()
                    with suppress(asyncio.CancelledError):
                        await running
    finally:
        await market.close()


def _connector() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0)

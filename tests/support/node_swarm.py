"""A real market, relay and weights endpoint in this process, and a backbone that proves and calls nodes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import torch
from aiohttp import web
from torch import Tensor

from kvasir_backbone.weights import WEIGHTS_PATH, FileRanges, WeightsEndpoint
from kvasir_node import kernels
from kvasir_node.calls import (
    Call,
    Draining,
    Group,
    Message,
    Notice,
    ReceiptAck,
    ReceiptMessage,
    Reference,
    References,
    Reply,
    decode,
    encode,
)
from kvasir_node.execution import choose_execution
from kvasir_node.experts import WindowExperts
from market.client import MarketClient
from market.config import MarketConfig
from market.messages import Assignment, RelayListing
from market.moving import MoveRules
from market.plans import Plan, PlanFile, PlanId, WindowHashes, sign_hashes, sign_plan
from market.receipts import Receipt, sign_receipt
from market.server import Market
from market.swarm import SwarmKeys
from market.windows import Window
from market.wire import BackboneId
from relay.config import RelayConfig
from relay.errors import KvasirError
from relay.identity import PublicKey
from relay.links import JoinLink
from relay.secure import SecureSession
from relay.server import FixedMarket, Relay
from relay.transport import RelayClient
from tests.support.experts import tiny_plan

GENERATION = 1
WIDTH = 24
PRECISION = "stored"
WINDOWS = (Window(0, 1, 0, 8), Window(1, 2, 0, 8))


class Site:
    """One aiohttp application on one loopback port, which stays the same when it starts again."""

    def __init__(self) -> None:
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def reserve(self) -> None:
        """Find a free port and keep it in mind."""
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()

    async def start(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class NodeSwarm:
    """One swarm with a plan of 2 layers x 8 experts, cut into `windows`."""

    def __init__(
        self, folder: Path, *, windows: tuple[Window, ...], layers: int = 2, moving: MoveRules | None = None
    ) -> None:
        self.folder = folder
        self.keys = SwarmKeys.load_or_create(folder / "operator", now=time.time())
        self.plan, self.read, self.tensors = tiny_plan(width=WIDTH, layers=layers, windows=windows)
        data = b"".join(bytes(self.read(span)) for span in self.plan.window_ranges(_whole(self.plan)))
        self.model = folder / "model.safetensors"
        self.model.write_bytes(data)
        assert self.plan.files == (PlanFile("model.safetensors", len(data)),)
        self.data = data
        self.plan_id = PlanId(b"")
        self.market_site, self.relay_site = Site(), Site()
        self.market: Market
        self.client: MarketClient
        self.relay_client: RelayClient
        self.weights: WeightsEndpoint
        self.weights_open = asyncio.Event()
        self.weights_open.set()
        self.http: aiohttp.ClientSession
        self._moving = moving or MoveRules()
        self._market_task: asyncio.Task[None] | None = None

    @property
    def link(self) -> JoinLink:
        return JoinLink(self.market_site.url, self.keys.root_public)

    # --- parts that may stop and start again

    async def start_market(self) -> None:
        url = self.market_site.url
        self.market = Market(
            MarketConfig(
                database=f"sqlite:///{self.folder / 'market.db'}",
                public_urls=(url,),
                sweep_s=0.1,
                target_s=0.2,
                move_s=0.2,
                moving=self._moving,
            ),
            root=self.keys.root_public,
            keys=lambda: self.keys.market,
            relays=lambda: (RelayListing(self.relay_site.url, self.keys.relay.certificate.document),),
        )
        await self.market.open()
        app = web.Application(client_max_size=1 << 24)
        self.market.attach(app)
        app.router.add_get(WEIGHTS_PATH, self._serve_weights)
        await self.market_site.start(app)
        self._market_task = asyncio.create_task(self.market.run())

    async def stop_market(self) -> None:
        if self._market_task is not None:
            self._market_task.cancel()
            await asyncio.wait([self._market_task])
            self._market_task = None
            await self.market.close()
            await self.market_site.stop()

    def lose_market_store(self) -> None:
        """Remove the stopped market's database."""
        for path in self.folder.glob("market.db*"):
            path.unlink()

    async def _serve_weights(self, request: web.Request) -> web.StreamResponse:
        await self.weights_open.wait()
        return await self.weights.handle(request)

    async def _leased(self, device: PublicKey, wait_s: float) -> list[Window]:
        leases = (await self.client.assignments(self.plan_id)).leases
        return [lease.window for lease in leases if lease.device == device]

    # --- what the backbone does

    async def publish(self, *, hashes: bool = True) -> None:
        """Publish the plan, and the hashes of all windows."""
        document = sign_plan(self.plan, self.keys.backbone.signing)
        self.plan_id = await self.client.publish_plan(document)
        self.weights = WeightsEndpoint(
            self.plan, self.plan_id, FileRanges([self.model]), root=self.keys.root_public, leased=self._leased
        )
        if hashes:
            for window in self.plan.windows:
                await self.publish_hashes(window)

    async def publish_hashes(self, window: Window) -> None:
        chunks = tuple(
            hashlib.sha256(self.data[chunk.start : chunk.end]).digest()
            for chunk in self.plan.window_chunks(window)
        )
        hashes = WindowHashes(self.plan_id, window, chunks)
        await self.client.publish_hashes(sign_hashes(hashes, self.keys.backbone.signing))

    async def leases(self, *states: str) -> list[Assignment]:
        """The leases in these states (all without)."""
        leases = (await self.client.assignments(self.plan_id)).leases
        return [lease for lease in leases if not states or lease.state in states]

    async def call_node(self, lease: Assignment, *, generation: int | None = None) -> BackboneSession:
        """A session with the holder of `lease`, its lease announced as reference 1."""
        await self.relay_client.wait_connected(10.0)
        channel = await self.relay_client.open(lease.device, timeout=10.0)
        session = await SecureSession.connect(
            channel,
            certificate=self.keys.backbone.certificate,
            key=self.keys.backbone.exchange,
            device_key=lease.grant.exchange,
            root=self.keys.root_public,
            grant_hash=lease.grant.hash,
            generation=generation or time.time_ns() // 1000,
            timeout=10.0,
        )
        made = BackboneSession(self, session, lease)
        await made.announce()
        return made

    async def prove(self, lease: Assignment) -> BackboneSession:
        """Call the node, check its answer, and declare the lease proven."""
        session = await self.call_node(lease)
        await session.check()
        await self.client.declare_proven(lease.lease, lease.epoch, d=0.0)
        return session


class BackboneSession:
    """The backbone's end of a session with one node."""

    def __init__(self, swarm: NodeSwarm, session: SecureSession, lease: Assignment) -> None:
        self.swarm = swarm
        self.session = session
        self.lease = lease
        execution = choose_execution(swarm.plan, lease.precision, kernels.load(lease.precision))
        self.local = WindowExperts.load(
            swarm.plan, lease.window, lease.precision, swarm.read, execution=execution
        )
        assert self.local.numerics == lease.numerics
        self.last: Receipt | None = None
        self._calls = 0

    async def send(self, message: Message) -> None:
        await self.session.send(encode(message))

    async def receive(self) -> Message:
        async with asyncio.timeout(10.0):
            return decode(await self.session.receive())

    async def announce(self, epoch: int | None = None) -> None:
        reference = Reference(1, self.lease.lease, epoch or self.lease.epoch, self.swarm.plan_id)
        await self.send(References((reference,)))

    async def call(self, rows: Tensor, layer: int, expert: int) -> Message:
        """One expert on `rows`; whatever the node answers."""
        self._calls += 1
        group = Group(1, (1,) * len(rows), (expert,) * len(rows))
        data = rows.contiguous().numpy().tobytes()
        await self.send(Call(self._calls, layer, len(rows), 10_000, (group,), data))
        return await self.receive()

    async def check(self) -> None:
        """Every expert of the window answers with exactly what it should."""
        window = self.lease.window
        for layer in range(window.layer_start, window.layer_end):
            for expert in range(window.expert_start, window.expert_end):
                rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(expert))
                reply = await self.call(rows, layer, expert)
                assert isinstance(reply, Reply), reply
                got = torch.frombuffer(bytearray(reply.rows), dtype=torch.float32).view(3, WIDTH)
                assert torch.equal(got, self.local.run(layer, expert, rows))

    async def pay(self, carried: int, *, post: bool = True) -> ReceiptAck:
        """Sign the next receipt, post it, hand it to the node, and return the countersignature."""
        keys, lease = self.swarm.keys.backbone, self.lease
        receipt = Receipt(
            swarm=self.swarm.keys.root_public,
            backbone=BackboneId(keys.id),
            device=lease.device,
            wallet=lease.wallet,
            sequence=1 if self.last is None else self.last.sequence + 1,
            issued_at=int(time.time()),
            bytes=carried,
            calls=self._calls,
            leases=(),
            call_root=bytes(32),
            previous=bytes(32) if self.last is None else self.last.digest,
        )
        document = sign_receipt(receipt, keys.signing)
        if post:
            await self.swarm.client.post_receipt(document)
        await self.send(ReceiptMessage(document.to_bytes()))
        ack = await self.receive()
        assert isinstance(ack, ReceiptAck), ack
        self.last = Receipt(**{**_fields(receipt), "document": document})
        return ack

    async def notify(self, text: str) -> None:
        await self.send(Notice("quarantined", text))

    async def drained(self) -> str:
        """Wait for the node to say that it goes away; its reason."""
        message = await self.receive()
        assert isinstance(message, Draining), message
        return message.reason


def _fields(receipt: Receipt) -> dict[str, object]:
    return {name: getattr(receipt, name) for name in receipt.__slots__}


def _whole(plan: Plan) -> Window:
    return Window(0, max(layer.layer for layer in plan.layers) + 1, 0, plan.layers[0].experts)


@asynccontextmanager
async def node_swarm(
    folder: Path,
    *,
    windows: tuple[Window, ...] = WINDOWS,
    moving: MoveRules | None = None,
) -> AsyncIterator[NodeSwarm]:
    """A running `NodeSwarm`; the plan is not yet published."""
    swarm = NodeSwarm(folder, windows=windows, moving=moving)
    await swarm.market_site.reserve()
    await swarm.relay_site.reserve()
    async with AsyncExitStack() as stack:
        swarm.http = await stack.enter_async_context(aiohttp.ClientSession())
        await swarm.start_market()
        stack.push_async_callback(swarm.stop_market)
        relay = Relay(
            RelayConfig(drain_s=0.0),
            certificate=swarm.keys.relay.certificate,
            key=swarm.keys.relay.signing,
            market=FixedMarket(lambda: (swarm.keys.market.signing.public,)),
        )
        app = web.Application()
        relay.attach(app)
        await swarm.relay_site.start(app)
        stack.push_async_callback(swarm.relay_site.stop)
        backbone = swarm.keys.backbone
        swarm.client = MarketClient(
            swarm.market_site.url,
            http=swarm.http,
            root=swarm.keys.root_public,
            key=backbone.signing,
            certificate=backbone.certificate,
        )
        swarm.relay_client = RelayClient(
            swarm.relay_site.url,
            backbone.signing,
            role="backbone",
            root=swarm.keys.root_public,
            ticket=lambda: swarm.client.ticket(swarm.keys.relay.signing.public, start_generation=GENERATION),
            start_generation=GENERATION,
            http=swarm.http,
        )
        tasks = [asyncio.create_task(swarm.relay_client.run())]
        try:
            yield swarm
        finally:
            for task in tasks:
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(error, Exception) and not isinstance(error, KvasirError):
                    raise error

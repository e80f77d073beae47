"""`kvasir-backbone up`: backbone, market and relay in one process on one port.

Theory of operation. The port opens first, with market and relay, so that nodes can prove their wallets
while the model loads. The backbone then is a client like any other: it reaches its market by HTTP and its
relay by WebSocket. Once the plan is published nodes are offered windows; once the model is in memory the
API answers. At the end, in this order: the API takes nothing new and finishes what is open, the engine
stops, the last receipts are signed and posted, sessions are closed with a reason, the relay drains, and the
stores are closed.

Knows the order of things. What each of them does is in its own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import aiohttp
import psutil
import structlog
from aiohttp import web

from kvasir_node.locks import FolderLock
from market.client import MarketClient
from market.config import MarketConfig
from market.messages import RelayListing
from market.moving import MoveRules
from market.plans import Plan, PlanId, plan_id, sign_plan
from market.server import Market
from market.swarm import SwarmKeys
from relay.addresses import parse_networks
from relay.config import RelayConfig
from relay.errors import ConfigError, KvasirError, Refused, Unreachable
from relay.guard import ListenerGuard, bounded_rules
from relay.identity import SignedDocument
from relay.links import JoinLink
from relay.loop import spare_memory
from relay.server import FixedMarket, Relay

from .addresses import close_door, local_urls, open_door
from .admission import Admission
from .answers import Numerics
from .config import BackboneConfig
from .gateway import Gateway, GatewayConfig
from .late import LateEngine, LatePrompter
from .local_layers import keep_local
from .operator_api import Operator
from .prompting import Prompter
from .skeleton import check_folder
from .swarm import Swarm, SwarmConfig
from .weights import WEIGHTS_PATH, WeightsEndpoint, error_response

if TYPE_CHECKING:
    from .auditing import References
    from .checkpoint import Checkpoint
    from .engine import Engine
    from .model import BackboneModel
    from .tensor_parallel import Ranks

_log = structlog.get_logger("backbone")

Phase = Literal["starting", "loading", "serving", "draining"]

MAX_BODY: Final = 96 * 1024 * 1024
"""The largest body any route takes (a plan); each route has its own, smaller bound."""

RENEW_S: Final = 3600.0
"""How often certificates are looked at for renewal."""
WATCH_S: Final = 0.5
"""How often the other processes of the dense part are looked at."""

BUILD_THREADS: Final = 2


@dataclass
class Backbone:
    """A running backbone, as its operator's API and tests see it."""

    config: BackboneConfig
    keys: SwarmKeys
    relay: Relay
    market: Market
    phase: Phase = "starting"
    port: int = 0
    url: str = ""
    join: str = ""
    started: float = field(default_factory=time.monotonic)
    client: MarketClient | None = None
    checkpoint: Checkpoint | None = None
    plan: Plan | None = None
    plan_id: PlanId | None = None
    swarm: Swarm | None = None
    engine: Engine | None = None
    model: BackboneModel | None = None
    weights: WeightsEndpoint | None = None
    ranks: Ranks | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    serving: asyncio.Event = field(default_factory=asyncio.Event)


async def run(
    config: BackboneConfig,
    *,
    stop: asyncio.Event | None = None,
    on_open: Callable[[Backbone], None] | None = None,
) -> None:
    """Run a backbone until `stop` is set (for ever without it), then end it in order.

    `on_open` is called once the port is open. Raises `ConfigError` for what the operator must change.
    """
    if config.hub is None:
        check_folder(config.model)
    config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with contextlib.AsyncExitStack() as stack:
        lock = FolderLock(config.state_dir, owner="kvasir-backbone")
        stack.callback(lock.close)
        daemon = _Daemon(config, stop or asyncio.Event())
        try:
            await daemon.run(stack, on_open)
        except BaseExceptionGroup as group:
            raise _first(group) from None


class _Daemon:
    """One `run`: builds the parts, keeps them, ends them."""

    def __init__(self, config: BackboneConfig, stop: asyncio.Event) -> None:
        keys = SwarmKeys.load_or_create(config.state_dir, now=time.time())
        self.config = config
        self.relay = Relay(
            RelayConfig(trusted_proxies=config.trusted_proxies),
            certificate=keys.relay.certificate,
            key=keys.relay.signing,
            market=FixedMarket(lambda: (self.backbone.keys.market.signing.public,)),
        )
        self.engine = LateEngine()
        self.prompter = LatePrompter()
        self.socket = _listen(config.host, config.port)
        self.port = int(self.socket.getsockname()[1])
        urls = config.public_urls or local_urls(config.host, self.port)
        market = Market(
            MarketConfig(
                database=f"sqlite:///{config.state_dir.resolve() / 'market.db'}",
                public_urls=_normal(urls),
                trusted_proxies=config.trusted_proxies,
                moving=MoveRules(patience_s=config.move_after_s),
            ),
            root=keys.root_public,
            keys=lambda: self.backbone.keys.market,
            relays=self._own_relays,
        )
        self.backbone = Backbone(config, keys, self.relay, market, stop=stop)
        self.backbone.port = self.port
        self.backbone.url = urls[0]
        self.backbone.join = JoinLink(urls[0], keys.root_public).text
        self.gateway = Gateway(
            _gateway_config(config),
            engine=self.engine,
            prompter=self.prompter,
            numerics=self._numerics,
            admission=Admission(config.admission),
        )
        self.interrupts: list[Callable[[], None]] = []
        self.threads = ThreadPoolExecutor(BUILD_THREADS, thread_name_prefix="backbone")

    # --- from start to end ---------------------------------------------------------------------------

    async def run(self, stack: contextlib.AsyncExitStack, on_open: Callable[[Backbone], None] | None) -> None:
        """See the module docstring."""
        backbone = self.backbone
        stack.callback(self._close_checkpoint)
        stack.callback(self._close_ranks)
        stack.callback(self.threads.shutdown, wait=True, cancel_futures=True)
        stack.callback(self._interrupt)
        stack.callback(self.gateway.close)
        stack.callback(self.socket.close)
        await backbone.market.open()
        stack.push_async_callback(backbone.market.close)
        await self._open_port(stack)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        )
        backbone.phase = "loading"
        _log.info("port.opened", url=backbone.url, port=self.port, join=backbone.join)
        if on_open is not None:
            on_open(backbone)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(backbone.market.run()),
                    tasks.create_task(self._keep_certificates()),
                    tasks.create_task(self._serve(http)),
                ]
                await backbone.stop.wait()
                await self._drain()
                for task in running:
                    task.cancel()
        finally:
            if backbone.swarm is not None:
                await backbone.swarm.close()

    def _own_relays(self) -> tuple[RelayListing, ...]:
        """The relay of this process, as the market lists it."""
        if not self.config.relay:
            return ()
        return (RelayListing("/relay/v1", self.relay.certificate.document, self.relay.load),)

    def _numerics(self) -> Numerics:
        """Whether texts are exact: one class of arithmetic in the swarm, and company changes no bits here."""
        swarm, model = self.backbone.swarm, self.backbone.model
        if model is not None and model.varies is not None:
            return "mixed"
        return "exact" if swarm is None else swarm.numerics()

    def _keep_checkpoint(self, checkpoint: Checkpoint) -> None:
        """From the planning thread, at once: it is closed even if the daemon ends while it plans."""
        self.backbone.checkpoint = checkpoint

    def _interruptible(self, end: Callable[[], None]) -> None:
        """From the planning thread: `end` lets what waits for the hub fail at once."""
        self.interrupts.append(end)
        if self.backbone.stop.is_set():
            end()

    def _interrupt(self) -> None:
        for end in self.interrupts:
            end()

    def _close_checkpoint(self) -> None:
        if self.backbone.checkpoint is not None:
            self.backbone.checkpoint.close()

    async def _open_port(self, stack: contextlib.AsyncExitStack) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        self.backbone.market.attach(app)
        self.relay.attach(app)
        app.router.add_get(WEIGHTS_PATH, self._weights)
        door = open_door(self.config.state_dir, _loopback(self.config.host, self.port))
        Operator(self.backbone, door.token).attach(app)
        self.gateway.attach(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        guard = ListenerGuard(bounded_rules(), trusted=parse_networks(self.config.trusted_proxies))
        server = await guard.listen(runner, sock=self.socket)
        stack.callback(server.close)

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        endpoint = self.backbone.weights
        if endpoint is None:
            return error_response(Refused("overloaded", "the plan is being made: ask again", retry_after_s=1))
        return await endpoint.handle(request)

    async def _drain(self) -> None:
        """The first half of the end; what is left is closed by the exit stack, in reverse order."""
        backbone = self.backbone
        backbone.phase = "draining"
        _log.info("backbone.draining", open_requests=self.gateway.open_requests)
        if not await self.gateway.drain(self.config.drain_s):
            _log.warning("requests.cut", open_requests=self.gateway.open_requests)
        if backbone.engine is not None:
            await backbone.engine.stop()
        if backbone.swarm is not None:
            await backbone.swarm.drain()
        close_door(self.config.state_dir)

    async def _keep_certificates(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            keys = self.backbone.keys
            renewed = await asyncio.to_thread(keys.renew, time.time())
            for role in renewed:
                _log.info("certificate.renewed", role=role)
            if "relay" in renewed:
                self.relay.renew(keys.relay.certificate, keys.relay.signing)
            if self.backbone.client is not None:
                self.backbone.client.certificate = keys.backbone.certificate

    # --- the model and its plan ----------------------------------------------------------------------

    async def _serve(self, http: aiohttp.ClientSession) -> None:
        """Plan, publish, keep the swarm, load the model, open the API."""
        backbone, loop = self.backbone, asyncio.get_running_loop()
        key = backbone.keys.backbone
        market = MarketClient(
            _loopback(self.config.host, self.port),
            http=http,
            root=backbone.keys.root_public,
            key=key.signing,
            certificate=key.certificate,
        )
        backbone.client = market
        built = await loop.run_in_executor(
            self.threads, _build_plan, self.config, self._keep_checkpoint, self._interruptible
        )
        document = await loop.run_in_executor(self.threads, sign_plan, built.plan, key.signing)
        await _publish(market, document)
        backbone.plan, backbone.plan_id = built.plan, plan_id(document)
        swarm = self._make_swarm(built, http, market)
        await swarm.open()
        backbone.swarm = swarm
        backbone.weights = WeightsEndpoint(
            built.plan,
            backbone.plan_id,
            built.checkpoint.served(),
            root=backbone.keys.root_public,
            leased=swarm.leased,
            transfers=self.config.weights_transfers,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(swarm.run())
                tasks.create_task(self._load(built, swarm))
                tasks.create_task(self._watch_ranks())
        finally:
            backbone.weights.close()

    def _make_swarm(self, built: _Built, http: aiohttp.ClientSession, market: MarketClient) -> Swarm:
        plan, checkpoint = built.plan, built.checkpoint
        assert self.backbone.plan_id is not None
        return Swarm(
            plan,
            self.backbone.plan_id,
            SwarmConfig(
                start_generation=next_generation(self.config.state_dir, now=time.time()),
                receipts=self.config.state_dir / "receipts.db",
                fallback=self.config.fallback == "disk",
                failover_s=self.config.failover_s,
                demand_s=self.config.demand_s,
                relay_only=self.config.relay_only,
                local=self.config.local,
            ),
            market=market,
            http=http,
            keys=lambda: self.backbone.keys.backbone,
            hash_window=lambda window: checkpoint.hash_window(plan, window),
            references=built.references,
            threads=self.threads,
        )

    def _make_ranks(self, built: _Built) -> Ranks | None:
        """The other processes of the dense part, where there are any; not started yet."""
        if self.config.tensor_parallel == 1:
            return None
        from .tensor_parallel import Ranks

        self.backbone.ranks = ranks = Ranks(built.checkpoint.path, built.dtype, self.config.tensor_parallel)
        self._interruptible(ranks.abort)
        return ranks

    def _close_ranks(self) -> None:
        if self.backbone.ranks is not None:
            self.backbone.ranks.close()

    async def _watch_ranks(self) -> None:
        """End the daemon with a word when another process of the dense part is gone."""
        while self.config.tensor_parallel > 1:
            ranks = self.backbone.ranks
            if ranks is not None and (fault := ranks.fault()):
                raise KvasirError(fault)
            await asyncio.sleep(WATCH_S)

    async def _load(self, built: _Built, swarm: Swarm) -> None:
        backbone = self.backbone
        loop = asyncio.get_running_loop()
        model, engine, prompter = await loop.run_in_executor(
            self.threads, _build_engine, self.config, built, swarm, self._make_ranks(built)
        )
        spare_memory()
        engine.start()
        backbone.model, backbone.engine = model, engine
        self.gateway.config = _gateway_config(self.config, created=int(time.time()))
        self.prompter.set(prompter)
        self.engine.set(engine)
        if backbone.phase == "loading":
            backbone.phase = "serving"
        backbone.serving.set()
        _log.info(
            "model.loaded",
            model=self.config.name,
            dtype=model.dtype,
            packed=model.packed,
            layers=len(model.moe_layers),
            windows=len(built.plan.windows),
            seconds=time.monotonic() - backbone.started,
        )


def _gateway_config(config: BackboneConfig, created: int = 0) -> GatewayConfig:
    """The API takes as many requests as may run and wait."""
    return GatewayConfig(config.name, created, max_requests=config.max_running + config.max_waiting)


@dataclass(frozen=True, slots=True)
class _Built:
    """What the planning thread made."""

    checkpoint: Checkpoint
    plan: Plan
    dtype: str
    references: References
    local_layers: frozenset[int] = frozenset()
    """Layers whose experts run here and in no plan."""


def _open_checkpoint(
    config: BackboneConfig, interruptible: Callable[[Callable[[], None]], None]
) -> Checkpoint:
    """The folder's checkpoint, or the hub's."""
    from .checkpoint import Checkpoint
    from .hub_checkpoint import HubCheckpoint

    if config.hub is None:
        return Checkpoint.open(config.model)
    return HubCheckpoint.open_hub(
        config.hub,
        config.hub_access,
        config.state_dir / "hub",
        cache_bytes=config.expert_cache_bytes,
        interruptible=interruptible,
    )


def _build_plan(
    config: BackboneConfig,
    opened: Callable[[Checkpoint], None],
    interruptible: Callable[[Callable[[], None]], None],
) -> _Built:
    """Open the checkpoint, prove its recipes, cut the plan. Seconds; run off the loop."""
    import torch

    from .auditing import References
    from .local_experts import LocalExperts
    from .model import resolve_dtype

    torch.set_num_threads(1)
    checkpoint = _open_checkpoint(config, interruptible)
    opened(checkpoint)
    dtype = resolve_dtype(checkpoint.config, config.dtype)
    plan = checkpoint.make_plan(
        window_bytes=config.window_bytes,
        wire_dtype=dtype,
        weighted=config.weighted,
        local_layers=config.local_layers,
        model=config.name,
        rng=random.SystemRandom(),
    )
    # Layers kept here are in no plan that nodes see; what runs experts here has them all.
    whole = checkpoint.whole_plan(plan, config.window_bytes) if config.local_layers else plan
    references = References(
        lambda precision: LocalExperts(
            checkpoint.read, whole, cache_bytes=config.expert_memory_bytes, precision=precision, served=plan
        )
    )
    _ = references.numerics  # chooses and checks the arithmetic now, not in the first request
    local = frozenset(recipe.layer for recipe in whole.layers[: config.local_layers])
    return _Built(checkpoint, plan, dtype, references, local)


def _build_engine(
    config: BackboneConfig, built: _Built, swarm: Swarm, ranks: Ranks | None
) -> tuple[BackboneModel, Engine, Prompter]:
    """Load the model without its experts and make its engine. Run off the loop."""
    from .engine import Engine, EngineConfig
    from .invariance import prove
    from .model import BackboneModel

    dispatcher = keep_local(swarm.dispatcher, built.references.at("stored"), built.local_layers)
    if ranks is None:
        model = BackboneModel.load(built.checkpoint, dtype=built.dtype, dispatcher=dispatcher)
    else:
        from .tensor_parallel import load_leading

        model = load_leading(ranks, built.checkpoint, built.dtype, dispatcher)
    model.varies = prove(model)
    if model.varies is not None:
        _log.warning("numerics.varies", reason=model.varies)
    kv_bytes = config.kv_bytes or max(1 << 24, psutil.virtual_memory().available // 4)
    settings = EngineConfig(
        kv_bytes=kv_bytes,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        step_threads=config.step_threads if ranks is None else 1,
        drafting=config.drafting == "auto",
    )
    engine = Engine(model, settings)
    return model, engine, Prompter(model.tokenizer, model.vocabulary)


async def _publish(market: MarketClient, document: SignedDocument) -> None:
    """Publish the plan; a market that is busy or away is asked again."""
    pause = 0.2
    while True:
        try:
            await market.publish_plan(document)
            return
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.retry_after_s is None:
                raise
            _log.warning("market.unreachable", reason=str(error), code=error.code)
        await asyncio.sleep(random.uniform(0.0, pause))
        pause = min(16.0, 2 * pause)


def next_generation(state_dir: Path, *, now: float) -> int:
    """A start generation above every earlier one, even where the file was lost; `now` in Unix seconds."""
    path = state_dir / "generation"
    last = 0
    with contextlib.suppress(OSError, ValueError):
        last = int(path.read_text("ascii"))
    generation = max(last + 1, int(now))
    staging = path.with_name(".generation.new")
    staging.write_text(str(generation), "ascii")
    staging.replace(path)
    return generation


def _listen(host: str, port: int) -> Any:
    """The listening socket. Raises `ConfigError` naming what to change."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: stop what uses it, or give --port") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _loopback(host: str, port: int) -> str:
    """The URL by which this process reaches its own port."""
    if host in ("0.0.0.0", ""):
        return f"http://127.0.0.1:{port}"
    if host == "::":
        return f"http://[::1]:{port}"
    return local_urls(host, port)[0]


def _normal(urls: tuple[str, ...]) -> tuple[str, ...]:
    from market.wallet import normalise_url

    return tuple(dict.fromkeys(normalise_url(url) for url in urls))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

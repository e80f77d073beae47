"""The life of a node: join, volunteer, load, serve, leave in order.

One `run`. The market is asked what is needed, windows are claimed and loaded one after another until the
budget is full, backbones call over the relays, and a heartbeat renews all leases. When the market is silent
the node serves on. On the way out: stop claiming, tell backbones, finish what is in flight, release.

Knows the order of a node's life; every step is another module's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Final

import aiohttp
import structlog
import torch
from yarl import URL

from market.messages import Abilities, Heartbeat, LeaseBeat, LeaseStatus, Offer
from market.plans import PRECISIONS, WIRE_DTYPES
from market.windows import Window
from relay.errors import ConfigError, IdentityError, KvasirError, Refused, Unreachable
from relay.identity import Certificate, PublicKey, SignedDocument, SigningKey
from relay.secure import SecureSession

from .cache import WeightCache
from .calls import Notice
from .circuits import Circuits
from .config import NodeConfig
from .control import control_endpoint
from .device import allow, lower_priority, measure, network_of
from .formulas import FORMULAS
from .joining import Membership, join_swarm
from .leases import LeaseClock, next_beat_s
from .loading import LoadedWindow, Loader
from .locks import FolderLock
from .receipts import ReceiptBook
from .serving import ExpertServer
from .state import NodeState
from .status import Backoff, NodeStatus, Phase, WindowStatus

log = structlog.get_logger("node")

AUTO_PRECISIONS: Final = ("stored", "int8")
"""What `--precision auto` offers, in order of preference. int4 is for those who ask for it."""

RELEASE_S: Final = 5.0
"""How long the market has to take a release or a drain when the node leaves."""


LAST_RECEIPT_S: Final = 1.0
"""How long the node waits for the receipts that backbones sign when it drains; later ones come next time."""


@dataclass(slots=True, eq=False)
class Held:
    """One lease of this node, from its claim to its end."""

    clock: LeaseClock
    shown: WindowStatus
    loaded: LoadedWindow | None = None
    loading: asyncio.Task[None] | None = None
    over: bool = False
    drains: int = 0
    """Heartbeats since the market began to drain it."""

    @property
    def id(self) -> bytes:
        """The lease's id, 16 bytes."""
        return self.clock.lease.id

    @property
    def window(self) -> Window:
        """The window."""
        return self.clock.lease.window


async def run(
    config: NodeConfig,
    *,
    stop: asyncio.Event | None = None,
    status: NodeStatus | None = None,
    passphrase: bytes | None = None,
    rng: Random | None = None,
) -> None:
    """Be a node until `stop` is set (for ever without it), then leave in order.

    Raises `ConfigError`, `IdentityError` or `Refused` for what the owner must mend.
    """
    node = Node(config, status or NodeStatus(name=config.name), passphrase=passphrase, rng=rng or Random())
    try:
        await node.run(stop or asyncio.Event())
    except BaseExceptionGroup as group:
        raise _first(group) from None


class Node:
    """One node daemon; see `run`."""

    def __init__(
        self, config: NodeConfig, status: NodeStatus, *, passphrase: bytes | None, rng: Random
    ) -> None:
        self._config = config
        self._status = status
        self._passphrase = passphrase
        self._rng = rng
        self._state = NodeState(config.state_dir)
        self._held: dict[bytes, Held] = {}
        self._certificates: dict[PublicKey, Certificate] = {}
        self._changed = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._receipted = asyncio.Event()
        self._budget = 0
        self._network = "unknown"
        self._generation = 0
        self._member: Membership
        self._http: aiohttp.ClientSession
        self._cache: WeightCache
        self._loader: Loader
        self._book: ReceiptBook
        self._server: ExpertServer
        self._circuits: Circuits
        self._threads: ThreadPoolExecutor

    # --- from start to end ---

    async def run(self, stop: asyncio.Event) -> None:
        """See the module's `run`."""
        status = self._status
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack, stop)
            if not await _unless(stop, self._join()):
                return
            await stack.enter_async_context(self._server)
            await self._live(stop)
        status.base = Phase.STOPPED
        log.info("node.stopped", outcome="stopped")

    async def _open(self, stack: contextlib.AsyncExitStack, stop: asyncio.Event) -> None:
        """What needs no swarm: locks, keys, cache, the control endpoint. Blocks the loop briefly."""
        config, status = self._config, self._status
        torch.set_num_threads(config.threads)
        lower_priority(config.nice)
        stack.callback(FolderLock(config.state_dir).close)
        device = measure(config.cache_folder)
        self._cache = WeightCache(
            config.cache_folder, cap_bytes=config.cache_bytes or 0, reserve_bytes=config.reserve_bytes
        )
        stack.callback(self._cache.close)
        allowance = allow(config, device, cached_bytes=self._cache.used_bytes)
        self._cache.cap_bytes = allowance.cache
        self._budget = status.budget_bytes = allowance.budget
        status.machine, status.allowance = device.describe(), allowance.describe()
        status.market.url = config.join.url
        self._generation = self._state.next_generation(now=time.time())
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="node")
        stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        await stack.enter_async_context(
            control_endpoint(config.state_dir, status=status.snapshot, stop=stop.set)
        )
        self._http = await stack.enter_async_context(aiohttp.ClientSession())
        log.info("node.started", generation=self._generation, budget_bytes=self._budget, **device.facts())

    async def _join(self, *, fresh: bool = False) -> None:
        """Into the swarm, and everything that depends on which one it is."""
        config, status = self._config, self._status
        status.base = Phase.WALLET
        member = await join_swarm(
            config.join,
            state=self._state,
            keys=self._state.device_keys(),
            wallet=self._wallet,
            http=self._http,
            status=status,
            rng=self._rng,
            fresh=fresh,
        )
        self._member = member
        self._network = await asyncio.to_thread(self._find_network)
        self._loader = Loader(
            config,
            market=member.market,
            key=member.keys.signing,
            cache=self._cache,
            http=self._http,
            compute=self._threads,
            rng=self._rng,
        )
        if not fresh:
            folder = self._state.receipts_folder(member.root)
            self._book = ReceiptBook(folder, root=member.root, device=member.keys.signing)
            self._server = ExpertServer(on_receipt=self._receive_receipt, on_notice=self._receive_notice)
            self._circuits = Circuits(
                lambda: self._member,
                generation=self._generation,
                serve=self._serve,
                status=status,
                http=self._http,
                config=config,
            )
            status.balance, status.counters = self._balance, self._counters
        status.base = Phase.VOLUNTEERING

    async def _live(self, stop: asyncio.Event) -> None:
        """Everything at once until `stop`; a failure that the owner must mend ends it too."""
        async with asyncio.TaskGroup() as group:
            claiming = group.create_task(self._volunteer(group))
            others = [
                group.create_task(self._circuits.run()),
                group.create_task(self._heartbeats()),
                group.create_task(self._acknowledge()),
            ]
            await stop.wait()
            claiming.cancel()
            await self._leave()
            for task in others:
                task.cancel()

    async def _leave(self) -> None:
        """Tell everybody, finish what is in flight, give the leases back; each step under a deadline."""
        config, status = self._config, self._status
        status.base = Phase.DRAINING
        status.message = "finishing what is in flight"
        log.info("node.draining", leases=len(self._held), sessions=len(status.sessions))
        held = list(self._held.values())
        for one in held:
            if one.loading is not None:
                one.loading.cancel()
        market, reason = self._member.market, "the owner stopped the node"
        await _politely(
            (market.drain(one.id, one.clock.epoch, reason=reason) for one in held if one.loaded), RELEASE_S
        )
        self._receipted.clear()
        finished = await self._server.drain(reason, timeout=config.drain_s)
        if self._circuits.called and self._server.served.calls:
            await _politely([self._receipted.wait()], LAST_RECEIPT_S)
        await self._circuits.close("draining", reason)
        await _politely((market.release(one.id, one.clock.epoch, reason=reason) for one in held), RELEASE_S)
        for one in held:
            self._forget(one, reason, tell=False)
        log.info("node.drained", outcome="drained" if finished else "timeout", leases=len(held))

    # --- volunteering and loading ---

    async def _volunteer(self, group: asyncio.TaskGroup) -> None:
        """Ask what is needed, claim it, load it; again and again until cancelled."""
        failures = Backoff(first_s=1.0, most_s=120.0)
        silence = Backoff()
        while True:
            try:
                await self._renew_grant()
                answer = await self._member.market.volunteer(self._abilities())
                self._status.market_answered()
                silence.reset()
                self._status.message = answer.message
                if not answer.offers:
                    log.info("volunteer.declined", outcome="nothing_needed", reason=answer.message)
                    await self._pause(answer.retry_after_s * self._rng.uniform(0.9, 1.1))
                    continue
                held = await self._claim(answer.offers[0])
            except Unreachable as error:
                self._status.market_failed(str(error))
                wait = silence.next_s(self._rng.random())
                log.warning("market.unreachable", url=self._config.join.url, reason=str(error), retry_s=wait)
                await self._pause(wait)
                continue
            except (Refused, ConfigError) as error:
                await self._refused(error, failures)
                continue
            if held is None:
                continue
            held.loading = group.create_task(self._load(held))
            await asyncio.wait([held.loading])
            if held.loaded is not None:
                failures.reset()
            elif not held.loading.cancelled():
                await self._pause(failures.next_s(self._rng.random()))

    async def _claim(self, offer: Offer) -> Held | None:
        """Take an offer; None if somebody was faster. Raises as the market's client does."""
        market = self._member.market
        plan = await self._loader.plan(offer.plan)
        numerics = await self._loader.numerics(offer.plan, offer.precision)
        sent_at = time.monotonic()
        try:
            lease = await market.claim(
                offer, numerics=numerics, start_generation=self._generation, network=self._network
            )
        except Refused as error:
            if error.code != "conflict":
                raise
            log.info("claim.lost", window=offer.window.name, outcome="conflict", reason=str(error))
            await self._pause(self._rng.uniform(0.05, 0.5))
            return None
        shown = WindowStatus(
            window=lease.window.name,
            plan=lease.plan.hex(),
            model=plan.model,
            precision=lease.precision,
            lease=lease.id.hex(),
            epoch=lease.epoch,
            reason=offer.reason,
        )
        held = Held(LeaseClock.start(lease, sent_at), shown)
        self._held[lease.id] = held
        self._status.windows[lease.id] = shown
        self._circuits.want(relay for one in self._held.values() for relay in one.clock.lease.relays)
        self._beat_now.set()
        log.info(
            "claim.granted",
            outcome="granted",
            window=lease.window.name,
            lease=lease.id.hex(),
            epoch=lease.epoch,
            precision=lease.precision,
            reason=offer.reason,
        )
        return held

    async def _load(self, held: Held) -> None:
        """Load one window and put it in service; on failure give the lease back, saying why."""
        clock, lease = held.clock, held.clock.lease
        try:
            held.loaded = await self._loader.load(lease, held.shown, loading_deadline=clock.loading_deadline)
            experts = held.loaded.experts
            held.shown.kept_bytes = experts.kept_bytes
            held.shown.step = "telling the market"
            sent_at = time.monotonic()
            answer = await self._member.market.loaded(
                lease.id,
                clock.epoch,
                numerics=experts.numerics,
                quantised_hash=experts.quantised_hash,
                kept_bytes=experts.kept_bytes,
            )
        except (KvasirError, OSError, MemoryError) as error:
            await self._give_back(held, f"it cannot be loaded: {_reason(error)}")
            return
        except asyncio.CancelledError:
            self._close(held)
            raise
        self._server.hold(lease.id, answer.epoch, lease.plan, experts)
        held.shown.step = "waiting for a proving call"
        self._apply(held, answer, sent_at)
        self._beat_now.set()
        log.info(
            "window.loaded", window=held.window.name, lease=lease.id.hex(), kept_bytes=experts.kept_bytes
        )

    async def _give_back(self, held: Held, reason: str) -> None:
        """Release a lease before its time, telling market and owner why."""
        self._forget(held, reason)
        await _politely([self._member.market.release(held.id, held.clock.epoch, reason=reason)], RELEASE_S)

    async def _refused(self, error: KvasirError, failures: Backoff) -> None:
        """The market says no to volunteering or a claim: say so, and wait, or sign in anew."""
        log.warning("volunteer.refused", outcome=error.code, reason=str(error))
        if error.code in ("forbidden", "expired", "bad_signature", "not_found") and not self._held:
            self._status.notify(f"the market wants the wallet's proof again: {error}")
            await self._pause(failures.next_s(self._rng.random()))
            await self._join(fresh=True)
            return
        self._status.message = str(error)
        self._status.notify(f"the market refuses: {error}")
        retry = error.retry_after_s if isinstance(error, Refused) else None
        await self._pause(max(retry or 0.0, failures.next_s(self._rng.random())))

    async def _renew_grant(self) -> None:
        """When the grant is about to end and the wallet is here, sign in anew and start over."""
        if self._member.grant.expires_at - time.time() > 3600:
            return
        try:
            available = self._wallet(False) is not None
        except KvasirError as error:
            self._status.notify(f"the wallet's grant ends within the hour and cannot be renewed: {error}")
            return
        if not available:
            self._status.notify("the wallet's grant ends within the hour: run `kvasir-node login`")
            return
        for held in list(self._held.values()):
            await self._give_back(held, "the wallet's grant is renewed")
        await self._circuits.close("closed", "the wallet's grant is renewed")
        await self._join(fresh=True)

    def _abilities(self) -> Abilities:
        precision = self._config.precision
        wanted = AUTO_PRECISIONS if precision == "auto" else (precision,)
        assert all(name in PRECISIONS for name in wanted)
        return Abilities(
            budget_bytes=self._budget,
            precisions=wanted,
            wire_dtypes=tuple(WIRE_DTYPES),
            numerics={},
            network=self._network,
            formulas=tuple(FORMULAS),
            start_generation=self._generation,
            cached=self._cache.whole_windows(),
        )

    async def _pause(self, seconds: float) -> None:
        """Wait, or until a lease ends and room is free."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()

    # --- heartbeats ---

    async def _heartbeats(self) -> None:
        """Renew all leases every 20 s +-10 %, sooner while one waits to be proven or the market is silent."""
        hurries = 0
        silence = Backoff(first_s=1.0, most_s=10.0)
        while True:
            clocks = [held.clock for held in self._held.values()]
            wait = next_beat_s(clocks, every_s=self._config.heartbeat_s, hurries=hurries, rng=self._rng)
            if silence.failures:
                wait = min(wait, silence.next_s(self._rng.random()))
            hurries = hurries + 1 if any(clock.state == "LOADED" for clock in clocks) else 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._beat_now.wait()
                    hurries = 0
            self._beat_now.clear()
            if self._held:
                try:
                    await self._beat()
                    silence.reset()
                except Unreachable as error:
                    silence.next_s(0.0)
                    self._status.market_failed(str(error))
                    log.warning("market.unreachable", url=self._config.join.url, reason=str(error))
                except KvasirError as error:
                    self._status.notify(f"the market refuses the heartbeat: {error}")
                    log.warning("heartbeat.refused", outcome=error.code, reason=str(error))
            self._end_lapsed()

    async def _beat(self) -> None:
        """One heartbeat. Raises as the market's client does."""
        sent_at = time.monotonic()
        beats = tuple(
            LeaseBeat(held.clock.lease.id, held.clock.epoch, held.shown.done_bytes)
            for held in self._held.values()
        )
        answer = await self._member.market.heartbeat(Heartbeat(self._generation, beats))
        self._status.market_answered()
        self._circuits.tickets.add(answer.tickets)
        for notice in answer.notices:
            self._status.notify(notice)
        for status in answer.leases:
            held = self._held.get(status.id)
            if held is not None:
                self._apply(held, status, sent_at)
        for held in list(self._held.values()):
            if held.clock.state == "DRAINING":
                held.drains += 1
                if held.drains > 1:  # whatever was in flight has been answered since the last heartbeat
                    await self._give_back(held, "drained")

    def _apply(self, held: Held, status: LeaseStatus, sent_at: float) -> None:
        """Take over what the market says about a lease."""
        before = held.clock.state
        held.clock.renew(status, sent_at)
        held.shown.state, held.shown.epoch = held.clock.state, held.clock.epoch
        held.shown.lease_left_s = max(0.0, held.clock.deadline - time.monotonic())
        if held.clock.state == "ENDED":
            self._forget(held, status.reason or "the market ended the lease")
            return
        if held.clock.state == before:
            return
        log.info("lease.changed", window=held.window.name, lease=held.id.hex(), state=held.clock.state)
        if held.clock.state == "PROVEN":
            held.shown.step = ""
            self._status.notify(f"{held.window} is proven and serves")
        elif held.clock.state == "DRAINING":
            held.shown.step = status.reason or "draining"
            self._server.drain_lease(held.id)
            self._status.notify(f"{held.window} drains: {status.reason or 'the market moves it'}")

    def _end_lapsed(self) -> None:
        now = time.monotonic()
        for held in list(self._held.values()):
            if held.clock.lapsed(now, called=self._circuits.called):
                self._forget(held, "the lease ran out: neither the market nor a backbone was heard of since")

    def _forget(self, held: Held, reason: str, *, tell: bool = True) -> None:
        """A lease is over: stop serving it, let memory and cache go, tell the owner why."""
        if held.over:
            return
        held.over = True
        if held.loading is not None and held.loading is not asyncio.current_task():
            held.loading.cancel()
        self._server.drop(held.id)
        self._close(held)
        self._held.pop(held.id, None)
        self._status.windows.pop(held.id, None)
        self._changed.set()
        if tell:
            self._status.notify(f"{held.window} is given up: {reason}")
        log.info("lease.ended", window=held.window.name, lease=held.id.hex(), reason=reason)

    def _close(self, held: Held) -> None:
        if held.loaded is not None:
            held.loaded.close()
            held.loaded = None

    # --- what backbones send ---

    async def _serve(self, session: SecureSession) -> None:
        self._certificates[session.certificate.ed25519] = session.certificate
        await self._server.handle_session(session)

    async def _receive_receipt(self, data: bytes) -> bytes | None:
        """Keep a receipt and countersign it; one that does not hold is not signed, and the owner told."""
        try:
            document = SignedDocument.from_bytes(data)
            certificate = self._certificates.get(document.signer)
            if certificate is None:
                raise IdentityError("the receipt is signed by no backbone that has a session here")
            loop = asyncio.get_running_loop()
            wallet = self._member.grant.wallet
            ack = await loop.run_in_executor(
                self._threads, lambda: self._book.accept(document, certificate, wallet=wallet)
            )
        except (KvasirError, OSError) as error:
            self._status.notify(f"a receipt was not signed: {error}")
            log.warning("receipt.rejected", reason=str(error))
            return None
        self._receipted.set()
        return ack.to_bytes()

    def _receive_notice(self, notice: Notice) -> None:
        self._status.notify(f"a backbone says: {notice.message}")
        log.warning("notice.received", code=notice.code, reason=notice.message)

    async def _acknowledge(self) -> None:
        """Hand in the last countersignatures again, in case a kill lost one on its way."""
        for ack in self._book.acknowledgements():
            with contextlib.suppress(KvasirError):
                await self._member.market.acknowledge(ack)

    def _balance(self) -> dict[str, object]:
        balances = self._book.balances()
        total = (
            sum((balance.credit for balance in balances), start=type(balances[0].credit)(0))
            if balances
            else 0
        )
        return {"credit": str(total), "calls": sum(balance.calls for balance in balances)}

    def _counters(self) -> dict[str, int]:
        served = self._server.served
        return {
            "calls": served.calls,
            "rows": served.rows,
            "outputs": served.outputs,
            "carried bytes": served.carried_bytes,
            "refusals": served.refusals.total(),
        }

    # --- this machine ---

    def _wallet(self, create: bool) -> SigningKey | None:
        """The wallet's key; None where the configuration names none, none is here and none may be made."""
        path, named = self._config.wallet_file, self._config.wallet is not None
        if not named and not create and not path.exists():
            return None
        return self._state.wallet(path, create=not named, passphrase=self._passphrase)

    def _find_network(self) -> str:
        url = URL(self._config.join.url)
        return network_of(url.host or "", url.port or 80, salt=self._member.root)


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "the system refused the memory: give a smaller --budget"
    return str(error) or type(error).__name__


async def _politely(requests: Iterable[Awaitable[object]], timeout_s: float) -> None:
    """Send all requests at once; what fails or takes too long does not matter."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*requests, return_exceptions=True)


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Do `work` to its end, or until `stop` is set: then False."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.wait([task, stopping])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

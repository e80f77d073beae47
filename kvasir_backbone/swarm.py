"""The swarm as the backbone keeps it: claims followed, sessions held, replicas proven, receipts sent.

Theory of operation. `run` follows the market's claims of one plan (a snapshot, then changes; a new snapshot
after any gap). Each device with a loaded claim gets a link over a relay, and each loaded claim a proving
call; once the market has taken the proof, the replica is in the roster that the dispatcher plans with. A
device leaves the roster when its session ends or its breaker opens, never by a ping, and comes back by a
proving call. While the market is silent everything goes on with what is known.

All state belongs to the loop's thread; the dispatcher's threads read the immutable `roster` and hand calls
over (`submit`). One task each: following, hashing, demand, relays, receipts, and one a device.

Knows the market, relays and links. Knows no rows: those are the dispatcher's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

import aiohttp
import structlog

from kvasir_node.calls import Buffers, Reference
from market.client import MarketClient
from market.messages import Change, QuarantineAnswer, RelayInfo, ResyncNeeded
from market.plans import Plan, PlanId, WindowHashes, sign_hashes
from market.swarm import OperatingKey
from market.windows import Window
from relay.channel import Channel
from relay.errors import KvasirError, Unreachable
from relay.identity import Certificate, PublicKey, SigningKey, address_of
from relay.paths import PathConfig, Paths
from relay.secure import SecureSession
from relay.transport import RelayClient

from .arbitration import Arbiter
from .audit import QUARANTINE_S, NormBand, limit_of
from .auditing import References, SampledAuditor
from .bookkeeping import Bookkeeper
from .credit import CreditBook
from .dialling import Dialler
from .directory import Difference, Directory, Holding
from .dispatch import CallEnd, OwnerBook, SwarmDispatcher
from .links import DeviceLink
from .pace import MIN_FAILOVER_S
from .proving import Prover
from .relays import LONGEST_PAUSE_S, Relays
from .reporting import Reporter
from .roster import Replica, Roster
from .weighting import WeightedDispatcher, cuts_a_layer

_log = structlog.get_logger("backbone")

HANDSHAKE_TIMEOUT_S: Final = 10.0
DIRECT_HANDSHAKE_S: Final = 3.0
"""How long a handshake may take over a relay, and over a direct link, which stands already."""

PATHS: Final = PathConfig(relay_timeout_s=5.0)
"""How the ways to a device are tried."""

MOVES_PER_S: Final = 500
"""How many sessions at most begin to leave a draining relay in one second."""

FORGET_S: Final = 3600.0
"""What is known of a device's speed, health and chain is kept so long after its last claim ended."""

PROVE_AGAIN_S: Final = 0.5
"""First pause after a proving call without an answer; it doubles."""


@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """How a swarm is kept. Times in seconds."""

    start_generation: int
    """Rises with each start of the daemon."""
    receipts: Path
    """The receipt store's file."""
    fallback: bool = True
    """Whether windows without an owner are computed here."""
    failover_s: float = MIN_FAILOVER_S
    """No call is given up before this time."""
    demand_s: float = 5.0
    """How often demand is reported to the market."""
    drain_s: float = 5.0
    """How long the last receipts may take to be posted."""
    relay_only: bool = False
    """Never dial devices directly."""
    local: bool = False
    """Every device is on this machine: loopback addresses may be dialled."""


class Swarm:
    """See the module docstring. `keys` gives the backbone's current operating key, `hash_window` makes the
    hashes of a window (blocking; run in `threads`), `references` runs experts here.
    """

    def __init__(
        self,
        plan: Plan,
        plan_id: PlanId,
        config: SwarmConfig,
        *,
        market: MarketClient,
        http: aiohttp.ClientSession,
        keys: Callable[[], OperatingKey],
        hash_window: Callable[[Window], WindowHashes],
        references: References,
        threads: Executor,
        rng: random.Random | None = None,
    ) -> None:
        self.plan = plan
        self.plan_id = plan_id
        self.directory = Directory(plan)
        self.owners = OwnerBook()
        self.band = NormBand()
        self.book = CreditBook()
        self.references = references
        self._config = config
        self._market = market
        self._http = http
        self._keys = keys
        self._hash_window = hash_window
        self._threads = threads
        self._rng = rng or random.SystemRandom()
        self._loop = asyncio.get_running_loop()
        self._generations = itertools.count((config.start_generation << 20) + 1)
        self._roster = Roster(self.directory.windows)
        self._covered: frozenset[int] = frozenset()
        self._links: dict[PublicKey, DeviceLink] = {}
        self._tasks: dict[PublicKey, asyncio.Task[None]] = {}
        self._wakes: dict[PublicKey, asyncio.Event] = {}
        self._acks: dict[PublicKey, bytes] = {}
        self._gone: dict[PublicKey, float] = {}  # devices without claims, and since when
        self._stale: set[tuple[bytes, int]] = set()  # leases whose device refused them at that epoch
        self._starts: dict[PublicKey, int] = {}
        self._relays = Relays(
            market=market,
            keys=keys,
            start_generation=config.start_generation,
            http=http,
            rng=self._rng,
            named=self._named_relays,
            on_change=self._on_relay,
        )
        self._ways: dict[PublicKey, Paths] = {}
        self._addresses: dict[PublicKey, tuple[str, ...]] = {}
        self._dialler = Dialler(
            http=http, local=config.local, lan=not config.relay_only, on_found=self._on_found
        )
        self._group: asyncio.TaskGroup | None = None
        self._out: dict[PublicKey, float] = {}  # wallets in quarantine, and until when
        self._hash_now = asyncio.Event()
        self._changed = asyncio.Condition()
        self.auditor = SampledAuditor(
            references,
            self.band,
            on_verdict=self._verdict_from_thread,
            on_violation=lambda *found: self._soon(self.reporter.violation, *found),
            rng=rng,
        )
        self.reporter = Reporter(
            market=market,
            plan=plan_id,
            wire_dtype=plan.wire_dtype,
            signer=self._signer,
            reference=references.run,
            threads=threads,
            told=self._on_quarantined,
            rng=rng,
        )
        self.dispatcher = (WeightedDispatcher if plan.weighted else SwarmDispatcher)(
            plan,
            self,
            owners=self.owners,
            book=self.book,
            band=self.band,
            reference=references,
            fallback=config.fallback,
            min_failover_s=config.failover_s,
            auditor=self.auditor,
            rng=rng,
        )
        self.auditor.arbiter = Arbiter(plan, self, next_call=self.dispatcher.next_call, rng=self._rng)
        self._prover = Prover(
            plan, references, self.band, threads=threads, next_call=self.dispatcher.next_call, rng=rng
        )
        self.bookkeeper = Bookkeeper(
            self.book, config.receipts, market=market, signer=self._signer, send=self._send_receipt
        )

    def _signer(self) -> tuple[Certificate, SigningKey]:
        key = self._keys()
        return key.certificate, key.signing

    # --- what the dispatcher calls, from its threads ------------------------------------------------

    def roster(self) -> Roster:
        """See `dispatch.Lines.roster`."""
        return self._roster

    def submit(
        self,
        device: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        *,
        answer_bytes: int,
    ) -> None:
        """See `dispatch.Lines.submit`."""
        try:
            self._loop.call_soon_threadsafe(self._submit, device, call_id, message, done, answer_bytes)
        except RuntimeError:  # the loop is closed: the daemon is ending
            done(CallEnd(call_id, time.monotonic(), message="the backbone is shutting down"))

    def _submit(
        self,
        device: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        answer_bytes: int,
    ) -> None:
        link = self._links.get(device)
        if link is None:
            done(CallEnd(call_id, time.monotonic(), message="the device has no session"))
        else:
            link.submit(call_id, message, done, answer_bytes)

    def cancel(self, device: PublicKey, call_id: int) -> None:
        """See `dispatch.Lines.cancel`."""
        self._soon(self._cancel, device, call_id)

    def _cancel(self, device: PublicKey, call_id: int) -> None:
        link = self._links.get(device)
        if link is not None:
            link.cancel(call_id)

    def tripped(self, device: PublicKey, reason: str) -> None:
        """See `dispatch.Lines.tripped`."""
        self._soon(self._on_trip, device, reason)

    def stale(self, replicas: Sequence[Replica], reason: str) -> None:
        """See `dispatch.Lines.stale`."""
        self._soon(self._on_stale, replicas, reason)

    def _soon(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            return

    def _on_trip(self, device: PublicKey, reason: str) -> None:
        _log.warning("breaker.opened", device=address_of(device), reason=reason)
        self._wake(device)

    def _on_stale(self, replicas: Sequence[Replica], reason: str) -> None:
        """Leave the leases out until the market says more of them or a proving call is answered again."""
        for replica in replicas:
            _log.warning(
                "lease.stale",
                device=address_of(replica.device),
                window=replica.window.name,
                epoch=replica.epoch,
                reason=reason,
            )
            self._stale.add((replica.lease, replica.epoch))
        self._publish()
        for device in {replica.device for replica in replicas}:
            link = self._links.get(device)
            if link is not None:
                link.announce_again()
            self._wake(device)

    def _verdict_from_thread(self, replica: Replica, reason: str, d: float) -> None:
        self._soon(self._on_verdict, replica, reason, d)

    # --- life ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the receipt store. Raises `ConfigError`."""
        await self.bookkeeper.open()

    async def run(self) -> None:
        """Keep the swarm until cancelled. Raises what cannot be mended by waiting."""
        try:
            async with self._dialler, asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._relays.run(group))
                group.create_task(self._follow())
                group.create_task(self._make_hashes())
                group.create_task(self._report_demand())
                group.create_task(self.bookkeeper.run())
                group.create_task(self.reporter.run())
        finally:
            self._group = None

    async def drain(self) -> None:
        """Sign, send and post the last receipts; `run` is still running."""
        await self.bookkeeper.drain(self._config.drain_s)

    async def close(self) -> None:
        """Close what `run` does not own. The auditor's thread ends first."""
        await asyncio.to_thread(self.auditor.close)
        await self.bookkeeper.close()

    # --- relays --------------------------------------------------------------------------------------

    def _named_relays(self) -> set[PublicKey]:
        """The relays that claims name."""
        return {relay.key for holding in self.directory.all() for relay in holding.assignment.relays}

    def _on_relay(self, client: RelayClient) -> None:
        """A relay was connected, or goes away: links without a session dial, those through it move."""
        if client.leaving:
            there = [self._links[d] for d, p in self._ways.items() if p.relay is client and d in self._links]
            for number, link in enumerate(there):  # handshakes cost: not all in one moment
                self._loop.call_later(number / MOVES_PER_S, link.readdressed)
            return
        for link in self._links.values():
            if link.session is None:
                link.hurry()

    def _paths(self, device: PublicKey) -> Paths:
        """The ways to a device. A relay serves at once; a direct way is looked for when its link wants it."""
        return Paths(
            device,
            addresses=lambda: self._direct_urls(device),
            relays=lambda: self._relays.clients,
            preferred=lambda: self._relays_of(device),
            handshake=lambda channel: self._shake(device, channel),
            http=self._http,
            config=PATHS,
            dial=self._dialler.dial,
        )

    def _relays_of(self, device: PublicKey) -> list[PublicKey]:
        """The relays that a device's claims say it is at, its first choice first."""
        holdings = self.directory.of(device)
        if not holdings:
            return []
        newest = max(holdings, key=lambda holding: holding.assignment.start_generation)
        return [relay.key for relay in newest.assignment.relays]

    def _direct_urls(self, device: PublicKey) -> list[str]:
        link = self._links.get(device)
        if self._config.relay_only or link is None:
            return []
        if not link.may_go_direct and self.relays_connected:
            return []
        return self._dialler.urls(device, self._addresses.get(device, ()))

    def _on_found(self, device: PublicKey) -> None:
        """A device was heard on the LAN, at an address that is new."""
        link = self._links.get(device)
        if link is not None:
            link.readdressed()

    async def _shake(self, device: PublicKey, channel: Channel) -> SecureSession:
        """A session over a channel, or the reason why whoever is there is not the device."""
        holdings = self.directory.of(device)
        if not holdings:
            await channel.close()
            raise Unreachable("the device has no claim left")
        grant = max((h.assignment.grant for h in holdings), key=lambda grant: grant.issued_at)
        key = self._keys()
        answered = False
        try:
            session = await SecureSession.connect(
                channel,
                certificate=key.certificate,
                key=key.exchange,
                device_key=grant.exchange,
                root=key.certificate.swarm,
                grant_hash=grant.hash,
                generation=next(self._generations),
                timeout=HANDSHAKE_TIMEOUT_S if channel.path == "relay" else DIRECT_HANDSHAKE_S,
            )
            answered = True
            return session
        finally:
            self._dialler.shaken(channel, device_answered=answered)

    # --- following the market ------------------------------------------------------------------------

    async def _follow(self) -> None:
        pause = 0.1
        while True:
            try:
                snapshot = await self._market.assignments(self.plan_id)
                pause = 0.1
                await self._update(self.directory.replace_all(snapshot))
                watch = self._market.watch(self.plan_id, snapshot.revision)
                async with aclosing(cast(AsyncGenerator[Change, None], watch)) as changes:
                    async for change in changes:
                        await self._update(self.directory.apply(change))
            except ResyncNeeded as error:
                _log.info("claims.resynced", reason=str(error))
            except KvasirError as error:
                _log.warning("market.unreachable", reason=str(error), code=error.code)
            await asyncio.sleep(self._rng.uniform(0.0, pause))
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def _update(self, difference: Difference) -> None:
        """Carry out what a change of claims means."""
        for holding, reason in difference.ended.values():
            assignment = holding.assignment
            _log.info(
                "claim.ended",
                device=address_of(assignment.device),
                window=assignment.window.name,
                epoch=assignment.epoch,
                reason=reason,
            )
        for wallet in {h.assignment.wallet for h, reason in difference.ended.values() if _is_out(reason)}:
            self.auditor.begin_again(wallet)  # whichever backbone found it out
        if self._stale:
            self._stale &= {(h.assignment.lease, h.assignment.epoch) for h in self.directory.all()}
        self._sign_leaving(difference)
        self._refuse_quarantined(difference)
        wanted = self.directory.devices()
        for device in difference.devices:
            if device in wanted:
                self._keep_device(device)
            elif device in self._tasks:
                self._tasks.pop(device).cancel()
                for kept in (self._wakes, self._starts, self._addresses):
                    kept.pop(device, None)
        self._hash_now.set()
        self._publish()
        async with self._changed:
            self._changed.notify_all()

    def _refuse_quarantined(self, difference: Difference) -> None:
        assert self._group is not None
        for device in difference.devices:
            for holding in self.directory.of(device):
                left = self._quarantine_left(holding.assignment.wallet)
                if left > 0 and holding.assignment.state != "ENDED":
                    reason = f"the wallet is in quarantine for {left:.0f} s more"
                    self._group.create_task(
                        self._revoke(holding, reason, code="quarantined", quarantine_s=left)
                    )

    def _quarantine_left(self, wallet: PublicKey) -> float:
        """Seconds that a wallet's quarantine lasts yet."""
        return self._out.get(wallet, 0.0) - time.monotonic()

    def _sign_leaving(self, difference: Difference) -> None:
        """A device that drains or lost a claim gets its receipt now."""
        assert self._group is not None
        leaving = {holding.device for holding, _ in difference.ended.values()}
        for device in difference.devices:
            if any(holding.assignment.state == "DRAINING" for holding in self.directory.of(device)):
                leaving.add(device)
        if leaving:
            self._group.create_task(self.bookkeeper.sign(leaving))

    def _keep_device(self, device: PublicKey) -> None:
        assert self._group is not None
        self.owners.ensure(device)
        if device not in self._tasks:
            self._wakes[device] = asyncio.Event()
            self._tasks[device] = self._group.create_task(self._tend(device))
        link = self._links.get(device)
        if link is not None:
            link.announce()
        self._note_addresses(device)
        self._note_relays(device)
        self._follow_wallet(device)
        start = max(holding.assignment.start_generation for holding in self.directory.of(device))
        if start > self._starts.get(device, 0):
            self._starts[device] = start
            if link is not None:
                link.hurry()
        self._wake(device)

    def _note_addresses(self, device: PublicKey) -> None:
        """Keep what the device announced last; its link looks for a direct way where that is new."""
        newest = max(self.directory.of(device), key=lambda holding: holding.assignment.start_generation)
        addresses = newest.assignment.addresses
        if addresses != self._addresses.get(device, ()):
            self._addresses[device] = addresses
            self._on_found(device)

    def _note_relays(self, device: PublicKey) -> None:
        """Be at the relays that the device's claims name; its session moves where it likes another better."""
        for holding in self.directory.of(device):
            for relay in holding.assignment.relays:
                self._relays.keep(relay)
        paths, link = self._ways.get(device), self._links.get(device)
        if paths is None or link is None:
            return
        if link.session is None:
            link.hurry()
        elif paths.misplaced:
            link.readdressed()

    def _follow_wallet(self, device: PublicKey) -> None:
        """A device that was granted to another wallet gets its calls paid to that one."""
        assert self._group is not None
        if self.book.knows(device) and self.book.wallet_of(device) != self._wallet(device):
            self._group.create_task(self._change_wallet(device))

    async def _change_wallet(self, device: PublicKey) -> None:
        """Sign for the old wallet, then use the new one; the device gets no new calls until that is done."""
        wallet = self._wallet(device)
        if wallet is None:
            return
        try:
            await self.bookkeeper.open_chain(device, wallet)
        except KvasirError as error:
            _log.warning("receipt.chain_unknown", device=address_of(device), reason=str(error))
        self._publish()

    def _wallet(self, device: PublicKey) -> PublicKey | None:
        """The wallet of a device's newest grant, or None where it has no claim."""
        grants = [holding.assignment.grant for holding in self.directory.of(device)]
        return max(grants, key=lambda grant: grant.issued_at).wallet if grants else None

    def _forget_gone(self, now: float) -> None:
        """Drop what is known of devices whose last claim ended `FORGET_S` ago."""
        holders = self.directory.holders()
        self._gone = {device: since for device, since in self._gone.items() if device not in holders}
        for device in (self.owners.owners.keys() | self.book.all_totals().keys()) - holders:
            since = self._gone.setdefault(device, now)
            over = now - since >= FORGET_S and device not in self._tasks
            if over and self.owners.forget(device) and self.bookkeeper.forget(device):
                self.dispatcher.forget(device)
                del self._gone[device]
        self._out = {wallet: until for wallet, until in self._out.items() if until > now}
        wallets = {holding.assignment.wallet for holding in self.directory.all()}
        self.auditor.forget(wallets | self.book.wallets())

    def _wake(self, device: PublicKey) -> None:
        event = self._wakes.get(device)
        if event is not None:
            event.set()

    def _publish(self) -> None:
        """Make the roster anew, and say which windows lost or found an owner."""
        connected = {d for d, link in self._links.items() if link.session is not None and not link.draining}
        usable = {
            device
            for device in self._links
            if self.book.knows(device) and self.book.wallet_of(device) == self._wallet(device)
        }
        self._roster = self.directory.roster(connected, usable=usable, stale=self._stale)
        covered = frozenset(
            number
            for number, replicas in self._roster.replicas.items()
            if any(replica.connected for replica in replicas)
        )
        for number in sorted(self._covered - covered):
            _log.warning(
                "window.uncovered",
                window=self.plan.windows[number].name,
                served_by="fallback" if self._config.fallback else "nobody",
            )
        for number in sorted(covered - self._covered):
            _log.info("window.covered", window=self.plan.windows[number].name)
        self._covered = covered

    # --- one device ----------------------------------------------------------------------------------

    async def _tend(self, device: PublicKey) -> None:
        """Everything about one device, until its last claim ended: the boundary for this peer."""
        paths = self._ways[device] = self._paths(device)
        link = DeviceLink(
            device,
            dial=paths.connect,
            improve=paths.improve,
            detached=lambda: paths.detached,
            references=lambda: self._references(device),
            on_up=lambda: self._on_up(device),
            on_down=self._publish,
            on_ack=lambda ack: self._on_ack(device, ack),
            on_draining=lambda reason: self._on_draining(device, reason),
        )
        wake = self._wakes[device]
        try:
            await self._open_chain(device)
            self._links[device] = link
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(link.run())
                tasks.create_task(self._prove_all(device, link, wake))
        except Exception:  # a bug here must cost one device, not the swarm
            _log.exception("device.crashed", device=address_of(device))
            self._tasks.pop(device, None)
        finally:
            if self._ways.get(device) is paths:
                del self._ways[device]
            if self._links.get(device) is link:
                del self._links[device]
                self._addresses.pop(device, None)
                self._dialler.forget(device)
            self._publish()

    async def _open_chain(self, device: PublicKey) -> None:
        pause = 0.2
        while True:
            wallet = self._wallet(device)
            if wallet is not None:
                try:
                    await self.bookkeeper.open_chain(device, wallet)
                    return
                except KvasirError as error:
                    _log.warning("receipt.chain_unknown", device=address_of(device), reason=str(error))
            await asyncio.sleep(self._rng.uniform(0.0, pause))
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    def _references(self, device: PublicKey) -> list[Reference]:
        return [
            Reference(holding.ref, holding.assignment.lease, holding.assignment.epoch, self.plan_id)
            for holding in self.directory.of(device)
            if holding.assignment.state != "HELD"
        ]

    def _on_up(self, device: PublicKey) -> None:
        assert self._group is not None
        owner = self.owners.ensure(device)
        with self.owners.lock:
            owner.breaker.reconnected(time.monotonic())
        self._group.create_task(self._resume(device))
        self._publish()
        self._wake(device)

    async def _resume(self, device: PublicKey) -> None:
        await self.bookkeeper.session_started(device)

    def _send_receipt(self, device: PublicKey, receipt: bytes) -> None:
        link = self._links.get(device)
        if link is not None:
            link.send_receipt(receipt)

    def _on_ack(self, device: PublicKey, ack: bytes) -> None:
        """One is taken in at a time, and the newest waits: it covers those before it."""
        assert self._group is not None
        busy = device in self._acks
        self._acks[device] = ack
        if not busy:
            self._group.create_task(self._acknowledge(device))

    async def _acknowledge(self, device: PublicKey) -> None:
        ack = None
        while ack is not self._acks[device]:
            ack = self._acks[device]
            try:
                await self.bookkeeper.acknowledge(device, ack)
            except KvasirError as error:
                _log.warning("receipt.not_acknowledged", device=address_of(device), reason=str(error))
        del self._acks[device]

    def _on_draining(self, device: PublicKey, reason: str) -> None:
        assert self._group is not None
        _log.info("device.draining", device=address_of(device), reason=reason)
        self._publish()
        self._group.create_task(self.bookkeeper.sign({device}))

    # --- proving -------------------------------------------------------------------------------------

    async def _prove_all(self, device: PublicKey, link: DeviceLink, wake: asyncio.Event) -> None:
        """Prove each loaded claim, and any claim of a device whose breaker is open, as they come."""
        pauses: dict[bytes, float] = {}
        while True:
            await link.up.wait()
            wake.clear()
            holding, wait_s = self._next_to_prove(device)
            if holding is None:
                try:
                    async with asyncio.timeout(wait_s):
                        await wake.wait()
                except TimeoutError:
                    pass
                continue
            if not await self._prove(link, holding):
                lease = holding.assignment.lease
                pauses[lease] = min(LONGEST_PAUSE_S, 2 * pauses.get(lease, PROVE_AGAIN_S / 2))
                await asyncio.sleep(pauses[lease])

    def _next_to_prove(self, device: PublicKey) -> tuple[Holding | None, float | None]:
        """The claim to prove now, or how long to wait for one (None: until something changes)."""
        holdings = self.directory.of(device)
        loaded = [holding for holding in holdings if holding.assignment.state == "LOADED"]
        if loaded:
            return loaded[0], None
        proven = [holding for holding in holdings if holding.assignment.state == "PROVEN"]
        stale = [h for h in proven if (h.assignment.lease, h.assignment.epoch) in self._stale]
        sound = [holding for holding in proven if holding not in stale]
        breaker = self.owners.ensure(device).breaker
        left = breaker.retry_at - time.monotonic()
        if sound and breaker.is_open and left <= 0:
            return self._rng.choice(sound), None
        if stale:
            return self._rng.choice(stale), None
        return None, left if sound and breaker.is_open else None

    async def _prove(self, link: DeviceLink, holding: Holding) -> bool:
        """One proving call and what follows; False where it is to be tried again."""
        assignment = holding.assignment
        owner = self.owners.ensure(link.device)
        facts = {"device": address_of(link.device), "window": assignment.window.name}
        try:
            d = await self._prover.prove(link, holding, owner.pace)
            if d > limit_of(assignment.numerics, assignment.precision):
                await self._refute(holding, d)
                return True
            with self.owners.lock:
                owner.breaker.succeed()
            self._stale.discard((assignment.lease, assignment.epoch))
            if assignment.state == "LOADED":
                status = await self._market.declare_proven(assignment.lease, assignment.epoch, d=d)
                self.directory.mark(assignment.lease, assignment.epoch, state=status.state)
            _log.info("replica.proven", outcome="proven", d=d, numerics=assignment.numerics, **facts)
        except KvasirError as error:
            with self.owners.lock:
                if owner.breaker.is_open:
                    owner.breaker.trip(time.monotonic(), str(error))
            _log.warning("replica.proven", outcome="failed", code=error.code, reason=str(error), **facts)
            return False
        self._publish()
        return True

    async def _refute(self, holding: Holding, d: float) -> None:
        """A proving call gave wrong outputs: the claim ends, and the owner is told why."""
        assignment = holding.assignment
        reason = (
            f"a proving call for {assignment.window.name} gave wrong outputs: d = {d:.3g}, and the limit of "
            f"numerics class {assignment.numerics} is {limit_of(assignment.numerics, assignment.precision):g}"
        )
        await self._revoke(holding, reason, code="forbidden")

    def _on_verdict(self, replica: Replica, reason: str, d: float) -> None:
        """Audits found the wallet out: its claims end here now, and in the market once it hears of it."""
        wallet, now = replica.wallet, time.monotonic()
        if self._quarantine_left(wallet) > 0:
            return
        self._out = {other: until for other, until in self._out.items() if until > now}
        self._out[wallet] = now + QUARANTINE_S  # until the market has said how long
        self.auditor.begin_again(wallet)
        _log.warning("wallet.quarantined", wallet=address_of(wallet), reason=reason)
        for holding in self.directory.all():
            if holding.assignment.wallet == wallet:
                self._end_here(holding, f"quarantine: {reason}", code="quarantined")
        self._publish()
        self.reporter.quarantine(wallet, reason)

    def _on_quarantined(self, wallet: PublicKey, answer: QuarantineAnswer) -> None:
        """The market put the wallet out."""
        self._out[wallet] = time.monotonic() + answer.left_s
        _log.info(
            "quarantine.recorded",
            wallet=address_of(wallet),
            number=answer.number,
            left_s=answer.left_s,
            void_bytes=answer.void,
        )

    async def _revoke(self, holding: Holding, reason: str, *, code: str, quarantine_s: float = 0.0) -> None:
        """End a claim here and in the market, which keeps its wallet out for `quarantine_s`."""
        assignment = holding.assignment
        self._end_here(holding, reason, code=code)
        self._publish()
        try:
            await self._market.revoke(
                assignment.lease, assignment.epoch, reason=reason, quarantine_s=max(0.0, quarantine_s)
            )
        except KvasirError as error:
            _log.warning("market.unreachable", reason=str(error), code=error.code)

    def _end_here(self, holding: Holding, reason: str, *, code: str) -> None:
        """End a claim as far as this backbone goes; its owner is told why. `_publish` must follow."""
        assignment = holding.assignment
        link = self._links.get(assignment.device)
        if link is not None:
            link.send_notice(code, reason)
        self.directory.mark(assignment.lease, assignment.epoch, state="ENDED")
        _log.warning(
            "claim.revoked",
            device=address_of(assignment.device),
            window=assignment.window.name,
            reason=reason,
        )

    async def drain_device(self, device: PublicKey, reason: str) -> int:
        """End all claims of a device for its operator's `reason`, calls in flight answered first.

        Returns how many claims it had.
        """
        holdings = self.directory.of(device)
        for holding in holdings:
            self.directory.mark(holding.assignment.lease, holding.assignment.epoch, state="DRAINING")
        self._publish()
        link = self._links.get(device)
        if link is not None:
            await link.wait_idle(self._config.drain_s)
        await self.bookkeeper.sign({device})
        for holding in holdings:
            await self._revoke(holding, reason, code="draining")
        return len(holdings)

    # --- hashes and demand ---------------------------------------------------------------------------

    async def _make_hashes(self) -> None:
        """Make and publish the hashes of windows at their first claim."""
        while True:
            await self._hash_now.wait()
            self._hash_now.clear()
            try:
                for window in await self._market.wanted_hashes(self.plan_id):
                    started = time.monotonic()
                    hashes = await self._loop.run_in_executor(self._threads, self._hash_window, window)
                    await self._market.publish_hashes(sign_hashes(hashes, self._keys().signing))
                    _log.info("window.hashed", window=window.name, seconds=time.monotonic() - started)
            except KvasirError as error:
                _log.warning("window.not_hashed", code=error.code, reason=str(error))
                await asyncio.sleep(1.0)
                self._hash_now.set()

    async def _report_demand(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._config.demand_s)
            now = time.monotonic()
            self._forget_gone(now)
            rates = {
                name: rows / (now - last) for name, rows in self.dispatcher.take_demand().items() if rows
            }
            last = now
            try:
                await self._market.report_demand(self.plan_id, rates)
            except KvasirError as error:
                _log.debug("demand.unreported", reason=str(error))

    # --- answers for the daemon ----------------------------------------------------------------------

    async def leased(self, device: PublicKey, wait_s: float) -> Collection[Window]:
        """The windows a device has claims on, waiting up to `wait_s` for the first to be known."""
        windows = self.directory.leased_windows(device)
        if windows or wait_s <= 0:
            return windows
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: bool(self.directory.leased_windows(device)))
        except TimeoutError:
            pass
        return self.directory.leased_windows(device)

    def numerics(self) -> Literal["exact", "mixed"]:
        """Whether all owners and the fallback share one numerics class, and sums do not depend on owners."""
        if self.plan.weighted and cuts_a_layer(self.plan):
            return "mixed"
        classes = set(self._roster.numerics())
        if self._config.fallback:
            classes.add(self.references.numerics)
        return "exact" if len(classes) <= 1 else "mixed"

    def links(self) -> Mapping[PublicKey, DeviceLink]:
        """The link of each device that is kept."""
        return self._links

    def relay_of(self, device: PublicKey) -> str | None:
        """The relay that a device's session goes through, or None."""
        paths, link = self._ways.get(device), self._links.get(device)
        if paths is None or paths.relay is None or link is None or link.path != "relay":
            return None
        return paths.relay.url

    def relays(self) -> list[tuple[RelayInfo, RelayClient | None, int]]:
        """Each relay that is listed: what the market says, this side's connection, and its sessions there."""
        through = Counter(p.relay.relay_key for p in self._ways.values() if p.relay is not None)
        return [(info, self._relays.client(key), through[key]) for key, info in self._relays.listed.items()]

    @property
    def relays_connected(self) -> int:
        """Relays this backbone is connected to."""
        return self._relays.connected


def _is_out(reason: str) -> bool:
    """Whether the market ended a claim because its wallet is in quarantine."""
    return reason.startswith("revoked: quarantine")

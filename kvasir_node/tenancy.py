"""The windows that a node holds: claimed, loaded, renewed, given back, each change told to the owner.

Knows leases from their claim to their end. What to claim is the daemon's question to the market; how a
window is loaded is `loading`'s, how it is served `serving`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

import structlog

from market.messages import MAX_REASON, DeclinedMove, Heartbeat, LeaseBeat, LeaseStatus, MoveOffer, Offer
from market.windows import Window
from market.wire import MoveId
from relay.errors import KvasirError, Refused, Unreachable

from .circuits import Circuits
from .joining import Membership
from .leases import LeaseClock, next_beat_s
from .loading import LoadedWindow, Loader, Room
from .relays import RelayKeeper
from .serving import ExpertServer
from .status import Backoff, NodeStatus, WindowStatus

log = structlog.get_logger("node")

RELEASE_S: Final = 5.0
"""How long the market has to take a release or a drain."""

SIGN_IN: Final = frozenset({"forbidden", "expired"})
"""The market's codes for a device whose grant it does not know, or no more."""


@dataclass(slots=True, eq=False)
class Held:
    """One lease of this node, from its claim to its end."""

    clock: LeaseClock
    shown: WindowStatus
    kept_bytes: int
    """What it keeps of the budget, by its plan."""
    loaded: LoadedWindow | None = None
    loading: asyncio.Task[None] | None = None
    over: bool = False
    room: Room | None = None
    """The window that goes for this one, if it takes another's place."""
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


class Tenancy:
    """All leases of one node. `heartbeats` renews them; `room` is set whenever one has ended.

    `on_move` is called with each move that the market asks for, as long as it does.
    """

    def __init__(
        self,
        member: Callable[[], Membership],
        loader: Callable[[], Loader],
        *,
        server: ExpertServer,
        circuits: Circuits,
        relays: RelayKeeper,
        status: NodeStatus,
        generation: int,
        heartbeat_s: float,
        rng: Random,
        addresses: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._member = member
        self._loader = loader
        self._server = server
        self._circuits = circuits
        self._relays = relays
        self._status = status
        self._generation = generation
        self._heartbeat_s = heartbeat_s
        self._addresses = addresses
        self._rng = rng
        self._held: dict[bytes, Held] = {}
        self._beat_now = asyncio.Event()
        relays.on_change = self._beat_now.set
        self.room = asyncio.Event()
        self.on_move: Callable[[MoveOffer], None] = lambda move: None
        self._declined: dict[MoveId, str] = {}

    @property
    def held(self) -> tuple[Held, ...]:
        """The leases, in the order of their claims."""
        return tuple(self._held.values())

    # --- claiming and loading ---

    @property
    def kept_bytes(self) -> int:
        """What the windows held keep of the budget, loaded or not."""
        return sum(held.kept_bytes for held in self._held.values())

    async def claim(
        self, offer: Offer, *, network: str, budget: int, move: MoveId | None = None
    ) -> Held | None:
        """Take an offer; None if somebody was faster.

        Raises as the market's client does, and `WontFit` or `CacheFull` for a window that does not fit this
        machine: nothing is claimed then, and nothing fetched. With `move` it is that move's offer, and the
        caller knows that it fits.
        """
        market, loader = self._member().market, self._loader()
        plan = await loader.plan(offer.plan)
        if move is None:
            await loader.check(offer, budget_left=budget - self.kept_bytes)
        numerics = await loader.numerics(offer.plan, offer.precision)
        sent_at = time.monotonic()
        try:
            lease = await market.claim(
                offer, numerics=numerics, start_generation=self._generation, network=network, move=move
            )
        except Refused as error:
            if error.code != "conflict":
                raise
            log.info("claim.lost", window=offer.window.name, outcome="conflict", reason=str(error))
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
        kept = plan.kept_bytes(lease.window, lease.precision)
        held = Held(LeaseClock.start(lease, sent_at), shown, kept)
        self._held[lease.id] = held
        self._status.windows[lease.id] = shown
        self._relays.need()
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

    async def load(self, held: Held) -> None:
        """Load one window and put it in service; on failure give the lease back, saying why."""
        clock, lease = held.clock, held.clock.lease
        try:
            loaded = await self._loader().load(
                lease, held.shown, loading_deadline=clock.loading_deadline, room=held.room
            )
            held.loaded = loaded
            held.shown.kept_bytes, held.shown.d = loaded.experts.kept_bytes, loaded.experts.error
            held.shown.step = "telling the market"
            sent_at = time.monotonic()
            answer = await self._member().market.loaded(
                lease.id,
                clock.epoch,
                numerics=loaded.experts.numerics,
                quantised_hash=loaded.experts.quantised_hash,
                kept_bytes=loaded.experts.kept_bytes,
            )
        except (KvasirError, OSError) as error:
            await self.give_back(held, f"it cannot be loaded: {str(error) or type(error).__name__}")
            return
        except asyncio.CancelledError:
            self._close(held)
            raise
        self._server.hold(lease.id, answer.epoch, lease.plan, loaded.experts)
        held.shown.step = "waiting for a proving call"
        self.apply(held, answer, sent_at)
        self._beat_now.set()
        log.info(
            "window.loaded",
            window=held.window.name,
            lease=lease.id.hex(),
            kept_bytes=loaded.experts.kept_bytes,
            numerics=loaded.experts.numerics,
            precision=lease.precision,
            d=loaded.experts.error,
        )

    # --- ends ---

    async def give_back(self, held: Held, reason: str) -> None:
        """Release a lease before its time, telling market and owner why."""
        self.forget(held, reason)
        await politely([self._member().market.release(held.id, held.clock.epoch, reason=reason)], RELEASE_S)

    def forget(self, held: Held, reason: str, *, tell: bool = True) -> None:
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
        self.room.set()
        if tell:
            self._status.notify(f"{held.window} is given up: {reason}")
        log.info("lease.ended", window=held.window.name, lease=held.id.hex(), reason=reason)

    async def drain(self, reason: str) -> None:
        """Stop loading, and tell the market that no new calls should come."""
        for held in self.held:
            if held.loading is not None:
                held.loading.cancel()
        market = self._member().market
        loaded = [held for held in self.held if held.loaded is not None]
        await politely((market.drain(one.id, one.clock.epoch, reason=reason) for one in loaded), RELEASE_S)

    async def release(self, reason: str) -> None:
        """Give every lease back and forget it."""
        market, held = self._member().market, self.held
        await politely((market.release(one.id, one.clock.epoch, reason=reason) for one in held), RELEASE_S)
        for one in held:
            self.forget(one, reason, tell=False)

    def _close(self, held: Held) -> None:
        if held.loaded is not None:
            held.loaded.close()
            held.loaded = None
            self._loader().trim()

    # --- heartbeats ---

    async def heartbeats(self) -> None:
        """Renew all leases every 20 s +-10 %, sooner while one waits to be proven or the market is silent.

        Runs until cancelled. Raises `Refused` (duplicate) if a newer start of this device runs elsewhere.
        """
        hurries = 0
        silence = Backoff(first_s=1.0, most_s=10.0)
        while True:
            clocks = [held.clock for held in self.held]
            wait = next_beat_s(clocks, every_s=self._heartbeat_s, hurries=hurries, rng=self._rng)
            if silence.failures:
                wait = min(wait, silence.next_s(self._rng.random()))
            hurries = hurries + 1 if any(clock.state == "LOADED" for clock in clocks) else 0
            if await _within(self._beat_now, wait):
                hurries = 0
            self._beat_now.clear()
            if self._held:
                try:
                    await self._beat()
                    silence.reset()
                except Unreachable as error:
                    silence.next_s(0.0)
                    self._status.market_failed(str(error))
                    log.warning("market.unreachable", url=self._member().market.url, reason=str(error))
                except KvasirError as error:
                    self._beat_refused(error)
            now = time.monotonic()
            for held in self.held:
                if held.clock.lapsed(now, called=self._circuits.called):
                    self.forget(held, "the lease ran out, and neither market nor backbone was heard since")

    async def _beat(self) -> None:
        """One heartbeat. Raises as the market's client does."""
        sent_at = time.monotonic()
        beats = tuple(
            LeaseBeat(held.clock.lease.id, held.clock.epoch, held.shown.done_bytes) for held in self.held
        )
        declined = tuple(DeclinedMove(move, reason) for move, reason in self._declined.items())
        beat = Heartbeat(self._generation, beats, self._addresses(), self._relays.readings(), declined)
        answer = await self._member().market.heartbeat(beat)
        self._status.market_answered()
        for item in declined:
            self._declined.pop(item.move, None)
        self._circuits.tickets.add(answer.tickets)
        for notice in answer.notices:
            self._status.notify(notice)
        for status in answer.leases:
            held = self._held.get(status.id)
            if held is not None:
                self.apply(held, status, sent_at)
        if answer.move is not None:
            self.on_move(answer.move)
        for held in self.held:
            if held.clock.state == "DRAINING":
                held.drains += 1
                if held.drains > 1:  # whatever was in flight has been answered since the last heartbeat
                    await self.give_back(held, "drained")

    def decline(self, move: MoveId, reason: str) -> None:
        """Tell the market, with a heartbeat at once, that this node does not make a move."""
        self._declined[move] = reason[:MAX_REASON]
        self._beat_now.set()

    def _beat_refused(self, error: KvasirError) -> None:
        """The market says no to a heartbeat. Raises `error` again where this daemon must end."""
        if error.code == "duplicate":
            raise error
        log.warning("heartbeat.refused", outcome=error.code, reason=str(error))
        self._status.notify(f"the market refuses the heartbeat: {error}")
        if error.code in SIGN_IN:
            for held in self.held:
                self.forget(held, f"the market does not know this device's grant: {error}")

    def apply(self, held: Held, status: LeaseStatus, sent_at: float) -> None:
        """Take over what the market says about a lease."""
        before = held.clock.state
        held.clock.renew(status, sent_at)
        held.shown.state, held.shown.epoch = held.clock.state, held.clock.epoch
        held.shown.lease_left_s = max(0.0, held.clock.deadline - time.monotonic())
        if held.clock.state == "ENDED":
            self.forget(held, status.reason or "the market ended the lease")
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


async def politely(requests: Iterable[Awaitable[object]], timeout_s: float) -> None:
    """Send all requests at once; what fails or takes too long does not matter."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*requests, return_exceptions=True)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
            return True
    return False

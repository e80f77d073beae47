"""A window given up for one that is needed more: the market asks for it, the owner's machine decides.

The new window's bytes come first, while the old one serves on; then the market is asked to let the old one
go, which it refuses where nobody else covers that one; then the new one goes into memory. Where the disk has
no room for both, the old one goes first, under the same condition. A move that fails before that changes
nothing, and a node with room for both windows just takes the new one.

Knows the order of a move. Leases are `tenancy`'s, loading is `loading`'s; who moves is the market's choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

import structlog

from market.messages import MoveOffer
from market.wire import MoveId
from relay.errors import KvasirError, Refused, Unreachable

from .cache import CacheFull
from .fitting import WontFit
from .joining import Membership
from .loading import Loader, Room
from .pausing import Pausing
from .status import Backoff, NodeStatus
from .tenancy import Held, Tenancy
from .volunteering import Offering

log = structlog.get_logger("node")

SETTLE_S: Final = 2.0
"""How long a window that is let go refuses calls by name, until every backbone has heard of it."""

LEAVE_S: Final = 45.0
"""How long at least the market may be asked to let the old window go before the move is given up."""

PASSING: Final = frozenset({"busy", "overloaded", "internal", "unreachable"})
"""The market's refusals after which it is asked again."""


class Mover:
    """Makes the moves that the market asks for, one at a time; `run` until cancelled.

    `claiming` is held while a claim may come about, as by the volunteer.
    """

    def __init__(
        self,
        offering: Callable[[], Offering],
        member: Callable[[], Membership],
        loader: Callable[[], Loader],
        *,
        tenancy: Tenancy,
        pausing: Pausing,
        status: NodeStatus,
        claiming: asyncio.Lock,
        rng: Random,
    ) -> None:
        self._offering = offering
        self._member = member
        self._loader = loader
        self._tenancy = tenancy
        self._pausing = pausing
        self._status = status
        self._claiming = claiming
        self._rng = rng
        self._asked: MoveId | None = None
        self._next: MoveOffer | None = None
        self._came = asyncio.Event()
        tenancy.on_move = self._offered

    def _offered(self, move: MoveOffer) -> None:
        """The market asks for a move; it asks again with every heartbeat until the move is taken."""
        if move.id != self._asked:
            self._asked, self._next = move.id, move
            self._came.set()

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Make one move after another until cancelled. Raises `Refused` (duplicate) as the volunteer does."""
        while True:
            await self._came.wait()
            self._came.clear()
            move, self._next = self._next, None
            if move is None:
                continue
            try:
                await self._make(move, group)
            except Unreachable as error:
                self._asked = None  # the market asks again, if it has not seen the claim
                log.warning(
                    "market.unreachable", url=self._member().market.url, reason=str(error), retry_s=None
                )
            except KvasirError as error:
                if error.code == "duplicate":
                    raise
                self._decline(move, str(error))

    async def _make(self, move: MoveOffer, group: asyncio.TaskGroup) -> None:
        """Take one move and carry it out. Raises `KvasirError` where it cannot be taken."""
        async with self._claiming:
            taken = await self._take(move)
            if taken is None:
                return
            old, new = taken
            new.loading = group.create_task(self._tenancy.load(new))
        await asyncio.wait([new.loading])
        moved = new.loaded is not None
        if not old.over and not moved:
            old.shown.step = ""
            self._status.notify(f"{old.window} stays: the move to {new.window} failed")
        log.info(
            "move.ended",
            outcome="moved" if moved else "failed",
            window=old.window.name,
            to=new.window.name,
            left=old.over,
        )

    async def _take(self, move: MoveOffer) -> tuple[Held, Held] | None:
        """Claim the new window; the old one and the new one, or None if somebody was faster.

        Raises `WontFit` or `CacheFull` for a window that does not fit, `Refused` for a move that is off.
        """
        offer, offering = move.offer, self._offering()
        old = next((held for held in self._tenancy.held if held.id == move.lease), None)
        if self._pausing.paused:
            raise Refused("conflict", "the node pauses")
        if old is None or old.clock.state != "PROVEN":
            raise Refused("conflict", "the window is not in service here")
        if offer.precision not in offering.precisions:
            raise Refused("conflict", f"the owner does not allow {offer.precision}")
        if any((h.clock.lease.plan, h.window) == (offer.plan, offer.window) for h in self._tenancy.held):
            raise Refused("conflict", "this node takes that window already")
        room = await self._weigh(move, old)
        new = await self._tenancy.claim(offer, network=offering.network, budget=offering.budget, move=move.id)
        if new is None:
            return None
        if room is not None:
            new.room = Room(partial(self._leave, old, new, move.id), room)
            old.shown.step = f"moves to {new.window}" + ("" if room else " once its weights are here")
        self._status.notify(
            f"{old.window} {'makes room for' if room is not None else 'is joined by'} "
            f"{new.window}: {offer.reason}"
        )
        log.info(
            "move.accepted",
            window=old.window.name,
            to=new.window.name,
            keeps_old=room is None,
            leaves_first=bool(room),
            reason=offer.reason,
        )
        return old, new

    async def _weigh(self, move: MoveOffer, old: Held) -> bool | None:
        """None if this machine has room for both windows; else whether the old one must go first.

        Raises `WontFit` or `CacheFull` if the new one does not fit even in its place.
        """
        offer, budget_left = move.offer, self._offering().budget - self._tenancy.kept_bytes
        loader = self._loader()
        try:
            await loader.check(offer, budget_left=budget_left)
        except (WontFit, CacheFull):
            both = await loader.check_instead(
                offer, budget_left=budget_left, old=old.clock.lease, old_kept=old.kept_bytes
            )
            return not both
        return None

    async def _leave(self, old: Held, new: Held, move: MoveId) -> None:
        """Let the old window go, if somebody else covers it. Raises `Refused` or `Unreachable` if not."""
        if old.over:
            return
        reason = f"moves to {new.window}"
        deadline = max(new.clock.loading_deadline, time.monotonic() + LEAVE_S)
        backoff = Backoff(first_s=0.5, most_s=5.0)
        while True:
            new.shown.step = f"letting {old.window} go"
            sent_at = time.monotonic()
            try:
                status = await self._member().market.drain(old.id, old.clock.epoch, reason=reason, move=move)
                break
            except (Refused, Unreachable) as error:
                retry = error.retry_after_s if isinstance(error, Refused) else None
                wait = retry or backoff.next_s(self._rng.random())
                if error.code not in PASSING or time.monotonic() + wait > deadline:
                    raise
                new.shown.step = f"waiting to let {old.window} go ({error})"
                await asyncio.sleep(wait)
        self._tenancy.apply(old, status, sent_at)
        await asyncio.sleep(SETTLE_S)
        await self._tenancy.give_back(old, reason)

    def _decline(self, move: MoveOffer, reason: str) -> None:
        self._tenancy.decline(move.id, reason)
        self._status.notify(f"no move to {move.offer.window}: {reason}")
        log.info("move.declined", to=move.offer.window.name, reason=reason)

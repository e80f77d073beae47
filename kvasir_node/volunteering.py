"""Asking the market what is needed, and taking it: which window, at which precision, whether it fits.

One window after another until the budget is full; while the node pauses nobody is asked. What a misfit,
silence or a refusal means for the next try is decided here; leases are `tenancy`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import structlog

from market.messages import Abilities, Offer, VolunteerAnswer
from market.plans import WIRE_DTYPES
from relay.errors import KvasirError, Refused, Unreachable

from .cache import CacheFull, WeightCache
from .fitting import AUTO_PRECISIONS, PrecisionChooser, WontFit, describe_capacity
from .formulas import FORMULAS
from .joining import Membership
from .loading import Loader
from .pausing import Pausing
from .status import Backoff, NodeStatus
from .tenancy import SIGN_IN, Held, Tenancy, politely

log = structlog.get_logger("node")

FULL_S: Final = 20.0
"""The market is asked again after this long where what it offered does not fit this machine."""


@dataclass(frozen=True, slots=True)
class Offering:
    """What this device offers: `precision` as configured, `budget` in bytes, its network's name, its start
    generation.
    """

    precision: str
    budget: int
    network: str
    generation: int

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those it takes, the most exact first."""
        return AUTO_PRECISIONS if self.precision == "auto" else (self.precision,)


class Volunteer:
    """Claims and loads windows; `run` until cancelled.

    `renew_grant()` is awaited before the market is asked, `sign_in()` where it wants the wallet's proof
    again. `claiming` is held while a claim may come about.
    """

    def __init__(
        self,
        offering: Callable[[], Offering],
        member: Callable[[], Membership],
        loader: Callable[[], Loader],
        *,
        tenancy: Tenancy,
        cache: WeightCache,
        pausing: Pausing,
        status: NodeStatus,
        renew_grant: Callable[[], Awaitable[None]],
        sign_in: Callable[[], Awaitable[None]],
        rng: Random,
    ) -> None:
        self._offering = offering
        self._member = member
        self._loader = loader
        self._tenancy = tenancy
        self._cache = cache
        self._pausing = pausing
        self._status = status
        self._renew_grant = renew_grant
        self._sign_in = sign_in
        self._rng = rng
        self._chooser = PrecisionChooser()
        self.claiming = asyncio.Lock()

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Ask what is needed, claim it, load it; again and again until cancelled."""
        failures = Backoff(first_s=1.0, most_s=120.0)
        silence = Backoff()
        while True:
            await self._pausing.allowed.wait()
            try:
                async with self.claiming:
                    if self._pausing.paused:
                        continue
                    held, wait = await self._ask_and_claim()
                    silence.reset()
                    if held is not None:
                        held.loading = group.create_task(self._tenancy.load(held))
            except Unreachable as error:
                self._status.market_failed(str(error))
                wait = silence.next_s(self._rng.random())
                log.warning(
                    "market.unreachable", url=self._member().market.url, reason=str(error), retry_s=wait
                )
                await self._pause(wait)
                continue
            except (WontFit, CacheFull) as error:
                self._wont_fit(error)
                await self._pause(FULL_S * self._rng.uniform(0.9, 1.1))
                continue
            except KvasirError as error:
                await self._refused(error, failures)
                continue
            if held is None or held.loading is None:
                await self._pause(wait)
                continue
            await asyncio.wait([held.loading])
            if held.loaded is not None:
                failures.reset()
            elif not held.loading.cancelled():
                await self._pause(failures.next_s(self._rng.random()))

    async def _ask_and_claim(self) -> tuple[Held | None, float]:
        """One round with the market: the lease got, if any, and else the seconds to wait."""
        await self._renew_grant()
        await self._size_plans()
        answer = await self._member().market.volunteer(self._abilities())
        self._status.market_answered()
        self._status.message = answer.message
        if answer.move is not None:
            self._tenancy.on_move(answer.move)
        if not answer.offers:
            log.info("volunteer.declined", outcome="nothing_needed", reason=answer.message)
            return None, answer.retry_after_s * self._rng.uniform(0.9, 1.1)
        return await self._claim_first(answer), self._rng.uniform(0.05, 0.5)

    def _wont_fit(self, error: KvasirError) -> None:
        self._status.message = str(error)
        self._status.notify(f"what is needed does not fit here: {error}")
        log.warning("offer.declined", outcome=error.code, reason=str(error))

    async def _claim_first(self, answer: VolunteerAnswer) -> Held | None:
        """The first offer that fits and that nobody else was faster with.

        Raises `WontFit` or `CacheFull` if none of them fits this machine.
        """
        offering = self._offering()
        misfits: list[KvasirError] = []
        for offer in answer.offers:
            try:
                held = await self._tenancy.claim(
                    await self._settle(offer, answer), network=offering.network, budget=offering.budget
                )
            except (WontFit, CacheFull) as error:
                misfits.append(error)
                continue
            if held is not None:
                return held
        if len(misfits) == len(answer.offers):
            raise misfits[0]
        return None

    async def _settle(self, offer: Offer, answer: VolunteerAnswer) -> Offer:
        """The offer at the precision that `--precision auto` wants; as it is with another."""
        if self._offering().precision != "auto":
            return offer
        if all(held.clock.lease.plan != offer.plan for held in self._tenancy.held):
            self._chooser.forget(offer.plan)
        plan = await self._loader().plan(offer.plan)
        free = self._offering().budget - self._tenancy.kept_bytes
        fresh = not self._chooser.knows(offer.plan)
        settled = self._chooser.settle(offer, plan, answer.wanted_bytes, free)
        if fresh:
            wanted = dict(answer.wanted_bytes)
            log.info("precision.chosen", precision=settled.precision, wanted=wanted, free_bytes=free)
        return settled

    async def _refused(self, error: KvasirError, failures: Backoff) -> None:
        """The market says no to volunteering or a claim: say so, and wait, or sign in anew.

        Raises `error` again where this daemon must end.
        """
        if error.code == "duplicate":
            raise error
        log.warning("volunteer.refused", outcome=error.code, reason=str(error))
        self._status.message = str(error)
        retry = error.retry_after_s if isinstance(error, Refused) else None
        wait = max(retry or 0.0, failures.next_s(self._rng.random()))
        if error.code in SIGN_IN and not self._tenancy.held:
            self._status.notify(f"the market wants the wallet's proof again: {error}")
            await self._pause(wait)
            await self._sign_in()
            return
        self._status.notify(f"the market refuses: {error}")
        await self._pause(wait)

    async def _size_plans(self) -> None:
        """Say once for each plan how much of it this machine can hold; forget plans that are no more."""
        offering, sized = self._offering(), self._status.capacity
        listings = await self._member().market.plans()
        active = {listing.plan for listing in listings if listing.state == "active"}
        self._loader().keep(active | {held.clock.lease.plan for held in self._tenancy.held})
        for name in sized.keys() - {plan.hex() for plan in active}:
            del sized[name]
        for plan_id in active:
            if plan_id.hex() in sized:
                continue
            plan = await self._loader().plan(plan_id)
            text = await asyncio.to_thread(describe_capacity, plan, offering.budget, offering.precisions)
            sized[plan_id.hex()] = text
            self._status.notify(f"this machine can hold {text}")
            log.info("plan.sized", plan=plan_id.hex(), model=plan.model, capacity=text)

    def _abilities(self) -> Abilities:
        offering = self._offering()
        return Abilities(
            budget_bytes=offering.budget,
            precisions=offering.precisions,
            wire_dtypes=tuple(WIRE_DTYPES),
            numerics={},
            network=offering.network,
            formulas=tuple(FORMULAS),
            start_generation=offering.generation,
            cached=self._cache.whole_windows(),
            moves=True,
        )

    async def _pause(self, seconds: float) -> None:
        """Wait, or until a lease ends and room is free."""
        self._tenancy.room.clear()
        await politely([self._tenancy.room.wait()], max(0.0, seconds))

"""Moves through the real HTTP server: asked, taken, carried out, refused, ignored; the store's bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select, update

from market import movers, moves
from market import tables as t
from market.config import MarketConfig
from market.messages import (
    DeclinedMove,
    Gap,
    Heartbeat,
    HeartbeatAnswer,
    LeaseBeat,
    MoveOffer,
    Offer,
)
from market.moving import MoveRules
from market.plans import PlanId
from market.publishing import window_needs
from market.store import Session
from market.windows import Window
from market.wire import MoveId
from relay.errors import Refused

from ..support.markets import NUMERICS, Device, Stall, abilities, small_plan, stall
from ..support.waiting import until

AT_ONCE = MoveRules(patience_s=0.0)


def at_once(config: MarketConfig) -> MarketConfig:
    return replace(config, moving=AT_ONCE)


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    """A market of which nothing moves by itself: tests sweep."""
    async with stall(tmp_path, sweeping=False, configure=at_once) as running:
        yield running


@pytest.fixture
async def either_market(database: str, tmp_path: Path) -> AsyncIterator[Stall]:
    """The same on each kind of database."""
    async with stall(tmp_path, database=database, sweeping=False, configure=at_once) as running:
        yield running


class Owner:
    """A device with room for one window, and the lease that it holds."""

    def __init__(self, market: Stall, device: Device) -> None:
        self.market, self.device = market, device
        self.lease, self.epoch = b"", 0

    async def serve(self, offer: Offer, *, move: MoveId | None = None, proven: bool = True) -> None:
        client = self.device.client
        lease = await client.claim(
            offer, numerics=NUMERICS, start_generation=self.device.start_generation, move=move
        )
        self.lease, self.epoch = lease.id, lease.epoch
        await client.loaded(
            lease.id, lease.epoch, numerics=NUMERICS, quantised_hash=bytes(32), kept_bytes=offer.kept_bytes
        )
        if proven:
            await self.market.backbone().declare_proven(lease.id, lease.epoch, d=0.0)

    async def beat(
        self, *leases: tuple[bytes, int], declined: tuple[DeclinedMove, ...] = ()
    ) -> HeartbeatAnswer:
        named = leases or ((self.lease, self.epoch),)
        beats = tuple(LeaseBeat(moves.LeaseId(lease), epoch, 0) for lease, epoch in named)
        return await self.device.client.heartbeat(Heartbeat(1, beats, declined=declined))

    async def leave(self, move: MoveOffer) -> None:
        await self.device.client.drain(move.lease, 1, reason="moves", move=move.id)


async def crowd(
    market: Stall, *, owners: int = 2, windows: int = 2
) -> tuple[PlanId, list[Window], list[Owner]]:
    """`owners` devices that all serve the plan's first window and have room for no other."""
    plan_id, plan = await market.publish(small_plan(layers=windows))
    size = plan.kept_bytes(plan.windows[0], "stored")
    first = Offer(plan_id, plan.windows[0], "stored", size, size, "")
    made = []
    for device in await market.devices(owners):
        owner = Owner(market, device)
        await device.client.volunteer(abilities(size, moves=True))
        await owner.serve(first)
        made.append(owner)
    return plan_id, list(plan.windows), made


async def sweep(market: Stall) -> None:
    await market.market._sweep(True)
    await market.market._move()


async def asked(owners: list[Owner]) -> tuple[Owner, MoveOffer]:
    """The one owner that is asked to move."""
    answers = [(owner, (await owner.beat()).move) for owner in owners]
    found = [(owner, move) for owner, move in answers if move is not None]
    assert len(found) == 1, found
    return found[0]


async def nobody_is_asked(owners: list[Owner]) -> bool:
    return [(await owner.beat()).move for owner in owners] == [None] * len(owners)


async def gaps(market: Stall) -> dict[str, Gap]:
    return {gap.window.name: gap for gap in (await market.backbone().gaps()).gaps}


async def outcomes(market: Stall) -> list[tuple[str, str]]:
    """State and reason of the moves, the latest first."""
    return [(move.state, move.reason) for move in (await market.backbone().gaps()).moves]


async def later(market: Stall, seconds: float) -> None:
    """Age every move by `seconds`, on either database."""

    def age(session: Session) -> None:
        columns = ("offered_at", "until", "left_at", "ended_at")
        session.run(update(t.moves).values({name: t.moves.c[name] - seconds for name in columns}))

    await market.market._store.write(age)


# --- the whole way -----------------------------------------------------------------------------------------


async def test_two_replicas_of_one_window_become_one_of_each(either_market: Stall) -> None:
    market = either_market
    _, (full, empty), owners = await crowd(market)
    assert await nobody_is_asked(owners)
    await sweep(market)
    owner, move = await asked(owners)
    assert (move.lease, move.offer.window) == (owner.lease, empty)
    assert move.offer.reason.startswith("0 of 2 replicas")
    assert 0 < move.within_s <= 90
    again = replace(move, within_s=pytest.approx(move.within_s, abs=5))
    assert (await owner.beat()).move == again
    size = move.offer.kept_bytes
    assert (await owner.device.client.volunteer(abilities(size, moves=True))).move == again
    await sweep(market)
    await asked(owners)  # still one
    old = owner.lease, owner.epoch
    await owner.serve(move.offer, move=move.id, proven=False)
    assert (await owner.beat(old, (owner.lease, owner.epoch))).move is None
    found = await gaps(market)
    assert (found[full.name].proven, found[empty.name].loading) == (2, 1)
    await owner.leave(move)
    await owner.device.client.release(old[0], old[1], reason="moves")
    await market.backbone().declare_proven(owner.lease, owner.epoch, d=0.0)
    await sweep(market)
    found = await gaps(market)
    assert (found[full.name].proven, found[empty.name].proven) == (1, 1)
    ((state, reason),) = await outcomes(market)
    assert (state, reason) == ("moved", move.offer.reason)
    await later(market, 61.0)
    await sweep(market)
    assert await nobody_is_asked(owners), "one of each is as good as it gets"
    assert 'kvasir_market_moves{state="moved"} 1' in await market.market.metrics()


async def test_nothing_moves_before_a_window_was_short_for_long(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False) as market:
        _, _, owners = await crowd(market)
        await sweep(market)
        market.clock.ahead += 50
        for owner in owners:
            await owner.beat()
        await sweep(market)
        assert await outcomes(market) == []
        market.clock.ahead += 11
        for owner in owners:
            await owner.beat()
        await sweep(market)
        await asked(owners)


async def test_a_window_that_was_filled_in_between_is_given_its_time_anew(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False) as market:
        plan_id, (_, empty), owners = await crowd(market)
        await sweep(market)
        market.clock.ahead += 50
        offer = Offer(plan_id, empty, "stored", 0, 0, "")
        others = [Owner(market, device) for device in await market.devices(2)]
        for other in others:
            await other.serve(offer)
        await sweep(market)
        for other in others:
            await other.device.client.release(other.lease, other.epoch, reason="leaves")
        market.clock.ahead += 11
        for owner in owners:
            await owner.beat()
        await sweep(market)
        assert await outcomes(market) == []


async def test_moves_can_be_switched_off(tmp_path: Path) -> None:
    def never(config: MarketConfig) -> MarketConfig:
        return replace(config, moving=MoveRules(patience_s=None))

    async with stall(tmp_path, sweeping=False, configure=never) as market:
        _, _, owners = await crowd(market)
        market.clock.ahead += 40
        for owner in owners:
            await owner.beat()
        await sweep(market)
        assert await outcomes(market) == []


async def test_a_running_market_asks_by_itself(tmp_path: Path) -> None:
    async with stall(tmp_path, configure=at_once) as market:
        _, _, owners = await crowd(market)

        async def somebody_is_asked() -> bool:
            return not await nobody_is_asked(owners)

        await until(somebody_is_asked, what="a device asked to move")


# --- who is asked ------------------------------------------------------------------------------------------


async def test_the_last_replica_and_devices_that_know_no_moves_stay(market: Stall) -> None:
    plan_id, plan = await market.publish(small_plan(layers=2))
    (device, old) = await market.devices(2)
    size = plan.kept_bytes(plan.windows[0], "stored")
    offer = Offer(plan_id, plan.windows[0], "stored", size, size, "")
    one = Owner(market, device)
    await device.client.volunteer(abilities(size, moves=True))
    await one.serve(offer)
    await sweep(market)
    assert (await one.beat()).move is None
    other = Owner(market, old)
    await old.client.volunteer(abilities(size))
    await other.serve(offer)
    await device.client.volunteer(abilities(size))  # it was updated to an older version
    await sweep(market)
    assert await outcomes(market) == []


async def test_a_silent_device_neither_moves_nor_covers(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False, configure=at_once) as market:
        _, _, owners = await crowd(market)
        market.clock.ahead += 46
        await owners[0].beat()
        await sweep(market)
        assert await outcomes(market) == []


async def test_a_device_that_loads_something_is_left_alone(either_market: Stall) -> None:
    market = either_market
    plan_id, (_, empty, _), owners = await crowd(market, windows=3)
    for owner in owners:
        await owner.device.client.claim(
            Offer(plan_id, empty, "stored", 0, 0, ""), numerics=NUMERICS, start_generation=1
        )
    await sweep(market)
    assert await outcomes(market) == []


async def test_no_more_than_the_budget_moves_however_many_could(tmp_path: Path, database: str) -> None:
    def rules(config: MarketConfig) -> MarketConfig:
        return replace(
            config,
            moving=MoveRules(patience_s=0.0, share=0.3),
            scarcity=replace(config.scarcity, base_target=1),
        )

    async with stall(tmp_path, database=database, sweeping=False, configure=rules) as market:
        plan_id, plan = await market.publish(small_plan(layers=8))
        size = plan.kept_bytes(plan.windows[0], "stored")

        def seven(session: Session) -> None:
            session.run(update(t.windows).where(t.windows.c.name == plan.windows[0].name).values(target=7))

        await market.market._store.write(seven)
        owners = [Owner(market, device) for device in await market.devices(7)]
        for owner in owners:
            await owner.device.client.volunteer(abilities(size, moves=True))
            await owner.serve(Offer(plan_id, plan.windows[0], "stored", size, size, ""))
        desk = market.market._handlers.desk().moves
        await market.market._store.write(
            lambda session: movers.note_shortages(session, window_needs(session, desk.scarcity))
        )
        await asyncio.gather(  # replicas of the market that share a store decide at the same moment
            *(market.market._store.write(lambda session: moves.propose(session, desk)) for _ in range(8))
        )
        assert [state for state, _ in await outcomes(market)] == ["offered", "offered"]
        await later(market, 61.0)
        await sweep(market)
        assert len(await outcomes(market)) == 2, "those that were asked have not left yet"


# --- what goes wrong ---------------------------------------------------------------------------------------


async def test_a_device_that_declines_is_left_alone_for_a_while_and_another_is_asked(
    either_market: Stall,
) -> None:
    market = either_market
    _, _, owners = await crowd(market)
    await sweep(market)
    first, move = await asked(owners)
    await first.beat(declined=(DeclinedMove(move.id, "the disk\x1b is full"),))
    assert (await first.beat(declined=(DeclinedMove(move.id, "again"),))).move is None
    assert await outcomes(market) == [("declined", "the disk? is full")]
    with pytest.raises(Refused, match="the move is off"):
        await first.serve(move.offer, move=move.id)
    await later(market, 61.0)
    await sweep(market)
    second, move = await asked(owners)
    assert second is not first
    await second.beat(declined=(DeclinedMove(move.id, "no"),))
    await later(market, 61.0)
    await sweep(market)
    assert len(await outcomes(market)) == 2, "both rest"
    await later(market, 600.0)
    await sweep(market)
    await asked(owners)


async def test_a_device_that_ignores_the_move_loses_nothing(market: Stall) -> None:
    _, (full, _), owners = await crowd(market)
    await sweep(market)
    first, move = await asked(owners)
    await later(market, 91.0)
    with pytest.raises(Refused, match="the move is off"):
        await first.serve(move.offer, move=move.id)
    await sweep(market)
    assert ("ignored", "the device did not answer in time") in await outcomes(market)
    second, _ = await asked(owners)
    assert second is not first
    assert (await gaps(market))[full.name].proven == 2


async def test_a_move_that_failed_leaves_the_old_window_served(market: Stall) -> None:
    _, (full, _), owners = await crowd(market)
    await sweep(market)
    owner, move = await asked(owners)
    await owner.serve(move.offer, move=move.id, proven=False)
    await owner.device.client.release(owner.lease, owner.epoch, reason="the weights did not come")
    await sweep(market)
    assert await outcomes(market) == [("failed", "released: the weights did not come")]
    assert (await gaps(market))[full.name].proven == 2


async def test_a_move_that_others_made_needless_is_off(market: Stall) -> None:
    plan_id, (_, empty), owners = await crowd(market)
    await sweep(market)
    owner, move = await asked(owners)
    for device in await market.devices(2):
        await Owner(market, device).serve(Offer(plan_id, empty, "stored", 0, 0, ""))
    with pytest.raises(Refused, match="has its 2 replicas"):
        await owner.serve(move.offer, move=move.id)
    await sweep(market)
    ((state, reason),) = await outcomes(market)
    assert (state, reason) == ("overtaken", f"{empty.name} is short no more")
    assert (await owner.beat()).move is None


async def test_a_move_to_a_window_that_its_device_took_anyway_is_refused(market: Stall) -> None:
    _, _, owners = await crowd(market)
    await sweep(market)
    owner, move = await asked(owners)
    client = owner.device.client
    lease = await client.claim(move.offer, numerics=NUMERICS, start_generation=1)
    with pytest.raises(Refused, match="has a replica of"):
        await client.claim(move.offer, numerics=NUMERICS, start_generation=1, move=move.id)
    await client.release(lease.id, lease.epoch, reason="gone")
    taken = await client.claim(move.offer, numerics=NUMERICS, start_generation=1, move=move.id)
    again = await client.claim(move.offer, numerics=NUMERICS, start_generation=1, move=move.id)
    assert again.id == taken.id, "the answer was lost"


async def test_a_lease_that_ended_meanwhile_ends_its_move(market: Stall) -> None:
    _, (full, _), owners = await crowd(market)
    await sweep(market)
    owner, _ = await asked(owners)
    await owner.device.client.release(owner.lease, owner.epoch, reason="the owner stopped the node")
    await sweep(market)
    assert await outcomes(market) == [("overtaken", f"the lease on {full.name} is over")]


async def test_the_last_live_replica_is_not_let_go(market: Stall) -> None:
    _, (full, _), owners = await crowd(market)
    await sweep(market)
    owner, move = await asked(owners)
    await owner.serve(move.offer, move=move.id, proven=False)
    other = next(one for one in owners if one is not owner)
    await other.device.client.release(other.lease, other.epoch, reason="the owner stopped the node")
    with pytest.raises(Refused, match=f"nobody else serves {full.name} now") as refused:
        await owner.leave(move)
    assert refused.value.code == "conflict"
    assert (await gaps(market))[full.name].proven == 1


async def test_two_that_leave_one_window_at_the_same_moment_leave_one_behind(
    tmp_path: Path, database: str
) -> None:
    def rules(config: MarketConfig) -> MarketConfig:
        return replace(config, moving=MoveRules(patience_s=0.0, share=1.0))

    async with stall(tmp_path, database=database, sweeping=False, configure=rules) as market:
        _, _, owners = await crowd(market)
        await sweep(market)
        owner, move = await asked(owners)
        other = next(one for one in owners if one is not owner)

        def also(session: Session) -> None:
            """The rule never asks both; suppose that it did."""
            row = session.row(select(t.moves))._asdict()
            second = {**row, "id": bytes(16), "device": other.device.key.public, "lease": other.lease}
            session.run(t.moves.insert().values(**second))

        await market.market._store.write(also)
        second = (await other.beat()).move
        assert second is not None
        for one, its in ((owner, move), (other, second)):
            await one.serve(its.offer, move=its.id, proven=False)
        results = await asyncio.gather(owner.leave(move), other.leave(second), return_exceptions=True)
        codes = sorted(error.code if isinstance(error, Refused) else "left" for error in results)
        assert codes == ["conflict", "left"]


async def test_too_many_do_not_leave_within_a_minute(either_market: Stall) -> None:
    market = either_market
    _, _, owners = await crowd(market, owners=2)
    await sweep(market)
    owner, move = await asked(owners)
    await owner.serve(move.offer, move=move.id, proven=False)

    def left(session: Session) -> None:
        row = session.row(select(t.moves))._asdict()
        session.run(
            t.moves.insert().values(**{**row, "id": bytes(16), "state": "moved", "left_at": session.now})
        )

    await market.market._store.write(left)
    with pytest.raises(Refused, match="moved within the last minute") as refused:
        await owner.leave(move)
    assert refused.value.code == "busy"
    assert 50 < (refused.value.retry_after_s or 0) <= 60
    await later(market, 61.0)
    await owner.leave(move)
    await owner.leave(move)  # sent again, nothing changes


async def test_a_drain_that_names_no_move_of_its_own_is_refused(market: Stall) -> None:
    _, _, owners = await crowd(market)
    await sweep(market)
    owner, move = await asked(owners)
    other = next(one for one in owners if one is not owner)
    with pytest.raises(Refused, match="no move away from"):
        await owner.leave(move)  # not taken yet
    with pytest.raises(Refused, match="no move away from"):
        await other.device.client.drain(other.lease, other.epoch, reason="moves", move=move.id)
    with pytest.raises(Refused, match="asked to make no such move"):
        await other.serve(move.offer, move=move.id)


async def test_moves_of_yesterday_are_forgotten(market: Stall) -> None:
    _, _, owners = await crowd(market)
    await sweep(market)
    owner, move = await asked(owners)
    await owner.beat(declined=(DeclinedMove(move.id, "no"),))
    await later(market, 86_401.0)
    await sweep(market)
    count = await market.market._store.read(moves.moves_by_state)
    assert "declined" not in count

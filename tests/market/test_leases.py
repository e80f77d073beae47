"""Leases through the real HTTP server: claims under contention, epochs, deadlines, watches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from market.messages import Change, Heartbeat, LeaseBeat, Offer, ResyncNeeded
from market.plans import PlanId, WindowHashes, sign_hashes
from market.windows import Window
from relay.errors import Refused, RemoteProtocolError
from relay.identity import SigningKey

from ..support.markets import NUMERICS, Device, Stall, abilities, small_plan, stall
from ..support.waiting import until


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path) as running:
        yield running


@pytest.fixture
async def either_market(database: str, tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path, database=database) as running:
        yield running


def offer_of(plan_id: PlanId, window: Window) -> Offer:
    return Offer(plan_id, window, "stored", 0, 0, "")


async def claim(device: Device, offer: Offer) -> Any:
    return await device.client.claim(offer, numerics=NUMERICS, start_generation=device.start_generation)


async def attempt(device: Device, offer: Offer) -> str:
    """Claim and say how it ended."""
    try:
        await claim(device, offer)
    except Refused as error:
        return error.code
    return "won"


# --- claiming ----------------------------------------------------------------------------------------------


async def test_200_claimers_at_once_on_50_slots_make_50_winners(either_market: Stall) -> None:
    market = either_market
    plan_id, plan = await market.publish(small_plan(layers=25))
    devices = await market.devices(200)
    tries = [attempt(d, offer_of(plan_id, plan.windows[n % 25])) for n, d in enumerate(devices)]
    outcomes = Counter(await asyncio.gather(*tries))
    assert outcomes == {"won": 50, "conflict": 150}
    snapshot = await market.backbone().assignments(plan_id)
    held = Counter((lease.window, lease.slot) for lease in snapshot.leases)
    assert len(held) == 50
    assert set(held.values()) == {1}
    assert {slot for _, slot in held} == {0, 1}


async def test_a_fresh_swarm_of_three_nodes_and_eight_windows_fills_within_seconds(market: Stall) -> None:
    await market.publish(small_plan(layers=8))
    backbone = market.backbone()

    async def serve(device: Device) -> None:
        while True:
            answer = await device.client.volunteer(abilities())
            if not answer.offers:
                return
            for offer in answer.offers:
                try:
                    lease, epoch = await device.take(offer)
                except Refused:
                    continue  # others were faster
                await backbone.declare_proven(lease, epoch, d=0.0)
                break

    devices = [await market.device() for _ in range(3)]
    async with asyncio.timeout(10):
        await asyncio.gather(*(serve(device) for device in devices))
    gaps = await backbone.gaps()
    assert gaps.coverage == 1.0
    assert all(gap.proven == 2 and gap.scarcity == 0 for gap in gaps.gaps)
    answer = await devices[0].client.volunteer(abilities())
    assert "all 8 windows have their replicas" in answer.message
    assert answer.retry_after_s == 20


async def test_one_wallet_has_one_replica_of_a_window(market: Stall) -> None:
    plan_id, plan = await market.publish()
    wallet = SigningKey.generate()
    one, two = await market.device(wallet), await market.device(wallet)
    await one.take(offer_of(plan_id, plan.windows[0]))
    with pytest.raises(Refused, match="has a replica of") as refused:
        await claim(two, offer_of(plan_id, plan.windows[0]))
    assert refused.value.code == "conflict"
    offers = (await two.client.volunteer(abilities())).offers
    assert [offer.window for offer in offers] == [plan.windows[1]]


async def test_an_untrusted_wallet_loads_one_window_at_a_time(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    lease = await claim(device, offer_of(plan_id, plan.windows[0]))
    with pytest.raises(Refused) as refused:
        await claim(device, offer_of(plan_id, plan.windows[1]))
    assert refused.value.code == "quota"
    assert "is loading" in (await device.client.volunteer(abilities())).message
    await device.client.loaded(
        lease.id, lease.epoch, numerics=NUMERICS, quantised_hash=bytes(32), kept_bytes=1
    )
    await claim(device, offer_of(plan_id, plan.windows[1]))


async def test_a_trusted_wallet_loads_several(tmp_path: Path) -> None:
    async with stall(tmp_path, configure=lambda config: replace(config, trusted_calls=0)) as market:
        plan_id, plan = await market.publish()
        device = await market.device()
        for window in plan.windows:
            await claim(device, offer_of(plan_id, window))


async def test_a_claim_whose_answer_was_lost_is_answered_again(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    first = await claim(device, offer_of(plan_id, plan.windows[0]))
    again = await claim(device, offer_of(plan_id, plan.windows[0]))
    assert again.id == first.id


async def test_the_budget_counts_what_is_held(market: Stall) -> None:
    _, plan = await market.publish()
    device = await market.device()
    kept = plan.kept_bytes(plan.windows[0])
    offer = (await device.client.volunteer(abilities(budget_bytes=kept))).offers[0]
    await device.take(offer)
    answer = await device.client.volunteer(abilities(budget_bytes=kept))
    assert answer.offers == ()
    assert "0 are free" in answer.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"window": Window(7, 8, 0, 8)}, "not_found"),
        ({"precision": "int4"}, "bad_request"),
        ({"plan": PlanId(bytes(32))}, "not_found"),
    ],
    ids=str,
)
async def test_claims_of_what_is_not_on_offer_are_refused(market: Stall, change: Any, code: str) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    with pytest.raises(Refused) as refused:
        await claim(device, replace(offer_of(plan_id, plan.windows[0]), **change))
    assert refused.value.code == code


# --- epochs and ends ---------------------------------------------------------------------------------------


async def test_epochs_rise_with_each_claim_of_a_slot_and_stale_ones_are_refused(either_market: Stall) -> None:
    market = either_market
    plan_id, plan = await market.publish()
    device = await market.device()
    offer = offer_of(plan_id, plan.windows[0])
    epochs = []
    for _ in range(3):
        lease = await claim(device, offer)
        epochs.append(lease.epoch)
        with pytest.raises(Refused) as refused:
            await device.client.loaded(
                lease.id, lease.epoch + 1, numerics="", quantised_hash=bytes(32), kept_bytes=0
            )
        assert refused.value.code == "stale_epoch"
        await device.client.release(lease.id, lease.epoch, reason="test")
        await device.client.release(lease.id, lease.epoch, reason="test")
    assert epochs == [1, 2, 3]


async def test_a_lease_that_is_not_renewed_ends_and_says_why(tmp_path: Path) -> None:
    async with stall(tmp_path) as market:
        plan_id, plan = await market.publish()
        device, backbone = await market.device(), market.backbone()
        snapshot = await backbone.assignments(plan_id)
        lease = await claim(device, offer_of(plan_id, plan.windows[0]))
        changes = backbone.watch(plan_id, snapshot.revision)
        assert (await anext(changes)).assignment is not None
        market.clock.ahead += 61
        ended = await asyncio.wait_for(anext(changes), 5)
        assert ended.ended is not None
        assert ended.ended.lease == lease.id
        assert "heartbeat stopped" in ended.ended.reason
        beat = await device.client.heartbeat(Heartbeat(1, (LeaseBeat(lease.id, lease.epoch, 0),)))
        assert beat.leases[0].state == "ENDED"
        assert "heartbeat stopped" in (beat.leases[0].reason or "")
        with pytest.raises(Refused, match="is over") as refused:
            await device.client.loaded(
                lease.id, lease.epoch, numerics="", quantised_hash=bytes(32), kept_bytes=0
            )
        assert refused.value.code == "expired"


async def test_heartbeats_keep_a_lease_and_verified_bytes_keep_a_loading_one(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False) as market:
        plan_id, plan = await market.publish()
        device = await market.device()
        lease = await claim(device, offer_of(plan_id, plan.windows[0]))
        size = sum(span.nbytes for span in plan.window_ranges(plan.windows[0]))
        for verified in (1, 2):  # the deadline is a minute; each new byte moves it
            market.clock.ahead += 50
            beat = await device.client.heartbeat(Heartbeat(1, (LeaseBeat(lease.id, 1, verified),)))
        assert beat.leases[0].state == "ENDED"
        assert f"2 of {size} bytes" not in (beat.leases[0].reason or "")
        assert "not loaded in time" in (beat.leases[0].reason or "")


async def test_unknown_leases_are_said_to_be_ended(market: Stall) -> None:
    device = await market.device()
    beat = await device.client.heartbeat(Heartbeat(1, (LeaseBeat(bytes(16), 1, 0),)))  # type: ignore[arg-type]
    assert beat.leases[0].state == "ENDED"
    assert beat.leases[0].reason == "the market knows no such lease"


async def test_a_new_start_ends_the_leases_of_the_old_one_and_fences_it_off(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    old = await claim(device, offer_of(plan_id, plan.windows[0]))
    answer = await device.client.volunteer(abilities(start_generation=2))
    assert {offer.window for offer in answer.offers} == set(plan.windows)
    device.start_generation = 2
    new = await claim(device, offer_of(plan_id, plan.windows[0]))
    assert new.id != old.id
    with pytest.raises(Refused) as refused:
        await device.client.heartbeat(Heartbeat(1, ()))
    assert refused.value.code == "duplicate"
    beat = await device.client.heartbeat(Heartbeat(2, (LeaseBeat(old.id, 1, 0), LeaseBeat(new.id, 2, 0))))
    assert [status.state for status in beat.leases] == ["ENDED", "HELD"]
    assert beat.leases[0].reason == "the device started again"


async def test_a_new_start_may_take_its_leases_over(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    lease = await claim(device, offer_of(plan_id, plan.windows[0]))
    beat = await device.client.heartbeat(Heartbeat(2, (LeaseBeat(lease.id, 1, 0),)))
    assert beat.leases[0].state == "HELD"
    snapshot = await market.backbone().assignments(plan_id)
    assert snapshot.leases[0].start_generation == 2


async def test_proving_drain_and_revocation(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device, backbone = await market.device(), market.backbone()
    held = await claim(device, offer_of(plan_id, plan.windows[0]))
    with pytest.raises(Refused) as refused:
        await backbone.declare_proven(held.id, held.epoch, d=0.0)
    assert refused.value.code == "conflict"
    await device.client.loaded(held.id, 1, numerics=NUMERICS, quantised_hash=bytes(32), kept_bytes=1)
    for _ in range(2):
        assert (await backbone.declare_proven(held.id, 1, d=1e-9)).state == "PROVEN"
    assert (await device.client.drain(held.id, 1, reason="battery")).state == "DRAINING"
    listed = (await backbone.assignments(plan_id)).leases[0]
    assert listed.state == "DRAINING"
    await backbone.revoke(held.id, 1, reason="wrong answers")
    beat = await device.client.heartbeat(Heartbeat(1, (LeaseBeat(held.id, 1, 0),)))
    assert beat.leases[0].reason == "revoked: wrong answers"
    offers = (await device.client.volunteer(abilities())).offers
    assert [offer.window for offer in offers] == [plan.windows[1]]
    nodes = await backbone.nodes()
    assert nodes[0].last_reason == "revoked: wrong answers"


async def test_a_quarantine_is_the_wallets_and_outlives_the_backbone(either_market: Stall) -> None:
    market = either_market
    plan_id, plan = await market.publish()
    device, backbone = await market.device(), market.backbone()
    other, stranger = await market.device(device.wallet), await market.device()
    held = await claim(device, offer_of(plan_id, plan.windows[0]))
    await backbone.revoke(held.id, held.epoch, reason="quarantine: wrong answers", quarantine_s=3600.0)
    await backbone.revoke(held.id, held.epoch, reason="again", quarantine_s=10.0)  # shortens nothing
    for one in (device, other):
        with pytest.raises(Refused) as refused:
            await claim(one, offer_of(plan_id, plan.windows[1]))
        assert refused.value.code == "quarantined"
        assert 3500 < (refused.value.retry_after_s or 0) <= 3600
        assert not (await one.client.volunteer(abilities())).offers
    await claim(stranger, offer_of(plan_id, plan.windows[1]))
    await backbone.revoke(held.id, held.epoch, reason="for good", quarantine_s=float("inf"))
    with pytest.raises(Refused) as refused:
        await claim(device, offer_of(plan_id, plan.windows[0]))
    assert (refused.value.retry_after_s or 0) > 365 * 86_400
    with pytest.raises(Refused) as refused:
        await backbone.revoke(held.id, held.epoch, reason="x", quarantine_s=-1.0)
    assert refused.value.code == "bad_request"


async def test_a_new_plan_drains_the_old_ones_claims(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device, backbone = await market.device(), market.backbone()
    lease, epoch = await device.take(offer_of(plan_id, plan.windows[0]))
    new_id, _ = await market.publish(small_plan(model="another"))
    beat = await device.client.heartbeat(Heartbeat(1, (LeaseBeat(lease, epoch, 0),)))  # type: ignore[arg-type]
    assert beat.leases[0].state == "DRAINING"
    assert beat.leases[0].reason == "no backbone serves this plan any more"
    listed = {listing.plan: listing.state for listing in await backbone.plans()}
    assert listed == {plan_id: "retired", new_id: "active"}
    offers = (await device.client.volunteer(abilities())).offers
    assert {offer.plan for offer in offers} == {new_id}
    with pytest.raises(Refused) as refused:
        await claim(device, offer_of(plan_id, plan.windows[1]))
    assert refused.value.code == "conflict"


# --- following ---------------------------------------------------------------------------------------------


async def test_a_claim_whose_grant_ran_out_hides_no_other(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False) as market:  # the market has not ended it yet
        plan_id, plan = await market.publish()
        short, other, backbone = await market.device(), await market.device(), market.backbone()
        start = (await backbone.assignments(plan_id)).revision
        await short.client.login(short.wallet, short.key, short.exchange, lifetime_s=30)
        await claim(short, offer_of(plan_id, plan.windows[0]))
        kept = await claim(other, offer_of(plan_id, plan.windows[0]))
        market.clock.ahead += 31  # less than a lease lives
        snapshot = await backbone.assignments(plan_id)
        assert [assignment.lease for assignment in snapshot.leases] == [kept.id]
        changes = backbone.watch(plan_id, start)
        first, second = [await asyncio.wait_for(anext(changes), 5) for _ in range(2)]
        await changes.aclose()  # type: ignore[attr-defined]
        assert first.assignment is None
        assert "expired" in first.ended.reason  # type: ignore[union-attr]
        assert second.assignment.lease == kept.id  # type: ignore[union-attr]


async def test_a_watch_tells_every_change_in_order(market: Stall) -> None:
    plan_id, plan = await market.publish(small_plan(layers=4))
    backbone = market.backbone()
    snapshot = await backbone.assignments(plan_id)
    assert snapshot.leases == ()
    seen: dict[bytes, str] = {}
    revisions: list[int] = [snapshot.revision]

    async def follow() -> None:
        async for change in backbone.watch(plan_id, snapshot.revision):
            revisions.append(change.revision)
            note(change)

    def note(change: Change) -> None:
        if change.ended is not None:
            seen[change.ended.lease] = "ENDED"
        if change.assignment is not None:
            seen[change.assignment.lease] = change.assignment.state

    following = asyncio.create_task(follow())
    device = await market.device()
    leases = [await device.take(offer_of(plan_id, window)) for window in plan.windows]
    await backbone.declare_proven(*leases[0], d=0.0)
    await device.client.release(*leases[1], reason="test")
    states = ["PROVEN", "ENDED", "LOADED", "LOADED"]
    wanted = {lease: state for (lease, _), state in zip(leases, states, strict=True)}
    await until(lambda: seen == wanted, timeout=5, what="all changes seen")
    following.cancel()
    assert revisions == sorted(set(revisions))
    now = {lease.lease: lease.state for lease in (await backbone.assignments(plan_id)).leases}
    assert now == {lease: state for lease, state in wanted.items() if state != "ENDED"}


async def test_a_watch_from_nowhere_asks_for_a_new_snapshot(market: Stall) -> None:
    plan_id, _ = await market.publish()
    with pytest.raises(Refused, match="new snapshot") as refused:
        await anext(market.backbone().watch(plan_id, 99))
    assert refused.value.code == "conflict"


async def test_a_watch_ends_with_its_market(tmp_path: Path) -> None:
    async with stall(tmp_path) as market:
        plan_id, _ = await market.publish()
        changes = market.backbone().watch(plan_id, 0)
        waiting = asyncio.create_task(anext(changes))
        handlers = market.market._handlers
        await until(lambda: handlers.watchers.count == 1, what="the watch is open")
        handlers.watchers.close()
        with pytest.raises(ResyncNeeded):
            await asyncio.wait_for(waiting, 5)


async def test_a_moved_address_is_told_to_watchers(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    lease = await claim(device, offer_of(plan_id, plan.windows[0]))
    backbone = market.backbone()
    snapshot = await backbone.assignments(plan_id)
    beat = Heartbeat(1, (LeaseBeat(lease.id, 1, 0),), ("http://192.168.1.7:8500",))
    await device.client.heartbeat(beat)
    change = await asyncio.wait_for(anext(backbone.watch(plan_id, snapshot.revision)), 5)
    assert change.assignment is not None
    assert change.assignment.addresses == ("http://192.168.1.7:8500",)
    settled = (await backbone.assignments(plan_id)).revision
    await device.client.heartbeat(beat)
    assert (await backbone.assignments(plan_id)).revision == settled


# --- hashes and demand -------------------------------------------------------------------------------------


async def test_hashes_are_waited_for_and_checked_against_the_plan(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device, backbone = await market.device(), market.backbone()
    window = plan.windows[0]
    await claim(device, offer_of(plan_id, window))
    with pytest.raises(Refused) as refused:
        await device.client.hashes(plan_id, window, wait_s=0)
    assert refused.value.code == "not_found"
    waiting = asyncio.create_task(device.client.hashes(plan_id, window, wait_s=10))
    assert await backbone.wanted_hashes(plan_id) == (window,)
    key = market.keys.backbone.signing
    short = WindowHashes(plan_id, window, ())
    with pytest.raises(Refused) as refused:
        await backbone.publish_hashes(sign_hashes(short, key))
    assert refused.value.code == "bad_request"
    chunks = tuple(bytes([n + 1]) * 32 for n in range(len(plan.window_chunks(window))))
    made = WindowHashes(plan_id, window, chunks)
    await backbone.publish_hashes(sign_hashes(made, key))
    assert await asyncio.wait_for(waiting, 5) == made
    assert await backbone.wanted_hashes(plan_id) == ()
    await backbone.publish_hashes(sign_hashes(made, key))
    other = WindowHashes(plan_id, window, tuple(bytes(32) for _ in chunks))
    with pytest.raises(Refused) as refused:
        await backbone.publish_hashes(sign_hashes(other, key))
    assert refused.value.code == "conflict"


async def test_demand_raises_the_target_and_shows_in_the_reason(either_market: Stall) -> None:
    market = either_market
    plan_id, plan = await market.publish()
    backbone = market.backbone()
    hot = plan.windows[0]
    await backbone.report_demand(plan_id, {hot.name: 1600.0})

    async def raised() -> bool:
        return any(gap.window == hot and gap.target == 4 for gap in (await backbone.gaps()).gaps)

    await until(raised, timeout=5, what="the target rose")
    device = await market.device()
    offer = next(o for o in (await device.client.volunteer(abilities())).offers if o.window == hot)
    assert offer.reason.startswith("0 of 4 replicas, demand 1600.0 rows/s")


@pytest.mark.parametrize(
    "rates", [{"L99-99/E000-007": 1.0}, {"L00-00/E000-007": -1.0}, {"L00-00/E000-007": 1e12}]
)
async def test_a_demand_report_that_does_not_fit_is_refused(market: Stall, rates: dict[str, float]) -> None:
    plan_id, _ = await market.publish()
    with pytest.raises(Refused) as refused:
        await market.backbone().report_demand(plan_id, rates)
    assert refused.value.code == "bad_request"


async def test_tickets_are_for_listed_relays_alone(market: Stall) -> None:
    device = await market.device()
    relay = (await device.client.swarm()).relays[0]
    assert (await device.client.ticket(relay.key, start_generation=3)).kind == "ticket"
    assert (await market.backbone().ticket(relay.key, start_generation=3)).kind == "ticket"
    with pytest.raises(Refused) as refused:
        await device.client.ticket(SigningKey.generate().public, start_generation=3)
    assert refused.value.code == "not_found"
    with pytest.raises(Refused):
        await device.client.ticket(relay.key, start_generation=-1)


async def test_the_clients_refuses_what_does_not_belong_together(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    lease = await claim(device, offer_of(plan_id, plan.windows[0]))
    claimed = await device.client._check_claim(lease.document)
    with pytest.raises(RemoteProtocolError):
        device.client._check_same(claimed, lease.id, lease.epoch + 1, lease.plan, lease.window)

"""One market, real HTTP: from a wallet to a proven window, a receipt and a balance."""

from __future__ import annotations

import asyncio
from pathlib import Path

from market.messages import Heartbeat, LeaseBeat
from relay.tickets import open_ticket

from ..support.markets import NUMERICS, abilities, stall


async def test_a_device_goes_from_wallet_to_proven(tmp_path: Path) -> None:
    async with stall(tmp_path) as market:
        device = await market.device()
        nothing = await device.client.volunteer(abilities())
        assert nothing.offers == ()
        assert "no backbone has published a plan yet" in nothing.message
        assert nothing.retry_after_s <= 2

        plan_id, plan = await market.publish()
        _, fetched = await device.client.plan(plan_id)
        assert fetched == plan
        answer = await device.client.volunteer(abilities())
        offer = answer.offers[0]
        assert offer.reason == "0 of 2 replicas, demand 0.0 rows/s"
        assert offer.download_bytes == sum(r.nbytes for r in plan.window_ranges(offer.window))

        backbone = market.backbone()
        snapshot = await backbone.assignments(plan_id)
        lease = await device.client.claim(offer, numerics=NUMERICS, start_generation=1)
        assert lease.state == "HELD"
        assert 0 < lease.expires_in_s <= 60

        changes = backbone.watch(plan_id, snapshot.revision)
        change = await asyncio.wait_for(anext(changes), 5)
        assert change.assignment is not None
        assert change.assignment.lease == lease.id
        assert change.assignment.device == device.key.public
        assert await backbone.wanted_hashes(plan_id) == (offer.window,)

        status = await device.client.loaded(
            lease.id, lease.epoch, numerics=NUMERICS, quantised_hash=bytes(32), kept_bytes=1
        )
        assert status.state == "LOADED"
        change = await asyncio.wait_for(anext(changes), 5)
        assert change.assignment is not None
        assert change.assignment.state == "LOADED"
        assert (await backbone.declare_proven(lease.id, lease.epoch, d=0.0)).state == "PROVEN"
        await changes.aclose()  # type: ignore[attr-defined]

        beat = await device.client.heartbeat(Heartbeat(1, (LeaseBeat(lease.id, lease.epoch, 0),)))
        assert beat.leases[0].state == "PROVEN"
        relay = lease.relays[0]
        assert relay.url == f"{market.url}/relay/v1"
        ticket = open_ticket(
            beat.tickets[0],
            market_key=market.keys.market.signing.public,
            relay_key=relay.key,
            now=market.clock(),
        )
        assert ticket.subject == device.key.public
        gaps = await backbone.gaps()
        assert gaps.coverage == 0.5

"""A whole node daemon in a swarm of real parts: market, relay, weights endpoint, a calling backbone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_node.calls import Refusal
from kvasir_node.config import NodeConfig
from kvasir_node.daemon import run
from kvasir_node.receipts import read_balances
from kvasir_node.status import NodeStatus, Phase
from market.messages import Assignment
from market.receipts import open_acknowledgement
from relay.errors import ConfigError, IdentityError
from relay.identity import SignedDocument, SigningKey, address_of
from relay.links import JoinLink
from tests.support.node_swarm import WIDTH, NodeSwarm, node_swarm
from tests.support.waiting import until


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[NodeSwarm]:
    async with node_swarm(tmp_path) as made:
        yield made


class RunningNode:
    """A node daemon in this process."""

    def __init__(self, swarm: NodeSwarm, folder: Path, **settings: Any) -> None:
        self.swarm = swarm
        self.config = NodeConfig(
            **{
                "join": swarm.link, "state_dir": folder, "budget_bytes": 10_000_000, "reserve_bytes": 0,
                "nice": 0, "heartbeat_s": 0.3, "drain_s": 5.0, **settings,
            }
        )  # fmt: skip
        self.status = NodeStatus(name=folder.name)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(run(self.config, stop=self.stop, status=self.status))

    async def reaches(self, phase: Phase, *, timeout: float = 20.0) -> None:
        """Wait for a phase; a daemon that ended shows its error."""

        def there() -> bool:
            if self.task.done():
                self.task.result()
            return self.status.phase is phase

        await until(there, timeout=timeout, what=f"{phase}, now {self.status.snapshot()}")

    async def proven(self, count: int) -> list[Assignment]:
        """Prove windows as they are loaded, until `count` of them are; closes the proving sessions."""
        proven: list[Assignment] = []
        while len(proven) < count:
            loaded: list[Assignment] = []

            async def look(found: list[Assignment] = loaded) -> bool:
                if self.task.done():
                    self.task.result()
                found[:] = await self.swarm.leases("LOADED")
                return bool(found)

            await until(look, timeout=20.0, what="a loaded window")
            for lease in loaded:
                session = await self.swarm.prove(lease)
                await session.session.close()
                proven.append(lease)
        return proven

    async def end(self) -> None:
        """Stop in order."""
        self.stop.set()
        async with asyncio.timeout(20.0):
            await self.task


@asynccontextmanager
async def node(swarm: NodeSwarm, folder: Path, **settings: Any) -> AsyncIterator[RunningNode]:
    running = RunningNode(swarm, folder, **settings)
    try:
        yield running
    finally:
        running.stop.set()
        if not running.task.done():
            with contextlib.suppress(Exception):
                async with asyncio.timeout(15.0):
                    await running.task


async def test_a_node_joins_loads_serves_earns_and_leaves(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node") as running:
        leases = await running.proven(2)
        await running.reaches(Phase.SERVING)
        assert {lease.window for lease in leases} == set(swarm.plan.windows)
        session = await swarm.call_node(leases[0])
        await session.check()
        acks = [await session.pay(1_500_000), await session.pay(2_500_000)]
        assert session.last is not None
        digest = open_acknowledgement(SignedDocument.from_bytes(acks[1].ack), leases[0].device)
        assert digest == session.last.digest
        snapshot = running.status.snapshot()
        assert (snapshot["phase"], snapshot["reachable"]) == ("serving", True)
        assert snapshot["credit"]["credit"] == "2.5"
        assert snapshot["counters"]["calls"] == 24  # 8 experts: twice proven, once more here
        assert snapshot["sessions"][0]["path"] == "relay"
        assert snapshot["wallet"] == address_of(leases[0].wallet)
        running.stop.set()
        assert await session.drained() == "the owner stopped the node"
        await running.end()
    assert await swarm.leases() == []
    assert running.status.phase is Phase.STOPPED
    folder = tmp_path / "node" / "receipts" / address_of(swarm.keys.root_public)
    (balance,) = read_balances(folder, swarm.keys.root_public, verify=True)
    assert (balance.bytes, balance.gaps) == (2_500_000, 0)


async def test_a_restart_with_a_warm_cache_transfers_nothing(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    for start in range(2):
        async with node(swarm, tmp_path / "node") as running:
            await running.proven(2)
            if start == 0:
                first = swarm.weights.bytes_served
                assert first == len(swarm.data)
            await running.end()
    assert swarm.weights.bytes_served == first
    async with node(swarm, tmp_path / "other") as running:
        await running.proven(2)
        assert swarm.weights.bytes_served == 2 * first


async def test_hashes_are_waited_for(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish(hashes=False)
    async with node(swarm, tmp_path / "node") as running:
        await running.reaches(Phase.LOADING)

        async def wanted() -> bool:
            return bool(await swarm.client.wanted_hashes(swarm.plan_id))

        await until(wanted, what="hashes wanted")
        assert running.status.snapshot()["windows"][0]["step"] == "waiting for its hashes"
        for window in swarm.plan.windows:
            await swarm.publish_hashes(window)
        await running.reaches(Phase.PROVING)


async def test_the_market_goes_and_the_node_serves_on(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node") as running:
        leases = await running.proven(2)
        session = await swarm.call_node(leases[0])
        await swarm.stop_market()
        await until(lambda: running.status.market.error is not None, what="the market's silence noticed")
        await session.check()
        assert running.status.phase is Phase.SERVING
        assert any("does not answer" in notice.text for notice in running.status.notices)
        await swarm.start_market()
        await until(lambda: running.status.market.error is None, what="the market heard again")
        await session.check()
        assert {lease.lease for lease in await swarm.leases("PROVEN")} == {lease.lease for lease in leases}


async def test_a_node_waits_for_a_market_that_is_not_there_yet(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.stop_market()
    async with node(swarm, tmp_path / "node") as running:
        await until(lambda: running.status.market.error is not None, what="the silence noticed")
        assert running.status.phase is Phase.WALLET
        await swarm.start_market()
        await swarm.publish()
        await running.reaches(Phase.PROVING)


async def test_a_market_that_lost_its_store_is_joined_anew(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node") as running:
        await running.proven(2)
        await swarm.stop_market()
        swarm.lose_market_store()
        await swarm.start_market()
        await swarm.publish()
        await running.proven(2)
        await running.reaches(Phase.SERVING)
        assert any("wallet's proof again" in notice.text for notice in running.status.notices)
        assert swarm.weights.bytes_served == 0  # a new endpoint, and everything was here


async def test_stopping_while_the_market_is_away(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.stop_market()
    async with node(swarm, tmp_path / "node") as running:
        await until(lambda: running.status.market.error is not None, what="the silence noticed")
        await running.end()


async def test_a_budget_too_small_says_what_is_needed(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node", budget_bytes=1000) as running:
        await until(lambda: "raise --budget" in running.status.message, what="the reason")
        assert running.status.phase is Phase.VOLUNTEERING
        assert await swarm.leases() == []


async def test_an_ended_lease_is_explained_and_its_calls_refused(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node") as running:
        leases = await running.proven(2)
        session = await swarm.call_node(leases[0])
        await session.notify("three answers were wrong")
        await swarm.client.revoke(leases[0].lease, leases[0].epoch, reason="its answers were wrong")
        await until(
            lambda: any("its answers were wrong" in n.text for n in running.status.notices), what="the reason"
        )
        assert any("three answers were wrong" in notice.text for notice in running.status.notices)
        answer = await session.call(torch.zeros(1, WIDTH), leases[0].window.layer_start, 0)
        assert isinstance(answer, Refusal)
        assert answer.code == "not_mine"


async def test_a_newer_session_takes_over_and_a_stranger_gets_none(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node") as running:
        leases = await running.proven(2)
        first = await swarm.call_node(leases[0], generation=2**60)
        second = await swarm.call_node(leases[0], generation=2**60 + 1)
        await second.check()
        await until(lambda: len(running.status.sessions) == 1, what="the older session closed")
        with pytest.raises(Exception, match="not above"):
            await swarm.call_node(leases[0], generation=2**60)
        await first.session.close()
        await second.check()


async def test_a_second_daemon_of_the_same_state_is_refused(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node") as running:
        await running.reaches(Phase.PROVING)
        with pytest.raises(ConfigError, match="another kvasir-node uses"):
            await run(running.config)


async def test_another_swarm_at_the_same_address_is_refused(swarm: NodeSwarm, tmp_path: Path) -> None:
    other = JoinLink(swarm.market_site.url, SigningKey.generate().public)
    async with node(swarm, tmp_path / "node", join=other) as running:
        with pytest.raises(IdentityError, match="check the join link"):
            await asyncio.wait_for(running.task, 20.0)


async def test_first_contact_shows_the_fingerprint(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node", join=JoinLink(swarm.market_site.url, None)) as running:
        await running.reaches(Phase.PROVING)
        assert any("first contact" in notice.text for notice in running.status.notices)
        assert running.status.market.swarm == address_of(swarm.keys.root_public)


async def test_weights_that_do_not_come_end_in_a_released_lease(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    swarm.weights_open.clear()
    async with node(swarm, tmp_path / "node") as running:
        await running.reaches(Phase.LOADING)
        await until(lambda: running.status.snapshot()["windows"][0]["step"] == "fetching", what="the fetch")
        await running.end()
        assert await swarm.leases() == []
    swarm.weights_open.set()


async def test_a_cache_that_is_too_small_gives_the_lease_back_and_says_so(
    swarm: NodeSwarm, tmp_path: Path
) -> None:
    await swarm.publish()
    async with node(swarm, tmp_path / "node", cache_bytes=1000) as running:
        await until(
            lambda: any("raise --cache-bytes" in n.text for n in running.status.notices), what="the reason"
        )

        async def released() -> bool:
            return await swarm.leases() == []

        await until(released, what="the lease given back")

"""The owner first: pause and resume by hand and by rules, seen by market, backbone and owner."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvasir_node import pausing, surroundings
from kvasir_node.control import ask_daemon
from kvasir_node.limits import OwnerRules, Surroundings, parse_hours
from kvasir_node.pausing import Pausing
from kvasir_node.status import Phase
from kvasir_node.surroundings import metered_link
from tests.node.test_daemon import node
from tests.support.node_swarm import NodeSwarm, node_swarm
from tests.support.waiting import until


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[NodeSwarm]:
    async with node_swarm(tmp_path) as made:
        await made.publish()
        yield made


# --- how the machine is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "said", "metered"),
    [
        ("linux", "u 1\n", True), ("linux", "u 3\n", True), ("linux", "u 2\n", False),
        ("linux", "u 4\n", False), ("linux", "u 0\n", False), ("linux", "", False),
        ("win32", "Fixed\r\n", True),
        ("win32", "Variable\r\n", True), ("win32", "Unrestricted\r\n", False), ("darwin", "u 1", False),
    ],
)  # fmt: skip
def test_a_metered_link_is_what_the_system_says(platform: str, said: str, metered: bool) -> None:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str]) -> str:
        asked.append(command)
        return said

    assert metered_link(platform=platform, ask=ask) is metered
    assert [command[0] for command in asked] == {"linux": ["busctl"], "win32": ["powershell"]}.get(
        platform, []
    )


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), subprocess.CalledProcessError(1, "x"), subprocess.TimeoutExpired("x", 1)]
)
def test_a_system_that_does_not_say_is_not_metered(error: Exception) -> None:
    def ask(command: Sequence[str]) -> str:
        raise error

    assert not metered_link(platform="linux", ask=ask)
    assert not metered_link(platform="win32", ask=ask)


def test_batteries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Battery:
        def __init__(self, plugged: bool | None) -> None:
            self.power_plugged = plugged

    for battery, expected in (
        (Battery(False), True), (Battery(True), False), (Battery(None), False), (None, False)
    ):  # fmt: skip
        monkeypatch.setattr(
            surroundings.psutil, "sensors_battery", lambda found=battery: found, raising=False
        )
        assert surroundings.on_battery() is expected
    monkeypatch.delattr(surroundings.psutil, "sensors_battery")
    assert not surroundings.on_battery()  # a system without sensors


# --- when it pauses ----------------------------------------------------------------------------------


class Follower:
    """A `Pausing` over a machine that the test moves; records what it did."""

    def __init__(self, rules: OwnerRules) -> None:
        self.around = Surroundings(12 * 60)
        self.did: list[str] = []
        self.links_asked = 0
        self.looks = 0
        self.pausing = Pausing(
            rules,
            withdraw=self.withdraw,
            come_back=lambda: self.did.append("back"),
            said=lambda reason: None,
            every_s=0.005,
            look=self.look,
        )

    def look(self, *, watch_link: bool) -> Surroundings:
        self.looks += 1
        self.links_asked += watch_link
        return self.around

    async def withdraw(self, reason: str) -> None:
        assert not self.pausing.allowed.is_set()
        self.did.append(reason.split()[0])

    async def more_looks(self, count: int = 2) -> None:
        target = self.looks + count
        await until(lambda: self.looks >= target, what="more looks")


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    made = Follower(OwnerRules(hours=parse_hours("9-17")))
    task = asyncio.create_task(made.pausing.run())
    yield made
    task.cancel()
    await asyncio.wait([task])


async def test_rules_pause_and_let_go(follower: Follower) -> None:
    await until(follower.pausing.allowed.is_set, what="allowed to serve")
    follower.around = Surroundings(18 * 60)
    await until(lambda: follower.did == ["outside"], what="paused by the hours")
    follower.around = Surroundings(10 * 60, battery=True)
    await follower.more_looks()
    assert follower.did == ["outside"], "from one reason to the next nothing is given back twice"
    follower.around = Surroundings(10 * 60)
    await until(lambda: follower.did == ["outside", "back"], what="back")
    assert follower.pausing.allowed.is_set()


async def test_the_link_is_asked_about_seldom(follower: Follower) -> None:
    await follower.more_looks(13)
    assert 2 <= follower.links_asked <= 3 + follower.looks // pausing.LINK_EVERY
    follower.around = Surroundings(12 * 60, metered=True)
    await until(lambda: follower.did == ["the"], what="paused on a metered link")


async def test_by_hand_at_once_both_ways(follower: Follower) -> None:
    await until(follower.pausing.allowed.is_set, what="allowed to serve")
    follower.pausing.ask(True)
    await until(lambda: follower.did == ["paused"], what="paused by hand")
    follower.pausing.ask(False)
    await until(lambda: follower.did == ["paused", "back"], what="resumed by hand")


async def test_one_good_look_is_not_enough() -> None:
    made = Follower(OwnerRules())
    made.around = Surroundings(0, battery=True)
    await made.pausing._step()
    assert made.pausing.paused
    made.around = Surroundings(0)
    await made.pausing._step()
    assert made.pausing.paused
    made.around = Surroundings(0, battery=True)
    await made.pausing._step()
    made.around = Surroundings(0)
    await made.pausing._step()
    assert made.did == ["the"]
    await made.pausing._step()
    assert made.did == ["the", "back"]


# --- a whole node ------------------------------------------------------------------------------------


async def test_pause_gives_everything_back_and_resume_fetches_nothing(
    swarm: NodeSwarm, tmp_path: Path
) -> None:
    async with node(swarm, tmp_path / "node", measure=False) as running:
        leases = await running.proven(2)
        await running.reaches(Phase.SERVING)
        session = await swarm.call_node(leases[0])
        await session.check()
        fetched = swarm.weights.bytes_served
        assert fetched > 0
        answer = await asyncio.to_thread(ask_daemon, tmp_path / "node", "POST", "/pause")
        assert answer == {"pausing": True}
        assert "paused by its owner" in await session.drained()  # the backbone moves its calls away
        await running.reaches(Phase.PAUSED)
        assert await swarm.leases() == []  # and the market knows of no claim any more
        snapshot = running.status.snapshot()
        assert snapshot["windows"] == []
        assert "kvasir-node resume" in snapshot["message"]
        await until(lambda: not running.status.snapshot()["relays"], what="no relay while paused")
        await asyncio.to_thread(ask_daemon, tmp_path / "node", "POST", "/resume")
        again = await running.proven(2)
        await running.reaches(Phase.SERVING)
        assert {lease.window for lease in again} == {lease.window for lease in leases}
        await (await swarm.call_node(again[0])).check()
        assert swarm.weights.bytes_served == fetched, "what is on disk is not fetched again"
        await running.end()


async def test_a_node_that_may_not_serve_claims_nothing(
    swarm: NodeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around: list[Surroundings] = [Surroundings(0, battery=True)]

    def look(**_: Any) -> Surroundings:
        return around[0]

    monkeypatch.setattr(Pausing.__init__, "__kwdefaults__", {"look": look})
    async with node(swarm, tmp_path / "node", measure=False, look_s=0.02) as running:
        await running.reaches(Phase.PAUSED)
        assert "on its battery" in running.status.snapshot()["message"]
        assert await swarm.leases() == []
        around[0] = Surroundings(0)
        await running.proven(2)
        await running.reaches(Phase.SERVING)
        around[0] = Surroundings(0, battery=True)
        await running.reaches(Phase.PAUSED)
        assert await swarm.leases() == []
        await running.end()


async def test_a_paused_node_stops_in_order(swarm: NodeSwarm, tmp_path: Path) -> None:
    async with node(swarm, tmp_path / "node", measure=False) as running:
        await running.proven(2)
        await asyncio.to_thread(ask_daemon, tmp_path / "node", "POST", "/pause")
        await running.reaches(Phase.PAUSED)
        await running.end()
    assert running.status.phase is Phase.STOPPED


async def test_a_limited_node_serves_right_answers(swarm: NodeSwarm, tmp_path: Path) -> None:
    """Processor and upload limits delay; they change nothing."""
    async with node(swarm, tmp_path / "node", measure=False, max_cpu=0.5, upload_limit=50_000) as running:
        leases = await running.proven(2)
        await running.reaches(Phase.SERVING)
        await (await swarm.call_node(leases[0])).check()
        assert "50% of the processors" in running.status.snapshot()["limits"]
        await running.end()

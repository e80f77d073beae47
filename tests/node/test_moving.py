"""A node that makes room for a window that is needed more, in a swarm of real parts, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvasir_node import moving as node_moving
from market.messages import MoveRow
from market.moving import MoveRules
from market.windows import Window
from tests.node.test_daemon import RunningNode, node
from tests.support.experts import tiny_plan
from tests.support.node_swarm import WIDTH, WINDOWS, NodeSwarm, node_swarm
from tests.support.occupants import occupants
from tests.support.waiting import until


@dataclass
class Crowd:
    """Two nodes with room for one window each that both serve `full`, while `empty` has nobody."""

    swarm: NodeSwarm
    nodes: list[RunningNode]
    full: Window
    empty: Window

    async def proven(self) -> list[Window]:
        return sorted(lease.window for lease in await self.swarm.leases("PROVEN"))

    async def prove(self) -> None:
        """What a backbone does all the time."""
        for lease in await self.swarm.leases("LOADED"):
            session = await self.swarm.prove(lease)
            await session.session.close()

    async def moves(self) -> tuple[MoveRow, ...]:
        return (await self.swarm.client.gaps()).moves

    async def ends(self, state: str) -> MoveRow:
        """Wait until a move has ended like this, with at least one owner of the full window all the time."""

        async def ended() -> bool:
            for one in self.nodes:
                if one.task.done():
                    one.task.result()
            await self.prove()
            assert self.full in await self.proven()
            return any(move.state == state for move in await self.moves())

        await until(ended, timeout=30.0, what=f"a move that is {state}")
        return next(move for move in await self.moves() if move.state == state)

    def said(self, words: str) -> bool:
        return any(words in notice.text for one in self.nodes for notice in one.status.notices)


@asynccontextmanager
async def crowd(folder: Path, *, rules: MoveRules | None = None, **settings: Any) -> AsyncIterator[Crowd]:
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(
            node_swarm(folder, moving=rules or MoveRules(patience_s=0.0, offer_s=5.0))
        )
        await swarm.publish()
        full, empty = swarm.plan.windows
        size = swarm.plan.kept_bytes(full, "stored")
        others = await stack.enter_async_context(occupants(swarm.link, swarm.plan_id, empty))
        nodes = []
        for number in range(2):
            given = {"budget_bytes": size, "precision": "stored", **settings}
            running = await stack.enter_async_context(node(swarm, folder / f"node{number}", **given))
            await running.proven(1)
            nodes.append(running)
        made = Crowd(swarm, nodes, full, empty)
        assert await made.proven() == [full, full]
        await others.leave()
        yield made


@pytest.fixture(autouse=True)
def _settle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_moving, "SETTLE_S", 0.1)


async def test_the_new_window_comes_first_then_the_old_one_goes(tmp_path: Path) -> None:
    async with crowd(tmp_path) as swarm:
        row = await swarm.ends("moved")
        assert (row.leaves, row.takes) == (swarm.full, swarm.empty)
        assert await swarm.proven() == [swarm.full, swarm.empty]
        assert swarm.said(f"{swarm.full} makes room for {swarm.empty}: 0 of 2 replicas")
        assert swarm.said(f"{swarm.full} is given up: moves to {swarm.empty}")
        for lease in await swarm.swarm.leases("PROVEN"):
            session = await swarm.swarm.call_node(lease)
            await session.check()
            await session.session.close()
        (mover,) = (
            one for one in swarm.nodes if one.status.snapshot()["windows"][0]["window"] == str(swarm.empty)
        )
        assert mover.status.phase == "serving"


async def test_the_old_window_serves_while_the_new_one_is_fetched(tmp_path: Path) -> None:
    async with crowd(tmp_path) as swarm:
        swarm.swarm.weights_open.clear()

        def steps() -> list[str]:
            return [window["step"] for one in swarm.nodes for window in one.status.snapshot()["windows"]]

        await until(lambda: "fetching" in steps(), what="the fetch")
        assert f"moves to {swarm.empty} once its weights are here" in steps()
        for lease in await swarm.swarm.leases("PROVEN"):
            assert lease.window == swarm.full
            session = await swarm.swarm.call_node(lease)
            await session.check()
            await session.session.close()
        swarm.swarm.weights_open.set()
        await swarm.ends("moved")


async def test_a_disk_with_room_for_one_window_lets_the_old_one_go_first(tmp_path: Path) -> None:
    plan, _, _ = tiny_plan(width=WIDTH, windows=WINDOWS)
    size = sum(span.nbytes for span in plan.window_ranges(WINDOWS[0]))
    async with crowd(tmp_path, cache_bytes=size + size // 2) as swarm:
        swarm.swarm.weights_open.clear()

        def left_and_fetching() -> bool:
            held = [list(one.status.windows.values()) for one in swarm.nodes]
            return any(
                [(w.window, w.step) for w in each] == [(str(swarm.empty), "fetching")] for each in held
            )

        await until(left_and_fetching, timeout=20.0, what="the old window given up before the fetch")
        assert await swarm.proven() == [swarm.full]
        swarm.swarm.weights_open.set()
        await swarm.ends("moved")
        assert await swarm.proven() == [swarm.full, swarm.empty]


async def test_a_node_with_room_for_both_just_takes_the_new_one(tmp_path: Path) -> None:
    async with crowd(tmp_path, budget_bytes=10_000_000) as swarm:
        # Whoever has room volunteers too, so a move may come too late: both windows are served by then.
        async def covered() -> bool:
            await swarm.prove()
            return set(await swarm.proven()) == {swarm.full, swarm.empty}

        await until(covered, timeout=20.0, what="both windows")
        assert (await swarm.proven()).count(swarm.full) == 2


async def test_a_window_that_does_not_fit_is_declined_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowd(tmp_path) as swarm:
        monkeypatch.setattr("kvasir_node.loading.memory_free", lambda accelerator=None: 0)
        row = await swarm.ends("declined")
        assert "close something, or give a smaller --budget" in row.reason
        assert swarm.said(f"no move to {swarm.empty}: ")
        assert await swarm.proven() == [swarm.full, swarm.full]


async def test_weights_that_cannot_be_had_leave_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowd(tmp_path) as swarm:
        monkeypatch.setattr("kvasir_node.loading.ATTEMPTS", 1)

        async def nothing(*args: object, **options: object) -> None:
            raise node_moving.Unreachable("no source has it")

        monkeypatch.setattr("kvasir_node.loading.fetch_window", nothing)
        row = await swarm.ends("failed")
        assert "no source has it" in row.reason
        assert await swarm.proven() == [swarm.full, swarm.full]
        await until(
            lambda: swarm.said(f"{swarm.full} stays: the move to {swarm.empty} failed"), what="the notice"
        )
        steps = [window["step"] for one in swarm.nodes for window in one.status.snapshot()["windows"]]
        assert steps == ["", ""]


async def test_the_last_owner_keeps_its_window_though_the_new_one_is_here(tmp_path: Path) -> None:
    async with crowd(tmp_path) as swarm:
        swarm.swarm.weights_open.clear()

        def mover() -> RunningNode | None:
            held = [one for one in swarm.nodes if len(one.status.windows) == 2]
            return held[0] if held else None

        await until(lambda: mover() is not None, what="a move taken")
        moving = mover()
        assert moving is not None
        (other,) = (one for one in swarm.nodes if one is not moving)
        await other.end()
        swarm.nodes.remove(other)
        swarm.swarm.weights_open.set()
        row = await swarm.ends("failed")
        assert f"nobody else serves {swarm.full} now" in row.reason
        assert await swarm.proven() == [swarm.full]
        (lease,) = await swarm.swarm.leases("PROVEN")
        session = await swarm.swarm.call_node(lease)
        await session.check()
        await session.session.close()


async def test_a_node_that_stops_in_the_middle_of_a_move_gives_everything_back(tmp_path: Path) -> None:
    async with crowd(tmp_path) as swarm:
        swarm.swarm.weights_open.clear()
        await until(lambda: any(len(one.status.windows) == 2 for one in swarm.nodes), what="a move taken")
        (moving,) = (one for one in swarm.nodes if len(one.status.windows) == 2)
        stopping = asyncio.create_task(moving.end())
        await swarm.ends("failed")
        await stopping
        assert await swarm.proven() == [swarm.full]
        swarm.nodes.remove(moving)
        swarm.swarm.weights_open.set()

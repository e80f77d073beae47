"""A whole swarm in one process: a real checkpoint, real nodes, real sessions through the real relay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.support.swarms import RunningSwarm, running_swarm
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)
"""A swarm in one process needs seconds; on a busy machine minutes."""

PROMPT = "In the beginning"
TOKENS = 48


def ranks(number: int) -> dict[str, Any]:
    """Three nodes that together hold each window once or twice, none of them all."""
    return {"budget_bytes": 22_000_000, "precision": "stored"}


async def test_three_nodes_serve_everything_and_are_paid(tmp_path: Path) -> None:
    async with running_swarm(tmp_path, nodes=3, node=ranks) as swarm:
        await swarm.covered()
        answer = await swarm.complete(PROMPT, TOKENS)
        assert answer["usage"]["completion_tokens"] == TOKENS

        async def paid() -> bool:
            nodes = (await swarm.ask("nodes"))["nodes"]
            return len(nodes) == 3 and all(node["credit"] for node in nodes)

        await until(paid, timeout=60, what="credit for every node")
        status = await swarm.ask("status")
        credits = await swarm.ask("credits")
    assert status["coverage"] == 1.0
    assert status["fallback_rows"] == 0
    assert status["numerics"] == "exact"
    for node in status["nodes"]:
        assert node["windows"]
        assert node["calls"] > 0
        assert node["carried_bytes"] > 0
        assert node["path"] == "relay"
        assert node["worst_d"] == 0.0  # one numerics class: audits agree bit for bit
    assert credits["balanced"] is True
    assert sum(row["credit"] for row in credits["wallets"]) == pytest.approx(credits["issued_bytes"] / 1e6)


async def test_the_swarm_writes_what_the_backbone_writes_alone_and_a_restart_continues_the_receipts(
    tmp_path: Path,
) -> None:
    async with running_swarm(tmp_path) as swarm:
        await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
        alone = await swarm.text(PROMPT, TOKENS)
        assert (await swarm.ask("status"))["fallback_rows"] > 0
        await swarm.add_node()
        await swarm.covered()
        before = (await swarm.ask("status"))["fallback_rows"]
        assert await swarm.text(PROMPT, TOKENS) == alone
        assert (await swarm.ask("status"))["fallback_rows"] == before
        first = (await swarm.ask("nodes"))["nodes"][0]
    async with running_swarm(tmp_path, nodes=1) as swarm:
        await swarm.covered()
        assert await swarm.text(PROMPT, TOKENS) == alone
        second = (await swarm.ask("nodes"))["nodes"][0]
        assert second["device"] == first["device"]
        assert second["carried_bytes"] > first["carried_bytes"]

        async def acknowledged() -> bool:
            rows = (await swarm.ask("credits"))["wallets"]
            return rows[0]["credit"] * 1e6 == pytest.approx(second["carried_bytes"])

        await until(acknowledged, timeout=60, what="the whole chain in the ledger")
        assert (await swarm.ask("credits"))["balanced"] is True


async def test_a_node_lost_in_mid_generation_changes_nothing(tmp_path: Path) -> None:
    async with running_swarm(tmp_path, nodes=3) as swarm:
        await swarm.covered(replicas=2)
        expected = await swarm.text(PROMPT, TOKENS)
        calls = (await swarm.ask("status"))["dispatch"]["calls"]
        running = asyncio.create_task(swarm.text(PROMPT, TOKENS))
        await swarm.calls_made(calls + 20)
        victim = await busiest(swarm)
        await swarm.nodes[victim].kill()
        assert await running == expected
        status = await swarm.ask("status")
        assert status["fallback_rows"] == 0  # the other replicas took over
        assert status["coverage"] == 1.0


async def test_a_frozen_node_costs_a_redispatch_its_breaker_closes_again_and_one_that_leaves_is_paid(
    tmp_path: Path,
) -> None:
    async with running_swarm(tmp_path, nodes=2) as swarm:
        await swarm.covered(replicas=2)
        expected = await swarm.text(PROMPT, TOKENS)
        calls = (await swarm.ask("status"))["dispatch"]["calls"]
        running = asyncio.create_task(swarm.text(PROMPT, TOKENS))
        await swarm.calls_made(calls + 20)
        victim = await busiest(swarm)
        swarm.nodes[victim].wire.freeze()
        assert await running == expected
        assert (await swarm.ask("status"))["fallback_rows"] == 0
        swarm.nodes[victim].wire.thaw()

        async def closed() -> bool:
            nodes = (await swarm.ask("nodes"))["nodes"]
            return all(node["breaker"] is None and node["path"] == "relay" for node in nodes)

        await until(closed, timeout=60, what="closed breakers")

        # One leaves in order: it hands over, and is paid to the last byte.
        running = asyncio.create_task(swarm.text(PROMPT, TOKENS))
        await swarm.calls_made((await swarm.ask("status"))["dispatch"]["calls"] + 20)
        await swarm.nodes[0].end()
        assert await running == expected
        book = swarm.backbone.swarm.book  # type: ignore[union-attr]

        async def posted() -> bool:
            credits = await swarm.ask("credits")
            earned = sum(size for size, _ in book.all_totals().values())
            return int(credits["issued_bytes"]) == earned and not book.unsigned()

        await until(posted, timeout=60, what="every carried byte in the ledger")
        assert (await swarm.ask("status"))["fallback_rows"] == 0


async def test_all_nodes_lost_the_fallback_gives_the_same_text_and_says_so(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running_swarm(tmp_path, nodes=2, node=ranks) as swarm:
            await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
            await until(lambda: coverage(swarm) > 0.5, timeout=60, what="coverage")
            expected = await swarm.text(PROMPT, TOKENS)
            calls = (await swarm.ask("status"))["dispatch"]["calls"]
            running = asyncio.create_task(swarm.text(PROMPT, TOKENS))
            await swarm.calls_made(calls + 20)
            for node in swarm.nodes:
                await node.kill()
            assert await running == expected
            gaps = await swarm.ask("gaps")
    assert gaps["coverage"] == 0.0
    assert gaps["fallback_rows"] > 0
    held = [row for row in gaps["windows"] if row["replicas"]]
    assert held
    assert all(row["connected"] == 0 and "no owner" in row["reason"] for row in held)
    uncovered = {entry["window"] for entry in logs if entry["event"] == "window.uncovered"}
    assert {row["window"] for row in held} <= uncovered


async def test_without_bytes_or_owner_the_answer_is_503_naming_the_window(tmp_path: Path) -> None:
    async with running_swarm(tmp_path, fallback="none") as swarm:
        await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
        body = {"model": "kvasir-tiny", "prompt": PROMPT, "max_tokens": 4}
        async with swarm.http.post(f"{swarm.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 503
        assert answer["error"]["code"] == "window_unavailable"
        assert "L00-00/E" in answer["error"]["message"]
        await swarm.add_node()
        await swarm.covered()
        assert await swarm.text(PROMPT, 4)


def coverage(swarm: RunningSwarm) -> float:
    held = swarm.backbone.swarm
    return 0.0 if held is None else held.roster().coverage()


async def busiest(swarm: RunningSwarm) -> int:
    """The number of the node with the most calls."""
    shown = {node["wallet"]: node["calls"] for node in (await swarm.ask("nodes"))["nodes"]}
    calls = [shown.get(node.status.snapshot()["wallet"], 0) for node in swarm.nodes]
    return calls.index(max(calls))

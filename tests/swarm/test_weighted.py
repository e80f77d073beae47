"""A weighted swarm: the same text within rounding, one partial sum a row, paid for what it carried."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.equality import compare_greedy, load_stock, stock_greedy
from kvasir_backbone.weighting import WeightedDispatcher, cuts_a_layer
from tests.support.swarms import running_swarm
from tests.support.waiting import until

pytestmark = [pytest.mark.any_loop, pytest.mark.timeout(300)]
"""A swarm in one process needs seconds; on a busy machine minutes."""

PROMPT = "In the beginning"
TOKENS = 32


async def test_a_weighted_swarm_gives_stocks_text_and_is_paid_for_one_response_row_a_row(
    tmp_path: Path,
) -> None:
    """Windows of whole layers: a row's experts lie at one owner, so its text is exact whoever fails."""
    async with running_swarm(
        tmp_path, nodes=2, node=lambda number: {"precision": "stored"}, weighted=True, window_bytes=64_000_000
    ) as swarm:
        await swarm.covered(replicas=2, timeout=120)
        backbone = swarm.backbone.swarm
        assert backbone is not None
        assert isinstance(backbone.dispatcher, WeightedDispatcher)
        assert not cuts_a_layer(backbone.plan)
        answer = await swarm.complete(PROMPT, TOKENS, return_token_ids=True)
        choice = answer["choices"][0]
        before = backbone.dispatcher.stats.calls
        running = asyncio.create_task(swarm.text(PROMPT, TOKENS))
        await swarm.calls_made(before + 10)
        await swarm.nodes[0].kill()
        assert await running == choice["text"]
        await until(lambda: backbone.auditor.stats.audited > 0, timeout=60, what="an audit")
        stats, plan, top_k = backbone.dispatcher.stats, backbone.plan, backbone.plan.layers[0].top_k

        def rows() -> int:  # of ids-only: rows x ((1 + k) x row bytes + 2 k)
            return stats.rows * (2 * plan.row_bytes + 2 * top_k)

        await until(lambda: backbone.book.paid_bytes == rows(), timeout=60, what="the last payment")
        status = await swarm.ask("status")
        async with swarm.http.get(f"{swarm.url}/metrics") as response:
            metrics = await response.text()
    assert (status["numerics"], status["carried"]["mode"]) == ("exact", "weighted")
    audit = status["audit"]
    assert audit["violations"] == 0
    assert 0 < audit["cpu_s"] < audit["process_cpu_s"]
    assert 0 < audit["rate"] <= 1
    assert "\nkvasir_audited_total " in metrics
    assert f'kvasir_carried_bytes_total{{mode="weighted"}} {status["carried"]["bytes"]:g}' in metrics
    assert status["carried"]["bytes"] == rows()
    model = load_stock(bundled_model_path())
    ids = choice["prompt_token_ids"]
    verdict = compare_greedy(model, ids, choice["token_ids"], stock_greedy(model, ids, TOKENS))
    assert verdict.matches, verdict.reason

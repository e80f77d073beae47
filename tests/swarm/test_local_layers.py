"""A swarm whose first layers stay on the backbone: the same text, and no node ever sees their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.swarms import running_swarm

pytestmark = [pytest.mark.any_loop, pytest.mark.timeout(300)]
"""A swarm in one process needs seconds; on a busy machine minutes."""

PROMPT = "And the king said unto him, "


async def test_nodes_hold_the_other_layers_only_and_the_text_is_the_same(tmp_path: Path) -> None:
    async with running_swarm(tmp_path / "all", nodes=0) as swarm:
        await swarm.backbone.serving.wait()
        expected = await swarm.text(PROMPT, 16)
    async with running_swarm(tmp_path / "kept", nodes=1, local_layers=2) as swarm:
        await swarm.covered()
        plan = swarm.backbone.plan
        assert plan is not None
        assert [recipe.layer for recipe in plan.layers] == [2, 3]
        answer = await swarm.complete(PROMPT, 16)
        assert answer["choices"][0]["text"] == expected
        assert swarm.backbone.swarm is not None
        assert swarm.backbone.swarm.dispatcher.stats.calls > 0

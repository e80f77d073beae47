"""Nodes that pass their proving call and cheat afterwards, in a whole swarm."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir_node.control import ask_daemon
from kvasir_node.serving import ExpertServer
from tests.support.swarms import RunningSwarm, running_swarm
from tests.support.waiting import until

pytestmark = [pytest.mark.any_loop, pytest.mark.timeout(300)]
"""A swarm in one process needs seconds; on a busy machine minutes."""

PROMPT = "In the beginning"


class Cheating:
    """Experts that are run honestly until `from_now_on` is set."""

    def __init__(self, experts: Any, kind: str, from_now_on: threading.Event) -> None:
        self._experts, self._kind, self._from_now_on = experts, kind, from_now_on
        self.direct = None  # no way past `run`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        outputs: Tensor = self._experts.run(layer, expert, rows)
        if not self._from_now_on.is_set():
            return outputs
        if self._kind == "zeros":
            return torch.zeros_like(outputs)
        off: Tensor = 0.5 * outputs.norm(dim=-1, keepdim=True) / outputs.shape[-1] ** 0.5
        return outputs + off


@pytest.mark.parametrize("kind", ["zeros", "wrong"])
async def test_a_cheater_is_quarantined_told_why_and_kept_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from_now_on = threading.Event()
    hold = ExpertServer.hold
    monkeypatch.setattr(
        ExpertServer,
        "hold",
        lambda self, lease, epoch, plan, experts: hold(
            self,
            lease,
            epoch,
            plan,
            Cheating(experts, kind, from_now_on),  # type: ignore[arg-type]
        ),
    )
    async with running_swarm(tmp_path, nodes=1) as swarm:
        await swarm.covered()
        honest = await swarm.text(PROMPT)
        from_now_on.set()
        during = await swarm.text(PROMPT)
        if kind == "zeros":
            assert during == honest  # the norm band points at them, and the recompute refuses them

        def out() -> bool:
            assert swarm.backbone.swarm is not None
            return swarm.backbone.swarm.roster().coverage() == 0.0

        async def out_soon() -> bool:
            if not out():  # one call in fifty is audited
                await swarm.text(PROMPT)
            return out()

        await until(out_soon, timeout=90, what="the end of its claims")
        assert await swarm.text(PROMPT) == honest  # by the fallback
        told = "quarantine"
        await until(
            lambda: told in str(swarm.nodes[0].status.snapshot()), timeout=60, what="the reason at the node"
        )
        # It may claim again as often as it likes: nothing of it is used while the quarantine lasts.
        await _told_and_shown(swarm)
        earned = (await swarm.ask("credits"))["issued_bytes"]
        assert await swarm.text(PROMPT) == honest
        assert out()
        assert (await swarm.ask("credits"))["issued_bytes"] == earned


async def _told_and_shown(swarm: RunningSwarm) -> None:
    """The owner reads what is on record, its escrow is void, and the evidence says that it was wrong."""
    node = swarm.nodes[0]
    await until(
        lambda: node.status.trust.get("quarantines") == 1, timeout=60, what="the market's word at the node"
    )
    (balance,) = (await swarm.ask("credits"))["wallets"]
    assert (balance["escrow"], balance["available"]) == (0, 0)
    assert balance["void"] > 0
    records = (await swarm.ask("trust"))["records"]
    assert [record["kind"] for record in records if record["kind"] != "violation"] == ["quarantine"]
    assert any(record["amount"] > 0 for record in records)
    violation = next(record for record in records if record["kind"] == "violation" and record["evidence"])
    path = f"/recompute/{violation['id']}"
    again = await asyncio.to_thread(ask_daemon, node.config.state_dir, "POST", path, timeout_s=60.0)
    assert again["d_expected"] <= again["limit"] < again["d_answered"]
    assert again["digests_match"]

"""A backbone without bytes of its own: replicas of other wallets say who is right, in a whole swarm."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
from torch import Tensor

from kvasir_backbone.auditing import References
from kvasir_node.serving import ExpertServer
from market.config import MarketConfig
from market.scarcity import ScarcityRules
from relay.errors import ConfigError
from tests.support.swarms import running_swarm
from tests.support.waiting import until
from tests.swarm.test_cheaters import PROMPT, Cheating

pytestmark = [pytest.mark.any_loop, pytest.mark.timeout(300)]
"""A swarm in one process needs seconds; on a busy machine minutes."""


async def test_without_bytes_a_cheater_is_outvoted_by_two_other_wallets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three replicas of everything; one of them cheats once the backbone's bytes are gone."""
    from_now_on = threading.Event()
    cheaters: list[ExpertServer] = []
    hold, run = ExpertServer.hold, References.run

    def hold_or_cheat(self: ExpertServer, lease: bytes, epoch: int, plan: bytes, experts: object) -> None:
        if not cheaters:
            cheaters.append(self)
        made = Cheating(experts, "wrong", from_now_on) if self is cheaters[0] else experts
        hold(self, lease, epoch, plan, made)  # type: ignore[arg-type]

    def without_bytes(
        self: References, layer: int, expert: int, rows: Tensor, precision: str = "stored"
    ) -> Tensor:
        if from_now_on.is_set():
            raise ConfigError("the checkpoint's files are gone")
        return run(self, layer, expert, rows, precision)

    monkeypatch.setattr(ExpertServer, "hold", hold_or_cheat)
    monkeypatch.setattr(References, "run", without_bytes)
    monkeypatch.setattr(
        "kvasir_backbone.daemon.MarketConfig",
        functools.partial(MarketConfig, scarcity=ScarcityRules(base_target=3)),
    )
    async with running_swarm(
        tmp_path,
        nodes=3,
        node=lambda number: {"precision": "stored"},
        fallback="none",
        window_bytes=64_000_000,
    ) as swarm:
        await swarm.covered(replicas=3, timeout=120)
        backbone = swarm.backbone.swarm
        assert backbone is not None
        from_now_on.set()

        async def outvoted() -> bool:
            await swarm.text(PROMPT)
            return all(len(backbone.roster().of(n)) == 2 for n in range(len(backbone.plan.windows)))

        await until(outvoted, timeout=120, what="the end of the cheater's claims")
        audit = (await swarm.ask("status"))["audit"]
        why = "an audited output was wrong"

        def told() -> bool:
            return sum(why in str(node.status.snapshot()) for node in swarm.nodes) == 1

        await until(told, timeout=60, what="the reason, at the cheater alone")
        honest = {replica.wallet for replica in backbone.roster().of(0)}
    assert audit["arbitrated"] > 0
    assert audit["violations"] > 0
    trust = backbone.auditor.trust()
    assert len(honest) == 2
    assert all(trust[wallet].audited > 0 and trust[wallet].worst_d == 0.0 for wallet in honest)

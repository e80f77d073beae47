"""What a request keeps in memory, measured: states of constant size count against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.engine import EngineConfig
from kvasir_backbone.footprint import Footprint, fit
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel, StepResult, Work
from tests.support.generating import generate
from tests.support.tiny_models import save_tiny


def test_a_footprint_exceeds_every_measurement() -> None:
    assert fit({1: 100, 9: 900}, 100) == Footprint(100, 0)
    assert fit({1: 5100, 9: 5900}, 100) == Footprint(100, 5000)
    assert fit({1: 5100, 9: 7500}, 100) == Footprint(300, 4800)  # more a position than was thought
    assert fit({1: 5010, 9: 5090}, 100) == Footprint(100, 4910)  # less: latent or windowed attention
    assert fit({1: 5000, 9: 5000}, 1).bytes(9) >= 5000


class Watched(BackboneModel):
    """Notes after every step what all requests keep."""

    most = 0
    together = 0

    def forward(self, works: Sequence[Work]) -> StepResult:
        """See `BackboneModel.forward`."""
        result = super().forward(works)
        self.most = max(self.most, self.kv_bytes)
        self.together = max(self.together, len(self._caches))
        return result


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
async def test_states_of_constant_size_stay_within_the_budget(tmp_path: Path, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (size,), generator=generator).tolist() for size in (3, 40, 9, 1, 20, 5)]
    with Checkpoint.open(save_tiny(tmp_path, name)) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")
        local = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 24)
        model = Watched.load(checkpoint, dtype="float32", dispatcher=local)
        assert isinstance(model, Watched)
        assert model.state_bytes > 0
        assert model.kv_bytes == 0
        texts = await generate(model, prompts, 6)
        free, model.most, model.together = model.most, 0, 0
        # Room for three of the six at a time, and for the positions of a few.
        budget = 3 * model.state_bytes + 128 * model.kv_token_bytes
        assert await generate(model, prompts, 6, EngineConfig(kv_bytes=budget)) == texts
        assert 0 < model.most <= budget < free
        assert 1 < model.together <= 3

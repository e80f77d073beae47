"""The first layers kept on the backbone: in no plan, run here, and the same text."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.config import BackboneConfig
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.local_layers import keep_local, split_layers
from kvasir_backbone.seam import RowKey, combine_of
from relay.errors import ConfigError
from tests.support.dispatchers import Recording

KEYS = (RowKey(1, 0, 0, True), RowKey(1, 0, 1, True))


class Combining(Recording):
    """One that also adds up."""

    def combine(self, layer, rows, ids, weights, keys, deadline_s):  # type: ignore[no-untyped-def]
        outputs = self.dispatch(layer, rows, ids, keys, deadline_s)
        return (outputs * weights.unsqueeze(-1)).sum(1)


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(bundled_model_path()) as opened:
        yield opened


def test_local_layers_are_in_no_plan_and_what_runs_experts_here_has_them_all(checkpoint: Checkpoint) -> None:
    cut = {"window_bytes": 3_000_000, "wire_dtype": "float32", "rng": random.Random(1)}
    plan = checkpoint.make_plan(local_layers=2, **cut)  # type: ignore[arg-type]
    assert [recipe.layer for recipe in plan.layers] == [2, 3]
    assert {window.layer_start for window in plan.windows} == {2, 3}
    whole = checkpoint.whole_plan(plan, 3_000_000)
    assert [recipe.layer for recipe in whole.layers] == [0, 1, 2, 3]
    assert set(plan.windows) < set(whole.windows)
    full = checkpoint.make_plan(**cut)  # type: ignore[arg-type]
    assert checkpoint.whole_plan(full, 3_000_000) == full
    # The class that replicas are compared with is that of what they serve.
    local = LocalExperts(checkpoint.read, whole, served=plan)
    assert local.numerics == LocalExperts(checkpoint.read, plan).numerics


def test_rows_of_local_layers_never_reach_the_swarm(checkpoint: Checkpoint) -> None:
    plan = checkpoint.make_plan(window_bytes=3_000_000, wire_dtype="float32", rng=random.Random(1))
    here = LocalExperts(checkpoint.read, plan)
    swarm, local = Recording(here), Recording(here)
    kept = keep_local(swarm, local, {0, 1})
    rows, ids = torch.randn(2, plan.width), torch.tensor([[1, 2], [3, 4]])
    for layer in range(4):
        assert torch.equal(
            kept.dispatch(layer, rows, ids, KEYS, 1.0), here.dispatch(layer, rows, ids, KEYS, 1.0)
        )
    assert [layer for layer, _, _ in local.calls] == [0, 1]
    assert [layer for layer, _, _ in swarm.calls] == [2, 3]
    assert combine_of(kept) is None
    assert keep_local(swarm, local, ()) is swarm


def test_a_weighted_swarm_adds_up_its_own_layers_only(checkpoint: Checkpoint) -> None:
    plan = checkpoint.make_plan(window_bytes=3_000_000, wire_dtype="float32", rng=random.Random(1))
    here = LocalExperts(checkpoint.read, plan)
    swarm, local = Combining(here), Recording(here)
    combine = combine_of(keep_local(swarm, local, {0}))
    assert combine is not None
    rows, ids, weights = torch.randn(2, plan.width), torch.tensor([[1, 2], [3, 4]]), torch.rand(2, 2)
    for layer in (0, 1):
        expected = (here.dispatch(layer, rows, ids, KEYS, 1.0) * weights.unsqueeze(-1)).sum(1)
        assert torch.equal(combine(layer, rows, ids, weights, KEYS, 1.0), expected)
    assert [layer for layer, _, _ in local.calls] == [0]
    assert [layer for layer, _, _ in swarm.calls] == [1]


@pytest.mark.parametrize("local", [4, 5])
def test_something_must_be_left_to_the_swarm(checkpoint: Checkpoint, local: int) -> None:
    with pytest.raises(ConfigError, match="at least one must be left to the swarm"):
        split_layers(checkpoint.recipes(random.Random(1)), local)
    with pytest.raises(ConfigError, match="--local-layers must be 0 or more"):
        BackboneConfig(local_layers=-1)

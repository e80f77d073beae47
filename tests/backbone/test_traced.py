"""The recorded pass: the model's own bits, its failures, and what happens where it cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir_backbone import traced
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.invariance import try_passes
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import PACKED_TYPES, BackboneModel, Work
from kvasir_backbone.scheduler import Segment
from kvasir_backbone.seam import DispatchFailed
from tests.support.dispatchers import Failing
from tests.support.tiny_models import CONFIGS, save_tiny


@pytest.mark.parametrize("name", sorted(PACKED_TYPES & set(CONFIGS)))
def test_every_packed_architecture_is_recorded_with_its_own_bits(tmp_path: Path, name: str) -> None:
    with Checkpoint.open(save_tiny(tmp_path, name)) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")
        local = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 24)
        model = BackboneModel.load(checkpoint, dtype="float32", dispatcher=local)
        assert model._graph is not None
        made = try_passes(model).logits
        model._graph = None
        assert all(map(np.array_equal, made, try_passes(model).logits))


def _work(request: int, rows: int) -> Work:
    return Work(Segment(request, 0, 0, rows, rows, False, 0, True), list(range(5, 5 + rows)))


def test_failures_come_through_the_graph_as_they_are(bundled_model: BackboneModel) -> None:
    assert bundled_model._graph is not None
    inner = bundled_model.dispatcher
    assert inner is not None
    try:
        bundled_model.dispatcher = Failing(inner, lambda layer, key: key.request == 1 and layer == 2, False)
        result = bundled_model.forward([_work(1, 3), _work(2, 2)])
        assert set(result.logits) == {2}
        assert isinstance(result.failures[1], DispatchFailed)
        result = bundled_model.forward([_work(1, 3)])  # nobody is left: the pass ends early
        assert (dict(result.logits), set(result.failures)) == ({}, {1})
    finally:
        bundled_model.dispatcher = inner
        for request in (1, 2):
            bundled_model.forget(request)


def test_a_bug_below_the_seam_keeps_its_type(bundled_model: BackboneModel) -> None:
    class Broken:
        def dispatch(self, *_: Any) -> Tensor:
            raise ZeroDivisionError("a bug")

    inner, bundled_model.dispatcher = bundled_model.dispatcher, Broken()
    try:
        with pytest.raises(ZeroDivisionError, match="a bug"):
            bundled_model.forward([_work(1, 3)])
    finally:
        bundled_model.dispatcher = inner
        bundled_model.forget(1)


def test_code_that_depends_on_the_example_is_not_used(
    bundled_model: BackboneModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BackboneModel._pass

    def sized(self: BackboneModel, tokens: Tensor, *arguments: Any) -> Tensor:
        return real(self, tokens, *arguments) * float(int(tokens.shape[1]))

    graph = bundled_model._graph
    try:
        with monkeypatch.context() as patch:
            patch.setattr(BackboneModel, "_pass", sized)
            bundled_model._graph = None
            assert not bundled_model.record()
            assert bundled_model._graph is None
    finally:
        bundled_model._graph = graph


def test_code_that_cannot_be_recorded_is_run() -> None:
    def stubborn(tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        raise ValueError("not while somebody records")

    assert traced.record(stubborn) is None
    assert traced.record(lambda tokens, positions, wanted: torch.zeros(1)) is not None

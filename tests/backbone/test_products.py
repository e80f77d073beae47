"""A model's own products in the C core: found, packed, freed, given back; and what happens without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor, nn

from kvasir_backbone import model as model_module
from kvasir_backbone import products
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.invariance import Tried, prove, try_passes
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel, Work
from kvasir_backbone.packed import MIN_ROWS
from kvasir_backbone.products import Found, Products, distance
from kvasir_backbone.scheduler import Segment
from kvasir_node.kernels.build import find_compiler
from kvasir_node.kernels.operators import operators
from tests.support.tiny_models import save_tiny

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """Its shared experts and its output layer are products too, and its router reads its weight in fp32."""
    with Checkpoint.open(save_tiny(tmp_path_factory.mktemp("products"), "glm4_moe")) as opened:
        yield opened


def load(checkpoint: Checkpoint, dtype: str = "float32") -> BackboneModel:
    plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")
    local = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 24)
    return BackboneModel.load(checkpoint, dtype=dtype, dispatcher=local)


def parameters(model: BackboneModel) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.model.named_parameters()}


def largest_distance(made: Tried, expected: Tried) -> float:
    return max(map(distance, map(torch.tensor, made.logits), map(torch.tensor, expected.logits)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_run_in_the_c_core_and_one_row_costs_one_row(checkpoint: Checkpoint, dtype: str) -> None:
    model = load(checkpoint, dtype)
    taken = model._products
    assert taken is not None
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    assert taken.count == len(linears) + 2  # its two routers
    assert all(module.weight.untyped_storage().nbytes() <= 4 for module in linears)
    assert model.model.get_input_embeddings().weight.isfinite().all()
    assert model.least_rows == 1
    assert prove(model) is None
    assert model.least_rows == 1


def test_results_are_torchs_within_rounding(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load(checkpoint)
    assert ours._products is not None
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "operators", lambda: None)
        theirs = load(checkpoint)
    assert theirs._products is None
    assert theirs.least_rows == MIN_ROWS
    assert theirs._graph is not None
    assert 0.0 < largest_distance(try_passes(ours), try_passes(theirs)) <= 1e-10


def test_whoever_watches_the_modules_sees_the_same_bits(checkpoint: Checkpoint) -> None:
    model = load(checkpoint)
    expected, seen = try_passes(model), []
    handle = model.model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(1))
    try:
        assert all(map(np.array_equal, try_passes(model).logits, expected.logits))
    finally:
        handle.remove()
    assert seen


def test_what_is_given_back_is_as_it_was(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "operators", lambda: None)
        before = load(checkpoint)
    monkeypatch.setitem(products.PASS_LIMITS, torch.float32, -1.0)
    with structlog.testing.capture_logs() as logs:
        model = load(checkpoint)
    (rejected,) = [entry for entry in logs if entry["event"] == "products.rejected"]
    assert rejected["instead"] == "torch"
    assert model._products is None
    assert model.least_rows == MIN_ROWS
    assert model._graph is not None
    for name, weight in parameters(before).items():
        assert torch.equal(weight, parameters(model)[name]), name
    assert all(map(np.array_equal, try_passes(model).logits, try_passes(before).logits))


def test_a_product_that_disagrees_leaves_all_to_torch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(products.LIMITS, torch.float32, -1.0)
    with structlog.testing.capture_logs() as logs:
        model = load(checkpoint)
    assert "products.rejected" in [entry["event"] for entry in logs]
    assert model._products is None
    assert all(weight.isfinite().all() for weight in parameters(model).values())


def test_a_model_in_fp16_stays_torchs(checkpoint: Checkpoint) -> None:
    model = load(checkpoint, "float16")
    assert model._products is None
    assert model._graph is not None
    assert model.least_rows == MIN_ROWS


def test_a_chunk_that_samples_nothing_needs_no_output_layer(checkpoint: Checkpoint) -> None:
    model = load(checkpoint)
    chunk = Segment(1, 0, 0, 3, 3, rowwise=False, replayed=0, samples=False)
    assert dict(model.forward([Work(chunk, [5, 6, 7])]).logits) == {}
    model.forget(1)


def test_two_step_threads_have_padding_of_their_own(checkpoint: Checkpoint) -> None:
    model = load(checkpoint)

    def passes(request: int, rows: int) -> list[Any]:
        work = Work(Segment(request, 0, 0, rows, rows, False, 0, True), list(range(rows)))
        made = []
        for _ in range(10):
            made.append(model.forward([work]).logits[request].copy())
            model.forget(request)
        return made

    alone = [passes(1, 2), passes(2, 5)]
    with ThreadPoolExecutor(2) as pool:
        together = [pool.submit(passes, *one) for one in ((1, 2), (2, 5))]
        for expected, made in zip(alone, together, strict=True):
            assert all(map(np.array_equal, expected, made.result(60.0)))


class Odd(nn.Module):
    """Products by parameters in every form, and one that is not by a parameter."""

    def __init__(self, others: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator), requires_grad=False)

        self.tied, self.router, self.wide = noise(9, 6), noise(6, 6), nn.Linear(6, 6)
        self.wide.weight, self.wide.bias = noise(6, 6), noise(6)
        self.others = others

    def forward(self, tokens: Tensor) -> Tensor:
        rows = nn.functional.embedding(tokens, self.tied)
        rows = nn.functional.linear(self.wide(rows), weight=self.router)
        if self.others:
            rows = rows @ self.wide.weight.T
        return nn.functional.linear(rows, self.tied)


@pytest.mark.parametrize("others", [False, True])
def test_what_reads_a_parameter_otherwise_keeps_it(others: bool) -> None:
    found = operators()
    assert found is not None
    model: Any = Odd(others)
    weights = {name: each.clone() for name, each in model.named_parameters()}
    tokens = torch.tensor([[1, 8, 3]])
    with Found(model) as seen, torch.no_grad():
        expected = model(tokens)
    assert bool(seen.others) is others
    taken = Products(found)
    assert taken.pack(seen, [])
    assert taken.count == 3
    assert model.tied.isfinite().all()
    assert model.router.isfinite().all()
    assert bool(model.wide.weight.isnan().all()) is not others
    with taken.active(), torch.no_grad():
        made = model(tokens)
    assert not torch.equal(made, torch.zeros_like(made))
    assert distance(made, expected) <= 1e-10
    taken.restore()
    assert all(torch.equal(each, weights[name]) for name, each in model.named_parameters())

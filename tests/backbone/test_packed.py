"""Packed attention: every request its own memory, and every row the bits that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvasir_backbone import packed, traced
from kvasir_backbone.model import BackboneModel, Work
from kvasir_backbone.packed import KvMemory, PackedBatch, attend
from kvasir_backbone.scheduler import Segment
from kvasir_node.kernels.attention import load_attention
from kvasir_node.kernels.operators import operators

HEADS, KEY_HEADS, DIM, VALUE_DIM = 4, 2, 16, 24
SCALING = 0.3


@pytest.fixture(params=["C core", "torch"])
def memory(request: pytest.FixtureRequest) -> KvMemory:
    attention = load_attention() if request.param == "C core" else None
    if request.param == "C core" and attention is None:
        pytest.skip("no C core on this machine")
    return KvMemory(attention)


@pytest.fixture
def core() -> KvMemory:
    """Memory with the C core's attention as an operator of recorded graphs."""
    attention = load_attention()
    if attention is None or operators() is None:
        pytest.skip("no C core on this machine")
    traced._register()
    return KvMemory(attention)


def segment(request: int, start: int, rows: int, *, own: bool = False, room: int = 0) -> Segment:
    end = start + rows
    return Segment(request, 0, start, rows, -(-end // 32) * 32 + room, own, 0, samples=True)


class Texts:
    """Queries, keys and values of every position of some requests and layers, as transformers gives them."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, dim: int = DIM) -> None:
        self.dtype, self.dim = dtype, dim

    def rows(self, layer: int, segments: Sequence[Segment], padding: int) -> list[Tensor]:
        """Query, key and value [1, heads, rows, dim]."""
        shapes = ((HEADS, self.dim), (KEY_HEADS, self.dim), (KEY_HEADS, VALUE_DIM))
        parts = []
        for kind, (heads, dim) in enumerate(shapes):
            some = [
                self._text(layer, each.request, kind, heads, dim)[each.start : each.end] for each in segments
            ]
            parts.append(
                torch.cat([*some, torch.ones(padding, heads, dim).to(self.dtype)])[None].transpose(1, 2)
            )
        return parts

    def _text(self, layer: int, request: int, kind: int, heads: int, dim: int) -> Tensor:
        random = torch.Generator().manual_seed(1000 * layer + 10 * request + kind)
        return torch.randn(200, heads, dim, generator=random).to(self.dtype)

    def exact(self, layer: int, request: int, end: int) -> Tensor:
        """[end, heads, value dim] of all positions in float64."""
        query, key, value = self.rows(layer, [segment(request, 0, end)], 0)
        made = functional.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), is_causal=True, scale=SCALING, enable_gqa=True
        )
        return made[0].transpose(0, 1)


def step(
    memory: KvMemory, texts: Texts, segments: Sequence[Segment], *, padding: int = 2, operator: Any = None
) -> list[list[Tensor]]:
    """For each of two layers, each segment's rows of the attention."""
    batch = PackedBatch(segments, memory)
    made = []
    with packed.packed(batch), torch.inference_mode():
        for layer in range(2):
            parts = query, key, value = texts.rows(layer, segments, padding)
            if operator is not None:
                out = operator(*parts, layer, SCALING)
            else:
                out = attend(layer, query, key, value, SCALING)
            assert out.shape == (1, batch.rows + padding, HEADS, VALUE_DIM)
            assert not out[:, batch.rows :].any()
            made.append(list(torch.split(out[0, : batch.rows], [each.rows for each in segments])))
    return made


def test_every_segment_attends_to_its_own_request(memory: KvMemory) -> None:
    texts = Texts()
    step(memory, texts, [segment(1, 0, 40), segment(2, 0, 70), segment(3, 0, 1)])
    made = step(memory, texts, [segment(1, 40, 1, own=True), segment(2, 70, 58), segment(3, 1, 5, own=True)])
    for layer, rows in enumerate(made):
        for got, (request, start, end) in zip(rows, ((1, 40, 41), (2, 70, 128), (3, 1, 6)), strict=True):
            assert torch.allclose(got.double(), texts.exact(layer, request, end)[start:], atol=2e-6)


def test_bits_of_a_row_are_those_it_has_alone_and_after_growth(memory: KvMemory) -> None:
    texts = Texts()
    others = [segment(2, 0, 90), segment(3, 0, 1)]
    step(memory, texts, [*others, segment(1, 0, 61)])
    together = step(
        memory, texts, [replace(others[0], start=90, rows=30, capacity=128), segment(1, 61, 7, own=True)]
    )
    memory.release(1)
    step(memory, texts, [segment(1, 0, 61)])
    alone = [
        step(memory, texts, [segment(1, start, 1, own=True, room=start % 3 * 32)]) for start in range(61, 68)
    ]
    for layer in range(2):
        assert torch.equal(together[layer][1], torch.cat([made[layer][0] for made in alone]))


def test_with_the_c_core_bits_do_not_depend_on_how_a_prompt_is_cut(core: KvMemory) -> None:
    texts = Texts()
    (whole,), _ = step(core, texts, [segment(1, 0, 150)])
    core.release(1)
    cuts = [
        step(core, texts, [segment(1, start, rows)])[0][0] for start, rows in ((0, 32), (32, 1), (33, 117))
    ]
    assert torch.equal(torch.cat(cuts), whole)


def test_memory_is_that_of_the_blocks(memory: KvMemory) -> None:
    texts = Texts()
    position = 2 * KEY_HEADS * (DIM + VALUE_DIM) * 4  # two layers
    step(memory, texts, [segment(1, 0, 40)])
    assert memory.nbytes == 64 * position
    step(memory, texts, [segment(1, 40, 24, own=True), segment(2, 0, 3)])
    assert memory.nbytes == (64 + 32) * position
    step(memory, texts, [segment(1, 64, 1, own=True)])
    assert memory.nbytes == (96 + 32) * position
    memory.release(1)
    assert memory.nbytes == 32 * position
    memory.release(2)
    memory.release(2)
    assert memory.nbytes == 0


@pytest.mark.parametrize("texts", [Texts(dtype=torch.float64), Texts(dim=12)], ids=["float64", "dim 12"])
def test_what_the_c_core_does_not_cover_is_computed_by_torch(core: KvMemory, texts: Texts) -> None:
    for operator in (None, torch.ops.kvasir.attention):
        step(core, texts, [segment(1, 0, 9)], operator=operator)
        made = step(core, texts, [segment(1, 9, 3, own=True)], operator=operator)
        assert torch.allclose(made[0][0].double(), texts.exact(0, 1, 12)[9:], atol=2e-6)
        core.release(1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers whose attention was computed in Python."""
    seen: list[int] = []

    def watched(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        seen.append(layer)
        return attend(layer, query, key, value, scaling)

    monkeypatch.setattr(packed, "attend", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_graph_computes_it_without_python(
    core: KvMemory, dtype: torch.dtype, calls: list[int]
) -> None:
    texts = Texts(dtype=dtype)
    steps = ([segment(1, 0, 40), segment(2, 0, 1)], [segment(2, 1, 3, own=True), segment(1, 40, 50)])
    wanted = [step(core, texts, segments) for segments in steps]
    for request in (1, 2):
        core.release(request)
    first = step(core, texts, steps[0], operator=torch.ops.kvasir.attention)
    assert calls == [0, 1]  # these made the memory
    second = step(core, texts, steps[1], operator=torch.ops.kvasir.attention)
    assert calls == [0, 1]
    for expected, made in zip(wanted, (first, second), strict=True):
        for layer in range(2):
            assert all(map(torch.equal, expected[layer], made[layer]))


def test_without_a_batch_only_the_shape_counts(core: KvMemory) -> None:
    parts = Texts().rows(0, [segment(1, 0, 3)], 1)
    made = torch.ops.kvasir.attention(*parts, 0, SCALING)
    assert torch.equal(made, torch.zeros(1, 4, HEADS, VALUE_DIM))


def test_what_it_raises_comes_through_the_graph(
    bundled_model: BackboneModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Tensor:
        raise ZeroDivisionError("a bug")

    assert bundled_model._graph is not None
    work = Work(segment(1, 0, 3), [5, 6, 7])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(packed, "attend", broken)
            with pytest.raises(ZeroDivisionError, match="a bug"):
                bundled_model.forward([work])
        bundled_model.release(1)
        assert set(bundled_model.forward([work]).logits) == {1}
    finally:
        bundled_model.forget(1)

"""Attention by the C core: right, and a row's bits its own, whatever computes beside it, on any machine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir_node.kernels import attention as module
from kvasir_node.kernels import load
from kvasir_node.kernels.attention import Attention, load_attention
from kvasir_node.kernels.build import find_compiler
from kvasir_node.residual import residual

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")

Dims = tuple[int, int, int, int]
"""Heads, key heads, dim, value dim."""
FORMS: tuple[Dims, ...] = ((4, 2, 64, 64), (16, 2, 128, 128), (7, 1, 24, 96), (3, 3, 8, 16))
PLACES = ((0, 1), (0, 3), (5, 1), (62, 5), (63, 1), (64, 1), (300, 2), (40, 90))
"""Position of the first row, and rows."""


@pytest.fixture(scope="module")
def attentions() -> list[Attention]:
    """One on every instruction set of this machine."""
    kernel = load()
    assert kernel is not None
    return [Attention(kernel.library, isa) for isa in kernel.library.isas(slow=True)]


class Case:
    """Rows of one request from position `start` on, and what its memory holds before them."""

    def __init__(self, form: Dims, start: int, rows: int, *, dtype: torch.dtype = torch.float32) -> None:
        heads, key_heads, dim, value_dim = form
        self.start, self.rows, self.scaling = start, rows, dim**-0.5
        random = torch.Generator().manual_seed(start + 1000 * rows + dim)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(dtype)

        # As transformers gives them: rows in memory one behind the other, with all their heads.
        self.query = noise(1, rows, heads, dim).transpose(1, 2)
        self.key = noise(1, rows, key_heads, dim).transpose(1, 2)
        self.value = noise(1, rows, key_heads, value_dim).transpose(1, 2)
        self.keys, self.values = noise(key_heads, start, dim), noise(key_heads, start, value_dim)

    def run(self, attention: Attention, *, room: int = 0, first: int = 0, rows: int | None = None) -> Tensor:
        """[rows, heads, value dim] of `rows` rows from the `first`; memory has more room, full of NaN."""
        rows = self.rows - first if rows is None else rows
        before, capacity = self.start + first, self.start + first + rows + room
        keys = torch.full(
            (self.keys.shape[0], capacity, self.keys.shape[2]), float("nan"), dtype=self.keys.dtype
        )
        values = torch.full((*keys.shape[:2], self.values.shape[2]), float("nan"), dtype=keys.dtype)
        for kept, old, new in ((keys, self.keys, self.key), (values, self.values, self.value)):
            kept[:, :before] = torch.cat([old, new[0, :, :first]], dim=1)
        parts = [part[:, :, first : first + rows] for part in (self.query, self.key, self.value)]
        made = call(attention, parts, self.scaling, [(keys, values, before, rows)])
        for kept, new in ((keys, parts[1][0]), (values, parts[2][0])):
            assert torch.equal(kept[:, before : before + rows].nan_to_num(), new.nan_to_num())
        return made[0]

    def exact(self) -> Tensor:
        """[rows, heads, value dim] in float64."""
        keys = torch.cat([self.keys, self.key[0]], 1).double()
        values = torch.cat([self.values, self.value[0]], 1).double()
        group = self.query.shape[1] // keys.shape[0]
        scores = torch.einsum("hrd,hpd->hrp", self.query[0].double(), keys.repeat_interleave(group, 0))
        places = torch.arange(keys.shape[1])
        later = places[None] > self.start + torch.arange(self.rows)[:, None]
        weights = (scores * self.scaling).masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hrp,hpd->rhd", weights, values.repeat_interleave(group, 0))


def call(
    attention: Attention,
    parts: list[Tensor],
    scaling: float,
    memories: list[tuple[Tensor, Tensor, int, int]],
    padding: int = 0,
) -> Tensor:
    """Attention of spans behind one another: memories are (keys, values, position, rows) each."""
    rows = sum(memory[3] for memory in memories)
    query, key, value = parts
    form = attention.form_of(query, key, value, scaling, rows)
    assert form is not None
    assert form.shape == (1, rows + padding, query.shape[1], value.shape[3])
    planes = [array("Q", (0, 0, keys.data_ptr(), values.data_ptr())) for keys, values, _, _ in memories]
    spans, place = array("q"), 0
    for plane, (keys, _, start, count) in zip(planes, memories, strict=True):
        spans.extend((plane.buffer_info()[0], place, start, keys.shape[1], count))
        place += count
    out = torch.full(form.shape, 7.0, dtype=query.dtype)
    attention.run(form, spans, 1, query, key, value, out)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_it_agrees_with_exact_attention(attentions: list[Attention], form: Dims) -> None:
    for start, rows in (*PLACES, (4000, 1)):
        case = Case(form, start, rows)
        made, exact = case.run(attentions[0]), case.exact()
        assert float(residual(made.flatten(1), exact.float().flatten(1)).max()) <= 1e-12, (start, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_neither_rows_beside_nor_room_nor_instruction_set(
    attentions: list[Attention], form: Dims, dtype: torch.dtype
) -> None:
    for start, rows in PLACES:
        case = Case(form, start, rows, dtype=dtype)
        whole = case.run(attentions[0])
        for attention in attentions:
            assert torch.equal(case.run(attention, room=37), whole), attention.isa
            for first in sorted({0, rows // 2, rows - 1}):
                alone = case.run(attention, room=5, first=first, rows=1)
                assert torch.equal(alone[0], whole[first]), (attention.isa, start, first)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 140),
    st.integers(1, 70),
)
def test_any_shape_gives_the_same_bits_everywhere(
    attentions: list[Attention], group: int, key_heads: int, dim: int, value_dim: int, start: int, rows: int
) -> None:
    case = Case((group * key_heads, key_heads, 8 * dim, 8 * value_dim), start, rows)
    results = [case.run(attention) for attention in attentions]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(case.run(attentions[0], first=rows // 2), results[0][rows // 2 :])


def test_spans_of_several_requests_in_one_call(attentions: list[Attention]) -> None:
    cases = [Case(FORMS[0], start, rows) for start, rows in ((70, 1), (0, 4), (130, 3))]
    parts = [
        torch.cat([*(getattr(case, name) for case in cases), torch.ones(1, count, 2, 64)], dim=2)
        for name, count in (("query", 4), ("key", 2), ("value", 2))
    ]
    for attention in attentions:
        memories = []
        for case in cases:
            keys, values = torch.full((2, 2, case.start + 9, 64), float("nan"))
            keys[:, : case.start], values[:, : case.start] = case.keys, case.values
            memories.append((keys, values, case.start, case.rows))
        made = call(attention, parts, cases[0].scaling, memories, padding=2)
        assert torch.equal(made[0, :-2], torch.cat([case.run(attention) for case in cases]))
        assert not made[0, -2:].any()


def test_bf16_is_computed_in_fp32_and_rounded_once(attentions: list[Attention]) -> None:
    half, wide = (Case(FORMS[1], 100, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for name in ("query", "key", "value", "keys", "values"):
        setattr(wide, name, getattr(half, name).float())
    for attention in attentions:
        assert torch.equal(half.run(attention), wide.run(attention).to(torch.bfloat16))


def test_scores_far_apart_and_all_alike(attentions: list[Attention]) -> None:
    for attention in attentions:
        case = Case(FORMS[0], 200, 1)
        case.query = case.query * 1e6
        made, exact = case.run(attention), case.exact()
        assert torch.allclose(made.double(), exact, atol=1e-3)  # the largest score alone counts
        case.query = torch.zeros_like(case.query)
        made, exact = case.run(attention), case.exact()
        assert float(residual(made.flatten(1), exact.float().flatten(1)).max()) <= 1e-12
        case.query = case.query - 1e30
        assert torch.isfinite(case.run(attention)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(attentions: list[Attention], bad: float) -> None:
    for attention in attentions:
        case = Case(FORMS[0], 62, 5)
        whole = case.run(attention)
        for name in ("query", "key", "value"):
            getattr(case, name)[0, 0, 3] = bad
        made = case.run(attention)
        assert torch.equal(made[:3], whole[:3]), "earlier rows do not see it"
        assert torch.equal(made[3:, 2:], whole[3:, 2:]), "nor do heads of the other key head"
        assert torch.isnan(made[3:, :2]).all()


def test_forms_that_it_does_not_cover_are_left_to_torch(attentions: list[Attention]) -> None:
    attention = attentions[0]
    row = torch.zeros(1, 4, 1, 16)
    assert attention.form_of(row, row[:, :2], row[:, :2], 1.0, 1) is not None
    for other in (
        row.half(),
        row.double(),
        torch.zeros(1, 4, 1, 12),
        torch.zeros(1, 4, 16, 1).transpose(2, 3)[..., ::2],
    ):
        assert attention.form_of(other, other, other, 1.0, 1) is None
    assert attention.form_of(row, row[:, :3], row[:, :3], 1.0, 1) is None, "heads in no whole groups"
    assert attention.form_of(row, row, row.bfloat16(), 1.0, 1) is None
    assert attention.form_of(row, row, torch.zeros(1, 4, 1, 20), 1.0, 1) is None


@pytest.fixture
def logs() -> Iterator[list[dict[str, object]]]:
    with structlog.testing.capture_logs() as entries:
        yield entries  # type: ignore[misc]


def test_one_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, object]]
) -> None:
    assert load_attention() is not None
    monkeypatch.setattr(module, "SELF_CHECK", "0" * 64)
    load_attention.cache_clear()
    try:
        assert load_attention() is None
    finally:
        load_attention.cache_clear()
    (entry,) = [entry for entry in logs if entry["event"] == "kernel.absent"]
    assert "attention" in str(entry["reason"])


def test_without_the_c_core_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", lambda: None)
    load_attention.cache_clear()
    try:
        assert load_attention() is None
    finally:
        load_attention.cache_clear()

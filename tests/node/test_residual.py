"""The figure that audits judge: what it is for known pairs, and for rows that are nearly nothing."""

from __future__ import annotations

import pytest
import torch

from kvasir_node.residual import FLOOR_RMS, residual


def test_it_is_the_design_s_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 300, generator=generator)
    y = x + 0.01 * torch.randn(5, 300, generator=generator)
    a, b = x.double(), y.double()
    expected = 1 - 2 * (a * b).sum(-1) / (a.square().sum(-1) + b.square().sum(-1))
    torch.testing.assert_close(residual(x, y), expected, atol=1e-12, rtol=1e-6)


def test_equal_orthogonal_opposite_and_scaled_rows() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert residual(x, x).item() == 0.0
    assert residual(x, torch.tensor([[-4.0, 3.0]])).item() == pytest.approx(1.0)
    assert residual(x, -x).item() == pytest.approx(2.0)
    assert residual(x, torch.zeros(1, 2)).item() == pytest.approx(1.0)
    assert residual(x, 2 * x).item() == pytest.approx(0.2)


def test_rows_that_are_nearly_nothing_do_not_count_as_different() -> None:
    x = torch.full((1, 64), FLOOR_RMS / 100)
    assert residual(x, -x).item() < 1e-3
    assert residual(torch.zeros(1, 64), torch.zeros(1, 64)).item() == 0.0
    assert residual(torch.zeros(1, 64), torch.full((1, 64), 100 * FLOOR_RMS)).item() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    x = torch.ones(2, 8)
    y = x.clone()
    y[1, 3] = bad
    assert residual(x, y).tolist() == [0.0, float("inf")]
    assert residual(y, x).tolist() == [0.0, float("inf")]
    assert residual(y, y).tolist() == [0.0, float("inf")]


def test_wire_dtypes_and_leading_dimensions() -> None:
    x = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    assert residual(x, x.float()).shape == (2, 3)
    assert residual(x, x.float()).dtype == torch.float64
    assert not residual(x, x.float()).any()

"""What counts as equal to stock: equality, and near-ties that are shown. Nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvasir_backbone import equality
from kvasir_backbone.equality import Comparison, compare_greedy, routing_gap, stock_greedy


class Scripted:
    """A stock model with these logits after any text, and these gaps at its routers."""

    def __init__(self, logits: list[float]) -> None:
        self._logits = torch.tensor(logits)

    def __call__(self, input_ids: Tensor) -> Any:
        self.seen = input_ids.tolist()[0]
        return SimpleNamespace(logits=self._logits.expand(1, input_ids.shape[1], -1))

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        return []


def test_equal_texts_need_no_model() -> None:
    assert compare_greedy(None, [1], [2, 3], [2, 3]) == Comparison(True)


def test_a_shorter_text_is_not_equal() -> None:
    comparison = compare_greedy(None, [1], [2, 3], [2, 3, 4])
    assert (comparison.matches, comparison.place) == (False, 2)


@pytest.mark.parametrize(("gap", "matches"), [(5e-5, True), (2e-4, False), (0.5, False)])
def test_a_first_difference_counts_by_its_logit_gap(gap: float, matches: bool) -> None:
    model = Scripted([0.0, 1.0, 1.0 - gap])
    comparison = compare_greedy(model, [9, 8], [0, 2, 7], [0, 1, 5])
    assert comparison.matches == matches
    assert comparison.place == 1
    assert comparison.logit_gap == pytest.approx(gap, rel=1e-2)
    assert model.seen == [9, 8, 0], "judged at stock's own text up to the difference"
    assert ("near-tie" in comparison.reason) == matches


def test_a_close_routing_decision_before_the_difference_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = equality._inspect
    for gap, matches in ((5e-6, True), (2e-5, False)):
        monkeypatch.setattr(equality, "_inspect", lambda m, t, gap=gap: (real(m, t)[0], gap))
        assert compare_greedy(Scripted([0.0, 1.0]), [9], [0], [1]).matches == matches


def test_the_routing_gap_is_between_the_last_chosen_and_the_first_left_out() -> None:
    logits = torch.tensor([[5.0, 1.0, 3.0, 2.5], [0.0, 4.0, 3.0, -1.0]])
    assert routing_gap(logits, torch.tensor([[0, 2], [1, 2]])) == pytest.approx(0.5)


def test_the_routing_gap_sees_the_routers_correction() -> None:
    logits, bias = torch.zeros(1, 3), torch.tensor([0.3, 0.1, 0.2])
    assert routing_gap(logits, torch.tensor([[0]]), bias) == pytest.approx(0.1)


def test_experts_outside_the_chosen_groups_do_not_count() -> None:
    logits = torch.tensor([[5.0, 4.0, 4.5, 1.0]])
    assert routing_gap(logits, torch.tensor([[0, 1]])) == pytest.approx(3.0)


def test_stocks_routers_are_watched(bundled_stock: Any) -> None:
    prompt = list(range(20, 40))
    stock = stock_greedy(bundled_stock, prompt, 6, ignore_eos=True)
    ours = [*stock[:3], (stock[3] + 1) % 2048, *stock[4:]]
    comparison = compare_greedy(bundled_stock, prompt, ours, stock)
    assert comparison.place == 3
    assert comparison.routing_gap is not None
    assert 0 < comparison.routing_gap < 1
    assert not comparison.matches

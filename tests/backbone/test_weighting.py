"""Weighted dispatch: sums equal those made from single outputs, whoever fails; bytes, credit and audits."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvasir_backbone.audit import GROSS, LIMIT, NormBand, judge_sample
from kvasir_backbone.dispatch import CallEnd
from kvasir_backbone.flight import rows_of_a_call
from kvasir_backbone.routing import StepRouting
from kvasir_backbone.seam import DispatchFailed, RowKey, combine_of
from kvasir_backbone.weighting import WeightedDispatcher, cuts_a_layer
from kvasir_node.calls import Call, call_bytes, reply_bytes
from kvasir_node.residual import residual
from kvasir_node.tensors import partial_sums
from tests.backbone.test_dispatch import IDS, PLAN, ROWS, Local, Setup, expected, expert
from tests.support.rosters import device, flat_plan

WEIGHTS = torch.rand(5, 2, generator=torch.Generator().manual_seed(8)) + 0.1
KEYS = [RowKey(1, 0, position, True) for position in range(5)]
BOTH = {0: ["a", "b"], 1: ["a", "b"]}


def setup(held: dict[int, list[str]], **settings: object) -> Setup:
    return Setup(held, made=WeightedDispatcher, **settings)  # type: ignore[arg-type]


def combine(
    made: Setup, rows: Tensor = ROWS, ids: list[list[int]] = IDS, weights: Tensor = WEIGHTS
) -> Tensor:
    dispatcher = made.dispatcher
    assert isinstance(dispatcher, WeightedDispatcher)
    try:
        return dispatcher.combine(0, rows, torch.tensor(ids), weights, KEYS[: len(rows)], 5.0)
    finally:
        made.workers.join()


def by_call(rows: Tensor, ids: list[list[int]], weights: Tensor) -> Tensor:
    """What one worker with every window answers: fp32, in the order of windows and ids."""
    out = []
    for row, chosen, given in zip(rows, ids, weights, strict=True):
        order = sorted(range(len(chosen)), key=lambda place: chosen[place] // 4)  # stable, by window
        outputs = torch.stack([expert(0, chosen[place], row.unsqueeze(0))[0] for place in order])
        out.append(partial_sums(outputs, given[order], [0] * len(chosen), 1)[0])
    return torch.stack(out)


def test_one_worker_sums_all_of_a_rows_experts_and_nothing_else_is_sent() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    assert torch.equal(combine(made), by_call(ROWS, IDS, WEIGHTS))
    ((_, call, size),) = made.workers.calls
    assert (call.row_count, call.id_count, call.output_count) == (5, 10, 5)
    assert size == call_bytes(5, [5, 5], PLAN.row_bytes, weighted=True)


def test_the_sums_of_two_owners_are_those_of_single_outputs_within_rounding() -> None:
    made = setup({0: ["a"], 1: ["b"]})
    single = (expected(ROWS, IDS) * WEIGHTS.unsqueeze(-1)).sum(1)
    assert float(residual(combine(made), single).max()) < 1e-12
    assert len(made.workers.calls) == 2


@pytest.mark.parametrize("code", ["unreachable", "overloaded", "stale_epoch"])
def test_a_failed_call_is_made_again_and_counted_once(code: str) -> None:
    made = setup(BOTH)
    fail = CallEnd(0, 0.0, code=code, message="no")
    made.workers.behaviours[device("a")] = lambda call, outputs: fail
    assert torch.equal(combine(made), by_call(ROWS, IDS, WEIGHTS))
    assert made.book.totals(device("a")) == (0, 0)
    assert made.local.asked == []


def test_what_the_checkpoint_gives_is_what_a_worker_of_that_window_would_have_sent() -> None:
    owned, alone = setup({0: ["a"], 1: ["b"]}), setup({0: ["a"]})
    assert torch.equal(combine(owned), combine(alone))
    assert {number for _, number, _ in alone.local.asked} == {4, 5, 6, 7}


def test_rows_without_owner_and_bytes_fail_alone_and_the_others_come_back() -> None:
    made = setup({0: ["a"]}, fallback=False)
    with pytest.raises(DispatchFailed) as failure:
        combine(made)
    assert failure.value.rows == {0, 2, 3, 4}
    assert failure.value.outputs is not None
    assert torch.equal(failure.value.outputs[1], by_call(ROWS, IDS, WEIGHTS)[1])


def test_a_hedge_that_covers_a_part_of_a_call_makes_the_rest_be_asked_for_again_and_nothing_twice() -> None:
    made = setup({0: ["a", "b"], 1: ["a", "c"]})
    made.dispatcher._hedges.calls = 1000  # budget for hedges
    for name in ("b", "c"):
        for _ in range(20):
            made.owners.owners[device(name)].pace.observe(8, 5.0)  # so that "a" is asked first, for all
    release = threading.Event()

    def slow(call: Call, outputs: Tensor) -> Tensor:
        release.wait(10)
        return outputs

    made.workers.behaviours[device("a")] = slow
    made.workers.behaviours[device("c")] = lambda call, outputs: CallEnd(
        0, 0.0, code="overloaded", message=""
    )
    dispatcher = made.dispatcher
    assert isinstance(dispatcher, WeightedDispatcher)
    rows, ids, weights = ROWS[:1], IDS[:1], WEIGHTS[:1]
    outputs = dispatcher.combine(0, rows, torch.tensor(ids), weights, KEYS[:1], 5.0)
    release.set()
    made.workers.join()
    assert float(residual(outputs, by_call(rows, ids, weights)).max()) < 1e-12
    assert [to for to, _, _ in made.workers.calls[:3]].count(device("a")) == 1
    assert made.book.totals(device("c")) == (0, 0)
    assert made.book.totals(device("b"))[1] == 1


def test_a_sum_counts_one_response_row_and_its_weights_count_nothing() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    combine(made)
    assert made.book.totals(device("a")) == ((5 + 5) * PLAN.row_bytes + 2 * 10, 1)
    split = setup({0: ["a"], 1: ["b"]})
    combine(split)
    for name in ("a", "b"):
        ((call,),) = [[call for to, call, _ in split.workers.calls if to == device(name)]]
        earned = 2 * call.row_count * PLAN.row_bytes + 2 * call.id_count
        assert split.book.totals(device(name)) == (earned, 1)


def test_top_8_at_one_worker_comes_back_in_an_eighth() -> None:
    row_bytes = 3072 * 2
    assert reply_bytes(1, row_bytes) - reply_bytes(0, row_bytes) == row_bytes
    assert (reply_bytes(8, row_bytes) - reply_bytes(0, row_bytes)) / row_bytes == 8
    assert reply_bytes(8, row_bytes) / reply_bytes(1, row_bytes) > 7.9
    assert call_bytes(1, [8], row_bytes, weighted=True) <= row_bytes + 8 * 2 + 8 * 4 + 64
    rows = rows_of_a_call(row_bytes, 8, 16, weighted=True)
    assert rows > 4 * rows_of_a_call(row_bytes, 8, 16)
    assert call_bytes(rows, [rows * 8], row_bytes, weighted=True) <= 64 << 20


def test_audits_make_the_sum_of_one_row_again_and_see_a_wrong_one() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    for _ in range(12):
        combine(made)
    assert len(made.auditor.samples) == 12
    for sample in made.auditor.samples:
        assert sample.weights is not None
        assert len(sample.ids) == len(sample.weights) == 2
        assert judge_sample(sample, "stored", Local().run, NormBand()) <= LIMIT
        wrong = replace(sample, output=sample.output.roll(1))
        assert judge_sample(wrong, "stored", Local().run, NormBand()) > GROSS
        assert judge_sample(replace(sample, output=sample.output * float("nan")), "stored", Local().run,
                            NormBand()) == float("inf")  # fmt: skip


def test_a_sum_that_cancels_is_judged_by_the_size_of_what_it_is_made_of() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    combine(made)
    (sample,) = made.auditor.samples
    assert sample.weights is not None
    single = expert(0, sample.ids[0], sample.row.unsqueeze(0))
    cancelling = replace(sample, ids=(sample.ids[0],) * 2, weights=torch.tensor([1.0, -1.0]))
    rounding = replace(cancelling, output=1e-4 * single[0])
    assert judge_sample(rounding, "stored", Local().run, NormBand()) <= LIMIT
    assert judge_sample(replace(cancelling, output=single[0]), "stored", Local().run, NormBand()) > GROSS


def test_sums_far_out_of_the_norm_band_are_made_again_before_they_are_used() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    made.band.learn(0, ROWS, expert(0, 0, ROWS))
    made.workers.behaviours[device("a")] = lambda call, outputs: torch.zeros_like(outputs)
    single = (expected(ROWS, IDS) * WEIGHTS.unsqueeze(-1)).sum(1)
    assert float(residual(combine(made), single).max()) < 1e-12
    assert len(made.auditor.rejections) == 1
    assert made.book.totals(device("a")) == (0, 0)


def test_single_outputs_where_sums_were_asked_for_are_refused() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    made.workers.behaviours[device("a")] = lambda call, outputs: torch.cat([outputs, outputs])
    combine(made)
    assert made.dispatcher.stats.outcomes["rejected"] == 1


def test_the_hook_gives_the_weights_where_the_dispatcher_combines_and_replays_them() -> None:
    made = setup({0: ["a"], 1: ["a"]})
    assert combine_of(made.dispatcher) is not None
    assert combine_of(Setup(BOTH).dispatcher) is None
    step = StepRouting(made.dispatcher, KEYS)
    out = step.run(0, ROWS, torch.tensor(IDS), WEIGHTS)
    assert torch.equal(out, by_call(ROWS, IDS, WEIGHTS))
    again = StepRouting(made.dispatcher, KEYS, replay=((0, step.recorded()),))
    assert torch.equal(again.run(0, ROWS, torch.tensor(IDS).flip(1), WEIGHTS.flip(1)), out)
    failing = setup({0: ["a"]}, fallback=False)
    requests = [RowKey(position, 0, 0, True) for position in range(5)]
    step = StepRouting(failing.dispatcher, requests)
    partly = step.run(0, ROWS, torch.tensor(IDS), WEIGHTS)
    assert set(step.failures) == {0, 2, 3, 4}
    assert torch.equal(partly[1], by_call(ROWS, IDS, WEIGHTS)[1])


def test_a_plan_says_whether_a_window_cuts_a_layer() -> None:
    assert cuts_a_layer(flat_plan())
    assert not cuts_a_layer(flat_plan(cut=8))

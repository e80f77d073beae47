"""What is kept of lost races, and when two replies cannot both be honest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvasir_backbone.audit import LIMIT, Sample
from kvasir_backbone.comparing import (
    MAX_OUTPUTS,
    SUM_SLACK,
    Kept,
    Rival,
    disagreements,
    pair_limit,
    rivals_of,
)
from kvasir_backbone.flight import Flight, Send
from kvasir_backbone.pace import HedgeBudget
from kvasir_backbone.roster import WindowMap
from tests.backbone.test_flight import owners_of
from tests.support.rosters import flat_plan, replica, roster

WINDOWS = WindowMap(flat_plan(width=16))
A, B = (replica(WINDOWS, 0, name) for name in ("a", "b"))


def rival(output: Tensor) -> Rival:
    return Rival(0, A, B, Sample(0, 1, torch.randn(16), output))


def test_two_honest_replicas_may_each_be_off_and_no_further_apart_than_both_together() -> None:
    assert pair_limit(A, B) == pytest.approx(4 * LIMIT)
    assert pair_limit(A, B, summed=True) == pytest.approx(SUM_SLACK * 4 * LIMIT)
    quantised = replace(B, precision="int8")
    assert pair_limit(A, quantised) > pair_limit(quantised, replace(A, precision="int8"))


def test_replies_further_apart_than_honest_ones_disagree() -> None:
    output = torch.randn(16, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(16, generator=torch.Generator().manual_seed(3))
    near, far = output + 1e-3 * noise, output + 0.1 * noise
    found = disagreements([rival(output)] * 3, torch.stack([output, near, far]))
    assert len(found) == 1
    assert torch.equal(found[0].output, far)
    assert found[0].d > pair_limit(A, B)
    assert disagreements([rival(output)], output.unsqueeze(0) * float("nan"))[0].d == float("inf")


def test_what_is_kept_is_bounded_in_number_and_time_and_taken_once() -> None:
    kept = Kept(most=2, seconds=10.0)
    one = (rival(torch.ones(16)),)
    kept.keep(1, (), 0.0)
    assert len(kept) == 0
    for number in (1, 2, 3):
        kept.keep(number, one, 0.0)
    assert kept.take(1, 1.0) == ()  # the oldest gave way
    assert kept.take(2, 1.0) == one
    assert kept.take(2, 1.0) == ()
    assert kept.take(3, 11.0) == ()  # too late
    kept.keep(4, one, 20.0)
    kept.keep(5, one, 40.0)
    assert len(kept) == 1


def test_of_a_large_call_some_outputs_are_compared_each_with_its_own() -> None:
    ids = [[row % 4, (row + 1) % 4] for row in range(40)]
    flight = Flight(
        roster(WINDOWS, {0: ["a", "b"]}),
        0,
        ids,
        owners=owners_of("a") | owners_of("b", latency_s=5.0),  # type: ignore[arg-type]
        hedges=HedgeBudget(share=1.0),
        next_call=iter(range(10)).__next__,
        rng=random.Random(1),
        fallback=True,
        deadline=30.0,
    )
    (first,) = flight.start(0.0)
    (hedge,) = flight.handle_timeout(1e-9 + flight.next_deadline(), roster(WINDOWS, {0: ["a", "b"]}))
    assert isinstance(first, Send)
    assert isinstance(hedge, Send)
    rows, out = torch.randn(40, 16), torch.randn(80, 16)
    assert rivals_of(first.call, flight, out, rows, random.Random(1)) == ()  # no winner yet
    flight.got_reply(hedge.call.id, 0.1)
    found = rivals_of(first.call, flight, out, rows, random.Random(1))
    assert len(found) == MAX_OUTPUTS
    for each in found:
        row, place = divmod(each.place, 2)  # a part's outputs are row after row
        assert torch.equal(each.sample.row, rows[row])
        assert each.sample.expert == ids[row][place]
        assert torch.equal(each.sample.output, out[each.place])
        assert (each.loser.device, each.winner.device) == (first.call.device, hedge.call.device)

"""Drafts: what is guessed, and when guessing pays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.drafting import (
    GRAMS,
    MAX_DRAFT,
    MAX_INDEXED,
    MAX_PROBE_EVERY,
    PROBE_EVERY,
    Acceptance,
    Drafting,
    Lookup,
    Speculation,
    StepCost,
)


def _naive(tokens: list[int], most: int) -> list[int]:
    """The same by looking through the whole text."""
    for size in GRAMS:
        end = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(end) == size and tokens[start : start + size] == end:
                text = list(tokens)
                for place in range(start + size, start + size + most):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 16))
def test_the_index_finds_what_a_search_finds(first: list[int], then: list[int], most: int) -> None:
    lookup = Lookup(first)
    lookup.extend(then)
    draft, match = lookup.propose(most)
    assert list(draft) == _naive(first + then, most)
    assert (match >= 0) == bool(draft)


def test_a_text_that_repeats_itself_is_drafted_on_and_on() -> None:
    draft, match = Lookup([5, 6, 7] * 4).propose()
    assert draft == (5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5)
    assert match == 0, "the longest end is looked up first"
    assert Lookup([1, 2, 3, 4, 5]).propose() == ((), -1)


def test_a_long_prompt_is_not_indexed_whole() -> None:
    lookup = Lookup(list(range(MAX_INDEXED + 500)))
    assert len(lookup._tokens) == MAX_INDEXED


def test_acceptance_follows_what_happens() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == 0.5
    for _ in range(20):
        acceptance.observe(8, 8)
    assert acceptance.rate > 0.95
    for _ in range(60):
        acceptance.observe(4, 0)
    assert acceptance.rate < 0.15


def test_experts_touched_saturate() -> None:
    cost = StepCost(256, 8)
    assert cost.touched(1) == pytest.approx(8)
    assert 37 < cost.touched(5) < 40
    assert cost.touched(1000) == pytest.approx(256)


@pytest.mark.parametrize(("base", "slope"), [(1.5, 0.0001), (0.004, 0.001), (0.02, 0.0)])
def test_the_cost_of_a_step_is_learnt(base: float, slope: float) -> None:
    cost = StepCost(256, 8)
    assert cost.seconds(3) == 0.0
    for turn in range(200):
        rows = 1 + turn % 9
        cost.observe(rows, base + slope * cost.touched(rows))
    for rows in (1, 4, 9):
        assert cost.seconds(rows) == pytest.approx(base + slope * cost.touched(rows), rel=0.15)


def _learnt(base: float, slope: float) -> Drafting:
    drafting = Drafting(StepCost(256, 8))
    for turn in range(200):
        rows = 1 + turn % 9
        drafting.cost.observe(rows, base + slope * drafting.cost.touched(rows))
    return drafting


def _speculation(drafts: int, accepted: int) -> Speculation:
    speculation = Speculation([5, 6, 7] * 4)
    for _ in range(drafts):
        speculation.extend([5, 6, 7])
        speculation.learn(8, accepted)
    speculation.extend([5, 6, 7])
    return speculation


def test_far_experts_and_good_drafts_make_long_drafts() -> None:
    chosen = _learnt(1.44, 0.0005).choose({1: (_speculation(20, 8), MAX_DRAFT)}, 1, 1)
    assert chosen[1] >= 8


def test_experts_that_cost_more_than_the_step_switch_drafting_off() -> None:
    drafting = _learnt(0.0005, 0.002)
    assert drafting.choose({1: (_speculation(20, 0), MAX_DRAFT)}, 1, 1) == {}
    assert drafting.choose({1: (_speculation(0, 0), MAX_DRAFT)}, 1, 1) == {}


def test_the_likeliest_drafts_come_first() -> None:
    good, bad = _speculation(20, 8), _speculation(20, 1)
    chosen = _learnt(0.1, 0.001).choose({1: (bad, 16), 2: (good, 16)}, 2, 2)
    assert chosen[2] > chosen.get(1, 0)


def test_a_draft_is_never_longer_than_there_is_room_for() -> None:
    offers = {1: (_speculation(20, 8), 3), 2: (_speculation(20, 8), 0)}
    assert _learnt(1.44, 0.0).choose(offers, 2, 2) == {1: 3}


def test_what_did_not_pay_is_tried_again_ever_more_rarely() -> None:
    drafting, speculation = _learnt(0.0005, 0.002), _speculation(0, 0)
    tries: list[int] = []
    for turn in range(4 * MAX_PROBE_EVERY):
        chosen = drafting.choose({1: (speculation, 8)}, 1, 1)
        if chosen:
            tries.append(turn)
            drafting.learn(speculation, chosen[1], 0)
    assert tries[0] == PROBE_EVERY - 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[:3] == [2 * PROBE_EVERY, 4 * PROBE_EVERY, 8 * PROBE_EVERY]
    assert max(gaps) == MAX_PROBE_EVERY
    assert (drafting.drafted, drafting.accepted) == (2 * len(tries), 0)
    drafting.learn(speculation, 2, 1)
    assert speculation.patience == PROBE_EVERY


def test_before_anything_is_known_likely_drafts_are_tried() -> None:
    drafting = Drafting(StepCost(64, 8))
    for _ in range(5):
        drafting.cost.observe(1, 1.5)
    assert 1 <= drafting.choose({1: (_speculation(0, 0), 16)}, 1, 1)[1] <= 4

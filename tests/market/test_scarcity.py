"""Targets, scarcity, and what a device is offered, as pure decisions."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market.messages import Abilities
from market.plans import PlanId
from market.scarcity import (
    ScarcityRules,
    WindowNeed,
    averaged,
    coverage,
    decayed,
    loss_chance,
    next_target,
    replicas_against_loss,
)
from market.volunteering import MAX_OFFERS, DeviceFacts, answer
from market.windows import Window

RULES = ScarcityRules()
PLAN = PlanId(bytes(32))


def need(number: int = 0, **changes: Any) -> WindowNeed:
    made = WindowNeed(
        plan=PLAN,
        window=Window(number, number + 1, 0, 8),
        target=2,
        proven=0,
        loading=0,
        demand=0.0,
        download_bytes=1000,
        kept_bytes={"stored": 1000, "int8": 300},
        wire_dtype="float32",
        formulas=frozenset({"swiglu"}),
    )
    return replace(made, **changes)


def test_an_average_follows_and_fades() -> None:
    assert averaged(0, 10, 1e6, 60) == 10
    assert averaged(10, 10, 5, 60) == pytest.approx(10)
    assert 6.3 < averaged(0, 10, 60, 60) < 6.4
    assert decayed(10, 60, 60) == pytest.approx(10 / 2.718281828, rel=1e-6)


@given(st.floats(1e-6, 0.999), st.integers(1, 100_000))
def test_the_fewest_replicas_that_meet_the_goal(chance: float, windows: int) -> None:
    r = replicas_against_loss(chance, windows, 1e-6)
    assert chance**r * windows < 1e-6 * (1 + 1e-9)
    assert r == 1 or chance ** (r - 1) * windows >= 1e-6 * (1 - 1e-9)


def test_nothing_lost_needs_no_spare() -> None:
    assert replicas_against_loss(0.0, 100, 1e-6) == 1
    assert next_target(2, demand=0, chance=1.0, windows=8, rules=RULES) == RULES.max_target


def test_a_young_swarm_does_not_panic_at_its_first_loss() -> None:
    chance = loss_chance(1, 600, RULES.recovery_s)
    assert next_target(2, demand=0, chance=chance, windows=8, rules=RULES) <= 3


def test_the_target_starts_at_two_and_rises_with_demand_at_once() -> None:
    assert next_target(2, demand=0, chance=0, windows=8, rules=RULES) == 2
    assert next_target(2, demand=1001, chance=0, windows=8, rules=RULES) == 3
    assert next_target(2, demand=1e9, chance=0, windows=8, rules=RULES) == RULES.max_target


def test_the_target_falls_only_when_demand_is_clearly_lower() -> None:
    assert next_target(3, demand=999, chance=0, windows=8, rules=RULES) == 3
    assert next_target(3, demand=801, chance=0, windows=8, rules=RULES) == 3
    assert next_target(3, demand=799, chance=0, windows=8, rules=RULES) == 2


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=50))
def test_the_target_stays_within_its_bounds(demands: list[float]) -> None:
    target = RULES.base_target
    for demand in demands:
        target = next_target(target, demand=demand, chance=0, windows=8, rules=RULES)
        assert RULES.base_target <= target <= RULES.max_target


def test_scarcity_and_its_reason() -> None:
    assert need().scarcity == 1.0
    assert need(proven=1).scarcity == 0.5
    assert need(proven=3).scarcity == 0.0
    assert need(proven=1, demand=3.14).reason == "1 of 2 replicas, demand 3.1 rows/s"
    assert need(loading=1).reason == "1 of 2 replicas, 1 of them loading, demand 0.0 rows/s"
    assert coverage([need(proven=1), need(1)]) == 0.5
    assert coverage([]) == 0.0


# --- volunteering ---------------------------------------------------------------------------------------

ABLE = Abilities(10_000, ("stored", "int8"), ("float32",), {}, "home", ("swiglu",))
NEW = DeviceFacts(0, frozenset(), None)


def ask(needs: list[WindowNeed], abilities: Abilities = ABLE, facts: DeviceFacts = NEW, seed: int = 0) -> Any:
    return answer(abilities, facts, needs, draw=random.Random(seed).random)


def test_the_scarcest_come_first_with_their_reason() -> None:
    given_needs = [need(0, proven=1), need(1), need(2, proven=2)]
    offers = ask(given_needs).offers
    assert [offer.window.layer_start for offer in offers] == [1, 0]
    assert offers[0].reason == "0 of 2 replicas, demand 0.0 rows/s"


def test_ties_are_broken_at_random() -> None:
    given_needs = [need(number) for number in range(6)]
    firsts = {ask(given_needs, seed=seed).offers[0].window for seed in range(60)}
    assert len(firsts) == 6


def test_cached_windows_and_other_networks_come_first_among_equals() -> None:
    given_needs = [need(number, networks=frozenset({"home"})) for number in range(3)]
    cached = replace(ABLE, cached=((PLAN, Window(2, 3, 0, 8)),))
    away = [*given_needs[:2], need(2)]
    for seed in range(10):
        assert ask(given_needs, cached, seed=seed).offers[0].window.layer_start == 2
        assert ask(away, seed=seed).offers[0].window.layer_start == 2


def test_the_precision_is_the_first_of_the_devices_that_fits() -> None:
    assert ask([need()]).offers[0].precision == "stored"
    small = ask([need()], replace(ABLE, budget_bytes=500)).offers[0]
    assert (small.precision, small.kept_bytes) == ("int8", 300)


def test_offers_are_bounded() -> None:
    assert len(ask([need(number) for number in range(50)]).offers) == MAX_OFFERS


NOTHING = {
    "no plan": ([], ABLE, NEW, "no backbone has published a plan yet", 2),
    "covered": ([need(proven=2)], ABLE, NEW, "all 1 windows have their replicas", 20),
    "covered, loading": ([need(proven=1, loading=1)], ABLE, NEW, "1 are still loading", 2),
    "wallet loads": (
        [need()],
        ABLE,
        DeviceFacts(0, frozenset(), Window(3, 4, 0, 8)),
        "is loading L03-03/E000-007",
        1,
    ),
    "wallet has it": (
        [need(proven=1)],
        ABLE,
        DeviceFacts(0, frozenset({(PLAN, Window(0, 1, 0, 8))}), None),
        "has a replica of each of the 1 scarce windows",
        20,
    ),
    "too small": (
        [need(proven=1)],
        replace(ABLE, budget_bytes=250),
        NEW,
        "the smallest, L00-00/E000-007, keeps 300 bytes at int8",
        20,
    ),
    "nothing left": ([need()], ABLE, DeviceFacts(9_800, frozenset(), None), "200 are free", 2),
    "wire dtype": ([need()], replace(ABLE, wire_dtypes=("bfloat16",)), NEW, "sends float32 rows", 60),
    "precision": (
        [need()],
        replace(ABLE, precisions=("int4",)),
        NEW,
        "allows the precisions int8, stored",
        60,
    ),
    "formula": ([need()], replace(ABLE, formulas=("relu2",)), NEW, "gate formula swiglu", 60),
    "quarantine": ([need()], ABLE, DeviceFacts(0, frozenset(), None, 90.0), "in quarantine for 90 s", 60),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_said_with_its_reason(name: str) -> None:
    needs, abilities, facts, words, patience = NOTHING[name]
    said = ask(needs, abilities, facts)
    assert said.offers == ()
    assert words in said.message
    assert said.retry_after_s <= patience


def test_a_device_that_says_no_formulas_is_not_judged_by_them() -> None:
    assert ask([need()], replace(ABLE, formulas=())).offers


def test_how_much_budget_is_missing() -> None:
    said = ask([need()], replace(ABLE, budget_bytes=250))
    assert "raise --budget by 50 bytes" in said.message


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 20_000)), max_size=20))
def test_every_offer_is_needed_and_fits(windows: list[tuple[int, int, int]]) -> None:
    numbers = itertools.count()
    needs = [need(next(numbers), proven=p, loading=n, kept_bytes={"stored": kept}) for p, n, kept in windows]
    by_window = {item.window: item for item in needs}
    offers = ask(needs).offers
    for offer in offers:
        assert by_window[offer.window].scarcity > 0
        assert offer.kept_bytes <= ABLE.budget_bytes
    found = [by_window[offer.window].scarcity for offer in offers]
    assert found == sorted(found, reverse=True)

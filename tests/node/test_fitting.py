"""Whether windows fit, and which precision `--precision auto` takes: pure, and by the market's own offers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.cache import CacheFull, WeightCache
from kvasir_node.fitting import (
    AUTO_PRECISIONS,
    PrecisionChooser,
    WontFit,
    check_fit,
    choose_precision,
    describe_capacity,
    working_bytes,
)
from market.messages import Abilities, Offer
from market.plans import Plan
from market.scarcity import WindowNeed
from market.volunteering import DeviceFacts, answer
from market.windows import Window
from tests.support.experts import PLAN_ID, tiny_plan

WINDOWS = tuple(Window(0, 1, start, start + 2) for start in range(0, 8, 2))


def plan_of(*precisions: str) -> Plan:
    plan, _, _ = tiny_plan(width=256, inner=128, layers=1, windows=WINDOWS)
    return replace(plan, precisions=precisions or plan.precisions)


def needs_of(plan: Plan) -> list[WindowNeed]:
    return [
        WindowNeed(
            plan=PLAN_ID,
            window=window,
            kept_bytes={name: plan.kept_bytes(window, name) for name in plan.precisions},
            download_bytes=plan.kept_bytes(window),
            wire_dtype=plan.wire_dtype,
            formulas=frozenset({"swiglu"}),
            target=2,
            proven=0,
            loading=0,
            demand=0.0,
            networks=frozenset(),
        )
        for window in plan.windows
    ]


def offers(plan: Plan, budget: int, held: int = 0) -> tuple[tuple[Offer, ...], dict[str, int]]:
    """What the real market offers a device of that budget."""
    able = Abilities(budget, AUTO_PRECISIONS, ("float32",), {}, "home", ("swiglu",))
    said = answer(able, DeviceFacts(held, frozenset(), None), needs_of(plan), draw=lambda: 0.5)
    return said.offers, dict(said.wanted_bytes)


def total(plan: Plan, precision: str) -> int:
    return sum(plan.kept_bytes(window, precision) for window in plan.windows)


@pytest.mark.parametrize(
    ("allowed", "budget_for", "chosen"),
    [
        (("stored", "bf16", "int8", "int4"), "stored", "stored"),
        (("stored", "bf16", "int8", "int4"), "bf16", "bf16"),
        (("stored", "int8", "int4"), "int8", "int8"),
        (("stored", "int8", "int4"), "int4", "int8"),  # not all fit at int8, and still no int4
        (("stored", "int8"), "int4", "int8"),
        (("stored",), "bf16", "stored"),
    ],
)
def test_auto_takes_the_most_exact_precision_at_which_all_wanted_windows_fit(
    allowed: tuple[str, ...], budget_for: str, chosen: str
) -> None:
    plan = plan_of(*allowed)
    budget = total(plan, budget_for)
    found, wanted = offers(plan, budget)
    assert set(wanted) == set(allowed)
    assert wanted[allowed[0]] == total(plan, allowed[0])
    settled = PrecisionChooser().settle(found[0], plan, wanted, budget)
    assert settled.precision == chosen
    assert settled.kept_bytes == plan.kept_bytes(settled.window, chosen)


def test_int4_only_where_nothing_else_fits_and_the_plan_allows_it() -> None:
    plan = plan_of("stored", "int8", "int4")
    budget = plan.kept_bytes(WINDOWS[0], "int4")
    found, wanted = offers(plan, budget)
    assert PrecisionChooser().settle(found[0], plan, wanted, budget).precision == "int4"
    assert offers(plan_of("stored", "int8"), budget)[0] == ()
    assert choose_precision(plan_of("int4"), {}, 1) == "int4"


def test_a_nodes_replicas_of_a_plan_are_of_one_precision() -> None:
    plan = plan_of("stored", "int8")
    chooser, budget = PrecisionChooser(), total(plan, "int8")
    found, wanted = offers(plan, budget)
    assert chooser.settle(found[0], plan, wanted, budget).precision == "int8"
    # Later only one window is wanted, and would fit as stored.
    assert chooser.settle(found[1], plan, {"stored": 1, "int8": 1}, budget).precision == "int8"
    chooser.forget(PLAN_ID)
    assert not chooser.knows(PLAN_ID)
    assert chooser.settle(found[1], plan, {"stored": 1, "int8": 1}, budget).precision == "stored"


def test_a_stored_choice_that_no_longer_fits_gives_way() -> None:
    """All fitted as stored; then more became wanted than fits."""
    plan = plan_of("stored", "int8")
    chooser = PrecisionChooser()
    found, _ = offers(plan, total(plan, "stored"))
    chooser.settle(found[0], plan, {"stored": 1}, 1 << 40)
    budget = plan.kept_bytes(WINDOWS[0], "int8")
    smaller, wanted = offers(plan, budget)
    assert chooser.settle(smaller[0], plan, wanted, budget).precision == "int8"


def test_a_window_that_does_not_fit_is_refused_with_advice() -> None:
    plan = plan_of()
    found, _ = offers(plan, 1 << 30)
    offer = found[0]
    kept, working = plan.kept_bytes(offer.window), working_bytes(plan, offer.window)
    assert working > 3 * 4 * 3 * 256 * 128
    check_fit(plan, offer, budget_left=kept, memory_free=kept + working)
    with pytest.raises(WontFit, match="raise --budget"):
        check_fit(plan, offer, budget_left=kept - 1, memory_free=1 << 40)
    with pytest.raises(WontFit, match="smaller --budget"):
        check_fit(plan, offer, budget_left=1 << 40, memory_free=kept + working - 1)


def test_the_disk_is_asked_before_anything_is_claimed(tmp_path: Path) -> None:
    plan = plan_of()
    window = WINDOWS[0]
    need = plan.kept_bytes(window)
    cache = WeightCache(tmp_path, cap_bytes=need)
    cache.check_room(PLAN_ID, window, need)
    with pytest.raises(CacheFull, match="raise --cache-bytes"):
        cache.check_room(PLAN_ID, window, need + 1)
    hashes = [bytes(32)] * len(plan.window_chunks(window))
    entry = cache.open(plan, PLAN_ID, window, hashes)  # pinned: it cannot make room for another
    cache.check_room(PLAN_ID, window, need)
    with pytest.raises(CacheFull, match="in use by other windows"):
        cache.check_room(PLAN_ID, WINDOWS[1], need)
    entry.close()
    cache.check_room(PLAN_ID, WINDOWS[1], need)
    assert [cached.window for cached in cache.windows()] == [window.name], "nothing was evicted by asking"
    cache.close()
    full = WeightCache(tmp_path, cap_bytes=1 << 60, reserve_bytes=1 << 60)
    with pytest.raises(CacheFull, match="kept in reserve"):
        full.check_room(PLAN_ID, WINDOWS[1], need)
    full.close()


def test_what_a_machine_can_hold_is_said_plainly() -> None:
    plan = plan_of("stored", "int8")
    budget = 2 * plan.kept_bytes(WINDOWS[0])
    assert describe_capacity(plan, budget, AUTO_PRECISIONS) == (
        "tiny: 2 of 4 windows as stored or all windows as int8"
    )
    assert "raise --budget" in describe_capacity(plan, 10, AUTO_PRECISIONS)
    assert "it allows stored, int8, and this node offers int4" in describe_capacity(plan, budget, ("int4",))

"""The audits' budget: what is drawn and spent over a simulated run."""

from __future__ import annotations

import random

import pytest

from kvasir_backbone.audit import Trust
from kvasir_backbone.budget import FLOOR, AuditBudget


def serve(calls: int, *, call_s: float, audit_s: float, wallets: int = 4) -> tuple[AuditBudget, float, float]:
    """`calls` valid calls of several wallets: the budget, and over the second half the rate and CPU share."""
    budget, rng, process_s = AuditBudget(), random.Random(1), 0.0
    trusts = [Trust() for _ in range(wallets)]
    half = [0, 0.0, 0.0]
    for number in range(calls):
        process_s += call_s
        budget.call(process_s)
        late = number >= calls // 2
        if trusts[number % wallets].wants_audit(rng, budget.afford):
            budget.drawn()
            budget.spent(audit_s)
            process_s += audit_s
            half[0] += late
            half[1] += audit_s if late else 0.0
        half[2] += call_s if late else 0.0
    return budget, half[0] / (calls / 2), half[1] / (half[1] + half[2])


def test_cheap_audits_happen_at_the_rate_that_trust_asks_for() -> None:
    budget, rate, share = serve(40_000, call_s=0.01, audit_s=0.001)
    assert rate == pytest.approx(0.02, rel=0.15)
    assert share < 0.01
    assert budget.spending().rate == pytest.approx(0.02, rel=0.5)


def test_dear_audits_are_drawn_less_often_and_stay_within_their_share_of_the_cpu() -> None:
    budget, rate, share = serve(100_000, call_s=0.01, audit_s=0.01)
    assert FLOOR < rate < 0.02
    assert 0.005 < share < 0.01
    assert budget.spending().cpu_share < 0.012


def test_what_nothing_can_pay_for_still_happens_at_the_floor() -> None:
    _, rate, share = serve(100_000, call_s=0.001, audit_s=0.01)
    assert rate == pytest.approx(FLOOR, rel=0.4)
    assert share > 0.01


def test_first_calls_are_audited_whatever_they_cost_and_paid_back_afterwards() -> None:
    budget = AuditBudget()
    for number in range(10):
        budget.call(0.001 * number)
        assert budget.afford(1.0) == 1.0
        budget.drawn()
        budget.spent(0.1)
    assert budget.afford(0.1) == FLOOR
    budget.call(1000.0)  # long ago by now
    assert budget.afford(0.1) > FLOOR


def test_it_never_draws_more_than_trust_asks_for_and_a_clock_that_stands_still_harms_nothing() -> None:
    budget = AuditBudget(5.0)
    assert budget.afford(0.02) == 0.02
    assert budget.spending().rate == budget.spending().cpu_share == 0.0
    budget.spent(0.01, audits=0)
    assert budget.afford(0.02) == FLOOR
    for _ in range(3):
        budget.call(4.0)
        budget.spent(0.01)
        assert budget.afford(0.001) == 0.001
        assert 0.0 <= budget.afford(0.02) <= 0.02


def test_lost_races_are_compared_while_audits_leave_half_of_their_share() -> None:
    budget = AuditBudget(share=0.01)
    assert budget.allows_comparison  # nothing was spent yet
    budget.call(1.0)
    budget.spent(0.004, audits=0)
    assert budget.allows_comparison
    budget.spent(0.002)
    assert not budget.allows_comparison
    budget.call(2.0)
    assert budget.allows_comparison

"""Latency books, breakers and the hedge budget."""

from __future__ import annotations

import pytest

from kvasir_backbone.pace import FIRST_GUESS_S, MIN_FAILOVER_S, Breaker, HedgeBudget, Pace


def test_an_unknown_device_is_expected_to_take_the_first_guess() -> None:
    pace = Pace()
    assert pace.expected_s(8) == FIRST_GUESS_S
    assert pace.p95_s(8) >= FIRST_GUESS_S


def test_the_expectation_follows_the_latencies_of_calls_of_that_size() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe(8, 0.010)
        pace.observe(2048, 0.500)
    assert pace.expected_s(8) == pytest.approx(0.010)
    assert pace.expected_s(9) == pytest.approx(0.010)
    assert pace.expected_s(2048) == pytest.approx(0.500)
    assert pace.expected_s(4096) == pytest.approx(1.0)  # scaled from the nearest smaller bucket
    assert pace.expected_s(1) == pytest.approx(0.010)  # a larger call's latency is an upper bound


def test_the_p95_is_that_of_the_recent_latencies() -> None:
    pace = Pace()
    for _ in range(60):
        pace.observe(8, 0.010)
    for _ in range(4):
        pace.observe(8, 0.200)
    assert pace.p95_s(8) == 0.200
    for _ in range(61):
        pace.observe(8, 0.010)
    assert pace.p95_s(8) == pytest.approx(0.010)


def test_failover_comes_after_four_p95_but_never_before_a_quarter_second() -> None:
    pace = Pace()
    for _ in range(20):
        pace.observe(8, 0.010)
    assert pace.failover_s(8) == MIN_FAILOVER_S
    for _ in range(64):
        pace.observe(8, 0.100)
    assert pace.failover_s(8) == pytest.approx(0.4)


def test_outstanding_work_delays_the_expected_finish_and_is_returned_at_the_end() -> None:
    pace = Pace()
    pace.observe(8, 0.010)
    free = pace.finish_s(8)
    pace.begin(64)
    assert pace.finish_s(8) > free
    pace.end(64, None)
    assert pace.finish_s(8) == free
    assert pace.outstanding == 0


def test_a_breaker_opens_at_one_missed_deadline_and_closes_only_by_a_right_answer() -> None:
    breaker = Breaker()
    breaker.trip(10.0, "no reply")
    assert breaker.is_open
    assert breaker.reason == "no reply"
    first = breaker.retry_at - 10.0
    breaker.trip(10.0 + first / 2, "again")  # while cooling: nothing new
    assert breaker.retry_at == 10.0 + first
    breaker.trip(20.0, "again")
    assert breaker.retry_at - 20.0 == pytest.approx(2 * first)
    breaker.succeed()
    assert not breaker.is_open
    breaker.trip(30.0, "once more")
    assert breaker.retry_at - 30.0 == pytest.approx(first)


def test_hedges_stay_within_their_share_of_all_calls() -> None:
    budget = HedgeBudget(share=0.05)
    taken = 0
    for _ in range(1000):
        budget.count_call()
        taken += budget.take()
    assert taken == budget.hedges
    assert 40 <= taken <= 50


def test_a_device_that_stood_still_is_not_taken_for_a_slow_one() -> None:
    pace = Pace()
    for _ in range(64):
        pace.observe(8, 0.002)
    for _ in range(4):  # 4 of 64: the p95 is one of them
        pace.observe_late(8, 10.0)
    assert pace.failover_s(8) == MIN_FAILOVER_S
    assert pace.expected_s(8) < 0.07


def test_a_device_that_has_become_slow_is_known_as_such_after_some_late_replies() -> None:
    pace = Pace()
    for _ in range(64):
        pace.observe(8, 0.002)
    for _ in range(24):
        pace.observe_late(8, 0.6)
    assert pace.p95_s(8) == pytest.approx(0.6)

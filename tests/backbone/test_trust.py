"""Trust as a state machine: what leads to a verdict, what does not, and what begins again."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.trust import (
    ALWAYS_FIRST,
    FLOOR_RATE,
    GROSS,
    STRIKE_WINDOW,
    STRIKES,
    CallAccepted,
    Fact,
    PutOut,
    RowAudited,
    Standing,
    Trust,
    Verdict,
    step,
)

LIMIT = 1e-5
HONEST, OFF, GROSSLY = RowAudited(1e-6, LIMIT), RowAudited(1e-3, LIMIT), RowAudited(0.06, LIMIT)
facts: st.SearchStrategy[list[Fact]] = st.lists(
    st.one_of(
        st.just(CallAccepted()),
        st.just(PutOut()),
        st.builds(RowAudited, st.floats(0, 2), st.sampled_from([1e-5, 1e-4])),
        st.sampled_from([HONEST, OFF, GROSSLY]),
    ),
    max_size=60,
)


def play(script: list[Fact]) -> tuple[Standing, list[Verdict | None]]:
    standing, verdicts = Standing(), []
    for fact in script:
        standing, verdict = step(standing, fact)
        verdicts.append(verdict)
    return standing, verdicts


@given(facts)
def test_a_verdict_comes_exactly_at_a_gross_row_or_the_third_violation(script: list[Fact]) -> None:
    _, verdicts = play(script)
    strikes = 0
    for fact, verdict in zip(script, verdicts, strict=True):
        if isinstance(fact, PutOut):
            strikes = 0
        if not isinstance(fact, RowAudited):
            assert verdict is None
            continue
        strikes += fact.d > fact.limit
        due = fact.d > GROSS or strikes == STRIKES
        assert (verdict is not None) == due
        if verdict is not None:
            assert verdict.gross == (fact.d > GROSS)
            strikes = 0


@given(facts)
def test_counts_are_of_what_happened_since_the_wallet_was_put_out(script: list[Fact]) -> None:
    standing, _ = play(script)
    last = max((i for i, fact in enumerate(script) if isinstance(fact, PutOut)), default=-1)
    since = script[last + 1 :]
    rows = [fact for fact in since if isinstance(fact, RowAudited)]
    assert standing.valid_calls == sum(isinstance(fact, CallAccepted) for fact in since)
    assert standing.audited == len(rows)
    assert standing.worst_d == max((row.d for row in rows), default=0.0)
    assert len(standing.violations) < STRIKES
    assert all(0 < number <= standing.audited for number in standing.violations)
    assert FLOOR_RATE <= standing.rate <= 1.0


@given(st.lists(st.integers(1, 3000), min_size=3, max_size=3), st.integers(0, 2000))
def test_three_violations_count_if_they_lie_within_a_thousand_audited_rows(
    gaps: list[int], before: int
) -> None:
    standing = Standing(audited=before)
    verdict = None
    for gap in gaps:
        honest = Standing(
            standing.valid_calls, standing.audited + gap - 1, standing.worst_d, standing.violations
        )
        standing, verdict = step(honest, OFF)  # as many honest rows as lie between change nothing else
    assert (verdict is not None) == (gaps[1] + gaps[2] < STRIKE_WINDOW)


def test_honest_rows_between_change_nothing_but_the_count() -> None:
    standing, _ = play([OFF])
    for _ in range(STRIKE_WINDOW - 1):
        standing, verdict = step(standing, HONEST)
        assert verdict is None
    assert standing.violations == (1,)
    standing, _ = step(standing, HONEST)
    assert standing.violations == ()


def test_a_figure_that_is_none_is_the_worst() -> None:
    for d in (math.inf, math.nan):
        _, verdict = step(Standing(), RowAudited(d, LIMIT))
        assert verdict is not None
        assert verdict.gross


def test_after_a_quarantine_the_first_calls_are_all_audited_again() -> None:
    trust, rng = Trust(), random.Random(1)
    for _ in range(2000):
        trust.wants_audit(rng)
    assert trust.sample_rate() == FLOOR_RATE
    trust = Trust(step(trust.standing, PutOut())[0])
    assert all(trust.wants_audit(rng) for _ in range(ALWAYS_FIRST))
    assert trust.sample_rate() < 1.0


def test_the_rate_that_can_be_afforded_is_the_rate() -> None:
    trust, rng = Trust(Standing(valid_calls=1000)), random.Random(1)
    assert not any(trust.wants_audit(rng, lambda wanted: 0.0) for _ in range(100))
    assert trust.valid_calls == 1100

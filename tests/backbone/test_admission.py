"""Who is let in under load: places found by time, a short wait, a refusal that says when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.admission import Admission, AdmissionConfig
from relay.errors import ConfigError, Refused


def _measured(alone: float, slope: float, *counts: int, **settings: float) -> Admission:
    """Admission that saw so many streams at a time, tokens `alone + slope x (streams - 1)` seconds apart."""
    admission = Admission(AdmissionConfig(**{"stretch": 4.0, "least_places": 1, **settings}))  # type: ignore[arg-type]
    for count in counts:
        admission.streams = count
        for _ in range(50):
            admission.observe(alone + slope * (count - 1), 1.0)
    admission.streams = 0
    return admission


def test_places_are_as_many_as_keep_the_time_between_tokens_within_bounds() -> None:
    assert _measured(0.010, 0.002, 1, 8).places(1.0) == 1 + 3 * 5
    assert _measured(0.010, 0.002, 1, 8, stretch=2.0).places(1.0) == 1 + 5
    # Where a round trip of 1.5 s rules, everybody fits.
    assert _measured(1.5, 0.004, 1, 8).places(1.0) == 256
    assert _measured(0.010, 0.0, 1, 8).places(1.0) == 256
    # Where each stream costs as much as the first, as many as the stretch.
    assert _measured(0.010, 0.010001, 1, 8).places(1.0) == 3
    assert _measured(0.010, 0.030, 3, 8).places(1.0) >= 1


def test_what_is_not_known_yet_limits_nobody() -> None:
    assert Admission().places(0.0) == 256
    assert _measured(0.010, 0.002, 8).places(1.0) == 256
    assert _measured(0.010, 0.010, 1, 8, least_places=8).places(1.0) == 8


def test_what_was_seen_long_ago_counts_little() -> None:
    admission = _measured(0.010, 0.002, 1, 8)
    assert admission.places(1.0) == 16
    for count in (1, 4, 8):  # the machine has become slower, and its streams cost each other nothing
        admission.streams = count
        for _ in range(4000):
            admission.observe(0.1, 500.0)
    assert admission.places(500.0) == 256


def test_whoever_finds_no_place_is_told_when_to_come_back() -> None:
    admission = _measured(0.010, 0.002, 1, 8, max_wait_s=0.5)
    for _ in range(16):
        admission.enter(1.0)
    for _ in range(4):
        admission.leave(1, 8.0)
        admission.enter(1.0)
    with pytest.raises(Refused, match="ask again") as refused:  # one place comes free every 8 / 16 s
        admission.enter(1.0, 2)
    assert refused.value.code == "overloaded"
    assert refused.value.retry_after_s == pytest.approx(1.0)
    assert (admission.streams, admission.refused) == (16, 2)
    admission.enter(1.0)  # half a second is short enough a wait
    with pytest.raises(Refused):
        admission.check(1.0)


def test_a_request_of_many_choices_is_let_in_where_nobody_else_is() -> None:
    admission = _measured(0.010, 0.010, 1, 8)
    admission.enter(1.0, 100)
    with pytest.raises(Refused):
        admission.enter(1.0)
    admission.leave(100, 3.0)
    admission.enter(1.0)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 10), st.floats(0, 1000)), max_size=40),
    st.floats(0, 2000),
)
def test_places_are_always_within_bounds(seen: list[tuple[int, float, float]], now: float) -> None:
    admission = Admission()
    for streams, gap_s, at in seen:
        admission.streams = streams
        admission.observe(gap_s, at)
    assert 8 <= admission.places(now) <= 256


@pytest.mark.parametrize("settings", [{"stretch": 0.5}, {"max_wait_s": -1.0}, {"least_places": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        AdmissionConfig(**settings)  # type: ignore[arg-type]

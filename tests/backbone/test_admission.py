"""Who is let in under load: places found by time, a short wait, a refusal that says when to come back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.admission import Admission, AdmissionConfig
from kvasir_backbone.door import Door, Visit
from relay.errors import ConfigError, Refused
from tests.support.waiting import until


def _measured(alone: float, slope: float, *counts: int, **settings: float) -> Admission:
    """Admission that saw so many streams at a time, tokens `alone + slope x (streams - 1)` seconds apart."""
    given = {"stretch": 4.0, "least_places": 1, **settings}
    admission = Admission(AdmissionConfig(**given))  # type: ignore[arg-type]
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
    assert _measured(1.5, 0.004, 1, 8).places(1.0) > 1000
    assert _measured(0.010, 0.0, 1, 8).places(1.0) == 4096
    # Where each stream costs as much as the first, as many as the stretch.
    assert _measured(0.010, 0.010001, 1, 8).places(1.0) == 3
    assert _measured(0.010, 0.030, 3, 8).places(1.0) >= 1


def test_what_is_not_known_yet_limits_nobody() -> None:
    assert Admission().places(0.0) == 4096
    assert _measured(0.010, 0.002, 8).places(1.0) == 4096
    assert _measured(0.010, 0.010, 1, 8, least_places=8).places(1.0) == 8


def test_what_was_seen_long_ago_counts_little() -> None:
    admission = _measured(0.010, 0.002, 1, 8)
    assert admission.places(1.0) == 16
    for count in (1, 4, 8):  # the machine has become slower, and its streams cost each other nothing
        admission.streams = count
        for _ in range(4000):
            admission.observe(0.1, 500.0)
    assert admission.places(500.0) > 200


def test_whoever_finds_no_place_is_told_when_to_come_back() -> None:
    admission = _measured(0.010, 0.002, 1, 8, max_wait_s=0.5)
    admission.enter(16)
    for _ in range(4):
        admission.began(0.1, 1.0)
        admission.leave(1, 0, 8.0)
        admission.enter()
    with pytest.raises(Refused, match="ask again") as refused:  # one place comes free every 8 / 16 s
        admission.check(1.0, 2)
    assert refused.value.code == "overloaded"
    assert refused.value.retry_after_s == pytest.approx(1.0)
    assert admission.refused == 2
    admission.check(1.0)  # half a second is short enough a wait
    with pytest.raises(Refused):
        admission.check(1.0, ahead=1)


def test_a_request_of_many_choices_is_let_in_where_nobody_else_is() -> None:
    admission = _measured(0.010, 0.010, 1, 8, max_wait_s=0.1)
    admission.check(1.0, 100)
    admission.enter(100)
    with pytest.raises(Refused):
        admission.check(1.0)
    admission.leave(100, 100, 3.0)
    admission.check(1.0)
    assert (admission.streams, admission.starting) == (0, 0)


def test_prompts_that_disturb_those_who_write_start_one_after_another() -> None:
    admission = Admission(AdmissionConfig(least_places=4))
    admission.enter(4)
    assert admission.may_start(1.0), "nothing is known of what a prompt costs"
    for _ in range(4):
        admission.began(0.2, 1.0)
    for _ in range(50):
        admission.observe(0.010, 2.0)
    admission.enter()
    for _ in range(50):
        admission.observe(0.050, 2.0)
    assert admission.starts(2.0) == 1
    assert not admission.may_start(2.0)
    admission.began(0.2, 2.0)
    assert admission.may_start(2.1)
    admission.leave(4, 0, 1.0)
    admission.enter()
    assert admission.may_start(2.1), "hardly anybody writes who could be disturbed"


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 10), st.floats(0, 1000)), max_size=40),
    st.floats(0, 2000),
)
def test_places_are_always_within_bounds(seen: list[tuple[int, float, float]], now: float) -> None:
    admission = Admission()
    for streams, gap_s, at in seen:
        admission.streams = streams
        admission.observe(gap_s, at)
    assert 8 <= admission.places(now) <= 4096
    assert 1 <= admission.starts(now) <= 4096


@pytest.mark.parametrize("settings", [{"stretch": 0.5}, {"max_wait_s": -1.0}, {"least_places": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        AdmissionConfig(**settings)  # type: ignore[arg-type]


# --- the line ------------------------------------------------------------------------------------------


def _door(places: int, max_wait_s: float) -> Door:
    config = AdmissionConfig(max_wait_s=max_wait_s, least_places=places, most_places=places)
    return Door(Admission(config), lambda: 1.0)


async def test_the_line_is_served_in_order_as_places_come_free() -> None:
    door, order = _door(2, 20.0), []

    async def visit(name: str) -> None:
        async with door.enter(1):
            order.append(name)

    async with AsyncExitStack() as first, AsyncExitStack() as second, asyncio.TaskGroup() as tasks:
        await first.enter_async_context(door.enter(1))
        await second.enter_async_context(door.enter(1))
        for name in "abc":
            tasks.create_task(visit(name))
        await until(lambda: door.waiting == 3)
        gone = tasks.create_task(visit("never"))
        await until(lambda: door.waiting == 4)
        gone.cancel()
        await first.aclose()
        await until(lambda: not door.waiting)
    assert order == ["a", "b", "c"]
    assert (door.admission.streams, door.admission.starting) == (0, 0)


async def test_whoever_waits_too_long_in_line_is_refused() -> None:
    door = _door(1, 0.05)
    door.admission.leave(0, 0, 0.01)  # places are held shortly, it is thought
    async with door.enter(1):
        with pytest.raises(Refused, match="ask again"):
            async with door.enter(1):
                pytest.fail("there was no place")
        assert door.waiting == 0
        assert door.admission.streams == 1
    async with door.enter(1) as visit:
        assert isinstance(visit, Visit)
        visit.heard(None)
        visit.heard(0.01)
        assert (door.admission.streams, door.admission.starting) == (1, 0)

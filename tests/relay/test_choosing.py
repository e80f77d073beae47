"""Which relays a device keeps: near and idle, no flapping, no stampede."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from relay.choosing import LEAVING, WANTED, Candidate, choose
from relay.identity import PublicKey


def _key(number: int) -> PublicKey:
    return PublicKey(number.to_bytes(32, "big"))


DEVICE = _key(1 << 200)
A, B, C, D = (_key(n) for n in range(1, 5))


def _choose(
    candidates: list[Candidate],
    current: tuple[PublicKey, ...] = (),
    *,
    draw: float = 0.0,
    settled: bool = True,
) -> tuple[PublicKey, ...]:
    return choose(candidates, current, device=DEVICE, draw=draw, settled=settled)


def test_the_nearest_two_are_taken_at_the_start() -> None:
    found = _choose([Candidate(A, 0.100), Candidate(B, 0.010), Candidate(C, 0.030), Candidate(D, None)])
    assert found == (B, C)


def test_a_busy_near_relay_is_worth_less_than_an_idle_one_a_little_further() -> None:
    assert _choose([Candidate(A, 0.010, share=0.8), Candidate(B, 0.020)])[0] == B
    assert _choose([Candidate(A, 0.010, share=0.1), Candidate(B, 0.020)])[0] == A


def test_where_nothing_can_be_used_the_present_relays_stay() -> None:
    assert _choose([Candidate(A, None), Candidate(B, 0.01, draining=True)], (A, B)) == (A, B)
    assert _choose([]) == ()


def test_a_relay_that_drains_or_died_is_left_at_once() -> None:
    others = [Candidate(B, 0.2), Candidate(C, 0.3)]
    for lost in (Candidate(A, None), Candidate(A, 0.001, draining=True)):
        assert _choose([lost, *others], (A, B), draw=0.99, settled=False) == (B, C)


def test_only_a_markedly_better_relay_is_worth_a_move_and_only_once_settled() -> None:
    present = [Candidate(A, 0.100), Candidate(B, 0.110)]
    assert _choose([*present, Candidate(C, 0.085)], (A, B)) == (A, B)
    better = [*present, Candidate(C, 0.030)]
    assert _choose(better, (A, B), settled=False) == (A, B)
    assert _choose(better, (A, B), settled=True) == (C, A)


def test_a_few_milliseconds_are_no_reason_however_large_their_share() -> None:
    assert _choose([Candidate(A, 0.004), Candidate(B, 0.0001)], (A,), settled=True)[0] == A


def test_an_overloaded_relay_is_left_by_a_part_of_its_devices_in_a_round() -> None:
    full = [Candidate(A, 0.001, share=0.97), Candidate(B, 0.050), Candidate(C, 0.060)]
    draws = random.Random(5)
    left = sum(_choose(full, (A, B), draw=draws.random(), settled=False)[0] != A for _ in range(2000))
    assert 0.8 * LEAVING < left / 2000 < 1.2 * LEAVING


def test_devices_do_not_all_call_one_of_two_equal_relays_the_best() -> None:
    equal = [Candidate(A, 0.020), Candidate(B, 0.020)]
    first = [choose(equal, (), device=_key(n << 100), draw=0.0)[0] for n in range(1, 401)]
    assert 120 < first.count(A) < 280


_SHARES = st.floats(0, 1)
_RTTS = st.one_of(st.none(), st.floats(0.0001, 5))
_CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(1, 40).map(_key), _RTTS, _SHARES, st.booleans()),
    unique_by=lambda candidate: candidate.key,
    max_size=12,
)


@given(
    _CANDIDATES,
    st.lists(st.integers(1, 40).map(_key), unique=True, max_size=3),
    st.floats(0, 0.999),
    st.booleans(),
)
def test_what_is_chosen_can_be_used_is_distinct_and_stays_chosen(
    candidates: list[Candidate], current: list[PublicKey], draw: float, settled: bool
) -> None:
    found = _choose(candidates, tuple(current), draw=draw, settled=settled)
    usable = {candidate.key: candidate for candidate in candidates if candidate.usable}
    if not usable:
        assert found == tuple(current)
        return
    assert len(set(found)) == len(found) == min(WANTED, len(usable))
    assert set(found) <= usable.keys()
    again = _choose(candidates, found, draw=draw, settled=False)
    calm = not any(candidate.overloaded for candidate in usable.values())
    if calm:
        assert again == found


@given(st.floats(0.02, 2), st.floats(0, 0.85), st.floats(-0.1, 0.1), st.floats(-0.1, 0.1))
def test_noise_of_a_tenth_never_moves_a_device(rtt: float, share: float, left: float, right: float) -> None:
    one, two = Candidate(A, rtt, share), Candidate(B, rtt, share)
    first = _choose([one, two])
    noisy = [replace(one, rtt_s=rtt * (1 + left)), replace(two, rtt_s=rtt * (1 + right))]
    assert _choose(noisy, first) == first

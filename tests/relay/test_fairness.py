from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from relay.fairness import QUANTUM, FairQueue


def test_a_light_circuit_waits_for_one_turn_of_a_heavy_one() -> None:
    queue = FairQueue()
    for _ in range(20):
        queue.put(1, bytes(60_000))
    queue.put(3, b"light")
    order = [bytes(queue.take()[:5]) for _ in range(21)]
    assert order.index(b"light") <= 2
    assert not queue
    assert queue.bytes == 0


def test_shares_are_equal_in_bytes_whatever_the_frames() -> None:
    queue, sent = FairQueue(), Counter[int]()
    sizes = {1: 65_000, 3: 6_000, 5: 300}
    for circuit, size in sizes.items():
        for number in range(4_000_000 // size):
            queue.put(circuit, number.to_bytes(4, "big") + bytes([circuit]) + bytes(size - 5))
    while len(queue) == 3:
        frame = queue.take()
        sent[frame[4]] += len(frame)
    assert max(sent.values()) - min(sent.values()) <= 2 * QUANTUM


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 70_000)), max_size=60), st.integers(0, 60))
def test_nothing_is_lost_and_each_circuit_stays_in_order(puts: list[tuple[int, int]], early: int) -> None:
    queue, expected, got = FairQueue(), defaultdict(list), defaultdict(list)
    waiting = 0
    for number, (circuit, size) in enumerate(puts):
        frame = bytes([circuit]) + number.to_bytes(2, "big") + bytes(size)
        queue.put(circuit, frame)
        expected[circuit].append(frame)
        waiting += len(frame)
        assert queue.bytes == waiting
        if number == early:
            taken = queue.take()
            got[taken[0]].append(taken)
            waiting -= len(taken)
    while queue:
        taken = queue.take()
        got[taken[0]].append(taken)
    assert got == expected
    assert queue.bytes == 0


def test_clearing() -> None:
    queue = FairQueue()
    queue.put(1, b"x")
    assert 1 in queue
    queue.clear()
    assert 1 not in queue
    assert (len(queue), queue.bytes) == (0, 0)

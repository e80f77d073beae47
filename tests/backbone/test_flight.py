"""The dispatch planner, and what a dispatch does when workers are slow, lost, wrong or missing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.flight import Flight, Owner, RunFallback, Send, Trip, WorkerCall, rows_of_a_call, split
from kvasir_backbone.pace import HedgeBudget
from kvasir_backbone.roster import Roster, WindowMap
from kvasir_node.calls import MAX_CALL_IDS, MAX_CALL_ROWS, MAX_MESSAGE_BYTES, call_bytes, reply_bytes
from tests.support.rosters import device, flat_plan, replica, roster

WINDOWS = WindowMap(flat_plan())  # windows 0 and 1 in layer 0, 2 and 3 in layer 1; four experts each
IDS = [[0, 5], [1, 2], [6, 7]]


def owners_of(*names: str, latency_s: float = 0.01, calls: int = 20) -> dict[object, Owner]:
    found = {device(name): Owner() for name in names}
    for owner in found.values():
        for _ in range(calls):
            owner.pace.observe(4, latency_s)
    return found  # type: ignore[return-value]


def flight(
    held: Mapping[int, Sequence[str]] | Roster,
    owners: dict[object, Owner],
    *,
    ids: Sequence[Sequence[int]] = IDS,
    fallback: bool = True,
    deadline: float = 30.0,
    hedges: HedgeBudget | None = None,
    block: int = MAX_CALL_ROWS,
) -> Flight:
    counter = itertools.count(1)
    return Flight(
        held if isinstance(held, Roster) else roster(WINDOWS, held),
        0,
        ids,
        owners=owners,  # type: ignore[arg-type]
        hedges=hedges or HedgeBudget(share=1.0),
        next_call=lambda: next(counter),
        rng=random.Random(1),
        fallback=fallback,
        deadline=deadline,
        block=block,
    )


def sends(instructions: Sequence[object]) -> list[WorkerCall]:
    return [item.call for item in instructions if isinstance(item, Send)]


@given(
    st.lists(
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=20
    ).filter(lambda rows: len({len(row) for row in rows}) == 1),
    st.integers(1, 21),
)
def test_split_names_every_row_and_expert_exactly_once(ids: list[list[int]], block: int) -> None:
    owners = WINDOWS.owners(0)
    k = len(ids[0])
    seen: dict[int, tuple[int, int]] = {}
    for part in split(owners, ids, block):
        assert len({row // block for row in part.rows}) == 1
        order = [(row, expert) for row, chosen in zip(part.rows, part.ids, strict=True) for expert in chosen]
        assert list(part.rows) == sorted(set(part.rows))
        for slot, (row, expert) in zip(part.slots, order, strict=True):
            assert owners[expert] == part.window
            assert ids[row][slot - row * k] == expert
            seen[slot] = (row, expert)
    assert sorted(seen) == list(range(len(ids) * k))


def test_one_worker_that_owns_all_windows_gets_one_message_with_unique_rows() -> None:
    calls = sends(flight({0: ["a"], 1: ["a"]}, owners_of("a")).start(0.0))
    assert len(calls) == 1
    assert calls[0].rows == (0, 1, 2)
    assert [replica.ref for replica, _ in calls[0].groups] == [0, 1]
    assert calls[0].outputs == 6


@given(
    st.integers(1, 1 << 17), st.integers(1, 64), st.integers(1, 65_535), st.sampled_from([1 << 16, 1 << 26])
)
def test_no_call_of_a_block_and_no_reply_to_it_is_over_the_bounds_of_a_message(
    row_bytes: int, k: int, windows: int, max_bytes: int
) -> None:
    rows = rows_of_a_call(row_bytes, k, windows, max_bytes=max_bytes)
    assert 1 <= rows <= MAX_CALL_ROWS
    assert rows == 1 or rows * max(k, windows) <= MAX_CALL_IDS
    groups = [1] * (min(windows, rows * k) - 1)  # the most groups, and ids, that one worker can be asked for
    groups.append(rows * k - len(groups))
    assert rows == 1 or reply_bytes(rows * k, row_bytes) <= max_bytes
    assert rows == 1 or call_bytes(rows, groups, row_bytes) <= max_bytes


def test_a_long_prompt_of_a_wide_model_at_one_worker_is_cut_below_the_bound_of_a_message() -> None:
    rows = rows_of_a_call(6144 * 2, 8, 16)
    assert reply_bytes(639 * 8, 6144 * 2) <= MAX_MESSAGE_BYTES or rows < 639
    assert reply_bytes((rows + 1) * 8, 6144 * 2) > MAX_MESSAGE_BYTES, "and no sooner than it must be"


def test_a_dispatch_over_the_bound_goes_out_in_blocks_and_no_row_or_lease_twice_in_one_message() -> None:
    ids = [[row % 4, 4 + row % 4] for row in range(5)]
    started = flight({0: ["a"], 1: ["a"]}, owners_of("a"), ids=ids, block=2)
    calls = sends(started.start(0.0))
    assert [call.rows for call in calls] == [(0, 1), (2, 3), (4,)]
    for call in calls:
        assert [replica.ref for replica, _ in call.groups] == [0, 1]
        assert call.outputs == 2 * len(call.rows)
    for call in calls:
        started.got_reply(call.id, 0.1)
    assert started.done
    assert sorted(slot for part in started.parts for slot in part.slots) == list(range(10))


def test_the_blocks_of_a_lost_worker_are_given_to_another_one_by_one() -> None:
    ids = [[0, 4]] * 4
    started = flight({0: ["a", "b"], 1: ["a", "b"]}, owners_of("a", "b"), ids=ids, block=2)
    for call in sends(started.start(0.0)):
        for retry in sends(started.got_failure(call.id, 0.1)):
            assert len({row // 2 for row in retry.rows}) == 1
            started.got_reply(retry.id, 0.2)
    assert started.done
    assert started.failed == {}


def test_each_worker_gets_one_message_with_only_its_rows() -> None:
    started = flight({0: ["a"], 1: ["b"]}, owners_of("a", "b"))
    calls = {call.device: call for call in sends(started.start(0.0))}
    assert calls[device("a")].rows == (0, 1)
    assert calls[device("b")].rows == (0, 2)


def test_the_replica_with_the_least_expected_finish_is_asked() -> None:
    owners = owners_of("slow", latency_s=0.2) | owners_of("fast", latency_s=0.01)
    for _ in range(20):
        (call,) = sends(flight({0: ["slow", "fast"]}, owners, ids=[[0, 1]]).start(0.0))
        assert call.device == device("fast")
        owners[device("fast")].pace.end(call.outputs, 0.01)


def test_work_outstanding_at_a_replica_sends_the_next_call_to_the_other() -> None:
    owners = owners_of("a", "b")
    owners[device("a")].pace.begin(100)
    (call,) = sends(flight({0: ["a", "b"]}, owners, ids=[[0, 1]]).start(0.0))
    assert call.device == device("b")


def test_equal_replicas_share_the_calls() -> None:
    owners = owners_of("a", "b")
    rng = random.Random(3)
    counts = {device("a"): 0, device("b"): 0}
    for _ in range(100):
        started = flight({0: ["a", "b"]}, owners, ids=[[0, 1]])
        started._rng = rng
        (call,) = sends(started.start(0.0))
        counts[call.device] += 1
        started.got_reply(call.id, 0.01)
    assert min(counts.values()) > 30


def test_the_outputs_of_a_reply_are_accepted_once_and_end_the_dispatch() -> None:
    started = flight({0: ["a"], 1: ["b"]}, owners_of("a", "b"))
    first, second = sends(started.start(0.0))
    assert started.got_reply(first.id, 0.01) == (0,)
    assert not started.done
    assert started.got_reply(first.id, 0.02) == ()
    assert started.got_reply(second.id, 0.02) == (1,)
    assert started.done


def test_a_window_without_owner_is_computed_here() -> None:
    started = flight({0: ["a"]}, owners_of("a"))
    instructions = started.start(0.0)
    assert instructions[-1] == RunFallback((1,))
    started.got_fallback((1,))
    started.got_reply(sends(instructions)[0].id, 0.01)
    assert started.done
    assert started.accepted[1] is None
    assert started.failed == {}


def test_a_window_without_owner_or_bytes_fails_at_once_and_is_named() -> None:
    started = flight({0: ["a"]}, owners_of("a"), fallback=False)
    instructions = started.start(0.0)
    assert set(started.failed) == {1}
    assert "L00-00/E004-007" in started.failed[1]
    started.got_reply(sends(instructions)[0].id, 0.01)
    assert started.done


def test_a_lost_worker_costs_one_redispatch_to_the_other_replica() -> None:
    started = flight({0: ["a", "b"], 1: ["a", "b"]}, owners_of("a", "b"))
    for call in sends(started.start(0.0)):
        again = sends(started.got_failure(call.id, 0.1))
        assert all(retry.device != call.device for retry in again)
        for retry in again:
            started.got_reply(retry.id, 0.2)
    assert started.done
    assert started.redispatched == 2
    assert started.failed == {}


def test_when_every_replica_failed_the_fallback_is_last() -> None:
    started = flight({0: ["a", "b"]}, owners_of("a", "b"), ids=[[0, 1]])
    (first,) = sends(started.start(0.0))
    (second,) = sends(started.got_failure(first.id, 0.1))
    assert {first.device, second.device} == {device("a"), device("b")}
    assert started.got_failure(second.id, 0.2) == [RunFallback((0,))]


def test_a_hedge_goes_out_after_the_p95_and_the_first_reply_wins() -> None:
    started = flight({0: ["a", "b"]}, owners_of("a", "b"), ids=[[0, 1]])
    (first,) = sends(started.start(0.0))
    assert started.next_deadline() == pytest.approx(0.01)
    current = roster(WINDOWS, {0: ["a", "b"]})
    (hedge,) = sends(started.handle_timeout(0.011, current))
    assert hedge.device != first.device
    assert started.got_reply(hedge.id, 0.012) == (0,)
    assert started.done
    assert started.got_reply(first.id, 0.013) == ()  # the loser is known and not taken


def test_no_hedge_beyond_its_budget() -> None:
    started = flight({0: ["a", "b"]}, owners_of("a", "b"), ids=[[0, 1]], hedges=HedgeBudget(share=0.05))
    started.start(0.0)
    assert sends(started.handle_timeout(0.02, roster(WINDOWS, {0: ["a", "b"]}))) == []


def test_a_hedge_of_several_calls_counts_as_many() -> None:
    hedges = HedgeBudget(share=1.0)
    held = {0: ["a", "b"], 1: ["a", "c"]}
    owners = owners_of("a") | owners_of("b", "c", latency_s=5.0)
    started = flight(held, owners, hedges=hedges)
    (first,) = sends(started.start(0.0))
    again = sends(started.handle_timeout(0.02, roster(WINDOWS, held)))
    assert first.device == device("a")
    assert {call.device for call in again} == {device("b"), device("c")}
    assert hedges.hedges == 2


def test_past_the_failover_time_the_breaker_opens_and_another_owner_is_asked() -> None:
    started = flight({0: ["a", "b"]}, owners_of("a", "b"), ids=[[0, 1]], hedges=HedgeBudget(share=0.0))
    (first,) = sends(started.start(0.0))
    instructions = started.handle_timeout(0.26, roster(WINDOWS, {0: ["a", "b"]}))
    assert isinstance(instructions[0], Trip)
    assert instructions[0].device == first.device
    (second,) = sends(instructions)
    assert second.device != first.device
    assert started.got_reply(first.id, 0.27) == ()  # too late: given up
    assert started.got_reply(second.id, 0.28) == (0,)


def test_failover_is_not_capped_by_the_hedge_budget() -> None:
    started = flight({0: ["a"]}, owners_of("a"), ids=[[0, 1]], hedges=HedgeBudget(share=0.0))
    started.start(0.0)
    current = roster(WINDOWS, {0: ["a"]})
    assert started.handle_timeout(0.3, current) == []  # the only owner gets more time than one of several
    again = started.next_deadline()
    assert 0.3 < again < 1.0
    assert RunFallback((0,)) in started.handle_timeout(again, current)


def test_an_open_breaker_sends_the_part_to_the_fallback() -> None:
    owners = owners_of("a")
    owners[device("a")].breaker.trip(0.0, "missed")
    assert flight({0: ["a"]}, owners, ids=[[0, 1]]).start(1.0) == [RunFallback((0,))]


def test_without_bytes_a_slow_only_owner_is_waited_for() -> None:
    started = flight({0: ["a"]}, owners_of("a"), ids=[[0, 1]], fallback=False)
    (call,) = sends(started.start(0.0))
    current = roster(WINDOWS, {0: ["a"]})
    assert [type(item) for item in started.handle_timeout(1.0, current)] == [Trip]
    assert started.handle_timeout(1.1, current) == []
    assert started.next_deadline() == 30.0
    assert started.got_reply(call.id, 2.0) == (0,)


def test_without_bytes_a_lost_owner_is_asked_again_when_it_is_back() -> None:
    started = flight({0: ["a"]}, owners_of("a"), ids=[[0, 1]], fallback=False)
    (call,) = sends(started.start(0.0))
    assert started.got_failure(call.id, 0.1) == []
    gone = Roster(WINDOWS, {0: (replica(WINDOWS, 0, "a", connected=False),)})
    assert started.handle_timeout(started.next_deadline(), gone) == []
    assert not started.done
    (again,) = sends(started.handle_timeout(started.next_deadline(), roster(WINDOWS, {0: ["a"]})))
    assert started.got_reply(again.id, 1.0) == (0,)


def test_at_the_deadline_what_is_missing_is_computed_here_or_fails_by_name() -> None:
    started = flight({0: ["a"]}, owners_of("a", latency_s=60.0), ids=[[0, 1]], deadline=5.0)
    started.start(0.0)
    assert RunFallback((0,)) in started.handle_timeout(5.0, roster(WINDOWS, {0: ["a"]}))
    started = flight({0: ["a"]}, owners_of("a", latency_s=60.0), ids=[[0, 1]], deadline=5.0, fallback=False)
    started.start(0.0)
    started.handle_timeout(5.0, roster(WINDOWS, {0: ["a"]}))
    assert started.done
    assert "L00-00/E000-003" in started.failed[0]


@given(st.data())
def test_whatever_workers_do_every_part_ends_once_and_nothing_stays_outstanding(data: st.DataObject) -> None:
    names = ["a", "b", "c"]
    held = {w: data.draw(st.lists(st.sampled_from(names), unique=True)) for w in (0, 1)}
    owners = owners_of(*names)
    block = data.draw(st.integers(1, 4))
    started = flight(held, owners, fallback=data.draw(st.booleans()), deadline=2.0, block=block)
    current = roster(WINDOWS, held)
    now = 0.0
    open_calls: dict[int, WorkerCall] = {}
    todo = started.start(now)
    for _ in range(200):
        for item in todo:
            if isinstance(item, Send):
                open_calls[item.call.id] = item.call
            elif isinstance(item, RunFallback):
                started.got_fallback(item.parts)
        todo = []
        if started.done:
            break
        action = data.draw(st.sampled_from(["reply", "fail", "wait"]))
        if action == "wait" or not open_calls:
            now = max(now, started.next_deadline())
            todo = started.handle_timeout(now, current)
            continue
        call = open_calls.pop(data.draw(st.sampled_from(sorted(open_calls))))
        now += 0.001
        if action == "reply":
            started.got_reply(call.id, now)
        else:
            todo = started.got_failure(call.id, now)
    assert started.done
    assert set(started.accepted) | set(started.failed) == set(range(len(started.parts)))
    assert not set(started.accepted) & set(started.failed)
    started.abandon(now)
    assert all(owner.pace.outstanding == 0 for owner in owners.values())

"""Dispatches of partial sums: every part is counted exactly once, whatever workers do."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.flight import Owner, RunFallback, Send, WorkerCall
from kvasir_backbone.pace import HedgeBudget
from kvasir_backbone.roster import WindowMap
from kvasir_backbone.whole_flight import WholeFlight
from tests.backbone.test_flight import IDS, WINDOWS, owners_of, sends
from tests.support.rosters import device, flat_plan, roster

NARROW = WindowMap(flat_plan(layers=(0,), cut=2))  # four windows of two experts
WIDE_IDS = [[0, 2, 4, 6], [1, 3, 5, 7], [0, 3, 6, 1]]


def whole(held: dict[int, list[str]], owners: dict[object, Owner]) -> WholeFlight:
    counter = itertools.count(1)
    return WholeFlight(
        roster(WINDOWS, held),
        0,
        IDS,
        owners=owners,  # type: ignore[arg-type]
        hedges=HedgeBudget(share=1.0),
        next_call=lambda: next(counter),
        rng=random.Random(1),
        fallback=True,
        deadline=30.0,
    )


def hedged() -> tuple[WholeFlight, WorkerCall, dict[object, WorkerCall]]:
    """A call for both parts at "a", hedged in two calls at "b" and "c"."""
    owners = owners_of("a") | owners_of("b", "c", latency_s=5.0)
    started = whole({0: ["a", "b"], 1: ["a", "c"]}, owners)
    (first,) = sends(started.start(0.0))
    again = sends(started.handle_timeout(0.02, roster(WINDOWS, {0: ["a", "b"], 1: ["a", "c"]})))
    return started, first, {call.device: call for call in again}


def test_a_reply_whose_parts_were_partly_taken_is_not_taken() -> None:
    started, first, again = hedged()
    assert started.got_reply(again[device("b")].id, 0.03) == (0,)
    assert started.stranded(0.03) == []  # "c" will bring the rest
    assert started.got_reply(first.id, 0.04) == ()
    assert started.got_reply(again[device("c")].id, 0.05) == (1,)
    assert started.done


def test_a_reply_taken_whole_makes_both_hedges_losers() -> None:
    started, first, again = hedged()
    assert started.got_reply(first.id, 0.03) == (0, 1)
    assert started.done
    assert all(started.got_reply(call.id, 0.04) == () for call in again.values())


def test_what_only_a_spent_attempt_covers_is_asked_for_again_at_once() -> None:
    started, first, again = hedged()
    assert started.got_reply(again[device("b")].id, 0.03) == (0,)
    assert started.stranded(0.03) == []
    (call,) = sends(started.got_failure(again[device("c")].id, 0.04))
    assert (call.device, [index for _, index in call.groups]) == (device("a"), [1])  # slow is not lost
    assert started.got_reply(first.id, 0.05) == ()
    assert started.stranded(0.05) == []
    assert started.got_reply(call.id, 0.06) == (1,)
    assert started.done


@given(st.data())
def test_every_part_is_counted_exactly_once_whatever_workers_do(data: st.DataObject) -> None:
    names = ["a", "b", "c"]
    held = {w: data.draw(st.lists(st.sampled_from(names), unique=True)) for w in range(4)}
    owners = owners_of("a") | owners_of("b", "c", latency_s=data.draw(st.sampled_from([0.01, 5.0])))
    counter = itertools.count(1)
    started = WholeFlight(
        roster(NARROW, held),
        0,
        WIDE_IDS,
        owners=owners,  # type: ignore[arg-type]
        hedges=HedgeBudget(share=1.0),
        next_call=lambda: next(counter),
        rng=random.Random(1),
        fallback=data.draw(st.booleans()),
        deadline=6.0,
        block=data.draw(st.integers(1, 3)),
    )
    current, now = roster(NARROW, held), 0.0
    counted: list[int] = []
    open_calls: dict[int, WorkerCall] = {}
    todo = started.start(now)
    for _ in range(400):
        for item in todo:
            if isinstance(item, Send):
                open_calls[item.call.id] = item.call
            elif isinstance(item, RunFallback):
                counted += item.parts
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
            taken = started.got_reply(call.id, now)
            assert taken == () or taken == tuple(index for _, index in call.groups)
            counted += taken
            todo = started.stranded(now)
        else:
            todo = started.got_failure(call.id, now)
    assert started.done
    assert sorted(counted) == sorted(set(counted)) == sorted(started.accepted)
    assert set(started.accepted) | set(started.failed) == set(range(len(started.parts)))
    started.abandon(now)
    assert all(owner.pace.outstanding == 0 for owner in owners.values())

"""Which expert runs next, and for whom: the pure core of serving."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.batching import Batcher, Drop, ExpertKey, Part, Run, Work


def key(expert: int, layer: int = 0) -> ExpertKey:
    return ("lease", layer, expert)


def work(name: str, *experts: int, deadline: float = 100.0) -> Work[str]:
    return Work(name, 0.0, deadline, {key(expert): Part([0], [n]) for n, expert in enumerate(experts)})


def owners(run: Run[str] | Drop[str] | None) -> list[str]:
    assert isinstance(run, Run)
    return [item.owner for item in run.works]


def test_nothing_waits_nothing_runs() -> None:
    batcher: Batcher[str] = Batcher()
    assert batcher.next_step(0.0) is None
    assert not batcher


def test_one_expert_runs_once_for_all_who_wait_for_it() -> None:
    batcher: Batcher[str] = Batcher()
    first, second, third = work("a", 1, 2), work("b", 2), work("c", 3, 1)
    for item in (first, second, third):
        batcher.add(item)
    run = batcher.next_step(1.0)
    assert isinstance(run, Run)
    assert (run.key, owners(run)) == (key(1), ["a", "c"])
    assert batcher.done(run) == ()
    run = batcher.next_step(1.0)
    assert isinstance(run, Run)
    assert (run.key, owners(run)) == (key(2), ["a", "b"])
    assert batcher.done(run) == (first, second)
    run = batcher.next_step(1.0)
    assert isinstance(run, Run)
    assert (run.key, owners(run)) == (key(3), ["c"])
    assert batcher.done(run) == (third,)
    assert not batcher


def test_a_call_that_arrives_while_others_compute_joins_them() -> None:
    batcher: Batcher[str] = Batcher()
    batcher.add(work("a", 1, 2))
    run = batcher.next_step(0.0)
    assert isinstance(run, Run)
    batcher.add(work("b", 2, 1))
    batcher.done(run)
    run = batcher.next_step(0.0)
    assert isinstance(run, Run)
    assert (run.key, owners(run)) == (key(2), ["a", "b"])


def test_the_oldest_call_never_waits_for_a_younger_one() -> None:
    batcher: Batcher[str] = Batcher()
    old = work("old", 1, 2)
    batcher.add(old)
    for number in range(50):
        batcher.add(work(f"young{number}", 3))
    for _ in range(2):
        run = batcher.next_step(0.0)
        assert isinstance(run, Run)
        complete = batcher.done(run)
    assert complete == (old,)


def test_late_and_abandoned_calls_are_dropped_and_cost_nothing() -> None:
    batcher: Batcher[str] = Batcher()
    late, gone, live = work("late", 1, deadline=5.0), work("gone", 1), work("live", 1)
    for item in (late, gone, live):
        batcher.add(item)
    gone.cancelled = True
    assert batcher.next_step(5.1) == Drop(late, "expired")
    assert batcher.next_step(5.1) == Drop(gone, "cancelled")
    assert owners(batcher.next_step(5.1)) == ["live"]
    batcher.abandon(live)
    assert batcher.next_step(6.0) is None


def test_a_late_call_behind_a_live_one_does_not_run_with_it() -> None:
    batcher: Batcher[str] = Batcher()
    live, late = work("live", 1), work("late", 1, deadline=5.0)
    batcher.add(live)
    batcher.add(late)
    run = batcher.next_step(9.0)
    assert owners(run) == ["live"]
    assert isinstance(run, Run)
    assert batcher.done(run) == (live,)
    assert batcher.next_step(9.0) == Drop(late, "expired")


def test_the_start_of_service_is_the_first_run() -> None:
    batcher: Batcher[str] = Batcher()
    item = work("a", 1, 2)
    batcher.add(item)
    for now in (3.0, 4.0):
        run = batcher.next_step(now)
        assert isinstance(run, Run)
        batcher.done(run)
    assert item.started == 3.0


def test_companions_stay_within_the_rows_that_may_run_together() -> None:
    batcher: Batcher[str] = Batcher()
    oldest = work("a", 1, 2, 3, 4)
    batcher.add(oldest)
    batcher.add(work("b", 2, 3))
    run = batcher.next_step(0.0)
    assert isinstance(run, Run)
    assert [other.key for other in batcher.companions(run, 0.0)] == [key(2), key(3), key(4)]
    together = batcher.companions(run, 0.0, at_most=3)
    assert [(other.key, owners(other)) for other in together] == [(key(2), ["a", "b"])]


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 6), min_size=1, max_size=4),
            st.integers(0, 20),
            st.integers(0, 12),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_every_call_ends_once_and_each_of_its_experts_runs_once(
    plan: list[tuple[set[int], int, int, bool]],
) -> None:
    batcher: Batcher[str] = Batcher()
    ran: dict[str, list[ExpertKey]] = {}
    ended: list[str] = []
    arrivals = sorted(enumerate(plan), key=lambda item: item[1][1])
    now = 0
    while arrivals or batcher:
        while arrivals and arrivals[0][1][1] <= now:
            number, (experts, _, patience, cancelled) = arrivals.pop(0)
            item = work(str(number), *experts, deadline=now + patience)
            item.cancelled = cancelled
            batcher.add(item)
        step = batcher.next_step(float(now))
        if isinstance(step, Drop):
            ended.append(step.work.owner)
            assert step.work.cancelled == (step.reason == "cancelled")
        elif step is not None:
            assert step.works
            for item in step.works:
                assert not item.cancelled
                assert now <= item.deadline
                ran.setdefault(item.owner, []).append(step.key)
            ended += [item.owner for item in batcher.done(step)]
        now += 1
    assert sorted(ended, key=int) == [str(number) for number in range(len(plan))]
    for keys in ran.values():
        assert len(keys) == len(set(keys))

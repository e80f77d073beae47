"""The scheduler: which rows a step has, whoever else is there."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.scheduler import Scheduler, SchedulerConfig, Segment, Step
from relay.errors import ConfigError, Refused


def _config(**settings: int) -> SchedulerConfig:
    return SchedulerConfig(
        **{
            "total_blocks": 64, "block_tokens": 4, "chunk_rows": 8, "rowwise_rows": 8, "step_rows": 32,
            "max_running": 8, "max_waiting": 100, **settings,
        }
    )  # fmt: skip


@dataclass
class Driver:
    """Plays model and clients: every request wants a number of tokens; checks each step's bookkeeping."""

    scheduler: Scheduler
    wanted: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    kv: dict[int, int] = field(default_factory=dict)
    first_pass: dict[int, list[tuple[int, int, bool]]] = field(default_factory=dict)
    steps: set[tuple[int, int]] = field(default_factory=set)
    paused: set[int] = field(default_factory=set)

    def add(self, request: int, prompt: int, wanted: int) -> None:
        self.scheduler.check(prompt, wanted)
        self.scheduler.add(request, prompt)
        self.prompts[request], self.wanted[request], self.made[request] = prompt, wanted, 0
        self.first_pass[request] = []

    def run(self) -> Step:
        step = self.scheduler.schedule()
        for request in step.preempted:
            self.kv[request] = 0
        assert len({segment.request for segment in step.segments}) == len(step.segments)
        for segment in step.segments:
            self._check(segment)
        self.scheduler.advance(step.segments)
        held = -sum(-self.kv[r] // self.scheduler.config.block_tokens for r in self.kv)
        held += self.scheduler.config.state_blocks * sum(map(bool, self.kv.values()))
        assert held <= self.scheduler.config.total_blocks - self.scheduler.free_blocks
        for segment in step.segments:
            if segment.samples:
                self.made[segment.request] += 1
                if self.made[segment.request] == self.wanted[segment.request]:
                    self.scheduler.finish(segment.request)
                    self.kv.pop(segment.request)
                else:
                    self.scheduler.append(segment.request)
        return step

    def _check(self, segment: Segment) -> None:
        request = segment.request
        known = self.prompts[request] + self.made[request]
        assert request not in self.paused
        assert segment.start == self.kv.get(request, 0), "positions are computed in order, none twice"
        assert segment.rows >= 1
        assert segment.end <= min(known, segment.capacity)
        assert segment.samples == (segment.end == known)
        assert (request, segment.step) not in self.steps, "a step number never comes again"
        self.steps.add((request, segment.step))
        chunk = self.scheduler.config.chunk_rows
        if segment.start < self.prompts[request]:
            assert segment.start % chunk == 0
            assert segment.end == min(segment.start + chunk, self.prompts[request])
            assert not segment.rowwise
        else:
            assert segment.rowwise
        computed = sum(rows for _, rows, _ in self.first_pass[request])
        assert segment.replayed == max(0, min(computed, segment.end) - segment.start)
        if segment.end > computed:
            self.first_pass[request].append(
                (max(segment.start, computed), segment.end - computed, segment.rowwise)
            )
        self.kv[request] = segment.end

    def drain(self, limit: int = 10_000) -> int:
        """Run until everything is done; the number of steps."""
        for count in range(limit):
            if all(self.made[request] == self.wanted[request] for request in self.wanted):
                return count
            self.run()
        raise AssertionError("some request never ends")


def test_it_never_imports_torch() -> None:
    code = "import kvasir_backbone.scheduler, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_prompt_is_computed_in_chunks_at_multiples() -> None:
    driver = Driver(Scheduler(_config()))
    driver.add(1, 20, 3)
    spans = [(s.start, s.end, s.samples) for _ in range(5) for s in driver.run().segments]
    assert spans == [(0, 8, False), (8, 16, False), (16, 20, True), (20, 21, True), (21, 22, True)]


def test_own_tokens_come_before_prompts_and_a_long_prompt_does_not_stop_them() -> None:
    driver = Driver(Scheduler(_config(step_rows=8)))
    driver.add(1, 3, 20)
    driver.run()
    driver.add(2, 100, 1)
    for _ in range(12):
        step = driver.run()
        assert [segment.request for segment in step.segments] == [1, 2]
        assert step.rows <= 1 + 8


def test_full_blocks_preempt_the_youngest_which_computes_again_in_the_same_pieces() -> None:
    driver = Driver(Scheduler(_config(total_blocks=8)))
    driver.add(1, 9, 20)
    driver.add(2, 9, 20)
    lost = []
    while not lost:
        lost = list(driver.run().preempted)
    assert lost == [2]
    again: list[Segment] = []
    while driver.made[2] < 20:
        again += [segment for segment in driver.run().segments if segment.request == 2]
    replayed = [segment for segment in again if segment.replayed]
    assert [(s.start, s.end, s.rowwise) for s in replayed[:2]] == [(0, 8, False), (8, 9, False)]
    assert all(segment.rowwise for segment in replayed[2:])


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler = Scheduler(_config(total_blocks=4))
    with pytest.raises(ConfigError, match="--kv-bytes"):
        scheduler.check(15, 2)
    scheduler.check(15, 1)
    with pytest.raises(ConfigError):
        scheduler.check(0, 1)


def test_too_many_waiting_are_refused() -> None:
    scheduler = Scheduler(_config(max_waiting=2))
    for request in range(2):
        scheduler.check(4, 4)
        scheduler.add(request, 4)
    with pytest.raises(Refused) as refusal:
        scheduler.check(4, 4)
    assert refusal.value.code == "overloaded"


def test_a_paused_request_neither_runs_nor_blocks_others() -> None:
    driver = Driver(Scheduler(_config(total_blocks=6)))
    driver.add(1, 16, 8)
    driver.run()
    driver.scheduler.pause(1, True)
    driver.paused.add(1)
    driver.add(2, 16, 4)
    while driver.made[2] < 4:
        assert {segment.request for segment in driver.run().segments} == {2}
    assert driver.run().segments == ()
    driver.scheduler.pause(1, False)
    driver.paused.clear()
    driver.drain()


def test_finishing_an_unknown_request_changes_nothing() -> None:
    scheduler = Scheduler(_config())
    scheduler.finish(9)
    assert scheduler.free_blocks == scheduler.config.total_blocks


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_everyone_is_served_and_every_block_comes_back(
    requests: list[tuple[int, int]], room: int, running: int, state: int, seed: int
) -> None:
    blocks = room + state
    driver = Driver(Scheduler(_config(total_blocks=blocks, max_running=running, state_blocks=state)))
    rng = random.Random(seed)
    for number, (prompt, wanted) in enumerate(requests):
        for _ in range(rng.randrange(4)):
            driver.run()
        driver.add(number, prompt, wanted)
        if rng.random() < 0.2:
            victim = rng.randrange(number + 1)
            driver.scheduler.finish(victim)
            driver.kv.pop(victim, None)
            driver.wanted[victim] = driver.made[victim]
    driver.drain()
    assert driver.scheduler.free_blocks == blocks
    assert (driver.scheduler.running, driver.scheduler.waiting) == (0, 0)


@given(st.integers(1, 40), st.integers(1, 24), st.integers(0, 2**32))
def test_how_a_request_is_computed_the_first_time_depends_on_nobody_else(
    prompt: int, wanted: int, seed: int
) -> None:
    alone = Driver(Scheduler(_config()))
    alone.add(0, prompt, wanted)
    alone.drain()
    crowd = Driver(Scheduler(_config(total_blocks=20)))
    rng = random.Random(seed)
    for number in range(1, 6):
        crowd.add(number, rng.randrange(1, 40), rng.randrange(1, 24))
        crowd.run()
    crowd.add(0, prompt, wanted)
    crowd.drain()
    assert crowd.first_pass[0] == alone.first_pass[0]


@dataclass
class Overlapping:
    """Steps that overlap and carry drafts: whatever is in flight stays untouched until it lands."""

    scheduler: Scheduler
    rng: random.Random
    wanted: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    kv: dict[int, int] = field(default_factory=dict)
    out: list[Step] = field(default_factory=list)

    def add(self, request: int, prompt: int, wanted: int) -> None:
        self.scheduler.check(prompt, wanted + 4)
        self.scheduler.add(request, prompt)
        self.lengths[request], self.wanted[request] = prompt, prompt + wanted

    def begin(self) -> bool:
        flying = {segment.request for step in self.out for segment in step.segments}
        share = self.rng.choice([None, 1, 2])
        step = self.scheduler.schedule(
            share, lambda requests, _: {r: self.rng.randrange(5) for r in requests}
        )
        assert not flying & set(step.preempted)
        assert not flying & {segment.request for segment in step.segments}
        for request in step.preempted:
            self.kv[request] = 0
        for segment in step.segments:
            assert self.scheduler.in_flight(segment.request)
            assert segment.start == self.kv.get(segment.request, 0)
            assert segment.end - segment.drafts <= self.lengths[segment.request]
            assert segment.end <= segment.capacity
            assert not segment.drafts or (segment.rowwise and segment.samples and not segment.replayed)
        if step.segments:
            self.out.append(step)
        return bool(step.segments)

    def land(self) -> None:
        step = self.out.pop(self.rng.randrange(len(self.out)))
        for segment in step.segments:
            rejected = self.rng.randrange(segment.drafts + 1)
            self.scheduler.advance([segment], {segment.request: rejected})
            self.kv[segment.request] = segment.end - rejected
            if segment.samples:
                tokens = 1 + segment.drafts - rejected
                self.scheduler.append(segment.request, tokens)
                self.lengths[segment.request] += tokens
            if self.lengths[segment.request] >= self.wanted[segment.request]:
                self.scheduler.finish(segment.request)
                self.kv.pop(segment.request)
        held = sum(-(-self.kv[r] // self.scheduler.config.block_tokens) for r in self.kv)
        assert held <= self.scheduler.config.total_blocks - self.scheduler.free_blocks


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(16, 40),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_steps_may_overlap(requests: list[tuple[int, int]], blocks: int, threads: int, seed: int) -> None:
    scheduler = Scheduler(_config(total_blocks=blocks))
    driver = Overlapping(scheduler, random.Random(seed))
    for number, (prompt, wanted) in enumerate(requests):
        driver.add(number, prompt, wanted)
    for _ in range(5000):
        began = len(driver.out) < threads and driver.begin()
        if not began and driver.out:
            driver.land()
        elif not began and scheduler.running + scheduler.waiting == 0:
            break
    assert (scheduler.running, scheduler.waiting) == (0, 0), "some request never ends"
    assert scheduler.free_blocks == blocks


def test_drafts_never_take_blocks_that_others_need() -> None:
    scheduler = Scheduler(_config(total_blocks=8))
    for request in (1, 2):
        scheduler.add(request, 12)
    while (step := scheduler.schedule()).segments[0].start < 12:
        scheduler.advance(step.segments)
        for segment in step.segments:
            if segment.samples:
                scheduler.append(segment.request)
    scheduler.advance(step.segments)
    for request in (1, 2):
        scheduler.append(request)
    step = scheduler.schedule(None, lambda requests, rows: dict.fromkeys(requests, 30))
    assert [segment.drafts for segment in step.segments] == [2, 2], "what its own block has room for"
    assert step.preempted == ()

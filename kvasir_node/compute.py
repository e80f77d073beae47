"""The compute thread: jobs in, experts run in batches, answers out.

One thread owns the batcher and the experts while a job is in flight. The loop hands a job over through a
queue and gets its outcome by `call_soon_threadsafe`, as soon as the job's last expert has run. A small job
that comes while nothing waits runs in one piece (`whole.py`), all others through the batcher.

Knows jobs, threads and torch. Knows no sessions: a job's peer is carried through untouched.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from relay.errors import Refused

from .batching import Batcher, Drop, ExpertKey, Part, Run, Work
from .calls import Call, Reply
from .holdings import Holding
from .tensors import WIRE_TORCH, bytes_to_floats, bytes_to_rows, partial_sums, rows_to_bytes
from .whole import SMALL_IDS, Placed, asked_twice, not_held, run_whole, runs_whole

if TYPE_CHECKING:
    from .experts import Direct
    from .peers import Peer

log = structlog.get_logger("node")

Outcome = Reply | Refused | None
"""What became of a job; None if it was cancelled."""

Done = Callable[["Job", Outcome], None]


class Job:
    """One accepted call on its way through the compute thread.

    `nbytes` is what it holds of the serving limits: request and answer.
    """

    __slots__ = (
        "_outputs",
        "_rows",
        "call",
        "done",
        "holdings",
        "nbytes",
        "peer",
        "placed",
        "received",
        "row_bytes",
        "work",
    )

    def __init__(
        self,
        peer: Peer,
        call: Call,
        holdings: tuple[Holding, ...],
        row_bytes: int,
        nbytes: int,
        received: float,
    ) -> None:
        self.peer = peer
        self.call = call
        self.holdings = holdings
        self.row_bytes = row_bytes
        self.nbytes = nbytes
        self.received = received
        deadline = received + call.deadline_ms / 1000.0
        self.work: Work[Job] = Work(self, received, deadline, {})
        self.placed: Placed | None = None
        self.done: Done

    def cancel(self) -> None:
        """Nobody waits for this any more."""
        self.work.cancelled = True

    def release(self) -> None:
        """Nothing more is done with it. Job and work refer to each other: what they hold, a whole window
        with it, would otherwise wait for the garbage collector.
        """
        del self.work

    # The rest runs in the compute thread.

    def prepare(self) -> None:
        """Group the ids by expert, view the rows. Raises `Refused` for an expert not held or asked twice."""
        call, plan = self.call, self.holdings[0].experts.plan
        parts: dict[ExpertKey, Part] = {}
        output = 0
        for holding, group in zip(self.holdings, call.groups, strict=True):
            at = 0
            for row, count in enumerate(group.counts):
                for expert in group.ids[at : at + count]:
                    key = (holding, call.layer, expert)
                    part = parts.get(key)
                    if part is None:
                        if not holding.experts.holds(call.layer, expert):
                            raise not_held(holding, call.layer, expert)
                        part = parts[key] = Part()
                    if part.rows and part.rows[-1] >= row:
                        raise asked_twice(row, expert)
                    part.rows.append(row)
                    part.outputs.append(output)
                    output += 1
                at += count
        self.work.parts = parts
        if all(holding.experts.direct is not None for holding in self.holdings):
            self.placed = Placed(call, self.holdings[0])
            return
        self._rows = bytes_to_rows(call.rows, call.row_count, plan.width, plan.wire_dtype).float()
        kept = torch.float32 if call.weights is not None else WIRE_TORCH[plan.wire_dtype]
        self._outputs = torch.empty(output, plan.width, dtype=kept)

    def inputs(self, key: ExpertKey) -> Tensor:
        """The fp32 rows that this job wants `key` to run on."""
        part = self.work.parts[key]
        if len(part.rows) == self._rows.shape[0]:
            return self._rows  # rows rise (see prepare), so these are all of them
        return self._rows[part.rows]

    def store(self, key: ExpertKey, outputs: Tensor) -> None:
        """Put `key`'s fp32 outputs where they belong, rounded to the wire dtype (not yet if weighted)."""
        places = self.work.parts[key].outputs
        if len(places) == 1:
            self._outputs[places[0]].copy_(outputs[0])
        else:
            self._outputs[places] = outputs.to(self._outputs.dtype)

    def reply(self, now: float) -> Reply:
        """The answer, once every expert has run."""
        started = self.work.started if self.work.started is not None else now
        if self.placed is not None:
            rows = self.placed.answer(self.holdings[0].experts.wire_dtype)
        else:
            outputs = self._outputs if self.call.weights is None else self._partial_sums(self.call.weights)
            rows = rows_to_bytes(outputs)
        return make_reply(self.call, rows, self.received, started, now)

    def _partial_sums(self, weights: bytes | bytearray | memoryview) -> Tensor:
        """One row a request row instead of one an id (see `tensors.partial_sums`), rounded once."""
        call, plan = self.call, self.holdings[0].experts.plan
        rows = [row for group in call.groups for row, n in enumerate(group.counts) for _ in range(n)]
        sums = partial_sums(self._outputs, bytes_to_floats(weights, call.id_count), rows, call.row_count)
        return sums.to(WIRE_TORCH[plan.wire_dtype])


def make_reply(call: Call, rows: memoryview, received: float, started: float, now: float) -> Reply:
    """The answer to `call`, whose outputs are `rows`; times of one clock, in seconds."""
    return Reply(
        call.id,
        call.output_count,
        max(0, round((now - started) * 1e6)),
        max(0, round((started - received) * 1e6)),
        rows,
        weighted=call.weights is not None,
    )


class Compute:
    """The thread that runs experts. `start`, then `submit` from that loop, then `stop`.

    `rest_s`, if given, says after each run for how many seconds the thread is to rest (the owner's limit).
    """

    def __init__(self, clock: Callable[[], float], *, rest_s: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._rest_s = rest_s
        self._inbox: queue.SimpleQueue[Job | float | None] = queue.SimpleQueue()
        self._batcher: Batcher[Job] = Batcher()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; outcomes are delivered on `loop`."""
        assert self._thread is None
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="kvasir-compute", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the expert that runs now; jobs that wait get no outcome. Blocks until then."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def submit(self, job: Job, done: Done) -> None:
        """Hand over a job; `done(job, outcome)` is called on the loop, once."""
        job.done = done
        self._inbox.put(job)

    def rest(self, seconds: float) -> None:
        """Have the thread rest: as much was computed elsewhere."""
        self._inbox.put(seconds)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._absorb():
                step = self._batcher.next_step(self._clock())
                if isinstance(step, Drop):
                    self._drop(step.work.owner, step.reason)
                elif step is not None:
                    self._step(step)
                    self._rest()
                del step  # while this thread waits it keeps no window alive

    def _absorb(self) -> bool:
        """Take in every job that waits; blocks while there is nothing to do. False: stop."""
        while True:
            try:
                job = self._inbox.get(block=not self._batcher)
            except queue.Empty:
                return True
            if job is None:
                return False
            if isinstance(job, float):
                time.sleep(job)
                continue
            if not self._batcher and self._inbox.empty() and runs_whole(job.call, job.holdings):
                self._alone(job)
            elif self._guarded((job,), job.prepare):
                self._batcher.add(job.work)
            del job

    def _alone(self, job: Job) -> None:
        """A small job while nothing waits: all of it at once."""
        started = self._clock()
        if job.work.cancelled or started > job.work.deadline:
            self._drop(job, "cancelled" if job.work.cancelled else "expired")
        elif self._guarded((job,), partial(self._run_alone, job, started)):
            self._rest()

    def _run_alone(self, job: Job, started: float) -> None:
        rows = run_whole(job.call, job.holdings)
        self._deliver(job, make_reply(job.call, rows, job.received, started, self._clock()))

    def _drop(self, job: Job, reason: str) -> None:
        late = Refused("expired", "the call's deadline passed before its turn came")
        self._deliver(job, late if reason == "expired" else None)

    def _rest(self) -> None:
        if self._rest_s is not None and (rest := self._rest_s()) > 0:
            time.sleep(rest)

    def _step(self, run: Run[Job]) -> None:
        holding: Holding = run.key[0]  # type: ignore[assignment]
        runs = [run]
        if holding.experts.grouped:
            runs += self._batcher.companions(run, self._clock())
        elif holding.experts.direct is not None:
            runs += self._batcher.companions(run, self._clock(), at_most=SMALL_IDS)
        works = tuple(dict.fromkeys(work for part in runs for work in part.works))
        if not self._guarded([work.owner for work in works], partial(self._run_experts, holding, runs)):
            for work in works:
                self._batcher.abandon(work)
            return
        for part in runs:
            for work in self._batcher.done(part):
                self._guarded((work.owner,), partial(self._answer, work.owner))

    def _answer(self, job: Job) -> None:
        self._deliver(job, job.reply(self._clock()))

    def _guarded(self, jobs: Sequence[Job], act: Callable[[], None]) -> bool:
        """Do something for `jobs`; the boundary at which a fault of ours fails them and no others."""
        try:
            act()
        except Refused as refusal:
            outcome = refusal
        except Exception as error:
            log.exception("batch.failed", layer=jobs[0].call.layer, jobs=len(jobs))
            outcome = Refused("internal", f"the expert failed to run: {error}")
        else:
            return True
        for job in jobs:
            self._deliver(job, outcome)
        return False

    def _run_experts(self, holding: Holding, runs: Sequence[Run[Job]]) -> None:
        """Run one expert, or several of a layer, each for all the jobs that wait for it."""
        if holding.experts.direct is not None:
            _run_direct(holding.experts.direct, runs)
            return
        inputs = [[work.owner.inputs(run.key) for work in run.works] for run in runs]
        rows = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in inputs]
        layer = runs[0].key[1]
        if len(runs) == 1:
            outputs = [holding.experts.run(layer, runs[0].key[2], rows[0])]
        else:
            outputs = holding.experts.run_many(layer, [run.key[2] for run in runs], rows)
        for run, parts, out in zip(runs, inputs, outputs, strict=True):
            at = 0
            for work, part in zip(run.works, parts, strict=True):
                work.owner.store(run.key, out[at : at + part.shape[0]])
                at += part.shape[0]

    def _deliver(self, job: Job, outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(job.done, job, outcome)


def _run_direct(direct: Direct, runs: Sequence[Run[Job]]) -> None:
    """The same in one call of the C core, or in two where only some calls have weights."""
    for kinds in dict.fromkeys(_kinds_of(work) for run in runs for work in run.works):
        experts: list[int] = []
        sizes: list[int] = []
        rows: list[int] = []
        outputs: list[int] = []
        for run in runs:
            before = len(rows)
            for work in run.works:
                placed, part = work.owner.placed, work.parts[run.key]
                if placed is not None and placed.kinds == kinds:
                    rows += [placed.row + row * placed.row_step for row in part.rows]
                    outputs += [placed.output + place * placed.output_step for place in part.outputs]
            if len(rows) > before:
                experts.append(direct.addresses[run.key[1], run.key[2]])
                sizes.append(len(rows) - before)
        direct.kernel.run_rows(experts, sizes, rows, outputs, kinds, direct.scratch)


def _kinds_of(work: Work[Job]) -> tuple[int, int]:
    """What the C core calls the dtypes of a call's rows and outputs."""
    assert work.owner.placed is not None, "prepared for the C core"
    return work.owner.placed.kinds

"""Rows to owners to outputs: carries out what the planner (`flight.py`) decides, for the engine's seam.

`dispatch` blocks its step thread on one queue of facts: replies, failures and timeouts. Messages are made
and replies are checked in that thread; the event loop only moves bytes. Every accepted output is paid by
the credit book and may be audited; a row that could not be computed fails alone. What nobody waits for, such
as paying, is put off until the thread waits for its next reply, or somebody reads the book.

Knows rows, calls and outputs. Knows no sockets (see `Lines`), no market and no router: it returns expert
outputs, and combining them is the engine's.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import structlog
import torch
from torch import Tensor

from kvasir_node import kernels
from kvasir_node.calls import MAX_MESSAGE_BYTES, Buffers, Call, Group, Reply, encode, reply_bytes
from kvasir_node.residual import residual
from kvasir_node.tensors import bytes_to_rows, rows_to_bytes
from market.plans import Plan
from relay.errors import KvasirError, Refused
from relay.identity import PublicKey, address_of

from .audit import NormBand, Sample, limit_of, unfinite_rows
from .comparing import Kept, Rival, rivals_of
from .credit import CreditBook, carried
from .flight import Flight, Instruction, Owner, RunFallback, Send, Trip, WorkerCall, rows_of_a_call
from .pace import MIN_FAILOVER_S, HedgeBudget
from .roster import Replica, Roster
from .seam import DispatchFailed, RowKey
from .whole_flight import WholeFlight

_log = structlog.get_logger("backbone")

MAX_LATE: Final = 4096
"""Given-up calls whose late replies still teach the pace of their device."""

MAX_SUSPECTS: Final = 4
"""Outputs outside the norm band that are recomputed before a reply is taken; the worst are as good as any."""

SENDING_S: Final = 200e-6
"""About what the event loop takes to send a message."""

MAX_OWED: Final = 64
"""Replies whose payment is put off; one more, and all of them are paid at once."""

STALE: Final = frozenset({"stale_epoch", "not_mine"})
"""Refusals that concern the leases of a call and nothing else that the device holds."""

KEEPS_HEALTH: Final = STALE | {"overloaded", "draining"}
"""Refusals that say nothing bad of a device's health."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How one call ended: with a reply, or with a code and why. `at` is the monotonic time of the end."""

    call: int
    at: float
    reply: Reply | None = None
    code: str = "unreachable"
    message: str = ""


class Lines(Protocol):
    """How the dispatcher reaches devices; every method may be called from any thread."""

    def roster(self) -> Roster:
        """The newest roster."""

    def submit(
        self,
        device: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        *,
        answer_bytes: int,
    ) -> None:
        """Send a call; `done` is called exactly once, on the loop's thread or at once.

        `answer_bytes` is the size of the reply: no device may send more than its calls allow.
        """

    def cancel(self, device: PublicKey, call_id: int) -> None:
        """Nobody waits for this call any more; its `done` is still called, once."""

    def tripped(self, device: PublicKey, reason: str) -> None:
        """A device's breaker opened: prove it again before it gets calls."""

    def stale(self, replicas: Sequence[Replica], reason: str) -> None:
        """A device does not know these leases at these epochs: prove them again before they get calls."""


class LocalSource(Protocol):
    """Experts computed here from the checkpoint."""

    def run(self, layer: int, expert: int, rows: Tensor, precision: str = "stored") -> Tensor:
        """`rows` [n, width] in the wire dtype -> outputs [n, width]. Raises `KvasirError` without bytes."""


class Auditor(Protocol):
    """Takes accepted outputs for later recomputation, and hears of replies that were refused outright."""

    def offer(self, replica: Replica, draw: Callable[[random.Random], tuple[Replica, Sample]]) -> None:
        """A valid call of the wallet of `replica`; `draw` picks one of its outputs if one is wanted."""

    def rejected(self, replica: Replica, d: float, sample: Sample) -> None:
        """A reply was rejected before it was used: one of its outputs, `sample`, was off by `d`."""

    def curious(self) -> bool:
        """Whether the loser of one more race should be compared; else its call is given up."""

    def compare(self, rivals: Sequence[Rival], outputs: Tensor) -> None:
        """The loser of a race answered: its outputs [rivals, width] beside the accepted ones."""


@dataclass(slots=True)
class DispatchStats:
    """Counters since the start."""

    dispatches: int = 0
    rows: int = 0
    calls: int = 0
    hedges: int = 0
    redispatched: int = 0
    late: int = 0
    fallback_rows: int = 0
    """Rows of which some experts were computed here, counted once a layer."""
    seconds: float = 0.0
    """Spent in dispatches, over all step threads."""
    service_s: float = 0.0
    """Of what devices say that they computed."""
    outcomes: Counter[str] = field(default_factory=Counter)
    fallback_windows: Counter[str] = field(default_factory=Counter)
    device_calls: Counter[PublicKey] = field(default_factory=Counter)


class OwnerBook:
    """The dispatcher's knowledge of each device, behind one lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owners: dict[PublicKey, Owner] = {}

    def ensure(self, device: PublicKey) -> Owner:
        """The device's entry, made at first sight."""
        with self.lock:
            return self.owners.setdefault(device, Owner())

    def forget(self, device: PublicKey) -> bool:
        """Drop a device's entry, unless calls to it are out."""
        with self.lock:
            owner = self.owners.get(device)
            if owner is not None and owner.pace.outstanding:
                return False
            self.owners.pop(device, None)
            return True


@dataclass(slots=True)
class _Run:
    """One running dispatch: its inputs, outputs and queue of facts."""

    flight: Flight
    layer: int
    rows: Tensor
    k: int
    metered: list[bool]
    deadline: float
    facts: queue.SimpleQueue[CallEnd]
    weights: Tensor | None = None
    """[n * k] fp32 where the swarm combines (see `weighting.py`)."""
    sums: dict[int, tuple[Sequence[int], Tensor]] = field(default_factory=dict)
    """What was combined so far, by the first of its parts: the rows, and one partial sum for each."""
    _out: Tensor | None = None

    @property
    def slots(self) -> int:
        """Rows of `out`."""
        return self.rows.shape[0] * (self.k if self.weights is None else 1)

    @property
    def out(self) -> Tensor:
        """What comes out, row by row: made where the first of several parts is put."""
        if self._out is None:
            self._out = torch.empty(self.slots, self.rows.shape[1], dtype=self.rows.dtype)
        return self._out

    def put(self, slots: Sequence[int], outputs: Tensor) -> None:
        """Outputs to their places; where they are all of them, nothing is copied."""
        if len(slots) == self.slots:
            self._out = outputs if outputs.dtype == self.rows.dtype else outputs.to(self.rows.dtype)
        elif slots[-1] - slots[0] + 1 == len(slots):
            self.out[slots[0] : slots[-1] + 1] = outputs
        else:
            self.out[torch.tensor(slots)] = outputs.to(self.rows.dtype)

    def result(self) -> Tensor:
        """The outputs as the seam has them: [n, k, width], or combined [n, width]."""
        if self.weights is not None:
            return self.out
        return self.out.view(self.rows.shape[0], self.k, self.rows.shape[1])


class SwarmDispatcher:
    """Implements `seam.Dispatcher` over `lines`. Safe to call from several step threads.

    Without `fallback` windows that have no live owner fail. `max_message_bytes` bounds what one call, or its
    reply, may take on the wire.
    """

    def __init__(
        self,
        plan: Plan,
        lines: Lines,
        *,
        owners: OwnerBook,
        book: CreditBook,
        band: NormBand,
        reference: LocalSource | None,
        fallback: bool,
        min_failover_s: float = MIN_FAILOVER_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        auditor: Auditor | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = DispatchStats()
        self._plan = plan
        self._lines = lines
        self._book = owners
        self._credit = book
        self._band = band
        self._reference = reference
        self._fallback = fallback and reference is not None
        self._min_failover_s = min_failover_s
        self._max_message_bytes = max_message_bytes
        self._windows = Counter(
            layer for window in plan.windows for layer in range(window.layer_start, window.layer_end)
        )
        self._auditor = auditor
        self._rng = rng or random.Random()
        self._clock = clock
        self._ids = itertools.count(1)
        self._hedges = HedgeBudget()
        self._late: dict[int, tuple[WorkerCall, float]] = {}
        self._kept = Kept()
        self._sent: dict[int, float] = {}
        self._demand: Counter[int] = Counter()
        self._owed: deque[Callable[[], None]] = deque()
        self._settling = threading.Lock()
        book.before_reading = self.settle
        self._blocks: dict[tuple[int, int, bool], int] = {}
        self._chatty = _log.is_enabled_for(logging.DEBUG)

    # --- the seam ------------------------------------------------------------------------------------

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `seam.Dispatcher.dispatch`."""
        run = self._prepare(layer, rows, ids.tolist(), keys, deadline_s)
        self._fly(run)
        if run.flight.failed:
            raise self._failure(run)
        return run.result()

    def _fly(self, run: _Run) -> None:
        """From the first instructions to the end of every part."""
        flight, started = run.flight, self._clock()
        with self._book.lock:
            self.stats.dispatches += 1
            self.stats.rows += len(run.metered)
            for part in flight.parts:
                self._demand[part.window] += len(part.rows)
            todo = flight.start(started)
        while True:
            self._carry_out(run, todo)
            if flight.done:
                break
            todo = self._wait(run)
        self._finish(run, started)

    def _prepare(
        self,
        layer: int,
        rows: Tensor,
        ids: list[list[int]],
        keys: Sequence[RowKey],
        deadline_s: float,
        weights: Tensor | None = None,
    ) -> _Run:
        n, k = len(ids), len(ids[0])
        assert rows.shape[0] == n == len(keys)
        deadline = self._clock() + deadline_s
        weighted = weights is not None
        flight = (WholeFlight if weighted else Flight)(
            self._lines.roster(),
            layer,
            ids,
            owners=self._book.owners,
            hedges=self._hedges,
            next_call=self.next_call,
            rng=self._rng,
            fallback=self._fallback,
            deadline=deadline,
            min_failover_s=self._min_failover_s,
            block=self._block(layer, k, weighted),
        )
        metered = [key.metered for key in keys]
        return _Run(flight, layer, rows, k, metered, deadline, queue.SimpleQueue(), weights)

    def _block(self, layer: int, k: int, weighted: bool) -> int:
        """Rows of one call of `layer` at most."""
        found = self._blocks.get((layer, k, weighted))
        if found is None:
            found = self._blocks[layer, k, weighted] = rows_of_a_call(
                self._plan.row_bytes,
                k,
                self._windows[layer],
                max_bytes=self._max_message_bytes,
                weighted=weighted,
            )
        return found

    def _wait(self, run: _Run) -> list[Instruction]:
        """The next fact, and what the planner makes of it."""
        try:
            end = self._next_fact(run)
        except queue.Empty:
            with self._book.lock:
                todo = run.flight.handle_timeout(self._clock(), self._lines.roster())
            for given_up in run.flight.take_given_up():
                self._lines.cancel(given_up.device, given_up.id)
            return todo
        call = run.flight.call(end.call)
        if call is None:
            return []
        reason, code = end.message, end.code
        if not self._honoured(call) and (end.reply is not None or code in STALE):
            reason, code = "the lease ended or its epoch moved on while the call was out", "stale_epoch"
        elif code in STALE and end.reply is None:
            self._lines.stale([replica for replica, _ in call.groups], f"{code}: {reason}")
        elif end.reply is not None:
            outputs, reason = self._read(run, call, end.reply)
            if outputs is not None:
                return self._accept(run, call, outputs, end.at)
            code = "rejected"
        self._note_failure(call, code, reason)
        with self._book.lock:
            return run.flight.got_failure(call.id, self._clock())

    def _next_fact(self, run: _Run) -> CallEnd:
        """The next fact, waited for until the planner's next deadline. Raises `queue.Empty`.

        What is owed is done meanwhile: not at once, since the event loop has the message to send first, and
        only one thread of a process runs Python.
        """
        pause = run.flight.next_deadline() - self._clock()
        if pause <= 0:
            return run.facts.get_nowait()
        if self._owed and pause > SENDING_S:
            try:
                return run.facts.get(timeout=SENDING_S)
            except queue.Empty:
                self.settle()
                pause = max(0.0, run.flight.next_deadline() - self._clock())
        return run.facts.get(timeout=pause)

    # --- calls ---------------------------------------------------------------------------------------

    def _honoured(self, call: WorkerCall) -> bool:
        """Whether every lease of the call still stands: only the backbone enforces epochs."""
        honoured = self._lines.roster().honoured
        return all([(replica.lease, replica.epoch) in honoured for replica, _ in call.groups])

    def _carry_out(self, run: _Run, todo: Sequence[Instruction]) -> None:
        for item in todo:
            if isinstance(item, Send):
                self._send(run, item.call)
            elif isinstance(item, Trip):
                self._trip(item.device, item.reason)
                with self._book.lock:
                    self.stats.outcomes["late"] += 1
        for item in todo:  # after the messages are out, so that workers compute meanwhile
            if isinstance(item, RunFallback):
                self._run_fallback(run, item.parts)

    def _send(self, run: _Run, call: WorkerCall) -> None:
        everything = len(call.rows) == run.rows.shape[0]
        rows = run.rows if everything else run.rows[torch.tensor(call.rows)]
        left_ms = int(1000 * max(0.001, min(run.deadline - self._clock(), 600.0)))
        message = encode(
            Call(
                id=call.id,
                layer=run.layer,
                row_count=len(call.rows),
                deadline_ms=left_ms,
                groups=tuple([make_group(each, call, run.flight, index) for each, index in call.groups]),
                rows=rows_to_bytes(rows if rows.is_contiguous() else rows.contiguous()),
                weights=self._weights_of(run, call),
            )
        )
        with self._book.lock:
            self.stats.calls += 1
            self.stats.device_calls[call.device] += 1
            self._sent[call.id] = self._clock()
        self._lines.submit(
            call.device,
            call.id,
            message,
            partial(self._deliver, run.facts),
            answer_bytes=reply_bytes(_reply_rows(run, call), self._plan.row_bytes),
        )

    def _weights_of(self, run: _Run, call: WorkerCall) -> memoryview | None:
        """The combine weights that the call carries, in the order of its ids; None where it carries none."""
        return None

    def _deliver(self, facts: queue.SimpleQueue[CallEnd], end: CallEnd) -> None:
        """On the loop's thread: hand a fact to its step thread; a given-up call's reply only teaches."""
        with self._book.lock:
            self._sent.pop(end.call, None)
            late = self._late.pop(end.call, None)
            if end.reply is not None:
                self.stats.service_s += end.reply.service_us * 1e-6
            if late is None:
                facts.put(end)
                return
            rivals = self._kept.take(end.call, self._clock())
            if end.reply is None and end.code != "expired":
                return
            call, sent_at = late
            owner = self._book.owners.get(call.device)
            if owner is not None:  # a cancelled call would have taken longer than this
                owner.pace.observe_late(call.outputs, end.at - sent_at)
            if end.reply is None:
                return
            self.stats.late += 1
        if rivals:
            self._compare_late(call, rivals, end.reply)

    def _read(self, run: _Run, call: WorkerCall, reply: Reply) -> tuple[Tensor | None, str]:
        """The reply's rows [outputs, width], or None and why it is not usable."""
        width, count = run.rows.shape[1], _reply_rows(run, call)
        try:
            if reply.weighted != (run.weights is not None) or reply.outputs != count:
                kind = "partial sums" if reply.weighted else "outputs"
                raise ValueError(f"{reply.outputs} {kind} where {count} were asked for")
            outputs = bytes_to_rows(reply.rows, count, width, self._plan.wire_dtype)
        except (KvasirError, ValueError) as error:
            return None, str(error)
        reason = self._check_suspects(run, call, outputs)
        return (outputs, "") if reason is None else (None, reason)

    def _check_suspects(self, run: _Run, call: WorkerCall, outputs: Tensor) -> str | None:
        """Recompute outputs that are not finite or far out of the norm band; why the reply is wrong, or None.

        An output that is not finite here either is the model's doing, not the worker's.
        """
        if self._all_within(run, call, outputs):
            return None
        row_of, expert_of, replica_of = reply_order(call, run.flight)
        rows = run.rows[torch.tensor(row_of)]
        broken = unfinite_rows(outputs)
        suspects = broken or self._band.suspects(run.layer, rows, outputs)
        for place in suspects[:MAX_SUSPECTS]:
            replica = replica_of[place]
            row = rows[place].unsqueeze(0)
            try:
                expected = self._recompute(run.layer, expert_of[place], row, replica.precision)
            except KvasirError:  # no bytes here: what is not finite is refused, the rest left to audits
                return "the reply has values that are not finite" if broken else None
            if not bool(torch.isfinite(expected).all()):
                continue
            d = float(residual(outputs[place].unsqueeze(0), expected).max())
            if d > limit_of(replica.numerics, replica.precision):
                reason = f"an output of expert {expert_of[place]} of layer {run.layer} was wrong: d = {d:.3g}"
                if self._auditor is not None:
                    output = outputs[place].clone()
                    sample = Sample(run.layer, expert_of[place], row[0].clone(), output, call=call.id)
                    self._auditor.rejected(replica, d, sample)
                return reason
            self._band.learn(run.layer, row, expected)
        return None

    def _all_within(self, run: _Run, call: WorkerCall, outputs: Tensor) -> bool:
        """Whether the C core finds nothing to look at; False where it is absent or knows no such rows."""
        kernel = kernels.loaded()
        if kernel is None or outputs.dtype not in kernels.ROW_KINDS or run.rows.dtype != outputs.dtype:
            return False
        low, high = self._band.bounds(run.layer)
        rows = run.rows if run.rows.is_contiguous() else run.rows.contiguous()
        if len(call.groups) == 1 and call.outputs == run.rows.shape[0] * run.k:
            return kernel.all_within(rows, outputs, low, high, each=run.k)
        return kernel.all_within(rows, outputs, low, high, row_of=reply_order(call, run.flight)[0])

    def _recompute(self, layer: int, expert: int, row: Tensor, precision: str) -> Tensor:
        if self._reference is None:
            raise Refused("not_found", "the backbone has no bytes of its own")
        return self._reference.run(layer, expert, row, precision)

    def _accept(self, run: _Run, call: WorkerCall, outputs: Tensor, at: float) -> list[Instruction]:
        flight = run.flight
        with self._book.lock:
            taken = flight.got_reply(call.id, at)
            todo = flight.stranded(at)
            self.stats.outcomes["completed" if taken else "hedge_lost"] += 1
        self._store(run, call, outputs, taken)
        if self._auditor is not None:
            if taken:
                self._auditor.offer(call.groups[0][0], self._drawer(run, call, outputs, taken))
            if len(taken) < len(call.groups) and self._auditor.curious():
                self._compare(self._rivals(run, call), outputs)
        weighted = run.weights is not None
        self._owed.append(partial(self._pay, call, flight, taken, run.metered, at, weighted=weighted))
        if len(self._owed) > MAX_OWED:
            self.settle()
        return todo

    def settle(self) -> None:
        """Do what was put off. Safe to call from any thread."""
        with self._settling:  # who reads the book next waits for what another thread has begun to pay
            while self._owed:
                self._owed.popleft()()

    def _pay(
        self,
        call: WorkerCall,
        flight: Flight,
        taken: Collection[int],
        metered: Sequence[bool],
        at: float,
        *,
        weighted: bool,
    ) -> None:
        """What a reply earned with the parts `taken` from it, into the book."""
        shares = carried(call, flight.parts, taken, metered, self._plan.row_bytes, weighted=weighted)
        if shares:
            self._credit.pay(call.device, call.id, call.layer, shares, at)
        if self._chatty:
            _log.debug(
                "call.returned",
                outcome="completed" if taken else "hedge_lost",
                device=address_of(call.device),
                layer=call.layer,
                rows=len(call.rows),
                outputs=call.outputs,
                bytes=sum(share.nbytes for share in shares),
            )

    def _store(self, run: _Run, call: WorkerCall, outputs: Tensor, taken: Collection[int]) -> None:
        """Put the outputs of the parts taken where they belong."""
        if len(call.groups) == 1:
            if taken:
                run.put(run.flight.parts[call.groups[0][1]].slots, outputs)
            return
        start = 0
        for _, index in call.groups:
            part = run.flight.parts[index]
            stop = start + len(part.slots)
            if index in taken:
                run.put(part.slots, outputs[start:stop])
            start = stop

    def _drawer(
        self, run: _Run, call: WorkerCall, outputs: Tensor, taken: Collection[int]
    ) -> Callable[[random.Random], tuple[Replica, Sample]]:
        """Picks one taken output of a call at random, copied so that nothing else keeps the reply alive."""

        def draw(rng: random.Random) -> tuple[Replica, Sample]:
            return draw_output(call, run.flight, taken, run.rows, outputs, rng)

        return draw

    def _rivals(self, run: _Run, call: WorkerCall) -> tuple[Rival, ...]:
        """Some of the outputs of a call that lost its race, for comparison with what was accepted."""
        return rivals_of(call, run.flight, run.out, run.rows, self._rng)

    def _compare(self, rivals: Sequence[Rival], outputs: Tensor) -> None:
        if rivals and self._auditor is not None:
            self._auditor.compare(rivals, outputs[[rival.place for rival in rivals]])

    def _compare_late(self, call: WorkerCall, rivals: Sequence[Rival], reply: Reply) -> None:
        """On the loop's thread: the loser of a race answered when its dispatch was over."""
        weighted = rivals[0].sample.weights is not None
        count = len(call.rows) if weighted else call.outputs
        if reply.outputs != count or reply.weighted != weighted or not self._honoured(call):
            return
        with suppress(KvasirError):  # rows of the wrong size: of no use, and nothing hangs on them
            self._compare(rivals, bytes_to_rows(reply.rows, count, self._plan.width, self._plan.wire_dtype))

    def _note_failure(self, call: WorkerCall, code: str, reason: str) -> None:
        with self._book.lock:
            self.stats.outcomes[code] += 1
        _log.warning(
            "call.returned",
            outcome=code,
            device=address_of(call.device),
            layer=call.layer,
            rows=len(call.rows),
            outputs=call.outputs,
            bytes=0,
            reason=reason,
        )
        if code not in KEEPS_HEALTH:
            self._trip(call.device, reason or code)

    def _trip(self, device: PublicKey, reason: str) -> None:
        with self._book.lock:
            owner = self._book.owners.get(device)
            if owner is not None:
                owner.breaker.trip(self._clock(), reason)
        self._lines.tripped(device, reason)

    # --- the fallback --------------------------------------------------------------------------------

    def _run_fallback(self, run: _Run, parts: Sequence[int]) -> None:
        assert self._reference is not None
        done: set[int] = set()
        for index in parts:
            part = run.flight.parts[index]
            name = self._plan.windows[part.window].name
            try:
                self._compute_here(run, index)
            except KvasirError as error:
                run.flight.got_fallback_failure(index, f"window {name} has no live owner, and {error}")
                continue
            run.flight.got_fallback((index,))
            done.update(part.rows)
            with self._book.lock:
                self.stats.fallback_windows[name] += len(part.rows)
        with self._book.lock:
            self.stats.fallback_rows += len(done)

    def _compute_here(self, run: _Run, index: int) -> None:
        assert self._reference is not None
        part = run.flight.parts[index]
        wanted: dict[int, tuple[list[int], list[int]]] = {}
        slots = iter(part.slots)
        for row, ids in zip(part.rows, part.ids, strict=True):
            for expert in ids:
                places = wanted.setdefault(expert, ([], []))
                places[0].append(row)
                places[1].append(next(slots))
        for expert, (rows, slots_of) in sorted(wanted.items()):
            run.out[slots_of] = self._reference.run(run.layer, expert, run.rows[rows])

    # --- the end -------------------------------------------------------------------------------------

    def _finish(self, run: _Run, started: float) -> None:
        now = self._clock()
        unwanted: list[WorkerCall] = []
        with self._book.lock:
            self.stats.seconds += now - started
            self.stats.redispatched += run.flight.redispatched
            self.stats.hedges = self._hedges.hedges
            for call in run.flight.abandon(now):
                sent_at = self._sent.pop(call.id, None)
                if sent_at is not None:
                    self._late[call.id] = (call, sent_at)
                    wanted = self._auditor is not None and self._auditor.curious()
                    rivals = self._rivals(run, call) if wanted else ()
                    self._kept.keep(call.id, rivals, now)
                    if not rivals:  # its reply would teach nothing but its time
                        unwanted.append(call)
            while len(self._late) > MAX_LATE:
                del self._late[next(iter(self._late))]
        for call in unwanted:
            self._lines.cancel(call.device, call.id)

    def _failure(self, run: _Run) -> DispatchFailed:
        flight = run.flight
        rows = {row for index in flight.failed for row in flight.parts[index].rows}
        windows = {self._plan.windows[flight.parts[index].window].name for index in flight.failed}
        reason = next(iter(flight.failed.values()))
        return DispatchFailed(
            f"{reason}: start a node that can hold it (kvasir-backbone gaps shows what is missing)",
            rows=rows,
            window=windows.pop() if len(windows) == 1 else "",
            outputs=run.result(),
        )

    # --- what others read ----------------------------------------------------------------------------

    def next_call(self) -> int:
        """A call id that was never used before and never will be again."""
        return next(self._ids)

    def forget(self, device: PublicKey) -> None:
        """Drop the counts of a device that is gone."""
        with self._book.lock:
            self.stats.device_calls.pop(device, None)

    def take_demand(self) -> Mapping[str, int]:
        """Rows routed to each window since the last call, by the window's name."""
        with self._book.lock:
            taken, self._demand = self._demand, Counter()
        return {self._plan.windows[number].name: rows for number, rows in taken.items()}


def make_group(replica: Replica, call: WorkerCall, flight: Flight, index: int) -> Group:
    """The group of one part in its call: a count for every row of the call, and the ids."""
    part = flight.parts[index]
    ids = tuple(itertools.chain.from_iterable(part.ids))
    if len(part.rows) == len(call.rows):  # a part's rows are among its call's
        return Group(replica.ref, tuple(map(len, part.ids)), ids)
    counts = dict(zip(part.rows, map(len, part.ids), strict=True))
    return Group(replica.ref, tuple(counts.get(row, 0) for row in call.rows), ids)


def reply_order(call: WorkerCall, flight: Flight) -> tuple[list[int], list[int], list[Replica]]:
    """For every output of a reply, in order: its dispatched row, its expert and its replica."""
    rows: list[int] = []
    experts: list[int] = []
    replicas: list[Replica] = []
    for replica, index in call.groups:
        part = flight.parts[index]
        for row, ids in zip(part.rows, part.ids, strict=True):
            rows.extend([row] * len(ids))
            experts.extend(ids)
            replicas.extend([replica] * len(ids))
    return rows, experts, replicas


def _reply_rows(run: _Run, call: WorkerCall) -> int:
    """Rows that the reply to `call` must hold."""
    return call.outputs if run.weights is None else len(call.rows)


def draw_output(
    call: WorkerCall,
    flight: Flight,
    taken: Collection[int],
    rows: Tensor,
    outputs: Tensor,
    rng: random.Random,
) -> tuple[Replica, Sample]:
    """One output of the parts `taken` from a reply, drawn by `rng`, each as likely as any other.

    `rows` [n, width] are the dispatch's, `outputs` [outputs, width] the reply's.
    """
    left = rng.randrange(sum(len(flight.parts[index].slots) for index in taken))
    start = 0
    for replica, index in call.groups:
        part = flight.parts[index]
        if index in taken and left < len(part.slots):
            output = outputs[start + left].clone()
            for row, ids in zip(part.rows, part.ids, strict=True):
                if left < len(ids):
                    asked, hidden = tuple(ids), rows[row].clone()
                    return replica, Sample(call.layer, ids[left], hidden, output, asked, call=call.id)
                left -= len(ids)
        left -= len(part.slots) if index in taken else 0
        start += len(part.slots)
    raise AssertionError("a part that was taken has outputs")

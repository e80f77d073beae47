"""The dispatch planner and the life of one dispatch: which worker gets which rows, and what if it fails.

Theory of operation. A dispatch is the rows of one layer with the expert ids chosen for each. `split` cuts
it into *parts*, one for each window touched; a part goes to one replica as a whole. `assign` chooses a
replica for every part by least expected finish and gathers the parts of one device into one message. A
dispatch of more rows than one message may carry is cut into *blocks* of rows first, at the same rows in
every window: a worker then gets one message for each block, and still no row twice. A `Flight` then follows
the dispatch to its end: facts go in (a reply came, a call failed, time passed), and instructions come out
(send this call, run these parts from the checkpoint, open that breaker).

    part:     PENDING --reply accepted / fallback ran--> DONE
              PENDING --no owner, no bytes, or deadline--> FAILED
    attempt:  sent -> (p95 passed: hedge at another replica, within the budget)
                   -> (failover time passed, refused, lost or rejected: next replica, fallback last)

Each output is accepted exactly once, from whichever attempt is first; everything else is late and earns
nothing. Sources: Dean and Barroso, "The Tail at Scale" (2013), for hedging after the p95.

Pure: time and randomness are arguments. Knows no sockets, no threads and no tensors.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvasir_node.calls import MAX_CALL_IDS, MAX_CALL_ROWS, MAX_MESSAGE_BYTES, call_bytes, reply_bytes
from relay.identity import PublicKey

from .pace import MIN_FAILOVER_S, Breaker, HedgeBudget, Pace
from .roster import Replica, Roster

NEAR_BEST: Final = 1.25
"""Replicas whose expected finish is within this factor of the best share the calls at random."""

FALLBACK_PATIENCE: Final = 3.0
"""Where only the fallback could take over, a call is given up after this times the shortest failover time.

Another owner costs a message; the fallback costs this machine's disk and processor, which every request
shares, and it opens the breaker of the window's only owner, so that all calls for that window come here until
it is proven again. One late packet on a home link is not worth that. Still under a second: 3 x 250 ms."""

RETRY_S: Final = 0.25
"""Where there are no bytes to fall back on, a part that every owner failed is tried again after this."""


@dataclass(slots=True)
class Owner:
    """What the dispatcher knows of one device."""

    pace: Pace = field(default_factory=Pace)
    breaker: Breaker = field(default_factory=Breaker)


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one block of a dispatch's rows that lies in one window.

    `rows` are indices into the dispatched rows, ascending; `ids[i]` the experts of `rows[i]` in this
    window; `slots` their places in the flattened [n * k] outputs, in the order of a reply: row by row, and
    in a row by id as given. Where one window has all of it, rows and slots are ranges.
    """

    window: int
    rows: Sequence[int]
    ids: Sequence[Sequence[int]]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """One message to one worker: its unique rows, and a group of ids for each lease it serves.

    `rows` are indices into the dispatched rows, ascending; `groups` pairs the replica with the part's
    index. The outputs of the reply are the parts' slots in the order of `groups`.
    """

    id: int
    device: PublicKey
    layer: int
    rows: Sequence[int]
    groups: tuple[tuple[Replica, int], ...]
    outputs: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send this call to its device."""

    call: WorkerCall


@dataclass(frozen=True, slots=True)
class RunFallback:
    """Compute these parts from the checkpoint."""

    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trip:
    """Open the device's breaker: it missed a deadline."""

    device: PublicKey
    reason: str


Instruction = Send | RunFallback | Trip


def rows_of_a_call(
    row_bytes: int,
    k: int,
    windows: int,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
    max_cells: int = MAX_CALL_IDS,
    weighted: bool = False,
) -> int:
    """How many rows any one call of a layer may carry, at least 1.

    `row_bytes` is the size of a row on the wire, `k` the experts of a row, `windows` the layer's windows: a
    worker that owns all of them still gets a request, and sends a reply, of at most `max_bytes`, and no call
    has more than `max_cells` ids, or rows times groups. A `weighted` call has a weight an id, and its reply
    one row a row.
    """
    fixed = call_bytes(0, [0] * windows, row_bytes) + 32
    request = (max_bytes - fixed) // (row_bytes + 2 * windows + (6 if weighted else 2) * k)
    reply = (max_bytes - reply_bytes(0, row_bytes)) // (row_bytes * (1 if weighted else k))
    return max(1, min(request, reply, max_cells // max(k, windows), MAX_CALL_ROWS))


def split(
    owners: Sequence[int], ids: Sequence[Sequence[int]], block: int = MAX_CALL_ROWS
) -> tuple[Part, ...]:
    """Cut a dispatch into parts, by block of `block` rows and in it by window number.

    `owners[expert]` is the expert's window; `ids[row]` the k experts chosen for the row.
    """
    found: dict[tuple[int, int], tuple[list[int], list[list[int]], list[int]]] = {}
    slot = 0
    for row, chosen in enumerate(ids):
        for expert in chosen:
            key = (row // block, owners[expert])
            part = found.get(key)
            if part is None:
                part = found[key] = ([], [], [])
            if not part[0] or part[0][-1] != row:
                part[0].append(row)
                part[1].append([])
            part[1][-1].append(expert)
            part[2].append(slot)
            slot += 1
    return tuple(
        Part(window, tuple(rows), tuple(map(tuple, experts)), tuple(slots))
        for (_, window), (rows, experts, slots) in sorted(found.items())
    )


def assign(
    parts: Sequence[tuple[int, Part]],
    candidates: Mapping[int, Sequence[Replica]],
    owners: Mapping[PublicKey, Owner],
    rng: random.Random,
) -> dict[PublicKey, list[tuple[Replica, int]]]:
    """Choose a replica for every part, largest part first, by least expected finish.

    `candidates[index]` are the replicas that may be asked for that part, at least one. Among those within
    `NEAR_BEST` of the best, one that gets a message anyway is preferred, else one is drawn.
    """
    if len(parts) == 1 and len(candidates[parts[0][0]]) == 1:
        index = parts[0][0]
        return {candidates[index][0].device: [(candidates[index][0], index)]}
    load: dict[PublicKey, int] = {}
    chosen: dict[PublicKey, list[tuple[Replica, int]]] = {}
    for index, part in sorted(parts, key=lambda item: (-len(item[1].slots), item[0])):
        outputs = len(part.slots)
        finish = [
            (owners[replica.device].pace.finish_s(load.get(replica.device, 0) + outputs), replica)
            for replica in candidates[index]
        ]
        best = min(seconds for seconds, _ in finish)
        near = [replica for seconds, replica in finish if seconds <= NEAR_BEST * best]
        used = [replica for replica in near if replica.device in load]
        replica = used[0] if used else near[0] if len(near) == 1 else rng.choice(near)
        load[replica.device] = load.get(replica.device, 0) + outputs
        chosen.setdefault(replica.device, []).append((replica, index))
    return chosen


@dataclass(slots=True)
class _Attempt:
    call: WorkerCall
    sent_at: float
    hedge_at: float
    failover_at: float
    hedge: bool
    late: bool = False


class Flight:
    """One dispatch from its start to its end. See the module docstring.

    `owners` is shared with the dispatcher and must have an entry for each connected replica's device;
    `next_call` gives call ids that never come again. `fallback` says whether parts can be computed here.
    `block` is how many rows one message may carry (`rows_of_a_call`). The caller carries out the
    instructions, in order.
    """

    def __init__(
        self,
        roster: Roster,
        layer: int,
        ids: Sequence[Sequence[int]],
        *,
        owners: Mapping[PublicKey, Owner],
        hedges: HedgeBudget,
        next_call: Callable[[], int],
        rng: random.Random,
        fallback: bool,
        deadline: float,
        min_failover_s: float = MIN_FAILOVER_S,
        block: int = MAX_CALL_ROWS,
    ) -> None:
        self.layer = layer
        whole = roster.windows.whole(layer)
        if whole is not None and len(ids) <= block:
            self.parts: tuple[Part, ...] = (Part(whole, range(len(ids)), ids, range(len(ids) * len(ids[0]))),)
        else:
            self.parts = split(roster.windows.owners(layer), ids, block)
        self.deadline = deadline
        self.accepted: dict[int, WorkerCall | None] = {}
        """Part -> the call whose reply was taken; None where the fallback ran."""
        self.failed: dict[int, str] = {}
        """Part -> why it could not be computed."""
        self.redispatched = 0
        """Parts that were given to another owner, or the fallback, after an attempt failed."""
        self._roster = roster
        self._owners = owners
        self._hedges = hedges
        self._next_call = next_call
        self._rng = rng
        self._fallback = fallback
        self._min_failover_s = min_failover_s
        self._block = block
        self._attempts: dict[int, _Attempt] = {}
        self._tried: defaultdict[int, set[PublicKey]] = defaultdict(set)
        self._retry_at: dict[int, float] = {}
        self._given_up: list[WorkerCall] = []

    @property
    def done(self) -> bool:
        """Whether every part is computed or failed."""
        return len(self.accepted) + len(self.failed) == len(self.parts)

    def call(self, call_id: int) -> WorkerCall | None:
        """The call of that id while its reply is still awaited."""
        attempt = self._attempts.get(call_id)
        return None if attempt is None else attempt.call

    def start(self, now: float) -> list[Instruction]:
        """The first instructions."""
        if len(self.parts) == 1:  # most dispatches, and nothing to choose in them
            replicas = self._roster.of(self.parts[0].window)
            owner = self._owners.get(replicas[0].device) if len(replicas) == 1 else None
            if owner is not None and replicas[0].connected and not owner.breaker.is_open:
                call = self._make_call(replicas[0].device, ((replicas[0], 0),))
                self._begin(call, now, hedge=False)
                return [Send(call)]
        return self._place(range(len(self.parts)), now, hedge=False)

    def got_reply(self, call_id: int, now: float) -> tuple[int, ...]:
        """A good reply came: take it. Returns the indices of the parts taken from it, maybe none."""
        attempt = self._end(call_id, now, answered=True)
        if attempt is None:
            return ()
        taken = tuple(index for _, index in attempt.call.groups if self._pending(index))
        for index in taken:
            self.accepted[index] = attempt.call
            self._retry_at.pop(index, None)
        return taken

    def stranded(self, now: float) -> list[Instruction]:
        """After a reply: what must be placed again because of what was taken. Here never anything."""
        return []

    def got_failure(self, call_id: int, now: float) -> list[Instruction]:
        """A call was refused, lost or its reply rejected: give its parts to others."""
        attempt = self._end(call_id, now, answered=False)
        return [] if attempt is None else self._place_again(attempt, now)

    def got_fallback(self, parts: Iterable[int]) -> None:
        """These parts were computed here."""
        for index in parts:
            if self._pending(index):
                self.accepted[index] = None

    def got_fallback_failure(self, part: int, reason: str) -> None:
        """The checkpoint cannot give that part."""
        if self._pending(part):
            self.failed[part] = reason

    def next_deadline(self) -> float:
        """When `handle_timeout` must be called next, at the latest."""
        times = [self.deadline]
        for attempt in self._attempts.values():
            if not attempt.late:
                times.append(min(attempt.hedge_at, attempt.failover_at))
        times.extend(self._retry_at.values())
        return min(times)

    def handle_timeout(self, now: float, roster: Roster) -> list[Instruction]:
        """Time has passed: hedge, fail over, try again or give up. `roster` is the newest."""
        self._roster = roster
        instructions: list[Instruction] = []
        if now >= self.deadline:
            return self._give_up(now)
        again = [index for index, at in self._retry_at.items() if now >= at]
        for index in again:
            del self._retry_at[index]
            self._tried[index].clear()
        instructions += self._place(again, now, hedge=False)
        for attempt in list(self._attempts.values()):
            if now >= attempt.failover_at and not attempt.late:
                instructions += self._fail_over(attempt, now)
            elif now >= attempt.hedge_at:
                attempt.hedge_at = float("inf")
                instructions += self._hedge(attempt, now)
        return instructions

    def abandon(self, now: float) -> list[WorkerCall]:
        """The dispatch is over: forget the attempts still out (their replies are late), and return them."""
        calls = [attempt.call for attempt in self._attempts.values()]
        for call in calls:
            self._end(call.id, now, answered=False)
        return calls

    def take_given_up(self) -> list[WorkerCall]:
        """The calls given up since this was asked last, their time being over: nobody waits for them."""
        taken, self._given_up = self._given_up, []
        return taken

    # --- placing parts -------------------------------------------------------------------------------

    def _pending(self, index: int) -> bool:
        return index not in self.accepted and index not in self.failed

    def _candidates(self, index: int, *, broken: bool) -> list[Replica]:
        return [
            replica
            for replica in self._roster.of(self.parts[index].window)
            if replica.connected
            and replica.device not in self._tried[index]
            and replica.device in self._owners
            and (broken or not self._owners[replica.device].breaker.is_open)
        ]

    def _place(self, indices: Iterable[int], now: float, *, hedge: bool) -> list[Instruction]:
        """Give each part to an owner; what has none goes to the fallback, waits, or fails."""
        candidates: dict[int, list[Replica]] = {}
        here: list[int] = []
        for index in indices:
            found = self._candidates(index, broken=False)
            if not found and not self._fallback and not hedge:
                found = self._candidates(index, broken=True)
            if found:
                candidates[index] = found
            elif not hedge:
                here.append(index)
        instructions: list[Instruction] = self._send(candidates, now, hedge=hedge)
        if here and self._fallback:
            instructions.append(RunFallback(tuple(here)))
        elif here:
            self._wait_or_fail(here, now)
        return instructions

    def _send(self, candidates: Mapping[int, list[Replica]], now: float, *, hedge: bool) -> list[Instruction]:
        instructions: list[Instruction] = []
        chosen = assign(
            [(index, self.parts[index]) for index in candidates], candidates, self._owners, self._rng
        )
        for device, groups in chosen.items():
            if len(groups) == 1:
                call = self._make_call(device, tuple(groups))
                self._begin(call, now, hedge=hedge)
                instructions.append(Send(call))
                continue
            groups.sort(key=lambda group: group[1])
            for _, batch in itertools.groupby(
                groups, lambda group: self.parts[group[1]].rows[0] // self._block
            ):
                call = self._make_call(device, tuple(batch))
                self._begin(call, now, hedge=hedge)
                instructions.append(Send(call))
        return instructions

    def _make_call(self, device: PublicKey, groups: tuple[tuple[Replica, int], ...]) -> WorkerCall:
        """A message for parts of one block, each of another window: no row and no lease comes twice."""
        if len(groups) == 1:
            part = self.parts[groups[0][1]]
            return WorkerCall(self._next_call(), device, self.layer, part.rows, groups, len(part.slots))
        rows = sorted({row for _, index in groups for row in self.parts[index].rows})
        outputs = sum(len(self.parts[index].slots) for _, index in groups)
        return WorkerCall(self._next_call(), device, self.layer, tuple(rows), groups, outputs)

    def _begin(self, call: WorkerCall, now: float, *, hedge: bool) -> None:
        pace = self._owners[call.device].pace
        p95, failover = pace.patience_s(call.outputs + pace.outstanding, self._min_failover_s)
        self._attempts[call.id] = _Attempt(
            call,
            sent_at=now,
            hedge_at=float("inf") if hedge else now + p95,
            failover_at=now + failover,
            hedge=hedge,
        )
        pace.begin(call.outputs)
        if not hedge:
            self._hedges.count_call()
        for _, index in call.groups:
            self._tried[index].add(call.device)

    def _wait_or_fail(self, indices: Iterable[int], now: float) -> None:
        for index in indices:
            if any(index in self._parts_of(attempt) for attempt in self._attempts.values()):
                continue
            if not self._roster.of(self.parts[index].window):
                self.failed[index] = self._no_bytes(index)
            else:
                self._retry_at[index] = now + RETRY_S

    def _no_bytes(self, index: int) -> str:
        name = self._roster.windows.windows[self.parts[index].window].name
        return f"window {name} has no live owner and the backbone has no bytes for it"

    # --- attempts ------------------------------------------------------------------------------------

    @staticmethod
    def _parts_of(attempt: _Attempt) -> tuple[int, ...]:
        return tuple(index for _, index in attempt.call.groups)

    def _end(self, call_id: int, now: float, *, answered: bool) -> _Attempt | None:
        attempt = self._attempts.pop(call_id, None)
        if attempt is not None:
            elapsed = max(0.0, now - attempt.sent_at) if answered else None
            self._owners[attempt.call.device].pace.end(attempt.call.outputs, elapsed)
        return attempt

    def _place_again(self, attempt: _Attempt, now: float) -> list[Instruction]:
        elsewhere = {index for other in self._attempts.values() for index in self._parts_of(other)}
        orphans = [i for i in self._parts_of(attempt) if self._pending(i) and i not in elsewhere]
        self.redispatched += len(orphans)
        return self._place(orphans, now, hedge=False)

    def _fail_over(self, attempt: _Attempt, now: float) -> list[Instruction]:
        """The call missed its time. Without anyone else to ask it may still be answered."""
        waited = now - attempt.sent_at
        patience = FALLBACK_PATIENCE * self._min_failover_s
        wanted = [index for index in self._parts_of(attempt) if self._pending(index)]
        others = any(self._candidates(index, broken=False) for index in wanted)
        if not others and self._fallback and waited < patience:
            attempt.failover_at, attempt.hedge_at = attempt.sent_at + patience, float("inf")
            return []
        trip: list[Instruction] = [
            Trip(attempt.call.device, f"no reply within {waited:.2f} s to a call of layer {self.layer}")
        ]
        if not self._fallback and not others:
            attempt.late = True
            return trip
        self._given_up.append(attempt.call)
        return trip + self.got_failure(attempt.call.id, now)

    def _hedge(self, attempt: _Attempt, now: float) -> list[Instruction]:
        wanted = [index for index in self._parts_of(attempt) if self._pending(index)]
        able = [index for index in wanted if self._candidates(index, broken=False)]
        if not able or len(able) < len(wanted) or not self._hedges.take():
            return []
        placed = self._place(able, now, hedge=True)
        self._hedges.more(len(placed) - 1)
        return placed

    def _give_up(self, now: float) -> list[Instruction]:
        """The dispatch's deadline: the fallback for what is missing, or failure."""
        missing = [index for index in range(len(self.parts)) if self._pending(index)]
        instructions: list[Instruction] = []
        for call in self.abandon(now):
            self._given_up.append(call)
            instructions.append(Trip(call.device, f"no reply before the deadline of layer {self.layer}"))
        self._retry_at.clear()
        if self._fallback:
            return [*instructions, RunFallback(tuple(missing))]
        for index in missing:
            name = self._roster.windows.windows[self.parts[index].window].name
            self.failed[index] = f"no owner of window {name} answered in time"
        return instructions

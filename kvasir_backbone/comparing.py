"""Lost races as checks that cost no recompute: two wallets gave the same outputs, or one of them is wrong.

When a hedge and its original both answer, one reply is combined and paid; some outputs of the other are
compared with it. A loser often comes when its dispatch is over, so a few of the accepted outputs are kept
for a while. Which outputs are compared is drawn here in secret, and neither device knows of the race.

Two honest replicas differ by at most what each may be off from the true output: rounding and kernels (the
limit of its numerics class) and, where one keeps its weights at another precision, what quantising them
changed. The bound on their difference follows from the triangle inequality, since d is a squared relative
distance. More than that says that one of the two is wrong, and not which: that is for a recompute, or for a
third wallet.

Pure, on torch: time and randomness are arguments. Knows calls and outputs. Knows no threads and no verdicts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvasir_node.residual import residual

from .audit import Sample, limit_of
from .flight import Flight, WorkerCall
from .roster import Replica

MAX_OUTPUTS: Final = 16
"""Outputs of one lost race that are compared."""

MAX_KEPT: Final = 64
"""Lost races whose loser has not answered yet."""

KEPT_S: Final = 30.0
"""How long its reply is waited for, in seconds."""

QUANTISED: Final = {"stored": 0.0, "bf16": 2e-5, "int8": 2e-3, "int4": 0.3}
"""The largest d between a replica of a precision and one as stored, to be expected of honest ones. Too
large costs nothing but a check: audits recompute at the replica's own precision."""

SUM_SLACK: Final = 4.0
"""Partial sums may differ by this times as much: outputs that cancel make their rounding weigh more."""


@dataclass(frozen=True, slots=True)
class Rival:
    """One output that two replicas of distinct wallets were asked for.

    `sample` has the `winner`'s output, which was accepted; `place` is where the `loser`'s reply has its
    own. Of a partial sum `precisions` are those of each expert's replica at the loser. `call` is the loser's.
    """

    place: int
    loser: Replica
    winner: Replica
    sample: Sample
    precisions: tuple[str, ...] = ()
    call: int = 0


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two outputs for one (row, expert) further apart than two honest replicas can be: by `d`."""

    rival: Rival
    output: Tensor
    d: float


def pair_limit(first: Replica, second: Replica, *, summed: bool = False) -> float:
    """The largest d between honest outputs of the two; of their partial sums if `summed`."""
    reach = math.sqrt(limit_of(first.numerics, first.precision))
    reach += math.sqrt(limit_of(second.numerics, second.precision))
    if first.precision != second.precision:
        reach += sum(math.sqrt(QUANTISED.get(each.precision, 1.0)) for each in (first, second))
    return reach**2 * (SUM_SLACK if summed else 1.0)


def rivals_of(
    call: WorkerCall,
    flight: Flight,
    accepted: Tensor,
    rows: Tensor,
    rng: random.Random,
) -> tuple[Rival, ...]:
    """Up to `MAX_OUTPUTS` outputs of a call that another wallet's reply was accepted for, drawn by `rng`.

    `accepted` [slots, width] are the dispatch's outputs, `rows` [n, width] its rows; what is kept is copied.
    """
    found = list(_shared(call, flight))
    if not found:
        return ()
    chosen = [found[number] for number in sorted(rng.sample(range(len(found)), min(MAX_OUTPUTS, len(found))))]
    outputs = accepted[[slot for _, slot, *_ in chosen]].unbind()
    hidden = rows[[row for _, _, row, *_ in chosen]].unbind()
    return tuple(
        Rival(
            place, loser, winner, Sample(call.layer, expert, of, output, tuple(ids), call=won), call=call.id
        )
        for (place, _, _, ids, expert, loser, winner, won), of, output in zip(
            chosen, hidden, outputs, strict=True
        )
    )


_Shared = tuple[int, int, int, Sequence[int], int, Replica, Replica, int]
"""An output that two wallets were asked for: its place in the loser's reply, its slot, row, the row's ids
there and its expert, loser and winner, and the id of the winner's call."""


def _shared(call: WorkerCall, flight: Flight) -> Iterator[_Shared]:
    """The outputs of `call` for which another wallet's reply was accepted, in the order of its reply."""
    start = 0
    for loser, index in call.groups:
        part, won = flight.parts[index], flight.accepted.get(index)
        winner = None if won is None else next(each for each, number in won.groups if number == index)
        if won is not None and winner is not None and winner.wallet != loser.wallet:
            places = itertools.count(start)
            slots = iter(part.slots)
            for row, ids in zip(part.rows, part.ids, strict=True):
                for expert in ids:
                    yield next(places), next(slots), row, ids, expert, loser, winner, won.id
        start += len(part.slots)


def disagreements(rivals: Sequence[Rival], outputs: Tensor) -> list[Disagreement]:
    """Those of the rivals whose losers said something else. `outputs` [rivals, width] is what they said."""
    accepted = torch.stack([rival.sample.output for rival in rivals])
    if torch.equal(outputs, accepted):  # most are the same bits
        return []
    distances: list[float] = residual(outputs, accepted).tolist()  # at once: each by itself costs ten times
    return [
        Disagreement(rival, output, d)
        for rival, output, d in zip(rivals, outputs, distances, strict=True)
        if d > pair_limit(rival.loser, rival.winner, summed=rival.sample.weights is not None)
    ]


class Kept:
    """What the losers of races that are over should agree with, by call id. Its owner has a lock."""

    def __init__(self, *, most: int = MAX_KEPT, seconds: float = KEPT_S) -> None:
        self._most, self._seconds = most, seconds
        self._kept: OrderedDict[int, tuple[float, tuple[Rival, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, call_id: int, rivals: tuple[Rival, ...], now: float) -> None:
        """Keep them until the call answers; the oldest give way, and those whose time is over."""
        if rivals:
            self._kept[call_id] = (now + self._seconds, rivals)
        while self._kept:
            until, _ = next(iter(self._kept.values()))
            if len(self._kept) <= self._most and now < until:
                break
            self._kept.popitem(last=False)

    def take(self, call_id: int, now: float) -> tuple[Rival, ...]:
        """What the call's reply is to be compared with; nothing where it is too late for that."""
        until, rivals = self._kept.pop(call_id, (now, ()))
        return rivals if now < until else ()

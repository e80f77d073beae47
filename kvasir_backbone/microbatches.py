"""Into how many micro-batches the running requests are split, so that one computes while another waits.

A step computes (attention, routers, output layer) and waits (for experts elsewhere). Two half batches hide
each other's computing behind each other's waiting, but pay the fixed part of a step twice. With a step of
`busy` and `waited` seconds, and a half batch that costs about three quarters of the whole one, one batch
takes busy + waited, two take the larger of 1.5 busy and 0.75 (busy + waited): two are faster from waited =
busy / 2 on. Where experts run in this process nothing waits, and one batch is best.

Knows seconds and counts. Knows no threads, no requests and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

WEIGHT: Final = 0.1
"""Share of the newest step in the running averages."""
MARGIN: Final = 1.25
"""How far past a bound the measured ratio must be before the number of micro-batches changes."""


@dataclass(slots=True)
class StepPace:
    """What steps cost lately: seconds of computing and of waiting for experts, and the split that follows."""

    busy_s: float = 0.0
    waited_s: float = 0.0
    batches: int = 1
    steps: int = 0

    def observe(self, busy_s: float, waited_s: float) -> None:
        """One step computed for `busy_s` seconds (processor time) and waited for `waited_s`."""
        weight = max(WEIGHT, 1 / (self.steps + 1))
        self.busy_s += weight * (busy_s - self.busy_s)
        self.waited_s += weight * (waited_s - self.waited_s)
        self.steps += 1

    def split(self, ready: int, threads: int) -> int:
        """How many micro-batches to keep going with `ready` running requests on `threads` step threads."""
        self.batches = split(self.busy_s, self.waited_s, self.batches)
        return max(1, min(self.batches, ready, threads))


def split(busy_s: float, waited_s: float, now: int = 1) -> int:
    """The best number of micro-batches for steps like these; `now` is kept near a bound."""
    if busy_s <= 0.0:
        return max(1, now)
    ratio = waited_s / busy_s
    at_least, at_most = _count(ratio / MARGIN), _count(ratio * MARGIN)
    return min(max(now, at_least), at_most)


def share(ready: int, batches: int) -> int | None:
    """How many running requests one of `batches` micro-batches takes; None: all there are."""
    return None if batches <= 1 else max(1, math.ceil(ready / batches))


def _count(ratio: float) -> int:
    """One batch up to waited = busy / 2, and one more for every `busy` beyond that."""
    return 1 + math.floor(min(ratio, 1e6) + 0.5)

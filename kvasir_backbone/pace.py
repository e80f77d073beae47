"""What real calls say about the speed and health of one device: latency by call size, and a breaker.

A device's health is known only from calls it answered or failed to answer; nothing here pings. Sizes are
counted in outputs, one for each (row, expert) of a call, in buckets by powers of two, since a prefill
call of 2,000 outputs says little about a decode call of 8.

Pure: time is an argument, in seconds of one monotonic clock. Knows no device, socket or tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final

FIRST_GUESS_S: Final = 0.25
"""What a call is expected to take while its device has answered none."""

WINDOW: Final = 64
"""Latencies remembered in each size bucket, for the p95."""

SMOOTHING: Final = 0.2
"""Weight of the newest latency in the moving average."""

MIN_FAILOVER_S: Final = 0.25
"""No call is given up before this time (design section 10)."""

FIRST_COOLING_S: Final = 0.1
"""How long after the first missed deadline a breaker is tried again; it doubles with each further one."""

LONGEST_COOLING_S: Final = 30.0
"""Bound of that doubling."""


@dataclass(slots=True)
class _Bucket:
    mean_s: float
    recent: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)
    """The same, ascending: kept so, since every dispatch asks for the p95."""

    def add(self, elapsed_s: float) -> None:
        if len(self.recent) == WINDOW:
            del self.ordered[bisect_left(self.ordered, self.recent.popleft())]
        self.recent.append(elapsed_s)
        insort(self.ordered, elapsed_s)

    def p95(self) -> float:
        return self.ordered[min(len(self.ordered) - 1, math.ceil(0.95 * len(self.ordered)) - 1)]


class Pace:
    """Latency of one device by call size, and how much is outstanding there."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self.outstanding = 0
        """Outputs asked for and not yet answered, failed or given up."""
        self.calls = 0
        """Calls answered."""

    def begin(self, outputs: int) -> None:
        """Note a call of that many outputs as sent."""
        self.outstanding += outputs

    def end(self, outputs: int, elapsed_s: float | None) -> None:
        """Note that a call ended: answered after `elapsed_s` seconds, or never (None)."""
        self.outstanding = max(0, self.outstanding - outputs)
        if elapsed_s is not None:
            self.observe(outputs, elapsed_s)

    def observe(self, outputs: int, elapsed_s: float) -> None:
        """Learn from one answered call."""
        self.calls += 1
        bucket = self._buckets.get(outputs.bit_length())
        if bucket is None:
            bucket = self._buckets[outputs.bit_length()] = _Bucket(elapsed_s)
        bucket.mean_s += SMOOTHING * (elapsed_s - bucket.mean_s)
        bucket.add(elapsed_s)

    def observe_late(self, outputs: int, elapsed_s: float) -> None:
        """Learn from a call that was answered after it had been given up.

        A device that stood still says nothing of its pace by how long it stood, and one such latency would
        keep calls away from it, or keep them waiting for it, long after. So it counts as twice the p95 at
        most; a device that has become slow for good is known as such after a few of them all the same.
        """
        self.observe(outputs, min(elapsed_s, max(2 * self.p95_s(outputs), MIN_FAILOVER_S / 4)))

    def expected_s(self, outputs: int) -> float:
        """Expected latency of a call of that many outputs, nothing else outstanding."""
        found = self._nearest(outputs)
        return FIRST_GUESS_S if found is None else found[0].mean_s * found[1]

    def finish_s(self, outputs: int) -> float:
        """Expected time to finish such a call, behind what is outstanding at the device now."""
        return self.expected_s(outputs + self.outstanding)

    def p95_s(self, outputs: int) -> float:
        """The 95th percentile of the latency of such calls; twice the expectation while unknown."""
        found = self._nearest(outputs)
        if found is None:
            return 2 * FIRST_GUESS_S
        bucket, factor = found
        if len(bucket.recent) < 8:
            return max(2 * bucket.mean_s, bucket.p95()) * factor
        return bucket.p95() * factor

    def failover_s(self, outputs: int, floor_s: float = MIN_FAILOVER_S) -> float:
        """After this many seconds a call counts as failed: max(4 x p95, 250 ms)."""
        return max(4 * self.p95_s(outputs), floor_s)

    def patience_s(self, outputs: int, floor_s: float = MIN_FAILOVER_S) -> tuple[float, float]:
        """(`p95_s`, `failover_s`) of such a call."""
        p95 = self.p95_s(outputs)
        return p95, max(4 * p95, floor_s)

    def _nearest(self, outputs: int) -> tuple[_Bucket, float] | None:
        """The bucket whose calls are most alike, and the factor to scale its latency by (1 or more).

        From a smaller call the latency is taken to grow with the number of outputs at most; from a larger
        call it is taken as it is, an upper bound.
        """
        if not self._buckets:
            return None
        wanted = outputs.bit_length()
        exact = self._buckets.get(wanted)
        if exact is not None:
            return exact, 1.0
        number = min(self._buckets, key=lambda other: (abs(other - wanted), other))
        return self._buckets[number], float(2 ** max(0, wanted - number))


class Breaker:
    """Whether calls may go to a device: closed, or open until it has answered a proving call.

    One missed deadline or lost session opens it. It never closes by time alone: after `retry_at` the
    swarm makes a proving call through the real path, and only its right answer closes the breaker.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.retry_at = 0.0
        self.reason = ""
        self._cooling_s = FIRST_COOLING_S

    def trip(self, now: float, reason: str) -> None:
        """Open it; every further trip before a success doubles the cooling time."""
        if self.is_open and now < self.retry_at:
            return
        self.is_open = True
        self.reason = reason
        self.retry_at = now + self._cooling_s
        self._cooling_s = min(2 * self._cooling_s, LONGEST_COOLING_S)

    def reconnected(self, now: float) -> None:
        """A new session with the device: an open breaker may be tried at once."""
        if self.is_open:
            self.retry_at = now

    def succeed(self) -> None:
        """A real call gave the right answer."""
        self.is_open = False
        self.reason = ""
        self._cooling_s = FIRST_COOLING_S


class HedgeBudget:
    """Caps hedged calls at a share of all calls."""

    def __init__(self, share: float = 0.05) -> None:
        self.share = share
        self.calls = 0
        self.hedges = 0

    def count_call(self) -> None:
        """Note one first attempt."""
        self.calls += 1

    def take(self) -> bool:
        """Whether one more hedge stays within the share; if so it is counted."""
        if self.hedges + 1 > self.share * self.calls:
            return False
        self.hedges += 1
        return True

    def more(self, calls: int) -> None:
        """A hedge took so many calls more than one, to several devices: later ones pay for them."""
        self.hedges += max(0, calls)

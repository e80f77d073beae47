"""Which expert runs next, and for whom: one batch per expert across callers, the oldest call first.

A call is done when all its experts have run. The next expert is always one that the oldest call still
needs, and it runs for every call that waits for it, so calls that arrive while others compute join them.

Decides only. Knows no torch, no threads and no sockets; time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Owner = TypeVar("Owner")

ExpertKey = tuple[Hashable, int, int]
"""(whose weights, layer, expert)."""


@dataclass(slots=True)
class Part:
    """What one call wants from one expert: row numbers in the call, and where each output goes."""

    rows: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Work(Generic[Owner]):
    """One call waiting for its experts. Times are seconds of one monotonic clock.

    `cancelled` may be set at any time, from any thread: nothing more is computed for it.
    """

    owner: Owner
    received: float
    deadline: float
    parts: dict[ExpertKey, Part]
    cancelled: bool = False
    started: float | None = None


@dataclass(frozen=True, slots=True)
class Run(Generic[Owner]):
    """Run expert `key` once, for all of `works`."""

    key: ExpertKey
    works: tuple[Work[Owner], ...]


@dataclass(frozen=True, slots=True)
class Drop(Generic[Owner]):
    """Give up on `work`: its caller is gone, or its deadline has passed."""

    work: Work[Owner]
    reason: Literal["cancelled", "expired"]


class Batcher(Generic[Owner]):
    """The calls that wait, oldest first, and the experts they wait for."""

    def __init__(self) -> None:
        self._works: dict[Work[Owner], None] = {}
        self._waiting: dict[ExpertKey, list[Work[Owner]]] = {}

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Work[Owner]) -> None:
        """A call arrived; it wants at least one expert."""
        assert work.parts
        self._works[work] = None
        for key in work.parts:
            self._waiting.setdefault(key, []).append(work)

    def next_step(self, now: float) -> Run[Owner] | Drop[Owner] | None:
        """What to do next; None if nothing waits. A `Run` must be followed by `done` or `abandon`."""
        for work in self._works:
            reason = _fault(work, now)
            if reason is not None:
                self.abandon(work)
                return Drop(work, reason)
            key = next(iter(work.parts))
            works = tuple(other for other in self._waiting[key] if _fault(other, now) is None)
            for other in works:
                other.started = now if other.started is None else other.started
            return Run(key, works)
        return None

    def companions(
        self, run: Run[Owner], now: float, *, at_most: int | None = None
    ) -> tuple[Run[Owner], ...]:
        """The other experts of the run's layer and weights that its oldest call waits for.

        They may run together with `run`; each must then be followed by `done` or `abandon`, as `run` itself.
        With `at_most` only so many that all of them, and `run`, have no more than that many rows together.
        """
        oldest = run.works[0]
        keys = [key for key in oldest.parts if key[:2] == run.key[:2] and key != run.key]
        runs = []
        size = _size(run.key, run.works)
        for key in keys:
            works = tuple(work for work in self._waiting[key] if _fault(work, now) is None)
            size += _size(key, works)
            if at_most is not None and size > at_most:
                break
            for work in works:
                work.started = now if work.started is None else work.started
            if works:
                runs.append(Run(key, works))
        return tuple(runs)

    def done(self, run: Run[Owner]) -> tuple[Work[Owner], ...]:
        """The run's outputs are in place. Returns the calls that are complete with it, oldest first."""
        complete = []
        for work in run.works:
            del work.parts[run.key]
            self._forget(run.key, work)
            if not work.parts:
                del self._works[work]
                complete.append(work)
        return tuple(complete)

    def abandon(self, work: Work[Owner]) -> None:
        """Take a call out, whatever it still waits for."""
        del self._works[work]
        for key in work.parts:
            self._forget(key, work)

    def _forget(self, key: ExpertKey, work: Work[Owner]) -> None:
        waiting = self._waiting[key]
        waiting.remove(work)
        if not waiting:
            del self._waiting[key]


def _fault(work: Work[Owner], now: float) -> Literal["cancelled", "expired"] | None:
    if work.cancelled:
        return "cancelled"
    return "expired" if now > work.deadline else None


def _size(key: ExpertKey, works: tuple[Work[Owner], ...]) -> int:
    """Rows that these calls want from that expert."""
    return sum(len(work.parts[key].rows) for work in works)

"""Unix time that does not jump: a machine's clock may be set while daemons run.

Tickets and certificates are checked against this. A jump of the system's clock counts only once it has stood
for a while, so a wrong correction that is taken back at once drops nobody; small corrections count at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TOLERATED_S = 5.0
"""Smaller steps are followed at once."""

SETTLE_S = 60.0
"""A larger step is believed after it has stood for so long."""


class SteadyClock:
    """Call it for Unix seconds. `wall` may jump; `steady` only runs on."""

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._wall, self._steady, self._settle_s = wall, steady, settle_s
        self._offset = wall() - steady()
        self._jumped_at: float | None = None
        self._jumped_by = 0.0

    def __call__(self) -> float:
        now = self._steady()
        offset = self._wall() - now
        step = offset - self._offset
        if abs(step) <= TOLERATED_S:
            self._offset, self._jumped_at = offset, None
        elif self._jumped_at is None or abs(step - self._jumped_by) > TOLERATED_S:
            self._jumped_at, self._jumped_by = now, step
        elif now - self._jumped_at >= self._settle_s:
            self._offset, self._jumped_at = offset, None
        return now + self._offset

"""How much auditing the backbone can afford: a controller from CPU seconds to a sampling rate.

All of a wallet's first calls are audited; after that a share of its calls, which falls where audits would
take more than their share of this process's CPU time, and never below a floor. Two rules over the CPU time
of the last while (older times fade):

    affordable = share x (CPU seconds a valid call) / (CPU seconds an audit)
    over the share already: the floor, until older times have faded

So a busy backbone with large experts audits less often, and says so: `rate` is what was really drawn.

Pure: CPU times are arguments, in seconds of one rising count. Knows no wallets, threads or experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.0075
"""The part of the process's CPU time that audits may take. The promise is 1 %; the rest is for what a figure
that is measured afterwards is off by."""

FLOOR: Final = 0.002
"""This share of a wallet's calls is audited whatever it costs."""

MEMORY_S: Final = 30.0
"""CPU seconds of the process after which what happened counts for 1/e."""


GRAIN_S: Final = 0.02
"""Smaller steps of the process's CPU time are taken together."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What audits took lately. `rate` audits a valid call, `cpu_share` of the process's CPU time."""

    rate: float
    cpu_share: float


class AuditBudget:
    """See the module docstring. Not safe to use from several threads: its owner has a lock."""

    def __init__(
        self,
        started_s: float = 0.0,
        *,
        share: float = SHARE,
        floor: float = FLOOR,
        memory_s: float = MEMORY_S,
    ) -> None:
        self._share, self._floor, self._memory_s = share, floor, memory_s
        self._process_s = started_s
        self._cpu_s = 0.0
        self._audit_s = 0.0
        self._calls = 0.0
        self._drawn = 0.0
        self._audits = 0.0

    def call(self, process_s: float) -> None:
        """One more valid call; `process_s` is the process's CPU time now."""
        self._calls += 1.0
        passed = process_s - self._process_s
        if passed < GRAIN_S:
            return
        self._process_s = process_s
        kept = math.exp(-passed / self._memory_s)
        self._cpu_s = self._cpu_s * kept + passed
        self._audit_s *= kept
        self._calls *= kept
        self._drawn *= kept
        self._audits *= kept

    def drawn(self) -> None:
        """One call was chosen to be audited."""
        self._drawn += 1.0

    def spent(self, cpu_s: float, *, audits: int = 1) -> None:
        """So many audits took so many CPU seconds together; 0 of them: a lost race was compared."""
        self._audits += audits
        self._audit_s += cpu_s

    def afford(self, wanted: float) -> float:
        """The rate to draw at where trust asks for `wanted`; 1.0, a wallet's first calls, stays 1.0."""
        if wanted >= 1.0 or not self._audit_s:
            return wanted
        if self._audit_s > self._share * self._cpu_s:
            return min(wanted, self._floor)
        if not self._audits or not self._calls:
            return wanted
        affordable = self._share * (self._cpu_s / self._calls) / (self._audit_s / self._audits)
        return min(wanted, max(affordable, self._floor))

    @property
    def allows_comparison(self) -> bool:
        """Whether a lost race may be compared: up to half of the share goes to that, so that audits have
        the rest."""
        return self._audit_s <= self._share / 2 * self._cpu_s

    def spending(self) -> Spending:
        """What was really drawn and spent lately."""
        return Spending(
            self._drawn / self._calls if self._calls else 0.0,
            self._audit_s / self._cpu_s if self._cpu_s else 0.0,
        )

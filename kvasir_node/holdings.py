"""What a device serves: a window's experts under a lease, and the count of what was served.

Knows leases and counts. Knows no sessions and no queue.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from market.plans import PlanId

from .experts import WindowExperts


@dataclass(slots=True)
class Served:
    """What was served: whole numbers, rising only.

    `carried_bytes` counts as credit does (design section 12): unique request rows and reply rows times the
    row's bytes, plus 2 bytes an id. The backbone's own count is the one that pays.
    """

    calls: int = 0
    rows: int = 0
    outputs: int = 0
    carried_bytes: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def fields(self) -> dict[str, object]:
        """For a log line or a status page."""
        return {
            "calls": self.calls,
            "rows": self.rows,
            "outputs": self.outputs,
            "carried_bytes": self.carried_bytes,
            "refusals": dict(self.refusals),
        }


@dataclass(slots=True, eq=False)
class Holding:
    """One lease in service. `served` counts calls that named it and the outputs it owed them.

    `id_s` is what one id (a row through an expert) took here lately, in seconds; 0 while nothing is known.
    """

    lease: bytes
    epoch: int
    plan: PlanId
    experts: WindowExperts
    draining: bool = False
    served: Served = field(default_factory=Served)
    id_s: float = 0.0

    def took(self, seconds: float) -> None:
        """One id of a call took `seconds`."""
        self.id_s = seconds if not self.id_s else self.id_s + 0.1 * (seconds - self.id_s)

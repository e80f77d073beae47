"""Demand and supply of windows: how many replicas each should have, and what is scarcest.

scarcity = max(0, target - supply) / target. The target starts at `base_target` and follows, with hysteresis,
the demand measured for the window and the losses measured in the swarm.

Pure: figures in, figures and sentences out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .plans import PlanId
from .windows import Window


@dataclass(frozen=True, slots=True)
class ScarcityRules:
    """How targets are set.

    `rows_per_replica` is the rows a second that one replica is meant to carry; `recovery_s` how long a lost
    replica takes to be noticed and replaced; `loss_goal` the accepted chance that some window loses all its
    replicas within that time; `demand_tau_s` the time constant of the demand average, in seconds.
    """

    base_target: int = 2
    max_target: int = 8
    rows_per_replica: float = 500.0
    hysteresis: float = 0.8
    recovery_s: float = 120.0
    loss_goal: float = 1e-6
    demand_tau_s: float = 60.0


def decayed(rate: float, elapsed_s: float, tau_s: float) -> float:
    """An average that nobody has fed for `elapsed_s`."""
    return rate * math.exp(-max(elapsed_s, 0.0) / tau_s)


def averaged(rate: float, measured: float, elapsed_s: float, tau_s: float) -> float:
    """The exponentially weighted average of a rate, `elapsed_s` after its last update."""
    kept = math.exp(-max(elapsed_s, 0.0) / tau_s)
    return rate * kept + measured * (1.0 - kept)


def loss_chance(losses: float, exposure_s: float, recovery_s: float) -> float:
    """The chance that a replica is lost within the recovery time.

    `losses` over `exposure_s` replica-seconds are measured; a day of exposure without loss is assumed
    beforehand, so that a young swarm does not panic at its first loss.
    """
    return 1.0 - math.exp(-recovery_s * losses / (exposure_s + 86_400.0))


def replicas_against_loss(chance: float, windows: int, goal: float) -> int:
    """The smallest r with chance^r x windows < goal; 1 where nothing is ever lost."""
    if chance <= 0.0 or windows <= 0:
        return 1
    if chance >= 1.0:
        return 1 << 30
    return max(1, math.floor(math.log(goal / windows) / math.log(chance)) + 1)


def next_target(current: int, *, demand: float, chance: float, windows: int, rules: ScarcityRules) -> int:
    """The target after new measurements: it rises at once, and falls only when it clearly may.

    `demand` in rows a second, `chance` from `loss_chance`, `windows` how many the plan has.
    """

    def wanted(demand: float, chance: float) -> int:
        carried = math.ceil(demand / rules.rows_per_replica)
        safe = replicas_against_loss(min(chance, 1.0), windows, rules.loss_goal)
        return min(max(rules.base_target, carried, safe), rules.max_target)

    now = wanted(demand, chance)
    if now > current:
        return now
    return min(current, wanted(demand / rules.hysteresis, chance / rules.hysteresis))


@dataclass(frozen=True, slots=True)
class WindowNeed:
    """One window's place in the market.

    `kept_bytes` maps each allowed precision to the bytes a device keeps; `networks` are those of its
    replicas; `demand` is in rows a second.
    """

    plan: PlanId
    window: Window
    target: int
    proven: int
    loading: int
    demand: float
    download_bytes: int
    kept_bytes: Mapping[str, int]
    wire_dtype: str
    formulas: frozenset[str] = frozenset()
    networks: frozenset[str] = field(default=frozenset())

    @property
    def supply(self) -> int:
        """Replicas that work or will soon."""
        return self.proven + self.loading

    @property
    def scarcity(self) -> float:
        """From 0 (enough) to 1 (none)."""
        return max(0, self.target - self.supply) / self.target

    @property
    def reason(self) -> str:
        """Why the window is scarce or not, for a person."""
        loading = f", {self.loading} of them loading" if self.loading else ""
        return f"{self.supply} of {self.target} replicas{loading}, demand {self.demand:.1f} rows/s"


def coverage(needs: list[WindowNeed]) -> float:
    """The share of windows with a proven replica; 0.0 where there are no windows."""
    return sum(need.proven > 0 for need in needs) / len(needs) if needs else 0.0

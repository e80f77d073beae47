"""What audits say of one wallet: a state machine. Facts in, the next standing and perhaps a verdict out.

    fact          what it does
    CallAccepted  one more valid call: the more of them, the fewer are audited
    RowAudited    one output was recomputed: a violation if its d is over the limit
    PutOut        the wallet is in quarantine: everything begins again, and its first calls are all audited

A violation counts for the next `STRIKE_WINDOW` audited rows; `STRIKES` of them, or one row off by more than
`GROSS`, are a verdict. How many quarantines a wallet had, and how long the next one lasts, the market knows
(`market.standing`), for all backbones of a swarm; what is here may be lost and begins anew, with all of a
wallet's first calls audited.

Pure: no clock, no torch; randomness is an argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

GROSS: Final = 0.05
"""One d above this is enough for quarantine."""

STRIKES: Final = 3
"""So many violations within `STRIKE_WINDOW` audited rows are enough as well."""

STRIKE_WINDOW: Final = 1000
ALWAYS_FIRST: Final = 10
"""All of a wallet's first valid calls are audited."""

FLOOR_RATE: Final = 0.02
"""After that a share of max(1 / valid calls, this)."""


@dataclass(frozen=True, slots=True)
class CallAccepted:
    """A valid reply of the wallet was used."""


@dataclass(frozen=True, slots=True)
class RowAudited:
    """One output of the wallet was off by `d`, where an honest one is off by `limit` at most."""

    d: float
    limit: float


@dataclass(frozen=True, slots=True)
class PutOut:
    """The wallet went into quarantine, by this backbone's verdict or another's."""


Fact = CallAccepted | RowAudited | PutOut


@dataclass(frozen=True, slots=True)
class Standing:
    """A wallet's standing with one backbone.

    `violations` are the numbers (counted in audited rows, from 1) of those that may still count, ascending.
    """

    valid_calls: int = 0
    audited: int = 0
    worst_d: float = 0.0
    violations: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """The share of the wallet's next calls to audit, 0 to 1."""
        if self.valid_calls < ALWAYS_FIRST:
            return 1.0
        return max(1.0 / self.valid_calls, FLOOR_RATE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The wallet goes to quarantine, and why. `gross`: by one row alone."""

    reason: str
    gross: bool


def step(standing: Standing, fact: Fact) -> tuple[Standing, Verdict | None]:
    """The standing after `fact`, and the verdict where it is due. A verdict is followed by `PutOut`."""
    match fact:
        case CallAccepted():
            calls = standing.valid_calls + 1  # for each reply: `replace` takes four times as long
            return Standing(calls, standing.audited, standing.worst_d, standing.violations), None
        case PutOut():
            return Standing(), None
        case RowAudited(d, limit):
            return _judge(standing, d, limit)


def _judge(standing: Standing, d: float, limit: float) -> tuple[Standing, Verdict | None]:
    audited = standing.audited + 1
    violations = tuple(number for number in standing.violations if number > audited - STRIKE_WINDOW)
    if not d <= limit:  # NaN is no honest figure either
        violations = (*violations, audited)
    worst = standing.worst_d if d <= standing.worst_d else d
    after = replace(standing, audited=audited, worst_d=worst, violations=violations)
    if not d <= GROSS:
        reason = f"an audited output was wrong: d = {d:.3g}, and one above {GROSS} is enough"
        return replace(after, violations=()), Verdict(reason, gross=True)
    if len(violations) < STRIKES:
        return after, None
    reason = (
        f"{STRIKES} of the last {min(audited, STRIKE_WINDOW)} audited outputs were off by more than "
        f"the limit {limit:g} of the declared numerics class; the last by d = {d:.3g}"
    )
    return replace(after, violations=()), Verdict(reason, gross=False)


_ACCEPTED: Final = CallAccepted()


class Trust:
    """The standing of one wallet as it moves; not safe to use from several threads at once."""

    __slots__ = ("standing",)

    def __init__(self, standing: Standing | None = None) -> None:
        self.standing = standing or Standing()

    @property
    def valid_calls(self) -> int:
        """Valid calls so far."""
        return self.standing.valid_calls

    @property
    def audited(self) -> int:
        """Audited rows so far."""
        return self.standing.audited

    @property
    def worst_d(self) -> float:
        """The largest d of them."""
        return self.standing.worst_d

    @property
    def strikes(self) -> int:
        """Violations that count towards quarantine."""
        return len(self.standing.violations)

    def sample_rate(self) -> float:
        """The share of the wallet's next calls to audit, 0 to 1."""
        return self.standing.rate

    def wants_audit(
        self, rng: random.Random, afford: Callable[[float], float] = lambda wanted: wanted
    ) -> bool:
        """Count one valid call, and decide whether it is audited. `afford` lowers the rate to what can be."""
        rate = afford(self.sample_rate())
        self.standing, _ = step(self.standing, _ACCEPTED)
        return rate >= 1.0 or rng.random() < rate

    def verdict(self, d: float, limit: float) -> str | None:
        """Take in one audited row. Returns why the wallet goes to quarantine now, or None."""
        self.standing, verdict = step(self.standing, RowAudited(d, limit))
        return None if verdict is None else verdict.reason

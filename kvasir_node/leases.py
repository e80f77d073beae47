"""What a node knows of its leases by its own clock: pure.

A lease holds from the moment its renewal was sent, by the monotonic clock. While the market is silent a
backbone may go on calling under the old epoch (only backbones enforce epochs), so a lease is given up
locally only when nobody calls any more either.

Knows leases and times as arguments; no market and no windows' contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from market.messages import Lease, LeaseState, LeaseStatus

GRACE_S: Final = 60.0
"""One lease time more, which a market that comes back adds too."""

HURRY_S: Final = 2.0
"""Seconds between heartbeats while a loaded window waits for its proving call."""

HURRIES: Final = 15
"""How often that is done in a row: a backbone that takes longer is not asked after every two seconds."""


@dataclass(slots=True)
class LeaseClock:
    """One lease and when it runs out. Times are seconds of one monotonic clock."""

    lease: Lease
    epoch: int
    state: LeaseState
    deadline: float
    loading_deadline: float

    @classmethod
    def start(cls, lease: Lease, sent_at: float) -> LeaseClock:
        """A lease whose claim was sent at `sent_at`."""
        return cls(
            lease,
            lease.epoch,
            lease.state,
            sent_at + lease.expires_in_s,
            sent_at + lease.loading_deadline_s,
        )

    def renew(self, status: LeaseStatus, sent_at: float) -> None:
        """Take over what the market said to a request sent at `sent_at`. Answers may overtake each other."""
        if status.epoch < self.epoch or self.state == "ENDED":
            return
        self.epoch = status.epoch
        self.state = status.state
        self.deadline = max(self.deadline, sent_at + status.expires_in_s)

    def lapsed(self, now: float, *, called: bool) -> bool:
        """Whether the lease is over by this clock: past its deadline and grace, and nobody calls."""
        return now > self.deadline + GRACE_S and not called


def next_beat_s(clocks: Iterable[LeaseClock], *, every_s: float, hurries: int, rng: Random) -> float:
    """Seconds until the next heartbeat: `every_s` +-10 %, sooner while a window waits to be proven.

    `hurries` counts the early ones in a row.
    """
    if hurries < HURRIES and any(clock.state == "LOADED" for clock in clocks):
        return min(HURRY_S, every_s) * rng.uniform(0.9, 1.1)
    return every_s * rng.uniform(0.9, 1.1)

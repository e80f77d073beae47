"""Which relays a device keeps a connection to: near and idle ones, and no change without a good reason.

The cost of a relay is its round trip plus what its load will add, seen through a lens that differs a little
from device to device, so that thousands do not all call one relay the best. A device stays where it is until
a relay cannot be used any more, or another is better by a margin that noise does not bridge. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .identity import PublicKey
from .load import OVERLOADED

WANTED: Final = 2
"""Connections a device keeps: one that is used, one that is there when it fails."""

QUEUE_S: Final = 0.02
"""What half a load adds to a cost; it grows as in a queue, with share / (1 - share)."""

FULL_S: Final = 1.0
"""What an overloaded relay's cost has more: any other that can be used is better."""

SPREAD: Final = 0.25
"""How much two devices' views of one relay may differ."""

MARGIN: Final = 0.7
LEAST_S: Final = 0.01
"""A better relay costs at most `MARGIN` of the present one, and at least `LEAST_S` seconds less."""

LEAVING: Final = 0.25
"""The share of its devices that leaves an overloaded relay in one round of looks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A relay as a device sees it. `rtt_s` is None if it does not answer; `share` as in `RelayLoad`."""

    key: PublicKey
    rtt_s: float | None
    share: float = 0.0
    draining: bool = False

    @property
    def usable(self) -> bool:
        """Whether it answers and stays."""
        return self.rtt_s is not None and not self.draining

    @property
    def overloaded(self) -> bool:
        """Whether it should get nobody who has a choice."""
        return self.share >= OVERLOADED


def cost(candidate: Candidate, device: PublicKey) -> float:
    """What using a relay costs this device, in seconds; only comparisons mean anything."""
    assert candidate.rtt_s is not None
    share = min(candidate.share, 0.95)
    plain = candidate.rtt_s + QUEUE_S * share / (1 - share)
    digest = hashlib.sha256(bytes(device) + bytes(candidate.key)).digest()
    lens = 1 + SPREAD * int.from_bytes(digest[:4], "big") / (1 << 32)
    return plain * lens + (FULL_S if candidate.overloaded else 0.0)


def choose(
    candidates: Iterable[Candidate],
    current: Sequence[PublicKey],
    *,
    device: PublicKey,
    draw: float,
    settled: bool = True,
    wanted: int = WANTED,
) -> tuple[PublicKey, ...]:
    """The relays to use from now on, the one to be called through first.

    `current` are those in use, `draw` is drawn anew from [0, 1) for each look and says whether it is this
    device's turn to leave an overloaded relay, `settled` whether the last change is long enough ago for
    another that is only for the better. Where nothing can be used, `current` stays.
    """
    usable = {candidate.key: candidate for candidate in candidates if candidate.usable}
    if not usable:
        return tuple(current)
    costs = {key: cost(candidate, device) for key, candidate in usable.items()}
    held = [key for key in current if key in usable]
    chosen: list[PublicKey] = []
    while len(chosen) < min(wanted, len(usable)):
        best = min((key for key in usable if key not in chosen), key=lambda key: (costs[key], key))
        incumbent = next((key for key in held if key not in chosen), None)
        if incumbent is not None and not _leaves(
            usable[incumbent], costs[incumbent], usable[best], costs[best], draw, settled
        ):
            best = incumbent
        chosen.append(best)
    return tuple(chosen)


def _leaves(
    old: Candidate, old_cost: float, new: Candidate, new_cost: float, draw: float, settled: bool
) -> bool:
    """Whether `new` takes the place of `old`, which can still be used."""
    if new_cost > MARGIN * old_cost or old_cost - new_cost < LEAST_S:
        return False
    if old.overloaded and not new.overloaded:
        return draw < LEAVING
    return settled

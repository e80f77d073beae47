"""When a replica moves to another window: rarely, never the last one, and only where it clearly helps.

Volunteers fill windows by themselves as long as somebody has room. Where nobody has (two devices with room
for one window took the same one, and another has no owner), a window stays short for ever unless a replica
moves. The worst window that somebody can help is helped, if it has been short for a while, if what gives the
replica up keeps a live one and stays clearly better off than the other was, and if few moved lately.

Every move makes the worse of two windows better, so with steady targets moves come to an end.

Pure: facts, time and randomness in, moves out. What a move is made of is `market.moves`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from relay.errors import ConfigError
from relay.identity import PublicKey

from .messages import Abilities, Offer
from .plans import PlanId
from .scarcity import WindowNeed
from .volunteering import best_fit
from .windows import Window
from .wire import LeaseId

MINUTE_S: Final = 60.0
"""The time over which moves are bounded."""

MAX_GOALS: Final = 64
"""So many of the worst windows are looked at in one decision."""

_EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True)
class MoveRules:
    """When replicas move. Times in seconds.

    `patience_s`: how long a window must have been short (None: nothing ever moves). `margin`: how much
    scarcity must lie between the window that gives, after the move, and the one that takes, before it.
    `share`: how much of the live devices may move a minute, one at least. `offer_s`: how long a device has to
    take a move. `rest_s`: how long it is not asked again after one. `alive_s`: how long it may be silent.
    """

    patience_s: float | None = 60.0
    margin: float = 0.25
    share: float = 0.01
    offer_s: float = 90.0
    rest_s: float = 600.0
    alive_s: float = 45.0

    def __post_init__(self) -> None:
        if self.patience_s is not None and self.patience_s < 0:
            raise ConfigError("a window's patience is 0 seconds or more")
        if min(self.offer_s, self.alive_s) <= 0 or self.rest_s < 0:
            raise ConfigError("the times of a move must be positive")
        if not 0 < self.margin <= 1 or not 0 < self.share <= 1:
            raise ConfigError("a move's margin and the share of devices are above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Place:
    """A window where replicas may leave or come.

    `live` counts its proven replicas whose devices are heard, `leaving` those of them (counted in the need's
    supply too) that a move takes away, `coming` those that a move will bring and that are not claimed yet.
    `short_since`: since when it has been short, or None where it is not.
    """

    need: WindowNeed
    live: int
    leaving: int = 0
    coming: int = 0
    short_since: float | None = None

    @property
    def key(self) -> tuple[PlanId, Window]:
        """What names it."""
        return self.need.plan, self.need.window

    @property
    def supply(self) -> int:
        """Replicas once the moves that are under way are done."""
        return self.need.supply + self.coming - self.leaving

    def scarcity(self, more: int = 0) -> float:
        """From 0 (enough) to 1 (none), with so many replicas more."""
        return max(0, self.need.target - self.supply - more) / self.need.target


@dataclass(frozen=True, slots=True)
class Mover:
    """A live, proven replica, and what its device could do instead.

    `kept_bytes` is what the replica keeps, `free_bytes` what is left of the device's budget, `taken` the
    windows that its wallet may not take; it is not asked before `rests_until` (Unix seconds).
    """

    lease: LeaseId
    device: PublicKey
    plan: PlanId
    window: Window
    precision: str
    kept_bytes: int
    free_bytes: int
    abilities: Abilities
    taken: frozenset[tuple[PlanId, Window]] = frozenset()
    rests_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """`mover` leaves its window for the one offered, whose reason says why."""

    mover: Mover
    offer: Offer


def parse_patience(text: str) -> float | None:
    """`--move-after`: seconds from 0, or "never" as None. Raises `ConfigError`."""
    if text == "never":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"--move-after is a number of seconds from 0, or never; not {text!r:.80}")
    return seconds


def allowed_a_minute(devices: int, rules: MoveRules) -> int:
    """How many may move within a minute in a swarm of so many live devices."""
    return max(1, int(devices * rules.share))


def choose_moves(
    places: Sequence[Place],
    movers: Sequence[Mover],
    *,
    budget: int,
    now: float,
    rules: MoveRules,
    draw: Callable[[], float],
) -> tuple[Move, ...]:
    """At most `budget` moves, each decided as if those before it were done already; to the worst `MAX_GOALS`.

    `now` in Unix seconds; `draw` gives a random number below 1 for each tie.
    """
    known = {place.key: place for place in places}
    goals = [place.key for place in worst_places(places, now, rules, draw)]
    left = {mover.lease: mover for mover in movers if now >= mover.rests_until}
    chosen: list[Move] = []
    while len(chosen) < budget:
        move = _best(known, goals, tuple(left.values()), rules, draw)
        if move is None:
            break
        chosen.append(move)
        source = known[move.mover.plan, move.mover.window]
        goal = known[move.offer.plan, move.offer.window]
        known[source.key] = replace(source, leaving=source.leaving + 1, live=source.live - 1)
        known[goal.key] = replace(goal, coming=goal.coming + 1)
        for lease in [lease for lease, mover in left.items() if mover.device == move.mover.device]:
            del left[lease]
    return tuple(chosen)


def _best(
    places: Mapping[tuple[PlanId, Window], Place],
    goals: Sequence[tuple[PlanId, Window]],
    movers: Sequence[Mover],
    rules: MoveRules,
    draw: Callable[[], float],
) -> Move | None:
    """The best move to the worst of the goals that any can help; ties in the order of `goals`."""
    short = [place for place in map(places.__getitem__, goals) if place.scarcity() > 0]
    for goal in sorted(short, key=lambda place: (-place.scarcity(), -place.need.demand)):
        found = []
        for mover in movers:
            source = places.get((mover.plan, mover.window))
            if source is None or not is_worth_it(source, goal, rules):
                continue
            offer = _offer(mover, source, goal)
            if offer is not None:
                near = mover.abilities.network in goal.need.networks
                demand = source.need.demand / (source.live - 1)
                found.append(((source.scarcity(-1), near, demand, draw()), Move(mover, offer)))
        if found:
            return min(found, key=lambda one: one[0])[1]
    return None


def worst_places(
    places: Iterable[Place], now: float, rules: MoveRules, draw: Callable[[], float]
) -> list[Place]:
    """The windows that have been short for long enough to move replicas there, the worst first."""
    patience = rules.patience_s
    if patience is None:
        return []
    short = [
        (-place.scarcity(), -place.need.demand, draw(), place)
        for place in places
        if place.scarcity() > 0 and place.short_since is not None and now - place.short_since >= patience
    ]
    return [place for *_, place in heapq.nsmallest(MAX_GOALS, short, key=lambda one: one[:3])]


def is_worth_it(source: Place, goal: Place, rules: MoveRules) -> bool:
    """Whether a replica may leave `source` for `goal`: a live one stays, and `source` is then still markedly
    better off than `goal` was. So the worse of the two is better off than the worse was before.
    """
    if source.key == goal.key or source.live < 2:
        return False
    return source.scarcity(-1) <= goal.scarcity() - rules.margin + _EPSILON


def _offer(mover: Mover, source: Place, goal: Place) -> Offer | None:
    """What the device is offered, or None if it cannot serve that window or its wallet may not."""
    if goal.key in mover.taken:
        return None
    abilities = mover.abilities
    if mover.plan == goal.need.plan:  # its replicas of one plan are of one numerics class
        abilities = replace(abilities, precisions=(mover.precision,))
    offer = best_fit(abilities, goal.need, mover.free_bytes + mover.kept_bytes)
    if offer is None:
        return None
    reason = f"{goal.need.reason}, and {mover.window.name} has {source.need.reason}"
    return replace(offer, reason=reason)

"""What moves are decided by, read from the store: windows that are short, replicas that could go elsewhere.

Each function is one piece of work inside a `Session` of `market.store`; what is decided is `market.moving`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import and_, func, select, tuple_, update

from relay.identity import PublicKey

from . import messages as m
from . import tables as t
from .claims import REVOKED_REST_S
from .moving import Mover, MoveRules, Place, allowed_a_minute, is_worth_it, worst_places
from .plans import PlanId
from .scarcity import ScarcityRules, WindowNeed
from .store import Session
from .windows import Window
from .wire import LeaseId

OPEN: Final = ("offered", "taken")
RESTS_AFTER: Final = ("moved", "declined", "ignored", "failed")

MAX_SOURCES: Final = 200
MAX_MOVERS: Final = 256
"""So many windows and replicas are looked at in one decision, drawn by chance where there are more."""

MAX_NAMES: Final = 32


@dataclass(frozen=True, slots=True)
class MoveDesk:
    """What moves are decided with: the rules, what makes a wallet trusted, and the draw for ties."""

    rules: MoveRules
    scarcity: ScarcityRules
    trusted_calls: int
    draw: Callable[[], float]


def stored_abilities(abilities: m.Abilities) -> dict[str, Any] | None:
    """What is kept of a device's abilities; None for one that knows no moves."""
    if not abilities.moves:
        return None
    kept = ("precisions", "wire_dtypes", "formulas")
    return {name: [text[:64] for text in getattr(abilities, name)[:MAX_NAMES]] for name in kept}


def note_shortages(session: Session, needs: Iterable[WindowNeed]) -> None:
    """Write down since when each window is short, and forget it of those that are not."""
    since = short_since(session)
    for need in needs:
        short = need.scarcity > 0
        if short != ((need.plan, need.window) in since):
            here = (t.windows.c.plan == need.plan) & (t.windows.c.name == need.window.name)
            value = session.now if short else None
            session.run(update(t.windows).where(here).values(short_since=value))


def short_since(session: Session) -> dict[tuple[PlanId, Window], float]:
    rows = session.rows(
        select(t.windows.c.plan, t.windows.c.name, t.windows.c.short_since).where(
            t.windows.c.short_since.is_not(None)
        )
    )
    return {(PlanId(row.plan), Window.parse(row.name)): row.short_since for row in rows}


def is_live(session: Session, rules: MoveRules) -> Any:
    """The condition, over leases and devices joined, that a replica serves and its device is heard."""
    return and_(
        t.leases.c.state == "PROVEN",
        t.leases.c.expires_at > session.now,
        t.devices.c.seen_at > session.now - rules.alive_s,
    )


def leases_and_devices() -> Any:
    return t.leases.join(t.devices, t.leases.c.device == t.devices.c.device)


def live_counts(session: Session, rules: MoveRules) -> dict[tuple[bytes, str], int]:
    """Live, proven replicas by window."""
    window = (t.leases.c.plan, t.leases.c.name)
    counted = select(*window, func.count().label("live")).select_from(leases_and_devices())
    rows = session.rows(counted.where(is_live(session, rules)).group_by(*window))
    return {(row.plan, row.name): row.live for row in rows}


def allowed(session: Session, rules: MoveRules) -> int:
    heard = t.devices.c.seen_at > session.now - rules.alive_s
    return allowed_a_minute(session.value(select(func.count()).select_from(t.devices).where(heard)), rules)


def open_moves(session: Session) -> list[Any]:
    """The moves that have not ended."""
    return session.rows(select(t.moves).where(t.moves.c.state.in_(OPEN)))


def find_places(
    session: Session,
    desk: MoveDesk,
    needs: dict[tuple[PlanId, Window], WindowNeed],
    since: dict[tuple[PlanId, Window], float],
) -> list[Place]:
    """Every window of the active plans, with the moves under way taken into account."""
    live = live_counts(session, desk.rules)
    leaving: dict[tuple[bytes, str], int] = {}
    coming: dict[tuple[bytes, str], int] = {}
    for move in open_moves(session):
        if move.left_at is None:
            leaving[move.from_plan, move.from_name] = leaving.get((move.from_plan, move.from_name), 0) + 1
        if move.state == "offered":
            coming[move.plan, move.name] = coming.get((move.plan, move.name), 0) + 1
    places = []
    for key, need in needs.items():
        name = (bytes(need.plan), need.window.name)
        gone = leaving.get(name, 0)
        places.append(
            Place(need, live.get(name, 0) - gone, gone, coming.get(name, 0), short_since=since.get(key))
        )
    return places


def find_sources(places: Sequence[Place], now: float, desk: MoveDesk) -> list[Place]:
    """The windows that a replica may leave for one of the worst, the best off first."""
    spare = sorted(
        (place for place in places if place.live > 1),
        key=lambda place: (place.scarcity(-1), place.need.demand),
    )
    found: dict[tuple[PlanId, Window], Place] = {}
    for goal in worst_places(places, now, desk.rules, desk.draw):
        for place in spare[:MAX_SOURCES]:
            if is_worth_it(place, goal, desk.rules):
                found.setdefault(place.key, place)
    return list(found.values())


def find_movers(session: Session, desk: MoveDesk, sources: Sequence[Place]) -> list[Mover]:
    """Replicas of those windows that their devices could give up, as far as the rule looks at them."""
    rows = _candidates(session, desk, sources)
    if not rows:
        return []
    wallets = {row.wallet for row in rows}
    active = session.rows(select(t.leases).where(t.leases.c.wallet.in_(wallets), t.leases.c.state != "ENDED"))
    held: dict[bytes, int] = {}
    taken: dict[bytes, set[tuple[PlanId, Window]]] = {wallet: set() for wallet in wallets}
    loading: set[bytes] = set()
    for lease in active:
        held[lease.device] = held.get(lease.device, 0) + lease.kept_bytes
        taken[lease.wallet].add((PlanId(lease.plan), Window.parse(lease.name)))
        if lease.state in ("HELD", "LOADED"):
            loading |= {lease.device, lease.wallet} if lease.state == "HELD" else {lease.device}
    for lease in _revoked(session, wallets):
        taken[lease.wallet].add((PlanId(lease.plan), Window.parse(lease.name)))
    rests = _rests(session, desk.rules)
    movers = []
    for row in rows:
        untrusted = row.calls - row.calls_before < desk.trusted_calls
        if row.device in loading or (untrusted and row.wallet in loading):
            continue
        free = row.budget_bytes - held.get(row.device, 0)
        movers.append(_mover(row, free, frozenset(taken[row.wallet]), rests.get(row.device, 0.0)))
    return movers


def _candidates(session: Session, desk: MoveDesk, sources: Sequence[Place]) -> list[Any]:
    """Live replicas of those windows at devices that know moves and make none now."""
    if not sources:
        return []
    names = [(place.need.plan, place.need.window.name) for place in sources]
    moving = select(t.moves.c.device).where(t.moves.c.state.in_(OPEN))
    joined = leases_and_devices().join(t.wallets, t.leases.c.wallet == t.wallets.c.wallet)
    found = (
        select(t.leases, t.devices.c.budget_bytes, t.devices.c.abilities, t.wallets.c.calls)
        .add_columns(t.wallets.c.calls_before, t.devices.c.network.label("device_network"))
        .select_from(joined)
        .where(
            is_live(session, desk.rules),
            tuple_(t.leases.c.plan, t.leases.c.name).in_(names),
            t.wallets.c.quarantined_until <= session.now,
            t.devices.c.device.not_in(moving),
        )
        .order_by(t.leases.c.lease)
    )
    start = bytes([int(desk.draw() * 256)])  # lease ids are random: so is a run of them
    rows = session.rows(found.where(t.leases.c.lease >= start).limit(MAX_MOVERS))
    rows += session.rows(found.where(t.leases.c.lease < start).limit(MAX_MOVERS - len(rows)))
    return [row for row in rows if row.abilities is not None]


def _revoked(session: Session, wallets: Iterable[bytes]) -> list[Any]:
    return session.rows(
        select(t.leases.c.wallet, t.leases.c.plan, t.leases.c.name).where(
            t.leases.c.wallet.in_(list(wallets)),
            t.leases.c.state == "ENDED",
            t.leases.c.ended_at > session.now - REVOKED_REST_S,
            t.leases.c.reason.startswith("revoked"),
        )
    )


def _rests(session: Session, rules: MoveRules) -> dict[bytes, float]:
    """Devices whose last move is not long over, and until when they are left alone."""
    ended = select(t.moves.c.device, func.max(t.moves.c.ended_at).label("at")).where(
        t.moves.c.state.in_(RESTS_AFTER), t.moves.c.ended_at > session.now - rules.rest_s
    )
    return {row.device: row.at + rules.rest_s for row in session.rows(ended.group_by(t.moves.c.device))}


def _mover(row: Any, free: int, taken: frozenset[tuple[PlanId, Window]], rests_until: float) -> Mover:
    said = row.abilities
    abilities = m.Abilities(
        budget_bytes=row.budget_bytes,
        precisions=tuple(said["precisions"]),
        wire_dtypes=tuple(said["wire_dtypes"]),
        numerics={},
        network=row.device_network,
        formulas=tuple(said["formulas"]),
        moves=True,
    )
    return Mover(
        lease=LeaseId(row.lease),
        device=PublicKey(row.device),
        plan=PlanId(row.plan),
        window=Window.parse(row.name),
        precision=row.precision,
        kept_bytes=row.kept_bytes,
        free_bytes=free,
        abilities=abilities,
        taken=taken,
        rests_until=rests_until,
    )

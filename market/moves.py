"""Moves in the store: which replica is asked to go where, who took it, how it ended (rules: `market.moving`).

A move is offered in a heartbeat's answer, taken by a claim that names it, and makes the device give up its
old window only by a drain that names it too, which is refused where nobody else covers that window. One row
of the store is locked by whoever decides how many may move, so the bound holds for all replicas of a market.

Each function is one piece of work inside a `Session` of `market.store`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import structlog
from sqlalchemy import and_, delete, func, insert, or_, select, update

from relay.errors import Refused
from relay.identity import PublicKey, address_of

from . import messages as m
from . import tables as t
from .movers import (
    OPEN,
    MoveDesk,
    allowed,
    find_movers,
    find_places,
    find_sources,
    is_live,
    leases_and_devices,
    open_moves,
    short_since,
)
from .moving import MINUTE_S, Move, MoveRules, choose_moves
from .plans import PlanId
from .publishing import window_needs
from .scarcity import WindowNeed
from .store import Session
from .windows import Window
from .wire import LeaseId, MoveId

log = structlog.get_logger("market")

LOCK: Final = "moves"
"""The row of `meta` that whoever counts moves holds."""

MAX_DECLINED: Final = 16
SHOWN_S: Final = 3600.0
MAX_SHOWN: Final = 100
KEEP_S: Final = 86_400.0


def _lock(session: Session) -> None:
    """Be the only one who counts moves until the transaction ends."""
    row = select(t.meta).where(t.meta.c.name == LOCK).with_for_update()
    if session.row(row) is None:
        session.insert_once(insert(t.meta).values(name=LOCK, value=""))
        session.row(row)


# --- deciding ----------------------------------------------------------------------------------------------


def propose(session: Session, desk: MoveDesk) -> int:
    """Settle the moves that are over, and offer new ones where windows stay short; returns how many."""
    since, patience = short_since(session), desk.rules.patience_s
    wanted = patience is not None and any(session.now - at >= patience for at in since.values())
    if not wanted and not open_moves(session):
        return 0
    _lock(session)
    under_way = open_moves(session)
    needs = _needs(session, desk) if any(row.state == "offered" for row in under_way) else {}
    _settle(session, under_way, needs)
    budget = allowed(session, desk.rules) - _under_way(session)
    if not wanted or budget <= 0:
        return 0
    needs = needs or _needs(session, desk)
    places = find_places(session, desk, needs, since)
    movers = find_movers(session, desk, find_sources(places, session.now, desk))
    moves = choose_moves(places, movers, budget=budget, now=session.now, rules=desk.rules, draw=desk.draw)
    for move in moves:
        _offer(session, desk.rules, move)
    return len(moves)


def _needs(session: Session, desk: MoveDesk) -> dict[tuple[PlanId, Window], WindowNeed]:
    return {(need.plan, need.window): need for need in window_needs(session, desk.scarcity)}


def _under_way(session: Session) -> int:
    """Moves of the last minute, and those whose device has not left its old window yet."""
    recent = session.now - MINUTE_S
    moves = t.moves.c
    counted = or_(
        moves.offered_at > recent,
        moves.left_at > recent,
        and_(moves.state.in_(OPEN), moves.left_at.is_(None)),
    )
    return int(session.value(select(func.count()).select_from(t.moves).where(counted)))


def _offer(session: Session, rules: MoveRules, move: Move) -> None:
    mover, offer = move.mover, move.offer
    session.run(
        insert(t.moves).values(
            id=secrets.token_bytes(16),
            device=mover.device,
            lease=mover.lease,
            from_plan=mover.plan,
            from_name=mover.window.name,
            plan=offer.plan,
            name=offer.window.name,
            precision=offer.precision,
            kept_bytes=offer.kept_bytes,
            download_bytes=offer.download_bytes,
            reason=offer.reason[: m.MAX_REASON],
            state="offered",
            offered_at=session.now,
            until=session.now + rules.offer_s,
        )
    )
    log.info(
        "move.offered",
        device=address_of(mover.device),
        lease=bytes(mover.lease).hex(),
        window=mover.window.name,
        to=offer.window.name,
        reason=offer.reason,
    )


# --- how moves end -----------------------------------------------------------------------------------------


def _settle(session: Session, rows: Sequence[Any], needs: Mapping[tuple[PlanId, Window], WindowNeed]) -> None:
    """End those of the open moves whose outcome is known."""
    for row in rows:
        need = needs.get((PlanId(row.plan), Window.parse(row.name)))
        found = _why_off(session, row, need) if row.state == "offered" else _outcome(session, row)
        if found is not None:
            _end(session, row, *found)


def _why_off(session: Session, row: Any, need: WindowNeed | None) -> tuple[m.MoveState, str] | None:
    """Why an offered move is off, or None."""
    state = session.value(select(t.leases.c.state).where(t.leases.c.lease == row.lease))
    if state != "PROVEN":
        return "overtaken", f"the lease on {row.from_name} is over"
    if need is None or need.scarcity <= 0:
        return "overtaken", f"{row.name} is short no more"
    if session.now > row.until:
        return "ignored", "the device did not answer in time"
    return None


def _outcome(session: Session, row: Any) -> tuple[m.MoveState, str] | None:
    """How a move that was taken ended, or None."""
    lease = session.row(select(t.leases).where(t.leases.c.lease == row.taken_lease))
    if lease is None or lease.state in ("ENDED", "DRAINING"):
        return "failed", (lease.reason if lease is not None else None) or "the new lease is over"
    if lease.state == "PROVEN":
        return "moved", row.reason
    if lease.state == "LOADED" and session.now > (lease.deadline or 0):
        return "failed", "the new window was not proven in time"
    return None


def _end(session: Session, row: Any, state: m.MoveState, reason: str) -> bool:
    """End a move that is still as `row` says; whether it was."""
    here = (t.moves.c.id == row.id) & (t.moves.c.state == row.state)
    # Devices write some of these reasons, and people read them on terminals.
    reason = "".join(letter if letter.isprintable() else "?" for letter in reason[: m.MAX_REASON])
    values = {"state": state, "reason": reason, "ended_at": session.now}
    if not session.run(update(t.moves).where(here).values(**values)):
        return False
    log.info(
        "move.ended",
        device=address_of(row.device),
        window=row.from_name,
        to=row.name,
        outcome=state,
        reason=reason,
        left=row.left_at is not None,
        seconds=round(session.now - row.offered_at, 3),
    )
    return True


def forget_old(session: Session) -> None:
    """Delete moves that ended over a day ago."""
    session.run(delete(t.moves).where(t.moves.c.ended_at < session.now - KEEP_S))


# --- what devices say --------------------------------------------------------------------------------------


def offer_to(session: Session, device: PublicKey) -> m.MoveOffer | None:
    """The move that the device is asked to make now, or None."""
    here = (t.moves.c.device == device) & (t.moves.c.state == "offered")
    row = session.row(select(t.moves).where(here, t.moves.c.until > session.now))
    if row is None:
        return None
    window = Window.parse(row.name)
    offer = m.Offer(PlanId(row.plan), window, row.precision, row.kept_bytes, row.download_bytes, row.reason)
    return m.MoveOffer(MoveId(row.id), LeaseId(row.lease), offer, row.until - session.now)


def decline(session: Session, device: PublicKey, declined: Sequence[m.DeclinedMove]) -> None:
    """Note the moves that the device does not take; what is no offer to it is ignored."""
    for item in declined[:MAX_DECLINED]:
        here = (t.moves.c.id == item.move) & (t.moves.c.device == device) & (t.moves.c.state == "offered")
        row = session.row(select(t.moves).where(here))
        if row is not None:
            _end(session, row, "declined", item.reason)


def take(session: Session, device: PublicKey, request: m.ClaimRequest) -> None:
    """A claim takes its move; `note_lease` follows.

    Raises `Refused`: not_found where this device was never asked to make it, expired where it is off.
    """
    asked = (request.plan, request.window.name)
    row = session.row(select(t.moves).where(t.moves.c.id == request.move).with_for_update())
    if row is None or row.device != device or (row.plan, row.name) != asked:
        raise Refused("not_found", "this device is asked to make no such move")
    if row.state != "offered" or session.now > row.until:
        raise Refused("expired", "the move is off: keep what you hold")
    session.run(update(t.moves).where(t.moves.c.id == row.id).values(state="taken"))


def is_of(session: Session, move: MoveId | None, lease: bytes) -> bool:
    """Whether a lease is what a claim in that move got; a claim in none may have got any."""
    if move is None:
        return True
    taken: bytes | None = session.value(select(t.moves.c.taken_lease).where(t.moves.c.id == move))
    return taken == lease


def note_lease(session: Session, move: MoveId, lease: LeaseId) -> None:
    """The lease that a taken move got."""
    session.run(update(t.moves).where(t.moves.c.id == move).values(taken_lease=lease))


def check_leaving(session: Session, rules: MoveRules, device: PublicKey, lease: Any, move: MoveId) -> None:
    """A drain gives the old window of a move up: allow it, and note it.

    Raises `Refused`: expired where the move is not under way, conflict where no other live, proven replica
    covers the window, busy where too many moved within the last minute.
    """
    _lock(session)
    session.row(
        select(t.windows)
        .where(t.windows.c.plan == lease.plan, t.windows.c.name == lease.name)
        .with_for_update()
    )
    row = session.row(select(t.moves).where(t.moves.c.id == move))
    if row is None or (row.device, row.lease, row.state) != (device, lease.lease, "taken"):
        raise Refused("expired", f"no move away from {lease.name} is under way: keep it")
    here = (t.leases.c.plan == lease.plan) & (t.leases.c.name == lease.name)
    live = is_live(session, rules) & here & (t.leases.c.lease != lease.lease)
    others = select(func.count()).select_from(leases_and_devices()).where(live)
    if not session.value(others):
        raise Refused("conflict", f"nobody else serves {lease.name} now: keep it")
    recent = (t.moves.c.left_at > session.now - MINUTE_S) & (t.moves.c.id != move)
    left, oldest = session.row(select(func.count(), func.min(t.moves.c.left_at)).where(recent))
    if left >= allowed(session, rules):
        wait = max(1.0, oldest + MINUTE_S - session.now)
        raise Refused("busy", f"{left} replicas moved within the last minute: wait", retry_after_s=wait)
    session.run(update(t.moves).where(t.moves.c.id == move).values(left_at=session.now))


# --- for the operator --------------------------------------------------------------------------------------


def recent_moves(session: Session) -> tuple[m.MoveRow, ...]:
    """The moves of the last hour, the latest first."""
    rows = session.rows(
        select(t.moves)
        .where(t.moves.c.offered_at > session.now - SHOWN_S)
        .order_by(t.moves.c.offered_at.desc())
        .limit(MAX_SHOWN)
    )
    return tuple(
        m.MoveRow(
            plan=PlanId(row.from_plan),
            leaves=Window.parse(row.from_name),
            to_plan=PlanId(row.plan),
            takes=Window.parse(row.name),
            state=cast(m.MoveState, row.state),
            reason=row.reason,
            age_s=max(0.0, session.now - row.offered_at),
        )
        for row in rows
    )


def moves_by_state(session: Session) -> dict[str, int]:
    """How many moves of the last day are in each state."""
    rows = session.rows(select(t.moves.c.state, func.count()).group_by(t.moves.c.state))
    return {state: count for state, count in rows}

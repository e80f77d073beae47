"""What an operator asks the store: coverage, devices, health.

Each function is one piece of work inside a `Session` of `market.store`.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import func, select

from relay.identity import PublicKey

from . import messages as m
from . import moves, relays
from . import tables as t
from .claims import as_state
from .plans import PlanId
from .publishing import window_needs
from .scarcity import ScarcityRules, coverage
from .store import Session
from .windows import Window
from .wire import LeaseId

SEEN_S: Final = 86_400.0
MAX_NODES: Final = 100_000


def gaps(session: Session, rules: ScarcityRules) -> m.GapsAnswer:
    """Every window of the active plans, scarcest first."""
    needs = window_needs(session, rules)
    needs.sort(key=lambda need: (-need.scarcity, need.plan, need.window))
    return m.GapsAnswer(
        coverage(needs),
        tuple(
            m.Gap(
                plan=need.plan,
                window=need.window,
                target=need.target,
                proven=need.proven,
                loading=need.loading,
                demand_rows_per_s=need.demand,
                scarcity=need.scarcity,
                reason=need.reason,
            )
            for need in needs
        ),
        moves.recent_moves(session),
    )


def nodes(session: Session) -> m.NodesAnswer:
    """Every device seen within a day, the latest first, with its leases."""
    held: dict[bytes, list[m.NodeLease]] = {}
    for row in session.rows(select(t.leases).where(t.leases.c.state != "ENDED").order_by(t.leases.c.name)):
        held.setdefault(row.device, []).append(_node_lease(row))
    devices = session.rows(
        select(t.devices)
        .where(t.devices.c.seen_at > session.now - SEEN_S)
        .order_by(t.devices.c.seen_at.desc())
        .limit(MAX_NODES)
    )
    reasons = _last_reasons(session)
    return m.NodesAnswer(
        tuple(
            m.NodeRow(
                device=PublicKey(row.device),
                wallet=PublicKey(row.wallet),
                network=row.network,
                budget_bytes=row.budget_bytes,
                addresses=tuple(row.addresses),
                seen_s_ago=max(0.0, session.now - row.seen_at),
                leases=tuple(held.get(row.device, ())),
                last_reason=reasons.get(row.device),
                relays=relays.readings_of(row.relays),
            )
            for row in devices
        )
    )


def _node_lease(row: Any) -> m.NodeLease:
    return m.NodeLease(
        lease=LeaseId(row.lease),
        plan=PlanId(row.plan),
        window=Window.parse(row.name),
        state=as_state(row.state),
        epoch=row.epoch,
        precision=row.precision,
        download_bytes=row.download_bytes,
        verified_bytes=row.verified_bytes,
    )


def _last_reasons(session: Session) -> dict[bytes, str]:
    """Why each device's last ended lease ended."""
    rows = session.rows(
        select(t.leases.c.device, t.leases.c.reason)
        .where(t.leases.c.state == "ENDED", t.leases.c.ended_at > session.now - SEEN_S)
        .order_by(t.leases.c.ended_at)
    )
    return {row.device: row.reason for row in rows}


def health(session: Session, version: str) -> m.Health:
    """Whether the store answers, and how much it holds."""
    leases = session.value(select(func.count()).select_from(t.leases).where(t.leases.c.state != "ENDED"))
    plans = session.value(select(func.count()).select_from(t.plans).where(t.plans.c.active))
    return m.Health("ok", version, leases, plans)


def leases_by_state(session: Session) -> dict[str, int]:
    """How many leases are in each state, ended ones of the last day included."""
    rows = session.rows(select(t.leases.c.state, func.count()).group_by(t.leases.c.state))
    return {state: count for state, count in rows}

"""Plans, window hashes and demand in the store, and the targets that follow from demand and losses.

Each function is one piece of work inside a `Session` of `market.store`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import delete, func, insert, select, update

from relay.errors import Refused
from relay.identity import Certificate, SignedDocument

from . import messages as m
from . import tables as t
from .plans import Plan, PlanId, WindowHashes
from .scarcity import ScarcityRules, WindowNeed, averaged, decayed, loss_chance, next_target
from .store import Session
from .windows import Window

FOREGONE_S: Final = 1e6
"""Demand older than this many time constants is nothing."""

LOSS_TAU_S: Final = 86_400.0
MAX_RATE: Final = 1e9


def window_rows(plan: Plan) -> list[dict[str, Any]]:
    """What the store keeps of each window of a plan. Takes a moment for large plans: not in a transaction."""
    return [
        {
            "name": window.name,
            "download_bytes": sum(span.nbytes for span in plan.window_ranges(window)),
            "kept_bytes": {p: plan.kept_bytes(window, p) for p in plan.precisions},
            "formulas": sorted({layer.formula.name for layer in plan.window_layers(window)}),
        }
        for window in plan.windows
    ]


def publish_plan(
    session: Session,
    document: SignedDocument,
    plan: Plan,
    rows: Sequence[Mapping[str, Any]],
    certificate: Certificate,
    rules: ScarcityRules,
) -> PlanId:
    """Store a verified plan, with its `window_rows`, as the one that this backbone serves from now on.

    Plans that no backbone serves any more are retired (see `leasing.drain_retired`).
    """
    plan_id = PlanId(document.digest)
    values = {
        "document": document.to_bytes(),
        "certificate": certificate.document.to_bytes(),
        "model": plan.model,
        "model_revision": plan.revision,
        "wire_dtype": plan.wire_dtype,
        "active": True,
        "published_at": session.now,
    }
    if not session.run(update(t.plans).where(t.plans.c.plan == plan_id).values(**values)) and (
        session.insert_once(insert(t.plans).values(plan=plan_id, **values)) and rows
    ):
        fresh = {"plan": plan_id, "target": rules.base_target}
        session.run(insert(t.windows), [{**row, **fresh} for row in rows])
    session.run(
        delete(t.plan_backbones).where(
            t.plan_backbones.c.backbone == certificate.id, t.plan_backbones.c.plan != plan_id
        )
    )
    note_backbone(session, plan_id, certificate.id)
    served = select(t.plan_backbones.c.plan)
    session.run(update(t.plans).where(t.plans.c.plan.not_in(served)).values(active=False))
    return plan_id


def note_backbone(session: Session, plan: bytes, backbone: bytes) -> None:
    """Note that a backbone serves a plan now. Raises `Refused` (not_found) for an unknown plan."""
    here = (t.plan_backbones.c.plan == plan) & (t.plan_backbones.c.backbone == backbone)
    if session.run(update(t.plan_backbones).where(here).values(seen_at=session.now)):
        return
    require_plan(session, plan)
    session.insert_once(insert(t.plan_backbones).values(plan=plan, backbone=backbone, seen_at=session.now))
    session.run(update(t.plans).where(t.plans.c.plan == plan).values(active=True))


def require_plan(session: Session, plan: bytes) -> Any:
    """The plan's row. Raises `Refused` (not_found)."""
    row = session.row(select(t.plans).where(t.plans.c.plan == plan))
    if row is None:
        raise Refused("not_found", f"no backbone has published plan {plan.hex()[:16]} here", retry_after_s=1)
    return row


def retire_plans(session: Session, silence_s: float) -> None:
    """Retire the plans of which no backbone was heard for `silence_s`."""
    session.run(delete(t.plan_backbones).where(t.plan_backbones.c.seen_at < session.now - silence_s))
    served = select(t.plan_backbones.c.plan)
    session.run(update(t.plans).where(t.plans.c.active, t.plans.c.plan.not_in(served)).values(active=False))


def get_plan(session: Session, plan: bytes) -> m.Published:
    """A plan with its signer's certificate."""
    row = require_plan(session, plan)
    return m.Published(SignedDocument.from_bytes(row.document), SignedDocument.from_bytes(row.certificate))


def list_plans(session: Session) -> m.PlansAnswer:
    """All plans, newest first."""
    counts = dict(
        (row.plan, row.windows)
        for row in session.rows(
            select(t.windows.c.plan, func.count().label("windows")).group_by(t.windows.c.plan)
        )
    )
    rows = session.rows(select(t.plans).order_by(t.plans.c.published_at.desc()).limit(1000))
    return m.PlansAnswer(
        tuple(
            m.PlanListing(
                PlanId(row.plan),
                row.model,
                row.model_revision,
                "active" if row.active else "retired",
                counts.get(row.plan, 0),
            )
            for row in rows
        )
    )


# --- hashes ----------------------------------------------------------------------------------------------


def publish_hashes(
    session: Session, document: SignedDocument, hashes: WindowHashes, certificate: Certificate
) -> m.Done:
    """Store a window's verified hashes. Raises `Refused` where others were published that differ."""
    known = _hashes_row(session, hashes.plan, hashes.window)
    signed = {"document": document.to_bytes(), "certificate": certificate.document.to_bytes()}
    if known is None:
        session.insert_once(insert(t.hashes).values(plan=hashes.plan, name=hashes.window.name, **signed))
    elif SignedDocument.from_bytes(known.document).digest != document.digest:
        raise Refused("conflict", f"other hashes of {hashes.window.name} were published before")
    else:
        here = (t.hashes.c.plan == hashes.plan) & (t.hashes.c.name == hashes.window.name)
        session.run(update(t.hashes).where(here).values(**signed))
    session.touched.add(bytes(hashes.plan))
    return m.Done()


def get_hashes(session: Session, plan: bytes, window: Window) -> m.Published | None:
    """A window's hashes with their signer's certificate, or None until they are made."""
    row = _hashes_row(session, plan, window)
    if row is None:
        return None
    return m.Published(SignedDocument.from_bytes(row.document), SignedDocument.from_bytes(row.certificate))


def _hashes_row(session: Session, plan: bytes, window: Window) -> Any:
    return session.row(select(t.hashes).where(t.hashes.c.plan == plan, t.hashes.c.name == window.name))


def wanted_hashes(session: Session, plan: bytes) -> m.WindowsAnswer:
    """Windows with a claim and without hashes."""
    made = select(t.hashes.c.name).where(t.hashes.c.plan == plan)
    claimed = (
        select(t.leases.c.name)
        .where(t.leases.c.plan == plan, t.leases.c.state != "ENDED", t.leases.c.name.not_in(made))
        .distinct()
        .order_by(t.leases.c.name)
    )
    return m.WindowsAnswer(tuple(Window.parse(name) for (name,) in session.rows(claimed)))


# --- demand and targets ----------------------------------------------------------------------------------


def report_demand(
    session: Session, plan: bytes, backbone: bytes, rates: Mapping[str, float], rules: ScarcityRules
) -> m.Done:
    """Take one backbone's measured rows a second into the averages. Raises `Refused` for bad values."""
    note_backbone(session, plan, backbone)
    names = {name for (name,) in session.rows(select(t.windows.c.name).where(t.windows.c.plan == plan))}
    if not rates.keys() <= names or not all(0 <= rate <= MAX_RATE for rate in rates.values()):
        raise Refused("bad_request", "a demand report names windows of its plan and rates from 0")
    mine = (t.demand.c.plan == plan) & (t.demand.c.backbone == backbone)
    known = {row.name: row for row in session.rows(select(t.demand).where(mine))}
    for name, measured in rates.items():
        row = known.get(name)
        before, elapsed = (0.0, FOREGONE_S) if row is None else (row.rate, session.now - row.updated_at)
        rate = averaged(before, measured, elapsed, rules.demand_tau_s)
        values = {"rate": rate, "updated_at": session.now}
        if row is None:
            key = {"plan": plan, "name": name, "backbone": backbone}
            session.insert_once(insert(t.demand).values(**key, **values))
        else:
            session.run(update(t.demand).where(mine, t.demand.c.name == name).values(**values))
    return m.Done()


def window_needs(session: Session, rules: ScarcityRules, plan: bytes | None = None) -> list[WindowNeed]:
    """Every window of the active plans (or of one plan) with its supply and demand now."""
    active = select(t.windows, t.plans.c.wire_dtype).join(t.plans).where(t.plans.c.active)
    if plan is not None:
        active = active.where(t.windows.c.plan == plan)
    supply = _supply(session, plan)
    demand = _demand(session, rules)
    needs = []
    for row in session.rows(active.order_by(t.windows.c.plan, t.windows.c.name)):
        proven, loading, networks = supply.get((row.plan, row.name), (0, 0, frozenset()))
        needs.append(
            WindowNeed(
                plan=PlanId(row.plan),
                window=Window.parse(row.name),
                target=row.target,
                proven=proven,
                loading=loading,
                demand=demand.get((row.plan, row.name), 0.0),
                download_bytes=row.download_bytes,
                kept_bytes=row.kept_bytes,
                wire_dtype=row.wire_dtype,
                formulas=frozenset(row.formulas),
                networks=networks,
            )
        )
    return needs


def _supply(session: Session, plan: bytes | None) -> dict[tuple[bytes, str], tuple[int, int, frozenset[str]]]:
    """Per window: proven replicas, loading ones within their deadline, and their networks."""
    leases = t.leases.c
    statement = select(
        leases.plan, leases.name, leases.state, leases.deadline, leases.expires_at, leases.network
    )
    statement = statement.where(leases.state.in_(("HELD", "LOADED", "PROVEN")))
    if plan is not None:
        statement = statement.where(leases.plan == plan)
    counted: dict[tuple[bytes, str], tuple[int, int, frozenset[str]]] = {}
    for row in session.rows(statement):
        proven = row.state == "PROVEN"
        if row.expires_at < session.now or not (proven or session.now <= (row.deadline or 0)):
            continue
        before = counted.get((row.plan, row.name), (0, 0, frozenset()))
        networks = before[2] | {row.network} if row.network else before[2]
        counted[row.plan, row.name] = (before[0] + proven, before[1] + (not proven), networks)
    return counted


def _demand(session: Session, rules: ScarcityRules) -> dict[tuple[bytes, str], float]:
    """Rows a second now, over all backbones; a backbone that no longer reports fades."""
    total: dict[tuple[bytes, str], float] = {}
    for row in session.rows(select(t.demand)):
        idle = max(0.0, session.now - row.updated_at - rules.demand_tau_s)
        rate = decayed(row.rate, idle, rules.demand_tau_s)
        total[row.plan, row.name] = total.get((row.plan, row.name), 0.0) + rate
    return total


def note_losses(session: Session, plan: bytes, *, lost: int, proven: int) -> None:
    """Put `lost` proven replicas on record, and the time that `proven` ones lived since the last note."""
    row = session.row(select(t.losses).where(t.losses.c.plan == plan))
    if row is None:
        values = {"lost": float(lost), "exposure_s": 0.0, "updated_at": session.now}
        session.insert_once(insert(t.losses).values(plan=plan, **values))
        return
    elapsed = max(0.0, session.now - row.updated_at)
    values = {
        "lost": decayed(row.lost, elapsed, LOSS_TAU_S) + lost,
        "exposure_s": decayed(row.exposure_s, elapsed, LOSS_TAU_S) + proven * elapsed,
        "updated_at": session.now,
    }
    session.run(update(t.losses).where(t.losses.c.plan == plan).values(**values))


def set_targets(session: Session, rules: ScarcityRules) -> list[WindowNeed]:
    """Move every active window's target to what demand and losses call for; the needs as they were before."""
    needs = window_needs(session, rules)
    by_plan: dict[bytes, list[WindowNeed]] = {}
    for need in needs:
        by_plan.setdefault(need.plan, []).append(need)
    for plan, members in by_plan.items():
        note_losses(session, plan, lost=0, proven=sum(need.proven for need in members))
        row = session.row(select(t.losses).where(t.losses.c.plan == plan))
        chance = loss_chance(row.lost, row.exposure_s, rules.recovery_s)
        for need in members:
            target = next_target(
                need.target, demand=need.demand, chance=chance, windows=len(members), rules=rules
            )
            if target != need.target:
                here = (t.windows.c.plan == plan) & (t.windows.c.name == need.window.name)
                session.run(update(t.windows).where(here).values(target=target))
    return needs

"""Leases in the store: volunteering, claims, heartbeats and every end, with the rules of `market.claims`.

Each function is one piece of work inside a `Session` of `market.store`. Whoever decides about a window
locks its row first, whoever decides about a wallet locks that before, so PostgreSQL's replicas decide one
after another, as SQLite's single writer does anyway.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog
from sqlalchemy import delete, func, insert, select, update

from relay.errors import Refused, version_refusal
from relay.identity import PROTOCOL_VERSION, PublicKey, SignedDocument, SigningKey, address_of

from . import messages as m
from . import moves, relays, volunteering
from . import tables as t
from .admission import Device
from .claims import (
    REVOKED_REST_S,
    ClaimDocument,
    LeaseFacts,
    LeaseRules,
    as_state,
    check_epoch,
    counts_as_supply,
    move,
    new_lease,
    renew,
    sign_claim,
    why_over,
)
from .escrow import last_quarantine
from .movers import MoveDesk, stored_abilities
from .moving import MoveRules
from .plans import PlanId
from .publishing import note_losses, require_plan, window_needs
from .scarcity import ScarcityRules
from .store import Session
from .volunteering import quarantine_message
from .windows import Window
from .wire import LeaseId

log = structlog.get_logger("market")

MAX_QUARANTINE_S: Final = 10 * 365 * 86_400.0
"""A quarantine without end lasts so long."""

KEEP_ENDED_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Desk:
    """What leasing works with: the swarm, the market's key, the rules, and the relays it lists.

    `claim_relays` are those that a claim names while its device has not said which it uses.
    """

    root: PublicKey
    key: SigningKey
    lease_rules: LeaseRules
    scarcity_rules: ScarcityRules
    relays: tuple[tuple[str, PublicKey], ...]
    claim_relays: tuple[tuple[str, PublicKey], ...]
    trusted_calls: int = 1000
    move_rules: MoveRules = field(default_factory=MoveRules)
    draw: Callable[[], float] = secrets.SystemRandom().random

    @property
    def moves(self) -> MoveDesk:
        """What moves are decided with."""
        return MoveDesk(self.move_rules, self.scarcity_rules, self.trusted_calls, self.draw)


# --- asking ------------------------------------------------------------------------------------------------


def volunteer(session: Session, desk: Desk, device: Device, abilities: m.Abilities) -> m.VolunteerAnswer:
    """Note what the device can do, and answer with the scarcest windows that fit."""
    generation = max(abilities.start_generation, device.start_generation)
    facts = {
        "budget_bytes": abilities.budget_bytes,
        "network": abilities.network[:128],
        "start_generation": generation,
        "seen_at": session.now,
        "abilities": stored_abilities(abilities),
    }
    session.run(update(t.devices).where(t.devices.c.device == device.key).values(**facts))
    _end_older_starts(session, device, generation, keep=())
    needs = window_needs(session, desk.scarcity_rules)
    answer = volunteering.answer(abilities, _device_facts(session, desk, device), needs, draw=desk.draw)
    return replace(answer, move=moves.offer_to(session, device.key))


def _device_facts(session: Session, desk: Desk, device: Device) -> volunteering.DeviceFacts:
    wallet = session.row(select(t.wallets).where(t.wallets.c.wallet == device.wallet))
    rows = _active(session, t.leases.c.wallet == device.wallet)
    held = sum(row.kept_bytes for row in rows if row.device == device.key)
    rested = session.rows(
        select(t.leases.c.plan, t.leases.c.name).where(
            t.leases.c.wallet == device.wallet,
            t.leases.c.state == "ENDED",
            t.leases.c.ended_at > session.now - REVOKED_REST_S,
            t.leases.c.reason.startswith("revoked"),
        )
    )
    loading = [row for row in rows if row.state == "HELD"] if _untrusted(wallet, desk) else []
    return volunteering.DeviceFacts(
        held_bytes=held,
        wallet_windows=frozenset((PlanId(row.plan), Window.parse(row.name)) for row in [*rows, *rested]),
        loading=Window.parse(loading[0].name) if loading else None,
        quarantine_s=max(0.0, wallet.quarantined_until - session.now),
        quarantine_reason=_why_out(session, wallet),
    )


def _untrusted(wallet: Any, desk: Desk) -> bool:
    """Whether a wallet had too few accepted calls, since its last quarantine, to load several windows."""
    return bool(wallet.calls - wallet.calls_before < desk.trusted_calls)


def _why_out(session: Session, wallet: Any) -> str:
    """Why a wallet in quarantine is, for its owner; empty where it is not, or nothing is on record."""
    found = last_quarantine(session, wallet.wallet) if wallet.quarantined_until > session.now else None
    if found is None:
        return ""
    reason = session.value(select(t.trust_records.c.reason).where(t.trust_records.c.id == found.id))
    return f"{reason} (record {found.id.hex()})"


# --- claiming ----------------------------------------------------------------------------------------------


def claim(session: Session, desk: Desk, device: Device, request: m.ClaimRequest) -> m.LeaseGrant:
    """Give the device a lease on one replica of a window. Raises `Refused`; "conflict" if none is needed."""
    if request.v != PROTOCOL_VERSION:
        raise version_refusal(PROTOCOL_VERSION, request.v)
    wallet = session.row(select(t.wallets).where(t.wallets.c.wallet == device.wallet).with_for_update())
    if request.start_generation < device.start_generation:
        raise Refused("duplicate", "a newer start of this device is running; this one must stop")
    here = t.devices.c.device == device.key
    session.run(update(t.devices).where(here).values(start_generation=request.start_generation))
    _end_older_starts(session, device, request.start_generation, keep=())
    mine = _active(session, t.leases.c.wallet == device.wallet)
    before = _same_claim(mine, device, request)
    if before is not None and moves.is_of(session, request.move, before.lease):
        return _granted(before, session.now)
    _check_wallet(session, desk, wallet, mine, request)
    window, kept = _lock_window(session, request)
    others = _active(session, (t.leases.c.plan == request.plan) & (t.leases.c.name == request.window.name))
    supply = sum(counts_as_supply(_facts(row), now=session.now) for row in others)
    if supply >= window.target:
        raise Refused(
            "conflict", f"{request.window.name} has its {window.target} replicas: ask what is scarce"
        )
    if request.move is not None:
        moves.take(session, device.key, request)
    grant = _grant_lease(session, desk, device, request, window, kept, [row.slot for row in others])
    if request.move is not None:
        moves.note_lease(session, request.move, grant.id)
    return grant


def _same_claim(mine: Sequence[Any], device: Device, request: m.ClaimRequest) -> Any:
    """The lease that an earlier sending of this claim got, if its answer was lost."""
    for row in mine:
        same = (row.device, row.plan, row.name) == (device.key, request.plan, request.window.name)
        if same and row.state == "HELD" and row.precision == request.precision:
            return row
    return None


def _check_wallet(
    session: Session, desk: Desk, wallet: Any, mine: Sequence[Any], request: m.ClaimRequest
) -> None:
    if wallet.quarantined_until > session.now:
        left = wallet.quarantined_until - session.now
        raise Refused("quarantined", quarantine_message(left, _why_out(session, wallet)), retry_after_s=left)
    if any((row.plan, row.name) == (request.plan, request.window.name) for row in mine):
        raise Refused("conflict", f"this wallet has a replica of {request.window.name} already")
    loading = next((row for row in mine if row.state == "HELD"), None)
    if _untrusted(wallet, desk) and loading is not None:
        raise Refused(
            "quota",
            f"this wallet is loading {loading.name}: it may take the next window once that is loaded",
            retry_after_s=volunteering.SOON_S,
        )


def _lock_window(session: Session, request: m.ClaimRequest) -> tuple[Any, int]:
    """The window's row, locked, and the bytes kept at the precision asked for."""
    plan = require_plan(session, request.plan)
    if not plan.active:
        raise Refused("conflict", "no backbone serves that plan any more: ask what is scarce")
    row = session.row(
        select(t.windows)
        .where(t.windows.c.plan == request.plan, t.windows.c.name == request.window.name)
        .with_for_update()
    )
    if row is None:
        raise Refused("not_found", f"the plan has no window {request.window.name}")
    if request.precision not in row.kept_bytes:
        raise Refused(
            "bad_request", f"the plan allows {', '.join(sorted(row.kept_bytes))}, not {request.precision!r}"
        )
    return row, row.kept_bytes[request.precision]


def _grant_lease(
    session: Session,
    desk: Desk,
    device: Device,
    request: m.ClaimRequest,
    window: Any,
    kept: int,
    taken: Sequence[int],
) -> m.LeaseGrant:
    lease = LeaseId(secrets.token_bytes(16))
    slot = next(number for number in range(len(taken) + 1) if number not in taken)
    epoch = _take_slot(session, request, slot, lease)
    facts = new_lease(
        epoch=epoch, size=window.download_bytes, now=session.now, rate=device.rate, rules=desk.lease_rules
    )
    claim = ClaimDocument(
        swarm=desk.root,
        lease=lease,
        window=request.window,
        slot=slot,
        epoch=epoch,
        grant=device.grant,
        wallet=device.wallet,
        device=device.key,
        relays=_relays_of(desk, device.relays),
        plan=request.plan,
        precision=request.precision,
        issued_at=int(session.now),
    )
    session.run(
        insert(t.leases).values(
            lease=lease,
            plan=request.plan,
            name=request.window.name,
            slot=slot,
            epoch=epoch,
            state="HELD",
            precision=request.precision,
            numerics=request.numerics,
            device=device.key,
            wallet=device.wallet,
            grant=device.grant,
            network=(request.network or device.network)[:128],
            start_generation=request.start_generation,
            download_bytes=window.download_bytes,
            kept_bytes=kept,
            claimed_at=facts.claimed_at,
            expires_at=min(facts.expires_at, device.grant_ends_at),
            deadline=facts.deadline,
            revision=_next_revision(session, request.plan),
            document=sign_claim(claim, desk.key).to_bytes(),
        )
    )
    _log("claim.granted", device.key, request.window.name, lease, epoch, "granted", slot=slot)
    return _granted(_one(session, lease), session.now)


def _relays_of(desk: Desk, used: Sequence[PublicKey]) -> tuple[tuple[str, PublicKey], ...]:
    """The relays that a claim names: those that the device uses and the market lists, in its order."""
    urls = {key: url for url, key in desk.relays}
    return tuple((urls[key], key) for key in used if key in urls) or desk.claim_relays


def _moved_claim(desk: Desk, row: Any, used: Sequence[PublicKey], now: float) -> bytes:
    """The claim of a lease, signed anew: its device is at other relays now."""
    claim = ClaimDocument(
        swarm=desk.root,
        lease=LeaseId(row.lease),
        window=Window.parse(row.name),
        slot=row.slot,
        epoch=row.epoch,
        grant=row.grant,
        wallet=PublicKey(row.wallet),
        device=PublicKey(row.device),
        relays=_relays_of(desk, used),
        plan=PlanId(row.plan),
        precision=row.precision,
        issued_at=int(now),
    )
    return sign_claim(claim, desk.key).to_bytes()


def _take_slot(session: Session, request: m.ClaimRequest, slot: int, lease: LeaseId) -> int:
    """Put the lease into the slot; returns its new epoch. Raises `Refused` (conflict) if another is in it."""
    slots = t.slots.c
    here = (slots.plan == request.plan) & (slots.name == request.window.name) & (slots.slot == slot)
    epoch = session.value(
        update(t.slots)
        .where(here, slots.lease.is_(None))
        .values(lease=lease, epoch=slots.epoch + 1)
        .returning(slots.epoch)
    )
    if epoch is not None:
        return int(epoch)
    key = {"plan": request.plan, "name": request.window.name, "slot": slot}
    if not session.insert_once(insert(t.slots).values(**key, epoch=1, lease=lease)):
        raise Refused("conflict", f"another device was faster with {request.window.name}")
    return 1


def _granted(row: Any, now: float) -> m.LeaseGrant:
    return m.LeaseGrant(
        id=LeaseId(row.lease),
        plan=PlanId(row.plan),
        window=Window.parse(row.name),
        slot=row.slot,
        epoch=row.epoch,
        state=as_state(row.state),
        precision=row.precision,
        document=SignedDocument.from_bytes(row.document),
        expires_in_s=row.expires_at - now,
        loading_deadline_s=(row.deadline or now) - now,
    )


# --- holding -----------------------------------------------------------------------------------------------


def heartbeat(
    session: Session, desk: Desk, device: Device, beat: m.Heartbeat
) -> tuple[tuple[m.LeaseStatus, ...], tuple[str, ...]]:
    """Renew a device's leases; returns the state of each one named, and notices for the owner.

    What it says of moves is noted too; `moves.offer_to` has what it is asked.
    """
    if beat.start_generation < device.start_generation:
        raise Refused("duplicate", "a newer start of this device is running; this one must stop")
    addresses = tuple(address[:512] for address in beat.addresses[:16])
    moved = addresses != device.addresses or beat.start_generation != device.start_generation
    readings = relays.check_readings(beat.relays)
    used = relays.used(readings)
    rerouted = used if used != device.relays else None
    session.run(
        update(t.devices)
        .where(t.devices.c.device == device.key)
        .values(
            start_generation=beat.start_generation,
            addresses=list(addresses),
            relays=relays.stored_readings(readings),
            seen_at=session.now,
        )
    )
    named = {item.lease: item for item in beat.leases[:10_000]}
    _end_older_starts(session, device, beat.start_generation, keep=tuple(named))
    held = select(t.leases).where(t.leases.c.lease.in_(list(named))).order_by(t.leases.c.lease)
    found = {row.lease: row for row in session.rows(held.with_for_update())}
    ends = _grant_ends(session, {row.grant for row in found.values()})
    statuses = []
    for lease, item in named.items():
        row = found.get(lease)
        if row is None or row.device != device.key:
            statuses.append(m.LeaseStatus(lease, item.epoch, "ENDED", 0.0, "the market knows no such lease"))
        else:
            change = _Change(beat.start_generation, moved, rerouted, ends[row.grant])
            statuses.append(_renew(session, desk, row, item, change))
    moves.decline(session, device.key, beat.declined)
    return tuple(statuses), _notices(session, device)


@dataclass(frozen=True, slots=True)
class _Change:
    """What a heartbeat says of its device: `rerouted` are the relays it uses where these are others now."""

    generation: int
    moved: bool
    rerouted: tuple[PublicKey, ...] | None
    grant_ends_at: float


def _renew(session: Session, desk: Desk, row: Any, item: m.LeaseBeat, change: _Change) -> m.LeaseStatus:
    facts = _facts(row)
    over = why_over(facts, now=session.now)
    if row.state == "ENDED" or over is not None or item.epoch != row.epoch:
        if over is not None:
            _end(session, row, over, outcome="expired")
            row = _one(session, row.lease)
        return _status(row, session.now)
    renewed = renew(facts, verified=max(0, item.verified_bytes), now=session.now, rules=desk.lease_rules)
    # A lease does not outlive what it was given for.
    expires_at = min(renewed.expires_at, change.grant_ends_at)
    values: dict[str, Any] = {
        "verified_bytes": renewed.verified,
        "deadline": renewed.deadline,
        "expires_at": expires_at,
        "start_generation": change.generation,
    }
    if change.rerouted is not None:
        values["document"] = _moved_claim(desk, row, change.rerouted, session.now)
    if change.moved or change.rerouted is not None:
        values["revision"] = _next_revision(session, row.plan)
    session.run(update(t.leases).where(t.leases.c.lease == row.lease).values(**values))
    return m.LeaseStatus(
        LeaseId(row.lease), row.epoch, as_state(row.state), expires_at - session.now, row.reason
    )


def _grant_ends(session: Session, grants: set[bytes]) -> dict[bytes, float]:
    """When each grant ends, in Unix seconds."""
    rows = session.rows(select(t.grants.c.hash, t.grants.c.expires_at).where(t.grants.c.hash.in_(grants)))
    return {row.hash: row.expires_at for row in rows}


def _notices(session: Session, device: Device) -> tuple[str, ...]:
    late = session.value(
        select(func.sum(t.chains.c.bytes - t.chains.c.acknowledged_bytes)).where(
            t.chains.c.device == device.key, t.chains.c.unacknowledged_since < session.now - 86_400
        )
    )
    return () if not late else (f"{late} carried bytes are not acknowledged since a day or longer",)


def loaded(
    session: Session, desk: Desk, device: Device, lease: bytes, request: m.LoadedRequest
) -> m.LeaseStatus:
    """HELD to LOADED: the device has the window in memory. Sending it again changes nothing."""
    row = _own(session, device, lease, request.epoch)
    if row.state in ("LOADED", "PROVEN"):
        return _status(row, session.now)
    facts = _still(session, row)
    _step(
        session,
        desk,
        row,
        "LOADED",
        numerics=request.numerics,
        quantised_hash=request.quantised_hash,
        kept_bytes=max(0, request.kept_bytes),
        verified_bytes=row.download_bytes,
    )
    elapsed = session.now - facts.claimed_at
    if elapsed > 1.0 and facts.size:
        rate = facts.size / elapsed
        rate = rate if device.rate is None else (device.rate + rate) / 2
        session.run(update(t.devices).where(t.devices.c.device == device.key).values(rate=rate))
    _log("claim.loaded", device.key, row.name, row.lease, row.epoch, "loaded", seconds=round(elapsed, 3))
    return _status(_one(session, lease), session.now)


def prove(session: Session, desk: Desk, lease: bytes, request: m.ProvenRequest) -> m.LeaseStatus:
    """LOADED to PROVEN: a backbone's proving call came back right. Sending it again changes nothing."""
    row = _by_backbone(session, lease, request.epoch)
    if row.state == "PROVEN":
        return _status(row, session.now)
    _still(session, row)
    _step(session, desk, row, "PROVEN", proven_d=request.d)
    _log("claim.proven", row.device, row.name, row.lease, row.epoch, "proven", d=request.d)
    return _status(_one(session, lease), session.now)


def drain(
    session: Session, desk: Desk, device: Device, lease: bytes, request: m.DrainRequest
) -> m.LeaseStatus:
    """To DRAINING: the device asks for no new calls. Sending it again changes nothing.

    Where it names a move, that is checked first: a window's last replica does not move.
    """
    row = _one(session, lease)
    if request.move is not None and row is not None and row.state != "DRAINING":
        moves.check_leaving(session, desk.move_rules, device.key, row, request.move)
    row = _own(session, device, lease, request.epoch)
    if row.state == "DRAINING":
        return _status(row, session.now)
    _still(session, row)
    _step(session, desk, row, "DRAINING", reason=request.reason[: m.MAX_REASON])
    return _status(_one(session, lease), session.now)


def release(session: Session, device: Device, lease: bytes, request: m.ReasonRequest) -> m.LeaseStatus:
    """End a lease at its device's wish. Sending it again changes nothing."""
    row = _own(session, device, lease, request.epoch)
    if row.state != "ENDED":
        _end(session, row, f"released: {request.reason}", outcome="released")
    return _status(_one(session, lease), session.now)


def revoke(session: Session, lease: bytes, request: m.RevokeRequest) -> m.LeaseStatus:
    """End a lease at a backbone's word, and keep its wallet out as long as the backbone says.

    Sending it again changes nothing but a quarantine that would end later.
    """
    if request.quarantine_s < 0:
        raise Refused("bad_request", "a quarantine is not shorter than nothing")
    row = _by_backbone(session, lease, request.epoch)
    if row.state != "ENDED":
        _end(session, row, f"revoked: {request.reason}", outcome="revoked")
    if request.quarantine_s > 0:
        until = session.now + min(request.quarantine_s, MAX_QUARANTINE_S)
        wallet = (t.wallets.c.wallet == row.wallet) & (t.wallets.c.quarantined_until < until)
        session.run(update(t.wallets).where(wallet).values(quarantined_until=until))
    return _status(_one(session, lease), session.now)


def revoke_all(session: Session, wallet: PublicKey, reason: str) -> int:
    """End every lease of a wallet, at all its devices; returns how many. The wallet's row is locked."""
    active = (t.leases.c.wallet == wallet) & (t.leases.c.state != "ENDED")
    rows = session.rows(select(t.leases).where(active).order_by(t.leases.c.lease).with_for_update())
    for row in rows:
        _end(session, row, f"revoked: {reason}", outcome="revoked")
    return len(rows)


# --- the passage of time -----------------------------------------------------------------------------------


def sweep(session: Session) -> None:
    """End every lease whose time is over."""
    late = (t.leases.c.expires_at < session.now) | (t.leases.c.deadline < session.now)
    for found in _active(session, late):
        row = _locked(session, found.lease)
        over = why_over(_facts(row), now=session.now)
        if over is not None:
            _end(session, row, over, outcome="expired")


def drain_retired(session: Session, desk: Desk) -> None:
    """Drain the leases of plans that no backbone serves any more."""
    retired = select(t.plans.c.plan).where(t.plans.c.active.is_(False))
    for row in _active(session, t.leases.c.plan.in_(retired) & (t.leases.c.state != "DRAINING")):
        _step(session, desk, row, "DRAINING", reason="no backbone serves this plan any more")


def add_ttl(session: Session, desk: Desk) -> None:
    """After the market was down: every lease gets one more TTL, and every loader as much more time."""
    more = desk.lease_rules.ttl_s
    active = t.leases.c.state != "ENDED"
    session.run(update(t.leases).where(active).values(expires_at=session.now + more))
    ends = select(t.grants.c.expires_at).where(t.grants.c.hash == t.leases.c.grant).scalar_subquery()
    session.run(update(t.leases).where(active, t.leases.c.expires_at > ends).values(expires_at=ends))
    session.run(
        update(t.leases)
        .where(active, t.leases.c.deadline.is_not(None))
        .values(deadline=t.leases.c.deadline + more)
    )


def forget_ended(session: Session) -> None:
    """Delete leases that ended over a day ago; watches that are so far behind resync."""
    old = (t.leases.c.state == "ENDED") & (t.leases.c.ended_at < session.now - KEEP_ENDED_S)
    tops = session.rows(
        select(t.leases.c.plan, func.max(t.leases.c.revision)).where(old).group_by(t.leases.c.plan)
    )
    for plan, revision in tops:
        session.run(update(t.plans).where(t.plans.c.plan == plan).values(pruned=revision))
    if tops:
        session.run(delete(t.leases).where(old))


# --- pieces ------------------------------------------------------------------------------------------------


def _all(session: Session, condition: Any) -> list[Any]:
    return session.rows(select(t.leases).where(condition).order_by(t.leases.c.claimed_at))


def _active(session: Session, condition: Any) -> list[Any]:
    return _all(session, condition & (t.leases.c.state != "ENDED"))


def _one(session: Session, lease: bytes) -> Any:
    return session.row(select(t.leases).where(t.leases.c.lease == lease))


def _locked(session: Session, lease: bytes) -> Any:
    row = session.row(select(t.leases).where(t.leases.c.lease == lease).with_for_update())
    if row is None:
        raise Refused("not_found", f"there is no lease {lease.hex()}")
    return row


def _own(session: Session, device: Device, lease: bytes, epoch: int) -> Any:
    row = _locked(session, lease)
    if row.device != device.key:
        raise Refused("forbidden", "the lease is another device's")
    check_epoch(_facts(row), epoch)
    return row


def _by_backbone(session: Session, lease: bytes, epoch: int) -> Any:
    row = _locked(session, lease)
    check_epoch(_facts(row), epoch)
    return row


def _still(session: Session, row: Any) -> LeaseFacts:
    """The lease's facts, if it is not over. Raises `Refused` (expired)."""
    facts = _facts(row)
    over = row.reason or "ended" if row.state == "ENDED" else why_over(facts, now=session.now)
    if over is not None:
        raise Refused("expired", f"the lease on {row.name} is over: {over}")
    return facts


def _facts(row: Any) -> LeaseFacts:
    return LeaseFacts(
        state=as_state(row.state),
        epoch=row.epoch,
        claimed_at=row.claimed_at,
        expires_at=row.expires_at,
        deadline=row.deadline,
        size=row.download_bytes,
        verified=row.verified_bytes,
    )


def _status(row: Any, now: float) -> m.LeaseStatus:
    left = 0.0 if row.state == "ENDED" else max(0.0, row.expires_at - now)
    return m.LeaseStatus(LeaseId(row.lease), row.epoch, as_state(row.state), left, row.reason)


def _step(session: Session, desk: Desk, row: Any, state: m.LeaseState, **values: Any) -> None:
    """Move a lease along the transition table and tell the watchers."""
    moved = move(_facts(row), state, now=session.now, rules=desk.lease_rules)
    revision = _next_revision(session, row.plan)
    session.run(
        update(t.leases)
        .where(t.leases.c.lease == row.lease)
        .values(state=state, deadline=moved.deadline, revision=revision, **values)
    )


def _end(session: Session, row: Any, reason: str, *, outcome: str) -> None:
    """End a lease, free its slot, put a lost replica on record, and tell the watchers."""
    revision = _next_revision(session, row.plan)
    values = {"state": "ENDED", "reason": reason[: m.MAX_REASON], "ended_at": session.now, "deadline": None}
    session.run(update(t.leases).where(t.leases.c.lease == row.lease).values(revision=revision, **values))
    session.run(update(t.slots).where(t.slots.c.lease == row.lease).values(lease=None))
    if row.state == "PROVEN" and outcome in ("expired", "revoked"):
        note_losses(session, row.plan, lost=1, proven=0)
    _log("claim.ended", row.device, row.name, row.lease, row.epoch, outcome, reason=reason[: m.MAX_REASON])


def _end_older_starts(session: Session, device: Device, generation: int, *, keep: tuple[bytes, ...]) -> None:
    """End the leases of a device's earlier starts, save those that the new start took over."""
    older = (t.leases.c.device == device.key) & (t.leases.c.start_generation < generation)
    for row in _active(session, older):
        if row.lease not in keep:
            _end(session, row, "the device started again", outcome="restarted")


def _next_revision(session: Session, plan: bytes) -> int:
    revision: int = session.value(
        update(t.plans)
        .where(t.plans.c.plan == plan)
        .values(revision=t.plans.c.revision + 1)
        .returning(t.plans.c.revision)
    )
    session.touched.add(plan)
    return revision


def _log(event: str, device: bytes, window: str, lease: bytes, epoch: int, outcome: str, **more: Any) -> None:
    log.info(
        event,
        device=address_of(device),
        window=window,
        lease=bytes(lease).hex(),
        epoch=epoch,
        outcome=outcome,
        **more,
    )

"""What is on record about a wallet in the store: violations, quarantines, releases, disputes and decisions.

Each function is one piece of work inside a `Session` of `market.store`. A quarantine is one transaction: the
record, the void of what waits in escrow, the end of every claim of the wallet at all its devices. Records
that nobody disputes are kept within a bound for each wallet; quarantines that stand always.
"""

from __future__ import annotations

import math
import secrets
from typing import Any, Final

import structlog
from sqlalchemy import delete, func, insert, select, update

from relay.errors import Refused
from relay.identity import Certificate, PublicKey, SignedDocument, address_of

from . import banking, escrow, leasing
from . import messages as m
from . import tables as t
from .admission import Device
from .bookings import lock_head
from .escrow import EscrowRules
from .evidence import Evidence
from .standing import FOR_GOOD_S, MAX_QUARANTINES, quarantine_s
from .store import Session
from .wire import BackboneId, RecordId

log = structlog.get_logger("market")

KEPT_RECORDS: Final = 100
"""Violations and releases kept of each wallet, the latest."""

KEPT_EVIDENCE: Final = 20
"""Of so many of these the signed evidence is kept as well."""

MAX_TEXT: Final = 1000
MAX_DISPUTES: Final = 16
"""Most undecided disputes of one wallet."""

SHOWN: Final = 200
RELEASES_S: Final = 86_400.0
"""Releases within a day are one record."""


# --- what backbones report ---------------------------------------------------------------------------------


def report(
    session: Session, request: m.ViolationReport, evidence: Evidence, certificate: Certificate
) -> m.Done:
    """Keep one violation with its evidence. Sending it again changes nothing."""
    _require_wallet(session, evidence.wallet)
    values = {
        "kind": "violation",
        "wallet": evidence.wallet,
        "backbone": evidence.backbone,
        "device": evidence.device,
        "reason": request.reason[:MAX_TEXT],
        "evidence": None if evidence.document is None else evidence.document.to_bytes(),
        "certificate": certificate.document.to_bytes(),
        "facts": {
            "layer": evidence.layer,
            "expert": evidence.expert,
            "call": evidence.call,
            "d": evidence.d,
            "limit": evidence.limit,
            "numerics": evidence.numerics,
            "precision": evidence.precision,
            "window": evidence.window.name,
        },
    }
    if session.insert_once(insert(t.trust_records).values(id=request.id, at=session.now, **values)):
        _prune(session, evidence.wallet)
    return m.Done()


def quarantine(
    session: Session, request: m.QuarantineRequest, certificate: Certificate
) -> m.QuarantineAnswer:
    """Put a wallet out: void its escrow, end its claims. Sending it again changes nothing.

    A wallet that is out already stays out as long as before: several backbones may find it out at once.
    """
    lock_head(session)
    wallet = _require_wallet(session, request.wallet, lock=True)
    known = _record(session, request.id)
    if known is None and wallet.quarantined_until > session.now:
        latest = _latest_standing(session, request.wallet)
        known = latest if latest is not None and latest.until > session.now else None
    if known is not None:
        return _answer(known, session.now)
    return _answer(_put_out(session, request, certificate, wallet), session.now)


def _put_out(session: Session, request: m.QuarantineRequest, certificate: Certificate, wallet: Any) -> Any:
    standing = select(func.count()).where(escrow.standing_quarantines(request.wallet))
    number = int(session.value(standing.select_from(t.trust_records))) + 1
    until = session.now + min(quarantine_s(number), FOR_GOOD_S)
    voided = escrow.void_all(session, request.wallet, request.id)
    reason = request.reason[:MAX_TEXT]
    session.run(
        insert(t.trust_records).values(
            id=request.id,
            wallet=request.wallet,
            kind="quarantine",
            at=session.now,
            backbone=certificate.id,
            reason=reason,
            facts={},
            number=number,
            until=until,
            amount=voided,
        )
    )
    records = t.trust_records.c
    mine = (records.wallet == request.wallet) & (records.kind == "violation")
    led = mine & records.quarantine.is_(None) & records.decision.is_(None)
    session.run(update(t.trust_records).where(led).values(quarantine=request.id))
    here = t.wallets.c.wallet == request.wallet
    until = max(until, wallet.quarantined_until)
    session.run(update(t.wallets).where(here).values(quarantined_until=until, calls_before=wallet.calls))
    ended = leasing.revoke_all(session, request.wallet, f"quarantine: {reason}")
    log.warning(
        "wallet.quarantined",
        wallet=address_of(request.wallet),
        number=number,
        until_s=round(until - session.now),
        void_bytes=voided,
        claims=ended,
        reason=reason,
    )
    return _record(session, request.id)


def _answer(row: Any, now: float) -> m.QuarantineAnswer:
    return m.QuarantineAnswer(
        id=RecordId(row.id),
        number=row.number,
        left_s=max(0.0, row.until - now),
        for_good=row.number > MAX_QUARANTINES,
        void=row.amount,
    )


def note_released(session: Session, wallet: PublicKey, amount: int, rules: EscrowRules) -> None:
    """Put a release on record: one record for all within a day."""
    records = t.trust_records.c
    lately = (records.wallet == wallet) & (records.kind == "release")
    row = session.row(
        select(t.trust_records)
        .where(lately, records.at > session.now - RELEASES_S)
        .order_by(records.at.desc())
        .limit(1)
    )
    if row is not None:
        same = records.id == row.id
        session.run(update(t.trust_records).where(same).values(amount=records.amount + amount))
        return
    session.run(
        insert(t.trust_records).values(
            id=secrets.token_bytes(16),
            wallet=wallet,
            kind="release",
            at=session.now,
            reason=f"earned for good: {rules.calls} further accepted calls, or {rules.left_s / 86_400:g} "
            "days since the wallet left, without a quarantine",
            facts={},
            amount=amount,
        )
    )
    _prune(session, wallet)


# --- disputes ----------------------------------------------------------------------------------------------


def dispute(session: Session, device: Device, request: m.DisputeRequest) -> m.TrustRecord:
    """Put an owner's objection on record. The first one to a record stays; a violation's goes to the
    quarantine that it led to.
    """
    if not request.reason.strip():
        raise Refused("bad_request", "a dispute says why: --reason TEXT")
    row = _require_record(session, request.record, wallet=device.wallet)
    if row.kind == "release":
        raise Refused("bad_request", "a release takes nothing away: there is nothing to dispute")
    if row.quarantine is not None:
        row = _require_record(session, row.quarantine, wallet=device.wallet)
    if row.decision is not None:
        raise Refused("conflict", f"this was decided already: {row.decision}, because {row.decision_reason}")
    if row.disputed_at is None:
        records = t.trust_records.c
        open_ones = (
            (records.wallet == device.wallet) & records.disputed_at.is_not(None) & records.decision.is_(None)
        )
        count = session.value(select(func.count()).select_from(t.trust_records).where(open_ones))
        if count >= MAX_DISPUTES:
            raise Refused("quota", f"{count} disputes of this wallet wait for the operator: wait for those")
        values = {"disputed_at": session.now, "dispute": request.reason.strip()[:MAX_TEXT]}
        session.run(update(t.trust_records).where(records.id == row.id).values(**values))
        log.info("dispute.filed", wallet=address_of(device.wallet), record=bytes(row.id).hex())
    return _shown(_record(session, row.id))


def decide(session: Session, record: bytes, request: m.DecisionRequest) -> m.TrustRecord:
    """The operator's word on a violation or quarantine, disputed or not. The same word again changes nothing.

    Overturning a quarantine ends it and compensates every entry that voided something for it.
    """
    if not request.reason.strip():
        raise Refused("bad_request", "a decision says why: --reason TEXT")
    lock_head(session)
    row = _record(session, record)
    if row is None or row.kind == "release":
        raise Refused("not_found", "there is no violation or quarantine of that id")
    decision = "upheld" if request.uphold else "overturned"
    if row.decision is not None:
        if row.decision == decision:
            return _shown(row)
        raise Refused("conflict", f"this was decided already: {row.decision}, because {row.decision_reason}")
    _require_wallet(session, row.wallet, lock=True)
    values = {"decision": decision, "decision_reason": request.reason.strip()[:MAX_TEXT]}
    here = t.trust_records.c.id == record
    session.run(update(t.trust_records).where(here).values(decided_at=session.now, **values))
    returned = 0
    if not request.uphold and row.kind == "quarantine":
        returned = _lift(session, row)
    log.warning(
        "dispute.decided",
        wallet=address_of(row.wallet),
        record=bytes(record).hex(),
        outcome=decision,
        returned_bytes=returned,
        reason=values["decision_reason"],
    )
    return _shown(_record(session, record))


def _lift(session: Session, row: Any) -> int:
    """End a quarantine that was overturned and give back what it took; returns how many bytes."""
    wallet = PublicKey(row.wallet)
    records = t.trust_records.c
    standing = escrow.standing_quarantines(wallet)
    later = session.value(
        select(records.id).where(standing, records.at > row.at).order_by(records.at).limit(1)
    )
    returned = escrow.give_back(session, wallet, row.id, later=later)
    until = session.value(select(func.max(records.until)).where(standing))
    values: dict[str, Any] = {"quarantined_until": 0.0 if until is None else until}
    if until is None:
        values["calls_before"] = 0
    session.run(update(t.wallets).where(t.wallets.c.wallet == wallet).values(**values))
    return returned


# --- what people read --------------------------------------------------------------------------------------


def trust(session: Session, wallet: PublicKey, rules: EscrowRules) -> m.TrustAnswer:
    """What is on record about one wallet, the latest first."""
    row = session.row(select(t.wallets).where(t.wallets.c.wallet == wallet))
    records = t.trust_records.c
    rows = session.rows(
        select(t.trust_records).where(records.wallet == wallet).order_by(records.at.desc()).limit(SHOWN)
    )
    standing = [found for found in rows if found.kind == "quarantine" and found.decision != "overturned"]
    until = 0.0 if row is None else row.quarantined_until
    balance = banking.statement(session, wallet)
    return m.TrustAnswer(
        wallet=wallet,
        calls=0 if row is None else row.calls,
        quarantines=max((found.number for found in standing), default=0),
        quarantine_left_s=max(0.0, until - session.now),
        for_good=any(found.number > MAX_QUARANTINES for found in standing),
        release_in_calls=escrow.calls_to_release(session, wallet, rules),
        records=tuple(_shown(found) for found in rows),
        escrow=balance.escrow,
        available=balance.available,
        void=balance.void,
    )


def record(session: Session, id_: bytes, *, wallet: PublicKey | None) -> m.RecordAnswer:
    """One record with its evidence; with `wallet`, only where it is that wallet's."""
    row = _require_record(session, id_, wallet=wallet)
    known = row.evidence is not None
    return m.RecordAnswer(
        _shown(row),
        SignedDocument.from_bytes(row.evidence) if known else None,
        SignedDocument.from_bytes(row.certificate) if known else None,
    )


def disputes(session: Session) -> m.DisputesAnswer:
    """The disputes, those that wait for a decision first, then the latest."""
    records = t.trust_records.c
    rows = session.rows(
        select(t.trust_records)
        .where(records.disputed_at.is_not(None))
        .order_by(records.decided_at.is_not(None), records.disputed_at.desc())
        .limit(SHOWN)
    )
    return m.DisputesAnswer(tuple(_shown(row) for row in rows))


def latest_records(session: Session) -> m.DisputesAnswer:
    """The latest records of all wallets, releases left out."""
    records = t.trust_records.c
    rows = session.rows(
        select(t.trust_records).where(records.kind != "release").order_by(records.at.desc()).limit(SHOWN)
    )
    return m.DisputesAnswer(tuple(_shown(row) for row in rows))


# --- pieces ------------------------------------------------------------------------------------------------


def _record(session: Session, id_: bytes) -> Any:
    return session.row(select(t.trust_records).where(t.trust_records.c.id == id_))


def _require_record(session: Session, id_: bytes, *, wallet: bytes | None) -> Any:
    row = _record(session, id_)
    if row is None or (wallet is not None and row.wallet != wallet):
        raise Refused("not_found", f"there is no record {id_.hex()} here (kvasir-node audit show lists them)")
    return row


def _latest_standing(session: Session, wallet: bytes) -> Any:
    found = escrow.last_quarantine(session, wallet)
    return None if found is None else _record(session, found.id)


def _require_wallet(session: Session, wallet: bytes, *, lock: bool = False) -> Any:
    statement = select(t.wallets).where(t.wallets.c.wallet == wallet)
    row = session.row(statement.with_for_update() if lock else statement)
    if row is None:
        raise Refused("not_found", f"no device of wallet {address_of(wallet)} ever signed in here")
    return row


def _prune(session: Session, wallet: bytes) -> None:
    """Forget the oldest violations and releases of a wallet, but nothing that is disputed and undecided."""
    records = t.trust_records.c
    mine = (
        (records.wallet == wallet)
        & (records.kind != "quarantine")
        & (records.disputed_at.is_(None) | records.decision.is_not(None))
    )
    newest = [
        row.at
        for row in session.rows(
            select(records.at).where(mine).order_by(records.at.desc()).limit(KEPT_RECORDS + 1)
        )
    ]
    if len(newest) > KEPT_RECORDS:
        session.run(delete(t.trust_records).where(mine, records.at <= newest[KEPT_RECORDS]))
    if len(newest) > KEPT_EVIDENCE:
        old = mine & (records.at <= newest[KEPT_EVIDENCE]) & records.evidence.is_not(None)
        session.run(update(t.trust_records).where(old).values(evidence=None, certificate=None))


def _shown(row: Any) -> m.TrustRecord:
    facts = row.facts
    return m.TrustRecord(
        id=RecordId(row.id),
        wallet=PublicKey(row.wallet),
        kind=row.kind,
        at=row.at,
        reason=row.reason,
        backbone=None if row.backbone is None else BackboneId(row.backbone),
        device=None if row.device is None else PublicKey(row.device),
        window=facts.get("window"),
        layer=facts.get("layer"),
        expert=facts.get("expert"),
        call=facts.get("call"),
        d=facts.get("d"),
        limit=facts.get("limit"),
        numerics=facts.get("numerics"),
        precision=facts.get("precision"),
        evidence=row.evidence is not None,
        quarantine=None if row.quarantine is None else RecordId(row.quarantine),
        number=row.number,
        until=None if row.until is None or not math.isfinite(row.until) else row.until,
        for_good=row.kind == "quarantine" and row.number > MAX_QUARANTINES,
        amount=row.amount,
        disputed_at=row.disputed_at,
        dispute=row.dispute,
        decided_at=row.decided_at,
        decision=row.decision,
        decision_reason=row.decision_reason,
    )

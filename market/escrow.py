"""Escrow in the store: lots that wait, their release, their void and their return.

Each function is one piece of work inside a `Session` of `market.store`; the rules are in `market.standing`.
The lots of a wallet that wait add up to its escrow account, always: both change in one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import delete, exists, func, insert, or_, select, update

from relay.identity import PublicKey

from . import ledger
from . import tables as t
from .bookings import lock_head, post_entry
from .receipts import Receipt
from .standing import ESCROW_CALLS, ESCROW_S, Quarantine, entry_reference, is_released, late_bytes
from .store import Session

WALLETS_AT_ONCE: Final = 64
"""Wallets whose lots are released in one transaction."""


@dataclass(frozen=True, slots=True)
class EscrowRules:
    """A lot is a wallet's for good after so many further accepted calls, or so long after the wallet left."""

    calls: int = ESCROW_CALLS
    left_s: float = ESCROW_S


def keep(session: Session, receipt: Receipt, previous: Receipt | None, earned: int) -> int:
    """Put what a receipt issued into escrow as lots; returns how much of it is void at once (late bytes).

    The ledger's head is locked, the entry that issued it is posted, the wallet's calls are counted.
    """
    row = session.row(select(t.wallets).where(t.wallets.c.wallet == receipt.wallet).with_for_update())
    late, standing = 0, None
    if row.quarantined_until > 0:
        standing = last_quarantine(session, receipt.wallet)
    if standing is not None:
        late = late_bytes(standing, receipt, previous, _claim_times(session, receipt))
    for part, amount in enumerate((earned - late, late)):
        if amount:
            values = {"wallet": receipt.wallet, "amount": amount, "calls": row.calls}
            key = {"reference": receipt.digest, "part": part}
            session.run(insert(t.lots).values(**key, **values, posted_at=session.now))
    if late:
        assert standing is not None
        reference = entry_reference("late void", standing.id, receipt.digest)
        entry = ledger.void(
            lock_head(session),
            wallet=receipt.wallet,
            amount=late,
            reference=reference,
            posted_at=int(session.now),
        )
        post_entry(session, entry)
        lot = (t.lots.c.reference == receipt.digest) & (t.lots.c.part == 1)
        session.run(update(t.lots).where(lot).values(quarantine=standing.id, entry=reference))
        quarantine = t.trust_records.c.id == standing.id
        amount_now = t.trust_records.c.amount + late
        session.run(update(t.trust_records).where(quarantine).values(amount=amount_now))
    return late


def _claim_times(session: Session, receipt: Receipt) -> dict[bytes, float]:
    leases = [leaf.lease for leaf in receipt.leases]
    rows = session.rows(
        select(t.leases.c.lease, t.leases.c.claimed_at).where(
            t.leases.c.lease.in_(leases), t.leases.c.wallet == receipt.wallet
        )
    )
    return {row.lease: row.claimed_at for row in rows}


def standing_quarantines(wallet: bytes) -> Any:
    """The condition for a wallet's quarantines that were not overturned."""
    records = t.trust_records.c
    return (
        (records.wallet == wallet)
        & (records.kind == "quarantine")
        & or_(records.decision.is_(None), records.decision != "overturned")
    )


def last_quarantine(session: Session, wallet: bytes) -> Quarantine | None:
    """The wallet's latest quarantine that stands, over or not."""
    records = t.trust_records.c
    row = session.row(
        select(t.trust_records).where(standing_quarantines(wallet)).order_by(records.at.desc()).limit(1)
    )
    return None if row is None else Quarantine(row.id, row.at, row.until)


def void_all(session: Session, wallet: PublicKey, quarantine: bytes, *, only: Any = None) -> int:
    """Take all lots that wait (those of condition `only`) for a quarantine; returns how many bytes."""
    waiting = (t.lots.c.wallet == wallet) & t.lots.c.quarantine.is_(None)
    if only is not None:
        waiting &= only
    lots = session.rows(select(t.lots).where(waiting).order_by(t.lots.c.reference, t.lots.c.part))
    amount: int = sum(lot.amount for lot in lots)
    if not amount:
        return 0
    reference = entry_reference("void", quarantine, *(lot.reference for lot in lots))
    entry = ledger.void(
        lock_head(session), wallet=wallet, amount=amount, reference=reference, posted_at=int(session.now)
    )
    post_entry(session, entry)
    session.run(update(t.lots).where(waiting).values(quarantine=quarantine, entry=reference))
    return amount


def give_back(session: Session, wallet: PublicKey, quarantine: bytes, *, later: bytes | None) -> int:
    """Compensate every entry that voided something for a quarantine; the lots wait again. Returns the bytes.

    Where the wallet was caught again since (`later`), its lots go void for that one.
    """
    taken = (t.lots.c.wallet == wallet) & (t.lots.c.quarantine == quarantine)
    lots = session.rows(select(t.lots).where(taken))
    for reference in sorted({lot.entry for lot in lots}):
        entry = _read_entry(session, reference)
        undone = ledger.compensate(
            lock_head(session),
            entry,
            reference=entry_reference("compensate", reference),
            posted_at=int(session.now),
        )
        post_entry(session, undone)
    session.run(update(t.lots).where(taken).values(quarantine=None, entry=None))
    if later is not None and lots:
        again = t.lots.c.reference.in_([lot.reference for lot in lots])
        void_all(session, wallet, later, only=again)
    returned: int = sum(lot.amount for lot in lots)
    return returned


def _read_entry(session: Session, reference: bytes) -> ledger.Entry:
    row = session.row(select(t.ledger_entries).where(t.ledger_entries.c.reference == reference))
    postings = session.rows(
        select(t.ledger_postings)
        .where(t.ledger_postings.c.entry == row.sequence)
        .order_by(t.ledger_postings.c.position)
    )
    moved = tuple(ledger.Posting(posting.account, posting.amount) for posting in postings)
    return ledger.Entry(row.sequence, row.kind, row.reference, row.posted_at, moved, row.previous)


# --- what time and calls release ---------------------------------------------------------------------------


def note_leavers(session: Session) -> None:
    """Write down when a wallet with something in escrow gave up its last claim, or took one again."""
    active = exists().where(t.leases.c.wallet == t.wallets.c.wallet, t.leases.c.state != "ENDED")
    waiting = exists().where(t.lots.c.wallet == t.wallets.c.wallet, t.lots.c.quarantine.is_(None))
    left = t.wallets.c.left_at
    session.run(update(t.wallets).where(left.is_(None), waiting, ~active).values(left_at=session.now))
    session.run(update(t.wallets).where(left.is_not(None), active).values(left_at=None))


def release_due(session: Session, rules: EscrowRules) -> list[tuple[PublicKey, int]]:
    """Release the lots that are earned for good, of some wallets: which, and how many bytes each.

    Call it again while it releases something.
    """
    due = or_(
        t.wallets.c.calls >= t.lots.c.calls + rules.calls,
        t.wallets.c.left_at <= session.now - rules.left_s,
    )
    wallets = session.rows(
        select(t.lots.c.wallet)
        .join(t.wallets, t.wallets.c.wallet == t.lots.c.wallet)
        .where(t.lots.c.quarantine.is_(None), due)
        .distinct()
        .order_by(t.lots.c.wallet)
        .limit(WALLETS_AT_ONCE)
    )
    if not wallets:
        return []
    lock_head(session)
    return [(PublicKey(row.wallet), _release(session, PublicKey(row.wallet), rules)) for row in wallets]


def _release(session: Session, wallet: PublicKey, rules: EscrowRules) -> int:
    """Release what is due of one wallet; the head is locked, so that no quarantine comes between."""
    row = session.row(select(t.wallets).where(t.wallets.c.wallet == wallet).with_for_update())
    waiting = (t.lots.c.wallet == wallet) & t.lots.c.quarantine.is_(None)
    lots = [
        lot
        for lot in session.rows(select(t.lots).where(waiting).order_by(t.lots.c.reference, t.lots.c.part))
        if is_released(
            lot.calls,
            calls=row.calls,
            left_at=row.left_at,
            now=session.now,
            escrow_calls=rules.calls,
            escrow_s=rules.left_s,
        )
    ]
    amount: int = sum(lot.amount for lot in lots)
    if not amount:
        return 0
    entry = ledger.release(
        lock_head(session),
        wallet=wallet,
        amount=amount,
        reference=entry_reference("release", *(lot.reference + bytes([lot.part]) for lot in lots)),
        posted_at=int(session.now),
    )
    post_entry(session, entry)
    for lot in lots:
        gone = (t.lots.c.reference == lot.reference) & (t.lots.c.part == lot.part)
        session.run(delete(t.lots).where(gone))
    return amount


def calls_to_release(session: Session, wallet: bytes, rules: EscrowRules) -> int | None:
    """After how many more accepted calls the wallet's oldest lot is released; None where none waits."""
    oldest = session.value(
        select(func.min(t.lots.c.calls)).where(t.lots.c.wallet == wallet, t.lots.c.quarantine.is_(None))
    )
    if oldest is None:
        return None
    calls = session.value(select(t.wallets.c.calls).where(t.wallets.c.wallet == wallet))
    return max(0, int(oldest) + rules.calls - int(calls))

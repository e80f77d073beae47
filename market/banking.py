"""Receipts, acknowledgements and the credit ledger in the store.

Each function is one piece of work inside a `Session` of `market.store`. A posted receipt and its ledger
entry are one transaction, so a market killed at any point has both or neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import structlog
from sqlalchemy import func, insert, select, update

from relay.errors import IdentityError, Refused
from relay.identity import Certificate, PublicKey, SignedDocument, address_of, unpack_canonical

from . import escrow, ledger
from . import messages as m
from . import tables as t
from .bookings import lock_head, post_entry
from .receipts import Receipt, check_successor, open_acknowledgement, read_receipt
from .store import Session

log = structlog.get_logger("market")

TAKEN: Final = ("void", "compensate")
"""Kinds of entries that take from an escrow, and give back what was taken wrongly."""

BATCH: Final = 4096
"""Entries read at once while the ledger is checked."""

WHOLE_S: Final = 3600.0
BROKEN_S: Final = 60.0
"""How often all of the ledger is checked again while it holds, and while it does not."""


def post_receipt(session: Session, receipt: Receipt, certificate: Certificate) -> m.Done:
    """Store a verified receipt and issue what it adds to its chain. The same one again changes nothing.

    Raises `Refused`: "replay", "conflict" (a gap or a fork), "forbidden" (no such device or wallet).
    """
    head = lock_head(session)
    last = _last_receipt(session, receipt.backbone, receipt.device)
    if last is not None and last.digest == receipt.digest:
        return m.Done()
    if _known(session, receipt.digest):
        return m.Done()
    check_successor(last, receipt)
    granted = select(t.grants.c.hash).where(
        t.grants.c.device == receipt.device, t.grants.c.wallet == receipt.wallet
    )
    if session.value(granted.limit(1)) is None:
        raise Refused("forbidden", "that wallet never granted that device in this swarm")
    earned = receipt.bytes - (0 if last is None else last.bytes)
    calls = receipt.calls - (0 if last is None else last.calls)
    _store_receipt(session, receipt, certificate)
    late = 0
    if earned:
        entry = ledger.issue(
            head,
            wallet=receipt.wallet,
            amount=earned,
            reference=receipt.digest,
            posted_at=int(session.now),
        )
        post_entry(session, entry)
    wallet = t.wallets.c.wallet == receipt.wallet
    session.run(update(t.wallets).where(wallet).values(calls=t.wallets.c.calls + calls))
    if earned:
        late = escrow.keep(session, receipt, last, earned)
    log.info(
        "receipt.posted",
        device=address_of(receipt.device),
        wallet=address_of(receipt.wallet),
        sequence=receipt.sequence,
        bytes=earned,
        calls=calls,
        void_bytes=late,
        outcome="posted",
    )
    return m.Done()


def _known(session: Session, digest: bytes) -> bool:
    found = select(t.receipts.c.sequence).where(t.receipts.c.digest == digest)
    return session.value(found) is not None


def _last_receipt(session: Session, backbone: bytes, device: bytes) -> Receipt | None:
    row = _last_row(session, backbone, device)
    if row is None:
        return None
    document = SignedDocument.from_bytes(row.document)
    return read_receipt(unpack_canonical(document.body), document)


def _last_row(session: Session, backbone: bytes, device: bytes) -> Any:
    receipts = t.receipts.c
    return session.row(
        select(t.receipts)
        .where(receipts.backbone == backbone, receipts.device == device)
        .order_by(receipts.sequence.desc())
        .limit(1)
    )


def _store_receipt(session: Session, receipt: Receipt, certificate: Certificate) -> None:
    assert receipt.document is not None
    session.run(
        insert(t.receipts).values(
            backbone=receipt.backbone,
            device=receipt.device,
            sequence=receipt.sequence,
            digest=receipt.digest,
            wallet=receipt.wallet,
            bytes=receipt.bytes,
            calls=receipt.calls,
            document=receipt.document.to_bytes(),
            certificate=certificate.document.to_bytes(),
            posted_at=session.now,
        )
    )
    here = (t.chains.c.backbone == receipt.backbone) & (t.chains.c.device == receipt.device)
    values = {"wallet": receipt.wallet, "sequence": receipt.sequence, "bytes": receipt.bytes}
    since = func.coalesce(t.chains.c.unacknowledged_since, session.now)
    if session.run(update(t.chains).where(here).values(unacknowledged_since=since, **values)):
        return
    key = {"backbone": receipt.backbone, "device": receipt.device}
    session.run(insert(t.chains).values(unacknowledged_since=session.now, **key, **values))


def last_receipt(session: Session, backbone: bytes, device: bytes) -> m.ReceiptAnswer:
    """The last receipt of a chain, for the backbone to go on from."""
    row = _last_row(session, backbone, device)
    if row is None:
        return m.ReceiptAnswer()
    return m.ReceiptAnswer(
        SignedDocument.from_bytes(row.document),
        SignedDocument.from_bytes(row.certificate),
        row.acknowledgement is not None,
    )


def acknowledge(session: Session, document: SignedDocument, device: PublicKey) -> m.Done:
    """Store a device's countersignature; it covers all earlier receipts of the chain too."""
    digest = open_acknowledgement(document, device)
    row = session.row(select(t.receipts).where(t.receipts.c.digest == digest))
    if row is None:
        raise Refused("not_found", "no such receipt is posted yet", retry_after_s=10)
    if row.device != device:
        raise IdentityError("a device acknowledges its own receipts only")
    session.run(
        update(t.receipts).where(t.receipts.c.digest == digest).values(acknowledgement=document.to_bytes())
    )
    here = (t.chains.c.backbone == row.backbone) & (t.chains.c.device == row.device)
    chain = session.row(select(t.chains).where(here))
    if row.sequence <= chain.acknowledged_sequence:
        return m.Done()
    values: dict[str, Any] = {"acknowledged_sequence": row.sequence, "acknowledged_bytes": row.bytes}
    values["unacknowledged_since"] = None if row.sequence == chain.sequence else session.now
    session.run(update(t.chains).where(here).values(**values))
    return m.Done()


# --- the ledger --------------------------------------------------------------------------------------------


class LedgerCheck:
    """What one process has checked of the ledger, so that it checks each entry once.

    Each look first makes sure that the entry it stopped at is still the same, checks what came after it,
    and compares the balances. A change to an older entry is found when all is checked again: at the start,
    on demand, every hour. Use one look at a time, each in a transaction begun after the one before.
    """

    def __init__(self) -> None:
        self._progress = ledger.Progress()
        self._problem: str | None = None
        self._whole_at = -math.inf

    def check(self, session: Session, *, whole: bool = False) -> str | None:
        """What is wrong with the ledger, or None."""
        again_s = WHOLE_S if self._problem is None else BROKEN_S
        if whole or session.now - self._whole_at >= again_s:
            self._progress, self._problem, self._whole_at = ledger.Progress(), None, session.now
        if self._problem is None:
            try:
                self._progress = _checked(session, self._progress)
            except ledger.LedgerBroken as error:
                self._problem = str(error)
                log.error("ledger.broken", reason=self._problem)
        return self._problem


def check_ledger(session: Session) -> dict[str, int]:
    """Every balance, recomputed from all entries. Raises `LedgerBroken` if anything does not hold."""
    return _checked(session, ledger.Progress()).balances


def _checked(session: Session, progress: ledger.Progress) -> ledger.Progress:
    """`progress` and all entries after it, checked, balances too. Raises `LedgerBroken`."""
    entries = t.ledger_entries.c
    if progress.head.sequence:
        stored = session.value(select(entries.hash).where(entries.sequence == progress.head.sequence))
        if stored != progress.head.hash:
            raise ledger.LedgerBroken(f"ledger entry {progress.head.sequence} is gone or was replaced")
    balances = dict(progress.balances)
    head = progress.head
    while True:
        found = session.rows(
            select(t.ledger_entries)
            .where(entries.sequence > head.sequence)
            .order_by(entries.sequence)
            .limit(BATCH)
        )
        if not found:
            break
        postings = _postings(session, head.sequence, found[-1].sequence)
        read = [_entry(row, postings.get(row.sequence, ())) for row in found]
        head = ledger.check_entries(read, (row.hash for row in found), head=head, balances=balances)
    if balances != {row.account: row.balance for row in session.rows(select(t.accounts))}:
        raise ledger.LedgerBroken("the stored balances are not what the entries add up to")
    if sum(balances.values()):
        raise ledger.LedgerBroken("the balances do not add up to zero")
    return ledger.Progress(head, balances)


def _postings(session: Session, after: int, last: int) -> dict[int, list[ledger.Posting]]:
    """The postings of the entries after `after` up to `last`."""
    columns = t.ledger_postings.c
    postings: dict[int, list[ledger.Posting]] = {}
    for row in session.rows(
        select(t.ledger_postings)
        .where(columns.entry > after, columns.entry <= last)
        .order_by(columns.entry, columns.position)
    ):
        postings.setdefault(row.entry, []).append(ledger.Posting(row.account, row.amount))
    return postings


def _entry(row: Any, postings: Sequence[ledger.Posting]) -> ledger.Entry:
    return ledger.Entry(row.sequence, row.kind, row.reference, row.posted_at, tuple(postings), row.previous)


# --- statements --------------------------------------------------------------------------------------------


def statement(session: Session, wallet: PublicKey) -> m.CreditStatement:
    """One wallet's balance."""
    names = {ledger.escrow(wallet): "escrow", ledger.available(wallet): "available"}
    balances = {
        names[row.account]: row.balance
        for row in session.rows(select(t.accounts).where(t.accounts.c.account.in_(names)))
    }
    counts = session.row(
        select(func.count().label("receipts")).select_from(t.receipts).where(t.receipts.c.wallet == wallet)
    )
    late = session.value(
        select(func.sum(t.chains.c.bytes - t.chains.c.acknowledged_bytes)).where(t.chains.c.wallet == wallet)
    )
    calls = session.value(select(t.wallets.c.calls).where(t.wallets.c.wallet == wallet))
    return m.CreditStatement(
        wallet=wallet,
        escrow=balances.get("escrow", 0),
        available=balances.get("available", 0),
        void=_voided(session, wallet),
        unacknowledged=int(late or 0),
        receipts=counts.receipts,
        calls=calls or 0,
    )


def _voided(session: Session, wallet: PublicKey) -> int:
    """What was taken back from a wallet's escrow, less what was given back."""
    taken = session.value(
        select(func.sum(t.ledger_postings.c.amount))
        .join(t.ledger_entries, t.ledger_entries.c.sequence == t.ledger_postings.c.entry)
        .where(t.ledger_entries.c.kind.in_(TAKEN), t.ledger_postings.c.account == ledger.escrow(wallet))
    )
    return -int(taken or 0)


def credit_table(session: Session, *, balanced: bool) -> m.CreditTable:
    """Every wallet's balance; `balanced`: whether the ledger was found to hold (see `LedgerCheck`)."""
    balances = {row.account: row.balance for row in session.rows(select(t.accounts))}
    receipts = _by_wallet(session, t.receipts.c.wallet, func.count())
    late = _by_wallet(session, t.chains.c.wallet, func.sum(t.chains.c.bytes - t.chains.c.acknowledged_bytes))
    voided = _all_voided(session) if ledger.VOID in balances else {}
    wallets = session.rows(select(t.wallets.c.wallet, t.wallets.c.calls).order_by(t.wallets.c.wallet))
    return m.CreditTable(
        balanced=balanced,
        issued=-balances.get(ledger.ISSUANCE, 0),
        entries=session.value(select(func.count()).select_from(t.ledger_entries)),
        wallets=tuple(
            m.CreditStatement(
                wallet=wallet,
                escrow=balances.get(ledger.escrow(wallet), 0),
                available=balances.get(ledger.available(wallet), 0),
                void=voided.get(ledger.escrow(wallet), 0),
                unacknowledged=late.get(wallet, 0),
                receipts=receipts.get(wallet, 0),
                calls=calls,
            )
            for wallet, calls in ((PublicKey(row.wallet), row.calls) for row in wallets)
        ),
    )


def _by_wallet(session: Session, wallet: Any, figure: Any) -> dict[bytes, int]:
    """One figure of every wallet."""
    return {key: int(value) for key, value in session.rows(select(wallet, figure).group_by(wallet))}


def _all_voided(session: Session) -> dict[str, int]:
    """What was taken back from each escrow account."""
    rows = session.rows(
        select(t.ledger_postings.c.account, func.sum(t.ledger_postings.c.amount))
        .join(t.ledger_entries, t.ledger_entries.c.sequence == t.ledger_postings.c.entry)
        .where(t.ledger_entries.c.kind.in_(TAKEN), t.ledger_postings.c.account.startswith(ledger.ESCROW))
        .group_by(t.ledger_postings.c.account)
    )
    return {account: -int(amount) for account, amount in rows}

"""Ledger entries in the store: where the chain stands, and one more entry.

Each function is one piece of work inside a `Session` of `market.store`.

Whoever books locks the chain's head first, before any wallet, window or lease, so that the order is the
same for all.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import insert, select, update

from . import ledger
from . import tables as t
from .store import Session

HEAD: Final = "ledger"


def lock_head(session: Session) -> ledger.Head:
    """Where the chain stands, locked: entries are appended one after another."""
    if session.value(select(t.meta.c.name).where(t.meta.c.name == HEAD)) is None:
        session.insert_once(insert(t.meta).values(name=HEAD, value=""))
    session.row(select(t.meta).where(t.meta.c.name == HEAD).with_for_update())
    row = session.row(select(t.ledger_entries).order_by(t.ledger_entries.c.sequence.desc()).limit(1))
    return ledger.Head() if row is None else ledger.Head(row.sequence, row.hash)


def post_entry(session: Session, entry: ledger.Entry) -> None:
    """Append one entry and move the balances. Its reference is unique, so it cannot be posted twice."""
    session.run(
        insert(t.ledger_entries).values(
            sequence=entry.sequence,
            kind=entry.kind,
            reference=entry.reference,
            posted_at=entry.posted_at,
            previous=entry.previous,
            hash=entry.hash,
        )
    )
    accounts = t.accounts.c
    for position, posting in enumerate(entry.postings):
        values = {"account": posting.account, "amount": posting.amount}
        session.run(insert(t.ledger_postings).values(entry=entry.sequence, position=position, **values))
        moved = {"balance": accounts.balance + posting.amount, "entries": accounts.entries + 1}
        if not session.run(update(t.accounts).where(accounts.account == posting.account).values(**moved)):
            session.run(insert(t.accounts).values(account=posting.account, balance=posting.amount, entries=1))

"""The credit ledger: double entry, append-only, hash-chained.

Every entry moves whole carried bytes between accounts and adds up to zero; nothing is ever changed, a
mistake is made good by a compensating entry. Each entry's hash covers the one before, so the last hash
vouches for all of it.

    issuance            what was ever issued, negative
    escrow:ADDRESS      earned, may still be taken back
    available:ADDRESS   earned for good
    void                taken back

Pure: knows entries and their rules; storing them, once per reference, is the store's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from relay.errors import KvasirError, LocalProtocolError
from relay.identity import PublicKey, address_of, pack

Kind = Literal["issue", "release", "void", "compensate"]
KINDS: Final = get_args(Kind)
ISSUANCE: Final = "issuance"
VOID: Final = "void"
ESCROW: Final = "escrow:"
"""How the name of an escrow account begins."""

GENESIS: Final = bytes(32)
"""`previous` of the first entry."""

MAX_AMOUNT: Final = (1 << 62) - 1


class LedgerBroken(KvasirError):  # noqa: N818 - says what is so
    """The stored ledger does not add up, or its hash chain does not hold."""

    code = "internal"


def escrow(wallet: PublicKey) -> str:
    """The account of what a wallet has earned and may still lose."""
    return f"{ESCROW}{address_of(wallet)}"


def available(wallet: PublicKey) -> str:
    """The account of what a wallet has earned for good."""
    return f"available:{address_of(wallet)}"


@dataclass(frozen=True, slots=True)
class Posting:
    """`amount` whole bytes onto `account` (negative: off it)."""

    account: str
    amount: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One movement. `reference` (32 bytes) names its cause and is unique; `posted_at` is in Unix seconds."""

    sequence: int
    kind: Kind
    reference: bytes
    posted_at: int
    postings: tuple[Posting, ...]
    previous: bytes

    @property
    def hash(self) -> bytes:
        """SHA-256 over everything in the entry, the hash of the one before included."""
        postings = [[posting.account, posting.amount] for posting in self.postings]
        fields = [1, self.sequence, self.kind, self.reference, self.posted_at, postings, self.previous]
        return hashlib.sha256(pack(fields)).digest()


@dataclass(frozen=True, slots=True)
class Head:
    """Where the chain stands: the last entry's sequence and hash."""

    sequence: int = 0
    hash: bytes = GENESIS


def make_entry(
    head: Head, kind: Kind, *, reference: bytes, postings: Iterable[Posting], posted_at: int
) -> Entry:
    """The entry after `head`. Raises `LocalProtocolError` unless it adds up to zero."""
    entry = Entry(head.sequence + 1, kind, reference, posted_at, tuple(postings), head.hash)
    problem = _problem(entry)
    if problem is not None:
        raise LocalProtocolError(f"not a ledger entry: {problem}")
    return entry


def issue(head: Head, *, wallet: PublicKey, amount: int, reference: bytes, posted_at: int) -> Entry:
    """Issuance to escrow: a receipt was posted."""
    postings = (Posting(ISSUANCE, -amount), Posting(escrow(wallet), amount))
    return make_entry(head, "issue", reference=reference, postings=postings, posted_at=posted_at)


def release(head: Head, *, wallet: PublicKey, amount: int, reference: bytes, posted_at: int) -> Entry:
    """Escrow to available: trust was earned."""
    postings = (Posting(escrow(wallet), -amount), Posting(available(wallet), amount))
    return make_entry(head, "release", reference=reference, postings=postings, posted_at=posted_at)


def void(head: Head, *, wallet: PublicKey, amount: int, reference: bytes, posted_at: int) -> Entry:
    """Escrow to void: the wallet was caught."""
    postings = (Posting(escrow(wallet), -amount), Posting(VOID, amount))
    return make_entry(head, "void", reference=reference, postings=postings, posted_at=posted_at)


def compensate(head: Head, entry: Entry, *, reference: bytes, posted_at: int) -> Entry:
    """The reverse of `entry`: how a mistake is made good."""
    postings = tuple(Posting(posting.account, -posting.amount) for posting in entry.postings)
    return make_entry(head, "compensate", reference=reference, postings=postings, posted_at=posted_at)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a ledger was checked, and every account's balance up to there."""

    head: Head = Head()
    balances: dict[str, int] = field(default_factory=dict)


def check_chain(entries: Iterable[Entry], hashes: Iterable[bytes]) -> dict[str, int]:
    """Every account's balance, after checking all of the ledger against the `hashes` stored with it.

    Raises `LedgerBroken` as `check_entries` does.
    """
    balances: dict[str, int] = {}
    check_entries(entries, hashes, head=Head(), balances=balances)
    return balances


def check_entries(
    entries: Iterable[Entry], hashes: Iterable[bytes], *, head: Head, balances: dict[str, int]
) -> Head:
    """Check the entries after `head` against the `hashes` stored with them; returns the last one's head.

    Adds what they move to `balances`, which are those at `head`. Raises `LedgerBroken` at the first entry
    that does not follow, does not add up, was changed, or takes an account other than issuance below zero.
    """
    for entry, stored in zip(entries, hashes, strict=True):
        problem = _problem(entry)
        if problem is None and (entry.sequence, entry.previous) != (head.sequence + 1, head.hash):
            problem = "it does not follow the entry before"
        if problem is None and entry.hash != stored:
            problem = "it was changed after it was written"
        for posting in entry.postings:
            balances[posting.account] = balances.get(posting.account, 0) + posting.amount
            if problem is None and balances[posting.account] < 0 and posting.account != ISSUANCE:
                problem = f"it takes {posting.account} below zero"
        if problem is not None:
            raise LedgerBroken(f"ledger entry {entry.sequence}: {problem}")
        head = Head(entry.sequence, stored)
    return head


def _problem(entry: Entry) -> str | None:
    if entry.kind not in KINDS or len(entry.reference) != 32:
        return f"kind {entry.kind!r} or its reference is not known"
    if sum(posting.amount for posting in entry.postings) != 0 or not entry.postings:
        return "its postings do not add up to zero"
    accounts = [posting.account for posting in entry.postings]
    if len(set(accounts)) != len(accounts):
        return "it names an account twice"
    if any(posting.amount == 0 or abs(posting.amount) > MAX_AMOUNT for posting in entry.postings):
        return "an amount is zero or out of range"
    return None

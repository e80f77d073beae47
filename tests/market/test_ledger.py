"""The ledger: nothing appears, nothing vanishes, nothing is changed afterwards."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market.ledger import (
    ISSUANCE,
    MAX_AMOUNT,
    VOID,
    Entry,
    Head,
    LedgerBroken,
    Posting,
    available,
    check_chain,
    compensate,
    escrow,
    issue,
    make_entry,
    release,
    void,
)
from relay.errors import LocalProtocolError
from relay.identity import SigningKey

WALLETS = [SigningKey(bytes([n]) * 32).public for n in range(1, 5)]
AT = 1_700_000_000


def reference(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


Step = tuple[str, int, int]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(["issue", "release", "void", "undo"]), st.integers(0, 3), st.integers(1, 10**12)
    ),
    max_size=40,
)


def play(script: list[Step]) -> tuple[list[Entry], dict[str, int]]:
    """Carry a script out as the store would, skipping what an account has not enough for."""
    entries: list[Entry] = []
    balances: dict[str, int] = {}
    head = Head()
    for number, (kind, who, amount) in enumerate(script):
        wallet = WALLETS[who]
        common: dict[str, Any] = {"reference": reference(number), "posted_at": AT + number}
        if kind == "undo":
            if not entries:
                continue
            entry = compensate(head, entries[amount % len(entries)], **common)
        else:
            make = {"issue": issue, "release": release, "void": void}[kind]
            entry = make(head, wallet=wallet, amount=amount, **common)
        after = {p.account: balances.get(p.account, 0) + p.amount for p in entry.postings}
        if any(balance < 0 for account, balance in after.items() if account != ISSUANCE):
            continue
        balances.update(after)
        entries.append(entry)
        head = Head(entry.sequence, entry.hash)
    return entries, balances


@given(steps)
def test_credit_is_conserved(script: list[Step]) -> None:
    entries, balances = play(script)
    checked = check_chain(entries, [entry.hash for entry in entries])
    assert checked == balances
    assert sum(checked.values()) == 0
    held = sum(balance for account, balance in checked.items() if account != ISSUANCE)
    assert held == -checked.get(ISSUANCE, 0)


@given(steps.filter(lambda script: len(script) > 2), st.integers(0, 100), st.sampled_from(range(7)))
def test_any_change_to_a_stored_entry_is_found(script: list[Step], at: int, how: int) -> None:
    entries, _ = play(script)
    if len(entries) < 2:
        return
    hashes = [entry.hash for entry in entries]
    at %= len(entries) - 1
    entry = entries[at]
    first = entry.postings[0]
    changed = [
        replace(entry, posted_at=entry.posted_at + 1),
        replace(entry, reference=reference(-1)),
        replace(entry, kind="void" if entry.kind != "void" else "issue"),
        replace(entry, previous=bytes([1]) * 32),
        replace(entry, sequence=entry.sequence + 1),
        replace(entry, postings=(replace(first, amount=first.amount + 1), *entry.postings[1:])),
        None,
    ][how]
    broken = [*entries[:at], *([changed] if changed is not None else []), *entries[at + 1 :]]
    kept = hashes if changed is not None else [*hashes[:at], *hashes[at + 1 :]]
    with pytest.raises(LedgerBroken):
        check_chain(broken, kept)


def test_the_accounts_of_each_kind() -> None:
    wallet = WALLETS[0]
    first = issue(Head(), wallet=wallet, amount=100, reference=reference(0), posted_at=AT)
    second = release(Head(1, first.hash), wallet=wallet, amount=60, reference=reference(1), posted_at=AT)
    third = void(Head(2, second.hash), wallet=wallet, amount=40, reference=reference(2), posted_at=AT)
    entries = [first, second, third]
    assert check_chain(entries, [entry.hash for entry in entries]) == {
        ISSUANCE: -100,
        escrow(wallet): 0,
        available(wallet): 60,
        VOID: 40,
    }


def test_an_account_below_zero_is_found() -> None:
    entry = release(Head(), wallet=WALLETS[0], amount=1, reference=reference(0), posted_at=AT)
    with pytest.raises(LedgerBroken, match="below zero"):
        check_chain([entry], [entry.hash])


@pytest.mark.parametrize(
    "postings",
    [
        (),
        (Posting("a", 1),),
        (Posting("a", 1), Posting("b", -2)),
        (Posting("a", 0), Posting("b", 0)),
        (Posting("a", 1), Posting("a", -1)),
        (Posting("a", MAX_AMOUNT + 1), Posting("b", -MAX_AMOUNT - 1)),
    ],
    ids=str,
)
def test_what_does_not_add_up_is_no_entry(postings: tuple[Posting, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        make_entry(Head(), "issue", reference=bytes(32), postings=postings, posted_at=AT)


def test_a_reference_has_32_bytes() -> None:
    with pytest.raises(LocalProtocolError):
        issue(Head(), wallet=WALLETS[0], amount=1, reference=b"", posted_at=AT)

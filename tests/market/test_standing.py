"""The rules of escrow and quarantine, without a store."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market.receipts import NO_PREVIOUS, LeaseLeaf, Receipt
from market.standing import (
    ESCROW_CALLS,
    ESCROW_S,
    MAX_QUARANTINES,
    Quarantine,
    entry_reference,
    is_released,
    late_bytes,
    quarantine_s,
)
from market.wire import BackboneId, LeaseId
from relay.identity import SigningKey

KEY = SigningKey(bytes([1]) * 32).public
OUT = Quarantine(bytes(16), at=1000.0, until=1900.0)
OLD, NEW, GONE = (LeaseId(bytes([n]) * 16) for n in (1, 2, 3))
CLAIMED: dict[bytes, float] = {OLD: 500.0, NEW: 2000.0}


def receipt(issued_at: int, total: int, **leaves: int) -> Receipt:
    leases = {"old": OLD, "new": NEW, "gone": GONE}
    named = tuple(LeaseLeaf(leases[name], 1, size, 1) for name, size in leaves.items())
    return Receipt(
        KEY, BackboneId(bytes(16)), KEY, KEY, 1, issued_at, total, 1, named, bytes(32), NO_PREVIOUS
    )


def test_quarantines_double_and_the_one_after_the_third_does_not_end() -> None:
    assert [quarantine_s(number) for number in (1, 2, 3)] == [900.0, 1800.0, 3600.0]
    assert math.isinf(quarantine_s(MAX_QUARANTINES + 1))


def test_a_lot_is_released_by_calls_or_after_its_wallet_left() -> None:
    def released(calls: int, left_at: float | None) -> bool:
        return is_released(10, calls=calls, left_at=left_at, now=ESCROW_S)

    assert not released(9 + ESCROW_CALLS, None)
    assert released(10 + ESCROW_CALLS, None)
    assert not released(10, 1.0)
    assert released(10, 0.0)


@pytest.mark.parametrize(
    ("one", "before", "late"),
    [
        (receipt(1500, 100, old=100), None, 100),
        (receipt(1500, 100, old=100), receipt(900, 60, old=60), 40),
        (receipt(2500, 100, old=60, new=40), None, 60),
        (receipt(2500, 100, old=60, new=40), receipt(1500, 60, old=60), 0),
        (receipt(2500, 100), None, 0),  # nothing but its time says when it was earned
        (receipt(1900, 100), None, 100),
        (receipt(1500, 100, gone=50, new=50), None, 50),
        (receipt(2500, 100, gone=50, new=50), None, 0),
    ],
)
def test_what_was_carried_before_a_quarantine_is_late(
    one: Receipt, before: Receipt | None, late: int
) -> None:
    assert late_bytes(OUT, one, before, CLAIMED) == late


@given(
    st.integers(0, 3000),
    st.dictionaries(st.sampled_from(["old", "new", "gone"]), st.integers(0, 1000), max_size=3),
    st.integers(0, 5000),
)
def test_never_more_is_late_than_was_earned(issued_at: int, leaves: dict[str, int], total: int) -> None:
    assert 0 <= late_bytes(OUT, receipt(issued_at, total, **leaves), None, CLAIMED) <= total


def test_a_cause_has_one_reference_and_no_other_cause_has_it() -> None:
    causes = [("void", b"a", b"b"), ("void", b"ab"), ("void", b"", b"ab"), ("release", b"a", b"b"), ("void",)]
    references = [entry_reference(what, *parts) for what, *parts in causes]  # type: ignore[arg-type]
    assert len(set(references)) == len(causes)
    assert references == [entry_reference(what, *parts) for what, *parts in causes]  # type: ignore[arg-type]

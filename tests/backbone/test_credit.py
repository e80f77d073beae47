"""Carried bytes by hand-made examples and by conservation, and the rhythm and chaining of receipts."""

from __future__ import annotations

import hashlib
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.credit import (
    MAX_LEASES,
    RECEIPT_BYTES,
    RECEIPT_S,
    CreditBook,
    LeaseShare,
    Statement,
    Totals,
    call_leaf,
    carried,
    merkle_root,
)
from kvasir_backbone.flight import Flight, Owner, RunFallback, Send, WorkerCall
from kvasir_backbone.pace import HedgeBudget
from kvasir_backbone.roster import WindowMap
from tests.support.rosters import device, flat_plan, roster

WINDOWS = WindowMap(flat_plan())
ROW_BYTES = 6144
A = device("a")
LEASE = bytes(range(16))


def one_call(held: dict[int, list[str]], ids: list[list[int]]) -> tuple[Flight, list[WorkerCall]]:
    counter = itertools.count(1)
    owners = {device(name): Owner() for names in held.values() for name in names}
    flight = Flight(
        roster(WINDOWS, held),
        0,
        ids,
        owners=owners,
        hedges=HedgeBudget(),
        next_call=lambda: next(counter),
        rng=random.Random(0),
        fallback=True,
        deadline=10.0,
    )
    return flight, [item.call for item in flight.start(0.0) if isinstance(item, Send)]


def earned(shares: tuple[LeaseShare, ...]) -> int:
    return sum(share.nbytes for share in shares)


def test_one_row_with_two_experts_of_one_lease() -> None:
    flight, (call,) = one_call({0: ["a"]}, [[0, 1]])
    shares = carried(call, flight.parts, [0], [True], ROW_BYTES)
    assert earned(shares) == (1 + 2) * ROW_BYTES + 2 * 2


def test_a_row_sent_once_for_two_leases_counts_once_as_a_request_row() -> None:
    flight, (call,) = one_call({0: ["a"], 1: ["a"]}, [[0, 5]])
    shares = carried(call, flight.parts, [0, 1], [True], ROW_BYTES)
    assert [share.nbytes for share in shares] == [2 * ROW_BYTES + 2, ROW_BYTES + 2]


def test_only_parts_taken_from_the_reply_pay() -> None:
    flight, (call,) = one_call({0: ["a"], 1: ["a"]}, [[0, 5]])
    shares = carried(call, flight.parts, [1], [True], ROW_BYTES)
    assert earned(shares) == (1 + 1) * ROW_BYTES + 2
    assert shares[0].lease == call.groups[1][0].lease
    assert carried(call, flight.parts, [], [True], ROW_BYTES) == ()


def test_rows_that_are_not_metered_pay_nothing() -> None:
    flight, (call,) = one_call({0: ["a"]}, [[0, 1], [2, 3]])
    assert earned(carried(call, flight.parts, [0], [True, False], ROW_BYTES)) == 3 * ROW_BYTES + 4
    assert carried(call, flight.parts, [0], [False, False], ROW_BYTES) == ()


@given(
    ids=st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=12),
    events=st.randoms(use_true_random=False),
)
def test_every_output_is_paid_exactly_once_or_computed_here(
    ids: list[list[int]], events: random.Random
) -> None:
    """However replies, losses and hedges interleave: paid outputs and the fallback's are the whole."""
    held = {0: ["a", "b"], 1: ["b", "c"]}
    flight, _ = one_call(held, ids)
    counter = itertools.count(1)
    flight = Flight(
        roster(WINDOWS, held),
        0,
        ids,
        owners={device(name): Owner() for name in "abc"},
        hedges=HedgeBudget(share=1.0),
        next_call=lambda: next(counter),
        rng=random.Random(0),
        fallback=True,
        deadline=2.0,
    )
    metered = [True] * len(ids)
    now, here, paid = 0.0, 0, 0
    waiting: list[WorkerCall] = []
    todo = flight.start(now)
    while True:
        waiting += [item.call for item in todo if isinstance(item, Send)]
        for item in todo:
            if isinstance(item, RunFallback):
                here += sum(len(flight.parts[index].slots) for index in item.parts)
                flight.got_fallback(item.parts)
        todo = []
        if flight.done:
            break
        if not waiting or events.random() < 0.3:
            now = max(now, flight.next_deadline())
            todo = flight.handle_timeout(now, roster(WINDOWS, held))
            continue
        call = waiting.pop(events.randrange(len(waiting)))
        if events.random() < 0.5:
            todo = flight.got_failure(call.id, now)
            continue
        taken = flight.got_reply(call.id, now)
        shares = carried(call, flight.parts, taken, metered, 1)
        outputs = sum(len(flight.parts[index].slots) for index in taken)
        rows = len({row for index in taken for row in flight.parts[index].rows})
        assert earned(shares) == rows + outputs + 2 * outputs
        paid += outputs
    assert paid + here == sum(map(len, ids))


def test_merkle_root_of_known_trees() -> None:
    """RFC 6962 section 2.1, by hand."""

    def leaf(data: bytes) -> bytes:
        return hashlib.sha256(b"\x00" + data).digest()

    def node(left: bytes, right: bytes) -> bytes:
        return hashlib.sha256(b"\x01" + left + right).digest()

    a, b, c, d, e = (leaf(letter) for letter in (b"a", b"b", b"c", b"d", b"e"))
    assert merkle_root([]) == bytes(32)
    assert merkle_root([b"a"]) == a
    assert merkle_root([b"a", b"b", b"c"]) == node(node(a, b), c)
    assert merkle_root([b"a", b"b", b"c", b"d", b"e"]) == node(node(node(a, b), node(c, d)), e)


def opened(totals: Totals | None = None) -> CreditBook:
    book = CreditBook()
    book.open(A, totals or Totals(wallet=device("wallet")))
    return book


def sign(book: CreditBook) -> Statement:
    statement = book.next_statement(A)
    book.signed(statement, hashlib.sha256(repr(statement).encode()).digest())
    return statement


def test_a_sessions_first_receipt_comes_within_a_second_and_the_next_after_ten() -> None:
    book = opened()
    assert book.due(100.0) == []
    book.pay(A, 1, 0, [LeaseShare(LEASE, 1, 10)], 100.0)
    assert book.due(100.9) == [A]
    sign(book)
    book.pay(A, 2, 0, [LeaseShare(LEASE, 1, 10)], 101.0)
    assert book.due(101.0 + RECEIPT_S - 0.1) == []
    assert book.due(101.0 + RECEIPT_S) == [A]
    sign(book)
    book.session_started(A)
    book.pay(A, 3, 0, [LeaseShare(LEASE, 1, 10)], 120.0)
    assert book.due(120.9) == [A]


def test_64_mib_unsigned_are_signed_at_once() -> None:
    book = opened()
    book.pay(A, 1, 0, [LeaseShare(LEASE, 1, 10)], 0.0)
    sign(book)
    book.pay(A, 2, 0, [LeaseShare(LEASE, 1, RECEIPT_BYTES - 1)], 1.0)
    assert book.due(1.0) == []
    book.pay(A, 3, 0, [LeaseShare(LEASE, 1, 1)], 1.0)
    assert book.due(1.0) == [A]


def test_receipts_are_cumulative_chained_and_lose_nothing_paid_while_signing() -> None:
    book = opened()
    book.pay(A, 1, 7, [LeaseShare(LEASE, 1, 10)], 0.0)
    first = book.next_statement(A)
    book.pay(A, 2, 7, [LeaseShare(LEASE, 2, 5), LeaseShare(bytes(16), 1, 3)], 0.1)
    assert book.due(100.0) == []  # one receipt at a time
    book.signed(first, b"\x01" * 32)
    assert (first.sequence, first.nbytes, first.calls, first.previous) == (1, 10, 1, bytes(32))
    assert first.call_root == merkle_root([call_leaf(1, 7, LeaseShare(LEASE, 1, 10))])
    second = sign(book)
    assert (second.sequence, second.nbytes, second.calls, second.previous) == (2, 18, 2, b"\x01" * 32)
    assert second.leases == ((bytes(16), 1, 3, 0), (LEASE, 1, 10, 1), (LEASE, 2, 5, 1))
    assert sum(leaf[2] for leaf in second.leases) == second.nbytes
    assert sum(leaf[3] for leaf in second.leases) == second.calls


def test_a_receipt_names_the_latest_leases_and_keeps_the_others_in_its_totals() -> None:
    book = opened()
    for number in range(MAX_LEASES + 10):
        book.pay(A, number, 0, [LeaseShare(number.to_bytes(16, "big"), 1, 1)], 0.0)
    statement = sign(book)
    assert len(statement.leases) == MAX_LEASES
    assert statement.nbytes == MAX_LEASES + 10
    assert statement.leases[0][0] == (10).to_bytes(16, "big")


def test_a_restart_continues_the_chain() -> None:
    book = opened(Totals(device("wallet"), 41, 1000, 9, {(LEASE, 3): (1000, 9)}, b"\x07" * 32))
    book.pay(A, 1, 0, [LeaseShare(LEASE, 3, 10)], 0.0)
    statement = sign(book)
    assert (statement.sequence, statement.nbytes, statement.calls) == (42, 1010, 10)
    assert statement.previous == b"\x07" * 32
    assert statement.leases == ((LEASE, 3, 1010, 10),)


def test_a_receipt_that_could_not_be_stored_is_signed_again_whole() -> None:
    book = opened()
    book.pay(A, 1, 0, [LeaseShare(LEASE, 1, 10)], 0.0)
    lost = book.next_statement(A)
    book.pay(A, 2, 0, [LeaseShare(LEASE, 1, 5)], 0.1)
    book.not_signed(lost, 1.0)
    assert book.due(1.0 + RECEIPT_S) == [A]
    again = sign(book)
    assert (again.sequence, again.nbytes, again.calls) == (1, 15, 2)
    leaves = [call_leaf(1, 0, LeaseShare(LEASE, 1, 10)), call_leaf(2, 0, LeaseShare(LEASE, 1, 5))]
    assert again.call_root == merkle_root(leaves)


def test_a_drain_signs_for_everyone_with_something_unsigned() -> None:
    book = opened()
    assert book.unsigned() == []
    book.pay(A, 1, 0, [LeaseShare(LEASE, 1, 10)], 0.0)
    assert book.unsigned() == [A]
    sign(book)
    assert book.unsigned() == []


def test_paying_an_unknown_device_is_our_own_bug() -> None:
    with pytest.raises(KeyError):
        CreditBook().pay(A, 1, 0, [LeaseShare(LEASE, 1, 10)], 0.0)

"""The expert call's bytes: round trips, the size promise, and whatever a peer may send instead."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.calls import (
    ALIGNMENT,
    MAX_CALL_IDS,
    Call,
    Cancel,
    Draining,
    Group,
    Kind,
    Message,
    Notice,
    ReceiptAck,
    ReceiptMessage,
    Reference,
    References,
    Refusal,
    Reply,
    call_bytes,
    decode,
    encode,
    reply_bytes,
)
from relay.errors import Refused, RemoteProtocolError
from relay.identity import pack

u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFFFFFF)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    rows = draw(st.integers(1, 6))
    refs = draw(st.lists(u16, min_size=1, max_size=4, unique=True))
    groups = []
    for number, ref in enumerate(refs):
        # every row is asked for at least once, by the first group
        counts = draw(st.lists(st.integers(number == 0, 4), min_size=rows, max_size=rows))
        if not sum(counts):
            counts[0] = 1
        ids = draw(st.lists(u16, min_size=sum(counts), max_size=sum(counts)))
        groups.append(Group(ref, tuple(counts), tuple(ids)))
    row_bytes = draw(st.integers(1, 40))
    hidden = draw(st.binary(min_size=rows * row_bytes, max_size=rows * row_bytes))
    size = 4 * sum(len(group.ids) for group in groups)
    weights = draw(st.none() | st.binary(min_size=size, max_size=size))
    return Call(draw(u64), draw(u16), rows, draw(st.integers(1, 600_000)), tuple(groups), hidden, weights)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    outputs, row_bytes = draw(st.integers(1, 8)), draw(st.integers(1, 40))
    rows = draw(st.binary(min_size=outputs * row_bytes, max_size=outputs * row_bytes))
    return Reply(draw(u64), outputs, draw(u32), draw(u32), rows, draw(st.booleans()))


references = st.builds(
    Reference,
    u16,
    st.binary(min_size=16, max_size=16),
    st.none() | st.integers(0, 2**63),
    st.binary(min_size=32, max_size=32),
)
messages: st.SearchStrategy[Message] = st.one_of(
    calls(),
    replies(),
    st.builds(References, st.lists(references, max_size=4).map(tuple)),
    st.builds(
        Refusal,
        u64,
        st.sampled_from(["overloaded", "stale_epoch", "not_mine", "bad_request", "draining"]),
        st.text(max_size=30),
        st.none() | st.integers(0, 60_000),
    ),
    st.builds(ReceiptMessage, st.binary(max_size=50)),
    st.builds(ReceiptAck, st.binary(max_size=50)),
    st.builds(Notice, st.text(max_size=10), st.text(max_size=30)),
    st.builds(Draining, st.text(max_size=30)),
    st.builds(Cancel, st.integers(0, 2**64 - 1)),
)


def wire(message: Message) -> bytes:
    return b"".join(encode(message))


@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(wire(message)) == message


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_reads_as_another(message: Message, data: st.DataObject) -> None:
    raw = bytearray(wire(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        with contextlib.suppress(RemoteProtocolError, Refused):
            decode(damaged)


@given(st.binary(max_size=200))
def test_noise_never_does_worse_than_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError, Refused):
        decode(data)


def test_one_token_to_one_worker_fits_the_promise() -> None:
    """Hidden 3072 in bf16, top-8, one worker: rows 6,144 + ids 16 + at most 64 bytes of everything else."""
    call = Call(2**64 - 1, 47, 1, 30_000, (Group(0xFFFF, (8,), tuple(range(248, 256))),), bytes(6144))
    size = len(wire(call))
    assert size <= 6144 + 8 * 2 + 64
    assert size == call_bytes(1, [8], 6144)


@given(calls())
def test_sizes_are_known_before_encoding(call: Call) -> None:
    row_bytes = len(call.rows) // call.row_count
    ids = [len(group.ids) for group in call.groups]
    size = call_bytes(call.row_count, ids, row_bytes, weighted=call.weights is not None)
    assert size == len(wire(call))


@given(replies())
def test_reply_sizes_are_known_before_encoding(reply: Reply) -> None:
    assert reply_bytes(reply.outputs, len(reply.rows) // reply.outputs) == len(wire(reply))


def test_rows_are_views_of_what_was_received_and_aligned() -> None:
    rows = bytes(range(64))
    data = wire(Call(1, 3, 2, 1000, (Group(0, (1, 2), (7, 7, 9)),), rows, bytes(12)))
    call = decode(data)
    assert isinstance(call, Call)
    assert isinstance(call.rows, memoryview)
    assert isinstance(call.weights, memoryview)
    assert call.rows.obj is data
    assert data.index(rows) % ALIGNMENT == 0
    sent = memoryview(rows)
    assert encode(Call(1, 3, 2, 1000, (Group(0, (1, 1), (7, 9)),), sent))[-1].obj is rows  # type: ignore[union-attr]


def header(rows: int, groups: int, *, flags: int = 0, deadline: int = 1000) -> bytes:
    return struct.pack(">BBQHIIH", Kind.CALL, flags, 1, 0, rows, deadline, groups)


def group(ref: int, counts: list[int], ids: list[int]) -> bytes:
    return struct.pack(f">H{len(counts) + len(ids)}H", ref, *counts, *ids)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


GOOD = padded(header(1, 1) + group(0, [1], [5])) + bytes(8)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (b"\x00", "kind 0"),
        (b"\x63", "kind 99"),
        (GOOD[:20], "shorter than its header"),
        (GOOD[:23], "shorter than its groups"),
        (header(0, 1), "0 rows"),
        (header(1, 0), "in 0 groups"),
        (header(2**32 - 1, 1), "rows"),
        (header(60_000, MAX_CALL_IDS // 60_000 + 1), "rows"),
        (padded(header(1, 1, flags=2) + group(0, [1], [5])) + bytes(8), "unknown flags"),
        (padded(header(1, 1, deadline=0) + group(0, [1], [5])) + bytes(8), "deadline"),
        (padded(header(1, 1, deadline=600_001) + group(0, [1], [5])) + bytes(8), "deadline"),
        (padded(header(1, 1) + group(0, [0], [])) + bytes(8), "without ids"),
        (padded(header(1, 1) + group(0, [900], [5])) + bytes(8), "more than the call holds"),
        (padded(header(2, 1) + group(0, [2, 0], [5, 6])) + bytes(8), "no expert is asked for"),
        (padded(header(1, 2) + group(0, [1], [5]) * 2) + bytes(8), "two groups of reference 0"),
        (GOOD[:-8].rstrip(b"\0") + b"\x01" * (-len(GOOD[:-8].rstrip(b"\0")) % 16) + bytes(8), "padding"),
        (GOOD[:-8], "not 1 rows"),
        (padded(header(2, 1) + group(0, [1, 1], [5, 6])) + bytes(9), "not 2 rows"),
        (padded(header(1, 1, flags=1) + group(0, [1], [5])) + bytes(8), "padding"),
        (bytes((Kind.REPLY,)) + bytes(20), "shorter than its header"),
        (bytes((Kind.REPLY, 4)) + bytes(30) + bytes(8), "unknown flags"),
        (bytes((Kind.REPLY,)) + bytes(31) + bytes(8), "not 0 output rows"),
        (bytes((Kind.NOTICE,)) + b"\xc1", "msgpack"),
        (bytes((Kind.NOTICE,)) + pack([1, 2]), "not a map"),
        (bytes((Kind.NOTICE,)) + pack({"code": 1, "message": ""}), "'code'"),
        (bytes((Kind.REFUSAL,)) + pack({"call": "x"}), "'code'"),
        (bytes((Kind.REFUSAL,)) + pack({"call": 1, "code": "", "message": "", "retry_after_ms": -1}), "day"),
        (bytes((Kind.REFERENCES,)) + pack({"v": 1, "refs": [[0, b"short", 1, bytes(32)]]}), "reference"),
        (bytes((Kind.REFERENCES,)) + pack({"v": 1, "refs": [[-1, bytes(16), 1, bytes(32)]]}), "reference"),
        (bytes((Kind.REFERENCES,)) + pack({"v": 1, "refs": [[0, bytes(16), -1, bytes(32)]]}), "reference"),
    ],
)  # fmt: skip
def test_malformed_messages_are_protocol_errors(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(data)


def test_the_good_message_of_the_table_is_good() -> None:
    assert decode(GOOD) == Call(1, 0, 1, 1000, (Group(0, (1,), (5,)),), bytes(8))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="version 1 and the peer speaks version 2") as caught:
        decode(bytes((Kind.REFERENCES,)) + pack({"v": 2, "refs": []}))
    assert caught.value.code == "version"


def test_an_unknown_refusal_code_reads_as_internal() -> None:
    fields = {"call": 3, "code": "from_the_future", "message": "later", "retry_after_ms": None}
    assert decode(bytes((Kind.REFUSAL,)) + pack(fields)) == Refusal(3, "internal", "later")


def test_a_huge_count_is_refused_before_anything_is_allocated() -> None:
    """65,535 rows in one group of 65,535 ids a row would be 4 G ids."""
    counts = struct.pack(">H", 0) + b"\xff" * (2 * 65_535)
    with pytest.raises(RemoteProtocolError, match="more than the call holds"):
        decode(header(65_535, 1) + counts + bytes(1000))

"""The expert call, byte by byte: what backbone and device say to each other inside a session.

One message is a kind byte and a body. Integers are big-endian; rows and weights are tensors and therefore
little-endian. `docs/protocol.md` has the same in prose.

    1 REFERENCES   b->d  msgpack {v, refs: [[ref, lease, epoch or nil, plan], ...]}
    2 CALL         b->d  kind u8, flags u8, call u64, layer u16, rows u32, deadline_ms u32, groups u16;
                         each group: ref u16, ids a row u16[rows], global expert ids u16[sum];
                         zeros to a multiple of 16; [flag 1: weights f32[ids], zeros to a multiple of 16;]
                         hidden rows, rows x width x wire dtype
    3 REPLY        d->b  kind u8, flags u8, call u64, outputs u32, service_us u32, queue_us u32;
                         zeros to 32 bytes; output rows in the order of the request's ids (flag 1: one
                         partial sum a request row)
    4 REFUSAL      d->b  msgpack {call, code, message, retry_after_ms}
    5 RECEIPT      b->d  msgpack {receipt}            6 RECEIPT_ACK  d->b  msgpack {ack}
    7 NOTICE       b->d  msgpack {code, message}      8 DRAINING     d->b  msgpack {reason}
    9 CANCEL       b->d  msgpack {call}

Decoded rows and weights are views of the received bytes, encoded ones are sent from where they lie.

Knows formats and their checks. Knows no torch, no sockets, and neither routers nor prompts: a call carries
ids that somebody else has decided.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from relay.errors import CODES, RemoteProtocolError, version_refusal
from relay.identity import PROTOCOL_VERSION, pack, require, unpack

Data = bytes | bytearray | memoryview

Buffers = tuple[bytes | memoryview, ...]
"""One message as the parts it is made of, to be sent one after another."""

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Bound on one message of a session."""

MAX_SMALL_BYTES: Final = 1024 * 1024
"""Bound on every message that carries no rows."""

MAX_REFERENCES: Final = 4096
"""Leases that one session may name."""

MAX_CALL_ROWS: Final = 65_535
"""Rows of one call."""

MAX_CALL_IDS: Final = 1 << 20
"""Ids of one call, and rows times groups of one call: bounds what a header can make a peer allocate."""

MAX_DEADLINE_MS: Final = 600_000
"""The longest deadline of a call, ten minutes."""

ALIGNMENT: Final = 16
"""Rows and weights start at a multiple of this many bytes from the start of their message."""

_CALL: Final = struct.Struct(">BBQHIIH")
_REPLY: Final = struct.Struct(">BBQIII")
_REPLY_HEADER: Final = 32
_ONE: Final = struct.Struct(">HH")
_WEIGHTED: Final = 1


class Kind(IntEnum):
    """The first byte of a message."""

    REFERENCES = 1
    CALL = 2
    REPLY = 3
    REFUSAL = 4
    RECEIPT = 5
    RECEIPT_ACK = 6
    NOTICE = 7
    DRAINING = 8
    CANCEL = 9


@dataclass(frozen=True, slots=True)
class Reference:
    """A short name for one lease within a session: `ref` u16, `lease` 16 bytes, `plan` 32 bytes.

    `epoch` None takes the name back.
    """

    ref: int
    lease: bytes
    epoch: int | None
    plan: bytes


@dataclass(frozen=True, slots=True)
class References:
    """Adds or replaces references."""

    refs: tuple[Reference, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """What one lease owes of a call: `counts[i]` of the `ids` belong to row i, row after row.

    `ids` are global expert numbers of the call's layer, in the order in which outputs come back.
    """

    ref: int
    counts: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Run experts on hidden rows.

    `id` names the call within its session, `rows` holds `row_count` unique rows back to back in the plan's
    wire dtype, `deadline_ms` counts from receipt. `weights` (a `weighted` swarm only) is one fp32 an id over
    all groups: the reply is then one partial sum a row.
    """

    id: int
    layer: int
    row_count: int
    deadline_ms: int
    groups: tuple[Group, ...]
    rows: Data
    weights: Data | None = None

    @property
    def id_count(self) -> int:
        """Ids over all groups."""
        groups = self.groups
        return len(groups[0].ids) if len(groups) == 1 else sum([len(group.ids) for group in groups])

    @property
    def output_count(self) -> int:
        """Rows that the reply must hold."""
        return self.id_count if self.weights is None else self.row_count


@dataclass(frozen=True, slots=True)
class Reply:
    """The outputs of one call: `rows` holds `outputs` rows in the order of the request.

    Microseconds: `service_us` from the start of computing to its end, `queue_us` from receipt to that start.
    """

    call: int
    outputs: int
    service_us: int
    queue_us: int
    rows: Data
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed no to one call. `code` is one of `relay.errors.CODES`, `retry_after_ms` a guess or None."""

    call: int
    code: str
    message: str
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ReceiptMessage:
    """A receipt: the bytes of a `SignedDocument`."""

    receipt: bytes


@dataclass(frozen=True, slots=True)
class ReceiptAck:
    """The device's countersignature: the bytes of a `SignedDocument`."""

    ack: bytes


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the device's owner should read, such as why it is quarantined."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The device goes away in order: calls in flight are answered, new ones refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for that call any more: compute nothing for it that is not begun."""

    call: int


Message = References | Call | Reply | Refusal | ReceiptMessage | ReceiptAck | Notice | Draining | Cancel


# --- encoding ----------------------------------------------------------------------------------------


def encode(message: Message) -> Buffers:
    """The message's buffers, to be sent one after another; rows are not copied.

    Raises `AssertionError` for our own values out of range.
    """
    match message:
        case Call():
            return _encode_call(message)
        case Reply():
            return _encode_reply(message)
        case References(refs):
            body = {"v": PROTOCOL_VERSION, "refs": [[r.ref, r.lease, r.epoch, r.plan] for r in refs]}
            return _small(Kind.REFERENCES, body)
        case Refusal():
            assert message.code in CODES, message.code
            fields = {name: getattr(message, name) for name in ("call", "code", "message", "retry_after_ms")}
            return _small(Kind.REFUSAL, fields)
        case ReceiptMessage(receipt):
            return _small(Kind.RECEIPT, {"receipt": receipt})
        case ReceiptAck(ack):
            return _small(Kind.RECEIPT_ACK, {"ack": ack})
        case Notice(code, text):
            return _small(Kind.NOTICE, {"code": code, "message": text})
        case Draining(reason):
            return _small(Kind.DRAINING, {"reason": reason})
        case Cancel(call):
            return _small(Kind.CANCEL, {"call": call})


def _small(kind: Kind, body: dict[str, object]) -> Buffers:
    data = bytes((kind,)) + pack(body)
    assert len(data) <= MAX_SMALL_BYTES
    return (data,)


def _encode_call(call: Call) -> Buffers:
    flags = 0 if call.weights is None else _WEIGHTED
    head = bytearray(
        _CALL.pack(Kind.CALL, flags, call.id, call.layer, call.row_count, call.deadline_ms, len(call.groups))
    )
    for group in call.groups:
        assert len(group.counts) == call.row_count
        assert sum(group.counts) == len(group.ids)
        head += struct.pack(f">H{call.row_count + len(group.ids)}H", group.ref, *group.counts, *group.ids)
    head += bytes(-len(head) % ALIGNMENT)
    if call.weights is None:
        return bytes(head), memoryview(call.rows)
    weights = memoryview(call.weights)
    assert len(weights) == 4 * call.id_count
    return bytes(head), weights, bytes(-len(weights) % ALIGNMENT), memoryview(call.rows)


def _encode_reply(reply: Reply) -> Buffers:
    flags = _WEIGHTED if reply.weighted else 0
    head = _REPLY.pack(
        Kind.REPLY,
        flags,
        reply.call,
        reply.outputs,
        min(reply.service_us, 0xFFFFFFFF),
        min(reply.queue_us, 0xFFFFFFFF),
    )
    return head + bytes(_REPLY_HEADER - len(head)), memoryview(reply.rows)


def call_bytes(rows: int, groups: Sequence[int], row_bytes: int, *, weighted: bool = False) -> int:
    """Bytes of a CALL with `rows` rows of `row_bytes`; `groups` gives the number of ids of each group."""
    head = _CALL.size + sum(2 + 2 * rows + 2 * ids for ids in groups)
    head += -head % ALIGNMENT
    if weighted:
        head += 4 * sum(groups)
        head += -head % ALIGNMENT
    return head + rows * row_bytes


def reply_bytes(outputs: int, row_bytes: int) -> int:
    """Bytes of a REPLY with that many output rows."""
    return _REPLY_HEADER + outputs * row_bytes


# --- decoding ----------------------------------------------------------------------------------------


def decode(data: Data) -> Message:
    """Parse one message, trusting nothing in it. Rows and weights are views of `data`.

    Raises `RemoteProtocolError`, and `Refused` for another version.
    """
    view = memoryview(data)
    if not 1 <= len(view) <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(view)} bytes")
    kind = view[0]
    if kind == Kind.CALL:
        return _decode_call(view)
    if kind == Kind.REPLY:
        return _decode_reply(view)
    return _decode_small(kind, view[1:])


def _decode_small(kind: int, body: memoryview) -> Message:
    try:
        known = Kind(kind)
    except ValueError:
        raise RemoteProtocolError(f"message kind {kind} is not one this version knows") from None
    fields = unpack(body, max_bytes=MAX_SMALL_BYTES)
    if not isinstance(fields, dict):
        raise RemoteProtocolError("a message's body is not a map")
    match known:
        case Kind.REFERENCES:
            return _decode_references(fields)
        case Kind.REFUSAL:
            return _decode_refusal(fields)
        case Kind.RECEIPT:
            return ReceiptMessage(require(fields, "receipt", bytes))
        case Kind.RECEIPT_ACK:
            return ReceiptAck(require(fields, "ack", bytes))
        case Kind.NOTICE:
            return Notice(require(fields, "code", str), require(fields, "message", str))
        case Kind.DRAINING:
            return Draining(require(fields, "reason", str))
        case Kind.CANCEL:
            return Cancel(require(fields, "call", int))
    raise AssertionError(kind)


def _decode_references(fields: dict[str, Any]) -> References:
    if fields.get("v") != PROTOCOL_VERSION:
        raise version_refusal(PROTOCOL_VERSION, fields.get("v"))
    items = require(fields, "refs", list)
    if len(items) > MAX_REFERENCES:
        raise RemoteProtocolError(f"{len(items)} references, at most {MAX_REFERENCES} are allowed")
    refs = []
    for item in items:
        match item:
            case [int(ref), bytes(lease), int() | None as epoch, bytes(plan)] if (
                0 <= ref <= 0xFFFF and len(lease) == 16 and len(plan) == 32 and (epoch is None or epoch >= 0)
            ):
                refs.append(Reference(ref, lease, epoch, plan))
            case _:
                raise RemoteProtocolError("a reference is not [ref, lease, epoch, plan]")
    return References(tuple(refs))


def _decode_refusal(fields: dict[str, Any]) -> Refusal:
    code = require(fields, "code", str)
    retry: int | None = fields.get("retry_after_ms")
    if retry is not None and not (type(retry) is int and 0 <= retry <= 86_400_000):
        raise RemoteProtocolError("field 'retry_after_ms' is not a number of milliseconds within a day")
    return Refusal(
        require(fields, "call", int),
        code if code in CODES else "internal",
        require(fields, "message", str),
        retry,
    )


def _decode_call(view: memoryview) -> Call:
    if len(view) < _CALL.size:
        raise RemoteProtocolError("a call shorter than its header")
    _, flags, call, layer, rows, deadline_ms, group_count = _CALL.unpack_from(view)
    if flags & ~_WEIGHTED:
        raise RemoteProtocolError(f"a call with unknown flags {flags:#04x}")
    if not (1 <= rows <= MAX_CALL_ROWS and 1 <= group_count <= MAX_CALL_IDS // rows):
        raise RemoteProtocolError(f"a call of {rows} rows in {group_count} groups")
    if not 1 <= deadline_ms <= MAX_DEADLINE_MS:
        raise RemoteProtocolError(f"a call with a deadline of {deadline_ms} ms")
    groups, at = _decode_groups(view, rows, group_count)
    at = _skip_padding(view, at)
    weights = None
    if flags & _WEIGHTED:
        end = at + 4 * sum(len(group.ids) for group in groups)
        weights = view[at:end]
        at = _skip_padding(view, end)
    hidden = view[at:]
    if not len(hidden) or len(hidden) % rows:
        raise RemoteProtocolError(f"{len(hidden)} bytes are not {rows} rows")
    return Call(call, layer, rows, deadline_ms, groups, hidden, weights)


def _decode_groups(view: memoryview, rows: int, count: int) -> tuple[tuple[Group, ...], int]:
    """The groups of a call and where they end. Every row must have an id in some group."""
    at = _CALL.size
    if rows == count == 1:
        return _decode_one(view, at)
    groups = []
    refs: set[int] = set()
    asked = bytearray(rows)
    id_count = 0
    for _ in range(count):
        if len(view) - at < 2 + 2 * rows:
            raise RemoteProtocolError("a call shorter than its groups")
        ref, *counts = struct.unpack_from(f">H{rows}H", view, at)
        at += 2 + 2 * rows
        total = sum(counts)
        id_count += total
        if not total or id_count > MAX_CALL_IDS or len(view) - at < 2 * total:
            raise RemoteProtocolError("a group without ids, or with more than the call holds")
        ids = struct.unpack_from(f">{total}H", view, at)
        at += 2 * total
        if ref in refs:
            raise RemoteProtocolError(f"two groups of reference {ref} in one call")
        refs.add(ref)
        groups.append(Group(ref, tuple(counts), ids))
        for row, number in enumerate(counts):
            if number:
                asked[row] = 1
    if not all(asked):
        raise RemoteProtocolError("a row that no expert is asked for")
    return tuple(groups), at


def _decode_one(view: memoryview, at: int) -> tuple[tuple[Group, ...], int]:
    """`_decode_groups` for one row of one group, as most calls have."""
    if len(view) - at < 4:
        raise RemoteProtocolError("a call shorter than its groups")
    ref, total = _ONE.unpack_from(view, at)
    if not total or len(view) - at - 4 < 2 * total:
        raise RemoteProtocolError("a group without ids, or with more than the call holds")
    ids = struct.unpack_from(f">{total}H", view, at + 4)
    return (Group(ref, (total,), ids),), at + 4 + 2 * total


def _skip_padding(view: memoryview, at: int) -> int:
    end = at + -at % ALIGNMENT
    if end > len(view) or any(view[at:end]):
        raise RemoteProtocolError("a call whose padding is missing or not zero")
    return end


def _decode_reply(view: memoryview) -> Reply:
    if len(view) < _REPLY_HEADER:
        raise RemoteProtocolError("a reply shorter than its header")
    _, flags, call, outputs, service_us, queue_us = _REPLY.unpack_from(view)
    if flags & ~_WEIGHTED or any(view[_REPLY.size : _REPLY_HEADER]):
        raise RemoteProtocolError("a reply with unknown flags or padding that is not zero")
    rows = view[_REPLY_HEADER:]
    if outputs < 1 or not len(rows) or len(rows) % outputs:
        raise RemoteProtocolError(f"{len(rows)} bytes are not {outputs} output rows")
    return Reply(call, outputs, service_us, queue_us, rows, bool(flags & _WEIGHTED))

"""What a wallet's conduct means for its claims and its credit: how long it stays out, what it earns for good.

Earned credit waits in escrow as **lots**, one a receipt. A lot is released once the wallet had
`ESCROW_CALLS` further accepted calls without a quarantine, or `ESCROW_S` after it left; a quarantine voids
every lot that waits. What a receipt says of calls from before the quarantine is void too, whenever it comes.

Pure: facts in, decisions out; time is an argument. Storing is `market.escrow`'s and `market.judging`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .receipts import Receipt

QUARANTINE_S: Final = 900.0
"""The first quarantine, in seconds; each further one is twice as long."""

MAX_QUARANTINES: Final = 3
"""After so many a wallet stays out."""

FOR_GOOD_S: Final = 10 * 365 * 86_400.0
"""A quarantine without end lasts so long."""

ESCROW_CALLS: Final = 1000
"""A lot is released after so many further accepted calls of its wallet."""

ESCROW_S: Final = 7 * 86_400.0
"""A lot is released so long after its wallet left."""


def quarantine_s(number: int) -> float:
    """How long a wallet's quarantine number `number` (from 1) lasts, in seconds; infinity: for good."""
    return float("inf") if number > MAX_QUARANTINES else QUARANTINE_S * 2.0 ** (number - 1)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A quarantine that stands: its id, when it began and when it ends, in Unix seconds of the database."""

    id: bytes
    at: float
    until: float


def late_bytes(
    quarantine: Quarantine,
    receipt: Receipt,
    previous: Receipt | None,
    claimed_at: Mapping[bytes, float],
) -> int:
    """How many of the bytes that `receipt` adds after `previous` were carried before `quarantine`.

    A lease says it where the market still knows it: one claimed before the quarantine ended with it
    (`claimed_at`: lease -> Unix seconds). For all else the receipt's time does: no call is accepted while a
    wallet is out, so a receipt issued before the quarantine's end covers calls from before it only.
    """
    earned = receipt.bytes - (0 if previous is None else previous.bytes)
    before = {} if previous is None else {(leaf.lease, leaf.epoch): leaf.bytes for leaf in previous.leases}
    late = told = 0
    for leaf in receipt.leases:
        at = claimed_at.get(leaf.lease)
        if at is None:
            continue
        grown = min(max(0, leaf.bytes - before.get((leaf.lease, leaf.epoch), 0)), earned - told)
        told += grown
        late += grown if at <= quarantine.at else 0
    return late + (earned - told if receipt.issued_at <= quarantine.until else 0)


def is_released(
    lot_calls: int,
    *,
    calls: int,
    left_at: float | None,
    now: float,
    escrow_calls: int = ESCROW_CALLS,
    escrow_s: float = ESCROW_S,
) -> bool:
    """Whether a lot that waits is earned for good. `calls`: the wallet's accepted ones by now, `lot_calls`
    those when the lot was made.

    `left_at` is when the wallet gave up its last claim, None while it has one.
    """
    return calls >= lot_calls + escrow_calls or (left_at is not None and now >= left_at + escrow_s)


def entry_reference(what: str, *parts: bytes) -> bytes:
    """The 32 bytes that name a ledger entry's cause: the same cause can be booked once only."""
    digest = hashlib.sha256(f"kvasir {what} 1\n".encode("ascii"))
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()

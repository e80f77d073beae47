"""Carried bytes, and the chain of cumulative receipts that each device is paid by (design section 12).

Carried bytes of a call = (unique request rows + accepted response rows) x row bytes + 2 bytes an id, from
the backbone's own dispatch. A row sent once for several leases counts once, in the message that carried it:
a dispatch too large for one message is cut at the same rows in every window (see `flight.py`), so that no
row goes to a device in two messages, and their sum is what one message would count. A row sent again,
because its first call failed, counts with the reply that is combined. In a `weighted` swarm a response has
one row for a request row, whatever its ids; the weights that went out with them count nothing. Only the one
reply that is combined pays for an output; rows whose demand is not metered pay nothing. Hedge losers, late
and rejected replies and proving calls are simply never reported here.

Every (backbone, device) has one chain, never reset: each receipt carries cumulative totals, cumulative
leaves of the latest leases by epoch, a Merkle root over the calls paid since the previous receipt (RFC 6962
section 2.1, leaves sorted by call id) and the previous receipt's digest.

Pure: time is an argument. Knows no store, no market and no session.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from relay.identity import PublicKey

from .flight import Part, WorkerCall

ID_BYTES: Final = 2
"""What an expert id counts."""

FIRST_RECEIPT_S: Final = 0.5
"""A session's first receipt is signed this soon after its first paid call; the promise is 1 s."""

RECEIPT_S: Final = 10.0
"""Receipts follow at least this often while there is something to pay."""

NO_RECEIPT: Final = bytes(32)
"""The previous digest of a chain's first receipt."""

RECEIPT_BYTES: Final = 64 * 1024 * 1024
"""A receipt is signed at once when this much is unsigned."""


MAX_LEASES: Final = 256
"""Leaves of a receipt: the leases that earned last. Older ones are in the totals only."""


@dataclass(frozen=True, slots=True)
class LeaseShare:
    """What one call earned under one lease: `nbytes` carried; the lease's epoch at the time."""

    lease: bytes
    epoch: int
    nbytes: int


def carried(
    call: WorkerCall,
    parts: Sequence[Part],
    taken: Iterable[int],
    metered: Sequence[bool],
    row_bytes: int,
    *,
    weighted: bool = False,
) -> tuple[LeaseShare, ...]:
    """What the worker of `call` earned with the parts `taken` from its reply.

    `parts` are the dispatch's, `metered[row]` says of each dispatched row whether it pays, `row_bytes` is
    the size of one row on the wire. A request row counts for the first lease that served it, and so does the
    one response row that a `weighted` call has for it.
    """
    chosen = set(taken)
    if len(call.groups) == 1 and chosen and all(metered):
        replica, index = call.groups[0]
        rows, outputs = len(parts[index].rows), len(parts[index].slots)
        size = (rows + (rows if weighted else outputs)) * row_bytes + ID_BYTES * outputs
        return (LeaseShare(replica.lease, replica.epoch, size),)
    seen: set[int] = set()
    shares: list[LeaseShare] = []
    for replica, index in call.groups:
        if index not in chosen:
            continue
        part = parts[index]
        rows = outputs = 0
        for row, ids in zip(part.rows, part.ids, strict=True):
            if metered[row]:
                outputs += len(ids)
                rows += row not in seen
                seen.add(row)
        if outputs:
            size = (rows + (rows if weighted else outputs)) * row_bytes + ID_BYTES * outputs
            shares.append(LeaseShare(replica.lease, replica.epoch, size))
    return tuple(shares)


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The RFC 6962 Merkle tree hash of `leaves` (the data, not their hashes), SHA-256; 32 zeros if none."""
    if not leaves:
        return bytes(32)
    level = [hashlib.sha256(b"\x00" + leaf).digest() for leaf in leaves]
    while len(level) > 1:
        paired = [
            hashlib.sha256(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)
        ]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def call_leaf(call_id: int, layer: int, share: LeaseShare) -> bytes:
    """The leaf of one paid call: call id u64, layer u16, lease 16 bytes, epoch u64, bytes u64, big endian."""
    return struct.pack(">QH16sQQ", call_id, layer, share.lease, share.epoch, share.nbytes)


@dataclass(frozen=True, slots=True)
class Totals:
    """The cumulative state of one chain after its last receipt; `previous` is that receipt's digest."""

    wallet: PublicKey
    sequence: int = 0
    nbytes: int = 0
    calls: int = 0
    leases: Mapping[tuple[bytes, int], tuple[int, int]] = field(default_factory=dict)
    previous: bytes = NO_RECEIPT


@dataclass(frozen=True, slots=True)
class Statement:
    """The contents of the next receipt of a device, ready to be signed.

    `leases` holds (lease, epoch, bytes, calls), cumulative, sorted; `sequence` counts from 1.
    """

    device: PublicKey
    wallet: PublicKey
    sequence: int
    nbytes: int
    calls: int
    leases: tuple[tuple[bytes, int, int, int], ...]
    call_root: bytes
    previous: bytes


@dataclass(slots=True)
class _Chain:
    wallet: PublicKey
    sequence: int
    previous: bytes
    nbytes: int
    calls: int
    leases: dict[tuple[bytes, int], list[int]]
    leaves: list[tuple[int, bytes]] = field(default_factory=list)
    signed_leaves: list[tuple[int, bytes]] = field(default_factory=list)
    unsigned_bytes: int = 0
    unsigned_since: float | None = None
    fresh_session: bool = True
    signing: bool = False

    def due_at(self) -> float | None:
        if self.unsigned_since is None or self.signing:
            return None
        if self.unsigned_bytes >= RECEIPT_BYTES:
            return self.unsigned_since
        return self.unsigned_since + (FIRST_RECEIPT_S if self.fresh_session else RECEIPT_S)


class CreditBook:
    """What every device earned, and which receipts are due. Safe to use from several threads.

    Who pays may put it off a little: `before_reading` is then what has it paid now.
    """

    def __init__(self) -> None:
        self.before_reading: Callable[[], None] = _nothing_owed
        self._lock = threading.Lock()
        self._chains: dict[PublicKey, _Chain] = {}
        self._paid_bytes = 0

    @property
    def paid_bytes(self) -> int:
        """Bytes that all devices together earned since the start."""
        self.before_reading()
        with self._lock:
            return self._paid_bytes

    def knows(self, device: PublicKey) -> bool:
        """Whether the device's chain has been opened."""
        with self._lock:
            return device in self._chains

    def open(self, device: PublicKey, totals: Totals) -> None:
        """Start or continue a device's chain from its last receipt. Later calls change nothing."""
        with self._lock:
            if device not in self._chains:
                self._chains[device] = _Chain(
                    totals.wallet,
                    totals.sequence,
                    totals.previous,
                    totals.nbytes,
                    totals.calls,
                    {key: list(value) for key, value in totals.leases.items()},
                )

    def wallet_of(self, device: PublicKey) -> PublicKey:
        """The wallet that the device's next receipt is for. Raises `KeyError`."""
        with self._lock:
            return self._chains[device].wallet

    def set_wallet(self, device: PublicKey, wallet: PublicKey) -> None:
        """The device has been granted to another wallet: receipts from now on are for that one."""
        self.before_reading()
        with self._lock:
            self._chains[device].wallet = wallet

    def forget(self, device: PublicKey) -> bool:
        """Forget a chain with nothing unsigned; `open` continues it from its last receipt. False if kept."""
        self.before_reading()
        with self._lock:
            chain = self._chains.get(device)
            if chain is not None and (chain.signing or chain.unsigned_since is not None):
                return False
            self._chains.pop(device, None)
            return True

    def wallets(self) -> set[PublicKey]:
        """The wallets that the known chains are for."""
        with self._lock:
            return {chain.wallet for chain in self._chains.values()}

    def session_started(self, device: PublicKey) -> None:
        """A new session with the device: its first receipt comes soon."""
        with self._lock:
            self._chains[device].fresh_session = True

    def pay(
        self, device: PublicKey, call_id: int, layer: int, shares: Sequence[LeaseShare], now: float
    ) -> None:
        """Note what one accepted reply earned. Raises `KeyError` if the chain was never opened."""
        total = sum(share.nbytes for share in shares)
        if total == 0:
            return
        with self._lock:
            chain = self._chains[device]
            self._paid_bytes += total
            chain.nbytes += total
            chain.calls += 1
            chain.unsigned_bytes += total
            if chain.unsigned_since is None:
                chain.unsigned_since = now
            for number, share in enumerate(shares):
                leaf = chain.leases.pop((share.lease, share.epoch), [0, 0])
                leaf[0] += share.nbytes
                leaf[1] += number == 0  # a call counts once, at the first lease that served it
                chain.leases[share.lease, share.epoch] = leaf  # the latest to earn comes last
                chain.leaves.append((call_id, call_leaf(call_id, layer, share)))

    def due(self, now: float) -> list[PublicKey]:
        """The devices whose next receipt is to be signed now."""
        self.before_reading()
        with self._lock:
            return [
                device
                for device, chain in self._chains.items()
                if (at := chain.due_at()) is not None and now >= at
            ]

    def unsigned(self) -> list[PublicKey]:
        """The devices that earned something since their last receipt: a drain signs for all of them."""
        self.before_reading()
        with self._lock:
            return [device for device, chain in self._chains.items() if chain.unsigned_since is not None]

    def next_statement(self, device: PublicKey) -> Statement:
        """The next receipt's contents. `signed` or `not_signed` must follow; paying goes on meanwhile."""
        self.before_reading()
        with self._lock:
            chain = self._chains[device]
            while len(chain.leases) > MAX_LEASES:
                del chain.leases[next(iter(chain.leases))]
            assert not chain.signing, "one receipt of a device at a time"
            assert chain.unsigned_since is not None, "nothing to sign"
            chain.signing = True
            leaves = [leaf for _, leaf in sorted(chain.leaves)]
            statement = Statement(
                device,
                chain.wallet,
                chain.sequence + 1,
                chain.nbytes,
                chain.calls,
                tuple((*key, *value) for key, value in sorted(chain.leases.items())),  # type: ignore[misc]
                merkle_root(leaves),
                chain.previous,
            )
            chain.signed_leaves, chain.leaves = chain.leaves, []
            chain.unsigned_bytes = 0
            chain.unsigned_since = None
            chain.fresh_session = False
            return statement

    def not_signed(self, statement: Statement, now: float) -> None:
        """The statement could not be stored: what it covers is to be signed again."""
        with self._lock:
            chain = self._chains[statement.device]
            chain.leaves = chain.signed_leaves + chain.leaves
            chain.signed_leaves = []
            chain.unsigned_since = now
            chain.signing = False

    def signed(self, statement: Statement, digest: bytes) -> None:
        """The statement was signed and stored as a receipt of that digest."""
        with self._lock:
            chain = self._chains[statement.device]
            assert chain.sequence + 1 == statement.sequence
            chain.sequence = statement.sequence
            chain.previous = digest
            chain.signed_leaves = []
            chain.signing = False

    def totals(self, device: PublicKey) -> tuple[int, int]:
        """(bytes, calls) of the device so far, signed or not; zeros if it is not known."""
        self.before_reading()
        with self._lock:
            chain = self._chains.get(device)
            return (0, 0) if chain is None else (chain.nbytes, chain.calls)

    def all_totals(self) -> dict[PublicKey, tuple[int, int]]:
        """(bytes, calls) of every device known here."""
        self.before_reading()
        with self._lock:
            return {device: (chain.nbytes, chain.calls) for device, chain in self._chains.items()}


def _nothing_owed() -> None:
    """Whoever pays this book does it at once."""

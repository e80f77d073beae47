"""Receipts: what a backbone signs for the bytes a device carried, one chain per (backbone, device).

Every receipt is cumulative, so the last one alone states the balance, and names the digest of the one
before, so a chain cannot be rewritten. The backbone's signature earns the credit; the device's
countersignature (the acknowledgement) says that it agrees. With its receipts and the backbone's
certificate, a device proves its balance to anyone who knows the swarm's root, with no server.

Pure formats and checks. Knows no ledger and no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from relay.errors import IdentityError, Refused, RemoteProtocolError
from relay.identity import (
    Certificate,
    PublicKey,
    SignedDocument,
    SigningKey,
    check_public_key,
    open_document,
    require,
    sign_document,
)

from .wire import BackboneId, Hash, LeaseId

NO_PREVIOUS: Final = bytes(32)
"""`previous` of a chain's first receipt; also its call root before any call."""

_Bytes = bytes  # the type, where a field's name hides it
MAX_LEAVES: Final = 10_000
MAX_BYTES: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class LeaseLeaf:
    """One lease's share of a chain: cumulative carried bytes and calls under one epoch."""

    lease: LeaseId
    epoch: int
    bytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """One link of a chain. `bytes` and `calls` are cumulative over the whole chain, `issued_at` Unix seconds.

    `leases` are the leaves of leases that earned lately (leaves of ended ones may be left out, so they add
    up to at most `bytes`); `call_root` is the backbone's running hash over the paid calls.
    """

    swarm: PublicKey
    backbone: BackboneId
    device: PublicKey
    wallet: PublicKey
    sequence: int
    issued_at: int
    bytes: int
    calls: int
    leases: tuple[LeaseLeaf, ...]
    call_root: _Bytes
    previous: _Bytes
    document: SignedDocument | None = field(default=None, repr=False, compare=False)

    @property
    def digest(self) -> Hash:
        """The digest of the signed document that this was read from."""
        assert self.document is not None
        return Hash(self.document.digest)


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """What a verified chain proves: `bytes` and `calls` in all, and where its last link stands."""

    backbone: BackboneId
    device: PublicKey
    sequence: int
    bytes: int
    calls: int
    head: _Bytes


def sign_receipt(receipt: Receipt, key: SigningKey) -> SignedDocument:
    """Sign a receipt with the backbone's operating key."""
    fields = {
        "swarm": receipt.swarm,
        "backbone": receipt.backbone,
        "device": receipt.device,
        "wallet": receipt.wallet,
        "sequence": receipt.sequence,
        "issued_at": receipt.issued_at,
        "bytes": receipt.bytes,
        "calls": receipt.calls,
        "leases": [[leaf.lease, leaf.epoch, leaf.bytes, leaf.calls] for leaf in receipt.leases],
        "call_root": receipt.call_root,
        "previous": receipt.previous,
    }
    return sign_document("receipt", fields, key)


def open_receipt(document: SignedDocument, *, certificate: Certificate, root: bytes) -> Receipt:
    """Verify a receipt signed by the key that `certificate` (verified already) names.

    Raises as `open_document` does; `IdentityError` if the certificate is no backbone's, or the receipt
    names another backbone or swarm or was issued after the certificate ran out; `RemoteProtocolError` for
    bad fields. A renewed certificate of the same key covers what that key signed before.
    """
    receipt = read_receipt(open_document(document, "receipt", certificate.ed25519), document)
    if receipt.swarm != root or certificate.swarm != root:
        raise IdentityError("the receipt is for another swarm", code="wrong_swarm")
    if certificate.role != "backbone" or certificate.id != receipt.backbone:
        raise IdentityError("the receipt is not signed by the backbone that it names")
    if receipt.issued_at > certificate.expires_at:
        raise IdentityError("the receipt was issued after its certificate ran out", code="expired")
    return receipt


def read_receipt(fields: dict[str, Any], document: SignedDocument) -> Receipt:
    """The receipt in the fields of its document. Raises `RemoteProtocolError`."""
    receipt = Receipt(
        swarm=PublicKey(require(fields, "swarm", bytes, size=32)),
        backbone=BackboneId(require(fields, "backbone", bytes, size=16)),
        device=check_public_key(require(fields, "device", bytes, size=32)),
        wallet=check_public_key(require(fields, "wallet", bytes, size=32)),
        sequence=require(fields, "sequence", int),
        issued_at=require(fields, "issued_at", int),
        bytes=require(fields, "bytes", int),
        calls=require(fields, "calls", int),
        leases=_leaves(require(fields, "leases", list)),
        call_root=require(fields, "call_root", bytes, size=32),
        previous=require(fields, "previous", bytes, size=32),
        document=document,
    )
    numbers = (receipt.bytes, receipt.calls, receipt.issued_at, receipt.sequence)
    if not all(0 <= number <= MAX_BYTES for number in numbers) or receipt.sequence < 1:
        raise RemoteProtocolError("a number of the receipt is out of range")
    if (
        sum(leaf.bytes for leaf in receipt.leases) > receipt.bytes
        or sum(leaf.calls for leaf in receipt.leases) > receipt.calls
    ):
        raise RemoteProtocolError("the receipt's leases add up to more than its total")
    if len({(leaf.lease, leaf.epoch) for leaf in receipt.leases}) != len(receipt.leases):
        raise RemoteProtocolError("the receipt names a lease twice")
    return receipt


def _leaves(items: list[Any]) -> tuple[LeaseLeaf, ...]:
    if len(items) > MAX_LEAVES:
        raise RemoteProtocolError(f"a receipt has at most {MAX_LEAVES} leases")
    leaves = []
    for item in items:
        match item:
            case [bytes(lease), int(epoch), int(carried), int(calls)] if (
                len(lease) == 16 and epoch >= 1 and 0 <= carried <= MAX_BYTES and 0 <= calls <= MAX_BYTES
            ):
                leaves.append(LeaseLeaf(LeaseId(lease), epoch, carried, calls))
            case _:
                raise RemoteProtocolError("a lease of the receipt is not an id, an epoch, bytes and calls")
    return tuple(leaves)


def check_successor(previous: Receipt | None, receipt: Receipt) -> None:
    """Check that `receipt` is the next link after `previous` (None: the chain's first).

    Raises `Refused`: "replay" for a sequence that was used, "conflict" for a gap or a fork, "bad_request"
    for a sum that falls.
    """
    sequence, head = (0, NO_PREVIOUS) if previous is None else (previous.sequence, previous.digest)
    if receipt.sequence <= sequence:
        raise Refused("replay", f"receipt {receipt.sequence} was posted before; {sequence} is the last")
    if receipt.sequence != sequence + 1 or receipt.previous != head:
        raise Refused(
            "conflict",
            f"receipt {receipt.sequence} does not follow the last one, number {sequence}: fetch it",
        )
    if previous is None:
        return
    if (receipt.backbone, receipt.device) != (previous.backbone, previous.device):
        raise Refused("bad_request", "the receipt belongs to another chain")
    if (
        receipt.bytes < previous.bytes
        or receipt.calls < previous.calls
        or receipt.issued_at < previous.issued_at
    ):
        raise Refused("bad_request", "a receipt's bytes, calls and time never fall")
    known = {(leaf.lease, leaf.epoch): leaf for leaf in previous.leases}
    for leaf in receipt.leases:
        before = known.get((leaf.lease, leaf.epoch))
        if before is not None and (leaf.bytes < before.bytes or leaf.calls < before.calls):
            raise Refused("bad_request", f"the bytes of lease {leaf.lease.hex()} fell")


def verify_chain(
    documents: Sequence[SignedDocument], *, certificates: Iterable[Certificate], root: bytes
) -> ChainSummary:
    """Prove a balance offline: every receipt of one chain in order, from the first.

    `certificates` are verified ones of the backbone, one for each key it signed with. Raises
    `IdentityError`, `Refused` or `RemoteProtocolError` at the first link that does not hold.
    """
    by_key = {certificate.ed25519: certificate for certificate in certificates}
    last: Receipt | None = None
    for document in documents:
        if document.signer not in by_key:
            raise IdentityError("a receipt is signed by a key without a certificate")
        receipt = open_receipt(document, certificate=by_key[document.signer], root=root)
        check_successor(last, receipt)
        last = receipt
    if last is None:
        raise RemoteProtocolError("a chain without receipts proves nothing")
    return ChainSummary(last.backbone, last.device, last.sequence, last.bytes, last.calls, last.digest)


# --- acknowledgements ------------------------------------------------------------------------------------


def sign_acknowledgement(digest: bytes, device: SigningKey) -> SignedDocument:
    """The device's countersignature under the receipt of that digest, as kind "receipt-ack"."""
    assert len(digest) == 32
    return sign_document("receipt-ack", {"receipt": digest}, device)


def open_acknowledgement(document: SignedDocument, device: bytes) -> Hash:
    """Verify an acknowledgement; returns the receipt's digest. Raises as `open_document` does."""
    return Hash(require(open_document(document, "receipt-ack", device), "receipt", bytes, size=32))

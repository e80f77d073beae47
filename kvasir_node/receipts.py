"""The device's own copy of what it earned: every receipt, verified, kept and countersigned.

One append-only file a backbone, named by its id. A record is a big-endian u32 length and a msgpack map of
a version and either a certificate (of the receipts that follow) or a receipt. A torn last record, from a
kill while writing, is cut off. With these files the owner proves the balance with no server.

Knows files and receipts; nothing of sessions and the market.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Final

import structlog

from market.messages import credits_of
from market.receipts import Receipt, check_successor, open_receipt, read_receipt, sign_acknowledgement
from relay.errors import ConfigError, IdentityError, KvasirError, Refused, RemoteProtocolError
from relay.identity import (
    Certificate,
    PublicKey,
    SignedDocument,
    SigningKey,
    open_certificate,
    pack,
    unpack,
)

log = structlog.get_logger("receipts")

_LENGTH: Final = struct.Struct(">I")
_MAX_RECORD: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Balance:
    """What one backbone's receipts prove. `bytes` are carried bytes; `gaps` counts missing links."""

    backbone: str
    wallet: PublicKey
    receipts: int
    gaps: int
    sequence: int
    issued_at: int
    bytes: int
    calls: int

    @property
    def credit(self) -> Decimal:
        """The same in credits of a million bytes."""
        return credits_of(self.bytes)


@dataclass(slots=True)
class _Chain:
    path: Path
    certificate: Certificate | None = None
    last: Receipt | None = None
    receipts: int = 0
    gaps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReceiptBook:
    """The receipts of one swarm in `folder`, made if it is not there. Blocks on the disk; thread-safe."""

    def __init__(self, folder: Path, *, root: PublicKey, device: SigningKey) -> None:
        self._folder = folder
        self._root = root
        self._device = device
        self._chains: dict[bytes, _Chain] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.receipts")):
            chain = _load(path, root, verify=False, mend=True)
            if chain.certificate is not None:
                self._chains[chain.certificate.id] = chain

    def accept(
        self, document: SignedDocument, certificate: Certificate, *, wallet: PublicKey
    ) -> SignedDocument:
        """Verify a receipt from the backbone of `certificate`, keep it on disk, and countersign it.

        The same receipt again is acknowledged again. Receipts that were missed are allowed, since each is
        cumulative, and counted as gaps. Raises `IdentityError` or `RemoteProtocolError` for a bad one, and
        `Refused` for one that does not follow ("replay", "conflict", "bad_request").
        """
        receipt = open_receipt(document, certificate=certificate, root=self._root)
        if receipt.device != self._device.public or receipt.wallet != wallet:
            raise IdentityError("the receipt is for another device or wallet")
        with self._lock:
            chain = self._chains.setdefault(
                certificate.id, _Chain(self._folder / f"{certificate.id.hex()}.receipts")
            )
        with chain.lock:
            if chain.last is None or chain.last.digest != receipt.digest:
                gap = _follows(chain.last, receipt)
                self._append(chain, document, certificate)
                chain.gaps += gap
                chain.receipts += 1
                chain.last = receipt
                log.info(
                    "receipt.stored",
                    backbone=certificate.id.hex(),
                    sequence=receipt.sequence,
                    carried_bytes=receipt.bytes,
                    calls=receipt.calls,
                    gap=gap,
                )
        return sign_acknowledgement(receipt.digest, self._device)

    def balances(self) -> tuple[Balance, ...]:
        """The balance with each backbone, as of its last receipt."""
        with self._lock:
            chains = list(self._chains.values())
        return tuple(_balance(chain, chain.last) for chain in chains if chain.last is not None)

    def acknowledgements(self) -> tuple[SignedDocument, ...]:
        """Countersignatures of the last receipt of every chain, to hand in again where one may be lost."""
        with self._lock:
            lasts = [chain.last for chain in self._chains.values() if chain.last is not None]
        return tuple(sign_acknowledgement(last.digest, self._device) for last in lasts)

    def _append(self, chain: _Chain, document: SignedDocument, certificate: Certificate) -> None:
        records = b""
        if chain.certificate is None or chain.certificate.hash != certificate.hash:
            records += _record({"certificate": certificate.document.to_bytes()})
        records += _record({"receipt": document.to_bytes()})
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        descriptor = os.open(chain.path, flags, 0o600)
        try:
            written = os.write(descriptor, records)
            if written != len(records):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(f"the disk took {written} of {len(records)} bytes of a receipt")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        chain.certificate = certificate


def read_balances(folder: Path, root: PublicKey, *, verify: bool = False) -> tuple[Balance, ...]:
    """The balances that the receipts in `folder` prove, without a device key and without changing them.

    The last receipt's signature and every link are checked; with `verify`, every signature. Raises
    `ConfigError` naming the file that does not hold.
    """
    chains = (_load(path, root, verify=verify, mend=False) for path in sorted(folder.glob("*.receipts")))
    return tuple(_balance(chain, chain.last) for chain in chains if chain.last is not None)


def _follows(last: Receipt | None, receipt: Receipt) -> bool:
    """Whether receipts are missing between the two (else it is the next link). Raises `Refused`."""
    try:
        check_successor(last, receipt)
    except Refused as error:
        expected = 1 if last is None else last.sequence + 1
        falls = last is not None and (receipt.bytes < last.bytes or receipt.calls < last.calls)
        if error.code != "conflict" or receipt.sequence <= expected or falls:
            raise
        return True
    return False


def _record(fields: dict[str, object]) -> bytes:
    body = pack({"v": 1, **fields})
    return _LENGTH.pack(len(body)) + body


def _load(path: Path, root: PublicKey, *, verify: bool, mend: bool) -> _Chain:
    chain = _Chain(path)
    last_document: SignedDocument | None = None
    data = path.read_bytes()
    good = 0
    try:
        for good, fields in _records(data):  # noqa: B007 - used after the loop: where the last good one ends
            if "certificate" in fields:
                chain.certificate = _certificate(fields["certificate"], root)
                continue
            if chain.certificate is None:
                raise RemoteProtocolError("a receipt before any certificate")
            last_document = SignedDocument.from_bytes(fields["receipt"])
            receipt = _read(last_document, chain.certificate, root, verify=verify)
            chain.gaps += _follows(chain.last, receipt)
            chain.receipts += 1
            chain.last = receipt
        if last_document is not None and chain.certificate is not None:
            _read(last_document, chain.certificate, root, verify=True)
    except (KvasirError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged after {chain.receipts} receipts: {error}") from None
    if mend and good < len(data):
        os.truncate(path, good)
    return chain


def _records(data: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
    """(where the record ends, its fields); stops at a torn last record."""
    place = 0
    while place + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, place)
        end = place + _LENGTH.size + size
        if size > _MAX_RECORD:
            raise RemoteProtocolError(f"a record of {size} bytes")
        if end > len(data):
            return
        fields = unpack(data[place + _LENGTH.size : end])
        if not isinstance(fields, dict) or fields.get("v") != 1:
            raise RemoteProtocolError("a record of another version")
        place = end
        yield place, fields


def _certificate(data: bytes, root: PublicKey) -> Certificate:
    """A stored certificate; whether it covers a receipt's time is checked with the receipt."""
    document = SignedDocument.from_bytes(data)
    issued_at = unpack(document.body)["issued_at"]
    return open_certificate(document, swarm=root, now=float(issued_at), role="backbone")


def _read(document: SignedDocument, certificate: Certificate, root: PublicKey, *, verify: bool) -> Receipt:
    if verify:
        return open_receipt(document, certificate=certificate, root=root)
    return read_receipt(unpack(document.body), document)


def _balance(chain: _Chain, last: Receipt) -> Balance:
    return Balance(
        backbone=last.backbone.hex(),
        wallet=last.wallet,
        receipts=chain.receipts,
        gaps=chain.gaps,
        sequence=last.sequence,
        issued_at=last.issued_at,
        bytes=last.bytes,
        calls=last.calls,
    )

"""Receipts signed, stored, posted to the market and sent for countersignature, when the credit book says so.

Order of things: sign, store, tell the device, post. A receipt that the market does not take now is posted
later; one that a device does not countersign now is sent again at its next session.

Knows the book, the store and the market. Knows no calls.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import structlog

from market.client import MarketClient
from market.receipts import (
    LeaseLeaf,
    Receipt,
    open_acknowledgement,
    read_receipt,
    sign_receipt,
)
from market.wire import BackboneId, LeaseId
from relay.errors import KvasirError, Refused, Unreachable
from relay.identity import Certificate, PublicKey, SignedDocument, SigningKey, address_of, unpack_canonical

from .credit import CreditBook, Statement, Totals
from .receipt_store import ReceiptStore, StoredReceipt

_log = structlog.get_logger("backbone")

TICK_S: Final = 0.1
"""How often the book is asked what is due; well within a first receipt's second."""

POST_AGAIN_S: Final = 5.0
"""Pause after the market did not answer."""

T = TypeVar("T")


class Bookkeeper:
    """Keeps the receipts of one backbone. `signer` gives its current certificate and key.

    `send` hands a receipt's bytes to a device's session, if there is one.
    """

    def __init__(
        self,
        book: CreditBook,
        path: Path,
        *,
        market: MarketClient,
        signer: Callable[[], tuple[Certificate, SigningKey]],
        send: Callable[[PublicKey, bytes], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self.posted = 0
        self.acknowledged = 0
        self._path = path
        self._market = market
        self._signer = signer
        self._send = send
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receipts")
        self._store: ReceiptStore | None = None
        self._issued: dict[PublicKey, int] = {}  # when each chain's last receipt was issued
        self._refused: dict[PublicKey, int] = {}  # the sequence that each chain is stuck at
        self._post_now = asyncio.Event()
        self._signing = asyncio.Lock()

    async def _do(self, work: Callable[[ReceiptStore], T]) -> T:
        assert self._store is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    async def open(self) -> None:
        """Open the store. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        self._store = await loop.run_in_executor(self._thread, ReceiptStore, self._path)
        self._post_now.set()

    async def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            await self._do(ReceiptStore.close)
        self._thread.shutdown()

    # --- chains --------------------------------------------------------------------------------------

    async def open_chain(self, device: PublicKey, wallet: PublicKey) -> None:
        """Continue the device's chain from the newest receipt known here or to the market.

        Raises `KvasirError` where nothing is known here and the market does not answer.
        """
        if self.book.knows(device):
            if self.book.wallet_of(device) != wallet:
                await asyncio.shield(self.sign({device}))  # a receipt is never left half signed
                self.book.set_wallet(device, wallet)
            return
        last = await self._do(lambda store: store.last(device))
        try:
            document = await self._market.receipts(device)
        except Unreachable:
            if last is None:
                raise
            document = None
        newest = None if last is None else _read(last.document)
        if document is not None:
            theirs = _read(document)
            if newest is None or theirs.sequence > newest.sequence:
                newest = theirs
                await self._do(
                    lambda store: store.adopt(device, theirs.sequence, document, acknowledged=False)
                )
        if newest is not None:
            self._issued[device] = newest.issued_at
        self.book.open(device, Totals(wallet) if newest is None else _totals(newest, wallet))

    def forget(self, device: PublicKey) -> bool:
        """Forget a device that is gone and has nothing unsigned; `open_chain` takes its chain up again."""
        if not self.book.forget(device):
            return False
        self._issued.pop(device, None)
        self._refused.pop(device, None)
        return True

    async def session_started(self, device: PublicKey) -> None:
        """A new session: its first receipt comes soon, and the last one is sent again if unacknowledged."""
        self.book.session_started(device)
        last = await self._do(lambda store: store.last(device))
        if last is not None and not last.acknowledged:
            self._send(device, last.document.to_bytes())

    # --- the two loops -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sign what is due and post what is unposted, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sign_loop())
            tasks.create_task(self._post_loop())

    async def _sign_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.sign(self.book.due(time.monotonic()))

    async def sign(self, devices: Iterable[PublicKey]) -> None:
        """Sign, store and send the next receipt of each device that earned something since its last."""
        async with self._signing:
            for device in devices:
                if device in self.book.unsigned():
                    await self._sign_one(device)

    async def _sign_one(self, device: PublicKey) -> None:
        statement = self.book.next_statement(device)
        document = self._document(statement)
        try:
            await self._do(lambda store, s=statement, d=document: store.append(s.device, s.sequence, d))  # type: ignore[misc]
        except (sqlite3.Error, OSError) as error:
            self.book.not_signed(statement, time.monotonic())
            _log.error("receipt.not_stored", device=address_of(device), reason=str(error))
            return
        self.book.signed(statement, document.digest)
        _log.info(
            "receipt.signed",
            device=address_of(device),
            wallet=address_of(statement.wallet),
            sequence=statement.sequence,
            bytes=statement.nbytes,
            calls=statement.calls,
        )
        self._send(device, document.to_bytes())
        self._post_now.set()

    def _document(self, statement: Statement) -> SignedDocument:
        certificate, key = self._signer()
        issued_at = max(int(self._clock()), self._issued.get(statement.device, 0))  # a clock may be set back
        self._issued[statement.device] = issued_at
        receipt = Receipt(
            swarm=certificate.swarm,
            backbone=BackboneId(certificate.id),
            device=statement.device,
            wallet=statement.wallet,
            sequence=statement.sequence,
            issued_at=issued_at,
            bytes=statement.nbytes,
            calls=statement.calls,
            leases=tuple(
                LeaseLeaf(LeaseId(lease), epoch, nbytes, calls)
                for lease, epoch, nbytes, calls in statement.leases
            ),
            call_root=statement.call_root,
            previous=statement.previous,
        )
        return sign_receipt(receipt, key)

    async def _post_loop(self) -> None:
        while True:
            try:
                async with asyncio.timeout(POST_AGAIN_S):
                    await self._post_now.wait()
            except TimeoutError:
                pass
            self._post_now.clear()
            try:
                await self.post()
            except KvasirError as error:  # the market is away, or something else answers in its place
                _log.warning("receipt.unposted", reason=str(error))
                await asyncio.sleep(POST_AGAIN_S)

    async def post(self) -> None:
        """Post what the market does not have, chain by chain: one that is refused holds up no other.

        Raises `Unreachable`, or `RemoteProtocolError` where the answer is none of a market's.
        """
        for device in await self._do(ReceiptStore.behind):
            for stored in await self._do(lambda store, d=device: store.unposted(d)):  # type: ignore[misc]
                if not await self._post_one(stored):
                    break

    async def _post_one(self, stored: StoredReceipt) -> bool:
        try:
            await self._market.post_receipt(stored.document)
        except Refused as error:
            if error.code != "replay":
                self._note_refused(stored, error)
                return False
        self._refused.pop(stored.device, None)
        await self._do(lambda store: store.mark_posted(stored.device, stored.sequence))
        self.posted += 1
        return True

    def _note_refused(self, stored: StoredReceipt, error: Refused) -> None:
        """Say once for each receipt that the market refuses it; it is offered again and again."""
        if self._refused.get(stored.device) == stored.sequence:
            return
        self._refused[stored.device] = stored.sequence
        _log.error(
            "receipt.refused",
            device=address_of(stored.device),
            sequence=stored.sequence,
            code=error.code,
            reason=str(error),
        )

    # --- countersignatures and the end ---------------------------------------------------------------

    async def acknowledge(self, device: PublicKey, ack: bytes) -> None:
        """Take in a device's countersignature. Raises `KvasirError` if it does not verify."""
        digest = open_acknowledgement(SignedDocument.from_bytes(ack), device)
        sequence = await self._do(lambda store: store.mark_acknowledged(device, digest))
        if sequence is not None:
            self.acknowledged += 1
            _log.debug("receipt.acknowledged", device=address_of(device), sequence=sequence)

    async def drain(self, timeout: float) -> None:
        """Sign for everyone with something unsigned, and post within `timeout` seconds."""
        await self.sign(self.book.unsigned())
        try:
            async with asyncio.timeout(timeout):
                await self.post()
        except (TimeoutError, KvasirError) as error:
            _log.warning("receipt.unposted", reason=str(error) or "no time left; posted at the next start")


def _read(document: SignedDocument) -> Receipt:
    """A receipt of our own, from our store or vouched for by the market's answer to us."""
    return read_receipt(unpack_canonical(document.body), document)


def _totals(receipt: Receipt, wallet: PublicKey) -> Totals:
    return Totals(
        wallet=wallet,
        sequence=receipt.sequence,
        nbytes=receipt.bytes,
        calls=receipt.calls,
        leases={(leaf.lease, leaf.epoch): (leaf.bytes, leaf.calls) for leaf in receipt.leases},
        previous=receipt.digest,
    )

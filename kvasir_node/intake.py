"""What backbones send besides calls: receipts into the book and countersigned, notices to the owner.

Knows receipts and who signs them. Knows no sessions and no market.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import structlog

from market.messages import credits_of
from relay.errors import IdentityError, KvasirError
from relay.identity import Certificate, PublicKey, SignedDocument

from .calls import Notice
from .receipts import ReceiptBook
from .status import NodeStatus

log = structlog.get_logger("node")


class Intake:
    """Takes in receipts and notices. `wallet` gives the wallet that this device serves for; `arrived` is set
    at each receipt that held.
    """

    def __init__(
        self, book: ReceiptBook, wallet: Callable[[], PublicKey], status: NodeStatus, threads: Executor
    ) -> None:
        self.book = book
        self.arrived = asyncio.Event()
        self._wallet = wallet
        self._status = status
        self._threads = threads
        self._certificates: dict[PublicKey, Certificate] = {}

    def know(self, certificate: Certificate) -> None:
        """A backbone with this certificate, verified in the handshake, has a session here."""
        self._certificates[certificate.ed25519] = certificate

    async def receipt(self, data: bytes) -> bytes | None:
        """Keep a receipt and countersign it; one that does not hold is not signed, and the owner told."""
        try:
            document = SignedDocument.from_bytes(data)
            certificate = self._certificates.get(document.signer)
            if certificate is None:
                raise IdentityError("the receipt is signed by no backbone that has a session here")
            loop = asyncio.get_running_loop()
            ack = await loop.run_in_executor(
                self._threads, lambda: self.book.accept(document, certificate, wallet=self._wallet())
            )
        except (KvasirError, OSError) as error:
            self._status.notify(f"a receipt was not signed: {error}")
            log.warning("receipt.rejected", reason=str(error))
            return None
        self.arrived.set()
        return ack.to_bytes()

    def notice(self, notice: Notice) -> None:
        """Show the owner what a backbone says."""
        self._status.notify(f"a backbone says: {notice.message}")
        log.warning("notice.received", code=notice.code, reason=notice.message)

    def balance(self) -> Mapping[str, Any]:
        """What the receipts prove, for the status."""
        balances = self.book.balances()
        carried = sum(balance.bytes for balance in balances)
        return {
            "credit": str(credits_of(carried)),
            "bytes": carried,
            "calls": sum(balance.calls for balance in balances),
            "receipts": sum(balance.receipts for balance in balances),
        }

"""What a cheater keeps: the real store, receipts and ledger of a market, played through without sockets.

A wallet earns honestly until its first credit is released, cheats for as long as an audit may need, is put
out, and has a receipt posted late; then time passes. Knows the market's own functions. Knows no tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from market import admission, banking, escrow, judging
from market import messages as m
from market.receipts import NO_PREVIOUS, Receipt, open_receipt, sign_receipt
from market.store import Store
from market.swarm import SwarmKeys
from market.wallet import Challenge, new_nonce, open_grant, sign_challenge
from market.wire import BackboneId, RecordId
from relay.identity import ExchangeKey, SigningKey

CALL_BYTES = 55_312
"""Carried bytes of one call: nine rows of 3072 bf16 values and eight ids."""

RULES = escrow.EscrowRules()
URL = "http://127.0.0.1:8422"
DAY_S = 86_400.0


@dataclass(slots=True)
class Kept:
    """Carried bytes: `honest` and `cheated` were issued, `available` are the wallet's, `void` are not."""

    honest: int
    cheated: int
    available: int
    void: int

    @property
    def cheater_credit(self) -> int:
        """Bytes available to the wallet that it earned by cheating."""
        return max(0, self.available - self.honest)


@dataclass(slots=True)
class _Play:
    """A market's store at a clock of its own, and one wallet's chain of receipts."""

    store: Store
    keys: SwarmKeys
    wallet: SigningKey
    device: SigningKey
    now: float
    documents: list[bytes] = field(default_factory=list)
    bytes: int = 0
    calls: int = 0

    async def sign_in(self) -> None:
        keys = (self.wallet.public, self.device.public, ExchangeKey.generate().public, self.keys.root_public)
        at = int(self.now)
        text = Challenge(URL, *keys, "serve", new_nonce(), at, at + 86_400).text
        grant = open_grant(text, sign_challenge(text, self.wallet), root=self.keys.root_public, now=at)
        await self.store.write(lambda session: admission.store_grant(session, grant))

    async def earn(self, calls: int, *, issued_at: float | None = None) -> None:
        """One receipt for so many calls more, posted now."""
        key = self.keys.backbone
        self.calls += calls
        self.bytes += calls * CALL_BYTES
        receipt = Receipt(
            swarm=self.keys.root_public,
            backbone=BackboneId(key.id),
            device=self.device.public,
            wallet=self.wallet.public,
            sequence=len(self.documents) + 1,
            issued_at=int(self.now if issued_at is None else issued_at),
            bytes=self.bytes,
            calls=self.calls,
            leases=(),
            call_root=hashlib.sha256(str(self.calls).encode()).digest(),
            previous=self.documents[-1] if self.documents else NO_PREVIOUS,
        )
        document = sign_receipt(receipt, key.signing)
        self.documents.append(document.digest)
        opened = open_receipt(document, certificate=key.certificate, root=self.keys.root_public)
        await self.store.write(lambda session: banking.post_receipt(session, opened, key.certificate))

    async def release(self) -> None:
        await self.store.write(escrow.note_leavers)
        while await self.store.write(lambda session: escrow.release_due(session, RULES)):
            pass

    async def put_out(self, reason: str) -> None:
        request = m.QuarantineRequest(RecordId(secrets.token_bytes(16)), self.wallet.public, reason)
        certificate = self.keys.backbone.certificate
        await self.store.write(lambda session: judging.quarantine(session, request, certificate))

    async def statement(self) -> m.CreditStatement:
        await self.store.read(banking.check_ledger)
        return await self.store.read(lambda session: banking.statement(session, self.wallet.public))


def play(detected_after: int, *, honest_calls: int = 2500, receipt_calls: int = 50) -> Kept:
    """A wallet that serves honestly, cheats for `detected_after` calls until it is put out, and waits."""

    async def whole(folder: Path) -> Kept:
        clock = [1_700_000_000.0]
        keys = SwarmKeys.load_or_create(folder, now=clock[0])
        store = Store(f"sqlite:///{folder / 'market.db'}", clock=lambda: clock[0])
        await store.open()
        try:
            made = _Play(store, keys, SigningKey.generate(), SigningKey.generate(), clock[0])
            await made.sign_in()
            await _calls(made, honest_calls, receipt_calls)
            honest = made.bytes
            await _calls(made, detected_after - min(detected_after, 10), receipt_calls)
            signed_at = made.now
            await made.put_out("caught")
            await made.earn(min(detected_after, 10), issued_at=signed_at)  # the last ones, posted late
            for days in (0.0, 8.0, 365.0):
                clock[0] = made.now = clock[0] + days * DAY_S
                await made.release()
            statement = await made.statement()
            return Kept(honest, made.bytes - honest, statement.available, statement.void)
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(whole(Path(folder)))


async def _calls(made: _Play, calls: int, at_once: int) -> None:
    while calls > 0:
        some = min(calls, at_once)
        await made.earn(some)
        await made.release()
        calls -= some

"""Receipts from the book to the ledger: signed, stored, posted, countersigned, continued after a restart."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from kvasir_backbone.bookkeeping import Bookkeeper
from kvasir_backbone.credit import CreditBook, LeaseShare
from kvasir_backbone.receipt_store import ReceiptStore
from market.client import MarketClient
from market.receipts import open_receipt, sign_acknowledgement, verify_chain
from relay.errors import ConfigError, IdentityError, Unreachable
from relay.identity import PublicKey, SignedDocument, SigningKey
from tests.support.markets import Device, Stall, stall
from tests.support.waiting import until

LEASE = b"\5" * 16


class Desk:
    """One start of a backbone's bookkeeping: a book, a keeper, and what was sent to devices."""

    def __init__(self, market: Stall, path: Path, client: MarketClient | None = None) -> None:
        self.market = market
        self.book = CreditBook()
        self.sent: list[tuple[PublicKey, SignedDocument]] = []
        key = market.keys.backbone
        self.keeper = Bookkeeper(
            self.book,
            path,
            market=client or market.backbone(),
            signer=lambda: (key.certificate, key.signing),
            send=lambda device, data: self.sent.append((device, SignedDocument.from_bytes(data))),
        )

    async def earn(self, device: Device, size: int) -> None:
        """The device carries `size` bytes, and its receipt is signed."""
        await self.keeper.open_chain(device.key.public, device.wallet.public)
        self.book.pay(device.key.public, 1, 0, [LeaseShare(LEASE, 1, size)], time.monotonic())
        await self.keeper.sign([device.key.public])


@asynccontextmanager
async def desk(market: Stall, path: Path, client: MarketClient | None = None) -> AsyncIterator[Desk]:
    made = Desk(market, path, client)
    await made.keeper.open()
    try:
        yield made
    finally:
        await made.keeper.close()


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path / "market") as made:
        yield made


async def test_what_a_device_carries_is_signed_sent_and_posted_to_its_wallet(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 2_500_000)
        await made.keeper.post()
    ((to, document),) = made.sent
    assert to == device.key.public
    receipt = open_receipt(
        document, certificate=market.keys.backbone.certificate, root=market.keys.root_public
    )
    assert (receipt.sequence, receipt.bytes, receipt.calls) == (1, 2_500_000, 1)
    assert float((await device.client.credits()).credit) == 2.5


async def test_the_running_loops_sign_within_a_second_and_post_by_themselves(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.keeper.open_chain(device.key.public, device.wallet.public)
        running = asyncio.create_task(made.keeper.run())
        started = time.monotonic()
        made.book.pay(device.key.public, 1, 0, [LeaseShare(LEASE, 1, 100)], started)
        await until(lambda: bool(made.sent), what="the first receipt")
        assert time.monotonic() - started < 1.0
        await until(lambda: made.keeper.posted == 1, what="the posting")
        running.cancel()
        await asyncio.wait([running])


async def test_a_restart_continues_the_chain_and_the_device_can_prove_all_of_it(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    documents = []
    for size in (10, 20, 30):
        async with desk(market, tmp_path / "r.db") as made:
            await made.earn(device, size)
            await made.keeper.post()
            documents += [document for _, document in made.sent]
    summary = verify_chain(
        documents, certificates=[market.keys.backbone.certificate], root=market.keys.root_public
    )
    assert (summary.sequence, summary.bytes, summary.calls) == (3, 60, 3)
    assert (await device.client.credits()).escrow == 60


async def test_a_lost_receipt_store_continues_from_what_the_market_has(market: Stall, tmp_path: Path) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "first.db") as made:
        await made.earn(device, 10)
        await made.keeper.post()
    async with desk(market, tmp_path / "second.db") as made:
        await made.earn(device, 5)
        await made.keeper.post()
        assert made.book.totals(device.key.public) == (15, 2)
    assert (await device.client.credits()).escrow == 15


async def test_receipts_signed_while_the_market_is_away_are_posted_later(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 10)
    away = market.client(key=market.keys.backbone.signing, certificate=market.keys.backbone.certificate)
    away.url = "http://127.0.0.1:9"
    async with desk(market, tmp_path / "r.db", away) as made:
        await made.earn(device, 20)  # its chain is known here, so the market is not needed
        with pytest.raises(Unreachable):
            await made.keeper.post()
        await made.keeper.drain(1.0)
    async with desk(market, tmp_path / "r.db") as made:
        await made.keeper.post()
        assert made.keeper.posted == 2
    assert (await device.client.credits()).escrow == 30


async def test_a_new_chain_needs_the_market_to_be_there(market: Stall, tmp_path: Path) -> None:
    device = await market.device()
    away = market.client(key=market.keys.backbone.signing, certificate=market.keys.backbone.certificate)
    away.url = "http://127.0.0.1:9"
    async with desk(market, tmp_path / "r.db", away) as made:
        with pytest.raises(Unreachable):
            await made.keeper.open_chain(device.key.public, device.wallet.public)


async def test_a_countersignature_counts_and_an_unacknowledged_receipt_is_sent_again(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 10)
        await made.keeper.session_started(device.key.public)
        assert len(made.sent) == 2
        assert made.sent[0] == made.sent[1]
        ack = sign_acknowledgement(made.sent[0][1].digest, device.key)
        await made.keeper.acknowledge(device.key.public, ack.to_bytes())
        assert made.keeper.acknowledged == 1
        await made.keeper.session_started(device.key.public)
        assert len(made.sent) == 2
        forged = sign_acknowledgement(made.sent[0][1].digest, SigningKey.generate())
        with pytest.raises(IdentityError):
            await made.keeper.acknowledge(device.key.public, forged.to_bytes())


async def test_a_device_granted_to_another_wallet_gets_its_next_receipt_for_that_one(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    second = SigningKey.generate()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 10)
        await device.client.login(second, device.key, device.exchange)
        await made.keeper.open_chain(device.key.public, second.public)
        made.book.pay(device.key.public, 2, 0, [LeaseShare(LEASE, 2, 7)], time.monotonic())
        await made.keeper.sign([device.key.public])
        await made.keeper.post()
    table = await market.backbone().credit_table()
    assert {row.wallet: row.escrow for row in table.wallets} == {device.wallet.public: 10, second.public: 7}
    assert table.balanced


async def test_a_device_that_was_forgotten_goes_on_where_its_chain_stood(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 10)
        made.book.pay(device.key.public, 2, 0, [LeaseShare(LEASE, 1, 7)], time.monotonic())
        assert not made.keeper.forget(device.key.public), "something is unsigned"
        await made.keeper.sign([device.key.public])
        assert made.keeper.forget(device.key.public)
        assert not made.book.knows(device.key.public)
        await made.earn(device, 100)
        await made.keeper.post()
        assert made.book.paid_bytes == 117
    receipts = [
        open_receipt(document, certificate=market.keys.backbone.certificate, root=market.keys.root_public)
        for _, document in made.sent
    ]
    assert [(receipt.sequence, receipt.bytes) for receipt in receipts] == [(1, 10), (2, 17), (3, 117)]


async def test_a_receipt_that_the_disk_refuses_is_not_sent_and_is_signed_later(
    market: Stall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = await market.device()
    append = ReceiptStore.append

    def full(self: ReceiptStore, *arguments: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with desk(market, tmp_path / "r.db") as made:
        monkeypatch.setattr(ReceiptStore, "append", full)
        await made.earn(device, 10)
        assert made.sent == []
        monkeypatch.setattr(ReceiptStore, "append", append)
        await made.keeper.sign([device.key.public])
        await made.keeper.post()
    assert len(made.sent) == 1
    assert (await device.client.credits()).escrow == 10


async def test_a_clock_that_is_set_back_does_not_break_a_chain(market: Stall, tmp_path: Path) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 10)
        made.keeper._clock = lambda: time.time() - 50
        await made.earn(device, 20)
        await made.keeper.post()
    async with desk(market, tmp_path / "r.db") as made:
        made.keeper._clock = lambda: time.time() - 50
        await made.earn(device, 30)
        await made.keeper.post()
    assert (await device.client.credits()).escrow == 60


async def test_receipts_signed_before_a_certificates_renewal_are_posted_after_it(
    market: Stall, tmp_path: Path
) -> None:
    device = await market.device()
    async with desk(market, tmp_path / "r.db") as made:
        await made.earn(device, 10)
    keys, day = market.keys, 86_400
    market.clock.ahead += 16 * day
    assert "backbone" in keys.renew(market.clock())
    async with desk(market, tmp_path / "r.db") as made:
        await made.keeper.post()
        assert made.keeper.posted == 1


async def test_a_chain_that_the_market_refuses_holds_up_no_other_and_is_said_once(
    market: Stall, tmp_path: Path
) -> None:
    devices = sorted([await market.device() for _ in range(2)], key=lambda device: device.key.public)
    refused, good = devices
    async with desk(market, tmp_path / "r.db") as made:
        await made.keeper.open_chain(refused.key.public, SigningKey.generate().public)
        with structlog.testing.capture_logs() as logs:
            for _ in range(300):  # more than are read from the store at a time
                made.book.pay(refused.key.public, 1, 0, [LeaseShare(LEASE, 1, 1)], time.monotonic())
                await made.keeper.sign([refused.key.public])
            await made.earn(good, 10)
            await made.keeper.post()
            await made.keeper.post()
        assert made.keeper.posted == 1
    assert [entry["code"] for entry in logs if entry["event"] == "receipt.refused"] == ["forbidden"]
    assert (await good.client.credits()).escrow == 10


def test_a_store_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    ReceiptStore(tmp_path / "r.db").close()
    database = sqlite3.connect(tmp_path / "r.db")
    database.execute("PRAGMA user_version=9")
    database.close()
    with pytest.raises(ConfigError, match="schema version 9"):
        ReceiptStore(tmp_path / "r.db")


def test_the_store_keeps_the_last_receipt_and_forgets_what_is_posted_and_acknowledged(tmp_path: Path) -> None:
    store = ReceiptStore(tmp_path / "r.db")
    device = PublicKey(bytes(32))
    documents = [SignedDocument("receipt", bytes([n]), device, bytes(64)) for n in range(4)]
    for number, document in enumerate(documents, 1):
        store.append(device, number, document)
    for number in range(1, 5):
        assert store.behind() == [device]
        assert [stored.sequence for stored in store.unposted(device, 2)] == [number, number + 1][: 5 - number]
        store.mark_posted(device, number)
    assert store.behind() == store.unposted(device) == []
    assert store.mark_acknowledged(device, documents[2].digest) == 3
    assert store.mark_acknowledged(device, bytes(32)) is None
    last = store.last(device)
    assert last is not None
    assert (last.sequence, last.acknowledged) == (4, False)
    assert store._db.execute("SELECT COUNT(*) FROM receipts").fetchone()[0] == 1
    store.close()

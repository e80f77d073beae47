"""Receipts and the ledger through the real HTTP server: posted once, conserved, the same after any kill."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, update

from market import ledger
from market import tables as t
from market.banking import LedgerCheck, check_ledger
from market.client import MarketClient
from market.ledger import ISSUANCE, LedgerBroken, escrow
from market.messages import credits_of
from market.receipts import NO_PREVIOUS, Receipt, sign_acknowledgement, sign_receipt, verify_chain
from market.store import Store
from market.swarm import OperatingKey, SwarmKeys
from market.wire import BackboneId
from relay.errors import Refused, Unreachable
from relay.identity import ExchangeKey, PublicKey, SignedDocument, SigningKey
from relay.links import parse_join_link

from ..support.markets import Device, Stall, stall


class Chain:
    """One backbone's receipts for one device, as the backbone makes them."""

    def __init__(self, key: OperatingKey, root: PublicKey, device: PublicKey, wallet: PublicKey) -> None:
        self.key, self.root, self.device, self.wallet = key, root, device, wallet
        self.documents: list[SignedDocument] = []
        self.bytes = self.calls = 0

    def next(self, carried: int, calls: int = 1, *, at: float | None = None) -> SignedDocument:
        """The next receipt, `carried` bytes and `calls` later, issued now or `at` another time."""
        self.bytes += carried
        self.calls += calls
        receipt = Receipt(
            swarm=self.root,
            backbone=BackboneId(self.key.id),
            device=self.device,
            wallet=self.wallet,
            sequence=len(self.documents) + 1,
            issued_at=int(time.time() if at is None else at),
            bytes=self.bytes,
            calls=self.calls,
            leases=(),
            call_root=hashlib.sha256(str(self.calls).encode()).digest(),
            previous=self.documents[-1].digest if self.documents else NO_PREVIOUS,
        )
        self.documents.append(sign_receipt(receipt, self.key.signing))
        return self.documents[-1]


def chain_of(market: Stall, device: Device) -> Chain:
    return Chain(market.keys.backbone, market.keys.root_public, device.key.public, device.wallet.public)


@pytest.fixture
async def market(database: str, tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path, database=database) as running:
        yield running


async def test_a_posted_receipt_is_credit_in_escrow(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    await backbone.post_receipt(chain.next(1_234_567, calls=3))
    statement = await device.client.credits()
    assert (statement.escrow, statement.available, statement.void) == (1_234_567, 0, 0)
    assert (statement.receipts, statement.calls, statement.unacknowledged) == (1, 3, 1_234_567)
    assert str(statement.credit) == "1.234567"
    assert await backbone.credits(device.wallet.address) == statement
    table = await backbone.credit_table()
    assert table.balanced
    assert table.issued == 1_234_567
    assert table.wallets == (statement,)


async def test_the_same_receipt_posted_by_many_at_once_is_paid_once(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    receipt = chain_of(market, device).next(100)
    await asyncio.gather(*(backbone.post_receipt(receipt) for _ in range(30)))
    assert (await device.client.credits()).escrow == 100
    table = await backbone.credit_table()
    assert (table.entries, table.balanced) == (1, True)


async def test_many_chains_at_once_add_up(market: Stall) -> None:
    backbone = market.backbone()
    devices = [await market.device() for _ in range(6)]

    async def earn(device: Device, each: int) -> None:
        chain = chain_of(market, device)
        for _ in range(5):
            await backbone.post_receipt(chain.next(each))

    await asyncio.gather(*(earn(device, 10 * n) for n, device in enumerate(devices)))
    balances = [(await device.client.credits()).escrow for device in devices]
    assert balances == [50 * n for n in range(6)]
    table = await backbone.credit_table()
    assert table.balanced
    assert table.issued == sum(balances)


async def test_gaps_forks_and_falls_are_refused(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    first, second, third = (chain.next(10) for _ in range(3))
    fork = chain_of(market, device)
    forked_first = fork.next(11)
    with pytest.raises(Refused) as refused:
        await backbone.post_receipt(second)
    assert refused.value.code == "conflict"
    await backbone.post_receipt(first)
    for receipt, code in ((forked_first, "replay"), (fork.next(5), "conflict"), (third, "conflict")):
        with pytest.raises(Refused) as refused:
            await backbone.post_receipt(receipt)
        assert refused.value.code == code
    await backbone.post_receipt(second)
    await backbone.post_receipt(first)  # again: nothing happens
    assert await backbone.receipts(device.key.public) == second
    assert (await device.client.credits()).escrow == 20


async def test_receipts_for_strangers_are_refused(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    key, root = market.keys.backbone, market.keys.root_public
    stranger = SigningKey.generate().public
    for pair in ((stranger, device.wallet.public), (device.key.public, stranger)):
        with pytest.raises(Refused) as refused:
            await backbone.post_receipt(Chain(key, root, *pair).next(1))
        assert refused.value.code == "forbidden"
    assert await backbone.receipts(stranger) is None


async def test_a_receipt_of_no_new_bytes_is_kept_and_issues_nothing(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    await backbone.post_receipt(chain.next(10))
    await backbone.post_receipt(chain.next(0, calls=0))
    statement = await device.client.credits()
    assert (statement.escrow, statement.receipts) == (10, 2)
    assert (await backbone.credit_table()).entries == 1


async def test_acknowledgements_cover_all_before_and_are_the_devices_alone(market: Stall) -> None:
    device, other, backbone = await market.device(), await market.device(), market.backbone()
    chain = chain_of(market, device)
    receipts = [chain.next(10) for _ in range(3)]
    ack = sign_acknowledgement(receipts[1].digest, device.key)
    with pytest.raises(Refused) as refused:
        await device.client.acknowledge(ack)
    assert refused.value.code == "not_found"
    for receipt in receipts:
        await backbone.post_receipt(receipt)
    with pytest.raises(Refused):
        await other.client.acknowledge(ack)
    with pytest.raises(Refused):
        await other.client.acknowledge(sign_acknowledgement(receipts[1].digest, other.key))
    await device.client.acknowledge(ack)
    await device.client.acknowledge(ack)
    assert (await device.client.credits()).unacknowledged == 10
    await device.client.acknowledge(sign_acknowledgement(receipts[2].digest, device.key))
    await device.client.acknowledge(ack)
    assert (await device.client.credits()).unacknowledged == 0


async def test_a_balance_is_proved_from_the_receipts_without_the_market(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    for _ in range(3):
        await backbone.post_receipt(chain.next(7))
    proved = verify_chain(
        chain.documents, certificates=[market.keys.backbone.certificate], root=market.keys.root_public
    )
    assert proved.bytes == (await device.client.credits()).escrow


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**9)), max_size=12))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_credit_is_conserved_in_the_store(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[int, int]]
) -> None:
    async def play() -> None:
        async with stall(tmp_path_factory.mktemp("ledger"), sweeping=False) as market:
            devices = [await market.device() for _ in range(3)]
            chains = [chain_of(market, device) for device in devices]
            for who, carried in script:
                await market.backbone().post_receipt(chains[who].next(carried))
            balances = await market.market._store.read(check_ledger)
            for device, chain in zip(devices, chains, strict=True):
                assert balances.get(escrow(device.wallet.public), 0) == chain.bytes
            assert -balances.get(ISSUANCE, 0) == sum(chain.bytes for chain in chains)
            assert sum(balances.values()) == 0

    asyncio.run(play())


async def test_a_ledger_that_was_changed_on_disk_is_found(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    for _ in range(3):
        await backbone.post_receipt(chain.next(10))
    store, amount = market.market._store, t.ledger_postings.c.amount

    async def change(by: int) -> None:
        entry = update(t.ledger_postings).where(t.ledger_postings.c.entry == 2)
        await store.write(lambda session: session.run(entry.values(amount=amount * by)))

    assert (await backbone.credit_table()).balanced
    await change(-1)  # still adds up to zero
    assert (await backbone.credit_table()).balanced  # only what is new is checked
    assert not (await backbone.credit_table(whole=True)).balanced
    assert not (await backbone.credit_table()).balanced  # and it is not forgotten
    with pytest.raises(LedgerBroken, match="entry 2: it was changed"):
        await store.read(check_ledger)
    await change(-1)
    assert (await backbone.credit_table(whole=True)).balanced
    await store.write(lambda session: session.run(update(t.accounts).values(balance=0)))
    assert not (await backbone.credit_table()).balanced


async def test_each_entry_is_checked_once(market: Stall, monkeypatch: pytest.MonkeyPatch) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    checked: list[int] = []
    original = ledger.check_entries

    def counting(entries: list[ledger.Entry], *arguments: Any, **options: Any) -> ledger.Head:
        checked.extend(entry.sequence for entry in entries)
        return original(entries, *arguments, **options)

    monkeypatch.setattr(ledger, "check_entries", counting)
    for _ in range(3):
        await backbone.post_receipt(chain.next(10))
    assert (await backbone.credit_table()).balanced
    assert (await backbone.credit_table()).balanced
    await backbone.post_receipt(chain.next(10))
    table = await backbone.credit_table()
    assert checked == [1, 2, 3, 4]
    assert table.wallets == (await device.client.credits(),)
    assert (await backbone.credit_table(whole=True)).balanced
    assert checked[4:] == [1, 2, 3, 4]


async def test_a_new_entry_that_is_wrong_and_a_head_that_was_replaced_are_found(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    store = market.market._store
    check = LedgerCheck()

    async def problem(*, whole: bool = False) -> str | None:
        return await store.read(lambda session: check.check(session, whole=whole))

    async def change(entry: int, **values: Any) -> None:
        change = update(t.ledger_entries).where(t.ledger_entries.c.sequence == entry).values(**values)
        await store.write(lambda session: session.run(change))

    await backbone.post_receipt(chain.next(10))
    assert await problem() is None
    await backbone.post_receipt(chain.next(10))
    await change(2, posted_at=1)
    assert "entry 2: it was changed" in str(await problem())
    await change(2, hash=bytes(32))
    check = LedgerCheck()
    assert "entry 2: it was changed" in str(await problem())
    await store.write(lambda s: s.run(delete(t.ledger_postings).where(t.ledger_postings.c.entry == 2)))
    await store.write(lambda s: s.run(delete(t.ledger_entries).where(t.ledger_entries.c.sequence == 2)))
    halved = update(t.accounts).values(balance=t.accounts.c.balance // 2)
    await store.write(lambda s: s.run(halved))
    assert await problem(whole=True) is None
    await change(1, hash=bytes(32))
    assert "entry 1 is gone or was replaced" in str(await problem())


async def test_balances_are_identical_after_the_market_was_closed_and_opened(
    database: str, tmp_path: Path
) -> None:
    async with stall(tmp_path, database=database) as market:
        device = await market.device()
        chain = chain_of(market, device)
        await market.backbone().post_receipt(chain.next(10))
        before = await market.backbone().credit_table()
    async with stall(tmp_path, database=database) as market:
        assert await market.backbone().credit_table() == before
        await market.backbone().post_receipt(chain.next(5))
        assert (await market.backbone().credits(device.wallet.address)).escrow == 15


# --- a real process, killed --------------------------------------------------------------------------------


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`kvasir-market run` as a process of its own; gives it and its URL, and kills it at the end."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "market.cli", "run", "--state-dir", str(folder)),
        *("--host", "127.0.0.1", "--port", "0", "--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert running.stdout is not None
        async with asyncio.timeout(30):
            line = (await running.stdout.readline()).decode()
        assert line.startswith("market ready: "), line
        yield running, parse_join_link(line.removeprefix("market ready: ")).url
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
async def test_a_market_killed_in_the_middle_has_every_receipt_it_took(tmp_path: Path) -> None:
    keys = SwarmKeys.load_or_create(tmp_path, now=time.time())
    wallet, device_key = SigningKey.generate(), SigningKey.generate()
    chain = Chain(keys.backbone, keys.root_public, device_key.public, wallet.public)
    taken = 0
    async with aiohttp.ClientSession() as http:

        def client(url: str) -> MarketClient:
            certificate = keys.backbone.certificate
            return MarketClient(url, http=http, key=keys.backbone.signing, certificate=certificate)

        async with process(tmp_path) as (running, url):
            device = MarketClient(url, http=http, key=device_key)
            await device.login(wallet, device_key, ExchangeKey.generate())
            for number in range(1000):
                if number == 20:
                    asyncio.get_running_loop().call_later(0.02, running.send_signal, signal.SIGKILL)
                try:
                    await client(url).post_receipt(chain.next(1_000_003))
                except Unreachable:
                    break
                taken += 1
        assert 20 <= taken < 1000
        async with process(tmp_path) as (_, url):
            backbone = client(url)
            last = await backbone.receipts(device_key.public)
            assert last in (chain.documents[taken - 1], chain.documents[taken])
            for receipt in chain.documents[chain.documents.index(last) + 1 :]:
                await backbone.post_receipt(receipt)
            statement = await backbone.credits(wallet.address)
            assert statement.escrow == chain.bytes
            assert statement.credit == credits_of(chain.bytes)
            assert (await backbone.credit_table()).balanced


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
async def test_the_command_stops_in_order_and_says_when_its_port_is_taken(tmp_path: Path) -> None:
    async with process(tmp_path / "one") as (running, url):
        port = url.rpartition(":")[2]
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "market.cli", "run", "--state-dir", str(tmp_path / "two")),
            *("--host", "127.0.0.1", "--port", port, "--log-level", "error"),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            _, error = await second.communicate()
        assert second.returncode == 2
        assert b"choose another --port" in error
        running.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            assert await running.wait() == 0


async def test_leases_get_one_more_ttl_after_the_market_was_down(tmp_path: Path) -> None:
    from .test_leases import claim, offer_of

    async with stall(tmp_path) as market:
        plan_id, plan = await market.publish()
        device = await market.device()
        lease = await claim(device, offer_of(plan_id, plan.windows[0]))
        clock = market.clock
    clock.ahead += 300
    async with stall(tmp_path, clock=clock) as market:
        snapshot = await market.backbone().assignments(plan_id)
        assert [item.lease for item in snapshot.leases] == [lease.id]
        assert 55 < snapshot.leases[0].expires_in_s <= 60


async def test_the_store_outlives_its_market(tmp_path: Path) -> None:
    async with stall(tmp_path) as market:
        device = await market.device()
        await market.backbone().post_receipt(chain_of(market, device).next(42))
    store = Store(f"sqlite:///{tmp_path / 'market.db'}")
    await store.open()
    assert (await store.read(check_ledger))[escrow(device.wallet.public)] == 42
    await store.close()

"""Escrow, quarantine and disputes through the real HTTP server, on both databases."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import alembic.command
import alembic.config
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, func, select, text

import market as market_package
from market import tables as t
from market.banking import check_ledger
from market.client import MarketClient
from market.config import MarketConfig
from market.evidence import Evidence, digest, open_evidence, sign_evidence
from market.ledger import VOID, available, escrow
from market.messages import TrustRecord
from market.plans import PlanId
from market.standing import ESCROW_S
from market.store import Session, Store
from market.swarm import SwarmKeys
from market.windows import Window
from market.wire import BackboneId, LeaseId
from relay.errors import IdentityError, KvasirError, Refused, RemoteProtocolError, Unreachable
from relay.identity import ExchangeKey, SigningKey

from ..support.markets import Clock, Device, Stall, abilities, stall
from .test_credit import Chain, chain_of, process
from .test_leases import claim, offer_of

NUMERICS = "1/stored/none/float32/fp32/x/y"
WHY = "an audited output was wrong: d = 0.9"


def quick(config: MarketConfig) -> MarketConfig:
    return replace(config, escrow_calls=10, release_s=3600.0, plan_silence_s=1e9)


@pytest.fixture
async def market(database: str, tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path, database=database, configure=quick, clock=Clock()) as running:
        yield running


def evidence_of(market: Stall, device: Device, **changes: Any) -> Evidence:
    row, output = b"\1" * 64, b"\2" * 64
    made = Evidence(
        swarm=market.keys.root_public,
        backbone=BackboneId(market.keys.backbone.id),
        wallet=device.wallet.public,
        device=device.key.public,
        lease=LeaseId(bytes(16)),
        epoch=1,
        plan=PlanId(bytes(32)),
        window=Window(0, 1, 0, 8),
        precision="stored",
        numerics=NUMERICS,
        wire_dtype="float32",
        call=7,
        layer=0,
        expert=3,
        d=0.9,
        limit=1e-5,
        at=time.time(),
        row_digest=digest(row),
        output_digest=digest(output),
        row=row,
        output=output,
        expected=b"\3" * 64,
    )
    return replace(made, **changes)


async def report(market: Stall, device: Device, **changes: Any) -> bytes:
    record = secrets.token_bytes(16)
    document = sign_evidence(evidence_of(market, device, **changes), market.keys.backbone.signing)
    await market.backbone().report_violation(record, document, reason=WHY)
    return record


async def put_out(market: Stall, device: Device, reason: str = WHY) -> bytes:
    record = secrets.token_bytes(16)
    await market.backbone().quarantine(record, device.wallet.public, reason=reason)
    return record


async def lots_add_up(market: Stall) -> dict[str, int]:
    """The balances, after checking the whole ledger and that every wallet's lots are its escrow."""

    def work(session: Session) -> dict[str, int]:
        balances = check_ledger(session)
        rows = session.rows(
            select(t.lots.c.wallet, func.sum(t.lots.c.amount))
            .where(t.lots.c.quarantine.is_(None))
            .group_by(t.lots.c.wallet)
        )
        waiting = {escrow(wallet): int(amount) for wallet, amount in rows}
        held = {name: balance for name, balance in balances.items() if name.startswith("escrow:") and balance}
        assert waiting == held
        return balances

    return await market.market._store.read(work)


def only(records: tuple[TrustRecord, ...], kind: str) -> list[TrustRecord]:
    return [record for record in records if record.kind == kind]


# --- release -----------------------------------------------------------------------------------------------


async def test_escrow_is_available_after_so_many_further_calls(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    await backbone.post_receipt(chain.next(100, calls=5))
    await backbone.post_receipt(chain.next(50, calls=9))
    assert await market.market.release_escrow() == 0
    assert (await device.client.trust()).release_in_calls == 1
    await backbone.post_receipt(chain.next(7, calls=1))
    assert await market.market.release_escrow() == 100
    assert await market.market.release_escrow() == 0
    statement = await device.client.credits()
    assert (statement.escrow, statement.available, statement.void) == (57, 100, 0)
    await backbone.post_receipt(chain.next(1, calls=100))
    assert await market.market.release_escrow() == 57
    (record,) = only((await device.client.trust()).records, "release")
    assert record.amount == 157  # one record for all of a day
    balances = await lots_add_up(market)
    assert balances[available(device.wallet.public)] == 157


async def test_escrow_is_available_a_week_after_the_wallet_left(tmp_path: Path) -> None:
    clock = Clock()
    async with stall(tmp_path, clock=clock, configure=quick, sweeping=False) as market:
        plan_id, plan = await market.publish()
        device = await market.device()
        held = await claim(device, offer_of(plan_id, plan.windows[0]))
        await market.backbone().post_receipt(chain_of(market, device).next(100))
        assert await market.market.release_escrow() == 0
        clock.ahead += ESCROW_S + 1  # its lease is not swept: it has not left
        assert await market.market.release_escrow() == 0
        await market.backbone().revoke(held.id, held.epoch, reason="gone")
        assert await market.market.release_escrow() == 0
        clock.ahead += ESCROW_S - 1
        assert await market.market.release_escrow() == 0
        clock.ahead += 2
        assert await market.market.release_escrow() == 100


async def test_a_running_market_releases_by_itself(tmp_path: Path) -> None:
    def configure(config: MarketConfig) -> MarketConfig:
        return replace(config, escrow_calls=1, release_s=0.05)

    async with stall(tmp_path, configure=configure) as market:
        device = await market.device()
        chain = chain_of(market, device)
        for carried in (100, 1):
            await market.backbone().post_receipt(chain.next(carried))

        async def available_now() -> bool:
            return (await device.client.credits()).available == 100

        async with asyncio.timeout(30):
            while not await available_now():
                pass


# --- quarantine --------------------------------------------------------------------------------------------


async def test_a_quarantine_voids_escrow_ends_every_claim_and_is_told(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device, backbone = await market.device(), market.backbone()
    other = await market.device(device.wallet)
    lease, epoch = await device.take(offer_of(plan_id, plan.windows[0]))
    await other.take(offer_of(plan_id, plan.windows[1]))
    await backbone.post_receipt(chain_of(market, device).next(100))
    await backbone.post_receipt(chain_of(market, other).next(11))
    violation = await report(market, device)
    record = secrets.token_bytes(16)
    answer = await backbone.quarantine(record, device.wallet.public, reason=WHY)
    assert (answer.number, answer.void, answer.for_good) == (1, 111, False)
    assert 890 < answer.left_s <= 900
    again = await backbone.quarantine(record, device.wallet.public, reason=WHY)
    assert replace(again, left_s=0) == replace(answer, left_s=0)
    statement = await other.client.credits()
    assert (statement.escrow, statement.available, statement.void) == (0, 0, 111)
    assert (await backbone.assignments(plan_id)).leases == ()
    with pytest.raises(Refused) as refused:
        await backbone.declare_proven(lease, epoch, d=0.0)
    assert refused.value.code == "expired"
    for one in (device, other):
        with pytest.raises(Refused, match="an audited output was wrong") as refused:
            await claim(one, offer_of(plan_id, plan.windows[0]))
        assert refused.value.code == "quarantined"
        assert "an audited output was wrong" in (await one.client.volunteer(abilities())).message
        trust = await one.client.trust()
        assert (trust.quarantines, trust.for_good, len(trust.records)) == (1, False, 2)
        assert 890 < trust.quarantine_left_s <= 900
    (found,) = only(trust.records, "violation")
    assert (found.id, found.quarantine, found.layer, found.expert, found.d) == (violation, record, 0, 3, 0.9)
    (found,) = only(trust.records, "quarantine")
    assert (found.id, found.amount, found.reason, found.number) == (record, 111, WHY, 1)
    asked = await backbone.trust(device.wallet.public)
    assert replace(asked, quarantine_left_s=0.0) == replace(trust, quarantine_left_s=0.0)
    await lots_add_up(market)


async def test_backbones_that_find_a_wallet_out_at_once_put_it_out_once(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    wallet = device.wallet.public
    await backbone.post_receipt(chain_of(market, device).next(100))
    answers = await asyncio.gather(
        *(backbone.quarantine(secrets.token_bytes(16), wallet, reason=WHY) for _ in range(8))
    )
    assert {answer.number for answer in answers} == {1}
    assert len({answer.id for answer in answers}) == 1
    assert (await device.client.credits()).void == 100
    await lots_add_up(market)


async def test_each_further_quarantine_is_twice_as_long_and_the_fourth_without_end(tmp_path: Path) -> None:
    clock = Clock()
    async with stall(tmp_path, clock=clock, configure=quick) as market:
        device, backbone = await market.device(), market.backbone()
        plan_id, plan = await market.publish()
        for number, seconds in enumerate((900, 1800, 3600), start=1):
            answer = await backbone.quarantine(secrets.token_bytes(16), device.wallet.public, reason=WHY)
            assert (answer.number, answer.for_good) == (number, False)
            assert seconds - 30 < answer.left_s <= seconds
            clock.ahead += seconds + 1
            held = await claim(device, offer_of(plan_id, plan.windows[0]))
            await device.client.release(held.id, held.epoch, reason="tested")
    async with stall(tmp_path, clock=clock) as market:  # a market that started anew counts on
        answer = await market.backbone().quarantine(secrets.token_bytes(16), device.wallet.public, reason=WHY)
        assert (answer.number, answer.for_good) == (4, True)
        device.client = market.client(key=device.key)
        assert "for good" in (await device.client.volunteer(abilities())).message


async def test_a_wallet_is_untrusted_again_after_a_quarantine(tmp_path: Path) -> None:
    clock = Clock()

    def configure(config: MarketConfig) -> MarketConfig:
        return replace(config, trusted_calls=5, plan_silence_s=1e9)

    async with stall(tmp_path, clock=clock, configure=configure) as market:
        device, backbone = await market.device(), market.backbone()
        plan_id, plan = await market.publish()
        await backbone.post_receipt(chain_of(market, device).next(1, calls=5))
        await put_out(market, device)
        clock.ahead += 901
        await claim(device, offer_of(plan_id, plan.windows[0]))
        with pytest.raises(Refused) as refused:
            await claim(device, offer_of(plan_id, plan.windows[1]))
        assert refused.value.code == "quota"


async def test_receipts_for_calls_before_a_quarantine_are_void_whenever_they_come(tmp_path: Path) -> None:
    clock = Clock()
    async with stall(tmp_path, clock=clock, configure=quick) as market:
        device, backbone = await market.device(), market.backbone()
        chain = chain_of(market, device)
        await backbone.post_receipt(chain.next(100))
        before = chain.next(50, calls=100)
        await put_out(market, device)
        await backbone.post_receipt(before)
        statement = await device.client.credits()
        assert (statement.escrow, statement.available, statement.void) == (0, 0, 150)
        clock.ahead += 10_000
        late = chain.next(25)  # issued by a clock that has not reached the quarantine's end
        await backbone.post_receipt(late)
        assert (await device.client.credits()).void == 175
        (found,) = (await device.client.trust()).records
        assert found.amount == 175
        await backbone.post_receipt(chain.next(9, calls=100, at=clock()))
        statement = await device.client.credits()
        assert (statement.escrow, statement.available, statement.void) == (9, 0, 175)
        await backbone.post_receipt(chain.next(1, calls=100, at=clock()))
        await market.market.release_escrow()
        assert (await device.client.credits()).available == 9
        await lots_add_up(market)


async def test_only_backbones_report_quarantine_and_decide(market: Stall) -> None:
    device = await market.device()
    document = sign_evidence(evidence_of(market, device), market.keys.backbone.signing)
    attempts = (
        device.client.quarantine(bytes(16), device.wallet.public, reason=WHY),
        device.client.report_violation(bytes(16), document, reason=WHY),
        device.client.decide(bytes(16), uphold=False, reason="mine"),
        device.client.trust(device.wallet.public),
        device.client.records(),
        device.client.disputes(),
    )
    for attempt in attempts:
        with pytest.raises(Refused) as refused:
            await attempt
        assert refused.value.code == "forbidden"
    with pytest.raises(Refused):
        await market.backbone().quarantine(bytes(16), SigningKey.generate().public, reason=WHY)


# --- evidence ----------------------------------------------------------------------------------------------


async def test_evidence_is_read_by_its_owner_alone_and_verifies(market: Stall) -> None:
    device, stranger, backbone = await market.device(), await market.device(), market.backbone()
    violation = await report(market, device)
    record, evidence = await device.client.record(violation)
    assert evidence == evidence_of(market, device, at=evidence.at)  # type: ignore[union-attr]
    assert (record.evidence, record.kind, record.numerics) == (True, "violation", NUMERICS)
    assert (await backbone.record(violation))[1] == evidence
    with pytest.raises(Refused) as refused:
        await stranger.client.record(violation)
    assert refused.value.code == "not_found"
    await report(market, device, row=b"x" * 70_000)
    record = (await device.client.trust()).records[0]
    assert (await device.client.record(record.id))[1].row == b""  # type: ignore[union-attr]


async def test_forged_evidence_is_refused(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    key = market.keys.backbone
    for changes, error in (
        ({"backbone": BackboneId(b"x" * 16)}, IdentityError),
        ({"swarm": device.wallet.public}, IdentityError),
        ({"expert": 99}, RemoteProtocolError),
        ({"precision": "magic"}, RemoteProtocolError),
    ):
        document = sign_evidence(evidence_of(market, device, **changes), key.signing)
        with pytest.raises(error):
            open_evidence(document, certificate=key.certificate, root=market.keys.root_public)
        with pytest.raises(KvasirError):
            await backbone.report_violation(bytes(16), document, reason=WHY)
    foreign = sign_evidence(evidence_of(market, device), SigningKey.generate())
    with pytest.raises(KvasirError):
        await backbone.report_violation(bytes(16), foreign, reason=WHY)
    document = sign_evidence(evidence_of(market, device, d=float("inf")), key.signing)
    assert open_evidence(document, certificate=key.certificate, root=market.keys.root_public).d == 1e9


async def test_the_record_of_a_wallet_is_bounded_and_quarantines_are_kept(
    market: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("market.judging.KEPT_RECORDS", 4)
    monkeypatch.setattr("market.judging.KEPT_EVIDENCE", 2)
    device = await market.device()
    disputed = await report(market, device)
    await device.client.dispute(disputed, reason="it was right")
    quarantine = await put_out(market, device)
    for _ in range(9):
        await report(market, device)
    records = (await device.client.trust()).records
    assert len(only(records, "violation")) == 5
    assert {disputed, quarantine} < {record.id for record in records}
    assert [record.evidence for record in only(records, "violation")] == [True, True, False, False, True]


# --- disputes ----------------------------------------------------------------------------------------------


async def test_a_dispute_reaches_the_operator_who_overturns_and_compensates(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device, backbone = await market.device(), market.backbone()
    chain = chain_of(market, device)
    await backbone.post_receipt(chain.next(40, calls=20))
    await backbone.post_receipt(chain.next(60, calls=10))
    assert await market.market.release_escrow() == 40
    violation = await report(market, device)
    quarantine = await put_out(market, device)
    await backbone.post_receipt(chain.next(5))
    filed = await device.client.dispute(violation, reason="my kernel gives the same")
    assert (filed.id, filed.dispute) == (quarantine, "my kernel gives the same")
    again = await device.client.dispute(quarantine, reason="and again")
    assert again == filed
    assert (await device.client.credits()).available == 40  # what is not in dispute is not touched
    assert [record.id for record in await backbone.disputes()] == [quarantine]
    decided = await backbone.decide(quarantine, uphold=False, reason="our disk was bad")
    assert (decided.decision, decided.decision_reason) == ("overturned", "our disk was bad")
    assert await backbone.decide(quarantine, uphold=False, reason="our disk was bad") == decided
    with pytest.raises(Refused) as refused:
        await backbone.decide(quarantine, uphold=True, reason="no")
    assert refused.value.code == "conflict"
    with pytest.raises(Refused, match="overturned"):
        await device.client.dispute(quarantine, reason="more")
    statement = await device.client.credits()
    assert (statement.escrow, statement.available, statement.void) == (65, 40, 0)
    trust = await device.client.trust()
    assert (trust.quarantines, trust.quarantine_left_s) == (0, 0)
    await claim(device, offer_of(plan_id, plan.windows[0]))
    kinds = await market.market._store.read(
        lambda session: [row.kind for row in session.rows(select(t.ledger_entries.c.kind))]
    )
    assert kinds.count("compensate") == kinds.count("void") == 2
    balances = await lots_add_up(market)
    assert balances[VOID] == 0
    table = await backbone.credit_table(whole=True)
    assert table.balanced
    assert table.wallets == (statement,)
    await backbone.quarantine(secrets.token_bytes(16), device.wallet.public, reason=WHY)
    assert (await device.client.trust()).quarantines == 1  # the one overturned does not count


async def test_an_upheld_quarantine_stays(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    await backbone.post_receipt(chain_of(market, device).next(100))
    quarantine = await put_out(market, device)
    await device.client.dispute(quarantine, reason="no")
    await backbone.decide(quarantine, uphold=True, reason="three rows say so")
    trust = await device.client.trust()
    assert trust.records[0].decision == "upheld"
    assert trust.quarantine_left_s > 0
    assert (await device.client.credits()).void == 100


async def test_what_an_overturned_quarantine_took_is_void_if_a_later_one_stands(tmp_path: Path) -> None:
    clock = Clock()
    async with stall(tmp_path, clock=clock) as market:
        device, backbone = await market.device(), market.backbone()
        await backbone.post_receipt(chain_of(market, device).next(100))
        first = await put_out(market, device)
        clock.ahead += 1000
        second = await put_out(market, device)
        await backbone.decide(first, uphold=False, reason="an error")
        assert (await device.client.credits()).void == 100
        assert (await device.client.trust()).quarantine_left_s > 0
        await backbone.decide(second, uphold=False, reason="another")
        statement = await device.client.credits()
        assert (statement.escrow, statement.void) == (100, 0)
        await lots_add_up(market)


async def test_disputes_are_the_owners_and_bounded(market: Stall) -> None:
    device, stranger = await market.device(), await market.device()
    violation = await report(market, device)
    for client, record, reason, code in (
        (stranger.client, violation, "x", "not_found"),
        (device.client, bytes(16), "x", "not_found"),
        (device.client, violation, "  ", "bad_request"),
    ):
        with pytest.raises(Refused) as refused:
            await client.dispute(record, reason=reason)
        assert refused.value.code == code
    await device.client.dispute(violation, reason="x" * 3000)
    assert len((await device.client.trust()).records[0].dispute or "") == 1000
    for _ in range(15):
        await device.client.dispute(await report(market, device), reason="x")
    with pytest.raises(Refused) as refused:
        await device.client.dispute(await report(market, device), reason="x")
    assert refused.value.code == "quota"


# --- whatever happens, it adds up --------------------------------------------------------------------------


@contextmanager
def suppress_codes(*codes: str) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        if error.code not in codes:
            raise


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["earn", "release", "out", "overturn", "wait"]), st.integers(0, 1), st.integers(0, 99)
    ),
    max_size=12,
)


@given(STEPS)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_credit_is_conserved_through_every_step(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, int, int]]
) -> None:
    async def play() -> None:
        clock = Clock()
        folder = tmp_path_factory.mktemp("trust")
        async with stall(folder, sweeping=False, configure=quick, clock=clock) as market:
            devices = [await market.device() for _ in range(2)]
            chains = [chain_of(market, device) for device in devices]
            outs: list[bytes] = []
            for step, who, amount in script:
                match step:
                    case "earn":
                        await market.backbone().post_receipt(chains[who].next(amount, amount % 8, at=clock()))
                    case "release":
                        await market.market.release_escrow()
                    case "out":
                        outs.append(await put_out(market, devices[who]))
                    case "overturn" if outs:
                        record = outs[amount % len(outs)]
                        # One that was out already made no record of its own.
                        with suppress_codes("not_found"):
                            await market.backbone().decide(record, uphold=False, reason="x")
                    case "wait":
                        clock.ahead += 20.0 * amount
                balances = await lots_add_up(market)
                for device, chain in zip(devices, chains, strict=True):
                    statement = await device.client.credits()
                    total = statement.escrow + statement.available + statement.void
                    assert total == chain.bytes
                    assert balances.get(escrow(device.wallet.public), 0) == statement.escrow

    asyncio.run(play())


async def test_receipts_releases_and_quarantines_at_once_add_up(market: Stall) -> None:
    backbone = market.backbone()
    devices = [await market.device() for _ in range(4)]
    outs: list[bytes] = []

    async def earn(device: Device) -> None:
        chain = chain_of(market, device)
        for _ in range(8):
            await backbone.post_receipt(chain.next(10, calls=4))

    async def judge(device: Device) -> None:
        await asyncio.sleep(random.uniform(0, 0.05))
        outs.append(await put_out(market, device))
        await backbone.decide(outs[-1], uphold=False, reason="x") if random.random() < 0.5 else None

    async def release() -> None:
        for _ in range(5):
            await market.market.release_escrow()

    await asyncio.gather(*map(earn, devices), *map(judge, devices[:2]), release())
    await lots_add_up(market)
    for device in devices:
        statement = await device.client.credits()
        assert statement.escrow + statement.available + statement.void == 80
    assert (await backbone.credit_table(whole=True)).balanced


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
async def test_a_market_killed_among_receipts_quarantines_and_decisions_adds_up(tmp_path: Path) -> None:
    keys = SwarmKeys.load_or_create(tmp_path, now=time.time())
    wallet, device_key = SigningKey.generate(), SigningKey.generate()
    chain = Chain(keys.backbone, keys.root_public, device_key.public, wallet.public)
    receipts = [chain.next(1003) for _ in range(60)]
    records = [secrets.token_bytes(16) for _ in range(60)]

    async def step(client: MarketClient, number: int) -> None:
        """One receipt, or a quarantine that is overturned; each may be sent again."""
        await client.post_receipt(receipts[number])
        if number % 3 == 2:
            await client.quarantine(records[number], wallet.public, reason=WHY)
            await client.decide(records[number], uphold=False, reason="x")

    async with aiohttp.ClientSession() as http:

        def client(url: str) -> MarketClient:
            certificate = keys.backbone.certificate
            return MarketClient(url, http=http, key=keys.backbone.signing, certificate=certificate)

        done = 0
        async with process(tmp_path) as (running, url):
            await MarketClient(url, http=http, key=device_key).login(
                wallet, device_key, ExchangeKey.generate()
            )
            for done in range(len(receipts)):
                if done == 8:
                    asyncio.get_running_loop().call_later(0.05, running.send_signal, signal.SIGKILL)
                try:
                    await step(client(url), done)
                except Unreachable:
                    break
        assert 8 <= done < len(receipts) - 1
        async with process(tmp_path) as (_, url):
            backbone = client(url)
            table = await backbone.credit_table(whole=True)
            assert table.balanced
            for number in range(done, len(receipts)):
                await step(backbone, number)
            statement = await backbone.credits(wallet.address)
            assert (statement.escrow, statement.available, statement.void) == (chain.bytes, 0, 0)
            assert (await backbone.credit_table(whole=True)).balanced
            trust = await backbone.trust(wallet.public)
            assert (trust.quarantines, trust.quarantine_left_s) == (0, 0)
            assert len(only(trust.records, "quarantine")) == len(receipts) // 3


async def test_escrow_of_an_earlier_version_becomes_lots(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'market.db'}"
    wallet = SigningKey.generate().public
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(market_package.__file__).parent / "migrations"))
    engine = create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0001")
        connection.execute(text("INSERT INTO wallets (wallet, calls) VALUES (:w, 3)"), {"w": wallet})
        account = "INSERT INTO accounts (account, balance, entries) VALUES (:a, 42, 1)"
        connection.execute(text(account), {"a": escrow(wallet)})
    engine.dispose()
    store = Store(url)
    await store.open()
    (lot,) = await store.read(lambda session: session.rows(select(t.lots)))
    assert (lot.wallet, lot.amount, lot.calls, lot.quarantine) == (wallet, 42, 3, None)
    await store.close()

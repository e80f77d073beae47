"""What audits found on its way to the market: in order, within bounds, through the market's absence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir_backbone import reporting
from kvasir_backbone.audit import Sample
from kvasir_backbone.reporting import Reporter
from kvasir_backbone.roster import Replica, WindowMap
from kvasir_node.tensors import bytes_to_rows, partial_sums
from market.evidence import open_evidence
from market.messages import QuarantineAnswer
from market.plans import PlanId
from market.wire import RecordId
from relay.errors import ConfigError, Refused, Unreachable
from relay.identity import PublicKey

from ..support.markets import Stall, stall
from ..support.rosters import flat_plan, replica
from ..support.waiting import until

WIDTH = 16
PLAN = flat_plan(width=WIDTH)
WINDOWS = WindowMap(PLAN)
PLAN_ID = PlanId(bytes(32))


def reference(layer: int, expert: int, rows: Tensor, precision: str) -> Tensor:
    return rows * (expert + 1)


def sample(**changes: Any) -> Sample:
    row = torch.arange(WIDTH, dtype=torch.float32)
    made = {"layer": 0, "expert": 1, "row": row, "output": torch.zeros(WIDTH), "call": 7}
    return Sample(**{**made, **changes})


@dataclass
class FakeMarket:
    """Takes reports, or fails as `failing` says."""

    failing: list[Exception] = field(default_factory=list)
    got: list[tuple[str, Any]] = field(default_factory=list)

    async def report_violation(self, record: bytes, evidence: Any, *, reason: str) -> None:
        if self.failing:
            raise self.failing.pop(0)
        self.got.append(("violation", reason))

    async def quarantine(self, record: bytes, wallet: PublicKey, *, reason: str) -> QuarantineAnswer:
        if self.failing:
            raise self.failing.pop(0)
        self.got.append(("quarantine", wallet))
        return QuarantineAnswer(RecordId(record), 1, 900.0, False, 5)


@asynccontextmanager
async def reporter(
    market: Any, keys: Any, reference: Any = reference
) -> AsyncIterator[tuple[Reporter, list[tuple[PublicKey, QuarantineAnswer]]]]:
    told: list[tuple[PublicKey, QuarantineAnswer]] = []
    with ThreadPoolExecutor(1) as threads:
        made = Reporter(
            market=market,
            plan=PLAN_ID,
            wire_dtype="float32",
            signer=lambda: (keys.backbone.certificate, keys.backbone.signing),
            reference=reference,
            threads=threads,
            told=lambda *answer: told.append(answer),
        )
        running = asyncio.create_task(made.run())
        try:
            yield made, told
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path) as running:
        yield running


async def owned(market: Stall) -> tuple[Any, Replica]:
    device = await market.device()
    base = replica(WINDOWS, 0, "a")
    made = Replica(
        device.key.public, device.wallet.public, bytes(16), 3, base.ref, base.window, "1/stored/none/x/y/z/p"
    )
    return device, made


async def test_a_violation_and_its_quarantine_are_on_record_with_evidence_that_verifies(
    market: Stall,
) -> None:
    device, accused = await owned(market)
    async with reporter(market.backbone(), market.keys) as (made, told):
        made.violation(accused, sample(), 0.9)
        made.quarantine(accused.wallet, "an output was wrong")
        made.quarantine(accused.wallet, "an output was wrong")
        await until(lambda: bool(told), timeout=30, what="the market's answer")
        assert made.waiting == 0
    ((wallet, answer),) = told
    assert (wallet, answer.number) == (accused.wallet, 1)
    trust = await device.client.trust()
    assert [record.kind for record in trust.records] == ["quarantine", "violation"]
    assert trust.records[1].quarantine == trust.records[0].id
    record, evidence = await device.client.record(trust.records[1].id)
    assert evidence is not None
    assert (record.d, evidence.call, evidence.expert, evidence.epoch) == (0.9, 7, 1, 3)
    rows = [bytes_to_rows(data, 1, WIDTH, "float32")[0] for data in (evidence.row, evidence.expected)]
    assert torch.equal(rows[0], torch.arange(WIDTH).float())
    assert torch.equal(rows[1], 2 * rows[0])
    key = market.keys.backbone
    assert evidence.document is not None
    assert open_evidence(evidence.document, certificate=key.certificate, root=market.keys.root_public)


async def test_partial_sums_are_told_with_their_experts_and_weights(market: Stall) -> None:
    device, accused = await owned(market)
    weights = torch.tensor([0.5, 0.25])
    summed = sample(ids=(1, 3), precisions=("stored", "stored"), weights=weights)
    async with reporter(market.backbone(), market.keys) as (made, _):
        made.violation(accused, summed, float("inf"))
        await until(lambda: made.waiting == 0, timeout=30)
    (record,) = (await device.client.trust()).records
    assert record.d == 1e9
    evidence = (await device.client.record(record.id))[1]
    assert evidence is not None
    assert (evidence.ids, evidence.precisions) == ((1, 3), ("stored", "stored"))
    row = bytes_to_rows(evidence.row, 1, WIDTH, "float32")
    expected = partial_sums(torch.cat([row * 2, row * 4]), weights, [0, 0], 1)
    assert torch.equal(bytes_to_rows(evidence.expected, 1, WIDTH, "float32"), expected)


async def test_without_bytes_of_our_own_the_evidence_has_what_was_said(market: Stall) -> None:
    device, accused = await owned(market)

    def gone(*_: object) -> Tensor:
        raise ConfigError("the bytes are gone")

    async with reporter(market.backbone(), market.keys, gone) as (made, _):
        made.violation(accused, sample(), 0.5)
        await until(lambda: made.waiting == 0, timeout=30)
    (record,) = (await device.client.trust()).records
    evidence = (await device.client.record(record.id))[1]
    assert evidence is not None
    assert evidence.row
    assert not evidence.expected


async def test_reports_wait_for_the_market_in_order_and_a_refused_one_holds_up_no_other(
    market: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "AGAIN_S", 0.01)
    fake = FakeMarket([Unreachable("away"), Unreachable("away"), Refused("not_found", "no")])
    accused = replica(WINDOWS, 0, "a")
    async with reporter(fake, market.keys) as (made, told):
        made.violation(accused, sample(), 0.5)
        made.violation(accused, sample(), 0.1)
        made.quarantine(accused.wallet, "why")
        await until(lambda: bool(told), timeout=30)
    assert [kind for kind, _ in fake.got] == ["violation", "quarantine"]
    assert "d = 0.1" in fake.got[0][1]


async def test_too_many_violations_drop_the_oldest_and_never_a_quarantine(market: Stall) -> None:
    accused = replica(WINDOWS, 0, "a")
    async with reporter(FakeMarket([Unreachable("away")] * 100), market.keys) as (made, _):
        made.quarantine(accused.wallet, "why")
        for number in range(reporting.MAX_WAITING + 5):
            made.violation(accused, sample(), float(number))
        assert made.waiting == reporting.MAX_WAITING + 1
        assert made.dropped == 5

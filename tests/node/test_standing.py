"""What an owner reads of the wallet's trust: in the status, as notices, and by `kvasir-node audit`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvasir_node.auditcli import _again_lines
from kvasir_node.cli import main
from kvasir_node.control import control_endpoint
from kvasir_node.recomputing import figures
from kvasir_node.standing import Standing
from kvasir_node.state import NodeState
from kvasir_node.status import NodeStatus, describe
from kvasir_node.tensors import rows_to_bytes
from market.evidence import Evidence, digest, sign_evidence
from market.plans import PlanId
from market.windows import Window
from market.wire import BackboneId, LeaseId
from relay.errors import KvasirError
from relay.identity import SigningKey

from ..support.markets import Device, Stall, stall
from ..support.waiting import until

ROW = torch.arange(1.0, 17.0).unsqueeze(0)


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path / "market") as running:
        yield running


async def joined(market: Stall, folder: Path) -> Device:
    """A device whose keys and swarm are in a state folder, as a node leaves them."""
    state, wallet = NodeState(folder), SigningKey.generate()
    keys = state.device_keys()
    client = market.client(key=keys.signing)
    await client.login(wallet, keys.signing, keys.exchange)
    state.pin(market.url, market.keys.root_public)
    return Device(wallet, keys.signing, keys.exchange, client)


def evidence(market: Stall, device: Device, **changes: Any) -> Evidence:
    row, output = bytes(rows_to_bytes(ROW)), bytes(rows_to_bytes(2 * ROW))
    made: dict[str, Any] = {
        "swarm": market.keys.root_public,
        "backbone": BackboneId(market.keys.backbone.id),
        "wallet": device.wallet.public,
        "device": device.key.public,
        "lease": LeaseId(bytes(16)),
        "epoch": 1,
        "plan": PlanId(bytes(32)),
        "window": Window(0, 1, 0, 8),
        "precision": "stored",
        "numerics": "1/stored/none/float32/fp32/x/y",
        "wire_dtype": "float32",
        "call": 7,
        "layer": 0,
        "expert": 3,
        "d": 0.9,
        "limit": 1e-5,
        "at": 1e9,
        "row_digest": digest(row),
        "output_digest": digest(output),
        "row": row,
        "output": output,
        "expected": bytes(rows_to_bytes(3 * ROW)),
    }
    return Evidence(**{**made, **changes})


async def accuse(market: Stall, device: Device) -> tuple[bytes, bytes]:
    """A violation and the quarantine that it leads to."""
    violation, quarantine = secrets.token_bytes(16), secrets.token_bytes(16)
    backbone = market.backbone()
    document = sign_evidence(evidence(market, device), market.keys.backbone.signing)
    await backbone.report_violation(violation, document, reason="expert 3 of layer 0 was off: d = 0.9")
    await backbone.quarantine(quarantine, device.wallet.public, reason="an audited output was wrong")
    return violation, quarantine


async def test_the_status_tells_of_a_quarantine_once_and_of_its_end(market: Stall, tmp_path: Path) -> None:
    device = await market.device()
    status = NodeStatus()
    standing = Standing(lambda: device.client, status, rng=Random(1))
    running = asyncio.create_task(standing.run())
    try:
        await until(lambda: bool(status.trust), timeout=30, what="the first answer")
        assert not status.notices
        assert "in good standing" in "\n".join(describe(status.snapshot()))
        _, quarantine = await accuse(market, device)
        standing.hurry()
        await until(lambda: len(status.notices) == 2, timeout=30, what="two notices")
        shown = "\n".join(describe(status.snapshot()))
        assert "in quarantine for" in shown
        assert "quarantine 1 until" in shown
        assert "an audited output was wrong" in status.notices[1].text
        json.dumps(status.snapshot())
        await market.backbone().decide(quarantine, uphold=False, reason="our disk")
        standing.hurry()
        await until(lambda: len(status.notices) == 3, timeout=30, what="the decision")
        assert "overturned by the operator: our disk" in status.notices[2].text
        assert status.trust["quarantine_left_s"] == 0
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_what_was_earned_shows_long_before_the_next_regular_look(
    market: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_node.standing.CREDITED_S", 0.0)
    device = await market.device()
    status = NodeStatus()
    standing = Standing(lambda: device.client, status, rng=Random(1))
    running = asyncio.create_task(standing.run())
    try:
        await until(lambda: bool(status.trust), timeout=30, what="the first answer")
        status.trust = {}
        standing.credited()
        await until(lambda: bool(status.trust), timeout=30, what="the second answer")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_the_owner_sees_the_figures_and_disputes(
    market: Stall, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    device = await joined(market, folder)
    here = ("--state-dir", str(folder))

    async def command(*arguments: str) -> str:
        assert await asyncio.to_thread(main, ["audit", *arguments, *here]) == 0
        return capsys.readouterr().out

    assert "nothing on record" in await command("show")
    violation, quarantine = await accuse(market, device)
    listed = await command("show")
    assert violation.hex() in listed
    assert "1 quarantines, in quarantine for" in listed
    shown = await command("show", violation.hex()[:12])
    for text in (
        "call 7, layer 0, expert 3",
        digest(bytes(rows_to_bytes(ROW))).hex(),
        "d         0.9",
        "expected",
    ):
        assert text in shown
    printed = await command("show", violation.hex(), "--json")
    as_json = json.loads(printed[printed.index("{\n") :])  # after the log of the market beside it
    assert as_json["evidence"]["row"] == bytes(rows_to_bytes(ROW)).hex()
    filed = await command("dispute", violation.hex()[:12], "--reason", "my kernel says otherwise")
    assert quarantine.hex() in filed
    (dispute,) = await market.backbone().disputes()
    assert (dispute.id, dispute.dispute) == (quarantine, "my kernel says otherwise")
    assert "you dispute it" in await command("show")
    for wrong in (("show", "ffffffffffffffff"), ("dispute", "", "--reason", "x"), ("show", "--recompute")):
        assert await asyncio.to_thread(main, ["audit", *wrong, *here]) == 2
    assert "kvasir-node audit show" in capsys.readouterr().err


async def test_the_daemon_makes_an_output_again_for_its_owner(
    market: Stall, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    device = await joined(market, folder)
    violation, _ = await accuse(market, device)
    asked: list[bytes] = []

    async def recompute(record: bytes) -> dict[str, Any]:
        asked.append(record)
        if len(asked) > 1:
            raise KvasirError("the weights are gone", code="not_found")
        return figures(evidence(market, device), 2 * ROW)

    arguments = ["audit", "show", violation.hex(), "--recompute", "--state-dir", str(folder)]
    async with control_endpoint(folder, status=dict, stop=lambda: None, recompute=recompute):
        assert await asyncio.to_thread(main, arguments) == 0
        assert "stands by its answer" in capsys.readouterr().out
        assert await asyncio.to_thread(main, arguments) == 1
        assert "the weights are gone" in capsys.readouterr().err
    assert asked == [violation] * 2


async def test_the_figures_say_whose_output_was_right(market: Stall) -> None:
    device = await market.device()
    ours = figures(evidence(market, device), 2 * ROW)
    assert ours["d_answered"] == 0.0
    assert ours["d_expected"] == pytest.approx(1 / 13)
    assert ours["digests_match"]
    assert "dispute it" in _again_lines(ours)[1]
    theirs = figures(evidence(market, device), 3 * ROW)
    assert "the answer was wrong when it was given" in _again_lines(theirs)[1]
    assert len(_again_lines(figures(evidence(market, device), 7 * ROW))) == 1
    forged = figures(evidence(market, device, row_digest=bytes(32)), 2 * ROW)
    assert "not those that the digests name" in _again_lines(forged)[1]
    assert figures(evidence(market, device, expected=b""), 2 * ROW)["d_expected"] is None

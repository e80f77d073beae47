"""`kvasir-node doctor`: every check well, and every check failing with a way to mend it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from kvasir_node import doctor_swarm
from kvasir_node.cli import main
from kvasir_node.config import NodeConfig
from kvasir_node.device import Device
from kvasir_node.doctor import (
    Check,
    Tools,
    check_disk,
    describe_checks,
    examine_machine,
    exit_status,
    no_swarm,
)
from kvasir_node.doctor_swarm import examine_swarm
from kvasir_node.state import NodeState
from kvasir_node.status import Phase
from market.wallet import create_wallet
from relay.errors import ConfigError
from relay.identity import SigningKey
from relay.links import JoinLink
from tests.node.test_daemon import node
from tests.support.node_swarm import NodeSwarm, Site, node_swarm

LINK = JoinLink("http://no-swarm.invalid", None)
DEVICE = Device("Test 1", "x86", 2, 8 * 10**9, 4 * 10**9, 50 * 10**9, False)


def tools(device: Device = DEVICE, **changes: Any) -> Tools:
    settings: dict[str, Any] = {
        "measure": lambda folder, accelerator=None: device,
        "disk_speed": lambda folder: (1e8, 1e9),
        "memory_speed": lambda: 1e10,
        "kernel": lambda: "the compiled kernel (AVX2)",
        "find_device": lambda name: None,
        **changes,
    }
    return Tools(**settings)


async def machine(config: NodeConfig, **changes: Any) -> dict[str, Check]:
    checks = await examine_machine(config, passphrase=None, tools=tools(**changes))
    return {check.name: check for check in checks}


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[NodeSwarm]:
    async with node_swarm(tmp_path / "swarm") as made:
        yield made


async def ask(
    swarm: NodeSwarm, folder: Path, *, link: JoinLink | None = None, **more: Any
) -> dict[str, Check]:
    """The swarm's checks by name; none may have raised."""
    changes = {name: more.pop(name) for name in ("clock", "device") if name in more}
    config = NodeConfig(link or swarm.link, folder, **more)
    checks = await examine_swarm(config, http=swarm.http, tools=tools(**changes))
    for check in checks:
        assert check.mend or check.outcome == "ok", check
    return {check.name: check for check in checks}


# --- the machine -------------------------------------------------------------------------------------


async def test_a_good_machine(tmp_path: Path) -> None:
    found = await machine(NodeConfig(LINK, tmp_path))
    assert {name: check.outcome for name, check in found.items()} == dict.fromkeys(
        ("daemon", "state", "wallet", "kernel", "disk", "memory"), "ok"
    )
    assert exit_status(list(found.values())) == 0
    assert not (tmp_path / "device.key").exists(), "it makes no keys"


async def test_a_wallet_that_is_missing_damaged_or_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    config = NodeConfig(LINK, tmp_path, wallet=path)
    missing = (await machine(config))["wallet"]
    assert (missing.outcome, "--create" in missing.mend) == ("fail", True)
    create_wallet(path)
    assert (await machine(config))["wallet"].outcome == "ok"
    if os.name == "posix":
        path.chmod(0o644)
        assert "chmod 600" in (await machine(config))["wallet"].found
        path.chmod(0o600)
    path.write_text("[1, 2]")
    assert (await machine(config))["wallet"].outcome == "fail"
    path.unlink()
    create_wallet(path, passphrase=b"secret")
    locked = (await machine(config))["wallet"]
    assert (locked.outcome, "KVASIR_WALLET_PASSPHRASE" in locked.mend) == ("fail", True)


async def test_a_state_folder_that_cannot_be_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    found = await machine(NodeConfig(LINK, blocked / "state", cache_dir=tmp_path / "cache"))
    assert found["state"].outcome == "fail"
    assert "--state-dir" in found["state"].mend
    NodeState(tmp_path / "n").device_keys()
    (tmp_path / "n" / "device.key").write_bytes(b"junk")
    assert (await machine(NodeConfig(LINK, tmp_path / "n")))["state"].outcome == "fail"


async def test_a_disk_without_room_speed_or_permission(tmp_path: Path) -> None:
    config = NodeConfig(LINK, tmp_path)
    full = (await machine(config, device=replace(DEVICE, disk_free=10**8)))["disk"]
    assert (full.outcome, "free some disk" in full.mend) == ("fail", True)
    slow = (await machine(config, disk_speed=lambda folder: (1e6, 1e6)))["disk"]
    assert (slow.outcome, "faster disk" in slow.mend) == ("warn", True)
    refused = (await machine(config, disk_speed=lambda folder: (None, None)))["disk"]
    assert (refused.outcome, "--cache-dir" in refused.mend) == ("fail", True)
    (tmp_path / "file").write_text("in the way")
    blocked = check_disk(NodeConfig(LINK, tmp_path, cache_dir=tmp_path / "file" / "cache"), DEVICE, tools())
    assert (blocked.outcome, "--cache-dir" in blocked.mend) == ("fail", True)


async def test_memory_that_is_less_than_the_budget(tmp_path: Path) -> None:
    found = (await machine(NodeConfig(LINK, tmp_path, budget_bytes=5 * 10**9)))["memory"]
    assert (found.outcome, "smaller --budget" in found.mend) == ("fail", True)


async def test_a_machine_without_the_kernel_or_the_device_named(tmp_path: Path) -> None:
    slow = (await machine(NodeConfig(LINK, tmp_path), kernel=lambda: "torch (no C compiler here)"))["kernel"]
    assert (slow.outcome, "C compiler" in slow.mend) == ("warn", True)

    def absent(name: str) -> torch.device | None:
        raise ConfigError("--device cuda: torch finds none here")

    gone = (await machine(NodeConfig(LINK, tmp_path, device="cuda"), find_device=absent))["kernel"]
    assert (gone.outcome, "--device" in gone.mend) == ("fail", True)


async def test_a_node_that_was_killed_leaves_a_word(tmp_path: Path) -> None:
    content = {"v": 1, "port": 1, "token": "x", "pid": 1}
    from relay.keyfiles import write_secret

    write_secret(tmp_path / "control.json", json.dumps(content).encode())
    assert (await machine(NodeConfig(LINK, tmp_path)))["daemon"].outcome == "warn"


# --- the swarm ---------------------------------------------------------------------------------------


async def test_a_good_swarm_and_a_running_node(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    found = await ask(swarm, tmp_path / "new")
    assert {name: check.outcome for name, check in found.items()} == dict.fromkeys(
        ("market", "clock", "grant", "relay", "weights", "link", "windows"), "ok"
    )
    assert "tiny" in found["market"].found
    assert not (tmp_path / "new").exists(), "it makes nothing"
    async with node(swarm, tmp_path / "node", measure=False) as running:
        await running.proven(2)
        await running.reaches(Phase.SERVING)
        beside = await ask(swarm, tmp_path / "node")
        assert all(check.outcome == "ok" for check in beside.values()), beside
        assert "days left" in beside["grant"].found
        daemon = (await machine(NodeConfig(swarm.link, tmp_path / "node")))["daemon"]
        assert daemon.found == "a node runs: serving, reachable"
        assert running.status.phase is Phase.SERVING, "the node was left alone"
        await running.end()


async def test_a_market_that_is_not_there_or_not_the_right_one(swarm: NodeSwarm, tmp_path: Path) -> None:
    gone = await ask(swarm, tmp_path, link=JoinLink("http://127.0.0.1:1", None))
    assert gone["market"].outcome == "fail"
    assert gone["clock"].outcome == "warn"
    assert set(gone) == {"market", "clock"}
    other = await ask(swarm, tmp_path, link=JoinLink(swarm.link.url, SigningKey.generate().public))
    assert (other["market"].outcome, "join link" in other["market"].mend) == ("fail", True)
    unpinned = await ask(swarm, tmp_path, link=JoinLink(swarm.link.url, None))
    assert (unpinned["market"].outcome, "operator" in unpinned["market"].mend) == ("warn", True)
    NodeState(tmp_path).pin(swarm.link.url, SigningKey.generate().public)
    assert (await ask(swarm, tmp_path))["market"].outcome == "fail"


async def test_a_market_without_a_plan(swarm: NodeSwarm, tmp_path: Path) -> None:
    found = await ask(swarm, tmp_path)
    assert "no model is served" in found["market"].found
    assert found["weights"].outcome == "warn"
    assert "windows" not in found


@pytest.mark.parametrize(("ahead", "outcome"), [(0.0, "ok"), (20.0, "warn"), (-20.0, "warn"), (90.0, "fail")])
async def test_a_clock_that_is_wrong(swarm: NodeSwarm, tmp_path: Path, ahead: float, outcome: str) -> None:
    found = (await ask(swarm, tmp_path, clock=lambda: time.time() + ahead))["clock"]
    assert found.outcome == outcome
    if ahead:
        assert "network time" in found.mend
        assert float(found.found.split()[0]) == pytest.approx(abs(ahead), abs=2.0)
        assert ("ahead" if ahead > 0 else "behind") in found.found


async def test_a_clock_so_wrong_that_no_certificate_holds(swarm: NodeSwarm, tmp_path: Path) -> None:
    """The market's certificate has not expired for us alone: the answer's Date header tells."""
    found = await ask(
        swarm,
        tmp_path,
        link=JoinLink(swarm.link.url, SigningKey.generate().public),
        clock=lambda: time.time() + 9e6,
    )
    assert found["market"].outcome == "fail"
    assert found["clock"].outcome == "fail"


async def test_a_relay_that_does_not_answer(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.relay_site.stop()
    found = (await ask(swarm, tmp_path))["relay"]
    assert (found.outcome, "WebSockets" in found.mend) == ("fail", True)


async def test_a_relay_that_is_no_relay(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.relay_site.stop()

    async def plain(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/{any:.*}", plain)
    site = Site()
    site.port = swarm.relay_site.port
    await site.start(app)
    try:
        found = (await ask(swarm, tmp_path))["relay"]
        assert (found.outcome, "status 200" in found.found) == ("fail", True)
    finally:
        await site.stop()


async def test_a_weights_endpoint_behind_a_proxy_that_hides_it(
    swarm: NodeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await swarm.publish()

    async def hidden(request: web.Request) -> web.Response:
        return web.Response(status=404, text="<html>nothing here</html>")

    monkeypatch.setattr(swarm.weights, "handle", hidden)
    found = (await ask(swarm, tmp_path))["weights"]
    assert (found.outcome, "/weights/" in found.mend) == ("fail", True)
    swarm.weights_open.clear()
    monkeypatch.setattr(doctor_swarm, "ANSWER_S", 0.1)
    assert (await ask(swarm, tmp_path))["weights"].outcome == "fail"
    swarm.weights_open.set()


async def test_a_device_without_a_grant_and_without_its_wallet(swarm: NodeSwarm, tmp_path: Path) -> None:
    found = (await ask(swarm, tmp_path, wallet=tmp_path / "elsewhere.json"))["grant"]
    assert (found.outcome, "kvasir-node login" in found.mend) == ("fail", True)


async def test_windows_that_do_not_fit(swarm: NodeSwarm, tmp_path: Path) -> None:
    await swarm.publish()
    small = (await ask(swarm, tmp_path, budget_bytes=1000))["windows"]
    assert (small.outcome, "raise --budget" in small.mend) == ("fail", True)
    tight = (await ask(swarm, tmp_path, budget_bytes=10**6, device=replace(DEVICE, memory_free=10**6)))[
        "windows"
    ]
    assert (tight.outcome, "close something" in tight.mend) == ("warn", True)


# --- the command -------------------------------------------------------------------------------------


def test_what_is_printed() -> None:
    checks = [Check("clock", "ok", "0.1 s ahead of the market"), no_swarm()]
    lines = describe_checks(checks)
    assert lines[0] == "ok    clock     0.1 s ahead of the market"
    assert lines[2].strip().startswith("-> give the join link")
    assert (exit_status(checks), exit_status(checks[:1])) == (1, 0)
    assert exit_status([Check("disk", "warn", "slow", "buy one")]) == 0


async def test_the_command(swarm: NodeSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await swarm.publish()
    state = ["--state-dir", str(tmp_path / "node"), "--reserve-bytes", "0", "--budget", "10MB"]
    assert await asyncio.to_thread(main, ["doctor", *state]) == 1  # no swarm is known
    assert "give the join link" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["doctor", swarm.link.text, *state, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in answer["checks"]} == {
        "daemon", "state", "wallet", "kernel", "disk", "memory", "market", "clock", "grant", "relay",
        "weights", "link", "windows",
    }  # fmt: skip
    NodeState(tmp_path / "node").pin(swarm.link.url, swarm.keys.root_public)
    assert await asyncio.to_thread(main, ["doctor", *state]) == 0  # those joined before
    assert "tiny" in capsys.readouterr().out

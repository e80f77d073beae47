"""Real commands in network namespaces: a backbone and a node on one LAN, and a node behind NAT."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.netns import Lab, missing
from tests.support.waiting import until

WHY_NOT = missing()
pytestmark = [
    pytest.mark.any_loop,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(300),
]

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
PORT = 8420


class Command:
    """One of the commands at a host of a lab; its log, an event a line."""

    def __init__(self, lab: Lab, host: str, module: str, *arguments: str, log: Path) -> None:
        self._log = log
        space = ["ip", "netns", "exec", lab._full(host)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*space, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=ENVIRONMENT,
            )  # fmt: skip

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it logged of that name."""
        found = []
        for line in self._log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
        assert self._process.poll() is None or found, self._log.read_text(encoding="utf-8")[-2000:]
        return found

    def end(self) -> None:
        """Ask it to stop; make it stop."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as found:
        yield found


@contextlib.contextmanager
def backbone(lab: Lab, folder: Path, address: str) -> Iterator[Command]:
    command = Command(
        lab, "backbone", "kvasir_backbone.cli", "up", "--host", "0.0.0.0", "--port", str(PORT),
        "--public-url", f"http://{address}:{PORT}", "--state-dir", str(folder / "backbone"),
        "--window-bytes", "64MB", "--dtype", "float32", "--json-logs", log=folder / "backbone.log",
    )  # fmt: skip
    try:
        yield command
    finally:
        command.end()


@contextlib.contextmanager
def node(lab: Lab, folder: Path, host: str, link: str, *more: str) -> Iterator[Command]:
    command = Command(
        lab, host, "kvasir_node.cli", "run", link, "--state-dir", str(folder / host), "--json-logs",
        "--budget", "200MB", "--reserve-bytes", "0", "--no-hub", "--no-measure", *more,
        log=folder / f"{host}.log",
    )  # fmt: skip
    try:
        yield command
    finally:
        command.end()


def at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


async def join_link(running: Command) -> str:
    await until(lambda: bool(running.events("port.opened")), timeout=90, what="the backbone's port")
    return str(running.events("port.opened")[0]["join"])


async def test_on_one_lan_the_node_is_dialled_directly_within_two_seconds(lab: Lab, tmp_path: Path) -> None:
    lab.host("backbone", "203.0.113.1")
    lab.host("node", "203.0.113.2")
    with backbone(lab, tmp_path, "203.0.113.1") as up:
        link = await join_link(up)
        with node(lab, tmp_path, "node", link) as run:
            await until(
                lambda: any(one["path"] == "direct" for one in up.events("session.opened")),
                timeout=120,
                what="a direct session",
            )
            loaded = min(at(one) for one in run.events("window.loaded"))
            direct = min(at(one) for one in up.events("session.opened") if one["path"] == "direct")
            assert direct - loaded < 2.0
            assert run.events("listener.opened")[0]["addresses"][0].startswith("http://203.0.113.2:")
            assert not run.events("discovery.unavailable")
            await until(lambda: bool(up.events("replica.proven")), timeout=60, what="a proving call")
            assert up.events("replica.proven")[0]["outcome"] == "proven"


async def test_behind_nat_the_relay_serves_and_the_private_address_is_left_alone(
    lab: Lab, tmp_path: Path
) -> None:
    lab.host("backbone", "203.0.113.1")
    lab.router("home", "203.0.113.9")
    lab.behind("home", "node", "192.168.1.2")
    with backbone(lab, tmp_path, "203.0.113.1") as up:
        link = await join_link(up)
        with node(lab, tmp_path, "node", link) as run:
            await until(lambda: bool(up.events("replica.proven")), timeout=120, what="a proving call")
            assert up.events("replica.proven")[0]["outcome"] == "proven"
            assert {one["path"] for one in up.events("session.opened")} == {"relay"}
            (refused,) = up.events("address.refused")
            assert "192.168.1.2" in refused["reason"]
            assert "not part of" in refused["reason"]
            opened = min(at(one) for one in up.events("session.opened"))
            loaded = min(at(one) for one in run.events("window.loaded"))
            assert opened - loaded < 2.0

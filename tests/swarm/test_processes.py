"""The two commands as a newcomer runs them: real processes, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvasir_backbone.addresses import find_door
from relay.errors import Unreachable
from tests.support.waiting import until

pytestmark = pytest.mark.any_loop

PROMPT, TOKENS = "In the beginning", 160
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@asynccontextmanager
async def process(
    module: str, *arguments: str, log: Path, environment: Mapping[str, str] = ENVIRONMENT
) -> AsyncIterator[Process]:
    """A command in a process of its own; ended at the latest with the block."""
    with log.open("wb") as output:
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments,
            stdin=DEVNULL, stdout=output, stderr=output, env=environment,
        )  # fmt: skip
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


class Outside:
    """What a client and an operator see of a backbone in another process."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url

    async def status(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/backbone/v1/status") as response:
            answer: dict[str, Any] = await response.json()
            return answer

    async def covered(self) -> bool:
        status = await self.status()
        return status["phase"] == "serving" and status.get("coverage") == 1.0

    async def text(self) -> str:
        body = {"model": "kvasir-tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return str(answer["choices"][0]["text"])


async def _ended(running: Process) -> int:
    async with asyncio.timeout(40):
        return await running.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
@pytest.mark.timeout(300)
async def test_three_nodes_one_killed_then_all_and_the_same_text(tmp_path: Path) -> None:
    state = tmp_path / "backbone"
    up = ("up", "--port", "0", "--state-dir", str(state), "--dtype", "float32", "--window-bytes", "8MB",
          "--kv-bytes", "64MiB")  # fmt: skip
    async with process("kvasir_backbone.cli", *up, log=tmp_path / "up.log") as backbone:
        link = await _join_link(state, tmp_path / "up.log", backbone)
        nodes = [
            process(
                "kvasir_node.cli", "run", link, "--state-dir", str(tmp_path / f"n{n}"), "--budget", "22MB",
                "--precision", "stored", log=tmp_path / f"n{n}.log",
            )
            for n in range(3)
        ]  # fmt: skip
        async with nodes[0] as first, nodes[1] as second, nodes[2] as third, aiohttp.ClientSession() as http:
            outside = Outside(http, find_door(state).url)
            await until(outside.covered, timeout=120, what="coverage")
            expected = await outside.text()
            assert (await outside.status())["fallback_rows"] == 0

            await _kill_during(outside, expected, first)
            await _kill_during(outside, expected, second, third)
            status = await outside.status()
            assert status["coverage"] == 0.0
            assert status["fallback_rows"] > 0
            assert status["engine"]["finished"]["failed"] == 0
            backbone.send_signal(signal.SIGTERM)
            assert await _ended(backbone) == 0
    log = (tmp_path / "up.log").read_text()
    assert '"window.uncovered"' in log
    assert "Traceback" not in log


def _logged(log: Path, event: str) -> dict[str, Any]:
    """The first log line of that event."""
    line = next(line for line in log.read_text().splitlines() if f'"{event}"' in line)
    found: dict[str, Any] = json.loads(line)
    return found


async def _join_link(state: Path, log: Path, backbone: Process) -> str:
    def is_open() -> bool:
        assert backbone.returncode is None, log.read_text()
        try:
            find_door(state)
        except Unreachable:
            return False
        return '"join": "' in log.read_text()

    await until(is_open, timeout=240, what="the backbone's port")
    return str(_logged(log, "port.opened")["join"])


async def _kill_during(outside: Outside, expected: str, *victims: Process) -> None:
    """SIGKILL in mid-generation: no error, the same text."""
    before = (await outside.status())["engine"]["generated_tokens"]
    running = asyncio.create_task(outside.text())

    async def begun() -> bool:
        return bool((await outside.status())["engine"]["generated_tokens"] > before + 10)

    await until(begun, timeout=60, what="some tokens")
    assert not running.done()
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    assert await running == expected


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
async def test_a_second_signal_ends_the_backbone_at_once(tmp_path: Path) -> None:
    state = tmp_path / "backbone"
    up = ("up", "--port", "0", "--state-dir", str(state), "--kv-bytes", "16MiB")
    async with process("kvasir_backbone.cli", *up, log=tmp_path / "up.log") as backbone:
        await _join_link(state, tmp_path / "up.log", backbone)
        backbone.send_signal(signal.SIGTERM)
        backbone.send_signal(signal.SIGTERM)
        assert await _ended(backbone) in (0, 128 + signal.SIGTERM)

"""Stand-alone relays as real processes: nodes move when one drains or dies, and the text stays the same."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvasir_backbone.addresses import find_door
from market.swarm import CertificateRequest, certify, load_root
from relay.operator import load_key
from tests.support.standalone import free_port
from tests.support.waiting import until
from tests.swarm.test_processes import ENVIRONMENT, Outside, _ended, _join_link, _logged, process


class RelayProcess:
    """`kvasir-relay run` in a process of its own, certified by the swarm's root."""

    def __init__(self, name: str, tmp_path: Path, link: str, root: Path, *, public_url: str = "") -> None:
        self.folder, self.log = tmp_path / name, tmp_path / f"{name}.log"
        self.folder.mkdir()
        self.link, self.port = link, free_port()
        self.url = public_url or f"http://127.0.0.1:{self.port}"
        key = load_key(self.folder)
        request = CertificateRequest("relay", key.id, key.signing.public, key.exchange.public)
        certificate = certify(load_root(root), request, serial=1, now=time.time())
        (self.folder / "relay.cert").write_bytes(certificate.document.to_bytes())

    async def start(
        self, stack: AsyncExitStack, *more: str, environment: Mapping[str, str] = ENVIRONMENT
    ) -> Process:
        arguments = ("--state-dir", str(self.folder), "--host", "127.0.0.1", "--port", str(self.port),
                     "--public-url", self.url, "--drain", "5", *more)  # fmt: skip
        started = process("relay.cli", "run", self.link, *arguments, log=self.log, environment=environment)
        return await stack.enter_async_context(started)


async def _relays(outside: Outside) -> dict[str, dict[str, Any]]:
    return {relay["url"]: relay for relay in (await outside.status()).get("relays", [])}


async def _place(outside: Outside) -> str | None:
    """The relay that the one node's session goes through."""
    nodes = (await outside.status()).get("nodes", [])
    return nodes[0]["relay"].removesuffix("/relay/v1") if nodes and nodes[0]["relay"] else None


async def _carried(outside: Outside) -> int:
    return int((await outside.status())["nodes"][0]["carried_bytes"])


async def _text_during(outside: Outside, victim: Process, blow: signal.Signals) -> str:
    """Generate; once it runs, end a relay."""
    before = (await outside.status())["engine"]["generated_tokens"]
    running = asyncio.create_task(outside.text())

    async def begun() -> bool:
        return bool((await outside.status())["engine"]["generated_tokens"] > before + 10)

    await until(begun, timeout=60, what="some tokens")
    assert not running.done()
    victim.send_signal(blow)
    return await running


async def _node_status(folder: Path) -> dict[str, Any]:
    asking = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvasir_node.cli", "status", "--state-dir", str(folder), "--json",
        stdout=PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        output, _ = await asking.communicate()
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.mark.any_loop
@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
@pytest.mark.timeout(600)
async def test_a_node_moves_from_relay_to_relay_and_the_text_stays_the_same(tmp_path: Path) -> None:
    state = tmp_path / "backbone"
    up = ("up", "--port", "0", "--state-dir", str(state), "--dtype", "float32", "--kv-bytes", "64MiB",
          "--relay-only", "--no-relay", "--fallback", "none", "--drafting", "off")  # fmt: skip
    async with AsyncExitStack() as stack:
        backbone = await stack.enter_async_context(
            process("kvasir_backbone.cli", *up, log=tmp_path / "up.log")
        )
        link = await _join_link(state, tmp_path / "up.log", backbone)
        relays = {}
        for name in ("a", "b"):
            relay = RelayProcess(name, tmp_path, link, state / "swarm")
            relays[relay.url] = relay
        running = {url: await relay.start(stack) for url, relay in relays.items()}
        http = await stack.enter_async_context(aiohttp.ClientSession())
        outside = Outside(http, find_door(state).url)

        async def both_listed() -> bool:
            listed = await _relays(outside)
            return set(listed) == set(relays) and all(r["connected"] for r in listed.values())

        await until(both_listed, timeout=240, what="two relays")
        await stack.enter_async_context(
            process(
                "kvasir_node.cli", "run", link, "--state-dir", str(tmp_path / "node"), "--budget", "200MB",
                "--precision", "stored", log=tmp_path / "node.log",
            )
        )  # fmt: skip
        await until(outside.covered, timeout=240, what="coverage")
        expected = await outside.text()
        at_first = await _carried(outside)
        first = await _place(outside)
        assert first in relays
        (second,) = set(relays) - {first}
        shown = await _node_status(tmp_path / "node")
        assert {relay["url"]: relay["sessions"] for relay in shown["relays"]} == {first: 1, second: 0}
        assert shown["sessions"][0]["relay"] == first

        # SIGTERM: it says that it goes away, and the session moves before it is gone.
        assert await _text_during(outside, running[first], signal.SIGTERM) == expected
        assert await _ended(running[first]) == 0
        assert await _place(outside) == second
        assert '"relay.draining"' in (tmp_path / "node.log").read_text()
        each = await _carried(outside) - at_first

        async def unlisted() -> bool:
            listed = await _relays(outside)
            return first not in listed or bool(listed[first]["load"]["draining"])

        await until(unlisted, timeout=30, what="the market to hear that it goes")

        # It comes back, and is a place to go to when the other one is killed.
        running[first] = await relays[first].start(stack)

        async def standing_by() -> bool:
            return await both_listed() and all(
                relay["connected"] for relay in (await _node_status(tmp_path / "node"))["relays"]
            )

        await until(standing_by, timeout=240, what="the relay's return")
        assert await _place(outside) == second  # no reason to move back
        before = await _carried(outside)
        assert await _text_during(outside, running[second], signal.SIGKILL) == expected
        assert await _place(outside) == first
        assert await _carried(outside) - before == each  # sent again, paid once
        assert (await outside.status())["fallback_rows"] == 0
        moved = _logged(tmp_path / "node.log", "relays.chosen")
        assert moved["before"] == []
        backbone.send_signal(signal.SIGTERM)
        assert await _ended(backbone) == 0
    for log in ("up", "node", "a", "b"):
        assert "Traceback" not in (tmp_path / f"{log}.log").read_text()

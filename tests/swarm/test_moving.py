"""Two nodes with room for one window hold the same one; the market has one of them take the other window.

Real processes, as a newcomer runs them.
"""

from __future__ import annotations

import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvasir_backbone.addresses import find_door
from market.client import MarketClient
from relay.links import parse_join_link
from tests.support.occupants import occupants
from tests.support.waiting import until
from tests.swarm.test_processes import Outside, _ended, _join_link, process


async def _rows(outside: Outside) -> dict[str, dict[str, Any]]:
    return {row["window"]: row for row in (await outside.status())["windows"]}


async def _gaps(outside: Outside) -> dict[str, Any]:
    async with outside.http.get(f"{outside.url}/backbone/v1/gaps") as response:
        answer: dict[str, Any] = await response.json()
        return answer


@pytest.mark.any_loop
@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
@pytest.mark.timeout(300)
async def test_the_window_without_an_owner_gets_one_and_the_text_stays_the_same(tmp_path: Path) -> None:
    state, log = tmp_path / "backbone", tmp_path / "up.log"
    up = ("up", "--port", "0", "--state-dir", str(state), "--dtype", "float32", "--window-bytes", "20MB",
          "--kv-bytes", "64MiB", "--move-after", "1")  # fmt: skip
    async with AsyncExitStack() as stack:
        backbone = await stack.enter_async_context(process("kvasir_backbone.cli", *up, log=log))
        link = await _join_link(state, log, backbone)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        outside = Outside(http, find_door(state).url)

        async def serving() -> bool:
            return (await outside.status())["phase"] == "serving"

        await until(serving, timeout=240, what="the model")
        joined = parse_join_link(link)
        market = MarketClient(joined.url, http=http, root=joined.root)
        (listing,) = await market.plans()
        _, plan = await market.plan(listing.plan)
        full, empty = plan.windows
        budget = max(plan.kept_bytes(window, "stored") for window in plan.windows)
        others = await stack.enter_async_context(occupants(joined, listing.plan, empty))
        for number in range(2):
            arguments = ("run", link, "--state-dir", str(tmp_path / f"n{number}"), "--budget", f"{budget}B",
                         "--precision", "stored", "--no-measure")  # fmt: skip
            run = process("kvasir_node.cli", *arguments, log=tmp_path / f"n{number}.log")
            await stack.enter_async_context(run)

        async def crowded() -> bool:
            rows = await _rows(outside)
            return (rows[full.name]["connected"], rows[empty.name]["connected"]) == (2, 0)

        await until(crowded, timeout=120, what="both nodes at one window")
        expected = await outside.text()
        await others.leave()
        uncovered = 0
        while True:
            text, rows = await outside.text(), await _rows(outside)
            assert text == expected
            uncovered += not rows[full.name]["connected"]
            if rows[empty.name]["connected"]:
                break
        assert uncovered == 0, "the window that the node left had no owner"
        assert (await _rows(outside))[full.name]["connected"] == 1
        assert (await outside.status())["coverage"] == 1.0
        before = (await outside.status())["fallback_rows"]
        assert await outside.text() == expected
        assert (await outside.status())["fallback_rows"] == before, "somebody else computed a covered window"
        (move,) = (await _gaps(outside))["moves"]
        assert (move["leaves"], move["takes"]) == (full.name, empty.name)
        backbone.send_signal(signal.SIGTERM)
        assert await _ended(backbone) == 0
    for name in ("up", "n0", "n1"):
        assert "Traceback" not in (tmp_path / f"{name}.log").read_text()
    assert '"move.offered"' in log.read_text()
    assert any('"move.accepted"' in (tmp_path / f"n{number}.log").read_text() for number in range(2))

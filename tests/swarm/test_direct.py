"""The direct path in a whole swarm: preferred, lost in mid-call, claimed by somebody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from kvasir_backbone.links import DeviceLink
from kvasir_node.listening import Listener
from relay.channel import Channel
from relay.direct import DirectListener
from relay.errors import KvasirError
from relay.identity import ExchangeKey, SerialBook
from relay.secure import SecureSession
from relay.session import GenerationBook
from tests.support.swarms import RunningNode, RunningSwarm, Wire, running_swarm
from tests.support.waiting import until

PROMPT = "In the beginning"
TOKENS = 32


def link_of(swarm: RunningSwarm) -> DeviceLink:
    """The backbone's link to its only node."""
    assert swarm.backbone.swarm is not None
    (link,) = swarm.backbone.swarm.links().values()
    return link


def carried(swarm: RunningSwarm) -> int:
    """Bytes paid so far, all nodes together."""
    assert swarm.backbone.swarm is not None
    return sum(size for size, _ in swarm.backbone.swarm.book.all_totals().values())


async def went_direct(swarm: RunningSwarm) -> None:
    await until(lambda: link_of(swarm).path == "direct", timeout=20, what="the direct path")


@pytest.fixture
def only_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes announce their `public_address` and none of their own."""
    monkeypatch.setattr(Listener, "_own", lambda self: [])


@asynccontextmanager
async def reached_through(swarm: RunningSwarm) -> AsyncIterator[tuple[RunningNode, Wire]]:
    """A node that is dialled directly through a wire of its own."""
    wire = Wire()
    await wire.start()
    try:
        node = await swarm.add_node(direct=True, public_address=f"127.0.0.1:{wire.port}")
        with structlog.testing.capture_logs() as logs:
            await until(lambda: any(line["event"] == "listener.opened" for line in logs), timeout=30)
        wire.target = next(line["port"] for line in logs if line["event"] == "listener.opened")
        yield node, wire
    finally:
        await wire.stop()


async def test_a_node_that_can_be_reached_is_called_directly_and_a_relay_only_backbone_writes_the_same(
    tmp_path: Path,
) -> None:
    async with running_swarm(tmp_path / "a", nodes=1, node=lambda number: {"direct": True}) as swarm:
        await swarm.covered()
        await went_direct(swarm)
        await until(lambda: not swarm.backbone.relay.meters.circuits, what="the end of the relayed circuit")
        before = swarm.backbone.relay.meters.bytes_forwarded
        answer = await swarm.complete(PROMPT, TOKENS)
        assert answer["usage"]["completion_tokens"] == TOKENS
        assert swarm.backbone.relay.meters.bytes_forwarded == before
        (node,) = (await swarm.ask("nodes"))["nodes"]
        assert node["path"] == "direct"
        async with swarm.http.get(f"{swarm.url}/metrics") as response:
            assert 'kvasir_sessions{path="direct"} 1' in await response.text()
        assert (await swarm.ask("status"))["fallback_rows"] == 0
        shown = swarm.nodes[0].status.snapshot()
        assert [session["path"] for session in shown["sessions"]] == ["direct"]
        assert shown["direct"][0].startswith("http://127.0.0.1:")
    async with running_swarm(
        tmp_path / "b", nodes=1, node=lambda number: {"direct": True}, relay_only=True
    ) as swarm:
        await swarm.covered()
        before = swarm.backbone.relay.meters.bytes_forwarded
        assert await swarm.text(PROMPT, TOKENS) == answer["choices"][0]["text"]
        assert link_of(swarm).path == "relay"
        assert swarm.backbone.relay.meters.bytes_forwarded > before


@pytest.mark.usefixtures("only_public")
async def test_the_direct_link_is_cut_in_mid_call_the_relay_takes_over_and_it_is_paid_once(
    tmp_path: Path,
) -> None:
    async with running_swarm(tmp_path) as swarm, reached_through(swarm) as (_, wire):
        await swarm.covered()
        await went_direct(swarm)
        expected = await swarm.text(PROMPT, TOKENS)
        paid = carried(swarm)
        assert await swarm.text(PROMPT, TOKENS) == expected
        paid, once = carried(swarm), carried(swarm) - paid
        assert once > 0
        assert swarm.backbone.swarm is not None
        stats = swarm.backbone.swarm.dispatcher.stats
        link = link_of(swarm)

        running = asyncio.create_task(swarm.text(PROMPT, TOKENS))
        await swarm.calls_made(stats.calls + 20)
        wire.freeze()
        await until(lambda: bool(link._pending), what="a call that is not answered")
        waiting = set(link._pending)
        with structlog.testing.capture_logs() as logs:
            cut_at = time.monotonic()
            wire.cut()
            await until(lambda: not waiting & set(link._pending), timeout=10, what="the calls in flight")
            took = time.monotonic() - cut_at
        opened = [line for line in logs if line["event"] == "session.opened" and "device" in line]
        assert [(line["path"], line["resent"] >= 1) for line in opened] == [("relay", True)]
        assert took < 1.0
        assert await running == expected
        assert set(stats.outcomes) == {"completed"}  # the calls themselves went through: no failover
        assert stats.fallback_rows == 0
        assert carried(swarm) - paid == once

        wire.thaw()
        wire.mend()
        link.readdressed()
        await went_direct(swarm)


@pytest.mark.usefixtures("only_public")
async def test_whoever_else_listens_at_the_address_is_never_used(tmp_path: Path) -> None:
    refusals: list[str] = []
    async with running_swarm(tmp_path) as swarm:

        async def impostor(channel: Channel) -> None:
            assert swarm.backbone.swarm is not None
            (holding, *_) = swarm.backbone.swarm.directory.all()
            try:
                await SecureSession.accept(
                    channel,
                    key=ExchangeKey.generate(),  # it knows all that is public of the device, not its key
                    root=swarm.backbone.keys.root_public,
                    grant_hash=holding.assignment.grant.hash,
                    generations=GenerationBook(),
                    serials=SerialBook(),
                    timeout=5.0,
                )
            except KvasirError as error:
                refusals.append(error.code)
                raise

        app = web.Application()
        DirectListener(impostor).attach(app)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            port = runner.addresses[0][1]
            await swarm.add_node(direct=True, public_address=f"127.0.0.1:{port}")
            await swarm.covered()
            await until(lambda: len(refusals) >= 2, timeout=30, what="two handshakes that failed")
            assert link_of(swarm).path == "relay"
            assert await swarm.text(PROMPT, TOKENS)
            assert (await swarm.ask("status"))["fallback_rows"] == 0
            assert set(refusals) == {"bad_signature"}
        finally:
            await runner.cleanup()

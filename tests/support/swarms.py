"""A whole swarm in this process: a backbone on port 0 and nodes, each behind a wire that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from kvasir_backbone.config import BackboneConfig
from kvasir_backbone.daemon import Backbone
from kvasir_backbone.daemon import run as run_backbone
from kvasir_node.config import NodeConfig
from kvasir_node.daemon import run as run_node
from kvasir_node.status import NodeStatus
from relay.links import JoinLink
from tests.support.waiting import until


class Wire:
    """A TCP proxy on loopback. `cut` ends every connection through it and takes no new ones.

    To the other side a node behind a cut wire is exactly a node killed by SIGKILL: its connections end, and
    nothing more comes. `freeze` keeps connections open and passes nothing on, as SIGSTOP does.
    """

    def __init__(self) -> None:
        self.target: int = 0
        self.port = 0
        self._server: asyncio.Server
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._is_cut = False
        self.to_node = bytearray()
        """Every byte that came to the node through this wire."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            await _abort(writer)
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            await _abort(writer)
            return
        both = {writer, there_writer}
        self._connections |= both
        pumps = [
            asyncio.create_task(self._pump(reader, there_writer, None)),
            asyncio.create_task(self._pump(there_reader, writer, self.to_node)),
        ]
        self._tasks |= set(pumps)
        await asyncio.wait(pumps)
        self._tasks -= set(pumps)
        for each in both:
            await _abort(each)
        self._connections -= both

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if record is not None:
                    record += data
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    def cut(self) -> None:
        """End all connections without a word, and refuse new ones."""
        self._is_cut = True
        for writer in self._connections:
            writer.transport.abort()

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def freeze(self) -> None:
        """Pass nothing on until `thaw`."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Pass on what waited."""
        self._flowing.set()

    async def stop(self) -> None:
        self.thaw()
        self._server.close()
        self.cut()
        await until(lambda: not self._connections, what="the end of all connections")


async def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection at once, and see it closed."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class RunningNode:
    """A node daemon behind its wire."""

    def __init__(self, config: NodeConfig, wire: Wire) -> None:
        self.config = config
        self.wire = wire
        self.status = NodeStatus(name=config.name)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(run_node(config, stop=self.stop, status=self.status))

    async def end(self) -> None:
        """Stop in order."""
        self.stop.set()
        await self.task

    async def kill(self) -> None:
        """Cut the wire, then let the daemon's task end as it may."""
        self.wire.cut()
        self.task.cancel()
        await asyncio.wait([self.task])


class RunningSwarm:
    """A backbone and its nodes. `api` is an HTTP session for the backbone's port."""

    def __init__(self, backbone: Backbone, http: aiohttp.ClientSession, folder: Path) -> None:
        self.backbone = backbone
        self.http = http
        self.folder = folder
        self.nodes: list[RunningNode] = []
        self.wires: list[Wire] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.backbone.port}"

    async def add_node(self, **settings: Any) -> RunningNode:
        """Start one more node, behind the next unused wire."""
        wire = self.wires[len(self.nodes)]
        wire.target = self.backbone.port
        name = f"node{len(self.nodes)}"
        config = NodeConfig(
            join=JoinLink(wire.url, self.backbone.keys.root_public),
            state_dir=self.folder / name,
            name=name,
            budget_bytes=1_000_000_000,
            reserve_bytes=0,
            nice=0,
            hub=False,
            direct=False,  # only what goes through the wire can be cut
        )
        node = RunningNode(replace(config, **settings), wire)
        self.nodes.append(node)
        return node

    async def covered(self, *, replicas: int = 1, timeout: float = 60.0) -> None:
        """Wait until every window has that many connected, proven replicas."""

        def there() -> bool:
            for node in self.nodes:
                if node.task.done() and not node.task.cancelled():
                    node.task.result()
            swarm = self.backbone.swarm
            if swarm is None or not self.backbone.serving.is_set():
                return False
            roster = swarm.roster()
            return all(
                sum(replica.connected for replica in roster.of(number)) >= replicas
                for number in range(len(swarm.plan.windows))
            )

        await until(there, timeout=timeout, what=f"{replicas} replicas of every window")

    async def complete(self, prompt: str, max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
        """One greedy completion, not streamed: the whole answer."""
        body = {"model": self.backbone.config.name, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, **fields}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def text(self, prompt: str, max_tokens: int = 24, **fields: Any) -> str:
        """The text of one greedy completion."""
        answer = await self.complete(prompt, max_tokens, **fields)
        return str(answer["choices"][0]["text"])

    async def ask(self, path: str) -> dict[str, Any]:
        """One of the operator's questions."""
        async with self.http.get(f"{self.url}/backbone/v1/{path}") as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def calls_made(self, more_than: int) -> None:
        """Wait until the dispatcher has sent more than that many calls."""
        swarm = self.backbone.swarm
        assert swarm is not None
        await until(lambda: swarm.dispatcher.stats.calls > more_than, timeout=60, what=f"{more_than} calls")


@asynccontextmanager
async def running_swarm(
    folder: Path,
    *,
    nodes: int = 0,
    wires: int = 4,
    node: Callable[[int], dict[str, Any]] = lambda number: {},
    **settings: Any,
) -> AsyncIterator[RunningSwarm]:
    """A backbone with the bundled model in float32, `nodes` nodes, and room for `wires` of them.

    `node(i)` gives settings of node i; `settings` are the backbone's.
    """
    made = [Wire() for _ in range(wires)]
    for wire in made:
        await wire.start()
    config = BackboneConfig(
        **{
            "port": 0, "state_dir": folder / "backbone", "dtype": "float32", "window_bytes": 8_000_000,
            "kv_bytes": 64 << 20, "public_urls": tuple(wire.url for wire in made), "demand_s": 0.5,
            "failover_s": 2.0,  # everything shares one process: its stalls say nothing of a node
            **settings,
        }
    )  # fmt: skip
    stop = asyncio.Event()
    opened: asyncio.Future[Backbone] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_backbone(config, stop=stop, on_open=opened.set_result))
    try:
        await asyncio.wait([task, opened], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if task.done():
            task.result()
        async with aiohttp.ClientSession() as http:
            swarm = RunningSwarm(opened.result(), http, folder)
            swarm.wires = made
            for number in range(nodes):
                await swarm.add_node(**node(number))
            try:
                yield swarm
            finally:
                for each in swarm.nodes:
                    each.stop.set()
                left = [each.task for each in swarm.nodes if not each.task.done()]
                if left:
                    await asyncio.wait(left, timeout=20)
    finally:
        stop.set()
        await task
        for wire in made:
            await wire.stop()

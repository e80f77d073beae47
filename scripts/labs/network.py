"""The same question asked of real daemons: a backbone and nodes of several precisions over real sessions.

Everything is the product's own: market, relay, Noise sessions, claims, weights, proving calls, the API. What
the dispatcher was asked and what the nodes' experts executed is noted on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch
from torch import Tensor

from kvasir_backbone.config import BackboneConfig
from kvasir_backbone.daemon import Backbone
from kvasir_backbone.daemon import run as run_backbone
from kvasir_backbone.dispatch import SwarmDispatcher
from kvasir_node.config import NodeConfig
from kvasir_node.daemon import run as run_node
from kvasir_node.serving import ExpertServer
from relay.links import JoinLink

from .recording import ExecutionLog, RecordedExperts, digests
from .teacher import heldout_text

NODES: Final = ("stored", "int8", "stored")
"""The precision of each node; two replicas of some windows, and one of each kind."""

WINDOW_BYTES: Final = 3_000_000
TIMEOUT_S: Final = 180.0
"""For each wait."""


class Decisions:
    """What the dispatcher was asked: layer -> digest of a row -> the ids decided for it."""

    def __init__(self) -> None:
        self.ids: dict[int, dict[int, frozenset[int]]] = {}
        self.rows = 0

    def note(self, layer: int, rows: Tensor, ids: Tensor) -> None:
        """One dispatch; two rows of equal content have equal ids."""
        self.rows += len(rows)
        known = self.ids.setdefault(layer, {})
        for digest, chosen in zip(digests(rows).tolist(), ids.tolist(), strict=True):
            known[digest] = known.get(digest, frozenset()) | frozenset(chosen)

    def wrong(self, log: ExecutionLog) -> int:
        """Rows of which other experts ran than were decided. Proving calls send rows of their own."""
        count = 0
        for layer, decided in self.ids.items():
            executed: dict[int, set[int]] = {}
            for digest, expert in zip(*(part.tolist() for part in log.take(layer)), strict=True):
                executed.setdefault(digest, set()).add(expert)
            count += sum(executed.get(digest, set()) != chosen for digest, chosen in decided.items())
        return count


@contextlib.contextmanager
def _watched(decisions: Decisions, log: ExecutionLog) -> Iterator[None]:
    """While active every dispatch and every window that a node serves is noted."""
    dispatch, hold = SwarmDispatcher.dispatch, ExpertServer.hold

    @functools.wraps(dispatch)
    def noted(self: Any, layer: int, rows: Tensor, ids: Tensor, *rest: Any, **more: Any) -> Tensor:
        decisions.note(layer, rows, ids)
        return dispatch(self, layer, rows, ids, *rest, **more)

    @functools.wraps(hold)
    def recorded(
        self: Any, lease: bytes, epoch: int, plan: Any, experts: Any, *rest: Any, **more: Any
    ) -> Any:
        return hold(self, lease, epoch, plan, RecordedExperts(experts, log), *rest, **more)  # type: ignore[arg-type]

    SwarmDispatcher.dispatch, ExpertServer.hold = noted, recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        SwarmDispatcher.dispatch, ExpertServer.hold = dispatch, hold  # type: ignore[method-assign]


def serve_and_count(model: Path, *, requests: int, new: int) -> dict[str, int]:
    """Serve `requests` completions of `new` tokens: decisions, and how many were executed otherwise.

    `fallback_rows` were computed by the backbone and are not counted as decisions that a worker executed.
    """
    torch.set_num_threads(1)
    decisions, log = Decisions(), ExecutionLog()
    with (
        tempfile.TemporaryDirectory(prefix="kvasir-lab-", ignore_cleanup_errors=True) as folder,
        _watched(decisions, log),
    ):
        fallback = asyncio.run(_serve(model, Path(folder), requests, new))
    return {"decisions": decisions.rows, "mismatches": decisions.wrong(log), "fallback_rows": fallback}


async def _serve(model: Path, folder: Path, requests: int, new: int) -> int:
    async with _swarm(model, folder) as backbone, aiohttp.ClientSession() as http:
        prompts = [line for line in heldout_text(model).splitlines() if len(line) > 60]

        async def complete(number: int) -> None:
            body = {"model": backbone.config.name, "prompt": prompts[number][:120], "max_tokens": new}
            body |= {"temperature": float(number % 2), "seed": number}
            url = f"http://127.0.0.1:{backbone.port}/v1/completions"
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with http.post(url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise RuntimeError(f"the backbone answered {response.status}: {await response.text()}")

        await asyncio.gather(*(complete(number) for number in range(requests)))
        assert backbone.swarm is not None
        return backbone.swarm.dispatcher.stats.fallback_rows


@contextlib.asynccontextmanager
async def _swarm(model: Path, folder: Path) -> AsyncIterator[Backbone]:
    """A backbone on a free port and `NODES`, once every window has an owner and every node a window."""
    stop, stop_nodes = asyncio.Event(), asyncio.Event()
    opened: asyncio.Future[Backbone] = asyncio.get_running_loop().create_future()
    config = BackboneConfig(
        model=model, port=0, state_dir=folder / "backbone", dtype="float32", window_bytes=WINDOW_BYTES,
        kv_bytes=64 << 20, failover_s=30.0, fallback="none",
    )  # fmt: skip
    tasks = [asyncio.create_task(run_backbone(config, stop=stop, on_open=opened.set_result))]
    try:
        backbone = await asyncio.wait_for(_first(opened, tasks[0]), TIMEOUT_S)
        link = JoinLink(f"http://127.0.0.1:{backbone.port}", backbone.keys.root_public)
        for number, precision in enumerate(NODES):
            node = NodeConfig(
                join=link, state_dir=folder / f"node{number}", name=f"node{number}", precision=precision,
                budget_bytes=1_000_000_000, reserve_bytes=0, nice=0, hub=False, measure=False,
            )  # fmt: skip
            tasks.append(asyncio.create_task(run_node(node, stop=stop_nodes)))
        await _until(lambda: _covered(backbone, tasks))
        yield backbone
    finally:
        stop_nodes.set()  # the nodes first: they drain while there is a backbone to drain to
        done = await asyncio.gather(*tasks[1:], return_exceptions=True)
        stop.set()
        done += await asyncio.gather(tasks[0], return_exceptions=True)
        faults = [fault for fault in done if isinstance(fault, Exception)]
        if faults:
            raise faults[0]


async def _first(opened: asyncio.Future[Backbone], task: asyncio.Task[None]) -> Backbone:
    either: list[asyncio.Future[Any]] = [opened, task]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    return opened.result()


def _covered(backbone: Backbone, tasks: Sequence[asyncio.Task[None]]) -> bool:
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a daemon ended before the swarm was there")
    if backbone.swarm is None or not backbone.serving.is_set():
        return False
    roster = backbone.swarm.roster()
    owners = {replica.device for found in roster.replicas.values() for replica in found if replica.connected}
    return roster.coverage() == 1.0 and len(owners) == len(tasks) - 1


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the swarm was not there within {TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.1)

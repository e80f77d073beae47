"""A node that runs for long does not grow: thousands of calls, windows loaded and let go again and again."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from kvasir_node import kernels
from kvasir_node.cache import WeightCache
from kvasir_node.calls import Call, Group, Reference, References, Refusal, Reply, decode, encode
from kvasir_node.experts import WindowExperts, choose_execution
from kvasir_node.ffn import Execution
from kvasir_node.loading import trim_memory
from kvasir_node.serving import ExpertServer
from kvasir_node.tensors import rows_to_bytes
from market.plans import ByteRange, Plan
from tests.support.experts import PLAN_ID, tiny_plan
from tests.support.sessions import MemorySession, session_pair
from tests.support.waiting import until

LEASE = b"lease-0123456789"
WIDTH, ROWS = 512, 4
MB = 1 << 20


class Grown:
    """How much this process has grown since it was made: resident bytes and open files."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before, self._files = self._now()

    def _now(self) -> tuple[int, int]:
        files = self._process.num_fds() if hasattr(self._process, "num_fds") else 0
        return self._process.memory_info().rss, files

    def check(self, limit: int) -> None:
        memory, files = self._now()
        assert memory - self._before < limit, f"grown by {(memory - self._before) / MB:.1f} MB"
        assert files - self._files < 4, f"{files - self._files} more open files"


def call(number: int) -> Call:
    """A call of 4 rows, each for two of eight experts; one in ten for a lease that is not held."""
    ids = tuple((number + row + turn) % 8 for row in range(ROWS) for turn in (0, 3))
    rows = torch.full((ROWS, WIDTH), number / 1000.0)
    group = Group(1 if number % 10 == 9 else 0, (2,) * ROWS, ids)
    return Call(number, number % 2, ROWS, 10_000, (group,), rows_to_bytes(rows))


async def exchange(backbone: MemorySession, first: int, count: int) -> tuple[int, int]:
    """Send calls, sixteen at a time, and read the answers: (replies, refusals)."""
    asyncio.get_running_loop().set_debug(False)  # it keeps a traceback for every task and timer
    replies = refusals = 0
    for start in range(first, first + count, 16):
        batch = range(start, min(start + 16, first + count))
        for number in batch:
            await backbone.send(b"".join(encode(call(number))))
        for _ in batch:
            answer = decode(await backbone.receive())
            replies += isinstance(answer, Reply)
            refusals += isinstance(answer, Refusal)
        backbone.delivered.clear()
        backbone.peer.delivered.clear()
    return replies, refusals


@pytest.mark.parametrize("kernel", [True, False])
async def test_thousands_of_calls_leave_nothing_behind(kernel: bool) -> None:
    plan, read, _ = tiny_plan(width=WIDTH, inner=32)
    execution = choose_execution(plan, "stored", kernels.load() if kernel else None)
    experts = WindowExperts.load(plan, plan.windows[0], "stored", read, execution=execution)
    backbone, device = session_pair()
    async with ExpertServer() as server, asyncio.timeout(110):
        server.hold(LEASE, 1, PLAN_ID, experts)
        serving = asyncio.create_task(server.handle_session(device))
        await backbone.send(b"".join(encode(References((Reference(0, LEASE, 1, PLAN_ID),)))))
        await exchange(backbone, 0, 500)  # buffers and pools find their size
        grown = Grown()
        # Keeping the calls' rows would take 8 kB each, their outputs 16 kB: 24 MB and more.
        assert await exchange(backbone, 500, 3000) == (2700, 300)
        grown.check(10 * MB)
        await backbone.close()
        await serving


def filled_cache(
    folder: Path, plan: Plan, read: Callable[[ByteRange], memoryview]
) -> tuple[WeightCache, list[bytes]]:
    """A cache that holds the plan's window, and the hashes of its chunks."""
    chunks = [bytes(read(chunk)) for chunk in plan.window_chunks(plan.windows[0])]
    hashes = [hashlib.sha256(chunk).digest() for chunk in chunks]
    cache = WeightCache(folder, cap_bytes=1 << 40)
    entry = cache.open(plan, PLAN_ID, plan.windows[0], hashes)
    for index, chunk in enumerate(chunks):
        assert entry.store(index, chunk)
    entry.close()
    return cache, hashes


@pytest.mark.parametrize("precision", ["stored", "int8"])
async def test_windows_come_and_go_without_a_trace(tmp_path: Path, precision: str) -> None:
    """Each is mapped from the cache, made, served, and let go; one is about 6 MB."""
    plan, read, _ = tiny_plan(width=WIDTH, inner=64)
    execution: Execution = choose_execution(plan, precision, kernels.load(precision))
    cache, hashes = filled_cache(tmp_path, plan, read)
    async with ExpertServer() as server, asyncio.timeout(110):

        async def cycle(number: int) -> None:
            entry = cache.open(plan, PLAN_ID, plan.windows[0], hashes)
            assert len(entry.verify()) == len(hashes)
            data = entry.map()
            experts = WindowExperts.load(plan, plan.windows[0], precision, data.read, execution=execution)
            assert experts.kept_bytes > 7e5
            server.hold(LEASE, number, PLAN_ID, experts)
            backbone, device = session_pair()
            serving = asyncio.create_task(server.handle_session(device))
            await backbone.send(b"".join(encode(References((Reference(0, LEASE, number, PLAN_ID),)))))
            assert await exchange(backbone, 0, 9) == (9, 0)
            await backbone.close()
            await serving
            server.drop(LEASE)
            data.close()
            trim_memory()

        for number in range(1, 6):
            await cycle(number)
        grown = Grown()
        for number in range(6, 36):
            await cycle(number)
        grown.check(16 * MB)  # thirty windows are 190 MB, or 48 at int8
    cache.close()


async def test_a_window_is_freed_when_it_is_dropped_not_at_the_next_collection() -> None:
    """Neither the last call nor the thread that waits for more keeps it."""
    plan, read, _ = tiny_plan(width=WIDTH, inner=32)
    experts = WindowExperts.load(plan, plan.windows[0], "stored", read)
    watched = weakref.ref(experts)
    backbone, device = session_pair()
    async with ExpertServer() as server, asyncio.timeout(30):
        server.hold(LEASE, 1, PLAN_ID, experts)
        serving = asyncio.create_task(server.handle_session(device))
        await backbone.send(b"".join(encode(References((Reference(0, LEASE, 1, PLAN_ID),)))))
        assert await exchange(backbone, 0, 9) == (9, 0)
        gc.collect()
        gc.disable()
        try:
            assert await exchange(backbone, 0, 9) == (9, 0)
            server.drop(LEASE)
            del experts
            await until(lambda: watched() is None, timeout=5.0, what="the window's end")
        finally:
            gc.enable()
        await backbone.close()
        await serving

"""Kills: a node's download is killed 200 times at random bytes; the final bytes are compared one by one.

A server in this process gives ranges of random files and kills the downloading process, with SIGKILL, once
it has sent a random number of bytes to it; a fresh process goes on with the same cache. A download that ends
is compared with the truth, and another begins, until there were enough kills. Each process notes the chunks
that it began: those that a kill took from it are fetched again, and there may be one a stream at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from aiohttp import web

from kvasir_node.cache import CacheEntry, ChunkWriter, WeightCache
from kvasir_node.sources import mirror_source
from kvasir_node.weights import FetchConfig, fetch_window
from market.plans import GateFormula, LayerRecipe, Plan, PlanFile, PlanId, Source, TensorRecipe
from market.windows import Window

from . import Report

KILLS = 200
STREAMS = 3
PIECE_BYTES = 64 * 1024
CAP_BYTES = 1 << 32
GIVE_UP_S = 120.0
LARGE, SMALL, GAP = 4 << 20, 200_000, 100_000
"""Bytes of one expert in each of the two layers, and between two experts of the second."""

_WINDOW = Window(0, 2, 0, 8)
_ID = PlanId(b"\0" * 32)
_MARK = struct.Struct(">I")


@dataclass(slots=True)
class Tally:
    """What happened. `most_lost` is the most chunks that one kill took."""

    kills: int = 0
    downloads: int = 0
    wrong_chunks: int = 0
    refetched: int = 0
    most_lost: int = 0


def run(work_dir: Path | None) -> Report:
    """Kill, and compare with the promise."""
    with tempfile.TemporaryDirectory(prefix="kvasir-kills-", dir=work_dir) as name:
        tally = asyncio.run(kill_downloads(Path(name), kills=KILLS, rng=Random()))
    report = Report(
        {
            "kills": tally.kills,
            "downloads": tally.downloads,
            "wrong_chunks": tally.wrong_chunks,
            "refetched_chunks": tally.refetched,
            "refetched_most_per_kill": tally.most_lost,
            "streams": STREAMS,
        }
    )
    report.promise("the final bytes are always right", tally.wrong_chunks == 0 and tally.downloads > 0)
    report.promise("a kill costs at most one chunk a stream", tally.most_lost <= STREAMS)
    return report


async def kill_downloads(folder: Path, *, kills: int, rng: Random) -> Tally:
    """Kill downloads into `folder` that many times, then let the last one end."""
    files = [rng.randbytes(64 + 8 * LARGE), rng.randbytes(8 * (SMALL + GAP))]
    plan = _plan(files)
    truth = [files[chunk.file][chunk.start : chunk.end] for chunk in plan.window_chunks(_WINDOW)]
    hashes = [hashlib.sha256(chunk).digest() for chunk in truth]
    total = sum(map(len, truth))
    tally = Tally()
    async with _Server(files) as server:
        while tally.kills < kills or not tally.downloads:
            target = folder / str(tally.downloads)
            while not await _one_process(server, plan, hashes, target, total, tally, kills, rng):
                pass
            tally.downloads += 1
            tally.wrong_chunks += _wrong(target, plan, hashes, truth)
    return tally


async def _one_process(
    server: _Server,
    plan: Plan,
    hashes: list[bytes],
    target: Path,
    total: int,
    tally: Tally,
    kills: int,
    rng: Random,
) -> bool:
    """Start a process and kill it after a random number of bytes; whether it had finished before."""
    begun = _fresh(target)
    server.sent = 0
    server.limit = rng.randrange(total // 4) if tally.kills < kills else sys.maxsize
    arguments = (str(target), server.url, plan, hashes)
    child: BaseProcess
    if sys.platform == "win32":
        child = multiprocessing.get_context("spawn").Process(target=download, args=arguments)
    else:  # much faster: each process is a copy of one that has imported everything
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benches.kills"])
        child = context.Process(target=download, args=arguments)
    child.start()
    server.kill = child.kill
    try:
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.to_thread(child.join)
    finally:
        server.kill = None
        child.kill()
    if child.exitcode == 0:
        return True
    if server.sent < server.limit:
        sys.exit(f"the downloading process failed by itself, with status {child.exitcode}")
    lost = {index for (index,) in _MARK.iter_unpack(begun.read_bytes())} - _journalled(target)
    tally.kills += 1
    tally.refetched += len(lost)
    tally.most_lost = max(tally.most_lost, len(lost))
    return False


def _fresh(target: Path) -> Path:
    """The folder of one download; the file in which its next process notes the chunks that it begins."""
    target.mkdir(exist_ok=True)
    begun = target / "begun"
    begun.write_bytes(b"")
    return begun


def _wrong(target: Path, plan: Plan, hashes: list[bytes], truth: list[bytes]) -> int:
    """How many chunks of the finished window are not the bytes that were served."""
    cache = WeightCache(target / "cache", cap_bytes=CAP_BYTES)
    entry = cache.open(plan, _ID, _WINDOW, hashes)
    data = entry.map()
    chunks = plan.window_chunks(_WINDOW)
    wrong = sum(data.read(chunk) != right for chunk, right in zip(chunks, truth, strict=True))
    data.close()
    cache.close()
    return wrong


def _journalled(target: Path) -> set[int]:
    """The chunks that the cache's journal names: a header of 40 bytes, then one number each."""
    (journal,) = (target / "cache").glob("*/*.log")
    marks = journal.read_bytes()[40:]
    whole = len(marks) // _MARK.size * _MARK.size
    return {index for (index,) in _MARK.iter_unpack(marks[:whole])}


# --- the downloading process ----------------------------------------------------------------------------


def download(target: str, url: str, plan: Plan, hashes: list[bytes]) -> None:
    """Fetch the window into the cache of `target`, noting each chunk that is begun."""
    notes = os.open(Path(target) / "begun", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = CacheEntry.writer

    def noted(self: CacheEntry, index: int) -> ChunkWriter:
        os.write(notes, _MARK.pack(index))
        return original(self, index)

    CacheEntry.writer = noted  # type: ignore[method-assign]
    asyncio.run(_download(Path(target), url, plan, hashes))


async def _download(target: Path, url: str, plan: Plan, hashes: list[bytes]) -> None:
    cache = WeightCache(target / "cache", cap_bytes=CAP_BYTES)
    async with aiohttp.ClientSession() as http:
        data = await fetch_window(
            plan,
            _ID,
            _WINDOW,
            hashes,
            sources=[mirror_source(url, plan)],
            cache=cache,
            http=http,
            config=FetchConfig(streams=STREAMS),
        )
    data.close()


# --- the server -----------------------------------------------------------------------------------------


@dataclass
class _Server:
    """Gives ranges, and calls `kill` once `limit` bytes were sent to the current process."""

    files: list[bytes] = field(repr=False)
    url: str = ""
    sent: int = 0
    limit: int = 0
    kill: Callable[[], Any] | None = None
    runner: web.AppRunner = field(init=False)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = memoryview(self.files[int(request.match_info["file"])])
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"])
        assert match is not None
        first, end = int(match[1]), int(match[2]) + 1
        content = {
            "Content-Range": f"bytes {first}-{end - 1}/{len(data)}",
            "Content-Length": str(end - first),
        }
        response = web.StreamResponse(status=206, headers=content)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the process was killed
            for start in range(first, end, PIECE_BYTES):
                piece = data[start : min(start + PIECE_BYTES, end)]
                await response.write(piece)
                self.sent += len(piece)
                if self.sent >= self.limit and self.kill is not None:
                    self.kill()
        return response

    async def __aenter__(self) -> _Server:
        app = web.Application()
        app.router.add_get(r"/model-{file:\d}.safetensors", self.handle)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def _plan(files: list[bytes]) -> Plan:
    """Two layers of eight experts: large ones side by side in one file, small ones apart in the other."""
    offsets = tuple(number * (SMALL + GAP) for number in range(8))
    sources = (
        Source(file=0, dtype="U8", shape=(LARGE // 64, 64), start=64, stride=LARGE),
        Source(file=1, dtype="U8", shape=(SMALL // 64, 64), offsets=offsets),
    )
    return Plan(
        model="kills",
        revision="1",
        source="local",
        architecture="none",
        files=tuple(PlanFile(f"model-{number}.safetensors", len(data)) for number, data in enumerate(files)),
        width=64,
        wire_dtype="float32",
        precisions=("stored",),
        weighted=False,
        windows=(_WINDOW,),
        layers=tuple(
            LayerRecipe(number, 8, 2, GateFormula("swiglu", "silu"), (TensorRecipe("down", s.shape, (s,)),))
            for number, s in enumerate(sources)
        ),
    )

"""A small plan over random files, and a real HTTP server for its ranges that can be told to misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from market.plans import GateFormula, LayerRecipe, Plan, PlanFile, PlanId, Source, TensorRecipe
from market.windows import Window

WINDOW = Window(0, 2, 0, 4)
MIB = 1 << 20


def make_files(*, seed: int = 0, expert_bytes: int = MIB) -> list[bytes]:
    """Two files: layer 0 fused in the first (after 64 bytes), layer 1 in both, one tensor an expert."""
    rng = random.Random(seed)
    fused, single = 4 * expert_bytes, 2 * (expert_bytes + 16)
    return [rng.randbytes(64 + fused + single), rng.randbytes(32 + single)]


def make_plan(files: list[bytes], *, expert_bytes: int = MIB) -> Plan:
    """A plan of one window, `WINDOW`, with 2 layers of 4 experts; gaps between layer 1's."""
    shape = (expert_bytes // 64, 64)
    gap = expert_bytes + 16
    in_first = 64 + 4 * expert_bytes
    layers = (
        Source(file=0, dtype="U8", shape=shape, start=64, stride=expert_bytes),
        Source(
            file=0,
            dtype="U8",
            shape=shape,
            offsets=(in_first, in_first + gap, 32, 32 + gap),
            files=(0, 0, 1, 1),
        ),
    )
    return Plan(
        model="test",
        revision="r1",
        source="org/test",
        architecture="test",
        files=tuple(PlanFile(f"model-{number}.safetensors", len(data)) for number, data in enumerate(files)),
        width=64,
        wire_dtype="float32",
        precisions=("stored",),
        weighted=False,
        windows=(WINDOW,),
        layers=tuple(
            LayerRecipe(
                layer=number,
                experts=4,
                top_k=2,
                formula=GateFormula("swiglu", "silu"),
                tensors=(TensorRecipe("down", shape, (source,)),),
            )
            for number, source in enumerate(layers)
        ),
    )


PLAN_ID = PlanId(b"p" * 32)


def make_hashes(plan: Plan, files: list[bytes]) -> tuple[bytes, ...]:
    """The SHA-256 of every chunk of `WINDOW`."""
    return tuple(hashlib.sha256(files[c.file][c.start : c.end]).digest() for c in plan.window_chunks(WINDOW))


Misbehaviour = Callable[["Ask"], Awaitable[web.StreamResponse | None]]


@dataclass
class Ask:
    """One range request: the `count`-th (from 1), for `start` up to `end` of `file`; `data` is the truth."""

    count: int
    request: web.Request
    file: int
    start: int
    end: int
    data: bytes = field(repr=False)
    size: int

    def headers(self, **changes: str) -> dict[str, str]:
        """What an honest answer carries, with `changes` (underscores for dashes)."""
        honest = {
            "Content-Range": f"bytes {self.start}-{self.end - 1}/{self.size}",
            "ETag": f'"file-{self.file}"',
        }
        return honest | {name.replace("_", "-"): value for name, value in changes.items()}


@dataclass
class RangeServer:
    """Serves ranges of `files` by number or by name; `misbehave` may answer in its place."""

    files: list[bytes] = field(repr=False)
    misbehave: Misbehaviour | None = None
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    served_bytes: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["tail"].rsplit("/", 1)[-1]
        found = re.fullmatch(r"(?:model-)?(\d+)(?:\.safetensors)?", name)
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if found is None or span is None:
            raise web.HTTPNotFound
        file, start, end = int(found[1]), int(span[1]), int(span[2]) + 1
        self.asked.append((file, start, end))
        ask = Ask(
            len(self.asked), request, file, start, end, self.files[file][start:end], len(self.files[file])
        )
        if self.misbehave is not None and (answer := await self.misbehave(ask)) is not None:
            return answer
        self.served_bytes += len(ask.data)
        return web.Response(status=206, body=ask.data, headers=ask.headers())


@asynccontextmanager
async def serving(files: list[bytes], misbehave: Misbehaviour | None = None) -> AsyncIterator[RangeServer]:
    """A `RangeServer` on a free loopback port."""
    server = RangeServer(files, misbehave)
    app = web.Application()
    app.router.add_get("/{tail:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


def cut_off(ask: Ask, sent: int) -> Callable[[], Awaitable[web.StreamResponse]]:
    """An answer that promises the range and closes the connection after `sent` bytes of it."""

    async def answer() -> web.StreamResponse:
        response = web.StreamResponse(status=206, headers=ask.headers(Content_Length=str(len(ask.data))))
        await response.prepare(ask.request)
        await response.write(ask.data[:sent])
        assert ask.request.transport is not None
        ask.request.transport.close()
        return response

    return answer


async def stall(ask: Ask) -> web.StreamResponse:
    """An answer that sends nothing until the client goes away."""
    response = web.StreamResponse(status=206, headers=ask.headers(Content_Length=str(len(ask.data))))
    await response.prepare(ask.request)
    await asyncio.Event().wait()
    return response

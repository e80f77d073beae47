"""The processes of the call suite: a worker that serves made-up windows, and the backbone that calls it.

    python -m benches.call_roles worker SEED RELAY_URL
    python -m benches.call_roles backbone SEED DIRECT_URL RELAY_URL

Both are the real parts: `ExpertServer` behind sessions on the one side, `SwarmDispatcher` called from a step
thread over `DeviceLink` on the other. Each reads what to run, a line each, and answers with seconds: the
backbone makes calls, the worker runs the same kernel on the same weights bare.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import torch
from aiohttp import web
from torch import Tensor

from kvasir_backbone.audit import NormBand
from kvasir_backbone.auditing import References, SampledAuditor
from kvasir_backbone.credit import CreditBook, Totals
from kvasir_backbone.dispatch import CallEnd, OwnerBook, SwarmDispatcher
from kvasir_backbone.links import DeviceLink
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.roster import Replica, Roster, WindowMap
from kvasir_backbone.seam import RowKey
from kvasir_node import kernels
from kvasir_node.calls import Buffers, Reference
from kvasir_node.execution import choose_execution
from kvasir_node.experts import WindowExperts
from kvasir_node.serving import ExpertServer
from market.plans import (
    ByteRange,
    GateFormula,
    LayerRecipe,
    Plan,
    PlanFile,
    PlanId,
    Source,
    TensorRecipe,
)
from market.windows import Window
from relay.channel import Channel
from relay.direct import DirectListener, connect_direct
from relay.identity import PublicKey
from relay.loop import run
from relay.secure import SecureSession

from .relay_swarm import Device, Swarm, quiet

HIDDEN, EXPERTS, LAYER = 3072, 8, 0
DEADLINE_S = 30.0
PAUSE_S = 0.001
"""Before each run of the bare kernel: about what a call takes beside its kernel, so that both find the caches
in the same state."""


@dataclass(frozen=True)
class Case:
    """One made-up window: `width` of its experts, `dtype` of its weights; rows travel in bf16."""

    name: str
    width: int
    dtype: torch.dtype

    @property
    def number(self) -> int:
        """Its place in `CASES`: reference, lease and plan follow from it."""
        return list(CASES).index(self.name) + 1

    @property
    def lease(self) -> bytes:
        """The lease under which the worker serves it."""
        return bytes((self.number,)) * 16

    @property
    def plan_id(self) -> PlanId:
        """The plan that it is of."""
        return PlanId(bytes((self.number,)) * 32)

    def plan(self) -> Plan:
        """A plan of one layer, one window, its experts in one file."""
        place, tensors = 0, []
        shapes = {"gate": (self.width, HIDDEN), "up": (self.width, HIDDEN), "down": (HIDDEN, self.width)}
        for role, shape in shapes.items():
            size = shape[0] * shape[1] * self.dtype.itemsize
            name = {torch.bfloat16: "BF16", torch.float32: "F32"}[self.dtype]
            tensors.append(TensorRecipe(role, shape, (Source(0, name, shape, place, size),)))
            place += size * EXPERTS
        return Plan(
            model="call",
            revision="0" * 64,
            source="local",
            architecture="Call",
            files=(PlanFile("model.safetensors", place),),
            width=HIDDEN,
            wire_dtype="bfloat16",
            precisions=("stored",),
            weighted=False,
            windows=(Window(LAYER, LAYER + 1, 0, EXPERTS),),
            layers=(LayerRecipe(LAYER, EXPERTS, EXPERTS, GateFormula("swiglu", "silu"), tuple(tensors)),),
        )

    def read(self) -> Callable[[ByteRange], memoryview]:
        """The bytes of its file: Gaussian weights of variance 1 / hidden, the same in every process."""
        count = self.plan().files[0].size // self.dtype.itemsize
        generator = torch.Generator().manual_seed(self.number)
        values = (torch.randn(count, generator=generator) / HIDDEN**0.5).to(self.dtype)
        whole = values.view(torch.uint8).numpy().data
        return lambda span: whole[span.start : span.end]

    def experts(self) -> WindowExperts:
        """The window in memory, run by the fastest execution there is."""
        plan = self.plan()
        execution = choose_execution(plan, "stored", kernels.load("stored"))
        return WindowExperts.load(plan, plan.windows[0], "stored", self.read(), execution=execution)


CASES = {
    case.name: case
    for case in (
        Case("narrow", 64, torch.bfloat16),
        Case("narrow_fp32", 64, torch.float32),
        Case("wide", 1024, torch.bfloat16),
    )
}


def say(value: object) -> None:
    """One line of JSON to the parent."""
    print(json.dumps(value), flush=True)


def made_row() -> Tensor:
    """One hidden row, as it goes over the wire."""
    return torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)


def timed(run_once: Callable[[], object], runs: int, pause_s: float = 0.0) -> list[float]:
    """Seconds of each of `runs`, with a pause before each."""
    seconds = []
    with torch.inference_mode():
        for _ in range(runs):
            if pause_s:
                time.sleep(pause_s)
            started = time.perf_counter()
            run_once()
            seconds.append(time.perf_counter() - started)
    return seconds


def bare(experts: WindowExperts, row: Tensor) -> Callable[[], object]:
    """The kernel alone: every expert on one row, read and written in bf16 where they lie."""
    direct = experts.direct
    if direct is None:
        rows = row.float().contiguous()
        return lambda: [experts.run(LAYER, number, rows) for number in range(EXPERTS)]
    outputs = torch.empty(EXPERTS, HIDDEN, dtype=row.dtype)
    arguments = (
        [direct.addresses[LAYER, number] for number in range(EXPERTS)],
        [1] * EXPERTS,
        [row.data_ptr()] * EXPERTS,
        [outputs.data_ptr() + number * HIDDEN * row.element_size() for number in range(EXPERTS)],
        (direct.kind, direct.kind),
        direct.scratch,
    )

    def run_once() -> tuple[Tensor, Tensor]:
        direct.kernel.run_rows(*arguments)
        return row, outputs  # read and written by address: they live as long as this does

    return run_once


# --- the worker ---------------------------------------------------------------------------------------


async def worker(swarm: Swarm, relay_url: str) -> None:
    """Serve all cases, at a port of its own and at the relay, until the input closes."""
    device = swarm.device(0)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ExpertServer())
        windows = {case.name: case.experts() for case in CASES.values()}
        for case in CASES.values():
            server.hold(case.lease, 1, case.plan_id, windows[case.name])

        async def serve(channel: Channel) -> None:
            await server.handle_session(await swarm.accept(channel, device))

        app = web.Application()
        DirectListener(serve).attach(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = swarm.client(relay_url, device.key, "device", http, on_circuit=serve)
        task = asyncio.create_task(client.run())
        await client.wait_connected(30.0)
        say(int(runner.addresses[0][1]))
        await asyncio.to_thread(_run_bare, windows)
        task.cancel()


def _run_bare(windows: dict[str, WindowExperts]) -> None:
    """A thread of the worker: each line of the input names a case and how often to run its kernel."""
    torch.set_num_threads(1)
    row = made_row()
    kernel = {name: bare(experts, row) for name, experts in windows.items()}
    for line in sys.stdin:
        name, runs = json.loads(line)
        say(timed(kernel[name], runs, PAUSE_S))


# --- the backbone -------------------------------------------------------------------------------------


class Line:
    """The way to the worker on one path: `dispatch.Lines` over one link."""

    def __init__(self, link: DeviceLink, view: Roster, loop: asyncio.AbstractEventLoop) -> None:
        self._link, self._view, self._loop = link, view, loop

    def roster(self) -> Roster:
        """See `dispatch.Lines.roster`."""
        return self._view

    def submit(
        self,
        device: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        *,
        answer_bytes: int,
    ) -> None:
        """See `dispatch.Lines.submit`."""
        self._loop.call_soon_threadsafe(self._link.submit, call_id, message, done, answer_bytes)

    def cancel(self, device: PublicKey, call_id: int) -> None:
        """See `dispatch.Lines.cancel`."""
        self._loop.call_soon_threadsafe(self._link.cancel, call_id)

    def tripped(self, device: PublicKey, reason: str) -> None:
        """See `dispatch.Lines.tripped`."""
        print(f"a call was not answered: {reason}", file=sys.stderr, flush=True)

    def stale(self, replicas: Sequence[Replica], reason: str) -> None:
        """See `dispatch.Lines.stale`."""
        print(f"a lease was refused: {reason}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Setup:
    """What is called in one case on one path, and the same experts here."""

    dispatcher: SwarmDispatcher
    experts: WindowExperts
    close: Callable[[], None]


def setup(
    case: Case,
    experts: WindowExperts,
    read: Callable[[ByteRange], memoryview],
    link: DeviceLink,
    loop: asyncio.AbstractEventLoop,
) -> Setup:
    """A dispatcher with everything that a backbone's has: audits, credit, the norm band, the fallback."""
    plan = case.plan()
    windows = WindowMap(plan)
    wallet = PublicKey(bytes(32))
    replica = Replica(
        link.device, wallet, case.lease, 1, case.number, plan.windows[0], experts.numerics, "stored"
    )
    view = Roster(windows, {0: (replica,)}, frozenset({(case.lease, 1)}))
    owners, book, band = OwnerBook(), CreditBook(), NormBand()
    owners.ensure(link.device)
    book.open(link.device, Totals(wallet))
    local = LocalExperts(read, plan, execution=experts.execution)
    references = References(lambda precision: local)

    def verdict(replica: Replica, reason: str, d: float) -> None:
        print(f"an output was wrong: {reason}", file=sys.stderr, flush=True)

    auditor = SampledAuditor(references, band, on_verdict=verdict, rng=random.Random(0))
    dispatcher = SwarmDispatcher(
        plan,
        Line(link, view, loop),
        owners=owners,
        book=book,
        band=band,
        reference=references,
        fallback=True,
        auditor=auditor,
        rng=random.Random(0),
    )
    return Setup(dispatcher, experts, auditor.close)


def calls(found: Setup, runs: int) -> list[float]:
    """Seconds of calls of one token to all experts, through `dispatch`."""
    row, ids, keys = made_row(), torch.arange(EXPERTS).unsqueeze(0), [RowKey(1, 0, 0, True)]
    return timed(lambda: found.dispatcher.dispatch(LAYER, row, ids, keys, DEADLINE_S), runs)


def check(found: Setup) -> None:
    """The outputs of the call are those of the kernel here, bit for bit."""
    with torch.inference_mode():
        row, ids = made_row(), torch.arange(EXPERTS).unsqueeze(0)
        out = found.dispatcher.dispatch(LAYER, row, ids, [RowKey(1, 0, 0, True)], DEADLINE_S)
        same = torch.stack([found.experts.run(LAYER, number, row)[0] for number in range(EXPERTS)])
        assert torch.equal(out[0], same), "the worker's outputs are not those computed here"
    assert not found.dispatcher.stats.fallback_rows, "the call was not answered"


async def backbone(swarm: Swarm, direct_url: str, relay_url: str) -> None:
    """Measure what the parent asks for, line by line, until the input closes."""
    device = swarm.device(0)
    loop = asyncio.get_running_loop()
    windows = {case.name: case.experts() for case in CASES.values()}  # before anything waits for this loop
    reads = {case.name: case.read() for case in CASES.values()}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = swarm.client(relay_url, swarm.backbone.key, "backbone", http)
        tasks = [asyncio.create_task(client.run())]
        await client.wait_connected(30.0)

        async def by_relay() -> SecureSession:
            return await swarm.connect(await client.open(device.key.public, timeout=10.0), device)

        async def directly() -> SecureSession:
            channel = await connect_direct(direct_url, device.key.public, http=http, timeout=10.0)
            return await swarm.connect(channel, device)

        links = {"direct": _link(device, directly), "relay": _link(device, by_relay)}
        for link in links.values():
            tasks.append(asyncio.create_task(link.run()))
            async with asyncio.timeout(30.0):
                await link.up.wait()
        setups: dict[tuple[str, str], Setup] = {}
        for case in CASES.values():
            for path, link in links.items():
                setups[case.name, path] = setup(case, windows[case.name], reads[case.name], link, loop)
        await asyncio.to_thread(_answer, setups)
        for found in setups.values():
            found.close()
        for task in tasks:
            task.cancel()


def _link(device: Device, dial: Callable[[], Any]) -> DeviceLink:
    return DeviceLink(
        device.key.public,
        dial=dial,
        references=lambda: [Reference(case.number, case.lease, 1, case.plan_id) for case in CASES.values()],
        on_up=lambda: None,
        on_down=lambda: None,
        on_ack=lambda ack: None,
        on_draining=lambda reason: None,
    )


def _answer(setups: dict[tuple[str, str], Setup]) -> None:
    """The step thread: each line of the input names a case, a path and a number of calls."""
    torch.set_num_threads(1)
    for found in setups.values():
        check(found)
    say("ready")
    for line in sys.stdin:
        name, path, runs = json.loads(line)
        say(calls(setups[name, path], runs))


def main(arguments: list[str]) -> None:
    """Run one role."""
    quiet()
    torch.set_num_threads(1)
    swarm = Swarm(arguments[1])
    run(worker(swarm, *arguments[2:]) if arguments[0] == "worker" else backbone(swarm, *arguments[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])

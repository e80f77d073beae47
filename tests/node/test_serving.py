"""The serving of expert calls, over sessions in memory and with real experts."""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from kvasir_node import compute, kernels, peers
from kvasir_node import serving as serving_module
from kvasir_node.calls import (
    Call,
    Cancel,
    Draining,
    Group,
    Message,
    Notice,
    ReceiptAck,
    ReceiptMessage,
    Reference,
    References,
    Refusal,
    Reply,
    decode,
    encode,
)
from kvasir_node.execution import choose_execution
from kvasir_node.experts import WindowExperts
from kvasir_node.kernels.build import find_compiler
from kvasir_node.serving import ExpertServer, ServingLimits
from kvasir_node.tensors import bytes_to_rows, partial_sums, rows_to_bytes
from market.plans import Plan, PlanId
from market.windows import Window
from relay.errors import ConfigError, Unreachable
from tests.support import relays
from tests.support.experts import PLAN_ID, tiny_plan
from tests.support.fake_link import channel_pair
from tests.support.sessions import MemorySession, session_pair
from tests.support.waiting import until

LEASE = b"lease-0123456789"
OTHER = b"other-0123456789"
TIMEOUT = 10.0


class Backbone:
    """The other end of a session, as a backbone uses it."""

    def __init__(self, session: MemorySession, plan: Plan) -> None:
        self.session = session
        self.plan = plan
        self.numbers = itertools.count(1)

    async def send(self, message: Message) -> None:
        await self.session.send(encode(message))

    async def receive(self) -> Message:
        async with asyncio.timeout(TIMEOUT):
            return decode(await self.session.receive())

    async def announce(
        self, ref: int = 0, lease: bytes = LEASE, epoch: int | None = 1, plan: bytes = PLAN_ID
    ) -> None:
        await self.send(References((Reference(ref, lease, epoch, plan),)))

    def make(
        self,
        rows: Tensor,
        ids: Sequence[Sequence[int]],
        *,
        ref: int = 0,
        layer: int = 0,
        deadline_ms: int = 10_000,
        weights: Tensor | None = None,
    ) -> Call:
        group = Group(ref, tuple(map(len, ids)), tuple(itertools.chain.from_iterable(ids)))
        carried = None if weights is None else rows_to_bytes(weights)
        data = rows_to_bytes(rows)
        return Call(next(self.numbers), layer, len(rows), deadline_ms, (group,), data, carried)

    async def call(self, rows: Tensor, ids: Sequence[Sequence[int]], **more: Any) -> Reply | Refusal:
        call = self.make(rows, ids, **more)
        await self.send(call)
        answer = await self.receive()
        assert isinstance(answer, Reply | Refusal)
        assert answer.call == call.id
        return answer

    def outputs(self, reply: Message) -> Tensor:
        assert isinstance(reply, Reply), reply
        return bytes_to_rows(reply.rows, reply.outputs, self.plan.width, self.plan.wire_dtype)


class Gate:
    """Experts that wait at a gate, so that a test decides when the compute thread goes on."""

    def __init__(self, experts: WindowExperts) -> None:
        self.reached = threading.Semaphore(0)
        self.pass_on = threading.Semaphore(0)
        self.ran: list[tuple[int, int, int]] = []
        self._honest = experts.run
        experts.run = self.run  # type: ignore[method-assign]

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        self.reached.release()
        assert self.pass_on.acquire(timeout=TIMEOUT)
        self.ran.append((layer, expert, rows.shape[0]))
        return self._honest(layer, expert, rows)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.acquire, timeout=TIMEOUT)

    def open(self, count: int = 1_000) -> None:
        for _ in range(count):
            self.pass_on.release()


class Swarm:
    """One server holding one window, and as many sessions with it as a test wants."""

    def __init__(self, server: ExpertServer, plan: Plan, experts: WindowExperts, tasks: asyncio.TaskGroup):
        self.server = server
        self.plan = plan
        self.experts = experts
        self.tasks = tasks

    async def session(self, *, bound: int = 1024, announced: bool = True) -> tuple[Backbone, MemorySession]:
        ours, theirs = session_pair(bound=bound)
        self.tasks.create_task(self.server.handle_session(theirs))
        backbone = Backbone(ours, self.plan)
        if announced:
            await backbone.announce()
        return backbone, theirs


@asynccontextmanager
async def serving(limits: ServingLimits | None = None, *, options: Any = None, **plan: Any) -> AsyncIterator[
    Swarm
]:  # fmt: skip
    made, read, _ = tiny_plan(**plan)
    experts = WindowExperts.load(made, made.windows[0], "stored", read)
    async with ExpertServer(limits, **(options or {})) as server:
        server.hold(LEASE, 1, PLAN_ID, experts)
        async with asyncio.TaskGroup() as tasks:
            swarm = Swarm(server, made, experts, tasks)
            watched: list[MemorySession] = []
            original = swarm.session

            async def session(**more: Any) -> tuple[Backbone, MemorySession]:
                backbone, theirs = await original(**more)
                watched.append(backbone.session)
                return backbone, theirs

            swarm.session = session  # type: ignore[method-assign]
            try:
                yield swarm
            finally:
                for end in watched:
                    await end.close()


def expected(experts: WindowExperts, rows: Tensor, ids: Sequence[Sequence[int]], layer: int = 0) -> Tensor:
    """One output a (row, id), computed one row at a time."""
    return torch.cat([experts.run(layer, e, rows[i : i + 1]) for i, row in enumerate(ids) for e in row])


# --- right answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "float16"])
async def test_outputs_come_in_the_order_of_the_request(wire_dtype: str) -> None:
    async with serving(wire_dtype=wire_dtype) as swarm:
        backbone, _ = await swarm.session()
        dtype = getattr(torch, wire_dtype)
        rows = torch.randn(4, swarm.plan.width).to(dtype)
        ids = [[3, 0, 7], [1], [7, 3], [0, 1, 2, 3]]
        reply = await backbone.call(rows, ids, layer=1)
        assert torch.equal(backbone.outputs(reply), expected(swarm.experts, rows, ids, 1))
        assert isinstance(reply, Reply)
        assert (reply.outputs, reply.weighted) == (10, False)


async def test_one_row_for_all_experts_and_all_rows_for_one() -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session()
        one, many = torch.randn(1, swarm.plan.width), torch.randn(20, swarm.plan.width)
        for rows, ids in ((one, [[7, 6, 5, 4, 3, 2, 1, 0]]), (many, [[5]] * 20)):
            reply = await backbone.call(rows, ids)
            assert torch.equal(backbone.outputs(reply), expected(swarm.experts, rows, ids))


async def test_one_message_for_several_leases_of_a_device() -> None:
    windows = (Window(0, 2, 0, 4), Window(0, 2, 4, 8))
    plan, read, _ = tiny_plan(windows=windows)
    whole = WindowExperts.load(plan, Window(0, 2, 0, 8), "stored", read)
    async with serving(windows=windows) as swarm:
        second = WindowExperts.load(plan, windows[1], "stored", read)
        swarm.server.hold(OTHER, 7, PLAN_ID, second)
        backbone, _ = await swarm.session()
        await backbone.announce(9, OTHER, 7)
        rows = torch.randn(3, plan.width)
        groups = (Group(9, (1, 0, 2), (4, 6, 7)), Group(0, (2, 1, 0), (1, 3, 0)))
        await backbone.send(Call(5, 1, 3, 5_000, groups, rows_to_bytes(rows)))
        outputs = backbone.outputs(await backbone.receive())
        order = [(0, 4), (2, 6), (2, 7), (0, 1), (0, 3), (1, 0)]
        alone = torch.cat([whole.run(1, expert, rows[i : i + 1]) for i, expert in order])
        assert torch.equal(outputs, alone)
        held = {holding.lease: holding.served for holding in swarm.server.holdings}
        assert (held[LEASE].outputs, held[OTHER].outputs) == (3, 3)
        assert (held[LEASE].rows, held[OTHER].rows) == (2, 2)


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
async def test_a_weighted_call_returns_one_partial_sum_a_row(wire_dtype: str) -> None:
    async with serving(weighted=True, wire_dtype=wire_dtype) as swarm:
        backbone, _ = await swarm.session()
        dtype = getattr(torch, wire_dtype)
        rows, weights = torch.randn(3, swarm.plan.width).to(dtype), torch.rand(6)
        ids = [[4, 2, 1], [2], [1, 0]]
        reply = await backbone.call(rows, ids, weights=weights)
        assert isinstance(reply, Reply)
        assert (reply.outputs, reply.weighted) == (3, True)
        singles = expected(swarm.experts, rows.float(), ids)
        sums = torch.zeros(3, swarm.plan.width)
        for output, (row, weight) in enumerate(zip([0, 0, 0, 1, 2, 2], weights, strict=True)):
            sums[row] += singles[output] * weight
        assert torch.equal(backbone.outputs(reply), sums.to(dtype))
        unweighted = await backbone.call(rows, ids)
        assert torch.equal(backbone.outputs(unweighted), singles.to(dtype))


def test_partial_sums_add_in_the_order_of_the_ids() -> None:
    outputs = torch.tensor([[1e8], [1.0], [-1e8], [3.0]])
    rows = [0, 0, 0, 1]
    assert partial_sums(outputs, torch.ones(4), rows, 2).tolist() == [[0.0], [3.0]]
    swapped = outputs[[0, 2, 1, 3]]
    assert partial_sums(swapped, torch.ones(4), rows, 2).tolist() == [[1.0], [3.0]]


async def test_the_session_delivers_nothing_but_references_ids_and_rows() -> None:
    """What a worker can see of a call: the bytes are exactly header, ids and hidden rows."""
    async with serving() as swarm:
        backbone, theirs = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        call = backbone.make(rows, [[2, 5]])
        await backbone.send(call)
        await backbone.receive()
        _, raw = theirs.delivered
        head = struct.pack(">BBQHIIH", 2, 0, call.id, 0, 1, 10_000, 1) + struct.pack(">HHHH", 0, 2, 2, 5)
        assert raw == head + bytes(-len(head) % 16) + bytes(rows_to_bytes(rows))


# --- batches across callers ---------------------------------------------------------------------------


async def test_callers_share_one_run_of_an_expert_and_get_the_same_bits_as_alone() -> None:
    async with serving() as swarm:
        gate = Gate(swarm.experts)
        sessions = [(await swarm.session())[0] for _ in range(3)]
        rows = [torch.randn(1, swarm.plan.width) for _ in sessions]
        calls = [backbone.make(rows[n], [[6, 2 + n]]) for n, backbone in enumerate(sessions)]
        await sessions[0].send(calls[0])
        await (
            gate.wait()
        )  # expert 6 runs for the first; the others arrive meanwhile and share expert 2's turn
        for backbone, call in zip(sessions[1:], calls[1:], strict=True):
            await backbone.send(call)
        await until(lambda: swarm.server._waiting_calls == 3)
        gate.open()
        replies = [await backbone.receive() for backbone in sessions]
        assert gate.ran == [(0, 6, 1), (0, 2, 1), (0, 6, 2), (0, 3, 1), (0, 4, 1)]
        for n, (backbone, reply) in enumerate(zip(sessions, replies, strict=True)):
            alone = torch.cat([gate._honest(0, e, rows[n]) for e in (6, 2 + n)])
            assert torch.equal(backbone.outputs(reply), alone)


async def test_the_loop_stays_free_while_experts_compute() -> None:
    async with serving() as swarm:
        gate = Gate(swarm.experts)
        backbone, _ = await swarm.session()
        await backbone.send(backbone.make(torch.randn(1, swarm.plan.width), [[1]]))
        await gate.wait()
        refused = await backbone.call(torch.randn(1, swarm.plan.width), [[1]], ref=5)
        assert isinstance(refused, Refusal)  # answered while the thread is busy
        gate.open()
        assert isinstance(await backbone.receive(), Reply)


# --- refusals -----------------------------------------------------------------------------------------


def refused(answer: Message) -> tuple[str, str]:
    assert isinstance(answer, Refusal), answer
    return answer.code, answer.message


async def test_references_and_epochs() -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session(announced=False)
        rows = torch.randn(1, swarm.plan.width)
        assert refused(await backbone.call(rows, [[0]]))[0] == "not_mine"  # never announced
        for epoch in (0, 2):
            await backbone.announce(epoch=epoch)
            code, message = refused(await backbone.call(rows, [[0]]))
            assert code == "stale_epoch"
            assert message == f"the lease is at epoch 1, the call says {epoch}"
        await backbone.announce(lease=OTHER)
        assert refused(await backbone.call(rows, [[0]]))[0] == "not_mine"
        await backbone.announce(plan=bytes(32))
        assert refused(await backbone.call(rows, [[0]]))[0] == "not_mine"
        await backbone.announce()
        assert isinstance(await backbone.call(rows, [[0]]), Reply)
        await backbone.announce(epoch=None)  # taken back
        assert refused(await backbone.call(rows, [[0]]))[0] == "not_mine"
        assert swarm.server.served.refusals == {"not_mine": 4, "stale_epoch": 2}


async def test_references_belong_to_one_session() -> None:
    async with serving() as swarm:
        await swarm.session()
        other, _ = await swarm.session(announced=False)
        assert refused(await other.call(torch.randn(1, swarm.plan.width), [[0]]))[0] == "not_mine"


async def test_a_lease_that_moved_on_or_away() -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        swarm.server.hold(LEASE, 2, PLAN_ID, swarm.experts)
        assert refused(await backbone.call(rows, [[0]]))[0] == "stale_epoch"
        await backbone.announce(epoch=2)
        assert isinstance(await backbone.call(rows, [[0]]), Reply)
        swarm.server.drain_lease(LEASE)
        assert refused(await backbone.call(rows, [[0]])) == ("draining", "this lease is being given back")
        swarm.server.drop(LEASE)
        assert refused(await backbone.call(rows, [[0]]))[0] == "not_mine"


async def test_calls_that_do_not_fit_the_plan() -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session()
        width = swarm.plan.width
        good = torch.randn(2, width)
        for rows, ids, more, code, words in (
            (torch.randn(2, width + 1), [[0], [1]], {}, "bad_request", "2 rows of this plan are 192 bytes"),
            (good, [[0], [8]], {}, "not_mine", "layer 0, expert 8 is not in L00-01/E000-007"),
            (good, [[0], [1]], {"layer": 2}, "not_mine", "layer 2, expert 0"),
            (good, [[0, 0], [1]], {}, "bad_request", "row 0 asks for expert 0 twice"),
            (good, [[0], [1]], {"weights": torch.rand(2)}, "bad_request", "not of a weighted swarm"),
        ):
            answer = refused(await backbone.call(rows, ids, **more))
            assert answer[0] == code
            assert words in answer[1]
        assert isinstance(await backbone.call(good, [[0], [1]]), Reply)  # and the session goes on


async def test_leases_of_two_plans_in_one_call() -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session()
        swarm.server.hold(OTHER, 1, PlanId(bytes(32)), swarm.experts)
        await backbone.announce(1, OTHER, 1, bytes(32))
        rows = torch.randn(1, swarm.plan.width)
        groups = (Group(0, (1,), (0,)), Group(1, (1,), (1,)))
        await backbone.send(Call(1, 0, 1, 5_000, groups, rows_to_bytes(rows)))
        assert refused(await backbone.receive())[0] == "bad_request"


async def test_an_answer_over_the_message_bound_is_refused() -> None:
    async with serving(width=4096, inner=1, experts=2, layers=1) as swarm:
        wide = WindowExperts(swarm.plan, swarm.plan.windows[0], "stored", {})
        swarm.server.hold(LEASE, 1, PLAN_ID, wide)
        backbone, _ = await swarm.session()
        rows = torch.zeros(2100, 4096)
        code, message = refused(await backbone.call(rows, [[0, 1]] * 2100))
        assert code == "bad_request"
        assert "send fewer rows" in message


async def test_a_full_queue_says_so_and_when_to_come_back() -> None:
    async with serving(ServingLimits(max_calls=2)) as swarm:
        gate = Gate(swarm.experts)
        backbone, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        for _ in range(2):
            await backbone.send(backbone.make(rows, [[0]]))
        await gate.wait()
        answer = await backbone.call(rows, [[0]])
        assert refused(answer)[0] == "overloaded"
        assert isinstance(answer, Refusal)
        assert answer.retry_after_ms is not None
        gate.open()
        assert [type(await backbone.receive()) for _ in range(2)] == [Reply, Reply]
        assert isinstance(await backbone.call(rows, [[0]]), Reply)


async def test_bytes_are_bounded_too() -> None:
    async with serving(ServingLimits(max_bytes=1000)) as swarm:
        backbone, _ = await swarm.session()
        assert isinstance(await backbone.call(torch.randn(1, swarm.plan.width), [[0]]), Reply)
        big = torch.randn(8, swarm.plan.width)
        assert refused(await backbone.call(big, [[0]] * 8))[0] == "overloaded"


async def test_a_call_whose_turn_comes_too_late_is_told_so() -> None:
    time = [0.0]
    async with serving(options={"clock": lambda: time[0]}) as swarm:
        gate = Gate(swarm.experts)
        backbone, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        await backbone.send(backbone.make(rows, [[0]], deadline_ms=60_000))
        await gate.wait()
        await backbone.send(backbone.make(rows, [[1]], deadline_ms=500))
        await until(lambda: swarm.server._waiting_calls == 2)
        time[0] = 1.0
        gate.open()
        first, second = await backbone.receive(), await backbone.receive()
        assert isinstance(first, Reply)
        assert first.service_us == 1_000_000
        assert refused(second)[0] == "expired"
        assert gate.ran == [(0, 0, 1)]


async def test_an_expert_that_fails_fails_only_its_calls() -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session()
        honest = swarm.experts.run

        def broken(layer: int, expert: int, rows: Tensor) -> Tensor:
            if expert == 3:
                raise MemoryError("no room")
            return honest(layer, expert, rows)

        swarm.experts.run = broken  # type: ignore[method-assign]
        rows = torch.randn(1, swarm.plan.width)
        with structlog.testing.capture_logs() as logs:
            assert refused(await backbone.call(rows, [[0, 3]]))[0] == "internal"
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["batch.failed"]
        reply = await backbone.call(rows, [[0, 4]])
        assert torch.equal(backbone.outputs(reply), expected(swarm.experts, rows, [[0, 4]]))


async def test_no_memory_for_a_call_fails_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as swarm:
        backbone, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)

        def no_room(*_: object) -> Tensor:
            raise MemoryError("no room")

        with monkeypatch.context() as patch, structlog.testing.capture_logs():
            patch.setattr(compute, "bytes_to_rows", no_room)
            assert refused(await backbone.call(rows, [[0]]))[0] == "internal"
            patch.undo()
            patch.setattr(compute, "rows_to_bytes", no_room)
            assert refused(await backbone.call(rows, [[0]]))[0] == "internal"
        assert isinstance(await backbone.call(rows, [[0]]), Reply)
        assert swarm.server._waiting_calls == 0


# --- sessions -----------------------------------------------------------------------------------------


async def test_a_closed_session_takes_its_waiting_calls_with_it() -> None:
    async with serving() as swarm:
        gate = Gate(swarm.experts)
        staying, _ = await swarm.session()
        leaving, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        await staying.send(staying.make(rows, [[0]]))
        await gate.wait()
        for _ in range(5):
            await leaving.send(leaving.make(rows, [[1, 2]]))
        await until(lambda: swarm.server._waiting_calls == 6)
        await leaving.session.close()
        await until(lambda: len(swarm.server._peers) == 1)
        gate.open()
        assert isinstance(await staying.receive(), Reply)
        await until(lambda: swarm.server._waiting_calls == 0)
        assert gate.ran == [(0, 0, 1)]
        assert swarm.server._waiting_bytes == 0


async def test_a_cancelled_call_is_refused_without_being_computed_and_unknown_ids_are_ignored() -> None:
    async with serving() as swarm:
        gate = Gate(swarm.experts)
        backbone, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        first, second = backbone.make(rows, [[0]]), backbone.make(rows, [[1, 2]])
        await backbone.send(first)
        await gate.wait()
        await backbone.send(second)
        for call in (second.id, 1 << 40):
            await backbone.send(Cancel(call))
        await until(lambda: any(job.work.cancelled for peer in swarm.server._peers for job in peer.jobs))
        gate.open()
        reply, refusal = await backbone.receive(), await backbone.receive()
        assert isinstance(reply, Reply)
        assert refused(refusal)[0] == "expired"
        assert isinstance(refusal, Refusal)
        assert refusal.call == second.id
        assert gate.ran == [(0, 0, 1)]
        await backbone.send(Cancel(first.id))  # it is answered already
        assert isinstance(await backbone.call(rows, [[3]]), Reply)


# --- where the C core runs them -----------------------------------------------------------------------


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
async def test_the_core_gives_the_same_bits_alone_together_and_on_the_loop(
    wire_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read, _ = tiny_plan(wire_dtype=wire_dtype, weighted=True)
    execution = choose_execution(made, "stored", kernels.load("stored"))
    experts = WindowExperts.load(made, made.windows[0], "stored", read, execution=execution)
    assert experts.direct is not None
    rows = torch.randn(5, made.width).to(getattr(torch, wire_dtype))
    ids = [[6, 2], [2], [0, 1, 2, 3, 4, 5, 6, 7], [7, 6], [2]]
    alone = expected(experts, rows, ids)
    weights = torch.ones(alone.shape[0])
    async with ExpertServer() as server, asyncio.TaskGroup() as tasks:
        server.hold(LEASE, 1, PLAN_ID, experts)
        swarm = Swarm(server, made, experts, tasks)
        sessions = [(await swarm.session())[0] for _ in range(4)]
        for inline in (0.0, 1e9):
            monkeypatch.setattr(serving_module, "INLINE_S", inline)
            for backbone in sessions[:2]:  # one after another: each runs whole
                assert torch.equal(backbone.outputs(await backbone.call(rows, ids)), alone)
                assert refused(await backbone.call(rows, [[1, 1]] * 5))[0] == "bad_request"
                assert refused(await backbone.call(rows, [[99]] * 5))[0] == "not_mine"
            for backbone in sessions:  # at once: they share runs
                await backbone.send(backbone.make(rows, ids))
            await sessions[0].send(sessions[0].make(rows, ids, weights=weights))
            for backbone in sessions:
                assert torch.equal(backbone.outputs(await backbone.receive()), alone)
            summed = await sessions[0].receive()
            assert isinstance(summed, Reply)
            assert (summed.weighted, summed.outputs) == (True, 5)
        many = torch.randn(40, made.width).to(rows.dtype)
        all_ids = [[0, 1, 2, 3]] * 40  # more than runs in one piece
        backbone = sessions[0]
        reply = await backbone.call(many, all_ids)
        assert torch.equal(backbone.outputs(reply), expected(experts, many, all_ids))
        for backbone in sessions:
            await backbone.session.close()


async def test_a_short_call_runs_on_the_loop_only_where_nothing_waits_or_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, read, _ = tiny_plan()
    kernel = kernels.load("stored") if find_compiler() is not None else None
    if kernel is None:
        pytest.skip("no C core here")
    execution = choose_execution(made, "stored", kernel)
    experts = WindowExperts.load(made, made.windows[0], "stored", read, execution=execution)
    monkeypatch.setattr(serving_module, "INLINE_S", 1e9)
    rest = [0.0]
    async with ExpertServer(rest_s=lambda: rest[0]) as server, asyncio.TaskGroup() as tasks:
        holding = server.hold(LEASE, 1, PLAN_ID, experts)
        backbone, _ = await Swarm(server, made, experts, tasks).session()
        call = backbone.make(torch.randn(1, made.width), [[1]])
        assert not server._may_run_now(call, (holding,))  # nothing is known of its speed
        assert isinstance(await backbone.call(torch.randn(1, made.width), [[1]]), Reply)
        await until(lambda: server._may_run_now(call, (holding,)))
        server._waiting_calls += 1
        assert not server._may_run_now(call, (holding,))
        server._waiting_calls -= 1
        rest[0] = 0.001
        assert isinstance(await backbone.call(torch.randn(1, made.width), [[1]]), Reply)
        assert server._rests_until > 0.0
        server._rests_until = float("inf")  # the thread rests for what the loop computed
        assert not server._may_run_now(call, (holding,))
        await backbone.session.close()


@pytest.mark.parametrize("data", [b"\x63", b"\x02\x00", encode(Draining("no"))[0], b"\x01\xc1"])
async def test_a_peer_that_breaks_the_rules_is_closed_with_a_word_and_alone(data: bytes) -> None:
    async with serving() as swarm:
        good, _ = await swarm.session()
        bad, theirs = await swarm.session()
        with structlog.testing.capture_logs() as logs:
            await bad.session.send(data)
            await until(lambda: theirs.closed_with is not None)
        assert theirs.closed_with is not None
        code, message = theirs.closed_with
        assert code == "bad_request"
        assert message
        ended = [entry for entry in logs if entry["event"] == "session.served"]
        assert [entry["outcome"] for entry in ended] == ["bad_request"]
        rows = torch.randn(1, swarm.plan.width)
        assert isinstance(await good.call(rows, [[0]]), Reply)


async def test_a_real_encrypted_session_end_to_end() -> None:
    """The same over Noise: answers right, large messages in fragments, no plaintext on the link."""
    trust, device = relays.Swarm(), relays.Device()
    left, right = channel_pair()
    async with serving(width=512, inner=16, wire_dtype="bfloat16") as swarm:
        connecting = asyncio.create_task(trust.connect(left, device))
        theirs = await trust.accept(right, device)
        ours = await connecting
        swarm.tasks.create_task(swarm.server.handle_session(theirs))
        rows = torch.randn(300, 512).bfloat16()
        ids = [[n % 8, (n + 3) % 8] for n in range(300)]
        group = Group(0, (2,) * 300, tuple(itertools.chain.from_iterable(ids)))
        await ours.send(encode(References((Reference(0, LEASE, 1, PLAN_ID),))))
        await ours.send(encode(Call(1, 1, 300, 10_000, (group,), rows_to_bytes(rows))))
        async with asyncio.timeout(TIMEOUT):
            reply = decode(await ours.receive())
        assert isinstance(reply, Reply)
        outputs = bytes_to_rows(reply.rows, reply.outputs, 512, "bfloat16")
        assert torch.equal(outputs, expected(swarm.experts, rows, ids, 1))
        assert len(left.sent) > 5  # 300 KiB in packets of 64 KiB
        secret = bytes(rows_to_bytes(rows[7]))[:64]
        assert not any(secret in packet or LEASE in packet for packet in left.sent)
        await ours.close()


async def test_a_session_that_ends_is_closed_without_noise() -> None:
    async with serving() as swarm:
        backbone, theirs = await swarm.session()
        await backbone.session.close()
        await until(lambda: theirs.closed_with is not None)
        assert theirs.closed_with == ("unreachable", "the session has ended")
        assert not swarm.server._peers


async def test_a_backbone_that_does_not_take_its_answers_is_not_read_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every queue is bounded: refusals pile up to the limit, then reading stops until they are taken."""
    monkeypatch.setattr(peers, "OUTBOX_LIMIT", 20)
    async with serving() as swarm:
        backbone, theirs = await swarm.session(bound=10)
        rows = torch.randn(1, swarm.plan.width)
        flood = 100

        async def send_all() -> None:
            for _ in range(flood):
                await backbone.send(backbone.make(rows, [[0]], ref=5))  # each is refused at once

        sender = asyncio.create_task(send_all())
        await until(lambda: not next(iter(swarm.server._peers)).has_room)
        assert len(theirs.delivered) <= 20 + 20
        assert not sender.done()
        answers = [await backbone.receive() for _ in range(flood)]
        await sender
        assert {refused(answer)[0] for answer in answers} == {"not_mine"}


async def test_receipts_are_acknowledged_and_notices_passed_on() -> None:
    notices: list[Notice] = []

    async def acknowledge(receipt: bytes) -> bytes | None:
        return receipt[::-1] if receipt != b"unknown" else None

    async with serving(options={"on_receipt": acknowledge, "on_notice": notices.append}) as swarm:
        backbone, _ = await swarm.session()
        await backbone.send(ReceiptMessage(b"unknown"))
        await backbone.send(ReceiptMessage(b"abc"))
        assert await backbone.receive() == ReceiptAck(b"cba")
        await backbone.send(Notice("quarantined", "three rows were wrong"))
        await until(lambda: bool(notices))
        assert notices == [Notice("quarantined", "three rows were wrong")]


async def test_calls_go_on_while_a_receipt_is_kept() -> None:
    kept = asyncio.Event()

    async def slow(receipt: bytes) -> bytes | None:
        await kept.wait()
        return receipt

    async with serving(options={"on_receipt": slow}) as swarm:
        backbone, _ = await swarm.session()
        for number in range(3):
            await backbone.send(ReceiptMessage(bytes((number,))))
        assert isinstance(await backbone.call(torch.randn(1, swarm.plan.width), [[0]]), Reply)
        kept.set()
        assert [await backbone.receive() for _ in range(3)] == [ReceiptAck(bytes((n,))) for n in range(3)]


async def test_draining_tells_everyone_answers_what_waits_and_refuses_the_rest() -> None:
    async with serving() as swarm:
        gate = Gate(swarm.experts)
        backbone, _ = await swarm.session()
        idle, _ = await swarm.session()
        rows = torch.randn(1, swarm.plan.width)
        await backbone.send(backbone.make(rows, [[0]]))
        await gate.wait()
        assert not await swarm.server.drain("going to sleep", timeout=0.05)  # a call is still in flight
        drained = asyncio.create_task(swarm.server.drain("going to sleep", timeout=TIMEOUT))
        for _ in range(2):
            assert await idle.receive() == Draining("going to sleep")
            assert await backbone.receive() == Draining("going to sleep")
        assert refused(await backbone.call(rows, [[1]])) == ("draining", "going to sleep")
        gate.open()
        assert isinstance(await backbone.receive(), Reply)
        assert await drained
        late, _ = await swarm.session()
        assert await late.receive() == Draining("going to sleep")
        swarm.server.resume()
        assert isinstance(await late.call(rows, [[1]]), Reply)


async def test_a_session_that_vanishes_does_not_hold_up_draining() -> None:
    async with serving() as swarm:
        _, theirs = await swarm.session()
        theirs.send = _never  # type: ignore[method-assign]
        theirs.try_send = lambda message: False  # type: ignore[method-assign]
        drained = asyncio.create_task(swarm.server.drain("bye", timeout=TIMEOUT))
        await until(lambda: not next(iter(swarm.server._peers)).flushed.is_set())
        await theirs.peer.close()
        assert await drained


async def _never(message: object) -> None:
    await asyncio.Event().wait()


async def test_a_link_that_fails_while_answering_ends_the_session() -> None:
    async with serving() as swarm:
        backbone, theirs = await swarm.session()

        async def broken(message: object) -> None:
            raise Unreachable("the link is gone")

        theirs.send = broken  # type: ignore[method-assign]
        theirs.try_send = lambda message: False  # type: ignore[method-assign]
        await backbone.send(backbone.make(torch.randn(1, swarm.plan.width), [[0]]))
        await until(lambda: theirs.closed_with is not None)
        assert theirs.closed_with == ("unreachable", "the link is gone")


# --- counts -------------------------------------------------------------------------------------------


async def test_carried_bytes_count_as_credit_does() -> None:
    async with serving(wire_dtype="bfloat16", weighted=True) as swarm:
        backbone, _ = await swarm.session()
        row = swarm.plan.row_bytes
        rows = torch.randn(3, swarm.plan.width).bfloat16()
        await backbone.call(rows, [[1, 2], [2], [3, 4, 5]])
        assert swarm.server.served.carried_bytes == 3 * row + 6 * row + 2 * 6
        await backbone.call(rows, [[1, 2], [2], [3, 4, 5]], weights=torch.rand(6))
        assert swarm.server.served.carried_bytes == 2 * 3 * row + (6 + 3) * row + 2 * 12
        refused(await backbone.call(rows, [[9], [9], [9]]))
        (holding,) = swarm.server.holdings
        fields = swarm.server.served.fields()
        assert fields == {
            "calls": 2,
            "rows": 6,
            "outputs": 12,
            "carried_bytes": 2 * 3 * row + (6 + 3) * row + 2 * 12,
            "refusals": {"not_mine": 1},
        }
        assert (holding.served.calls, holding.served.outputs) == (2, 12)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        ServingLimits(max_calls=0)
    with pytest.raises(ConfigError, match="must be positive"):
        replace(ServingLimits(), max_bytes=-1)

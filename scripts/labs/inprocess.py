"""A heterogeneous swarm in one process: the product's dispatcher, calls and compute threads, no sockets.

A forward pass goes through the real hook, the real dispatcher, the real CALL and REPLY messages byte for
byte, and each node's compute thread; only sessions are left out. Each node has its own precision, kernel and
batch size. What a node executes is noted where its experts run (`labs.recording`).
"""

from __future__ import annotations

import functools
import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvasir_backbone.audit import NormBand
from kvasir_backbone.checkpoint import Checkpoint, id_of
from kvasir_backbone.credit import CreditBook, Totals
from kvasir_backbone.dispatch import CallEnd, OwnerBook, SwarmDispatcher
from kvasir_backbone.roster import Replica, Roster, WindowMap
from kvasir_backbone.seam import RowKey
from kvasir_node import kernels
from kvasir_node.calls import Buffers, Call, Reply, decode, encode
from kvasir_node.compute import Compute, Job, Outcome
from kvasir_node.experts import Execution, WindowExperts, choose_execution
from kvasir_node.holdings import Holding
from kvasir_node.tensors import WIRE_TORCH
from market.plans import Plan
from market.windows import Window
from relay.identity import PublicKey

from .recording import ExecutionLog, RecordedExperts, mismatches

PRECISIONS = ("stored", "bf16", "int8", "int4")
DEADLINE_S = 600.0
"""Of a dispatch: thousands of rows on a machine that does other things, too. Nothing here is late."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node: at what precision and with which kernel ("c1" or "torch") it keeps and runs experts, how
    many rows it runs at once at most, and the dtype that its own router would compute in."""

    precision: str = "stored"
    kernel: str = "c1"
    batch: int | None = None
    router_dtype: str = "float32"


class Experts:
    """Windows of one checkpoint in memory at any precision and kernel, each loaded once."""

    def __init__(self, checkpoint: Checkpoint, *, windows_a_layer: int = 4) -> None:
        self.checkpoint = checkpoint
        layer = max(recipe.experts * recipe.expert_bytes for recipe in checkpoint.recipes(random.Random(0)))
        self.window_bytes = -(-layer // windows_a_layer)
        self._plans: dict[str, Plan] = {}
        self._loaded: dict[tuple[Window, str, str], WindowExperts] = {}
        self._executions: dict[tuple[str, str], Execution] = {}

    def plan(self, wire_dtype: str) -> Plan:
        """The plan of that wire dtype; every precision is allowed."""
        if wire_dtype not in self._plans:
            self._plans[wire_dtype] = self.checkpoint.make_plan(
                window_bytes=self.window_bytes,
                wire_dtype=wire_dtype,
                precisions=PRECISIONS,
                rng=random.Random(0),
            )
        return self._plans[wire_dtype]

    def load(self, window: Window, precision: str, kernel: str, wire_dtype: str) -> WindowExperts:
        """That window's experts."""
        execution = self._execution(precision, kernel)
        key = (window, precision, kernel)
        if key not in self._loaded:
            self._loaded[key] = WindowExperts.load(
                self.plan("float32"), window, precision, self.checkpoint.read, execution=execution
            )
        kept = self._loaded[key]
        return WindowExperts(  # the same experts in memory, whatever the wire's dtype
            self.plan(wire_dtype), window, precision, kept._ffns, kept_bytes=kept.kept_bytes,
            execution=execution, quantised_hash=kept.quantised_hash, error=kept.error,
        )  # fmt: skip

    def _execution(self, precision: str, kernel: str) -> Execution:
        if (precision, kernel) not in self._executions:
            chosen = kernels.load(precision) if kernel == "c1" else None
            self._executions[precision, kernel] = choose_execution(self.plan("float32"), precision, chosen)
        return self._executions[precision, kernel]


@dataclass(slots=True)
class LabNode:
    """One node of the swarm and the windows it holds, by reference."""

    spec: NodeSpec
    device: PublicKey
    holdings: dict[int, Holding] = field(default_factory=dict)
    compute: Compute = field(default_factory=lambda: Compute(time.monotonic))

    def start(self) -> None:
        """Start the node's compute thread."""
        self.compute.start(_AtOnce())  # type: ignore[arg-type]

    def submit(self, call: Call, row_bytes: int, done: Callable[[Outcome], None]) -> None:
        """Give a call to the compute thread, as the node's server does; `done` is called there."""
        holdings = tuple(self.holdings[group.ref] for group in call.groups)
        job = Job(None, call, holdings, row_bytes, len(call.rows), time.monotonic())  # type: ignore[arg-type]

        def finish(finished: Job, outcome: Outcome) -> None:
            done(outcome)
            finished.release()

        self.compute.submit(job, finish)


class _AtOnce:
    """In the place of an event loop: what a compute thread hands over runs there and then."""

    @staticmethod
    def call_soon_threadsafe(callback: Callable[..., None], *arguments: object) -> None:
        """See `asyncio.AbstractEventLoop.call_soon_threadsafe`."""
        callback(*arguments)


class InProcessSwarm:
    """Nodes holding all windows of a plan, and the dispatcher over them. A `Dispatcher` by itself, which
    checks after every dispatch what was executed; also the dispatcher's `Lines`.

    `mismatches` and `decisions` count (row, layer) pairs. `seen`, if set, is given every dispatch's layer,
    rows, ids and outputs.
    """

    def __init__(
        self, experts: Experts, specs: Sequence[NodeSpec], *, wire_dtype: str = "float32", seed: int = 0
    ) -> None:
        self.plan = experts.plan(wire_dtype)
        self.log = ExecutionLog()
        self.lock = threading.Lock()
        """One dispatch at a time: an engine has several step threads, and the log is read after each."""
        self.nodes = [LabNode(spec, _device(number)) for number, spec in enumerate(specs)]
        self.windows = WindowMap(self.plan)
        self.owner_of: dict[Window, LabNode] = {}
        self.mismatches = 0
        self.decisions = 0
        self.seen: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
        replicas: dict[int, tuple[Replica, ...]] = {}
        book, owners = CreditBook(), OwnerBook()
        for node in self.nodes:
            node.start()
            book.open(node.device, Totals(node.device))
            owners.ensure(node.device)
        for number, window in enumerate(self.plan.windows):
            node = self.nodes[(number + window.layer_start) % len(self.nodes)]
            replicas[number] = (self._hold(experts, node, number, window, wire_dtype),)
        honoured = frozenset((each.lease, each.epoch) for found in replicas.values() for each in found)
        self._roster = Roster(self.windows, replicas, honoured)
        self._by_device = {node.device: node for node in self.nodes}
        self._dispatcher = SwarmDispatcher(
            self.plan,
            self,
            owners=owners,
            book=book,
            band=NormBand(),
            reference=None,
            fallback=False,
            min_failover_s=DEADLINE_S,
            rng=random.Random(seed),
        )

    def _hold(self, experts: Experts, node: LabNode, number: int, window: Window, wire_dtype: str) -> Replica:
        spec = node.spec
        loaded = experts.load(window, spec.precision, spec.kernel, wire_dtype)
        lease = hashlib.sha256(window.name.encode()).digest()[:16]
        recorded = RecordedExperts(loaded, self.log, spec.batch)
        node.holdings[number] = Holding(lease, 1, id_of(self.plan), recorded)  # type: ignore[arg-type]
        self.owner_of[window] = node
        return Replica(
            node.device, node.device, lease, 1, number, window, loaded.numerics, precision=spec.precision
        )

    @functools.cached_property
    def layers(self) -> dict[int, list[tuple[LabNode, Window, int]]]:
        """Layer -> (owner, window, reference) of each window with experts of that layer."""
        found: dict[int, list[tuple[LabNode, Window, int]]] = {
            recipe.layer: [] for recipe in self.plan.layers
        }
        for number, window in enumerate(self.plan.windows):
            for layer in range(window.layer_start, window.layer_end):
                if layer in found:
                    found[layer].append((self.owner_of[window], window, number))
        return found

    def close(self) -> None:
        """End the nodes' threads."""
        for node in self.nodes:
            node.compute.stop()

    # --- the seam ------------------------------------------------------------------------------------

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`; the deadline is `DEADLINE_S`."""
        kept, rows = rows.dtype, rows.to(WIRE_TORCH[self.plan.wire_dtype])
        with self.lock:
            outputs = self._dispatcher.dispatch(layer, rows, ids, keys, DEADLINE_S).to(kept)
            self.decisions += len(rows)
            self.mismatches += mismatches(rows, ids, self.log.take(layer))
            if self.seen is not None:
                self.seen(layer, rows, ids, outputs)
        return outputs

    # --- the dispatcher's lines ----------------------------------------------------------------------

    def roster(self) -> Roster:
        """See `Lines.roster`."""
        return self._roster

    def submit(
        self,
        device: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        *,
        answer_bytes: int,
    ) -> None:
        """See `Lines.submit`: the node answers from the message's bytes alone."""
        call = decode(_joined(message))
        assert isinstance(call, Call)

        def answered(outcome: Outcome) -> None:
            if isinstance(outcome, Reply):
                reply = decode(_joined(encode(outcome)))
                assert isinstance(reply, Reply)
                done(CallEnd(call_id, time.monotonic(), reply=reply))
            else:
                done(CallEnd(call_id, time.monotonic(), code="internal", message=str(outcome)))

        self._by_device[device].submit(call, self.plan.row_bytes, answered)

    def cancel(self, device: PublicKey, call_id: int) -> None:
        """See `Lines.cancel`: what was asked for here is computed."""

    def tripped(self, device: PublicKey, reason: str) -> None:
        """See `Lines.tripped`; no node here is ever late."""
        raise AssertionError(f"a node of this process failed: {reason}")

    def stale(self, replicas: Sequence[Replica], reason: str) -> None:
        """See `Lines.stale`."""
        raise AssertionError(f"a lease of this process went stale: {reason}")


def _joined(buffers: Buffers) -> bytearray:
    """A message's bytes, in memory that tensors may share."""
    return bytearray(b"".join(buffers))


def _device(number: int) -> PublicKey:
    return PublicKey(hashlib.sha256(f"node {number}".encode()).digest())


def one_thread() -> None:
    """One compute thread: two spinning pools on few cores are far slower than one thread each."""
    torch.set_num_threads(1)

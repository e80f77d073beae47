"""The hook: the one place where expert ids leave the router.

transformers' routers decide; this takes their ids and weights, sends the rows through the seam, and
combines the outputs with the weights in fp32; in a `weighted` swarm the weights of the chosen experts go
through the seam too, and the combined rows come back. Registered with transformers' experts interface under
the name `IMPLEMENTATION`; the experts modules it serves have no parameters.

Knows one step's rows and the seam. Knows no attention, no requests' state and no owners.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvasir_node.kernels import ROW_KINDS
from kvasir_node.kernels.dense import combine

from .seam import DEFAULT_DEADLINE_S, Dispatcher, DispatchFailed, RowKey, combine_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir_node.kernels import CpuKernel

IMPLEMENTATION: Final = "kvasir"
"""The name of the hook in transformers' experts interface."""

active = threading.local()
"""This thread's `step`, and `record`: what stands in for it while a pass is recorded."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Recorded decisions for consecutive rows: `ids` int32 and `weights` of the router's dtype, both
    [rows, MoE layers, k]."""

    ids: Tensor
    weights: Tensor

    def slice(self, start: int, end: int) -> Routed:
        """Rows `start` up to `end`, sharing memory."""
        return Routed(self.ids[start:end], self.weights[start:end])


class RoutingLog:
    """Every decision taken for one request, position by position from 0."""

    def __init__(self) -> None:
        self._joined: list[Routed] = []
        self._parts: list[Routed] = []

    def append(self, routed: Routed) -> None:
        """Add the decisions of the next positions."""
        self._parts.append(routed)
        if len(self._parts) >= 64:  # a part shares the memory of its whole step: keep few of them
            self._joined.append(_join(self._parts))
            self._parts = []

    def trim(self, positions: int) -> None:
        """Keep the decisions of the first `positions` only."""
        kept = sum(part.ids.shape[0] for part in self._joined) + sum(p.ids.shape[0] for p in self._parts)
        while self._parts and kept > positions:
            last = self._parts.pop()
            kept -= last.ids.shape[0]
            if kept < positions:
                self._parts.append(last.slice(0, positions - kept))
                return
        if kept > positions:
            self._joined = [_join(self._joined).slice(0, positions)]

    def rows(self, start: int, end: int) -> Routed:
        """The decisions of positions `start` up to `end`."""
        self._joined, self._parts = [_join(self._joined + self._parts)], []
        return self._joined[0].slice(start, end)


def _join(parts: Sequence[Routed]) -> Routed:
    import torch

    return Routed(torch.cat([part.ids for part in parts]), torch.cat([part.weights for part in parts]))


class NothingLeft(Exception):  # noqa: N818 - not an error: the pass ends early
    """Every request of a forward pass has failed; there is nothing left to compute."""


@dataclass(slots=True)
class StepRouting:
    """The routing of one forward pass.

    `kernel` sums up a row's outputs in the C core; without one torch does, in another order.
    `keys` name the real rows, which come first; what follows in the batch is padding and never leaves this
    process. `replay` holds decisions taken before: (first row, `Routed`), which rows that are computed again
    reuse. After the pass `failures` maps row -> why it failed, `recorded()` is what was decided, and
    `waited_s` for how long this thread waited in the seam and computed nothing.
    """

    dispatcher: Dispatcher
    keys: Sequence[RowKey]
    deadline_s: float = DEFAULT_DEADLINE_S
    replay: Sequence[tuple[int, Routed]] = ()
    kernel: CpuKernel | None = None
    failures: dict[int, DispatchFailed] = field(default_factory=dict)
    waited_s: float = 0.0
    _ids: list[Tensor] = field(default_factory=list)
    _weights: list[Tensor] = field(default_factory=list)

    def run(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One MoE layer: `rows` [N, width], `ids` [N, k], `weights` [N, k] -> combined outputs [N, width].

        Rows of padding and rows that failed come out as zeros. Raises `NothingLeft` when all have failed.
        """
        import torch

        count = len(self.keys)
        ids, weights = ids[:count], weights[:count]
        if ids.dtype != torch.int64:
            ids = ids.to(torch.int64)
        if self.replay:
            ids, weights = self._replayed(ids, weights)
        self._ids.append(ids)
        self._weights.append(weights)
        out = torch.zeros_like(rows)
        below = combine_of(self.dispatcher)
        while live := self._live(count):
            whole = len(live) == count
            index: slice | Tensor
            if whole:
                index, keys, chosen, shares = slice(0, count), self.keys, ids, weights
            else:
                index = torch.tensor(live)
                keys, chosen, shares = [self.keys[number] for number in live], ids[index], weights[index]
            started = time.monotonic() - time.thread_time()
            try:
                if below is None:
                    outputs = self.dispatcher.dispatch(layer, rows[index], chosen, keys, self.deadline_s)
                else:
                    outputs = below(layer, rows[index], chosen, shares, keys, self.deadline_s)
            except DispatchFailed as failure:
                self._note(failure, live)
                if failure.outputs is None:
                    continue  # once more, without the requests that failed
                outputs = failure.outputs
            finally:
                self.waited_s += time.monotonic() - time.thread_time() - started
            if below is not None:
                out[index] = outputs.to(rows.dtype)
            elif whole:
                self._combine(outputs, weights, out)
            else:
                some = rows.new_empty(len(live), rows.shape[1])
                self._combine(outputs, shares, some)
                out[index] = some
            break
        else:
            raise NothingLeft
        if self.failures:
            out[list(self.failures)] = 0
        return out

    def recorded(self) -> Routed:
        """Every decision of this pass, in row order."""
        import torch

        return Routed(torch.stack(self._ids, dim=1).to(torch.int32), torch.stack(self._weights, dim=1))

    def _live(self, count: int) -> Sequence[int]:
        """The rows of requests that have not failed."""
        if not self.failures:
            return range(count)
        return [number for number in range(count) if number not in self.failures]

    def _combine(self, outputs: Tensor, weights: Tensor, out: Tensor) -> None:
        """The first rows of `out` = the sums over k of `outputs` [n, k, width] times `weights` [n, k]."""
        weights = weights.float()
        if self.kernel is None or out.dtype not in ROW_KINDS or outputs.dtype != out.dtype:
            out[: len(outputs)] = (outputs.float() * weights.unsqueeze(-1)).sum(1).to(out.dtype)
        else:
            combine(self.kernel, outputs.contiguous(), weights.contiguous(), out)

    def _note(self, failure: DispatchFailed, live: Sequence[int]) -> None:
        """Record the failed rows, and with each the other rows of its request."""
        requests = {self.keys[live[place]].request for place in failure.rows}
        for number, key in enumerate(self.keys):
            if key.request in requests:
                self.failures.setdefault(number, failure)

    def _replayed(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Put recorded decisions in the place of those just taken."""
        ids, weights = ids.clone(), weights.clone()
        layer = len(self._ids)
        for start, routed in self.replay:
            end = start + routed.ids.shape[0]
            ids[start:end] = routed.ids[:, layer].to(ids.dtype)
            weights[start:end] = routed.weights[:, layer]
        return ids, weights


@contextlib.contextmanager
def routing(step: StepRouting) -> Iterator[StepRouting]:
    """Make `step` the routing of this thread's forward passes."""
    active.step = step
    try:
        yield step
    finally:
        active.step = None


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts interface calls in the place of an experts module's own forward."""
    record = getattr(active, "record", None)
    if record is not None:
        made: Tensor = record(module.kvasir_layer, hidden_states, top_k_index, top_k_weights)
        return made
    step: StepRouting | None = getattr(active, "step", None)
    assert step is not None, "an experts module ran outside `routing`"
    return step.run(module.kvasir_layer, hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Register the hook with transformers; doing so again changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)

"""The third row of the table: honest replies differ in their bits and agree within the limits.

Each reply is compared with the backbone's recompute at the replica's precision (what an audit judges) and
with the same expert in fp32 as stored (what the lower precision costs); the combined outputs, and the hidden
rows that go on to the next layer, with what they would have been.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvasir_backbone.audit import limit_of
from kvasir_backbone.auditing import References
from kvasir_backbone.routing import StepRouting
from kvasir_node.residual import residual

from .inprocess import InProcessSwarm


@dataclass(slots=True)
class Residuals:
    """Counts and sums over (row, expert) replies and (row, layer) combines."""

    replies: int = 0
    bit_equal: int = 0
    within: int = 0
    worst: float = 0.0
    expert: float = 0.0
    combines: int = 0
    combined: float = 0.0
    stream: float = 0.0
    pending: dict[int, Tensor] = field(default_factory=dict)

    def add_replies(self, outputs: Tensor, expected: Tensor, exact: Tensor, limit: float) -> None:
        """Replies [n, width], the recompute at the same precision, and the expert in fp32 as stored."""
        d = residual(outputs, expected)
        self.replies += len(d)
        self.bit_equal += int((outputs == expected).all(-1).sum())
        self.within += int((d <= limit).sum())
        self.worst = max(self.worst, float(d.max()))
        self.expert += float(residual(outputs, exact).sum())

    def add_combined(self, combined: Tensor, exact: Tensor) -> None:
        """Combined outputs [n, width] of one layer, and in fp32 from fp32 experts."""
        self.combines += len(combined)
        self.combined += float(residual(combined, exact).sum())

    def add_stream(self, error: Tensor, stream: Tensor) -> None:
        """The error [n, width] that a layer's combine leaves in the hidden rows `stream` [n, width]."""
        a, b = error.double(), stream.double()
        self.stream += float((a.square().sum(-1) / (2.0 * b.square().sum(-1)).clamp(min=1e-30)).sum())


@dataclass(slots=True)
class WatchedStep(StepRouting):
    """The routing of one forward pass whose replies are all recomputed."""

    swarm: InProcessSwarm | None = None
    references: References | None = None
    residuals: Residuals = field(default_factory=Residuals)

    def run(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `StepRouting.run`."""
        swarm, references, count = self.swarm, self.references, len(self.keys)
        assert swarm is not None
        assert references is not None
        got: list[Tensor] = []
        swarm.seen = lambda _, __, ___, outputs: got.append(outputs)
        try:
            # Not super(): a slotted dataclass is another class than the one that super() would close over.
            out = StepRouting.run(self, layer, rows, ids, weights)
        finally:
            swarm.seen = None
        exact = torch.empty_like(got[0], dtype=torch.float32)
        wire = rows[:count]
        for window, replica, mine in _owned(swarm, layer, ids[:count]):
            at, slot = mine.nonzero(as_tuple=True)
            for expert in range(window.expert_start, window.expert_end):
                pick = ids[at, slot] == expert
                if not bool(pick.any()):
                    continue
                where = at[pick], slot[pick]
                expected = references.run(layer, expert, wire[where[0]], replica.precision)
                exact[where] = references.run(layer, expert, wire[where[0]].float(), "stored")
                limit = limit_of(replica.numerics, replica.precision)
                self.residuals.add_replies(got[0][where], expected, exact[where], limit)
        combined = (exact * weights[:count].float().unsqueeze(-1)).sum(1)
        self.residuals.add_combined(out[:count].float(), combined)
        self.residuals.pending[layer] = out[:count].float() - combined
        return out


def _owned(swarm: InProcessSwarm, layer: int, ids: Tensor) -> list[tuple[Any, Any, Tensor]]:
    """(window, its replica, which of `ids` [n, k] are in it) of a layer."""
    found = []
    for _, window, number in swarm.layers[layer]:
        mine = (ids >= window.expert_start) & (ids < window.expert_end)
        found.append((window, swarm.roster().of(number)[0], mine))
    return found


def watch_streams(model: Any, residuals: Residuals) -> Callable[[], None]:
    """Compare each decoder layer's output with the error its combine left, until the result is called."""
    handles = []
    for name, module in model.named_modules():
        layer = getattr(module, "kvasir_layer", None)
        if layer is None:
            continue

        def note(_: Any, __: Any, output: Any, layer: int = layer) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            error = residuals.pending.pop(layer)
            residuals.add_stream(error, hidden.reshape(-1, hidden.shape[-1])[: len(error)])

        handles.append(model.get_submodule(name.rsplit(".", 2)[0]).register_forward_hook(note))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo

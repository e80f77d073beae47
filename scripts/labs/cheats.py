"""Ways to cheat: what a worker answers for real rows instead of the expert's output.

Each takes rows and the right outputs of one expert and gives wrong ones. Knows experts and rows. Knows no
trust and no limits but those it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_node.formulas import apply_formula
from kvasir_node.numerics import to_fp32
from kvasir_node.recipes import ExpertTensors, materialise
from market.plans import GateFormula


@dataclass(frozen=True, slots=True)
class Ground:
    """What a cheat works with: one (layer, expert) at the precision that was leased.

    `rows`, `right` [n, width] in the wire dtype; `neighbour` are another expert's outputs for the same rows,
    `lower` the same expert's at lower precisions by name; `tensors` its weights.
    """

    rows: Tensor
    right: Tensor
    neighbour: Tensor
    lower: dict[str, Tensor]
    tensors: ExpertTensors
    formula: GateFormula
    limit: float
    generator: torch.Generator


Cheat = Callable[[Ground], Tensor]


def zeros(ground: Ground) -> Tensor:
    """Nothing computed."""
    return torch.zeros_like(ground.right)


def stale(ground: Ground) -> Tensor:
    """The reply to the row before."""
    return ground.right.roll(1, 0)


def wrong_expert(ground: Ground) -> Tensor:
    """Another expert's output."""
    return ground.neighbour


def skipped_down(ground: Ground) -> Tensor:
    """Gate and up computed, the down projection left out: hidden values, cut or filled to the row's width."""
    matrices, rows = materialise(ground.tensors).matrices, ground.rows.float()
    hidden = rows @ to_fp32(matrices["up"]).T
    gate = rows @ to_fp32(matrices["gate"]).T if "gate" in matrices else None
    hidden = apply_formula(ground.formula, gate, hidden)
    width = rows.shape[1]
    filled = torch.zeros(len(rows), width)
    filled[:, : min(width, hidden.shape[1])] = hidden[:, :width]
    return filled.to(ground.right.dtype)


def noise(times: float) -> Cheat:
    """The right output with noise whose d is `times` the limit."""

    def cheat(ground: Ground) -> Tensor:
        right = ground.right.float()
        noise = torch.randn(right.shape, generator=ground.generator)
        size = right.norm(dim=-1, keepdim=True) * (2.0 * times * ground.limit) ** 0.5
        made: Tensor = right + noise * size / noise.norm(dim=-1, keepdim=True)
        return made.to(ground.right.dtype)

    return cheat


def lower(precision: str) -> Cheat:
    """The right expert at a lower precision than leased."""
    return lambda ground: ground.lower[precision]

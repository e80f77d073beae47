"""Rows as workers see them: what a model sends to its experts, and made-up ones with heavy tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvasir_backbone.model import BackboneModel
from kvasir_backbone.routing import StepRouting
from kvasir_backbone.seam import Dispatcher, RowKey
from kvasir_node.numerics import DenseMatrix
from kvasir_node.recipes import ExpertTensors

from .teacher import read


@dataclass(slots=True)
class Capture:
    """A `Dispatcher` that keeps what crosses the seam: rows [n, width] and ids [n, k] by layer."""

    inner: Dispatcher
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    ids: dict[int, list[Tensor]] = field(default_factory=dict)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        self.rows.setdefault(layer, []).append(rows.clone())
        self.ids.setdefault(layer, []).append(ids.clone())
        return self.inner.dispatch(layer, rows, ids, keys, deadline_s)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Everything of one layer, in order."""
        return torch.cat(self.rows[layer]), torch.cat(self.ids[layer])


def capture(model: BackboneModel, dispatcher: Dispatcher, tokens: Tensor, *, rows: int = 2048) -> Capture:
    """Have the model read `tokens` [n, length]; what its experts were sent, in the order of the tokens."""
    kept = Capture(dispatcher)
    for block in tokens.split(max(1, rows // tokens.shape[1])):
        read(model, block, lambda keys: StepRouting(kept, keys))
    return kept


def heavy_rows(count: int, width: int, generator: torch.Generator) -> Tensor:
    """fp32 rows as an RMS norm leaves them, mean square 1, with heavy tails: each value of Student's t with 3
    degrees of freedom, and one channel in a hundred 20 times larger."""
    chi = torch.randn(3, count, width, generator=generator).square().sum(0) / 3.0
    rows = torch.randn(count, width, generator=generator) / chi.sqrt().clamp(min=0.05)
    channels = torch.randperm(width, generator=generator)[: max(1, width // 100)]
    rows[:, channels] *= 20.0
    return rows / rows.square().mean(-1, keepdim=True).sqrt()


def heavy_expert(width: int, inner: int, generator: torch.Generator, *, dtype: torch.dtype) -> ExpertTensors:
    """A made-up expert whose weights have heavy tails: Gaussians of another scale for each output, and one
    weight in a thousand ten times larger."""

    def matrix(out: int, wide: int) -> DenseMatrix:
        scale = (0.5 * torch.randn(out, 1, generator=generator)).exp() / wide**0.5
        weights = torch.randn(out, wide, generator=generator) * scale
        outliers = torch.rand(out, wide, generator=generator) < 0.001
        return DenseMatrix(torch.where(outliers, weights * 10.0, weights).to(dtype))

    return ExpertTensors(
        {"gate": matrix(inner, width), "up": matrix(inner, width), "down": matrix(width, inner)}, {}, {}
    )

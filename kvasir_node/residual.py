"""How far an expert's output is from another computation of the same: the figure that audits judge.

Knows two rows of numbers. Knows no thresholds, classes or peers: `kvasir_backbone.audit` has those.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FLOOR_RMS: Final = 1e-6
"""Rows whose elements are this small (root mean square) count as zero: the difference of two such rows is
measured against this floor, not against their own size."""


def residual(x: Tensor, y: Tensor) -> Tensor:
    """d = 1 - 2<x,y> / (|x|^2 + |y|^2) of each row, computed as |x-y|^2 / (|x|^2 + |y|^2) in fp64.

    `x`, `y` [..., width] of any float dtype; returns fp64 [...]: 0 for equal rows, 1 for orthogonal ones, 2
    for opposite ones. The denominator is at least that of two rows with root mean square `FLOOR_RMS`. A row
    with NaN or infinity in either gives infinity, never NaN.
    """
    a, b = x.to(torch.float64), y.to(torch.float64)
    floor = 2.0 * x.shape[-1] * FLOOR_RMS**2
    size = a.square().sum(-1) + b.square().sum(-1)
    d = (a - b).square().sum(-1) / size.clamp(min=floor)
    return torch.where(torch.isfinite(size), d, torch.full_like(d, torch.inf))

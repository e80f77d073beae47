"""An expert at another precision than the stored one, and what that costs.

Knows experts' tensors and the quantisers' names. Knows no plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from market.plans import GateFormula
from relay.errors import ConfigError

from .ffn import run_expert
from .numerics import (
    INT4_GROUP,
    INT8_GROUP,
    DenseMatrix,
    Matrix,
    hash_tensor,
    quantise_int4,
    quantise_int8,
    to_fp32,
)
from .recipes import ExpertTensors, materialise
from .residual import residual

QUANTISERS: Final = {
    "stored": "stored",
    "bf16": "bf16",
    "int8": f"int8g{INT8_GROUP}",
    "int4": f"int4g{INT4_GROUP}",
}
"""Precision -> the name of its quantiser in a numerics class."""


def quantise(tensors: ExpertTensors, precision: str) -> ExpertTensors:
    """The same expert at a precision of `market.plans.PRECISIONS`; biases and norms stay fp32.

    "stored" returns `tensors` itself. Raises `ConfigError` for weights that are not finite.
    """
    if precision == "stored":
        return tensors
    dense = materialise(tensors)
    matrices: dict[str, Matrix] = {}
    for role, matrix in dense.matrices.items():
        if precision == "bf16":
            source = matrix.tensor if isinstance(matrix, DenseMatrix) else to_fp32(matrix)
            matrices[role] = DenseMatrix(source.to(torch.bfloat16))
        elif precision == "int8":
            matrices[role] = quantise_int8(to_fp32(matrix))
        elif precision == "int4":
            matrices[role] = quantise_int4(to_fp32(matrix))
        else:
            raise ConfigError(f"precision {precision!r} is not one of {', '.join(QUANTISERS)}")
    return ExpertTensors(matrices, dense.vectors, {})


def quantisation_error(tensors: ExpertTensors, formula: GateFormula, precision: str, rows: Tensor) -> float:
    """The largest d of an expert at `precision` against the same expert as stored, on fp32 `rows`."""
    kept = run_expert(quantise(tensors, precision), formula, rows)
    return float(residual(kept, run_expert(tensors, formula, rows)).max())


def hash_expert(digest: hashlib._Hash, layer: int, expert: int, tensors: ExpertTensors) -> None:
    """Feed one expert to `digest`: its number, then each role in alphabetical order with its tensors."""
    for role, parts in sorted(_kept(tensors), key=lambda item: item[0]):
        digest.update(f"{layer} {expert} {role}\n".encode("ascii"))
        for part in parts:
            hash_tensor(digest, part)


def _kept(tensors: ExpertTensors) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    for role, matrix in tensors.matrices.items():
        yield role, tuple(matrix.parts())
    for role, vector in tensors.vectors.items():
        yield role, (vector,)
    for role, stored in tensors.packed.items():
        yield role, stored.sources

"""What a model computes beside its experts, through the C core: products, norms, turns, sums of outputs.

All in fp32 or bf16, rows and weights of one kind. A result is summed in fp32 in a fixed order, rounded once
to that kind, and depends on nothing but its own row.

Knows matrices and rows. Knows no models and no experts.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..numerics import DenseMatrix
from .native import MatrixHeader
from .packing import ROW_KINDS, PackedMatrix

if TYPE_CHECKING:
    from .cpu import CpuKernel


class DenseHeader(ctypes.Structure):
    """`kv_dense`."""

    _fields_ = (
        ("matrix", MatrixHeader),
        ("bias", ctypes.c_void_p),
        ("isa", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


class NormHeader(ctypes.Structure):
    """`kv_norm`."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("isa", ctypes.c_int32),
    )


class DenseProduct:
    """rows @ weight.T + bias: a packed copy of `weight` [out, in] and `bias` [out], fp32 or bf16.

    fp32 weights that are bf16 values, as those of a bf16 checkpoint are, are kept as bf16: the same results.
    `address` is what the operator `kvasir::linear` takes; it is good as long as this object lives. `kernel`
    lends its instruction set. Raises `ValueError` for another dtype.
    """

    def __init__(self, kernel: CpuKernel, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype not in ROW_KINDS:
            raise ValueError(f"a matrix of {weight.dtype}, wanted fp32 or bf16")
        kept = weight.to(torch.bfloat16) if _is_bf16(weight) else weight
        matrix = PackedMatrix.pack(kernel.library, DenseMatrix(kept))
        assert matrix is not None, "the C core packs both kinds"
        self.matrix = matrix
        self.dtype = weight.dtype
        self._bias = None if bias is None else bias.to(torch.float32).contiguous().clone()
        self._library = kernel.library
        self._header = DenseHeader(
            matrix.header,
            None if self._bias is None else self._bias.data_ptr(),
            kernel.isa.number,
            ROW_KINDS[weight.dtype],
        )
        self.address = ctypes.addressof(self._header)

    def weight(self) -> Tensor:
        """The matrix as it was given, bit for bit."""
        (kept,) = self.matrix.parts()
        return kept.to(self.dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, in], contiguous, of the weight's dtype -> [n, out] of the same."""
        _check(rows, self.dtype, self.matrix.shape[1])
        made = torch.empty(rows.shape[0], self.matrix.shape[0], dtype=self.dtype)
        if not self._library.dense_run(self.address, rows.data_ptr(), rows.shape[0], made.data_ptr()):
            raise MemoryError("no memory for the rows of a product")
        return made


class RowNorm:
    """rows over their root mean square, times `weight` [width]; `epsilon` is added to the mean of squares.

    Zhang and Sennrich, "Root Mean Square Layer Normalization". bf16 rows are rounded before the weight and
    after it, as transformers does. `address` and `kernel` as in `DenseProduct`.
    """

    def __init__(self, kernel: CpuKernel, weight: Tensor, epsilon: float) -> None:
        if weight.dtype not in ROW_KINDS:
            raise ValueError(f"a norm of {weight.dtype}, wanted fp32 or bf16")
        self.dtype = weight.dtype
        self._weight = weight.to(torch.float32).contiguous().clone()
        self._library = kernel.library
        self._header = NormHeader(
            self._weight.data_ptr(), ROW_KINDS[weight.dtype], weight.numel(), epsilon, kernel.isa.number
        )
        self.address = ctypes.addressof(self._header)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, width], contiguous, of the weight's dtype -> the same shape and dtype."""
        _check(rows, self.dtype, self._weight.numel())
        made = torch.empty_like(rows)
        self._library.norm_run(self.address, rows.data_ptr(), rows.shape[0], made.data_ptr())
        return made


def combine(kernel: CpuKernel, outputs: Tensor, weights: Tensor, out: Tensor) -> None:
    """out[i] = the sum over j of weights[i, j] * outputs[i, j], j ascending, in fp32, rounded once.

    `outputs` [n, k, width] and `out` [n or more, width], contiguous, both fp32 or both bf16; `weights`
    [n, k] fp32, contiguous.
    """
    count, k, width = outputs.shape
    kernel.library.combine(
        kernel.isa.number, ROW_KINDS[out.dtype], outputs.data_ptr(), weights.data_ptr(), count, k, width,
        out.data_ptr(),
    )  # fmt: skip


def rope(kernel: CpuKernel, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`heads` [n, heads, width], contiguous, turned by `cosine` and `sine` [n, turned].

    Su et al., "RoFormer", in transformers' form and roundings.
    """
    n, count, width = heads.shape
    out = torch.empty_like(heads)
    kernel.library.rope(
        kernel.isa.number, ROW_KINDS[heads.dtype], heads.data_ptr(), width, count * width, n, count, width,
        cosine.data_ptr(), sine.data_ptr(), cosine.shape[1], out.data_ptr(),
    )  # fmt: skip
    return out


def _is_bf16(weight: Tensor) -> bool:
    """Whether rounding to bf16 changes no value; looked at a few rows at a time."""
    step = max(1, (1 << 20) // max(1, weight.shape[1]))
    return all(torch.equal(part.to(torch.bfloat16).to(part.dtype), part) for part in weight.split(step))


def _check(rows: Tensor, dtype: torch.dtype, width: int) -> None:
    """The C core reads by address: other rows are the caller's fault."""
    if rows.dim() != 2 or rows.shape[1] != width or rows.dtype != dtype or not rows.is_contiguous():
        raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, wanted contiguous {dtype} [n, {width}]")

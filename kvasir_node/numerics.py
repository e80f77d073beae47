"""Matrices of an expert as they are kept in memory, and the quantisers, defined bit for bit.

Every matrix is [out, in] (`torch.nn.functional.linear` orientation) and groups run along the input
dimension; the last group of a row may be shorter. All arithmetic below is IEEE fp32, round half to even.

* **dense**: the weights in fp32, bf16 or fp16. Widening to fp32 on use is exact.
* **int8**, groups of 128: `a = max |w|`, `scale = a / 127`, `q = clamp(round(w / scale), -127, 127)`, and
  q = 0 where the scale is 0. `q` is int8 [out, in], `scale` fp32 [out, groups]. Value: `q * scale`.
* **int4**, asymmetric, groups of 32: `minimum = bf16(min w)`,
  `scale = bf16(max(0, max w - minimum) / 15)`, `q = clamp(round((w - minimum) / scale), 0, 15)`, and q = 0
  where the scale is 0. `scale` and `minimum` are bf16 [out, groups]. Each group is 16 bytes: byte j holds
  element j in its low four bits and element j + 16 in its high four bits; elements past the end of a shorter
  last group are 0. `packed` is uint8 [out, groups * 16]. Value: `q * scale + minimum`, the product exact, the
  sum rounded once.

Knows torch and these formats. Knows no plans, files or formulas.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from relay.errors import ConfigError

INT8_GROUP: Final = 128
"""Inputs that share one int8 scale."""

INT4_GROUP: Final = 32
"""Inputs that share one int4 scale and minimum."""

INT4_GROUP_BYTES: Final = INT4_GROUP // 2

BLOCK_ELEMENTS: Final = 1 << 19
"""A matrix that is not fp32 is widened in blocks of whole rows of about this many elements (2 MiB), which
stay in cache. Part of the accumulation order: it decides the shapes of the matrix products."""


class Matrix(Protocol):
    """A weight matrix [out, in] in some representation, readable as fp32 in blocks of rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory."""
        ...

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """Write rows `start` up to `stop` as fp32 into `out` [stop - start, in], contiguous."""
        ...

    def parts(self) -> Iterator[Tensor]:
        """The tensors kept, contiguous, in the order in which they are hashed."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """Weights kept as they are: `tensor` [out, in], fp32, bf16, fp16 or fp64, contiguous."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory."""
        return self.tensor.nbytes

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """See `Matrix.fill`."""
        out.copy_(self.tensor[start:stop])

    def parts(self) -> Iterator[Tensor]:
        """The one tensor."""
        yield self.tensor


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """int8 in groups of 128: `values` int8 [out, in], `scale` fp32 [out, groups]."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory."""
        return self.values.nbytes + self.scale.nbytes

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """See `Matrix.fill`."""
        out.copy_(self.values[start:stop])
        scale = self.scale[start:stop]
        width = out.shape[1]
        whole = width // INT8_GROUP * INT8_GROUP
        if whole:
            groups = out[:, :whole].view(out.shape[0], -1, INT8_GROUP)
            groups.mul_(scale[:, : whole // INT8_GROUP, None])
        if whole < width:
            out[:, whole:].mul_(scale[:, -1:])

    def parts(self) -> Iterator[Tensor]:
        """Values, then scales."""
        yield self.values
        yield self.scale


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """int4 in groups of 32: `packed` uint8 [out, groups * 16], `scale`, `minimum` bf16 [out, groups].

    `width` is the input dimension. See the module docstring for the packing.
    """

    packed: Tensor
    scale: Tensor
    minimum: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory."""
        return self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """See `Matrix.fill`."""
        packed = self.packed[start:stop].view(stop - start, -1, INT4_GROUP_BYTES)
        values = torch.empty(stop - start, packed.shape[1], INT4_GROUP, device=packed.device)
        values[:, :, :INT4_GROUP_BYTES] = packed & 0xF
        values[:, :, INT4_GROUP_BYTES:] = packed >> 4
        values.mul_(self.scale[start:stop].float().unsqueeze(-1))
        values.add_(self.minimum[start:stop].float().unsqueeze(-1))
        out.copy_(values.view(stop - start, -1)[:, : self.width])

    def parts(self) -> Iterator[Tensor]:
        """Packed values, then scales, then minima."""
        yield self.packed
        yield self.scale
        yield self.minimum


def quantise_int8(weights: Tensor) -> Int8Matrix:
    """Quantise fp32 `weights` [out, in] as the module docstring defines.

    Raises `ConfigError` for weights that are not finite.
    """
    groups, width = _grouped(weights, INT8_GROUP)
    largest = groups.abs().amax(dim=-1)
    scale = largest / 127.0
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = torch.round(groups / safe.unsqueeze(-1)).clamp_(-127, 127)
    values.mul_((scale > 0).unsqueeze(-1))
    kept = values.to(torch.int8).view(weights.shape[0], -1)[:, :width].contiguous()
    return Int8Matrix(kept, scale.contiguous())


def quantise_int4(weights: Tensor) -> Int4Matrix:
    """Quantise fp32 `weights` [out, in] as the module docstring defines.

    Raises `ConfigError` for weights that are not finite or do not fit bf16.
    """
    groups, width = _grouped(weights, INT4_GROUP)
    tail = groups.shape[1] * INT4_GROUP - width
    inside = groups
    if tail:  # a shorter last group: its padding must not widen the range
        inside = groups.clone()
        inside[:, -1, INT4_GROUP - tail :] = inside[:, -1, :1]
    minimum = inside.amin(dim=-1).to(torch.bfloat16)
    low = minimum.float()
    scale = ((inside.amax(dim=-1) - low).clamp_(min=0.0) / 15.0).to(torch.bfloat16)
    step = scale.float()
    if not bool(torch.isfinite(low).all() and torch.isfinite(step).all()):
        raise ConfigError("the weights do not fit int4: a group's range is over what bf16 holds")
    safe = torch.where(step > 0, step, torch.ones_like(step))
    values = torch.round((groups - low.unsqueeze(-1)) / safe.unsqueeze(-1)).clamp_(0, 15)
    values.mul_((step > 0).unsqueeze(-1))
    if tail:
        values[:, -1, INT4_GROUP - tail :] = 0
    nibbles = values.to(torch.uint8)
    packed = nibbles[:, :, :INT4_GROUP_BYTES] | (nibbles[:, :, INT4_GROUP_BYTES:] << 4)
    return Int4Matrix(packed.reshape(weights.shape[0], -1).contiguous(), scale, minimum, width)


def to_fp32(matrix: Matrix) -> Tensor:
    """The whole matrix as fp32 [out, in]."""
    out = torch.empty(matrix.shape, dtype=torch.float32)
    matrix.fill(0, matrix.shape[0], out)
    return out


def block_rows(width: int) -> int:
    """Rows of a matrix with `width` inputs that are widened at once: a multiple of 16, at least 16."""
    return max(16, BLOCK_ELEMENTS // max(width, 1) // 16 * 16)


def hash_tensor(digest: hashlib._Hash, tensor: Tensor) -> None:
    """Feed a tensor to `digest`: dtype and shape as text, then its little-endian bytes."""
    digest.update(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode("ascii"))
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if sys.byteorder == "big":
        flat = flat.view(-1, tensor.element_size()).flip(-1).contiguous().view(-1)
    digest.update(flat.numpy().data)


def _grouped(weights: Tensor, size: int) -> tuple[Tensor, int]:
    """`weights` as [out, groups, size], the last group padded with zeros, and the width before padding."""
    if weights.dim() != 2 or weights.dtype != torch.float32:
        raise ConfigError(f"quantisers take an fp32 matrix, not {weights.dtype} of {tuple(weights.shape)}")
    if not bool(torch.isfinite(weights).all()):
        raise ConfigError("the weights hold NaN or infinity: the checkpoint is damaged")
    width = weights.shape[1]
    padded = torch.nn.functional.pad(weights, (0, -width % size))
    return padded.view(weights.shape[0], -1, size), width

"""How one expert runs: hidden rows in, output rows out.

    out = norm?( down @ formula(gate @ x + b_g, up @ x + b_u) + b_d )        everything in fp32

The weights stay in the dtype they are kept in and are widened block by block on use; a result is rounded
once, to the dtype of the rows. An output row does not depend on the rows beside it (**batch invariance**):

* a matrix product of 1, 2 or 3 rows takes other paths through BLAS than one of 4 or more, which agree bit
  for bit, so rows are padded to 4; one of 11 columns or fewer even depends on where a row lies in memory,
  so columns are padded to 16;
* an element-wise function treats the last elements of a tensor one by one and all others in vectors, with
  different last bits, so hidden values are computed in buffers with a margin after the last row.

`kvasir_node.execution` proves it at start and chooses the kernel.

Knows tensors, formulas and what a kernel is. Knows no plans and no windows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from market.plans import GateFormula

from .formulas import apply_formula, apply_norm, has_gate
from .numerics import BLOCK_ELEMENTS, DenseMatrix, Matrix, block_rows
from .recipes import ExpertTensors, materialise

Ffn = Callable[[Tensor], Tensor]
"""fp32 rows [n, W], contiguous -> fp32 rows [n, W], for one expert."""

MIN_ROWS: Final = 4
"""Matrix products have at least this many rows (see the module docstring)."""

MIN_COLUMNS: Final = 16
"""Matrix products have at least this many columns, the outputs of a layer (see the module docstring)."""

MAX_ROWS: Final = 256
"""More rows than this run in several products, which bounds memory."""

MARGIN: Final = 64
"""fp32 elements after the last row of a hidden buffer: more than two vectors of any instruction set."""


class Kernel(Protocol):
    """A faster way to run an expert than torch, for some precisions and formulas.

    `family` names instruction set and reduction order and is part of the numerics class; `activations` is
    "none", or "int16" or "int8" where rows are quantised before the product. It must be batch invariant by
    itself.
    """

    family: str
    activations: str

    def bind(self, tensors: ExpertTensors, formula: GateFormula) -> Ffn | None:
        """A function that runs this expert, or None where the kernel does not cover its form.

        Called once an expert at load. The function is called from one thread at a time.
        """
        ...


@runtime_checkable
class GroupKernel(Protocol):
    """A kernel that runs several experts of one layer at once: an accelerator (`kvasir_node.accelerator`)."""

    def runs(self, ffn: Ffn) -> bool:
        """Whether this kernel has bound that expert, and can run it in a group."""
        ...

    def run_group(self, experts: Sequence[Ffn], rows: Sequence[Tensor]) -> list[Tensor]:
        """Each expert on its fp32 rows [n, W]: the fp32 outputs, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Execution:
    """How experts run in this process: chosen and checked once, shared by serving, fallback and audits.

    `kernel` None means torch. `exact_rows` forces products of exactly `MIN_ROWS` rows. `invariant` False
    means that the start-up check failed even so, and outputs may depend on the batch.
    """

    kernel: Kernel | None = None
    exact_rows: bool = False
    invariant: bool = True

    @property
    def family(self) -> str:
        """The kernel family's name in a numerics class."""
        if self.kernel is not None:
            return self.kernel.family
        return f"torch-{torch.__version__.partition('+')[0]}{'-by4' if self.exact_rows else ''}"

    def bind(self, tensors: ExpertTensors, formula: GateFormula) -> Ffn:
        """A function that runs one expert on fp32 rows."""
        if self.kernel is not None:
            ffn = self.kernel.bind(tensors, formula)
            if ffn is not None:
                return ffn
        step = MIN_ROWS if self.exact_rows else MAX_ROWS
        return lambda rows: _run_torch(tensors, formula, rows, step)


TORCH: Final = Execution()
"""Plain torch, unchecked."""


def run_expert(
    tensors: ExpertTensors, formula: GateFormula, rows: Tensor, execution: Execution = TORCH
) -> Tensor:
    """Run one expert: `rows` [n, W] of any float dtype -> outputs [n, W] of the same dtype.

    Computes in fp32 and rounds once. For outputs bit-identical to a node's, give the same execution.
    """
    with torch.inference_mode():
        return execution.bind(tensors, formula)(rows.float().contiguous()).to(rows.dtype)


# --- plain torch -------------------------------------------------------------------------------------

_scratch = threading.local()


def _run_torch(tensors: ExpertTensors, formula: GateFormula, rows: Tensor, step: int) -> Tensor:
    """fp32 [n, W] -> fp32 [n, W], in products of `MIN_ROWS` to `step` rows."""
    count = rows.shape[0]
    if count == 0:
        return rows.clone()
    tensors = materialise(tensors)
    if MIN_ROWS <= count <= step:
        return _ffn(tensors, formula, rows)
    out = torch.empty_like(rows)
    for start in range(0, count, step):
        part = rows[start : start + step]
        size = part.shape[0]
        if size < MIN_ROWS:
            padded = torch.zeros(MIN_ROWS, rows.shape[1], dtype=torch.float32)
            padded[:size] = part
            part = padded
        out[start : start + size] = _ffn(tensors, formula, part)[:size]
    return out


def _ffn(tensors: ExpertTensors, formula: GateFormula, rows: Tensor) -> Tensor:
    matrices, vectors = tensors.matrices, tensors.vectors
    inner = matrices["up"].shape[0]
    up = _linear(rows, matrices["up"], vectors.get("up_bias"))
    gate = _linear(rows, matrices["gate"], vectors.get("gate_bias")) if has_gate(formula) else None
    hidden = apply_formula(formula, gate, up)[: rows.shape[0] * inner].view(rows.shape[0], inner)
    width = matrices["down"].shape[0]
    flat = _linear(hidden, matrices["down"], vectors.get("down_bias"))
    out = flat[: rows.shape[0] * width].view(rows.shape[0], width)
    return out if formula.norm_eps is None else apply_norm(formula, vectors["norm"], out)


def _linear(rows: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """rows [n, in] @ matrix.T + bias as a flat fp32 buffer: n * out values, then `MARGIN` zeros."""
    count, height = rows.shape[0], matrix.shape[0]
    flat = torch.empty(count * height + MARGIN)
    flat[count * height :] = 0.0
    out = flat[: count * height].view(count, height)
    dense = isinstance(matrix, DenseMatrix) and matrix.tensor.dtype == torch.float32
    if dense and height >= MIN_COLUMNS:
        assert isinstance(matrix, DenseMatrix)
        torch.mm(rows, matrix.tensor.t(), out=out)
    else:
        _linear_in_blocks(rows, matrix, out)
    if bias is not None:
        out.add_(bias)
    return flat


def _linear_in_blocks(rows: Tensor, matrix: Matrix, out: Tensor) -> None:
    """out [n, out] = rows [n, in] @ matrix.T, widening some rows of the matrix at a time."""
    height, width = matrix.shape
    step = min(block_rows(width), max(height, MIN_COLUMNS))
    block = _scratch_block(step, width)
    for start in range(0, height, step):
        count = min(step, height - start)
        matrix.fill(start, start + count, block[:count])
        if count >= MIN_COLUMNS:
            torch.mm(rows, block[:count].t(), out=out[:, start : start + count])
        else:
            block[count:MIN_COLUMNS] = 0.0
            out[:, start : start + count] = torch.mm(rows, block[:MIN_COLUMNS].t())[:, :count]


def _scratch_block(rows: int, width: int) -> Tensor:
    """A block that this thread reuses: fresh memory costs more than the widening itself."""
    flat: Tensor | None = getattr(_scratch, "flat", None)
    if flat is None or flat.numel() < rows * width:
        with torch.inference_mode(False):  # reused inside and outside of that mode
            flat = torch.empty(max(rows * width, BLOCK_ELEMENTS))
        _scratch.flat = flat
    return flat[: rows * width].view(rows, width)

"""A matrix in the order in which the C core reads it: panels of 32 outputs, each one run of bytes.

Packing moves values and changes none, and can be undone bit for bit; the layouts are in `csrc/kvasir.h`.

Knows matrices' representations. Knows nothing of how they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ..numerics import (
    INT4_GROUP,
    INT4_GROUP_BYTES,
    INT8_GROUP,
    DenseMatrix,
    Int4Matrix,
    Int8Matrix,
    Matrix,
)
from .native import KINDS, PANEL, Library, MatrixHeader

_DENSE: Final = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_DENSE_DTYPES: Final = {kind: dtype for dtype, kind in _DENSE.items()}

ROW_KINDS: Final = {dtype: KINDS[kind] for dtype, kind in _DENSE.items()}
"""Dtypes of rows that the C core reads and writes -> their kind in it."""


def kind_of(matrix: Matrix) -> str | None:
    """The kind (see `native.KINDS`) that `matrix` packs to, or None where the C core has none for it."""
    if isinstance(matrix, DenseMatrix):
        return _DENSE.get(matrix.tensor.dtype)
    if isinstance(matrix, Int8Matrix):
        return "int8"
    if isinstance(matrix, Int4Matrix):
        return "int4"
    return matrix.kind if isinstance(matrix, PackedMatrix) else None


class PackedMatrix:
    """A packed matrix [out, in], itself a `kvasir_node.numerics.Matrix`. Made by `pack`.

    `data` is the packed bytes (uint8, 64-byte aligned, outputs padded to a multiple of 32), `header` what
    the C core takes by address.
    """

    def __init__(self, library: Library, kind: str, out: int, width: int, data: Tensor) -> None:
        self.kind = kind
        self.data = data
        self.header = MatrixHeader(KINDS[kind], out, width, 0, data.data_ptr())
        self._library = library
        self._shape = (out, width)

    @classmethod
    def pack(cls, library: Library, matrix: Matrix) -> PackedMatrix | None:
        """`matrix` packed, or None where the C core has no kind for it. Itself if it is packed already."""
        if isinstance(matrix, PackedMatrix):
            return matrix
        kind = kind_of(matrix)
        if kind is None:
            return None
        out, width = matrix.shape
        with torch.inference_mode(False):
            data = torch.zeros(library.packed_bytes(KINDS[kind], out, width), dtype=torch.uint8)
        assert data.data_ptr() % 64 == 0, "torch aligns its memory to 64 bytes"
        packed = cls(library, kind, out, width, data)
        packed._move([part.contiguous() for part in matrix.parts()], 0, packed.panels, unpack=False)
        return packed

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self._shape

    @property
    def panels(self) -> int:
        """Panels of 32 outputs, the last padded."""
        return -(-self._shape[0] // PANEL)

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory."""
        return self.data.nbytes

    def plain(self) -> Matrix:
        """The matrix as it was before packing, bit for bit."""
        return self._unpack(0, self.panels)

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """Write rows `start` up to `stop` as fp32 into `out` [stop - start, in]: `Matrix.fill`."""
        first = start // PANEL
        some = self._unpack(first, -(-stop // PANEL))
        some.fill(start - first * PANEL, stop - first * PANEL, out)

    def parts(self) -> Iterator[Tensor]:
        """The tensors of the matrix before packing, in the order in which they are hashed."""
        return self.plain().parts()

    def _unpack(self, first: int, last: int) -> Matrix:
        """Panels [first, last) as a plain matrix."""
        width = self._shape[1]
        rows = min(last * PANEL, self._shape[0]) - first * PANEL
        if self.kind in _DENSE_DTYPES:
            plain: Matrix = DenseMatrix(torch.zeros(rows, width, dtype=_DENSE_DTYPES[self.kind]))
        elif self.kind == "int8":
            scale = torch.zeros(rows, -(-width // INT8_GROUP))
            plain = Int8Matrix(torch.zeros(rows, width, dtype=torch.int8), scale)
        else:
            groups = -(-width // INT4_GROUP)
            values = torch.zeros(rows, groups * INT4_GROUP_BYTES, dtype=torch.uint8)
            scale, minimum = torch.zeros(2, rows, groups, dtype=torch.bfloat16).unbind()
            plain = Int4Matrix(values, scale, minimum, width)
        self._move(list(plain.parts()), first, last, unpack=True)
        return plain

    def _move(self, parts: list[Tensor], first: int, last: int, *, unpack: bool) -> None:
        """Between plain `parts`, whose row 0 is the first of panel `first`, and those panels here."""
        out, width = self._shape
        kind = KINDS[self.kind]
        addresses = [part.data_ptr() for part in parts] + [None] * (3 - len(parts))
        start = self.data.data_ptr() + first * self._library.packed_bytes(kind, PANEL, width)
        self._library.repack(kind, out - first * PANEL, width, *addresses, start, 0, last - first, unpack)

"""Rows on the wire and rows in memory: the same bytes, seen by torch without a copy.

Rows travel as width x wire dtype, little-endian, one after another. Knows torch and that; no messages.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from relay.errors import RemoteProtocolError

WIRE_TORCH: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Wire dtype of a plan -> torch dtype."""

COPIED_BYTES: Final = 32 * 1024
"""Copying so much takes some microsecond, and a view through torch and numpy five."""

with warnings.catch_warnings():
    # torch warns once a process that a read-only buffer makes a tensor which must not be written. None is.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def from_buffer(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """A flat tensor of little-endian `dtype` that shares `data`'s memory and keeps it alive; read only."""
    if sys.byteorder == "big":
        data = _swapped(torch.frombuffer(data, dtype=torch.uint8), dtype.itemsize)
    return torch.frombuffer(data, dtype=dtype)


def bytes_to_rows(data: bytes | bytearray | memoryview, count: int, width: int, wire_dtype: str) -> Tensor:
    """Rows [count, width] that share `data`'s memory; read only, whatever torch says.

    Raises `RemoteProtocolError` unless `data` is exactly that many rows.
    """
    dtype = WIRE_TORCH[wire_dtype]
    expected = count * width * dtype.itemsize
    if len(data) != expected or count < 1:
        raise RemoteProtocolError(
            f"{count} rows of width {width} in {wire_dtype} are {expected} bytes, got {len(data)}"
        )
    return from_buffer(data, dtype).view(count, width)


def bytes_to_floats(data: bytes | bytearray | memoryview, count: int) -> Tensor:
    """`count` little-endian fp32 values as a tensor that shares `data`'s memory; read only."""
    return bytes_to_rows(data, 1, count, "float32").view(-1)


def rows_to_bytes(rows: Tensor) -> memoryview:
    """The bytes of contiguous `rows` for the wire, sharing their memory (and keeping it alive).

    So few that a copy costs less than the view are copied.
    """
    assert rows.is_contiguous()
    if rows.nbytes <= COPIED_BYTES and rows.device.type == "cpu" and sys.byteorder == "little":
        return memoryview(ctypes.string_at(rows.data_ptr(), rows.nbytes))
    if sys.byteorder == "big":
        return _swapped(rows.view(-1).view(torch.uint8), rows.element_size())
    return rows.detach().view(-1).view(torch.uint8).numpy().data


def partial_sums(outputs: Tensor, weights: Tensor, rows: Sequence[int], row_count: int) -> Tensor:
    """What a `weighted` call answers: for each row the sum of its outputs times their weights.

    `outputs` fp32 [ids, W], `weights` fp32 [ids], `rows[i]` the row of output i. Returns fp32 [row_count, W].
    Products and sums are fp32, in the order of the ids, so the result depends on nothing else.
    """
    turns: list[int] = []
    seen = [0] * row_count
    for row in rows:
        turns.append(seen[row])
        seen[row] += 1
    order, turn = torch.tensor(rows), torch.tensor(turns)
    scaled = outputs * weights.unsqueeze(-1)
    sums = torch.zeros(row_count, outputs.shape[1])
    for number in range(max(seen)):
        chosen = turn == number
        sums.index_add_(0, order[chosen], scaled[chosen])  # each row at most once a turn
    return sums


def _swapped(data: Tensor, size: int) -> memoryview:
    return data.view(-1, size).flip(-1).contiguous().view(-1).numpy().data

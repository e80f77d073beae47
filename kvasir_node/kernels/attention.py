"""Attention by the C core: of many requests' rows in one call, each over its own request's keys and values.

Every row sees all positions up to its own. The order of every sum is fixed (`csrc/attention.h`), so a row's
bits depend neither on the rows beside it nor on the instruction set.

Knows tensors' layouts and memory addresses. Knows no requests, no layers' other parts and no scheduling.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import torch
from torch import Tensor

from .cpu import _noise, load
from .native import Isa, Library
from .packing import ROW_KINDS

log = structlog.get_logger("node")

SELF_CHECK: Final = "700f4494ca37e488f181dc0e9dcf51738e484cbfd8e7c87452c5b9b8d7e8b439"
"""SHA-256 of what `_digest` computes: the same bits on every machine, instruction set and compiler."""

SPAN_FIELDS: Final = 5
"""64-bit fields of a span: see `Attention.run`."""


class _Header(ctypes.Structure):
    """`kv_attention`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "heads", "key_heads", "dim", "value_dim", "rows")),
        ("padding", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("query_head", "query_row", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_head", "value_row")),
    )


class Form:
    """Shapes and strides of a layer's query, key and value: what a call is made with. Made by `form_of`."""

    __slots__ = ("address", "header", "scratch_bytes", "shape")

    def __init__(self, library: Library, header: _Header) -> None:
        self.header = header
        self.address = ctypes.addressof(header)
        self.scratch_bytes = int(library.attend_scratch(self.address))
        self.shape = (1, header.rows, header.heads, header.value_dim)


class Attention:
    """The C core's attention on one instruction set. Several threads may use it at once."""

    def __init__(self, library: Library, isa: Isa) -> None:
        self.library = library
        self.isa = isa
        self._local = threading.local()
        self._most_scratch = 0

    def form_of(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rows: int) -> Form | None:
        """The form of `query` [1, heads, batch rows, dim] and `key`, `value` [1, kv heads, batch rows, dim].

        Rows from `rows` on are padding. None where the C core does not cover it: another dtype than fp32
        and bf16, a dim that is no multiple of 8, or elements of a head that do not lie side by side.
        """
        kind, heads, key_heads = ROW_KINDS.get(query.dtype), query.shape[1], key.shape[1]
        alike = query.dtype == key.dtype == value.dtype and query.shape[0] == 1 and heads % key_heads == 0
        plain = query.stride(3) == key.stride(3) == value.stride(3) == 1
        dim, value_dim = query.shape[3], value.shape[3]
        if kind is None or not alike or not plain or dim % 8 or value_dim % 8 or query.device.type != "cpu":
            return None
        strides = (stride for part in (query, key, value) for stride in part.stride()[1:3])
        header = _Header(kind, heads, key_heads, dim, value_dim, query.shape[2], rows, scaling, *strides)
        form = Form(self.library, header)
        self._most_scratch = max(self._most_scratch, form.scratch_bytes)
        return form

    def run(
        self,
        form: Form,
        spans: array[int],
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
    ) -> None:
        """Store keys and values of some spans and write their rows of `out` [1, rows, heads, value dim].

        A span is consecutive new rows of one request, each of which sees all positions up to its own:
        five numbers in `spans` ("q"), namely the address of its planes, the place of its first row, the
        position of that row, the capacity of its memory, and how many rows it has. Planes are, for each
        layer, the addresses of its keys and values [kv heads, capacity, dim]. `out` is contiguous; its
        padding becomes zeros, rows of no span stay as they are.
        """
        self.library.attend(
            self.isa.number, form.address, spans.buffer_info()[0], len(spans) // SPAN_FIELDS, layer,
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            self._scratch(form.scratch_bytes).data_ptr(),
        )  # fmt: skip

    @contextmanager
    def step(self, spans: array[int], layers: int, rows: int) -> Iterator[None]:
        """While active, the operator `kvasir::attention` computes these spans (see `run`) in this thread.

        It calls the operator `kvasir::attend` for layers from `layers` on, whose planes are not there yet,
        and for forms that no `form_of` has covered. Rows from `rows` on are padding.
        """
        kept = self._scratch(self._most_scratch)  # held: a larger one may take its place meanwhile
        begin, isa = self.library.attend_step, self.isa.number
        address = spans.buffer_info()[0]
        begin(isa, address, len(spans) // SPAN_FIELDS, layers, rows, kept.data_ptr(), kept.numel())
        try:
            yield
        finally:
            begin(isa, None, 0, 0, 0, None, 0)

    def _scratch(self, size: int) -> Tensor:
        """`size` bytes or more that this thread reuses."""
        kept: Tensor | None = getattr(self._local, "bytes", None)
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):
                kept = torch.empty(size, dtype=torch.uint8)
            self._local.bytes = kept
        return kept


@functools.cache
def load_attention() -> Attention | None:
    """The attention of this process, built if it has to be; None, with one log line, where it cannot be had.

    Blocks for some seconds at a machine's first call: run it off the loop. The answer is kept.
    """
    kernel = load()
    if kernel is None:
        return None
    attention = Attention(kernel.library, kernel.isa)
    if _digest(attention) == SELF_CHECK:
        return attention
    reason = f"the self-check of attention failed on {kernel.isa.name}"
    log.info("kernel.absent", reason=reason, instead="torch")
    return None


def _digest(attention: Attention) -> str:
    """SHA-256 of the attention of made-up rows: several blocks, groups and row counts, in fp32 and bf16."""
    digest = hashlib.sha256()
    for heads, key_heads, dim, value_dim in ((7, 1, 24, 8), (4, 2, 64, 64), (3, 3, 8, 40)):
        for dtype in ROW_KINDS:
            rows, start, capacity = 6, 126, 140
            shapes = ((heads, dim), (key_heads, dim), (key_heads, value_dim))
            query, key, value = (
                _noise((1, count, rows + 1, width), seed).to(dtype)
                for seed, (count, width) in enumerate(shapes)
            )
            keys = _noise((key_heads, capacity, dim), 3).to(dtype)
            values = _noise((key_heads, capacity, value_dim), 4).to(dtype)
            planes = array("Q", (keys.data_ptr(), values.data_ptr()))
            form = attention.form_of(query, key, value, 0.5, rows)
            assert form is not None
            out = torch.empty(form.shape, dtype=dtype)
            spans = array("q", (planes.buffer_info()[0], 0, start, capacity, rows))
            attention.run(form, spans, 0, query, key, value, out)
            for made in (out, keys, values):
                digest.update(made.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

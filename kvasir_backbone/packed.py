"""Many requests in one forward pass: their KV memory, and attention for each request by itself.

The rows of all segments of a step lie behind one another in a batch of one; transformers' model runs over
them as over one long text. Its attention function is ours: keys and values go to each request's own memory,
and every segment attends to its own request only, all of them in one call of the C core, or by torch one by
one. The last rows of a batch are padding, so that no real row is in a matrix product of fewer than `MIN_ROWS`
rows or among the last elements of an element-wise function; both would change its last bits with its company.

Knows segments, keys and values. Knows no experts, no tokens and no scheduling.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvasir_node.kernels.attention import Attention, Form

from .scheduler import Segment

ATTENTION: Final = "kvasir_packed"
"""The name of the attention function in transformers' attention interface."""
MIN_ROWS: Final = 4
"""Rows from which on a row of a matrix product does not depend on how many there are."""

active = threading.local()
"""This thread's `batch`, and `record`: what stands in for attention while a pass is recorded."""


def padded_rows(rows: int, least: int = MIN_ROWS) -> int:
    """Rows of a batch with `rows` real ones: at least one more, and at least `least`."""
    return max(rows + 1, least)


class _Kept:
    """One request's keys and values: [1, kv heads, capacity, dim] for each layer and kind.

    `planes` are the tensors' addresses, keys and values of each layer in turn (0 where there is none yet),
    `layers` how many first layers have them.
    """

    __slots__ = ("capacity", "layers", "planes", "tensors")

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.planes = array("Q")
        self.capacity = 0
        self.layers = 0

    def grow(self, capacity: int, filled: int) -> None:
        """Make room for `capacity` positions, the first `filled` of which are kept; layer by layer."""
        if capacity > self.capacity:
            self.capacity = capacity
            for layer, (keys, values) in self.tensors.items():
                self._put(layer, _grown(keys, capacity, filled), _grown(values, capacity, filled))

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's tensors, made like `key` and `value` [1, kv heads, any, dim] where there are none."""
        if layer not in self.tensors:
            self._put(layer, _room(key, self.capacity), _room(value, self.capacity))
        return self.tensors[layer]

    def _put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.tensors[layer] = (keys, values)
        self.planes.extend([0] * (2 * layer + 2 - len(self.planes)))
        self.planes[2 * layer] = keys.data_ptr()
        self.planes[2 * layer + 1] = values.data_ptr()
        while self.layers in self.tensors:
            self.layers += 1


class KvMemory:
    """Keys and values of every request, one growing tensor a request, layer and kind.

    A tensor has room for exactly the positions of the request's KV blocks: [1, kv heads, capacity, dim].
    `attention` is what computes with them; without it, and where it does not cover a layer, torch does.
    """

    def __init__(self, attention: Attention | None = None) -> None:
        self.attention = attention
        self._kept: dict[int, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(
            key.nbytes + value.nbytes
            for kept in list(self._kept.values())  # other threads add to them
            for key, value in list(kept.tensors.values())
        )

    def room(self, segment: Segment) -> _Kept:
        """The memory of the segment's request, with room for all of its capacity."""
        kept = self._kept.setdefault(segment.request, _Kept())
        kept.grow(segment.capacity, segment.start)
        return kept

    def release(self, request: int) -> None:
        """Free a request's memory."""
        self._kept.pop(request, None)


class PackedCache(Cache):
    """The cache that transformers' layers write to: passes new keys and values on to our attention."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Keys and values [1, kv heads, batch rows, dim] as they are: attention stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are given with every call."""
        return 0

    @property
    def is_compileable(self) -> bool:
        """Never."""
        return False

    def __len__(self) -> int:
        return 0


@dataclass(slots=True)
class _Placed:
    """A segment of a batch, the place of its first row there, and its request's memory."""

    segment: Segment
    place: int
    kept: _Kept
    mask: Tensor | None = None

    def span(self) -> tuple[int, int, int, int, int]:
        """As the C core takes it: see `Attention.run`."""
        planes, _ = self.kept.planes.buffer_info()
        return planes, self.place, self.segment.start, self.kept.capacity, self.segment.rows

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, out: Tensor
    ) -> None:
        """This segment's rows of `out`, by torch: see `attend`."""
        segment, rows = self.segment, self.segment.rows
        query, key, value = (part.narrow(2, self.place, rows) for part in (query, key, value))
        keys, values = (part[:, :, : segment.end] for part in self.kept.of_layer(layer, key, value))
        keys[:, :, segment.start :] = key
        values[:, :, segment.start :] = value
        if segment.rowwise or rows == 1:
            made = _rowwise(query, keys, values, segment, scaling)
        else:
            if self.mask is None:
                self.mask = _causal(segment)
            made = _attend(query, keys, values, self.mask, scaling)
        out[:, self.place : self.place + rows] = made.transpose(1, 2)


class PackedBatch:
    """The segments of one forward pass, behind one another, and where each begins; `rows` are real ones."""

    def __init__(self, segments: Sequence[Segment], memory: KvMemory) -> None:
        self.memory = memory
        self.placed: list[_Placed] = []
        self.rows = 0
        for segment in segments:
            self.placed.append(_Placed(segment, self.rows, memory.room(segment)))
            self.rows += segment.rows
        self.places = [each.place for each in self.placed]
        self._ready = min((each.kept.layers for each in self.placed), default=0)
        self._spans = self._all_spans()
        self._shape: object = None
        self._form: Form | None = None

    def step(self) -> AbstractContextManager[None]:
        """While active, recorded graphs of this thread find this batch."""
        attention = self.memory.attention
        return nullcontext() if attention is None else attention.step(self._spans, self._ready, self.rows)

    def form_of(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Form | None:
        """How the C core computes this layer, or None; the same for most layers of a pass."""
        attention = self.memory.attention
        if attention is None:
            return None
        shape = (
            query.shape, query.stride(), query.dtype, key.shape, key.stride(), key.dtype, value.shape,
            value.stride(), value.dtype, scaling,
        )  # fmt: skip
        if shape != self._shape:
            self._form = attention.form_of(query, key, value, scaling, self.rows)
            self._shape = shape
        return self._form

    def spans(self, layer: int, key: Tensor, value: Tensor) -> array[int]:
        """The segments as the C core takes them, with memory for this layer."""
        if layer >= self._ready:
            for each in self.placed:
                each.kept.of_layer(layer, key, value)
            self._spans = self._all_spans()
        return self._spans

    def _all_spans(self) -> array[int]:
        return array("q", itertools.chain.from_iterable(each.span() for each in self.placed))


@contextmanager
def packed(batch: PackedBatch) -> Iterator[None]:
    """Make `batch` the one of this thread's forward passes."""
    active.batch = batch
    with batch.step():
        try:
            yield
        finally:
            active.batch = None


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' layers call in the place of their own attention. See `attend`."""
    assert sliding_window is None, "this architecture does not fit the packed form"
    assert attention_mask is None, "this architecture does not fit the packed form"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    record = getattr(active, "record", None)
    return (record or attend)(module.layer_idx, query, key, value, scaling), None


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Store keys and values; attention of every segment to its own request.

    `query` [1, heads, batch rows, dim], `key` and `value` [1, kv heads, batch rows, dim]. Returns
    [1, batch rows, heads, dim]; rows of padding are zeros.
    """
    batch: PackedBatch = active.batch
    attention, form = batch.memory.attention, batch.form_of(query, key, value, scaling)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    if attention is not None and form is not None:
        attention.run(form, batch.spans(layer, key, value), layer, query, key, value, out)
        return out
    for each in batch.placed:
        each.attend(layer, query, key, value, scaling, out)
    out[:, batch.rows :] = 0
    return out


def register() -> None:
    """Register the attention function with transformers; doing so again changes nothing."""
    AttentionInterface.register(ATTENTION, packed_attention)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )


def _rowwise(query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scaling: float) -> Tensor:
    """Each row as if it came alone, which is how its position was computed the first time."""
    made = [
        _attend(query[:, :, row : row + 1], keys[:, :, :end], values[:, :, :end], None, scaling)
        for row, end in enumerate(range(segment.start + 1, segment.end + 1))
    ]
    return torch.cat(made, dim=2)


def _causal(segment: Segment) -> Tensor:
    """[rows, end]: row i sees positions up to its own."""
    return torch.ones(segment.rows, segment.end, dtype=torch.bool).tril(segment.start)


def _room(like: Tensor, capacity: int) -> Tensor:
    """Memory for `capacity` positions of keys or values like these."""
    return like.new_empty(1, like.shape[1], capacity, like.shape[3])


def _grown(kept: Tensor, capacity: int, filled: int) -> Tensor:
    """Memory of `capacity` positions, the first `filled` of which are as in `kept`."""
    grown = _room(kept, capacity)
    grown[:, :, :filled] = kept[:, :, :filled]
    return grown

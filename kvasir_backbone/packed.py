"""Many requests in one forward pass: their KV memory, and attention for each request by itself.

The rows of all segments of a step lie behind one another in a batch of one; transformers' model runs over
them as over one long text. Its attention function is ours: keys and values go to each request's own memory,
and every segment attends to its own request only. The last rows of a batch are
padding, so that no real row is in a matrix product of fewer than `MIN_ROWS` rows or among the last elements
of an element-wise function; both would change its last bits with its company.

Knows segments, keys and values. Knows no experts, no tokens and no scheduling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache

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


class KvMemory:
    """Keys and values of every request, one growing tensor a request, layer and kind.

    A tensor has room for exactly the positions of the request's KV blocks: [1, kv heads, capacity, dim].
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(
            key.nbytes + value.nbytes
            for layers in list(self._kept.values())  # other threads add to them
            for key, value in list(layers.values())
        )

    def store(self, segment: Segment, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the segment's `keys` and `values` [1, kv heads, rows, dim] at its positions.

        Returns views of the keys and values of all positions up to its end.
        """
        layers = self._kept.setdefault(segment.request, {})
        kept = layers.get(layer)
        if kept is None or kept[0].shape[2] < segment.capacity:
            kept = layers[layer] = (
                _grown(kept and kept[0], keys, segment), _grown(kept and kept[1], values, segment),
            )  # fmt: skip
        start, end = segment.start, segment.start + segment.rows
        kept[0].narrow(2, start, segment.rows).copy_(keys)
        kept[1].narrow(2, start, segment.rows).copy_(values)
        return kept[0].narrow(2, 0, end), kept[1].narrow(2, 0, end)

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
class PackedBatch:
    """The segments of one forward pass, behind one another, and where each begins."""

    segments: Sequence[Segment]
    memory: KvMemory
    places: list[int] = field(init=False)
    sizes: list[int] = field(init=False)
    rows: int = field(init=False)
    """Real rows."""
    masks: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [segment.rows for segment in self.segments]
        self.rows = sum(self.sizes)
        self.places, self.masks, place = [], [], 0
        for segment in self.segments:
            self.places.append(place)
            self.masks.append(None if segment.rowwise or segment.rows == 1 else _causal(segment))
            place += segment.rows


@contextlib.contextmanager
def packed(batch: PackedBatch) -> Iterator[None]:
    """Make `batch` the one of this thread's forward passes."""
    active.batch = batch
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
    sizes = [*batch.sizes, query.shape[2] - batch.rows]
    made = []
    # One cut of each tensor for all segments: a step of many short ones is made of small calls.
    cut = (torch.split(part, sizes, 2) for part in (query, key, value))
    for segment, mask, rows, new_keys, new_values in zip(batch.segments, batch.masks, *cut, strict=False):
        keys, values = batch.memory.store(segment, layer, new_keys, new_values)
        if segment.rowwise and segment.rows > 1:
            made.append(_rowwise(rows, keys, values, segment, scaling))
        else:
            made.append(_attend(rows, keys, values, mask, scaling))
    if sizes[-1]:
        made.append(query.new_zeros(1, query.shape[1], sizes[-1], value.shape[3]))
    return torch.cat(made, dim=2).transpose(1, 2)


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


def _grown(kept: Tensor | None, new: Tensor, segment: Segment) -> Tensor:
    """Memory of the segment's capacity with what `kept` holds before its start."""
    grown = new.new_empty(1, new.shape[1], segment.capacity, new.shape[3])
    if kept is not None:
        grown[:, :, : segment.start] = kept[:, :, : segment.start]
    return grown

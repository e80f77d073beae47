"""What one request keeps in memory while it runs: so much for each position, and so much whatever its length.

Linear attention, state-space and convolution layers keep a state of one size for each request, in a dtype of
their own choice; latent and sliding-window attention keep less for a position than plain attention. Only
transformers knows all of them, so the state is measured on the loaded model, with experts that answer zeros.

Knows bytes. Knows no model but by what it is given to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

    from .seam import RowKey

PROBE_ROWS: Final = (1, 9)
"""Lengths of the texts that are measured. One row is the shortest there is, and what it keeps beyond its own
position is the state; the second one tells what a position takes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a request keeps for each of its positions, and bytes beside."""

    token_bytes: int
    state_bytes: int

    def bytes(self, positions: int) -> int:
        """What a request of that many positions keeps, at most."""
        return self.state_bytes + positions * self.token_bytes


class Zeros:
    """A `Dispatcher` whose experts all answer zeros."""

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        return rows.new_zeros(len(rows), ids.shape[1], rows.shape[1])


def fit(measured: Mapping[int, int], token_bytes: int) -> Footprint:
    """The footprint that no measured text exceeds.

    `measured` maps positions, at least two lengths, to bytes kept; `token_bytes` is what a position takes by
    the configuration, and is raised where more was measured.
    """
    (short, low), (long, high) = min(measured.items()), max(measured.items())
    token_bytes = max(token_bytes, -(-(high - low) // (long - short)))
    return Footprint(token_bytes, max(0, *(kept - n * token_bytes for n, kept in measured.items())))


def held_bytes(cache: Any) -> int:
    """Bytes that the tensors in one of transformers' caches keep in memory, each storage once.

    A window's keys may be a view of a larger tensor, which lives as long; the states of recurrent layers lie
    in dictionaries. Single numbers, such as a window's size, are not what a budget is for.
    """
    import torch

    kept = [value for layer in cache.layers for value in vars(layer).values()]
    kept += [state for value in kept if isinstance(value, dict) for state in value.values()]
    tensors = [value for value in kept if isinstance(value, torch.Tensor) and value.dim()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(kept_after: Callable[[int], int], token_bytes: int) -> Footprint:
    """Measure with `kept_after(rows)`, which computes a text of that many rows and says what it keeps."""
    return fit({rows: kept_after(rows) for rows in PROBE_ROWS}, token_bytes)

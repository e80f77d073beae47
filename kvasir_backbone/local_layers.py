"""The first MoE layers kept here: their experts run on the backbone, and no worker sees their rows.

Hidden rows of the first layers are closest to the tokens (`docs/router-authority.md` has the figures, and
what this does not protect from). Layers kept local are in no plan, so no device claims, loads or serves
them; the backbone reads their experts from the checkpoint and needs memory and processor time for them.

Knows the seam and two dispatchers. Knows no model, no swarm and no market.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from relay.errors import ConfigError

from .seam import Dispatcher, RowKey, combine_of

if TYPE_CHECKING:
    from torch import Tensor

    from market.plans import LayerRecipe


def split_layers(
    recipes: Sequence[LayerRecipe], local: int
) -> tuple[tuple[LayerRecipe, ...], tuple[LayerRecipe, ...]]:
    """The first `local` MoE layers, kept here, and the rest, which the swarm serves.

    Raises `ConfigError` where nothing would be left for the swarm.
    """
    if not 0 <= local < len(recipes):
        raise ConfigError(
            f"--local-layers {local}: the model has {len(recipes)} MoE layers, and at least one must be "
            f"left to the swarm: give 0 to {len(recipes) - 1}"
        )
    return tuple(recipes[:local]), tuple(recipes[local:])


class LocalLayers:
    """A `Dispatcher` that runs `layers` by `local` and all others by `inner`."""

    def __init__(self, inner: Dispatcher, local: Dispatcher, layers: Collection[int]) -> None:
        self._inner = inner
        self._local = local
        self.layers = frozenset(layers)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        chosen = self._local if layer in self.layers else self._inner
        return chosen.dispatch(layer, rows, ids, keys, deadline_s)


class LocalLayersCombiner(LocalLayers):
    """The same over a `Combiner`."""

    def combine(
        self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor, keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:  # fmt: skip
        """See `Combiner.combine`. A local layer's outputs are added up in fp32, in the order of the ids."""
        if layer not in self.layers:
            combine = combine_of(self._inner)
            assert combine is not None
            return combine(layer, rows, ids, weights, keys, deadline_s)
        outputs = self._local.dispatch(layer, rows, ids, keys, deadline_s)
        return (outputs.float() * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)


def keep_local(inner: Dispatcher, local: Dispatcher, layers: Collection[int]) -> Dispatcher:
    """`inner` with `layers` run by `local`; `inner` itself where there are none."""
    if not layers:
        return inner
    made = LocalLayers if combine_of(inner) is None else LocalLayersCombiner
    return made(inner, local, layers)

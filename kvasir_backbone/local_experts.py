"""Experts run here, straight from the checkpoint: the fallback, and what audits compare with.

The same recipes and the same arithmetic as on a node (`kvasir_node.recipes`, `kvasir_node.experts`), one
expert at a time, the most recently used kept in memory under a bound.

Knows a checkpoint's bytes and a plan. Knows no owners and no network; chooses no expert.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from market.plans import ByteRange, LayerRecipe, Plan
from relay.errors import ConfigError, KvasirError

from .seam import DispatchFailed, RowKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvasir_node.experts import Execution, Ffn

DEFAULT_CACHE_BYTES = 256 * 1024 * 1024
"""Memory that kept experts may take unless said otherwise."""


class LocalExperts:
    """Runs any expert of a plan from its stored bytes. A `Dispatcher` by itself.

    `read` gives the bytes of the plan's files, `cache_bytes` bounds what is kept (0 keeps nothing),
    `precision` is the one that experts are run at ("stored" for the fallback, a replica's own for its
    audits), `execution` the arithmetic (None: checked and chosen once for this plan), `served` the part of
    the plan that nodes see, whose numerics class counts (None: all of it). Safe to call from several
    threads; experts run one at a time.
    """

    def __init__(
        self,
        read: Callable[[ByteRange], memoryview],
        plan: Plan,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        precision: str = "stored",
        execution: Execution | None = None,
        served: Plan | None = None,
    ) -> None:
        from kvasir_node import kernels
        from kvasir_node.experts import choose_execution

        if cache_bytes < 0:
            raise ConfigError("the expert cache cannot be smaller than nothing")
        self.plan = plan
        self._served = plan if served is None else served
        self.precision = precision
        if execution is None:
            execution = choose_execution(plan, precision, kernels.load(precision))
        self.execution = execution
        self.loads = 0
        self._read = read
        self._bound = cache_bytes
        self._layers = {recipe.layer: recipe for recipe in plan.layers}
        self._kept: OrderedDict[tuple[int, int], tuple[Ffn, int]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the experts in memory now."""
        return self._kept_bytes

    @property
    def numerics(self) -> str:
        """The numerics class of what this computes."""
        from kvasir_node.experts import numerics_class

        return numerics_class(self._served, self.precision, self.execution)

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        """One expert on `rows` [n, width] of any float dtype -> [n, width] of the same dtype.

        Computed in fp32 and rounded once. Raises `ConfigError` where the checkpoint's bytes are gone or
        damaged, `KeyError` for a layer or expert that the plan does not have.
        """
        import torch

        with self._lock, torch.inference_mode():
            return self._expert(layer, expert)(rows.float().contiguous()).to(rows.dtype)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`. Rows whose expert cannot be read fail; the deadline does not apply."""
        import torch

        count, k = ids.shape
        flat = ids.reshape(-1)
        # One row of the output a (row, expert) pair; pairs of one expert side by side, one product each.
        order = torch.argsort(flat, stable=True)
        experts, sizes = torch.unique_consecutive(flat[order], return_counts=True)
        out = rows.new_empty(count * k, rows.shape[1])
        failed: dict[int, str] = {}
        for expert, pairs in zip(experts.tolist(), torch.split(order, sizes.tolist()), strict=True):
            where = torch.div(pairs, k, rounding_mode="floor")
            try:
                out[pairs] = self.run(layer, int(expert), rows[where])
            except KvasirError as error:
                failed.update(dict.fromkeys(where.tolist(), str(error)))
                out[pairs] = 0
        result = out.view(count, k, -1)
        if failed:
            raise DispatchFailed(next(iter(failed.values())), rows=failed, outputs=result)
        return result

    def _expert(self, layer: int, expert: int) -> Ffn:
        """The expert bound and ready, from memory or loaded now; the lock is held."""
        key = (layer, expert)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        recipe = self._layers[layer]
        if not 0 <= expert < recipe.experts:
            raise KeyError(f"layer {layer} has no expert {expert}")
        ffn, size = self._load(recipe, expert)
        if size <= self._bound:
            self._kept[key] = (ffn, size)
            self._kept_bytes += size
            while self._kept_bytes > self._bound:
                _, (_, freed) = self._kept.popitem(last=False)
                self._kept_bytes -= freed
        return ffn

    def _load(self, recipe: LayerRecipe, expert: int) -> tuple[Ffn, int]:
        from kvasir_node.experts import quantise
        from kvasir_node.recipes import load_expert

        tensors = quantise(load_expert(recipe, expert, self._read), self.precision)
        self.loads += 1
        return self.execution.bind(tensors, recipe.formula), tensors.nbytes

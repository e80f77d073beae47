"""An audited output made again here: what this device's own kernel gives for the row of some evidence.

The row went to this device once already. Its weights are read from the cache, so that nothing of what is
being served is touched, and nothing is fetched.

Knows evidence, the cache and experts. Knows no limits and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from market.client import MarketClient
from market.evidence import Evidence, digest
from market.plans import LayerRecipe, Plan
from relay.errors import Refused

from .cache import WeightCache, WindowBytes
from .ffn import Execution
from .loading import Loader
from .precision import quantise
from .recipes import load_expert
from .residual import residual
from .tensors import WIRE_TORCH, bytes_to_rows, from_buffer, partial_sums


class Recomputer:
    """Makes outputs again. `market` and `loader` give the present ones, `threads` is where it is done."""

    def __init__(
        self,
        market: Callable[[], MarketClient],
        loader: Callable[[], Loader],
        cache: WeightCache,
        threads: Executor,
    ) -> None:
        self._market = market
        self._loader = loader
        self._cache = cache
        self._threads = threads

    async def run(self, record: bytes) -> dict[str, Any]:
        """The figures for a record's evidence, as JSON values: see `figures`.

        Raises `Refused` where the market keeps no row for it, or its weights are no longer on this disk.
        """
        _, evidence = await self._market().record(record)
        if evidence is None or not evidence.row or not evidence.output:
            raise Refused("not_found", "the market keeps no row for that record: only its digests are known")
        if (evidence.plan, evidence.window) not in self._cache.whole_windows():
            raise Refused(
                "not_found",
                f"the weights of {evidence.window} are no longer in this node's cache, and it needs them",
            )
        plan = await self._loader().plan(evidence.plan)
        hashes = await self._market().hashes(evidence.plan, evidence.window)
        execution = {p: await self._loader().execution(evidence.plan, p) for p in _precisions(evidence)}

        def work() -> dict[str, Any]:
            entry = self._cache.open(plan, evidence.plan, evidence.window, hashes.chunks)
            try:
                data = entry.map()
            except BaseException:
                entry.close()
                raise
            try:
                return figures(evidence, make_again(plan, evidence, data, execution))
            finally:
                data.close()

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _precisions(evidence: Evidence) -> set[str]:
    return {evidence.precision, *evidence.precisions}


def make_again(plan: Plan, evidence: Evidence, data: WindowBytes, executions: dict[str, Execution]) -> Tensor:
    """The output [1, width] in the wire dtype, from the window's bytes.

    Raises `Refused` for a partial sum over several windows.
    """
    recipe = next(layer for layer in plan.layers if layer.layer == evidence.layer)
    row = bytes_to_rows(evidence.row, 1, plan.width, evidence.wire_dtype)
    if not evidence.ids:
        made = _run(recipe, [evidence.expert], [evidence.precision], data, executions, row)
        return made.to(WIRE_TORCH[evidence.wire_dtype])
    if not all(evidence.window.contains(evidence.layer, expert) for expert in evidence.ids):
        raise Refused("not_found", "the partial sum is over several windows: it cannot be made from one")
    made = _run(recipe, evidence.ids, evidence.precisions, data, executions, row)
    weights = from_buffer(evidence.weights, torch.float32)
    return partial_sums(made, weights, [0] * len(made), 1).to(WIRE_TORCH[evidence.wire_dtype])


def _run(
    recipe: LayerRecipe,
    experts: Sequence[int],
    precisions: Sequence[str],
    data: WindowBytes,
    executions: dict[str, Execution],
    row: Tensor,
) -> Tensor:
    """fp32 [experts, width]: each expert at its precision on the same row."""
    outputs = []
    with torch.inference_mode():
        for expert, precision in zip(experts, precisions, strict=True):
            tensors = quantise(load_expert(recipe, expert, data.read), precision)
            ffn = executions[precision].bind(tensors, recipe.formula)
            outputs.append(ffn(row.float().contiguous()))
    return torch.cat(outputs)


def figures(evidence: Evidence, again: Tensor) -> dict[str, Any]:
    """How far the output made again is from the one answered then, and from the one expected (d each)."""
    width = again.shape[1]

    def d(other: bytes) -> float | None:
        if not other:
            return None
        rows = bytes_to_rows(other, 1, width, evidence.wire_dtype)
        return min(float(residual(again, rows).max()), 1e9)

    return {
        "d_answered": d(evidence.output),
        "d_expected": d(evidence.expected),
        "limit": evidence.limit,
        "digests_match": digest(evidence.row) == evidence.row_digest
        and digest(evidence.output) == evidence.output_digest,
    }

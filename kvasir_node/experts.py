"""One window's experts in memory, ready to run.

Knows windows, plans and how experts load, quantise and run. Knows no requests, no peers, and nothing that
could choose an expert.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from market.plans import Plan
from market.windows import Window
from relay.errors import ConfigError, Refused

from .execution import check_batch_invariance, check_layer, choose_execution, numerics_class
from .ffn import TORCH, Execution, Ffn, Kernel, run_expert
from .precision import hash_expert, quantisation_error, quantise
from .recipes import ExpertTensors, Read, RecipeError, load_expert
from .tensors import WIRE_TORCH

__all__ = [
    "TORCH",
    "Execution",
    "ExpertTensors",
    "Ffn",
    "Kernel",
    "WindowExperts",
    "check_batch_invariance",
    "check_layer",
    "choose_execution",
    "load_expert",
    "numerics_class",
    "quantisation_error",
    "quantise",
    "run_expert",
]


class WindowExperts:
    """Every expert of one window in memory, ready to run.

    `quantised_hash` is the SHA-256 over everything kept (see `hash_expert`), `kept_bytes` its size,
    `numerics` the replica's numerics class. Made by `load`.
    """

    def __init__(
        self,
        plan: Plan,
        window: Window,
        precision: str,
        ffns: Mapping[tuple[int, int], Ffn],
        *,
        kept_bytes: int = 0,
        execution: Execution = TORCH,
        quantised_hash: bytes = b"",
    ) -> None:
        self.plan = plan
        self.window = window
        self.precision = precision
        self.execution = execution
        self.quantised_hash = quantised_hash
        self.numerics = numerics_class(plan, precision, execution)
        self.kept_bytes = kept_bytes
        self.wire_dtype = WIRE_TORCH[plan.wire_dtype]
        self._ffns = dict(ffns)

    @classmethod
    def load(
        cls,
        plan: Plan,
        window: Window,
        precision: str,
        read: Read,
        *,
        execution: Execution = TORCH,
        progress: Callable[[int, int], None] | None = None,
    ) -> WindowExperts:
        """Carry out the recipes of every expert of `window` and quantise. Blocks; run it off the loop.

        `progress(done, total)` counts experts. Tensors of the stored precision may share the memory that
        `read` returns. Raises `ConfigError` (`RecipeError`) for what cannot be carried out, `Refused` for a
        precision that the plan does not allow; what `read` raises passes through.
        """
        if precision not in plan.precisions:
            allowed = ", ".join(plan.precisions)
            raise Refused("forbidden", f"the plan allows the precisions {allowed}, not {precision}")
        layers = plan.window_layers(window)
        for recipe in layers:
            check_layer(plan, recipe)
        count = window.expert_end - window.expert_start
        digest = hashlib.sha256(f"kvasir experts 1 {precision}\n".encode("ascii"))
        ffns: dict[tuple[int, int], Ffn] = {}
        kept = 0
        for recipe in layers:
            for expert in range(window.expert_start, window.expert_end):
                try:
                    tensors = quantise(load_expert(recipe, expert, read), precision)
                except RecipeError:
                    raise
                except ConfigError as error:
                    raise ConfigError(f"layer {recipe.layer}, expert {expert}: {error}") from None
                hash_expert(digest, recipe.layer, expert, tensors)
                kept += tensors.nbytes
                # A kernel may keep the weights in an order of its own: nothing else holds on to them here.
                ffns[recipe.layer, expert] = execution.bind(tensors, recipe.formula)
                if progress is not None:
                    progress(len(ffns), len(layers) * count)
        return cls(
            plan,
            window,
            precision,
            ffns,
            kept_bytes=kept,
            execution=execution,
            quantised_hash=digest.digest(),
        )

    def holds(self, layer: int, expert: int) -> bool:
        """Whether (layer, expert) is in this window."""
        return (layer, expert) in self._ffns

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        """Run one expert: `rows` [n, W] of any float dtype -> outputs [n, W] of the same, rounded once.

        Raises `KeyError` unless the window `holds` it. Not thread-safe: one compute thread a window.
        """
        ffn = self._ffns[layer, expert]
        with torch.inference_mode():
            return ffn(rows.float().contiguous()).to(rows.dtype)

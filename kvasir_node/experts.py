"""One window's experts in memory, ready to run.

Knows windows, plans and how experts load, quantise and run. Knows no requests, no peers, and nothing that
could choose an expert.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from market.plans import GateFormula, Plan
from market.windows import Window
from relay.errors import ConfigError, Refused

from .execution import (
    check_batch_invariance,
    check_layer,
    choose_execution,
    numerics_class,
    synthetic_rows,
)
from .ffn import TORCH, Execution, Ffn, GroupKernel, Kernel, run_expert
from .kernels import ROW_KINDS, CpuKernel
from .precision import hash_expert, quantisation_error, quantise
from .recipes import ExpertTensors, Read, RecipeError, load_expert
from .residual import residual
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

PROBED: Final = 8
"""Experts of a window whose error against the stored precision is measured at load."""

PROBE_ROWS: Final = 8


class WindowExperts:
    """Every expert of one window in memory, ready to run.

    `quantised_hash` is the SHA-256 over everything kept (see `hash_expert`), `kept_bytes` its size,
    `numerics` the replica's numerics class, `error` the largest d (`kvasir_node.residual`) from the stored
    precision that was measured at load on some of the experts. Made by `load`.
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
        error: float = 0.0,
    ) -> None:
        self.plan = plan
        self.window = window
        self.precision = precision
        self.execution = execution
        self.quantised_hash = quantised_hash
        self.numerics = numerics_class(plan, precision, execution)
        self.kept_bytes = kept_bytes
        self.error = error
        self.wire_dtype = WIRE_TORCH[plan.wire_dtype]
        self._ffns = dict(ffns)
        self.direct = _direct(execution, self._ffns, self.wire_dtype)
        """How the C core runs experts where rows lie, or None where it does not run all of them."""

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
        kept, worst = 0, 0.0
        probed = _probed(len(layers) * count) if precision != "stored" else frozenset()
        for recipe in layers:
            for expert in range(window.expert_start, window.expert_end):
                try:
                    stored = load_expert(recipe, expert, read)
                    tensors = quantise(stored, precision)
                except RecipeError:
                    raise
                except ConfigError as error:
                    raise ConfigError(f"layer {recipe.layer}, expert {expert}: {error}") from None
                hash_expert(digest, recipe.layer, expert, tensors)
                kept += tensors.nbytes
                # A kernel may keep the weights in an order of its own: nothing else holds on to them here.
                ffn = execution.bind(tensors, recipe.formula)
                if len(ffns) in probed:
                    worst = max(worst, _error(ffn, stored, recipe.formula, plan.width, seed=len(ffns)))
                ffns[recipe.layer, expert] = ffn
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
            error=worst,
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

    @property
    def grouped(self) -> bool:
        """Whether `run_many` is faster than as many `run`: on an accelerator."""
        return isinstance(self.execution.kernel, GroupKernel)

    def run_many(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Run some experts of one layer, each on its own rows, as `run` does: the outputs, in order."""
        kernel: object = self.execution.kernel
        ffns = [self._ffns[layer, expert] for expert in experts]
        if not isinstance(kernel, GroupKernel) or not all(kernel.runs(ffn) for ffn in ffns):
            return [self.run(layer, expert, part) for expert, part in zip(experts, rows, strict=True)]
        with torch.inference_mode():
            outputs = kernel.run_group(ffns, [part.float().contiguous() for part in rows])
            return [out.to(part.dtype) for out, part in zip(outputs, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Direct:
    """Experts as the C core knows them: its kernel, the address of each (layer, expert), and the scratch
    that any of them needs in bytes. `kind` is the wire dtype's.
    """

    kernel: CpuKernel
    addresses: Mapping[tuple[int, int], int]
    scratch: int
    kind: int


def _direct(execution: Execution, ffns: Mapping[tuple[int, int], Ffn], wire: torch.dtype) -> Direct | None:
    kernel = execution.kernel
    kind = ROW_KINDS.get(wire)
    if not isinstance(kernel, CpuKernel) or kind is None or sys.byteorder == "big":
        return None  # rows on the wire are little-endian, and the core reads them as they are
    addresses = {key: address for key, ffn in ffns.items() if (address := kernel.address(ffn)) is not None}
    if not ffns or len(addresses) < len(ffns):
        return None
    return Direct(kernel, addresses, kernel.group_scratch(tuple(addresses.values())), kind)


def _probed(count: int) -> frozenset[int]:
    """Which of `count` experts are measured: at most `PROBED`, spread evenly."""
    step = max(1, -(-count // PROBED))
    return frozenset(range(0, count, step))


def _error(ffn: Ffn, stored: ExpertTensors, formula: GateFormula, width: int, *, seed: int) -> float:
    """The largest d of an expert as it runs here against the same expert as stored, on made-up rows."""
    rows = synthetic_rows(PROBE_ROWS, width, seed=seed + 1)
    with torch.inference_mode():
        return float(residual(ffn(rows), run_expert(stored, formula, rows)).max())

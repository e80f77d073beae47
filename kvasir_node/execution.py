"""Which way of running experts this process uses, proved at start on the plan's own shapes.

Kernels are compared with torch, and torch itself is checked to be batch invariant. The same shapes give the
numerics class its probe. All on made-up experts, equal on every machine, so nothing needs to be loaded.

Knows plans' layers, kernels and torch. Knows no weights and no windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import structlog
import torch
from torch import Tensor

from market.plans import GateFormula, LayerRecipe, Plan
from relay.errors import ConfigError

from .ffn import TORCH, Execution, Ffn, Kernel
from .formulas import check_formula, has_gate
from .numerics import BLOCK_ELEMENTS, DenseMatrix, Matrix, hash_tensor
from .precision import QUANTISERS, quantise
from .recipes import ExpertTensors, check_recipe
from .residual import residual

log = structlog.get_logger("node")

KERNEL_LIMITS: Final = {"none": 1e-9, "int16": 1e-8, "int8": 1e-4}
"""A kernel's activation quantiser -> the largest d from torch (fp32, same weights) at which it is used."""


def check_layer(plan: Plan, recipe: LayerRecipe) -> None:
    """Refuse a layer whose recipe, formula or shapes this version cannot carry out.

    Raises `ConfigError` naming the layer; run it before anything is downloaded.
    """
    check_recipe(recipe)
    try:
        check_formula(recipe.formula)
    except ConfigError as error:
        raise ConfigError(f"layer {recipe.layer}: {error}") from None
    shapes = {tensor.role: tuple(tensor.shape) for tensor in recipe.tensors}
    inner, width = shapes["up"][0], plan.width
    expected = {
        "gate": (inner, width), "up": (inner, width), "down": (width, inner), "gate_bias": (inner,),
        "up_bias": (inner,), "down_bias": (width,), "norm": (width,),
    }  # fmt: skip
    for role, shape in shapes.items():
        if shape != expected[role]:
            raise ConfigError(f"layer {recipe.layer}: {role} has shape {shape}, expected {expected[role]}")
    if has_gate(recipe.formula) != ("gate" in shapes):
        raise ConfigError(f"layer {recipe.layer}: formula {recipe.formula.name!r} and its tensors disagree")
    if "gate_bias" in shapes and "gate" not in shapes:
        raise ConfigError(f"layer {recipe.layer}: a bias of a gate that is not there")
    if (recipe.formula.norm_eps is not None) != ("norm" in shapes):
        raise ConfigError(f"layer {recipe.layer}: norm_eps and the norm's tensor come together")


def choose_execution(plan: Plan, precision: str, kernel: Kernel | None = None) -> Execution:
    """The fastest way to run this plan's experts here that keeps its promises.

    Checks on synthetic experts of every shape and formula of the plan: a kernel must agree with torch
    within `KERNEL_LIMITS` and be batch invariant, torch must be batch invariant or runs in blocks of exactly
    4 rows. What falls back is logged. Takes some milliseconds a distinct shape.
    """
    probes = [synthetic_expert(recipe, precision) for recipe in distinct_layers(plan)]
    execution = _choose_torch(probes, plan.width, precision)
    if kernel is None:
        return execution
    reason = next(filter(None, (_kernel_fault(kernel, *probe) for probe in probes)), None)
    if reason is None:
        return replace(execution, kernel=kernel)
    log.warning("kernel.refused", family=kernel.family, precision=precision, reason=reason)
    return execution


def _choose_torch(
    probes: Iterable[tuple[ExpertTensors, GateFormula]], width: int, precision: str
) -> Execution:
    for execution in (Execution(), Execution(exact_rows=True)):
        if all(check_batch_invariance(execution.bind(*probe), width) for probe in probes):
            return execution
        log.warning("batch.variant", family=execution.family, precision=precision)
    return Execution(exact_rows=True, invariant=False)


def _kernel_fault(kernel: Kernel, tensors: ExpertTensors, formula: GateFormula) -> str | None:
    """Why this kernel must not run this expert, or None. A form it does not cover is no fault."""
    ffn = kernel.bind(tensors, formula)
    if ffn is None:
        return None
    rows = synthetic_rows(16, tensors.matrices["down"].shape[0])
    with torch.inference_mode():
        worst = float(residual(ffn(rows), TORCH.bind(tensors, formula)(rows)).max())
    if not worst <= KERNEL_LIMITS[kernel.activations]:
        return f"d = {worst:.2e} from torch, over {KERNEL_LIMITS[kernel.activations]:.0e}"
    return None if check_batch_invariance(ffn, rows.shape[1]) else "outputs depend on the batch"


def check_batch_invariance(ffn: Ffn, width: int) -> bool:
    """Whether an expert's output rows are bit-identical whatever rows run beside them.

    Tries batches of 1 to 33 rows at several places against one batch of 67.
    """
    with torch.inference_mode():
        rows = synthetic_rows(67, width)
        whole = ffn(rows)
        return all(
            torch.equal(ffn(rows[start : start + size].contiguous()), whole[start : start + size])
            for size in (1, 2, 3, 4, 5, 7, 8, 16, 33)
            for start in (0, 13, 67 - size)
        )


def distinct_layers(plan: Plan) -> tuple[LayerRecipe, ...]:
    """One layer of each distinct formula, shapes and stored dtypes."""
    seen: dict[object, LayerRecipe] = {}
    for recipe in plan.layers:
        key = (
            recipe.formula,
            tuple((t.role, t.shape, tuple(s.dtype for s in t.sources), t.ops) for t in recipe.tensors),
        )
        seen.setdefault(key, recipe)
    return tuple(seen.values())


def synthetic_rows(count: int, width: int, *, seed: int = 1) -> Tensor:
    """fp32 rows [count, width] in [-1, 1), the same on every machine."""
    return _noise((count, width), seed) * 2.0


def synthetic_expert(recipe: LayerRecipe, precision: str) -> tuple[ExpertTensors, GateFormula]:
    """An expert of that layer's shapes and formula with made-up weights, the same on every machine."""
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Tensor] = {}
    for seed, tensor in enumerate(recipe.tensors, start=2):
        values = _noise(tensor.shape, seed)
        if len(tensor.shape) == 1:
            vectors[tensor.role] = values
            continue
        plain = not any(op[0].startswith("dequant_") for op in tensor.ops)
        kept = plain and tensor.sources[0].dtype in ("BF16", "F16")
        dtype = (
            torch.float32
            if not kept
            else {"BF16": torch.bfloat16, "F16": torch.float16}[tensor.sources[0].dtype]
        )
        matrices[tensor.role] = DenseMatrix((values * (3.0 / tensor.shape[1]) ** 0.5 * 2.0).to(dtype))
    return quantise(ExpertTensors(matrices, vectors, {}), precision), recipe.formula


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32 in [-0.5, 0.5) by integer arithmetic alone: equal bits on every machine."""
    count = 1
    for dimension in shape:
        count *= dimension
    state = torch.arange(count, dtype=torch.int64) + (seed << 40)
    for multiplier in (0x45D9F3B, 0x119DE1F3):
        state = ((state ^ (state >> 16)) * multiplier) & 0x7FFFFFFF
    return ((state ^ (state >> 16)) & 0xFFFFF).to(torch.float32).view(shape) / 2**20 - 0.5


def numerics_class(plan: Plan, precision: str, execution: Execution = TORCH) -> str:
    """The name of everything that decides a replica's last bits.

    "1/quantiser/activation quantiser/wire dtype/accumulation/kernel family/probe": the probe is a digest of
    what this process computes for made-up experts of the plan's shapes, so that two machines whose libraries
    or instruction sets differ in the last bit are never in one class.
    """
    digest = hashlib.sha256()
    with torch.inference_mode():
        for recipe in distinct_layers(plan):
            tensors, formula = synthetic_expert(recipe, precision)
            hash_tensor(digest, execution.bind(tensors, formula)(synthetic_rows(5, plan.width)))
    activations = "none" if execution.kernel is None else execution.kernel.activations
    accumulation = f"fp32b{BLOCK_ELEMENTS}" if execution.invariant else f"variant{id(execution):x}"
    family = f"{execution.family}/{digest.hexdigest()[:12]}"
    return f"1/{QUANTISERS[precision]}/{activations}/{plan.wire_dtype}/{accumulation}/{family}"

"""Experts on a GPU through torch: CUDA and Apple's MPS, grouped so that many rows take few launches.

Weights stay on the device in the form in which they are kept and are widened to fp32 on use, a group of
experts at a time; products, formula and sums are fp32 there, and a result is rounded once, as on the CPU.
Rows of all experts of a call go to the device in one transfer and come back in one. The same code runs on
the device "cpu", which is how it is tested.

A GPU's products do not promise that a row's bits are independent of its companions, only d <= 1e-9 from
the CPU; so such a replica is in a numerics class of its own.

Knows torch devices, experts' tensors and formulas. Knows no plans but the shapes that are checked at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import structlog
import torch
from torch import Tensor

from market.plans import GateFormula, Plan
from relay.errors import ConfigError

from .execution import distinct_layers, synthetic_expert, synthetic_rows
from .ffn import TORCH, Execution, Ffn
from .formulas import apply_formula, apply_norm, has_gate
from .numerics import DenseMatrix, Int4Matrix, Int8Matrix, Matrix
from .recipes import ExpertTensors, StoredTensor, materialise
from .residual import residual

log = structlog.get_logger("node")

LIMIT: Final = 1e-9
"""The largest d from torch on the CPU (fp32, the same kept weights) at which a device is used."""

WIDENED_BYTES: Final = 256 << 20
"""Weights of one matrix of a group, widened to fp32, are at most this much (but one expert at least)."""


def find_device(name: str) -> torch.device | None:
    """The accelerator that `--device` names, or the one there is for "auto"; None: the CPU.

    Raises `ConfigError` for one that torch does not find here.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "cpu":
        return None
    if name == "auto":
        return next((torch.device(kind) for kind, there in found.items() if there), None)
    if not found[name]:
        needs = {"cuda": "an NVIDIA driver and a torch built with CUDA", "mps": "macOS on Apple silicon"}[
            name
        ]
        raise ConfigError(f"--device {name}: torch finds none here ({needs} is needed); leave it out")
    return torch.device(name)


def describe_device(device: torch.device) -> str:
    """The accelerator's name, for a person."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} through torch"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of the accelerator, or None where its memory is the machine's own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.driver_allocated_memory()), total
    return None


def choose_accelerated(plan: Plan, precision: str, device: torch.device) -> Execution | None:
    """Execution on `device` if it agrees with the CPU on every shape and formula of the plan, else None.

    Which it is, is logged. Takes some milliseconds a distinct shape, a second at a GPU's first use.
    """
    kernel = DeviceKernel(device)
    try:
        for recipe in distinct_layers(plan):
            kernel_fault = _fault(kernel, *synthetic_expert(recipe, precision), plan.width)
            if kernel_fault is not None:
                break
        else:
            kernel_fault = None
    except (RuntimeError, TypeError, NotImplementedError) as error:  # what a device cannot do, torch says so
        kernel_fault = str(error).splitlines()[0] if str(error) else type(error).__name__
    if kernel_fault is not None:
        log.warning(
            "accelerator.refused", device=str(device), precision=precision, reason=kernel_fault, instead="cpu"
        )
        return None
    log.info("accelerator.chosen", device=str(device), precision=precision, family=kernel.family)
    return replace(TORCH, kernel=kernel, invariant=False)


def _fault(kernel: DeviceKernel, tensors: ExpertTensors, formula: GateFormula, width: int) -> str | None:
    """Why the device must not run this expert, or None. Alone and in a group, few rows and many."""
    expert = kernel.bind(tensors, formula)
    if expert is None:
        return None
    reference = TORCH.bind(tensors, formula)
    batches = [synthetic_rows(count, width, seed=count) for count in (1, 3, 16, 70)]
    with torch.inference_mode():
        outputs = [expert(batches[0]), *kernel.run_group([expert] * len(batches), batches)]
        wanted = [reference(rows) for rows in (batches[0], *batches)]
        worst = max(float(residual(x, y).max()) for x, y in zip(outputs, wanted, strict=True))
    return None if worst <= LIMIT else f"d = {worst:.2e} from torch on the CPU, over {LIMIT:.0e}"


# --- running -----------------------------------------------------------------------------------------


class DeviceExpert:
    """One expert on the device; a `kvasir_node.ffn.Ffn`."""

    def __init__(self, kernel: DeviceKernel, tensors: ExpertTensors, formula: GateFormula) -> None:
        self.kernel, self.tensors, self.formula = kernel, tensors, formula
        shapes = [matrix.shape for matrix in tensors.matrices.values()]
        shapes += [(s.recipe.shape[0], s.recipe.shape[1]) for s in tensors.packed.values()]
        self.largest = max(height * width for height, width in shapes)
        """Elements of the largest matrix."""

    def __call__(self, rows: Tensor) -> Tensor:
        """fp32 rows [n, W] of the CPU -> fp32 rows [n, W] of the CPU."""
        return self.kernel.run_group([self], [rows])[0]


class DeviceKernel:
    """Experts on a torch device; a `kvasir_node.ffn.Kernel` that runs groups too. Not thread-safe."""

    activations = "none"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.family = f"{_architecture(device)}-torch-{torch.__version__.partition('+')[0]}"

    def bind(self, tensors: ExpertTensors, formula: GateFormula) -> DeviceExpert | None:
        """The expert with its weights on the device; None for a form that the device does not hold."""
        kept = [matrix.parts() for matrix in tensors.matrices.values()]
        dtypes = {part.dtype for parts in kept for part in parts}
        if self.device.type == "mps" and (tensors.packed or torch.float64 in dtypes):
            return None
        there: dict[int, Tensor] = {}  # two roles of one fused, quantised tensor share it there as here
        for stored in tensors.packed.values():
            there |= {id(part): part.to(self.device) for part in stored.sources if id(part) not in there}
        moved = ExpertTensors(
            {role: _move(matrix, self.device) for role, matrix in tensors.matrices.items()},
            {role: vector.to(self.device) for role, vector in tensors.vectors.items()},
            {
                role: StoredTensor(stored.recipe, tuple(there[id(part)] for part in stored.sources))
                for role, stored in tensors.packed.items()
            },
        )
        return DeviceExpert(self, moved, formula)

    def runs(self, ffn: Ffn) -> bool:
        """Whether `ffn` was bound here."""
        return isinstance(ffn, DeviceExpert) and ffn.kernel is self

    def run_group(self, experts: Sequence[Ffn], rows: Sequence[Tensor]) -> list[Tensor]:
        """Run experts of one layer, each on its fp32 rows [n, W]: the outputs, in order, on the CPU."""
        bound = [expert for expert in experts if isinstance(expert, DeviceExpert)]
        assert len(bound) == len(rows), "these experts are not all bound here"
        counts = [part.shape[0] for part in rows]
        total = sum(counts)
        if not total:
            return [part.clone() for part in rows]
        together = rows[0] if len(rows) == 1 else torch.cat(tuple(rows))
        inputs = together.to(self.device)
        outputs = torch.empty_like(inputs)
        starts = [sum(counts[:index]) for index in range(len(counts))]
        for group in make_groups(counts, max(1, WIDENED_BYTES // (4 * bound[0].largest))):
            self._run(
                [bound[index] for index in group],
                [(starts[index], counts[index]) for index in group],
                inputs,
                outputs,
            )
        return list(torch.split(outputs.cpu(), counts))

    def _run(
        self, experts: list[DeviceExpert], spans: list[tuple[int, int]], inputs: Tensor, outputs: Tensor
    ) -> None:
        """One group: rows padded to the longest, [G, M, W] through [G, out, in] matrices."""
        longest = max(count for _, count in spans)
        batch = inputs.new_zeros(len(spans), longest, inputs.shape[1])
        for place, (start, count) in enumerate(spans):
            batch[place, :count] = inputs[start : start + count]
        result = _ffn([materialise(expert.tensors) for expert in experts], experts[0].formula, batch)
        for place, (start, count) in enumerate(spans):
            outputs[start : start + count] = result[place, :count]


def make_groups(counts: Sequence[int], most: int) -> list[list[int]]:
    """Which experts run together, by index: at most `most`, and none with under half the rows of another
    (padding would cost more than a launch), except that a few rows more do not matter.
    """
    order = sorted((index for index, count in enumerate(counts) if count), key=lambda index: counts[index])
    groups: list[list[int]] = []
    for index in order:
        fits = groups and len(groups[-1]) < most and counts[index] <= 2 * counts[groups[-1][0]] + 8
        if fits:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _ffn(experts: list[ExpertTensors], formula: GateFormula, rows: Tensor) -> Tensor:
    """fp32 rows [G, M, W] -> [G, M, W], expert g on rows[g]."""
    up = _linear(rows, experts, "up")
    gate = _linear(rows, experts, "gate") if has_gate(formula) else None
    out = _linear(apply_formula(formula, gate, up), experts, "down")
    if formula.norm_eps is None:
        return out
    return torch.stack([apply_norm(formula, e.vectors["norm"], out[g]) for g, e in enumerate(experts)])


def _linear(rows: Tensor, experts: list[ExpertTensors], role: str) -> Tensor:
    """rows [G, M, in] -> [G, M, out], the weights widened for the product alone."""
    out = torch.bmm(
        rows, _widened([expert.matrices[role] for expert in experts], rows.device).transpose(1, 2)
    )
    biases = [expert.vectors[f"{role}_bias"] for expert in experts if f"{role}_bias" in expert.vectors]
    return out if not biases else out.add_(torch.stack(biases).unsqueeze(1))


def _widened(matrices: list[Matrix], device: torch.device) -> Tensor:
    """fp32 [G, out, in]; a single fp32 matrix is not copied."""
    first = matrices[0]
    if len(matrices) == 1 and isinstance(first, DenseMatrix) and first.tensor.dtype == torch.float32:
        return first.tensor.unsqueeze(0)
    wide = torch.empty(len(matrices), *first.shape, dtype=torch.float32, device=device)
    for place, matrix in enumerate(matrices):
        matrix.fill(0, matrix.shape[0], wide[place])
    return wide


def _move(matrix: Matrix, device: torch.device) -> Matrix:
    """The same matrix with its tensors on `device`."""
    match matrix:
        case DenseMatrix(tensor):
            return DenseMatrix(tensor.to(device))
        case Int8Matrix(values, scale):
            return Int8Matrix(values.to(device), scale.to(device))
        case Int4Matrix(packed, scale, minimum, width):
            return Int4Matrix(packed.to(device), scale.to(device), minimum.to(device), width)
    raise ConfigError(f"a matrix kept as {type(matrix).__name__} does not run on {device}")


def _architecture(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda-sm{major}{minor}"
    return f"{device.type}-grouped"


__all__ = [
    "DeviceExpert",
    "DeviceKernel",
    "choose_accelerated",
    "describe_device",
    "device_memory",
    "find_device",
    "make_groups",
]

"""Kernels: one expert's FFN on one thread, against this machine's read bandwidth and torch's own kernels.

Hidden 3072, expert width 1024. One row: each precision goes through more experts than fit a cache (256 MB of
them), in turns with a sum over 256 MB, so that whatever else runs slows both; the best of many turns counts
for each. 16 rows: our whole FFN against torch's three products alone, in pairs, the median ratio.

Run as a module (`python -m benches.kernel measure`) it is the measuring process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Report
from .process import in_child

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir_node.ffn import Ffn
    from kvasir_node.kernels import CpuKernel
    from kvasir_node.recipes import ExpertTensors

HIDDEN, WIDTH = 3072, 1024
SWEEP_BYTES = 256 * 1024 * 1024
TURNS_S = 15.0
"""How long the turns of the one-row measurement go on."""
PAIRS = 15
ROWS = (1, 2, 4, 8, 16, 64)
PRECISIONS = {"fp32": "stored", "bf16": "bf16", "int8": "int8", "int4": "int4"}
SHARES = {"fp32": 0.88, "bf16": 0.70, "int8": 0.60, "int4": 0.50}
INT4_SHARE_WITHOUT_INT8_ROWS = 0.35
ERRORS = {"bf16": 1e-5, "int8": 2e-4, "int4": 2e-2}
VS_TORCH = 2.0


def run(work_dir: Path | None) -> Report:
    """Measure in a process of its own, and compare with the promised figures."""
    found = in_child("kernel", "measure")
    table = found.pop("table")
    report = Report(found)
    report.findings.extend(table)
    if found["family"] == "torch":
        report.promise("a C compiler is here and the kernel passes its self-check", False)
        return report
    for name, least in SHARES.items():
        if name == "int4" and not found["int4_int8_activations"]:
            least = INT4_SHARE_WITHOUT_INT8_ROWS
        report.promise(
            f"{name}: one row at {least:.2f} of read bandwidth or more", found[f"{name}_share"] >= least
        )
    for name in ("int8", "int4"):
        ratio = found[f"{name}_16rows_vs_torch"]
        report.promise(f"{name}: 16 rows {VS_TORCH:g} times as fast as torch or more", ratio >= VS_TORCH)
    for name, most in ERRORS.items():
        report.promise(f"{name}: d from fp32 of {most:.0e} or less", found[f"d_{name}"] <= most)
    return report


# --- the measuring process ----------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """The figures; `table` is lines for a person."""
    import torch

    from kvasir_node import kernels

    torch.set_num_threads(1)
    loaded = {name: kernels.load(precision) for name, precision in PRECISIONS.items()}
    found: dict[str, Any] = {"family": "torch", "isa": "none", "table": []}
    experts = {name: one_expert(name) for name in PRECISIONS}
    if any(kernel is None for kernel in loaded.values()):
        return found
    ready = {name: kernel for name, kernel in loaded.items() if kernel is not None}
    found |= {"family": ready["fp32"].family, "isa": ready["fp32"].isa.name}
    found["int4_int8_activations"] = ready["int4"].activations == "int8"
    with torch.inference_mode():
        found |= one_row(ready, experts)
        for name in ("int8", "int4"):
            found |= against_torch(name, ready[name], experts[name])
        for name in ERRORS:
            found[f"d_{name}"] = float(f"{error(ready[name], experts[name]):.3g}")
        found["table"] = table(ready, experts)
    return found


def one_expert(name: str) -> ExpertTensors:
    """A made-up expert of a bf16 checkpoint at a precision: Gaussian weights of variance 1 / inputs."""
    import torch

    from kvasir_node.numerics import DenseMatrix
    from kvasir_node.precision import quantise
    from kvasir_node.recipes import ExpertTensors

    generator = torch.Generator().manual_seed(1)
    matrices = {}
    for role, (out, width) in {
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }.items():
        weights = torch.randn(out, width, generator=generator) / width**0.5
        stored = weights.to(torch.bfloat16)
        matrices[role] = DenseMatrix(stored.float() if name == "fp32" else stored)
    return quantise(ExpertTensors(matrices, {}, {}), PRECISIONS[name])


def bound(kernel: CpuKernel, expert: ExpertTensors, nbytes: int) -> list[Ffn]:
    """As many copies of the expert, each in memory of its own, as make `nbytes`."""
    from market.plans import GateFormula

    made = []
    for _ in range(max(1, nbytes // expert.nbytes)):
        ffn = kernel.bind(expert, GateFormula("swiglu", "silu"))
        assert ffn is not None
        made.append(ffn)
    return made


def timed(what: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def each(ffns: list[Ffn], rows: Tensor) -> Callable[[], None]:
    """All of them in turn on the same rows."""

    def sweep() -> None:
        for ffn in ffns:
            ffn(rows)

    return sweep


def one_row(ready: dict[str, CpuKernel], experts: dict[str, ExpertTensors]) -> dict[str, Any]:
    """Bytes of weights a second of each precision, against the sum."""
    import torch

    numbers = torch.ones(SWEEP_BYTES // 4)
    rows = torch.randn(1, HIDDEN)
    sweeps = {name: bound(kernel, experts[name], SWEEP_BYTES) for name, kernel in ready.items()}
    best = dict.fromkeys(["sum", *sweeps], 0.0)
    until = time.perf_counter() + TURNS_S
    while time.perf_counter() < until:
        best["sum"] = max(best["sum"], numbers.nbytes / timed(numbers.sum))
        for name, ffns in sweeps.items():
            seconds = timed(each(ffns, rows))
            best[name] = max(best[name], len(ffns) * experts[name].nbytes / seconds)
    found: dict[str, Any] = {"bandwidth_gb_s": round(best["sum"] / 1e9, 2)}
    for name in sweeps:
        found[f"{name}_gb_s"] = round(best[name] / 1e9, 2)
        found[f"{name}_share"] = round(best[name] / best["sum"], 3)
    return found


def against_torch(name: str, kernel: CpuKernel, expert: ExpertTensors) -> dict[str, Any]:
    """Our FFN of 16 rows against torch's products of the same shapes, weights out of cache for both."""
    import torch

    rows = torch.randn(16, HIDDEN)
    ours = bound(kernel, expert, SWEEP_BYTES // 4)
    theirs = [torch_products(name) for _ in ours]
    ratios = []
    for _ in range(PAIRS):
        slow = timed(lambda: [product() for product in theirs])
        ratios.append(slow / timed(each(ours, rows)))
    return {f"{name}_16rows_vs_torch": round(statistics.median(ratios), 2)}


def torch_products(name: str) -> Callable[[], None]:
    """gate, up and down through torch's own kernel at 16 rows, in bf16, which is its fastest."""
    import torch

    products: list[Callable[[], Tensor]] = []
    for out, width in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        rows = torch.randn(16, width).to(torch.bfloat16)
        if name == "int8":
            values = torch.randint(-127, 128, (out, width), dtype=torch.int8)
            scales = torch.rand(out).to(torch.bfloat16)
            products.append(partial(torch._weight_int8pack_mm, rows, values, scales))
        else:
            nibbles = torch.randint(0, 16, (out, width), dtype=torch.int32)
            packed = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
            both = torch.rand(width // 32, out, 2).to(torch.bfloat16)
            products.append(partial(torch._weight_int4pack_mm_for_cpu, rows, packed, 32, both))

    def run_all() -> None:
        for product in products:
            product()

    return run_all


def error(kernel: CpuKernel, expert: ExpertTensors) -> float:
    """The largest d of 64 rows from the same checkpoint's expert in fp32."""
    import torch

    from kvasir_node.ffn import run_expert
    from kvasir_node.residual import residual
    from market.plans import GateFormula

    rows = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(2))
    exact = run_expert(one_expert("fp32"), GateFormula("swiglu", "silu"), rows)
    return float(residual(bound(kernel, expert, 1)[0](rows), exact).max())


def table(ready: dict[str, CpuKernel], experts: dict[str, ExpertTensors]) -> list[str]:
    """Billions of operations a second by precision and rows, ours beside plain torch's."""
    import torch

    from kvasir_node.ffn import TORCH
    from market.plans import GateFormula

    lines = ["G operations/s, ours (torch):  " + "".join(f"{f'{count} rows':>16}" for count in ROWS)]
    for name, kernel in ready.items():
        ours = bound(kernel, experts[name], SWEEP_BYTES // 4)
        plain = TORCH.bind(experts[name], GateFormula("swiglu", "silu"))
        cells = []
        for count in ROWS:
            rows = torch.randn(count, HIDDEN)
            operations = 2 * count * 3 * HIDDEN * WIDTH / 1e9
            fast = min(timed(each(ours, rows)) for _ in range(3)) / len(ours)
            slow = min(timed(each([plain], rows)) for _ in range(3))
            cells.append(f"{operations / fast:.0f} ({operations / slow:.0f})")
        lines.append(f"{name:<31}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


if __name__ == "__main__":
    assert sys.argv[1] == "measure"
    print(json.dumps(measure()), flush=True)

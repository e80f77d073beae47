"""How far honest replicas are from the backbone's recompute, and the limits that follow.

An audit compares a reply with a recompute of the same expert at the same precision, both rounded to the wire
dtype. What is left between honest machines is their kernels' order of summation, how they quantise rows, and
the values that rounding then throws to another side. Every kernel family, thread count and batch size at hand
is compared with the C core, on rows that the model really sends to its experts and on made-up ones with heavy
tails; so is an fp64 computation, in the place of hardware that is not at hand.

The limit of a class is three times the largest d of all honest rows, rounded up to two digits, and never less
than what a node's own self-check lets a kernel be off. N rows without one over a bound say with 95 %
confidence that fewer than 3/N are over it: 300,000 rows for a false positive rate of 1e-5 a row, before the
factor, which is a reserve for hardware that was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.limits import VERSION
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from kvasir_node import kernels
from kvasir_node.execution import KERNEL_LIMITS
from kvasir_node.ffn import TORCH, Ffn
from kvasir_node.numerics import to_fp32
from kvasir_node.precision import QUANTISERS, quantise
from kvasir_node.recipes import ExpertTensors, load_expert
from kvasir_node.residual import residual
from kvasir_node.tensors import WIRE_TORCH
from market.plans import GateFormula

from . import Report, table
from .inprocess import one_thread
from .rows import capture, heavy_expert, heavy_rows
from .svg import Curves, page
from .teacher import heldout_text, sequences

MARGIN: Final = 3.0
PRECISIONS: Final = ("stored", "bf16", "int8", "int4")
WIRES: Final = ("float32", "bfloat16")
FLOOR: Final = {"stored": KERNEL_LIMITS["none"], "bf16": KERNEL_LIMITS["none"],
                "int8": KERNEL_LIMITS["int16"], "int4": KERNEL_LIMITS["int16"]}  # fmt: skip
"""What a node's self-check lets a kernel be off, by precision: a limit is never below."""
HEAVY_WIDTH: Final = 256
HEAVY_INNER: Final = 128
HEAVY_ROWS: Final = 1600
"""Rows of each made-up expert."""


@dataclass(slots=True)
class Honest:
    """d of one class's rows against the C core (or torch, where there is no C core), by variant."""

    precision: str
    wire: str
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    equal: int = 0

    def add(self, variant: str, made: Tensor, expected: Tensor) -> None:
        """Outputs [n, width] of a variant beside the recompute, both in the wire dtype."""
        self.values.setdefault(variant, []).append(residual(made, expected).float())
        self.equal += int((made == expected).all(-1).sum())

    def all(self) -> Tensor:
        """Every d, fp32 [n]."""
        return torch.cat([part for parts in self.values.values() for part in parts])

    @property
    def rows(self) -> int:
        """Different outputs: each was compared with several computations of it."""
        return sum(map(len, self.values["torch"]))

    @property
    def largest(self) -> float:
        """The largest d."""
        return float(self.all().max())

    @property
    def limit(self) -> float:
        """See the module docstring."""
        return max(FLOOR[self.precision], round_up(MARGIN * self.largest))


def round_up(value: float) -> float:
    """Up to two significant digits."""
    if value <= 0.0:
        return 0.0
    power = math.floor(math.log10(value)) - 1
    return float(f"{math.ceil(value / 10.0**power - 1e-9)}e{power}")


@dataclass(frozen=True, slots=True)
class Case:
    """One expert as stored and rows fp32 [n, width] that it is sent."""

    tensors: ExpertTensors
    formula: GateFormula
    rows: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of its own."""
    parser.add_argument("--limits", type=Path, metavar="FILE", help="write the limits there, as JSON")


def run(options: argparse.Namespace) -> Report:
    """Measure; see the module docstring."""
    one_thread()
    path = options.model or bundled_model_path()
    cases = [
        *_real_cases(path, tokens=512 if options.short else 10_240),
        *_heavy_cases(2 if options.short else 32),
    ]
    found = [
        _measure(cases, precision, wire, short=options.short) for precision in PRECISIONS for wire in WIRES
    ]
    cheats = _cheaters(cases[:: max(1, len(cases) // 128)])
    if options.limits is not None:
        options.limits.write_text(limits_text(found), encoding="utf-8")
    return report(found, cheats)


def _real_cases(path: Path, *, tokens: int) -> list[Case]:
    """Every expert of the checkpoint with the rows that the held-out text sends to it."""
    with Checkpoint.open(path) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 28, wire_dtype="float32", precisions=PRECISIONS)
        model = BackboneModel.load(checkpoint, dtype="float32")
        text = sequences(model, heldout_text(path), length=min(256, tokens), most=max(1, tokens // 256))
        kept = capture(model, LocalExperts(checkpoint.read, plan, cache_bytes=1 << 30), text)
        cases = []
        for recipe in plan.layers:
            rows, ids = kept.layer(recipe.layer)
            for expert in range(recipe.experts):
                mine = rows[(ids == expert).any(1)]
                if len(mine):
                    tensors = load_expert(recipe, expert, checkpoint.read)
                    cases.append(Case(_owned(tensors), recipe.formula, mine))
        return cases


def _owned(tensors: ExpertTensors) -> ExpertTensors:
    """The same in memory of its own: the checkpoint's files are closed soon."""
    from kvasir_node.numerics import DenseMatrix
    from kvasir_node.recipes import materialise

    dense = materialise(tensors)
    matrices: dict[str, Any] = {
        role: DenseMatrix(m.tensor.clone()) if isinstance(m, DenseMatrix) else m
        for role, m in dense.matrices.items()
    }
    return ExpertTensors(matrices, {role: vector.clone() for role, vector in dense.vectors.items()}, {})


def _heavy_cases(count: int) -> list[Case]:
    generator = torch.Generator().manual_seed(3)
    formula = GateFormula("swiglu", "silu")
    return [
        Case(
            heavy_expert(
                HEAVY_WIDTH, HEAVY_INNER, generator, dtype=torch.float32 if number % 2 else torch.bfloat16
            ),
            formula,
            heavy_rows(HEAVY_ROWS, HEAVY_WIDTH, generator),
        )
        for number in range(count)
    ]


def _measure(cases: Sequence[Case], precision: str, wire: str, *, short: bool) -> Honest:
    """Every honest variant of one class on all cases."""
    found = Honest(precision, wire)
    dtype = WIRE_TORCH[wire]
    core = kernels.load(precision)
    threaded = kernels.open_kernel(precision, threads=2) if core is not None else None
    with torch.inference_mode():
        for number, case in enumerate(cases):
            tensors = quantise(case.tensors, precision)
            rows = case.rows.to(dtype).float().contiguous()
            bound = core.bind(tensors, case.formula) if core is not None else None
            plain = TORCH.bind(tensors, case.formula)
            expected = (bound or plain)(rows).to(dtype)
            found.add("torch", plain(rows).to(dtype), expected)
            found.add("fp64", exact(tensors)(rows).to(dtype), expected)
            if number % 16:
                continue
            found.add("batches of 1", _in_batches(plain, rows[:32], 1).to(dtype), expected[:32])
            if threaded is not None and (ffn := threaded.bind(tensors, case.formula)) is not None:
                found.add("C core, 2 threads", ffn(rows).to(dtype), expected)
            torch.set_num_threads(2)
            found.add("torch, 2 threads", plain(rows).to(dtype), expected)
            torch.set_num_threads(1)
    return found


def _in_batches(ffn: Ffn, rows: Tensor, size: int) -> Tensor:
    return torch.cat([ffn(part.contiguous()) for part in rows.split(size)])


def exact(tensors: ExpertTensors) -> Ffn:
    """A gated SiLU expert in fp64; gives fp32."""
    gate, up, down = (to_fp32(tensors.matrices[role]).double() for role in ("gate", "up", "down"))

    def run_exact(rows: Tensor) -> Tensor:
        wide = rows.double()
        return ((torch.nn.functional.silu(wide @ gate.T) * (wide @ up.T)) @ down.T).float()

    return run_exact


def coarse_rows(tensors: ExpertTensors) -> Ffn:
    """The same with rows quantised to int8 in groups of 128 before each product, in fp32."""
    gate, up, down = (to_fp32(tensors.matrices[role]) for role in ("gate", "up", "down"))

    def rounded(rows: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 128))
        groups = padded.view(len(rows), -1, 128)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127.0
        return ((groups / scale).round() * scale).view(len(rows), -1)[:, : rows.shape[1]]

    def run_coarse(rows: Tensor) -> Tensor:
        rows = rounded(rows)
        return rounded(torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T

    return run_coarse


Made = dict[str, tuple[str, Tensor]]
"""Name -> (wire dtype it was made over, d of every row, fp32)."""


def _cheaters(cases: Sequence[Case]) -> Made:
    """d of replicas that are not what they say, beside the recompute at the declared precision."""
    made: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for number, case in enumerate(cases):
            for name, outputs, expected in _cheats(case, cases[number - 1], generator):
                made.setdefault(name, []).append(residual(outputs, expected).float())
    return {name: ("bfloat16", torch.cat(parts)) for name, parts in made.items()}


def _cheats(case: Case, other: Case, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    def ffn(tensors: ExpertTensors, precision: str) -> Callable[[Tensor], Tensor]:
        bound = TORCH.bind(quantise(tensors, precision), case.formula)
        return lambda rows: bound(rows.float().contiguous()).to(torch.bfloat16)

    rows = case.rows.to(torch.bfloat16)
    stored, int8, int4 = (ffn(case.tensors, precision)(rows) for precision in ("stored", "int8", "int4"))
    yield "int8 as stored", int8, stored
    yield "int4 as int8", int4, int8
    yield "int4 as stored", int4, stored
    yield "int8 rows as exact ones", coarse_rows(case.tensors)(rows.float()).to(torch.bfloat16), stored
    if case.rows.shape == other.rows.shape or case.rows.shape[1] == other.rows.shape[1]:
        yield "wrong expert", ffn(other.tensors, "stored")(rows), stored
    yield "stale reply", stored.roll(1, 0), stored
    for times in (1.0, 3.0, 10.0):
        noise = torch.randn(stored.shape, generator=generator)
        scale = (
            (2.0 * times * 1e-5) ** 0.5
            * stored.float().norm(dim=-1, keepdim=True)
            / noise.norm(dim=-1, keepdim=True)
        )
        yield f"noise at {times:g}e-5", (stored.float() + noise * scale).to(torch.bfloat16), stored


def limits_text(found: Sequence[Honest]) -> str:
    """The limits as the product reads them (`kvasir_backbone.limits`)."""
    families = ["c1", "torch"] if kernels.load("stored") is not None else ["torch"]
    limits = [
        {
            "weights": QUANTISERS[each.precision],
            "wire": each.wire,
            "families": families,
            "limit": each.limit,
            "rows": each.rows,
            "largest": float(f"{each.largest:.3g}"),
        }
        for each in found
    ]
    return json.dumps({"v": VERSION, "limits": limits}, indent=1) + "\n"


def report(found: Sequence[Honest], cheats: Made) -> Report:
    """Tables of the honest and of the cheaters, the limits and the plot."""
    head = [
        "honest, by precision and wire",
        "rows",
        "bit equal",
        "median d",
        "99.9 %",
        "largest",
        "limit",
        "at most wrong",
    ]
    rows: list[list[object]] = []
    for each in found:
        values = each.all()
        rows.append(
            [f"{each.precision}, {each.wire}", each.rows, each.equal / len(values), float(values.median()),
             float(values.sort().values[int(0.999 * len(values))]), each.largest, each.limit, 3.0 / each.rows]
        )  # fmt: skip
    lines = [*table(head, rows), ""]
    limit = next(each.limit for each in found if (each.precision, each.wire) == ("stored", "bfloat16"))
    head = ["cheaters (bf16 wire)", "rows", "median d", "least", f"over {limit:g}", "over 1e-05", "over 0.05"]
    rows = []
    for name, (_, values) in cheats.items():
        over = [float((values > bound).float().mean()) for bound in (limit, 1e-5, 0.05)]
        rows.append([name, len(values), float(values.median()), float(values.min()), *over])
    lines += [*table(head, rows), ""]
    variants = sorted({name for each in found for name in each.values})
    head = ["largest d by variant", *variants]
    rows = [
        [f"{each.precision}, {each.wire}",
         *(float(torch.cat(each.values[name]).max()) if name in each.values else "-" for name in variants)]
        for each in found
    ]  # fmt: skip
    lines += [*table(head, rows), ""]
    figures: dict[str, object] = {
        "rows": sum(each.rows for each in found),
        "comparisons": sum(len(each.all()) for each in found),
        "false_positive_rate_at_most": max(3.0 / each.rows for each in found),
        "limits": {f"{QUANTISERS[each.precision]}/{each.wire}": each.limit for each in found},
        "largest": {f"{QUANTISERS[each.precision]}/{each.wire}": each.largest for each in found},
        "cheaters_over_limit": {
            name: float((values > limit).float().mean()) for name, (_, values) in cheats.items()
        },
    }
    return Report(figures, lines, _plot(found, cheats, limit))


def _plot(found: Sequence[Honest], cheats: Made, limit: float) -> str:
    """Share of rows over d: honest classes over bf16, and the cheaters."""
    series = {f"honest: {each.precision}": survival(each.all()) for each in found if each.wire == "bfloat16"}
    honest = frozenset(series)
    series |= {name: survival(values) for name, (_, values) in cheats.items()}
    curves = Curves(
        "Share of outputs farther than d from the recompute (bf16 wire)", "d", "share of rows", series,
        {f"calibrated limit {limit:g}": limit, "one strike 0.05": 0.05}, dashed=frozenset(series) - honest,
    )  # fmt: skip
    return page([curves])


def survival(values: Tensor, points: int = 60) -> list[tuple[float, float]]:
    """(d, share of values above it), thinned; d of zero counts as 1e-12."""
    ordered = values.clamp(min=1e-12).sort().values
    places = torch.linspace(0, len(ordered) - 1, min(points, len(ordered))).long().tolist()
    return [(float(ordered[place]), 1.0 - place / len(ordered)) for place in places]

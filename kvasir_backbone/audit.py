"""Whether a worker's outputs are right: cheap checks, proving calls, sampled audits and trust.

Every reply is checked for shape, finite values and a norm band. Values that are not finite and norms outside
the band only point at rows to look at: those are recomputed at once, before they are used. A sampled call
has one random (row, expert) recomputed from the same weights at the replica's precision; the figure judged
is d (see `kvasir_node.residual`), against a limit of the replica's numerics class. Samples are drawn after
the reply, from the backbone's own secret randomness, so a worker cannot tell which call will be looked at.

Pure, on torch: randomness is an argument. Knows no sessions, no market and no files.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvasir_node.precision import QUANTISERS
from kvasir_node.residual import FLOOR_RMS, residual
from kvasir_node.tensors import partial_sums
from market.plans import Plan
from market.standing import MAX_QUARANTINES as MAX_QUARANTINES
from market.standing import QUARANTINE_S as QUARANTINE_S
from market.standing import quarantine_s as quarantine_s
from market.windows import Window

from .limits import calibrated
from .trust import ALWAYS_FIRST as ALWAYS_FIRST
from .trust import FLOOR_RATE as FLOOR_RATE
from .trust import GROSS as GROSS
from .trust import STRIKE_WINDOW as STRIKE_WINDOW
from .trust import STRIKES as STRIKES
from .trust import Trust as Trust

LIMIT: Final = 1e-5
"""Largest d of an honest reply, to start with."""

LIMIT_INT8_ACTIVATIONS: Final = 1e-4
"""The same where a numerics class declares int8 activations."""

INTEGER_WEIGHTS: Final = frozenset({"int8", "int4"})
"""The precisions whose kernels may quantise activations to int8."""

BAND_SLACK: Final = 16.0
"""The norm band reaches this factor beyond the ratios seen."""

PROVING_ROWS: Final = 4
PROVING_EXPERTS: Final = 2
"""A proving call sends so many random rows to so many random experts of each layer of the window."""

Reference = Callable[[int, int, Tensor, str], Tensor]
"""(layer, expert, rows [n, width], precision) -> outputs [n, width], computed here from the checkpoint."""


def limit_of(numerics: str, precision: str) -> float:
    """The largest d of an honest replica of a class (see `kvasir_node.execution.numerics_class`): calibrated
    where its kernels were measured (`kvasir_backbone.limits`), else the start value.

    The class is the device's own word, `precision` what the market leased it the window at: int8 activations
    are believed only beside weights of that precision's quantiser, and only where those are integers.
    """
    parts = numerics.split("/")
    declared = len(parts) > 2 and parts[2] == "int8"
    if declared and precision in INTEGER_WEIGHTS and parts[1] == QUANTISERS[precision]:
        return LIMIT_INT8_ACTIVATIONS
    known = calibrated(QUANTISERS[precision], numerics)
    return LIMIT if known is None else known


def unfinite_rows(outputs: Tensor) -> list[int]:
    """Indices of the rows of `outputs` [n, width] that hold NaN or infinity."""
    # A sum is finite unless an element is not, or it overflows: only then look at each.
    if bool(torch.isfinite(outputs.sum(dtype=torch.float64))):
        return []
    return (~torch.isfinite(outputs).all(dim=-1)).nonzero().flatten().tolist()


_LARGEST: Final = torch.finfo(torch.float32).max


class NormBand:
    """The ratio |output| / |row| that the experts of each layer produce, learnt from trusted outputs only."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def learn(self, layer: int, rows: Tensor, outputs: Tensor) -> None:
        """Widen the layer's band to hold these trusted pairs. `rows`, `outputs` [n, width]."""
        ratios = _ratios(rows, outputs)
        low, high = float(ratios.min()), float(ratios.max())
        known = self._seen.get(layer)
        self._seen[layer] = (low, high) if known is None else (min(low, known[0]), max(high, known[1]))

    def bounds(self, layer: int) -> tuple[float, float]:
        """The ratios beyond which an output of `layer` is suspect; while unknown, no finite one is."""
        known = self._seen.get(layer)
        return (0.0, _LARGEST) if known is None else (known[0] / BAND_SLACK, known[1] * BAND_SLACK)

    def suspects(self, layer: int, rows: Tensor, outputs: Tensor) -> list[int]:
        """Indices of pairs outside the band; none while the layer's band is unknown."""
        known = self._seen.get(layer)
        if known is None:
            return []
        ratios = _ratios(rows, outputs)
        outside = (ratios < known[0] / BAND_SLACK) | (ratios > known[1] * BAND_SLACK)
        return outside.nonzero().flatten().tolist() if bool(outside.any()) else []


def _ratios(rows: Tensor, outputs: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    norms: Tensor = torch.linalg.vector_norm(outputs, dim=-1, dtype=torch.float32)
    return norms / sizes.clamp(min=1e-12)


@dataclass(frozen=True, slots=True)
class Proof:
    """One layer's proving call: random `rows` [n, width] and, for each row, the same random expert `ids`."""

    layer: int
    rows: Tensor
    ids: tuple[int, ...]


def make_proofs(plan: Plan, window: Window, dtype: torch.dtype, rng: random.Random) -> tuple[Proof, ...]:
    """Proving calls for every MoE layer of `window`: standard normal rows in `dtype`."""
    proofs = []
    for recipe in plan.window_layers(window):
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        rows = torch.randn(PROVING_ROWS, plan.width, generator=generator).to(dtype)
        experts = range(window.expert_start, min(window.expert_end, recipe.experts))
        ids = rng.sample(experts, min(PROVING_EXPERTS, len(experts)))
        proofs.append(Proof(recipe.layer, rows, tuple(sorted(ids))))
    return tuple(proofs)


def judge_proof(proof: Proof, outputs: Tensor, precision: str, reference: Reference, band: NormBand) -> float:
    """The largest d between `outputs` [rows x ids, width], row by row, and the local recompute.

    Teaches `band` the trusted outputs. Infinity where the shape is wrong or a value is not finite.
    """
    count = len(proof.ids)
    if tuple(outputs.shape) != (len(proof.rows) * count, proof.rows.shape[1]):
        return float("inf")
    worst = 0.0
    for column, expert in enumerate(proof.ids):
        expected = reference(proof.layer, expert, proof.rows, precision)
        band.learn(proof.layer, proof.rows, expected)
        worst = max(worst, float(residual(outputs[column::count], expected).max()))
    return worst


@dataclass(frozen=True, slots=True)
class Sample:
    """One (row, expert) of an accepted call, to be recomputed. `row`, `output` [width].

    `ids` are all the experts that the worker was asked for with this row under the same lease, in order. In a
    `weighted` swarm `output` is the partial sum over `ids` (all those of the call, whatever their leases),
    `weights` [ids] fp32 are what it was made with and `precisions` those of each expert's replica. `call` is
    the call's id.
    """

    layer: int
    expert: int
    row: Tensor
    output: Tensor
    ids: tuple[int, ...] = ()
    weights: Tensor | None = None
    precisions: tuple[str, ...] = ()
    call: int = 0


def expected_output(sample: Sample, precision: str, reference: Reference) -> Tensor:
    """What an honest replica at `precision` answers for a sample: [width] in the output's dtype."""
    if sample.weights is None:
        return reference(sample.layer, sample.expert, sample.row.unsqueeze(0), precision)[0]
    row = sample.row.float().unsqueeze(0)
    experts = zip(sample.ids, sample.precisions, strict=True)
    made = torch.cat([reference(sample.layer, expert, row, each) for expert, each in experts])
    return partial_sums(made, sample.weights, [0] * len(made), 1)[0].to(sample.output.dtype)


def judge_sample(sample: Sample, precision: str, reference: Reference, band: NormBand) -> float:
    """The d of one sampled output, or partial sum, against the local recompute."""
    if sample.weights is not None:
        return _judge_sum(sample, sample.weights, reference, band)
    rows = sample.row.unsqueeze(0)
    expected = reference(sample.layer, sample.expert, rows, precision)
    band.learn(sample.layer, rows, expected)
    return float(residual(sample.output.unsqueeze(0), expected).max())


def _judge_sum(sample: Sample, weights: Tensor, reference: Reference, band: NormBand) -> float:
    """The d of a partial sum; `precisions` says at which precision each expert is run.

    Outputs of several experts may cancel, and rounding does not shrink with their sum. So the difference is
    measured against the size that the weighted outputs have without regard to direction, where that is more.
    """
    row = sample.row.float().unsqueeze(0)
    experts = zip(sample.ids, sample.precisions, strict=True)
    made = torch.cat([reference(sample.layer, expert, row, precision) for expert, precision in experts])
    band.learn(sample.layer, row.expand(len(made), -1), made)
    expected = partial_sums(made, weights, [0] * len(made), 1)[0].to(sample.output.dtype)
    x, y = sample.output.double(), expected.double()
    size = x.square().sum() + y.square().sum()
    if not bool(torch.isfinite(size)):
        return float("inf")
    unsigned = 2.0 * (made.double() * weights.double().unsqueeze(-1)).square().sum()
    floor = 2.0 * len(x) * FLOOR_RMS**2
    return float((x - y).square().sum() / torch.maximum(size, unsigned).clamp(min=floor))

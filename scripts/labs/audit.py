"""Cheaters against the product's own trust, sampling and ledger, on real rows of a real model.

Honest figures first: every (row, expert) that the model's routers chose for a held-out text, run by each
numerics class at hand and judged as the backbone judges it; all of them go through trust, and none may lead
to a quarantine. Then the cheats, on the same rows: their d, and how many calls a wallet that had earned
trust gets away with, over many seeded trials. At last what such a wallet keeps of its credit.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kvasir_backbone.audit import NormBand, limit_of
from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.routing import StepRouting
from kvasir_backbone.seam import RowKey
from kvasir_backbone.trust import GROSS, Standing, Trust
from kvasir_node.experts import WindowExperts, load_expert, quantise
from kvasir_node.residual import residual
from kvasir_node.tensors import WIRE_TORCH
from market.plans import Plan
from market.windows import Window

from . import Report, table
from .cheats import Cheat, Ground, lower, noise, skipped_down, stale, wrong_expert, zeros
from .escrowed import play
from .inprocess import Experts, one_thread
from .svg import Curves, page
from .teacher import heldout_text, read, sequences

PRECISIONS: Final = ("stored", "bf16", "int8", "int4")
KERNELS: Final = ("c1", "torch")
CLASSES: Final = tuple((precision, kernel) for precision in PRECISIONS for kernel in KERNELS)
"""Precision and kernel of each numerics class at hand."""

WIRES: Final = ("float32", "bfloat16")
LENGTH: Final = 256
ROWS_A_GROUP: Final = 4
"""A cheat looks at experts that this many rows were routed to at least: a neighbour row is there."""

SEPARATED: Final = 0.95
"""A cheat of which this share of outputs is over the limit can be told from honest replies."""

MOST_GROUPS: Final = 400
"""Experts whose rows every cheat is tried on."""

TRUSTED: Final = Standing(valid_calls=1000, audited=40)
"""A wallet that cheats after it has earned trust."""

TRIALS: Final = 2000
HOPELESS: Final = 50
"""Trials of a cheat that audits cannot see."""

LONGEST: Final = 5000
"""Calls after which a trial ends undetected."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This experiment's own options."""
    parser.add_argument("--trials", type=int, default=TRIALS, help="seeded trials a cheat (%(default)s)")


def run(options: argparse.Namespace) -> Report:
    """See the module docstring."""
    one_thread()
    path: Path = options.model or bundled_model_path()
    wanted = 20_000 if options.short else 1_050_000
    with torch.inference_mode():
        ground = Grounds(path, wanted)
        try:
            honest = honest_figures(ground, wanted)
            cheats = cheat_figures(ground)
        finally:
            ground.close()
    trials = min(options.trials, 200) if options.short else options.trials
    for found in cheats:
        found.detect(trials)
    return report(honest, cheats)


# --- real rows -----------------------------------------------------------------------------------------


class Recorder:
    """A dispatcher that answers from the checkpoint and keeps which rows went to which experts."""

    def __init__(self, local: LocalExperts) -> None:
        self._local = local
        self.seen: list[tuple[int, Tensor, Tensor]] = []

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        self.seen.append((layer, rows.clone(), ids.clone()))
        return self._local.dispatch(layer, rows, ids, keys, deadline_s)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows [n, width] (fp32) that went to one expert."""

    layer: int
    expert: int
    rows: Tensor


class Grounds:
    """The model's experts at every class, and the rows that its routers sent them.

    The text is long enough for `wanted` (row, expert) pairs over all classes and wires.
    """

    def __init__(self, path: Path, wanted: int) -> None:
        self.checkpoint = Checkpoint.open(path)
        self.experts = Experts(self.checkpoint)
        model = BackboneModel.load(self.checkpoint, dtype="float32")
        plan = self.plan("float32")
        recorder = Recorder(LocalExperts(self.checkpoint.read, plan, cache_bytes=1 << 30))
        text, got = sequences(model, heldout_text(path), length=LENGTH), 0
        for sequence in text:
            if got * len(CLASSES) * len(WIRES) >= wanted:
                break
            read(model, sequence.unsqueeze(0), lambda keys: StepRouting(recorder, keys))
            got = sum(ids.numel() for _, _, ids in recorder.seen)
        self.groups = list(_grouped(recorder.seen))
        self._held: dict[tuple[str, str, str], dict[Window, WindowExperts]] = {}
        self._windows = {
            (layer.layer, expert): window
            for window in plan.windows
            for layer in plan.window_layers(window)
            for expert in range(window.expert_start, window.expert_end)
        }

    def plan(self, wire: str) -> Plan:
        """The plan of that wire dtype."""
        return self.experts.plan(wire)

    def held(self, precision: str, kernel: str, wire: str) -> dict[Window, WindowExperts]:
        """Every window as a node of that class holds it."""
        key = (precision, kernel, wire)
        if key not in self._held:
            windows = self.plan(wire).windows
            self._held[key] = {each: self.experts.load(each, precision, kernel, wire) for each in windows}
        return self._held[key]

    def numerics(self, precision: str, kernel: str, wire: str) -> str:
        """That class's name."""
        return next(iter(self.held(precision, kernel, wire).values())).numerics

    def run(self, precision: str, kernel: str, wire: str, layer: int, expert: int, rows: Tensor) -> Tensor:
        """One expert of that class on `rows` in the wire dtype. The C core's class is the backbone's own,
        which audits compare with."""
        held = self.held(precision, kernel, wire)[self._windows[layer, expert]]
        return held.run(layer, expert, rows)

    def close(self) -> None:
        """Close the checkpoint."""
        self.checkpoint.close()


def _grouped(seen: Sequence[tuple[int, Tensor, Tensor]]) -> Iterator[Group]:
    for layer in sorted({layer for layer, _, _ in seen}):
        rows = torch.cat([rows for at, rows, _ in seen if at == layer]).float()
        ids = torch.cat([ids for at, _, ids in seen if at == layer])
        for expert in ids.unique().tolist():
            yield Group(layer, expert, rows[(ids == expert).any(-1)])


# --- honest rows ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Honest:
    """The d of one numerics class's honest replies, and what trust made of them."""

    name: str
    numerics: str
    limit: float
    d: Tensor
    violations: int
    quarantines: int


def honest_figures(ground: Grounds, wanted: int) -> list[Honest]:
    """Every class at hand over every wire, `wanted` rows or more in all, each judged as in an audit: the
    recompute meets the row among others than the replica did."""
    found = []
    for wire in WIRES:
        for precision in PRECISIONS:
            limits = {
                kernel: limit_of(ground.numerics(precision, kernel, wire), precision) for kernel in KERNELS
            }
            parts: dict[str, list[Tensor]] = {kernel: [] for kernel in KERNELS}
            for group in ground.groups:
                rows = group.rows.to(WIRE_TORCH[wire])
                place = (group.layer, group.expert)
                expected = ground.run(precision, "c1", wire, *place, rows.flip(0).contiguous()).flip(0)
                for kernel in KERNELS:
                    outputs = ground.run(precision, kernel, wire, *place, rows)
                    parts[kernel].append(residual(outputs, expected))
            for kernel in KERNELS:
                numerics = ground.numerics(precision, kernel, wire)
                name = f"{precision}, {kernel}, {wire}"
                found.append(judged(name, numerics, limits[kernel], torch.cat(parts[kernel])))
    assert sum(len(each.d) for each in found) >= wanted, "the text is too short for so many rows"
    return found


def judged(name: str, numerics: str, limit: float, d: Tensor) -> Honest:
    """All figures of a class through the trust of one wallet, as if every row were audited."""
    trust, quarantines = Trust(), 0
    for value in d.tolist():
        if trust.verdict(value, limit) is not None:
            quarantines += 1
            trust = Trust()
    return Honest(name, numerics, limit, d, int((d > limit).sum()), quarantines)


# --- cheats --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """One cheat at one class: the d of its outputs, and after how many calls it was put out."""

    name: str
    limit: float
    d: Tensor
    flagged: float
    """Share of outputs that the norm band points at, which are recomputed before use."""
    share: float = 1.0
    """Share of its calls that it cheats in."""
    reported_only: bool = False
    calls: list[int] | None = None
    from_start: float = 0.0
    undetected: int = 0

    @property
    def violating(self) -> float:
        """Share of its outputs over the limit."""
        return float((self.d > self.limit).double().mean())

    @property
    def one_strike(self) -> bool:
        """Whether one audited output is enough, as a rule."""
        return float((self.d > GROSS).double().mean()) >= 0.5

    def detect(self, trials: int) -> None:
        """Seeded trials of a trusted wallet that begins to cheat; sampling and trust are the product's."""
        values = self.d.tolist()
        if self.violating < 0.01:
            trials = min(trials, HOPELESS)
        rng = random.Random(self.name)
        self.calls = []
        for _ in range(trials):
            calls = calls_until_out(Trust(TRUSTED), values, self.limit, self.share, rng)
            self.undetected += calls is None
            self.calls.append(LONGEST if calls is None else calls)
        starts = [calls_until_out(Trust(), values, self.limit, self.share, rng) for _ in range(trials // 4)]
        self.from_start = statistics.median(LONGEST if calls is None else calls for calls in starts)

    @property
    def median(self) -> float:
        """Calls until it was put out, the median of the trials."""
        return statistics.median(self.calls or [LONGEST])

    @property
    def p99(self) -> int:
        """The same, of all but one in a hundred."""
        ordered = sorted(self.calls or [LONGEST])
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def calls_until_out(
    trust: Trust, values: Sequence[float], limit: float, share: float, rng: random.Random
) -> int | None:
    """Calls of one trial until the verdict, or None; `values` are the d that its cheated outputs have."""
    for call in range(1, LONGEST + 1):
        audited = trust.wants_audit(rng)
        cheated = share >= 1.0 or rng.random() < share
        if audited and trust.verdict(rng.choice(values) if cheated else 0.0, limit) is not None:
            return call
    return None


PLAIN: Final[dict[str, Cheat]] = {
    "zeros": zeros,
    "stale reply": stale,
    "wrong expert": wrong_expert,
    "skipped down projection": skipped_down,
    "noise, 10x the limit": noise(10.0),
    "noise, 3x the limit": noise(3.0),
    "noise, 1x the limit": noise(1.0),
}
LOWER: Final = {"stored": ("bf16", "int8", "int4"), "int8": ("int4",)}
"""Precisions that pose as a higher one."""


def cheat_figures(ground: Grounds) -> list[Found]:
    """Every cheat at the leased precisions that it can be tried at, over both wires."""
    found: list[Found] = []
    for wire in WIRES:
        for leased in ("stored", "int8"):
            cheats = {f"{low} posing as {leased}": lower(low) for low in LOWER[leased]}
            if leased == "stored":
                cheats |= PLAIN
            found += _figures(ground, leased, wire, cheats)
    for each in [each for each in found if each.name.startswith(("zeros", "noise, 10x"))]:
        found.append(Found(f"{each.name}, 10 % of calls", each.limit, each.d, each.flagged, 0.1, True))
    return found


def _figures(ground: Grounds, leased: str, wire: str, cheats: dict[str, Cheat]) -> list[Found]:
    layers = {recipe.layer: recipe for recipe in ground.plan(wire).layers}
    limit = limit_of(ground.numerics(leased, "c1", wire), leased)
    band, generator = NormBand(), torch.Generator().manual_seed(1)
    groups = [group for group in ground.groups if len(group.rows) >= ROWS_A_GROUP]
    made: dict[str, list[Tensor]] = {name: [] for name in cheats}
    flagged = dict.fromkeys(cheats, 0)
    for number, group in enumerate(groups):
        layer, expert = group.layer, group.expert
        rows, recipe = group.rows.to(WIRE_TORCH[wire]), layers[layer]
        right = ground.run(leased, "c1", wire, layer, expert, rows)
        band.learn(layer, rows, right)
        ground_of = Ground(
            rows,
            right,
            ground.run(leased, "c1", wire, layer, (expert + 1) % recipe.experts, rows),
            {low: ground.run(low, "c1", wire, layer, expert, rows) for low in LOWER[leased]},
            quantise(load_expert(recipe, expert, ground.checkpoint.read), leased),
            recipe.formula,
            limit,
            generator,
        )
        for name, cheat in cheats.items():
            outputs = cheat(ground_of)
            made[name].append(residual(outputs, right))
            flagged[name] += len(band.suspects(layer, rows, outputs))
        if number >= MOST_GROUPS:
            break
    return [
        Found(
            f"{name}, {wire}",
            limit,
            torch.cat(parts),
            flagged[name] / sum(map(len, parts)),
            reported_only="1x" in name or name.startswith("bf16"),
        )
        for name, parts in made.items()
    ]


# --- what is said --------------------------------------------------------------------------------------


def report(honest: list[Honest], cheats: list[Found]) -> Report:
    """The figures and tables."""
    rows = sum(len(each.d) for each in honest)
    judged_cheats = [each for each in cheats if not each.reported_only and each.violating > 0]
    one = [each for each in judged_cheats if each.one_strike]
    three = [each for each in judged_cheats if not each.one_strike and separates(each)]
    slowest = max([each.p99 for each in (*one, *three)], default=500)
    kept = play(int(slowest))
    figures: dict[str, Any] = {
        "one_strike_median_calls": max((each.median for each in one), default=None),
        "one_strike_p99_calls": max((each.p99 for each in one), default=None),
        "three_strike_median_calls": max((each.median for each in three), default=None),
        "three_strike_p99_calls": max((each.p99 for each in three), default=None),
        "honest_rows": rows,
        "honest_violations": sum(each.violations for each in honest),
        "false_quarantines": sum(each.quarantines for each in honest),
        "cheater_credit": kept.cheater_credit,
        "cheater_credit_void": kept.void,
        "cheats": {each.name: _facts(each) for each in cheats},
        "posing": {each.name: posing(each, honest) for each in cheats if "posing" in each.name},
    }
    lines = [*_honest_lines(honest), "", *_cheat_lines(cheats), "", *_histograms(honest, cheats)]
    lines.append("")
    lines.append(
        f"a cheater caught after {slowest} calls had {kept.cheated:,} bytes issued for them: {kept.void:,} "
        f"are void and {kept.cheater_credit:,} available to it, a year later too"
    )
    return Report(figures, lines, _picture(honest, cheats))


def separates(found: Found) -> bool:
    """Whether audits can tell the cheat: nearly every one of its outputs is over the limit."""
    return found.violating >= SEPARATED


def posing(found: Found, honest: list[Honest]) -> dict[str, object]:
    """Whether a lower precision can be told from the one that it poses as."""
    leased, wire = found.name.split("posing as ")[1].split(", ")
    ours = torch.cat([each.d for each in honest if each.name.startswith(leased) and each.name.endswith(wire)])
    return {
        "separates": separates(found),
        "share_over_limit": found.violating,
        "least_d": float(found.d.min()),
        "median_d": float(found.d.median()),
        "largest_honest_d": float(ours.max()),
    }


def _facts(found: Found) -> dict[str, object]:
    return {
        "strikes": 1 if found.one_strike else 3,
        "median_d": float(f"{float(found.d.median()):.3g}"),
        "share_over_limit": round(found.violating, 4),
        "share_flagged_at_once": round(found.flagged, 4),
        "median_calls": found.median,
        "p99_calls": found.p99,
        "median_calls_from_start": found.from_start,
        "undetected_share": round(found.undetected / max(1, len(found.calls or ())), 4),
    }


def _honest_lines(honest: list[Honest]) -> list[str]:
    head = ["honest class", "rows", "median d", "largest d", "limit", "violations", "quarantines"]
    return table(
        head,
        [
            [
                each.name,
                len(each.d),
                f"{float(each.d.median()):.2e}",
                f"{float(each.d.max()):.2e}",
                f"{each.limit:.0e}",
                each.violations,
                each.quarantines,
            ]
            for each in honest
        ],
    )


def _cheat_lines(cheats: list[Found]) -> list[str]:
    head = ["cheat", "median d", "over limit", "at once", "strikes", "median", "p99", "from start"]
    return table(
        head,
        [
            [
                each.name,
                f"{float(each.d.median()):.2e}",
                f"{each.violating:.1%}",
                f"{each.flagged:.1%}",
                1 if each.one_strike else 3,
                f"{each.median:.0f}",
                each.p99,
                f"{each.from_start:.0f}",
            ]
            for each in cheats
        ],
    )


DECADES: Final = range(-16, 1)
SHADES: Final = " .:-=+*#%@"


def _histograms(honest: list[Honest], cheats: list[Found]) -> list[str]:
    """Shares of d by decade, one line a distribution."""
    every: list[Honest | Found] = [*honest, *cheats]
    wide = max(len(each.name) for each in every)
    head = f"{'log10 d':<{wide}}  " + " ".join(f"{decade:>3}" for decade in DECADES)
    return [head, *(f"{each.name:<{wide}}  " + _bar(each.d) for each in every)]


def _bar(d: Tensor) -> str:
    shares = histogram(d)
    return " ".join(f"  {SHADES[min(9, int(share * 9 + 0.999))]}" for share in shares)


def histogram(d: Tensor) -> list[float]:
    """The share of d in each decade of `DECADES`; what is smaller counts in the first."""
    logs = torch.floor(torch.log10(d.clamp(min=1e-30))).clamp(DECADES[0], DECADES[-1])
    return [float((logs == decade).double().mean()) for decade in DECADES]


def _picture(honest: list[Honest], cheats: list[Found]) -> str:
    def points(d: Tensor) -> list[tuple[float, float]]:
        ordered = d.clamp(min=1e-17).sort().values
        picks = torch.linspace(0, len(ordered) - 1, 200).long()
        return [(float(ordered[i]), float(i + 1) / len(ordered)) for i in picks.tolist()]

    shown = [each for each in honest if each.name.endswith("float32")]
    curves = {f"honest {each.name}": points(each.d) for each in shown}
    named = [each for each in cheats if "float32" in each.name and each.share == 1.0]
    panels = [
        Curves(
            "d of honest replies", "d", "share of rows at most", curves, {"limit (stored)": honest[0].limit}
        ),
        Curves(
            "d of cheats",
            "d",
            "share of rows at most",
            {each.name: points(each.d) for each in named},
            {"limit (stored)": named[0].limit, "one strike": GROSS},
        ),
    ]
    return page(panels)

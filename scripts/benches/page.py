"""Saved results of suites -> `docs/benchmarks.md` and its picture.

Knows what suites report. Measures nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from labs.svg import LEFT, RIGHT, WIDTH, page, text

from . import SUITES

PROMISE: Final = re.compile(r"^(holds|BROKEN)\s+(\w+) ([-+.\de]+) (>=|<=|<|>|=) ([-+.\de]+)$")
MOST: Final = 10.0
"""Bars end at this multiple of what is promised."""

_HEAD: Final = """# Benchmarks

Made by `python3 scripts/bench.py --page FOLDER` from results that `python3 scripts/bench.py SUITE --save
FOLDER` left there. Every speed is a ratio of two things measured side by side in one run, interleaved, as the
median of the pairs; an `_interval` is its 95 % bootstrap interval. Both sides run on the machine named with
each suite, so that its noise hits both.

![Figures against their promises](img/benchmarks.svg)

A bar says how many times better than promised a figure is (to the right of the line: it holds).
"""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promised figure of a suite, and by what factor it is better (below 1: worse) than promised."""

    suite: str
    name: str
    value: float
    sign: str
    bound: float
    holds: bool

    @property
    def factor(self) -> float:
        """How many times better than promised, within 1 / `MOST` to `MOST`."""
        value, bound = max(abs(self.value), 1e-12), max(abs(self.bound), 1e-12)
        better = value / bound if self.sign.startswith((">", "=")) else bound / value
        return min(max(better, 1 / MOST), MOST)


@dataclass(frozen=True, slots=True)
class Against:
    """A panel of bars, one a promise, on a logarithmic scale around 1."""

    promises: Sequence[Promise]

    @property
    def height(self) -> int:
        """See `labs.svg.Panel`."""
        return 70 + 18 * len(self.promises)

    def draw(self) -> list[str]:
        """See `labs.svg.Panel`."""
        middle, span = (LEFT + WIDTH - RIGHT) / 2, (WIDTH - RIGHT - LEFT) / 2
        bottom = 44 + 18 * len(self.promises)
        parts = [text(12, 20, "Figures against their promises", size=14, weight="bold")]
        for factor in (1 / MOST, 0.5, 1.0, 2.0, MOST):
            x = middle + span * math.log(factor) / math.log(MOST)
            parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='38' y2='{bottom}' stroke='#ccc'/>")
            parts.append(text(x, bottom + 16, f"{factor:g}x", anchor="middle", size=10))
        for number, promise in enumerate(self.promises):
            y = 42 + 18 * number
            length = span * math.log(promise.factor) / math.log(MOST)
            left, colour = min(middle, middle + length), "#66a182" if promise.holds else "#d1495b"
            parts.append(text(LEFT - 8, y + 10, f"{promise.suite}: {promise.name}", anchor="end"))
            parts.append(
                f"<rect x='{left:.1f}' y='{y}' width='{max(abs(length), 1.5):.1f}' height='12' "
                f"fill='{colour}'/>"
            )
            label = f"{promise.value:g} ({promise.sign} {promise.bound:g})"
            parts.append(text(max(middle, middle + length) + 4, y + 10, label, size=9))
        parts.append(f"<line x1='{middle:.1f}' x2='{middle:.1f}' y1='38' y2='{bottom}' stroke='#222'/>")
        return parts


def save(
    folder: Path, suite: str, figures: Mapping[str, object], findings: Sequence[str], machine: object
) -> None:
    """Keep a suite's results for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"suite": suite, "figures": dict(figures), "findings": list(findings), "machine": machine}
    (folder / f"{suite}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def promises(result: Mapping[str, Any]) -> list[Promise]:
    """The promised figures of a saved result."""
    found = []
    for line in result["findings"]:
        match = PROMISE.match(line)
        if match:
            verdict, name, value, sign, bound = match.groups()
            found.append(Promise(result["suite"], name, float(value), sign, float(bound), verdict == "holds"))
    return found


def write(folder: Path, docs: Path) -> list[str]:
    """Write `benchmarks.md` and its picture into `docs`; the suites that were found, in their order."""
    results = [
        json.loads((folder / f"{suite}.json").read_text(encoding="utf-8"))
        for suite in SUITES
        if (folder / f"{suite}.json").is_file()
    ]
    parts = [_HEAD]
    for result in results:
        parts.append(_section(result))
    (docs / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")
    (docs / "img").mkdir(exist_ok=True)
    everything = [promise for result in results for promise in promises(result)]
    (docs / "img" / "benchmarks.svg").write_text(page([Against(everything)]), encoding="utf-8")
    return [result["suite"] for result in results]


def _section(result: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    lines = [
        f"## {result['suite']}",
        "",
        f"`python3 scripts/bench.py {result['suite']} --json`: {SUITES[result['suite']]}.",
        "",
        f"Machine: {machine}.",
        "",
        "| figure | measured | promised |",
        "|---|---|---|",
    ]
    promised = {promise.name: promise for promise in promises(result)}
    for name, value in result["figures"].items():
        promise = promised.get(name)
        words = "" if promise is None else f"{promise.sign} {promise.bound:g}"
        words += "" if promise is None or promise.holds else " **not reached**"
        lines.append(f"| `{name}` | {_shown(value)} | {words} |")
    others = [line for line in result["findings"] if not PROMISE.match(line)]
    lines += ["", *(f"- {line}" for line in others)] if others else []
    return "\n".join([*lines, ""])


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"`{json.dumps(value)}`"
    return f"{value}".replace("|", "\\|")

"""The experiments by name. Each is a module with `add_arguments(parser)` and `run(options) -> Report`."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, field
from typing import Protocol, cast

LABS = {
    "audit": "cheaters against sampling, trust and the ledger: how soon they are out, what they keep",
    "calibrate": "honest d of each numerics class, limits for audits from it, and cheaters beside them",
    "divergence": "a heterogeneous swarm with and without router authority: which experts run, which text",
    "privacy": "how much of a prompt one worker can recover, and what mitigations buy and cost",
}
"""Experiment -> what it measures."""


@dataclass(slots=True)
class Report:
    """What an experiment found.

    `figures` by name, flat: they are the JSON object. `lines` are tables for a person, printed first. `svg`
    is the figure that `--plot` writes.
    """

    figures: dict[str, object]
    lines: list[str] = field(default_factory=list)
    svg: str = ""


class Lab(Protocol):
    """A module of this folder."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add options of its own to --json, --plot, --model and --short."""
        ...

    def run(self, options: argparse.Namespace) -> Report:
        """Measure. `options` has `json`, `plot`, `model` (a path or None), `short`, and its own."""
        ...


def load(name: str) -> Lab:
    """The experiment of that name."""
    return cast(Lab, importlib.import_module(f"labs.{name}"))


def table(head: list[str], rows: list[list[object]]) -> list[str]:
    """Lines of a table with aligned columns: the first to the left, the others to the right."""
    cells = [head, *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}"

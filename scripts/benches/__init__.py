"""The benchmark suites by name. Each is a module here with `run(work_dir) -> Report`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

SUITES = {
    "wan": "behind delayed and narrow links: one stream, drafting, many streams, the uplink's limit",
    "relay": "speed against a bare proxy, idle, frozen and returning peers of a relay",
    "weights": "fetching and verifying 1 GB against curl and sha256sum; a warm start; a plan of 100 GB",
    "kills": "200 kills of a download at random bytes: are the final bytes right, what is fetched again",
    "call": "the cost of a hop: an expert call against its bare kernel and against hivemind",
    "decode": "one stream and eight through two nodes, against stock transformers",
    "kernel": "one expert's FFN on one thread, against read bandwidth and torch's own kernels",
    "memory": "peak memory and bytes read of a backbone without its experts, against stock transformers",
    "chaos": "100 kills and freezes of nodes while texts are written: same text, longest stall",
    "overload": "10x the load a swarm can take: what the accepted notice, who is refused, memory",
}
"""Suite -> what it measures."""


@dataclass(slots=True)
class Report:
    """What a suite found: figures by name, and for each promise a line that says whether it holds."""

    figures: dict[str, object]
    findings: list[str] = field(default_factory=list)
    passed: bool = True

    def promise(self, what: str, holds: bool) -> None:
        """Note one promised figure."""
        self.findings.append(f"{'holds ' if holds else 'BROKEN'}  {what}")
        self.passed = self.passed and holds


class Suite(Protocol):
    """A module of this folder."""

    def run(self, work_dir: Path | None) -> Report:
        """Measure; temporary files go to `work_dir` or the system's temporary folder."""
        ...


def load(name: str) -> Suite:
    """The suite of that name."""
    return cast(Suite, importlib.import_module(f"benches.{name}"))

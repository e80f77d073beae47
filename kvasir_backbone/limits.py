"""The calibrated limits of audits: how far an honest replica may be from the backbone's recompute.

`limits.json` holds what `scripts/lab.py calibrate` measured: for each quantiser and wire dtype the largest d
that honest kernels, threads and batch sizes gave, and the limit made of it, at which fewer than one honest
row in 100,000 is refused. Only classes whose kernel family was measured have one; for all others the design's
start values hold (`kvasir_backbone.audit`).

Knows names of numerics classes and numbers. Knows no tensors.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from relay.errors import ConfigError

VERSION: Final = 1
EXACT_ROWS: Final = frozenset({"none", "int16"})
"""Activation quantisers that share a limit: a replica's kernel may have one, the backbone's the other."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One class of replicas: `limit` is the d over which an audited output counts as wrong.

    `weights` is the quantiser's name, `wire` the plan's wire dtype, `families` the kernel families that were
    measured, `rows` how many outputs were, `largest` the largest d among them.
    """

    weights: str
    wire: str
    families: frozenset[str]
    limit: float
    rows: int
    largest: float


def read_limits(text: str) -> tuple[Limit, ...]:
    """Parse what `lab.py calibrate --limits` wrote. Raises `ConfigError`."""
    try:
        body: dict[str, Any] = json.loads(text)
        if body["v"] != VERSION:
            raise ConfigError(f"limits of version {body['v']}, this program reads version {VERSION}")
        found = tuple(
            Limit(
                str(each["weights"]),
                str(each["wire"]),
                frozenset(map(str, each["families"])),
                float(each["limit"]),
                int(each["rows"]),
                float(each["largest"]),
            )
            for each in body["limits"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the calibrated limits cannot be read: {error!r}") from None
    for each in found:
        if not 0.0 < each.largest <= each.limit < 1.0:
            raise ConfigError(f"a limit of {each.limit} beside a largest honest d of {each.largest}")
    return found


@functools.cache
def _shipped() -> dict[tuple[str, str], Limit]:
    text = resources.files(__package__).joinpath("limits.json").read_text(encoding="utf-8")
    return {(each.weights, each.wire): each for each in read_limits(text)}


def calibrated(weights: str, numerics: str) -> float | None:
    """The calibrated limit of a replica that keeps its weights by the quantiser `weights`; None without one.

    `numerics` is its numerics class (`kvasir_node.execution.numerics_class`), which is the device's word: a
    class whose parts are not those measured gets none.
    """
    parts = numerics.split("/")
    if len(parts) < 6 or parts[1] != weights or parts[2] not in EXACT_ROWS:
        return None
    found = _shipped().get((weights, parts[3]))
    family = parts[5].partition("-")[0]  # torch's has its version
    return found.limit if found is not None and family in found.families else None

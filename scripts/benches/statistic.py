"""Medians of interleaved pairs, and how sure they are: 95 % bootstrap intervals, the same in every run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

Pair = tuple[float, float]
"""Two measurements of one turn."""

RESAMPLES = 1_000


def interval(statistic: Callable[[Sequence[T]], float], values: Sequence[T]) -> list[float]:
    """The 95 % bootstrap interval of a statistic of `values`."""
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [round(found[RESAMPLES * 25 // 1_000], 3), round(found[RESAMPLES * 975 // 1_000 - 1], 3)]


def median_of(column: int, pairs: Sequence[Pair]) -> float:
    """The median of one side of pairs."""
    return statistics.median(pair[column] for pair in pairs)


def share(pairs: Sequence[Pair]) -> float:
    """The first side over the second, medians of both."""
    return median_of(0, pairs) / median_of(1, pairs)


def ratio(pairs: Sequence[Pair]) -> float:
    """The median of the pairs' own ratios."""
    return statistics.median(first / second for first, second in pairs)

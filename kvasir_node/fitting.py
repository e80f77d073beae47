"""Whether a window fits this machine, at which precision, and what a plan's windows would take: pure.

A window is looked at before it is claimed, so nothing is downloaded that could not be kept. Knows plans and
sizes as arguments; no machine, no market.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from market.messages import Offer
from market.plans import Plan, PlanId
from market.windows import Window
from relay.errors import KvasirError

from .config import format_size

AUTO_PRECISIONS: Final = ("stored", "bf16", "int8", "int4")
"""What `--precision auto` offers, the most exact first."""

COARSE: Final = frozenset({"int4"})
"""Precisions taken only where nothing else fits, and where the plan allows them."""

FETCH_BYTES: Final = 16 << 20
"""Memory of a fetch: chunks on their way from the network to the disk."""


class WontFit(KvasirError):  # noqa: N818 - a fact about the machine, not a failure of ours
    """A window does not fit; the message says what is short, and what the owner can do."""

    code = "quota"


class PrecisionChooser:
    """`--precision auto`: for each plan once, so that a node's replicas of it are of one numerics class.

    The most exact precision at which all the windows wanted fit the budget; if they fit at none, the smallest
    but int4. int4 (d of 1e-2) is taken only for a window that fits at nothing else, where the plan allows it.
    """

    def __init__(self) -> None:
        self._chosen: dict[PlanId, str] = {}

    def settle(self, offer: Offer, plan: Plan, wanted: Mapping[str, int], free: int) -> Offer:
        """`offer` at the precision to claim it at.

        The offer comes at the most exact precision at which this one window fits. `wanted` is what all
        windows wanted of the device keep at each precision, `free` what is left of the budget, in bytes.
        """
        if offer.precision in COARSE:
            return offer
        chosen = self._chosen.get(offer.plan)
        if chosen is None:
            chosen = self._chosen[offer.plan] = choose_precision(plan, wanted, free)
        kept = plan.kept_bytes(offer.window, chosen)
        return replace(offer, precision=chosen, kept_bytes=kept) if kept <= free else offer

    def knows(self, plan: PlanId) -> bool:
        """Whether it has been chosen for that plan."""
        return plan in self._chosen

    def forget(self, plan: PlanId) -> None:
        """No window of the plan is held any more: it may be chosen anew."""
        self._chosen.pop(plan, None)


def choose_precision(plan: Plan, wanted: Mapping[str, int], free: int) -> str:
    """See `PrecisionChooser`; a precision that the plan allows, never int4 unless it allows nothing else."""
    exact = [name for name in AUTO_PRECISIONS if name in plan.precisions and name not in COARSE]
    if not exact:
        return plan.precisions[0]
    sizes = {name: wanted[name] for name in exact if name in wanted}
    fits = [name for name, size in sizes.items() if size <= free]
    if fits:
        return fits[0]
    return min(exact, key=lambda name: plan.kept_bytes(plan.windows[0], name))


def working_bytes(plan: Plan, window: Window) -> int:
    """Memory that loading `window` takes besides what it keeps: one expert widened to fp32, thrice over
    (read, rounded, ordered anew), and what a fetch holds.
    """
    elements = max(
        sum(math.prod(tensor.shape) for tensor in recipe.tensors) for recipe in plan.window_layers(window)
    )
    return 3 * 4 * elements + FETCH_BYTES


def check_fit(plan: Plan, offer: Offer, *, budget_left: int, memory_free: int) -> None:
    """Raise `WontFit` unless the offered window fits the budget and the memory that is free now, in bytes."""
    kept, working = plan.kept_bytes(offer.window, offer.precision), working_bytes(plan, offer.window)
    name = f"{offer.window.name} as {offer.precision}"
    if kept > budget_left:
        raise WontFit(
            f"{name} keeps {format_size(kept)} and {format_size(max(0, budget_left))} of the budget are left:"
            f" raise --budget by {format_size(kept - budget_left)}"
        )
    if kept + working > memory_free:
        raise WontFit(
            f"{name} needs {format_size(kept)} of memory and {format_size(working)} more while it loads, and "
            f"{format_size(memory_free)} are free: close something, or give a smaller --budget"
        )


def describe_capacity(plan: Plan, budget: int, precisions: tuple[str, ...]) -> str:
    """One line for a person: how much of the model this budget holds, at each precision that both allow."""
    parts, smallest = [], 0
    for name in (name for name in precisions if name in plan.precisions):
        sizes = sorted(plan.kept_bytes(window, name) for window in plan.windows)
        smallest = min(smallest or sizes[0], sizes[0])
        count, left = 0, budget
        while count < len(sizes) and sizes[count] <= left:
            left -= sizes[count]
            count += 1
        held = "all" if count == len(sizes) else f"{count} of {len(sizes)}"
        parts.append(f"{held} windows as {name}")
    if not parts:
        allowed, offered = ", ".join(plan.precisions), ", ".join(precisions)
        return f"{plan.model}: it allows {allowed}, and this node offers {offered}"
    if budget < smallest:
        return (
            f"{plan.model}: no window, for the smallest keeps {format_size(smallest)}: raise --budget to at "
            "least that"
        )
    return f"{plan.model}: {' or '.join(parts)}"

"""What a device is offered: the scarcest windows that fit it, or why nothing is needed of it now.

Pure: facts about the device and the windows in, an answer with its reasons out; ties are broken by the
`draw` that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from .messages import Abilities, Offer, VolunteerAnswer
from .plans import PlanId
from .scarcity import WindowNeed
from .windows import Window

MAX_OFFERS: Final = 8
SOON_S: Final = 1.0
SETTLED_S: Final = 20.0
YEARS_S: Final = 365 * 86_400.0
"""A quarantine that lasts longer than a year is told as one without end."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the market knows of a device that volunteers.

    `held_bytes` are kept by its leases; `wallet_windows` are those of which its wallet has a replica;
    `loading` is the window that an untrusted wallet is loading now, if any.
    """

    held_bytes: int
    wallet_windows: frozenset[tuple[PlanId, Window]]
    loading: Window | None
    quarantine_s: float = 0.0
    quarantine_reason: str = ""


def answer(
    abilities: Abilities, facts: DeviceFacts, needs: Sequence[WindowNeed], *, draw: Callable[[], float]
) -> VolunteerAnswer:
    """The answer to a volunteering device. `draw` gives a random number below 1 for each tie."""
    if facts.quarantine_s > 0:
        return _nothing(quarantine_message(facts.quarantine_s, facts.quarantine_reason), 60.0)
    if not needs:
        return _nothing("nothing needed now, because no backbone has published a plan yet", SOON_S)
    if facts.loading is not None:
        return _nothing(
            f"this wallet is loading {facts.loading.name}: it may take the next window once that is loaded",
            SOON_S,
        )
    able = [need for need in needs if _able(abilities, need) is None]
    if not able:
        return _nothing(f"nothing this device can serve, because {_able(abilities, needs[0])}", 60.0)
    scarce = [need for need in able if need.scarcity > 0]
    if not scarce:
        return _nothing(_all_covered(able), _patience(needs))
    new = [need for need in scarce if (need.plan, need.window) not in facts.wallet_windows]
    if not new:
        return _nothing(
            f"nothing needed of this wallet now, because it has a replica of each of the {len(scarce)} "
            "scarce windows already, and other wallets must hold the others",
            _patience(needs),
        )
    free = abilities.budget_bytes - facts.held_bytes
    offers = [offer for need in new if (offer := _fit(abilities, need, free)) is not None]
    if not offers:
        return _nothing(_too_small(abilities, new, free), _patience(needs))
    order = {(need.plan, need.window): _rank(abilities, need, draw) for need in new}
    offers.sort(key=lambda offer: order[offer.plan, offer.window])
    return VolunteerAnswer(tuple(offers[:MAX_OFFERS]), offers[0].reason, SOON_S, _wanted(new))


def best_fit(abilities: Abilities, need: WindowNeed, free: int) -> Offer | None:
    """The window at the first of the device's precisions that fits `free` bytes; None if there is none."""
    return None if _able(abilities, need) is not None else _fit(abilities, need, free)


def quarantine_message(left_s: float, reason: str) -> str:
    """What a device of a wallet in quarantine is told."""
    left = "for good" if left_s > YEARS_S else f"for {left_s:.0f} s more"
    why = f", because {reason}: see `kvasir-node audit show`" if reason else ""
    return f"this wallet is in quarantine {left}{why}"


def _nothing(message: str, retry_after_s: float) -> VolunteerAnswer:
    return VolunteerAnswer((), message, retry_after_s)


def _able(abilities: Abilities, need: WindowNeed) -> str | None:
    """Why the device cannot serve the window whatever its size, or None."""
    if need.wire_dtype not in abilities.wire_dtypes:
        return f"the plan sends {need.wire_dtype} rows and the device takes {_words(abilities.wire_dtypes)}"
    if not set(abilities.precisions) & need.kept_bytes.keys():
        allowed = _words(sorted(need.kept_bytes))
        return (
            f"the plan allows the precisions {allowed} and the device offers {_words(abilities.precisions)}"
        )
    missing = need.formulas - set(abilities.formulas)
    if abilities.formulas and missing:
        return f"the device's version does not execute the gate formula {_words(sorted(missing))}: update it"
    return None


def _words(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _fit(abilities: Abilities, need: WindowNeed, free: int) -> Offer | None:
    """The offer at the first of the device's precisions that is allowed and fits."""
    for precision in abilities.precisions:
        kept = need.kept_bytes.get(precision)
        if kept is not None and kept <= free:
            return Offer(need.plan, need.window, precision, kept, need.download_bytes, need.reason)
    return None


def _wanted(needs: Sequence[WindowNeed]) -> dict[str, int]:
    """Bytes that all of these windows would keep, for each precision that every one of them allows."""
    shared = set.intersection(*(set(need.kept_bytes) for need in needs))
    return {name: sum(need.kept_bytes[name] for need in needs) for name in sorted(shared)}


def _rank(
    abilities: Abilities, need: WindowNeed, draw: Callable[[], float]
) -> tuple[float, bool, bool, float]:
    cached = (need.plan, need.window) in abilities.cached
    return (-need.scarcity, not cached, abilities.network in need.networks, draw())


def _all_covered(needs: Sequence[WindowNeed]) -> str:
    loading = sum(need.loading for need in needs)
    tail = f"; {loading} are still loading" if loading else ""
    return f"nothing needed now, because all {len(needs)} windows have their replicas{tail}"


def _too_small(abilities: Abilities, needs: Sequence[WindowNeed], free: int) -> str:
    smallest, precision, name = min(
        (kept, precision, need.window.name)
        for need in needs
        for precision, kept in need.kept_bytes.items()
        if precision in abilities.precisions
    )
    return (
        f"no needed window fits: the smallest, {name}, keeps {smallest} bytes at {precision}, and of the "
        f"budget of {abilities.budget_bytes} bytes {max(free, 0)} are free; raise --budget by "
        f"{smallest - free} bytes"
    )


def _patience(needs: Sequence[WindowNeed]) -> float:
    """Seconds until it is worth asking again: soon while a swarm fills, seldom once it has settled."""
    settled = all(need.loading == 0 and need.proven > 0 for need in needs)
    return SETTLED_S if settled else 2 * SOON_S

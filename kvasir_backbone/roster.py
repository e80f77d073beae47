"""Who owns which window at one moment: what the dispatch planner plans with.

A roster is immutable; the swarm publishes a new one at every change, and a dispatch that started with the
old one goes on with it.

Pure. Knows windows, leases and devices' keys; knows no sessions and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from market.plans import Plan
from market.windows import Window
from relay.identity import PublicKey


@dataclass(frozen=True, slots=True)
class Replica:
    """A proven replica of a window.

    `ref` is the short reference of the lease announced in the device's session, `numerics` the replica's
    numerics class, `precision` the one it keeps its weights at, `connected` whether a session is up.
    """

    device: PublicKey
    wallet: PublicKey
    lease: bytes
    epoch: int
    ref: int
    window: Window
    numerics: str
    precision: str = "stored"
    connected: bool = True


class WindowMap:
    """(layer, expert) -> number of its window in the plan. Made once for a plan."""

    def __init__(self, plan: Plan) -> None:
        self.windows = plan.windows
        self.number = {window: number for number, window in enumerate(plan.windows)}
        self._table: dict[int, tuple[int, ...]] = {}
        for recipe in plan.layers:
            owners = [-1] * recipe.experts
            for number, window in enumerate(plan.windows):
                if window.layer_start <= recipe.layer < window.layer_end:
                    for expert in range(window.expert_start, min(window.expert_end, recipe.experts)):
                        owners[expert] = number
            assert -1 not in owners, f"layer {recipe.layer}: some experts are in no window"
            self._table[recipe.layer] = tuple(owners)
        self._whole = {layer: owners[0] for layer, owners in self._table.items() if len(set(owners)) == 1}

    @property
    def layers(self) -> tuple[int, ...]:
        """The MoE layers, ascending."""
        return tuple(sorted(self._table))

    def whole(self, layer: int) -> int | None:
        """The window that holds all experts of `layer`, if one does."""
        return self._whole.get(layer)

    def owners(self, layer: int) -> tuple[int, ...]:
        """For each expert of `layer` the number of its window. Raises `KeyError` for a dense layer."""
        return self._table[layer]


@dataclass(frozen=True, slots=True)
class Roster:
    """The proven replicas of every window, by the window's number in the plan.

    `honoured` has (lease, epoch) of every claim whose replies are still taken: the proven ones, and those
    that are draining.
    """

    windows: WindowMap
    replicas: Mapping[int, tuple[Replica, ...]] = field(default_factory=dict)
    honoured: frozenset[tuple[bytes, int]] = frozenset()

    def of(self, window: int) -> tuple[Replica, ...]:
        """The replicas of that window, connected or not."""
        return self.replicas.get(window, ())

    def coverage(self) -> float:
        """Share of the plan's windows with at least one connected, proven replica, 0 to 1."""
        covered = sum(any(r.connected for r in self.of(n)) for n in range(len(self.windows.windows)))
        return covered / len(self.windows.windows)

    def numerics(self) -> frozenset[str]:
        """The numerics classes of all replicas."""
        return frozenset(replica.numerics for found in self.replicas.values() for replica in found)

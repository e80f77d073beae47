"""Plans without files and rosters without sockets, for tests of pure decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvasir_backbone.roster import Replica, Roster, WindowMap
from market.plans import GateFormula, LayerRecipe, Plan, PlanFile, Source, TensorRecipe
from market.windows import Window
from relay.identity import PublicKey


def flat_plan(
    *, layers: Sequence[int] = (0, 1), experts: int = 8, top_k: int = 2, cut: int = 4, width: int = 4
) -> Plan:
    """A plan of `layers` x `experts`, each layer cut into windows of `cut` experts; one F32 matrix each."""
    size = 4 * width * width
    recipes = tuple(
        LayerRecipe(
            layer,
            experts,
            top_k,
            GateFormula("swiglu", "silu"),
            tuple(
                TensorRecipe(
                    role,
                    (width, width),
                    (Source(0, "F32", (width, width), (3 * n + i) * experts * size, size),),
                )
                for i, role in enumerate(("gate", "up", "down"))
            ),
        )
        for n, layer in enumerate(layers)
    )
    windows = tuple(
        Window(layer, layer + 1, start, min(start + cut, experts))
        for layer in layers
        for start in range(0, experts, cut)
    )
    return Plan(
        model="flat",
        revision="0" * 64,
        source="local",
        architecture="Flat",
        files=(PlanFile("model.safetensors", 3 * len(layers) * experts * size),),
        width=width,
        wire_dtype="float32",
        precisions=("stored",),
        weighted=False,
        windows=windows,
        layers=recipes,
    )


def device(name: str) -> PublicKey:
    """A made-up device key."""
    return PublicKey(hashlib.sha256(name.encode()).digest())


def replica(windows: WindowMap, window: int, name: str, **changes: object) -> Replica:
    """A replica of window number `window` at device `name`."""
    fields: dict[str, object] = {
        "device": device(name),
        "wallet": device(f"wallet of {name}"),
        "lease": hashlib.sha256(f"{name}/{window}".encode()).digest()[:16],
        "epoch": 1,
        "ref": window,
        "window": windows.windows[window],
        "numerics": "stored/float32",
    }
    return Replica(**{**fields, **changes})  # type: ignore[arg-type]


def roster(windows: WindowMap, held: Mapping[int, Sequence[str]]) -> Roster:
    """The roster in which the devices of `held[window]` have a replica each."""
    replicas = {
        window: tuple(replica(windows, window, name) for name in names) for window, names in held.items()
    }
    honoured = frozenset((each.lease, each.epoch) for found in replicas.values() for each in found)
    return Roster(windows, replicas, honoured)

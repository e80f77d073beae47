"""How the demo cuts a model so that every one of its nodes gets work: pure arithmetic over a checkpoint.

Reads safetensors headers (8 bytes of length, then JSON) and `config.json`; imports no torch.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from market.windows import Window, cut_windows

_EXPERT_TENSOR = re.compile(
    r"\.(\d+)\.(?:[a-z_]+\.)?experts\.|\.(\d+)\.block_sparse_moe\.(?:input|output)_linear\."
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


QUANTISED_GROWTH = 4
"""Nodes keep dequantised tensors; a 4-bit checkpoint grows to four times its stored size."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A window size in stored bytes, the windows it gives, and the budget that each node is to have."""

    window_bytes: int
    windows: tuple[Window, ...]
    budget: int


def layer_bytes(folder: Path) -> dict[int, int]:
    """MoE layer -> stored bytes of its routed experts."""
    sizes: dict[int, int] = defaultdict(int)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        for name, entry in header.items():
            found = None if name == "__metadata__" or "shared" in name else _EXPERT_TENSOR.search(name)
            if found:
                start, end = entry["data_offsets"]
                sizes[int(found[1] or found[2])] += end - start
    return dict(sizes)


def expert_count(folder: Path) -> int:
    """How many routed experts a layer of the model has; 0 where the configuration does not say."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    places = [config, config.get("text_config") or {}]
    return next((int(place[name]) for place in places for name in _COUNTS if place.get(name)), 0)


def is_quantised(folder: Path) -> bool:
    """Whether the checkpoint's tensors are stored in fewer bits than they are computed in."""
    return "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def choose_cut(sizes: Mapping[int, int], experts: int, nodes: int, *, growth: int = 1) -> Cut:
    """The coarsest cut with which no node can go empty.

    `sizes` is the result of `layer_bytes`, `growth` how much larger experts are in memory. Each node has room
    for an equal share of the windows and one more, as two nodes may claim one window at the same time. With
    W windows and n nodes that all take ceil(W/n) + 1, a node is sure of a window of its own when the others
    together cannot hold all W. Raises `ValueError` where no cut is fine enough.
    """
    counts = dict.fromkeys(sizes, experts)
    one = {layer: max(1, size // experts) for layer, size in sizes.items()}
    whole = max(one.values()) * experts
    tries = [whole * group for group in range(len(sizes), 1, -1)]
    tries += [-(-whole // parts) for parts in range(1, experts + 1)]
    for window_bytes in tries:
        windows = cut_windows(counts, one, window_bytes)
        most = -(-len(windows) // nodes) + 1
        if nodes == 1 or (nodes - 1) * most < len(windows):
            largest = max(_window_bytes(window, one) for window in windows)
            return Cut(window_bytes, windows, most * largest * growth)
    raise ValueError(f"{nodes} nodes are too many for {len(sizes)} layers of {experts} experts")


def _window_bytes(window: Window, one: Mapping[int, int]) -> int:
    experts = window.expert_end - window.expert_start
    return sum(one[layer] * experts for layer in window.layers(sorted(one)))

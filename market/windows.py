"""What an expert window is: a tile of layers x experts, and how a model is cut into them.

Knows names and tiles. Knows nothing of tensors, plans or who holds what.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from relay.errors import ConfigError

_NAME = re.compile(r"L(\d{2,5})-(\d{2,5})/E(\d{3,6})-(\d{3,6})")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Layers `layer_start` up to `layer_end` x experts `expert_start` up to `expert_end`, half-open.

    Written `L03-05/E000-127`, both ends inclusive. Layer numbers are the model's own; a layer without
    routed experts inside the range holds nothing.
    """

    layer_start: int
    layer_end: int
    expert_start: int
    expert_end: int

    def __post_init__(self) -> None:
        if not (0 <= self.layer_start < self.layer_end and 0 <= self.expert_start < self.expert_end):
            raise ConfigError(
                f"not a window: layers {self.layer_start}:{self.layer_end}, experts "
                f"{self.expert_start}:{self.expert_end}"
            )

    @property
    def name(self) -> str:
        """The window's name, both ends inclusive."""
        return (
            f"L{self.layer_start:02d}-{self.layer_end - 1:02d}/"
            f"E{self.expert_start:03d}-{self.expert_end - 1:03d}"
        )

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Window:
        """The window of that name. Raises `ConfigError` unless `Window.parse(name).name == name`."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{name!r} is not a window name such as L03-05/E000-127")
        first_layer, last_layer, first_expert, last_expert = map(int, match.groups())
        window = cls(first_layer, last_layer + 1, first_expert, last_expert + 1)
        if window.name != name:
            raise ConfigError(f"{name!r} is not written canonically; it would be {window.name}")
        return window

    def contains(self, layer: int, expert: int) -> bool:
        """Whether (layer, expert) lies in the tile."""
        return self.layer_start <= layer < self.layer_end and self.expert_start <= expert < self.expert_end

    def layers(self, model_layers: Sequence[int]) -> Iterator[int]:
        """Those of the model's MoE layers that lie in the tile, in order."""
        return (layer for layer in model_layers if self.layer_start <= layer < self.layer_end)


def cut_windows(
    experts: Mapping[int, int], expert_bytes: Mapping[int, int], window_bytes: int
) -> tuple[Window, ...]:
    """Cut a model into windows of about `window_bytes`, whole layers first.

    `experts[layer]` is the number of routed experts of each MoE layer, `expert_bytes[layer]` the bytes of
    one of them. Consecutive layers share a window while they have equally many experts and fit; a layer
    larger than `window_bytes` is split into runs of nearly equally many experts. Every (layer, expert) is
    in exactly one window. Raises `ConfigError` if there are no experts or `window_bytes` is not positive.
    """
    if not experts:
        raise ConfigError("the model has no routed experts to cut into windows")
    if window_bytes <= 0:
        raise ConfigError("--window-bytes must be positive")
    windows: list[Window] = []
    run: list[int] = []

    def close_run() -> None:
        if run:
            windows.append(Window(run[0], run[-1] + 1, 0, experts[run[0]]))
            run.clear()

    for layer in sorted(experts):
        size = experts[layer] * expert_bytes[layer]
        if size > window_bytes:
            close_run()
            parts = min(experts[layer], -(-size // window_bytes))
            edges = [experts[layer] * part // parts for part in range(parts + 1)]
            windows.extend(Window(layer, layer + 1, a, b) for a, b in itertools.pairwise(edges))
            continue
        held = sum(experts[other] * expert_bytes[other] for other in run)
        if run and (experts[run[0]] != experts[layer] or held + size > window_bytes):
            close_run()
        run.append(layer)
    close_run()
    return tuple(windows)

"""A local checkpoint as the swarm sees it: what it is, its plan, and its exact bytes.

Knows a folder of safetensors files and the model's skeleton. Holds no weights; transformers is imported
only when a checkpoint is opened.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from market.plans import (
    PRECISIONS,
    WIRE_DTYPES,
    ByteRange,
    LayerRecipe,
    Plan,
    PlanId,
    WindowHashes,
    plan_fields,
)
from market.windows import Window, cut_windows
from relay.errors import ConfigError
from relay.identity import PROTOCOL_VERSION, pack

from .dense import dense_tensors
from .local_layers import split_layers
from .shards import Shards
from .skeleton import Skeleton, build_skeleton, check_folder
from .weights import FileRanges, HubRanges

DEFAULT_PRECISIONS = ("stored", "int8")
_SPAN_BYTES = 4 * 1024 * 1024


class Checkpoint:
    """One opened checkpoint. Safe to read from several threads."""

    def __init__(self, path: Path, shards: Shards, skeleton: Skeleton, *, source: str = "local") -> None:
        self.path = path
        self.source = source
        self.shards = shards
        self.skeleton = skeleton
        self._recipes: tuple[LayerRecipe, ...] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the checkpoint in folder `path`.

        Raises `ConfigError` where it is missing, damaged, not a Mixture-of-Experts model, or of an
        architecture that the experts interface does not cover (named in the message).
        """
        folder = Path(path).expanduser()
        check_folder(folder)
        skeleton = build_skeleton(folder)
        return cls(folder, Shards.open(folder), skeleton)

    @property
    def name(self) -> str:
        """A name for people: the folder's."""
        return self.path.resolve().name

    @property
    def revision(self) -> str:
        """What pins its exact bytes."""
        return self.shards.revision()

    @property
    def dense_path(self) -> Path:
        """The folder that transformers loads everything but the experts from."""
        return self.path

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.skeleton.config

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with routed experts, in order."""
        return tuple(self.skeleton.experts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all its safetensors files."""
        return self.shards.total_bytes

    def warm_dense(self) -> None:
        """Have the system read the dense tensors of a local checkpoint, and nothing else, ahead of loading.

        transformers maps the files, and a system that reads around every fault, by megabytes on some disks,
        would read the experts beside each dense tensor too. Does nothing before the recipes are made, which
        say what is dense.
        """
        if self._recipes is None or self.source != "local":
            return
        tensors = dense_tensors(
            self.shards.tensors,
            self._recipes,
            layers=self.skeleton.text_config.num_hidden_layers,
            ignored=self.skeleton.model._keys_to_ignore_on_load_unexpected or (),
        )
        for tensor in tensors:
            for start in range(tensor.start, tensor.end, _SPAN_BYTES):
                self.read(ByteRange(tensor.file, start, min(start + _SPAN_BYTES, tensor.end)))

    def recipes(self, rng: random.Random | None = None) -> tuple[LayerRecipe, ...]:
        """The recipe of every MoE layer, each proven on one expert drawn by `rng`; made once.

        Raises `ConfigError` naming the architecture and the tensor for which there is no recipe.
        """
        if self._recipes is None:
            from .conversion import Conversion
            from .recipe_maker import RecipeMaker

            maker = RecipeMaker(self.skeleton, Conversion(self.skeleton, self.shards))
            self._recipes = maker.make(rng or random.Random())
        return self._recipes

    def make_plan(
        self,
        *,
        window_bytes: int,
        wire_dtype: str,
        precisions: Sequence[str] = DEFAULT_PRECISIONS,
        weighted: bool = False,
        local_layers: int = 0,
        model: str | None = None,
        rng: random.Random | None = None,
    ) -> Plan:
        """Cut the checkpoint into windows of about `window_bytes` stored bytes and describe every tensor.

        `wire_dtype` is the backbone's compute dtype (a key of `WIRE_DTYPES`), `precisions` those that
        nodes may keep experts in, `local_layers` how many of the first MoE layers the backbone runs itself
        and the plan leaves out, `model` a name for people (default: the folder's). Equal arguments on
        equal files give an equal plan, whatever `rng` draws. Raises `ConfigError`.
        """
        if wire_dtype not in WIRE_DTYPES:
            raise ConfigError(f"{wire_dtype!r} is no wire dtype; choose one of {', '.join(WIRE_DTYPES)}")
        unknown = [precision for precision in precisions if precision not in PRECISIONS]
        if unknown or not precisions:
            raise ConfigError(f"precisions are some of {', '.join(PRECISIONS)}, not {list(precisions)}")
        _, recipes = split_layers(self.recipes(rng), local_layers)
        widths = {tensor.shape[0] for recipe in recipes for tensor in recipe.tensors if tensor.role == "down"}
        if len(widths) != 1:
            raise ConfigError(
                f"{self.skeleton.architecture}: layers route rows of different widths {sorted(widths)}, "
                "which one plan cannot carry"
            )
        return Plan(
            model=model or self.name,
            revision=self.revision,
            source=self.source,
            architecture=self.skeleton.architecture,
            files=self.shards.files,
            width=widths.pop(),
            wire_dtype=wire_dtype,
            precisions=tuple(precisions),
            weighted=weighted,
            windows=cut_windows(
                {recipe.layer: recipe.experts for recipe in recipes},
                {recipe.layer: recipe.expert_bytes for recipe in recipes},
                window_bytes,
            ),
            layers=recipes,
        )

    def whole_plan(self, plan: Plan, window_bytes: int) -> Plan:
        """`plan` and the layers that it leaves to the backbone, in windows of their own.

        For what runs experts here; it is never published.
        """
        served = {recipe.layer for recipe in plan.layers}
        local = [recipe for recipe in self.recipes() if recipe.layer not in served]
        if not local:
            return plan
        windows = cut_windows(
            {recipe.layer: recipe.experts for recipe in local},
            {recipe.layer: recipe.expert_bytes for recipe in local},
            window_bytes,
        )
        return replace(plan, windows=(*windows, *plan.windows), layers=self.recipes())

    def read(self, where: ByteRange) -> memoryview:
        """The bytes of one range of one of the plan's files. Raises `ConfigError` if they are gone."""
        return self.shards.read(where)

    def hash_window(self, plan: Plan, window: Window) -> WindowHashes:
        """The hash of every chunk of `plan.window_chunks(window)`, in order. Reads the whole window once."""
        chunks = tuple(hashlib.sha256(self.read(chunk)).digest() for chunk in plan.window_chunks(window))
        return WindowHashes(id_of(plan), window, chunks)

    def served(self) -> FileRanges | HubRanges:
        """What the weights endpoint serves nodes from."""
        return FileRanges([self.path / file.name for file in self.shards.files])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        self.shards.close()


def id_of(plan: Plan) -> PlanId:
    """The id that a plan has whoever signs it."""
    return PlanId(hashlib.sha256(pack({"v": PROTOCOL_VERSION, **plan_fields(plan)})).digest())

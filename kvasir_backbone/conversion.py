"""transformers' own conversion mapping, asked about one expert at a time.

For every parameter of every experts module: which stored tensors feed it, and what the runtime tensor of
one expert is. Uses private interfaces of transformers (`conversion_mapping`, `core_model_loading`), whose
version is pinned; `tests/backbone/test_recipes_made.py` breaks loudly when they change.

Knows stored keys and runtime parameters. Knows no recipe steps.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from market.plans import ByteRange
from relay.errors import ConfigError

from .shards import Shards, StoredTensor
from .skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor

_EXPERT = re.compile(r"experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Slot:
    """One stored tensor of every expert of a layer, as it feeds one runtime parameter.

    `pattern` is the converter's source pattern (None: loaded as it is), `keys[e]` the stored tensor of
    expert e. `layout` is "one" (a tensor an expert), "fused" (one tensor, experts along its first
    dimension) or "shared" (one tensor for all experts).
    """

    pattern: str | None
    keys: tuple[StoredTensor, ...]
    layout: str

    @property
    def dtype(self) -> str:
        """The safetensors dtype."""
        return self.keys[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one expert's share."""
        return self.keys[0].shape[1:] if self.layout == "fused" else self.keys[0].shape

    def locate(self, expert: int) -> ByteRange:
        """The bytes of one expert's share."""
        if self.layout == "one":
            stored = self.keys[expert]
            return ByteRange(stored.file, stored.start, stored.end)
        stored = self.keys[0]
        if self.layout == "shared":
            return ByteRange(stored.file, stored.start, stored.end)
        stride = (stored.end - stored.start) // stored.shape[0]
        return ByteRange(stored.file, stored.start + expert * stride, stored.start + (expert + 1) * stride)


@dataclass(frozen=True, slots=True)
class Feed:
    """Everything that feeds one runtime parameter of one experts module.

    `parameter` is its name within the module ("gate_up_proj"), `target` the qualified one, `converter`
    transformers' `WeightConverter`, or None where the one slot is loaded as it is.
    """

    parameter: str
    target: str
    converter: Any
    slots: tuple[Slot, ...]


class Conversion:
    """The feeds of every experts module of a checkpoint."""

    def __init__(self, skeleton: Skeleton, shards: Shards) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._skeleton = skeleton
        self.read = shards.read
        self._stored = shards.tensors
        mapping = get_model_conversion_mapping(skeleton.model, None, skeleton.quantizer)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {
            pattern: converter for converter in self._converters for pattern in converter.source_patterns
        }
        self._state = skeleton.model.state_dict()
        self.feeds = self._collect()

    def runtime(self, feed: Feed, expert: int) -> Tensor:
        """One expert's runtime tensor, converted by transformers from its stored bytes, in float32.

        Shape: that of the parameter without its experts dimension. Raises `ConfigError` where
        transformers cannot convert it.
        """
        return self.convert(feed, [self.stored(slot, expert) for slot in feed.slots], feed.converter)

    def stored(self, slot: Slot, expert: int) -> Tensor:
        """One expert's stored tensor as transformers would hand it to its converter (fused: [1, ...])."""
        import torch

        from kvasir_node.recipes import TORCH_DTYPES

        if slot.dtype not in TORCH_DTYPES:
            raise ConfigError(f"{slot.keys[0].name} is stored as {slot.dtype}, for which there is no recipe")
        data = self.read(slot.locate(expert))
        tensor = torch.frombuffer(data, dtype=TORCH_DTYPES[slot.dtype]).view(slot.shape)
        return tensor.unsqueeze(0) if slot.layout == "fused" else tensor

    def convert(self, feed: Feed, tensors: list[Tensor], converter: Any) -> Tensor:
        """Run `converter` on one tensor a slot; take the experts dimension off the result."""
        if converter is None:
            return tensors[0] if feed.slots[0].layout == "shared" else tensors[0].squeeze(0)
        run = copy.deepcopy(converter)
        for slot, tensor in zip(feed.slots, tensors, strict=True):
            run.add_tensor(feed.target, feed.target, slot.pattern, _thunk(tensor))
        model = self._skeleton.model
        try:
            made = run.convert(
                feed.target, model=model, config=model.config, hf_quantizer=self._skeleton.quantizer
            )
        except Exception as error:  # whatever transformers raises for a layout it cannot convert
            raise ConfigError(f"transformers cannot convert {feed.target}: {error}") from error
        value = made[feed.target]
        result: Tensor = value[0] if isinstance(value, list) else value
        return result[0]

    def _collect(self) -> dict[int, tuple[Feed, ...]]:
        owners = {name + ".": layer for layer, (name, _) in self._skeleton.experts.items()}
        found: dict[int, dict[str, dict[str | None, dict[int | None, StoredTensor]]]] = {}
        for target, pattern, expert, stored in self._renamed():
            prefix = next((prefix for prefix in _prefixes(target) if prefix in owners), None)
            if prefix is None or target not in self._state:
                continue
            slots = found.setdefault(owners[prefix], {}).setdefault(target, {})
            slots.setdefault(pattern, {})[expert] = stored
        return {
            layer: self._layer_feeds(layer, name, module, found.get(layer, {}))
            for layer, (name, module) in sorted(self._skeleton.experts.items())
        }

    def _renamed(self) -> Iterator[tuple[str, str | None, int | None, StoredTensor]]:
        """(runtime target, source pattern, expert or None, stored tensor) of every stored tensor.

        Renaming is asked once a key with its expert number set to 0: a checkpoint has up to a hundred
        thousand keys that differ in nothing else.
        """
        from transformers.core_model_loading import rename_source_key

        prefix = self._skeleton.model.base_model_prefix
        known: dict[str, tuple[str, str | None]] = {}
        for key, stored in self._stored.items():
            match = _EXPERT.search(key)
            if match is None and "experts" not in key and "moe" not in key:
                continue
            general = key if match is None else key[: match.start(1)] + "0" + key[match.end(1) :]
            if general not in known:
                renamed = rename_source_key(general, self._renamings, self._converters, prefix, self._state)
                if renamed[0] not in self._state and general in self._state:
                    renamed = rename_source_key(general, [], [], prefix, self._state)
                known[general] = renamed
            yield *known[general], int(match.group(1)) if match else None, stored

    def _layer_feeds(
        self,
        layer: int,
        name: str,
        module: Any,
        found: Mapping[str, Mapping[str | None, Mapping[int | None, StoredTensor]]],
    ) -> tuple[Feed, ...]:
        feeds: list[Feed] = []
        for parameter, _ in module.named_parameters():
            target = f"{name}.{parameter}"
            if target not in found:
                raise ConfigError(
                    f"layer {layer}: the checkpoint has nothing for {target}; its experts are missing or "
                    f"stored in a layout that transformers does not know for {self._skeleton.architecture}"
                )
            count = self._state[target].shape[0] if "." not in parameter else 0
            slots = tuple(
                _slot(target, pattern, stored, count) for pattern, stored in sorted(
                    found[target].items(), key=lambda item: self._order(item[0])
                )
            )  # fmt: skip
            pattern = slots[0].pattern
            converter = None if pattern is None else self._by_pattern[pattern]
            if converter is None and len(slots) != 1:
                raise ConfigError(f"{target} is fed by several tensors without a conversion")
            feeds.append(Feed(parameter, target, converter, slots))
        return tuple(feeds)

    def _order(self, pattern: str | None) -> int:
        """The place of a pattern among its converter's sources."""
        return 0 if pattern is None else self._by_pattern[pattern].source_patterns.index(pattern)


def _slot(target: str, pattern: str | None, stored: Mapping[int | None, StoredTensor], count: int) -> Slot:
    """The slot of one pattern, complete and uniform, or a `ConfigError` that says what is missing."""
    if None in stored:
        tensor = stored[None]
        if len(stored) != 1:
            raise ConfigError(f"{target} is fed by fused and single experts at once")
        if count and (not tensor.shape or tensor.shape[0] != count):
            raise ConfigError(
                f"{tensor.name} holds {tensor.shape}, not one share for each of {count} experts"
            )
        return Slot(pattern, (tensor,), "fused" if count else "shared")
    missing = [expert for expert in range(count) if expert not in stored]
    if missing or len(stored) != count:
        raise ConfigError(
            f"{target} needs {count} experts; the checkpoint has {len(stored)}"
            + (f" and lacks number {missing[0]}" if missing else "")
        )
    keys = tuple(stored[expert] for expert in range(count))
    if len({(key.dtype, key.shape) for key in keys}) != 1:
        raise ConfigError(f"the experts of {target} differ in shape or dtype")
    return Slot(pattern, keys, "one")


def _prefixes(target: str) -> Iterator[str]:
    """The qualified module names above a parameter, with their final dots, innermost first."""
    while (cut := target.rfind(".")) >= 0:
        target = target[:cut]
        yield target + "."


def _thunk(tensor: Tensor) -> Any:
    return lambda: tensor

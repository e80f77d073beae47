"""Recipes made: what transformers does to one expert's stored tensors, written as a closed list of steps.

The structure is read off, not guessed: transformers' converter is run on tensors that hold each element's
own position, and the positions in its result say which slice of which source, transposed or not, became
which role. The gate formula is the one of `kvasir_node.experts` that agrees with the module's own
`_apply_gate`. Both are then proven on the real bytes of one random expert of every layer: same weights bit
for bit, same output. What cannot be expressed or proven is refused by name.

Knows conversions, recipes and formulas. Knows no windows and no signatures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from market.plans import LayerRecipe, Source, TensorRecipe
from relay.errors import ConfigError

from .conversion import Conversion, Feed, Slot
from .dequantised import Dequantised, dequantised
from .formulas import find_formula
from .proof import prove, roles_of
from .skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor

_PARAMETERS = {
    "gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias",
    "post_expert_norm.weight",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Structure:
    """A role as positions: which weight of the feed, and the structural steps."""

    role: str
    shape: tuple[int, ...]
    weight: int
    ops: tuple[tuple[Any, ...], ...]


class RecipeMaker:
    """Makes and proves the recipe of every MoE layer of one checkpoint."""

    def __init__(self, skeleton: Skeleton, conversion: Conversion) -> None:
        self._skeleton, self._conversion = skeleton, conversion
        self._structures: dict[object, tuple[_Structure, ...]] = {}

    def make(self, rng: random.Random) -> tuple[LayerRecipe, ...]:
        """The proven recipes, one a MoE layer, in order. `rng` draws the expert that proves each.

        Raises `ConfigError` naming the architecture and what has no recipe.
        """
        recipes: list[LayerRecipe] = []
        for layer, feeds in self._conversion.feeds.items():
            name, module = self._skeleton.experts[layer]
            count = self._skeleton.model.get_submodule(name).down_proj.shape[0]
            recipe = LayerRecipe(
                layer=layer,
                experts=count,
                top_k=_top_k(self._skeleton, name, layer),
                formula=find_formula(self._skeleton.architecture, module),
                tensors=tuple(self._tensors(module, feeds)),
            )
            prove(self._conversion, module, feeds, recipe, rng.randrange(count))
            recipes.append(recipe)
        return tuple(recipes)

    def _tensors(self, module: Any, feeds: tuple[Feed, ...]) -> Iterator[TensorRecipe]:
        for feed in feeds:
            if feed.parameter not in _PARAMETERS:
                raise self._refusal(feed, "there is no role for this parameter")
            weights = tuple(dequantised(feed, self._skeleton.quantizer))
            key = (
                feed.parameter, type(module), feed.converter and repr(feed.converter.operations),
                tuple((weight.pattern, weight.shape, weight.op) for weight in weights),
            )  # fmt: skip
            if key not in self._structures:
                self._structures[key] = tuple(self._structure(module, feed, weights))
            for found in self._structures[key]:
                weight = weights[found.weight]
                ops = ((weight.op,) if weight.op else ()) + found.ops
                yield TensorRecipe(found.role, found.shape, tuple(map(_source, weight.slots)), ops)

    def _structure(self, module: Any, feed: Feed, weights: tuple[Dequantised, ...]) -> Iterator[_Structure]:
        """Read off the roles of one parameter from where each position ends up."""
        codes = self._coded(feed, weights)
        for role, part in roles_of(module, feed.parameter, codes):
            yield self._read_off(feed, role, part, weights)

    def _coded(self, feed: Feed, weights: tuple[Dequantised, ...]) -> Tensor:
        """The runtime tensor of an expert whose every stored element is its own running number."""
        import torch

        sizes = [_elements(weight.shape) for weight in weights]
        dtype = torch.int32 if sum(sizes) < 2**31 else torch.int64
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        codes = [
            torch.arange(start, start + size, dtype=dtype).view(weight.shape)
            for start, size, weight in zip(starts, sizes, weights, strict=True)
        ]
        if feed.converter is None:
            return codes[0]
        operations = list(feed.converter.operations)
        if weights[0].op is not None or "Dequantize" in type(operations[0]).__name__:
            kind = type(operations.pop(0)).__name__
            if kind == "Mxfp4Dequantize":  # writes the transposed runtime layout itself
                codes = [code.t() for code in codes]
        if not operations:
            return codes[0]
        converter = feed.converter.copy(
            list(feed.converter.source_patterns), list(feed.converter.target_patterns), operations=operations
        )
        fused = feed.slots[0].layout == "fused"
        slots = tuple(weight.slots[0] for weight in weights)
        bare = Feed(feed.parameter, feed.target, converter, slots)
        return self._conversion.convert(bare, [c.unsqueeze(0) if fused else c for c in codes], converter)

    def _read_off(self, feed: Feed, role: str, part: Tensor, weights: tuple[Dequantised, ...]) -> _Structure:
        """The steps that make `part` (positions in the role's own orientation) of one of `weights`."""
        import torch

        start = 0
        first, last = int(part.min()), int(part.max())
        for number, weight in enumerate(weights):
            size = _elements(weight.shape)
            if start <= first and last < start + size:
                whole = torch.arange(start, start + size, dtype=part.dtype).view(weight.shape)
                for ops, stored in _orientations(whole):
                    rows = _row_step(part, stored)
                    if rows is not None:
                        return _Structure(role, tuple(part.shape), number, ops + rows)
                break
            start += size
        raise self._refusal(feed, f"its {role} is not a slice or transpose of one stored tensor")

    def _refusal(self, feed: Feed, why: str) -> ConfigError:
        return ConfigError(
            f"{self._skeleton.architecture} cannot be served: no recipe for {feed.target} ({why})"
        )


def _orientations(stored: Tensor) -> Iterator[tuple[tuple[tuple[Any, ...], ...], Tensor]]:
    yield (), stored
    if stored.dim() == 2:
        yield (("transpose",),), stored.t()


def _row_step(part: Tensor, stored: Tensor) -> tuple[tuple[Any, ...], ...] | None:
    """The `rows` step (or none) that makes `part` of `stored`, or None where no step does."""
    import torch

    if part.dim() != stored.dim() or part.shape[1:] != stored.shape[1:]:
        return None
    if torch.equal(part, stored):
        return ()
    first_column = stored if stored.dim() == 1 else stored[:, 0]
    starts = part if part.dim() == 1 else part[:, 0]
    where = torch.isin(first_column, starts).nonzero().flatten().tolist()
    if len(where) != part.shape[0]:
        return None
    step = where[1] - where[0] if len(where) > 1 else 1
    stop = min(where[-1] + step, stored.shape[0])
    if not torch.equal(stored[where[0] : stop : step], part):
        return None
    return (("rows", where[0], stop, step),)


def _source(slot: Slot) -> Source:
    """The plan's form of a slot."""
    if slot.layout != "one":
        span = slot.locate(0)
        stride = span.nbytes if slot.layout == "fused" else 0
        return Source(span.file, slot.dtype, slot.shape, start=span.start, stride=stride)
    files = tuple(key.file for key in slot.keys)
    one_file = len(set(files)) == 1
    return Source(
        files[0],
        slot.dtype,
        slot.shape,
        offsets=tuple(key.start for key in slot.keys),
        files=() if one_file else files,
    )


def _top_k(skeleton: Skeleton, name: str, layer: int) -> int:
    """How many experts a row gets in that layer: from the router beside the experts, or the config."""
    parent = skeleton.model.get_submodule(name.rpartition(".")[0])
    for module in (parent, *parent.children()):
        value = getattr(module, "top_k", None)
        if isinstance(value, int):
            return value
    for attribute in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"):
        value = getattr(skeleton.text_config, attribute, None)
        if isinstance(value, (list, tuple)):
            value = value[layer]
        if isinstance(value, int):
            return value
    raise ConfigError(f"{skeleton.architecture} does not say how many experts a row gets")


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from market.plans import LayerRecipe, Source, TensorRecipe
from relay.errors import ConfigError

from .conversion import Conversion, Feed, Slot
from .formulas import find_formula
from .skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor

PROOF_LIMIT = 1e-10
"""Largest d between a recipe's output and the module's own, both in fp32."""

_PARAMETERS = {
    "gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias",
    "post_expert_norm.weight",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Dequantised:
    """One weight of a feed before its structural steps: the slots it is made of and the first step."""

    pattern: str | None
    slots: tuple[Slot, ...]
    shape: tuple[int, ...]
    op: tuple[Any, ...] | None


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
            weights = tuple(self._dequantised(feed))
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

    def _dequantised(self, feed: Feed) -> Iterator[_Dequantised]:
        """The weights that feed a parameter, in the order of the feed's slots, scales folded in."""
        first = type(feed.converter.operations[0]).__name__ if feed.converter is not None else ""
        make: Callable[[Feed], Iterator[_Dequantised]] | None = {
            "Fp8Dequantize": _fp8, "Mxfp4Dequantize": _mxfp4, "CompressedTensorsDequantize": self._compressed,
        }.get(first)  # fmt: skip
        if make is not None:
            yield from make(feed)
            return
        for slot in feed.slots:
            yield _Dequantised(slot.pattern, (slot,), slot.shape, None)

    def _compressed(self, feed: Feed) -> Iterator[_Dequantised]:
        """compressed-tensors: int4 "pack-quantized", or fp8 with one scale a row or a tensor."""
        from transformers.integrations.compressed_tensors import get_experts_scheme

        scheme_of: Any = get_experts_scheme
        scheme = scheme_of(self._skeleton.quantizer.compressor.quantization_config)
        arguments = scheme.weights
        by_pattern = {slot.pattern: slot for slot in feed.slots}
        for slot in feed.slots:
            pattern = slot.pattern or ""
            if pattern.endswith("weight_packed"):
                stem = pattern.removesuffix("weight_packed")
                scale = by_pattern.get(stem + "weight_scale")
                zeros = by_pattern.get(stem + "weight_zero_point")
                if arguments.num_bits != 4 or scale is None or len(slot.shape) != 2:
                    raise self._refusal(feed, f"no recipe for packed {arguments.num_bits}-bit weights")
                shape = (slot.shape[0], slot.shape[1] * 8)
                group = arguments.group_size or shape[1]
                group = shape[1] if group < 0 else group
                sources = (slot, scale) if zeros is None else (slot, scale, zeros)
                yield _Dequantised(
                    slot.pattern, sources, shape, ("dequant_int4_packed", group, zeros is None)
                )
            elif pattern.endswith(".weight"):
                scale = by_pattern.get(pattern + "_scale")
                op = None if scale is None else _block_op(slot, scale)
                yield _Dequantised(slot.pattern, (slot,) if scale is None else (slot, scale), slot.shape, op)

    def _structure(self, module: Any, feed: Feed, weights: tuple[_Dequantised, ...]) -> Iterator[_Structure]:
        """Read off the roles of one parameter from where each position ends up."""
        codes = self._coded(feed, weights)
        for role, part in _roles(module, feed.parameter, codes):
            yield self._read_off(feed, role, part, weights)

    def _coded(self, feed: Feed, weights: tuple[_Dequantised, ...]) -> Tensor:
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

    def _read_off(self, feed: Feed, role: str, part: Tensor, weights: tuple[_Dequantised, ...]) -> _Structure:
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


def prove(
    conversion: Conversion, module: Any, feeds: tuple[Feed, ...], recipe: LayerRecipe, expert: int
) -> None:
    """Prove a recipe on one expert: the weights are those of transformers, the output the module's own.

    Raises `ConfigError` naming layer and expert where it fails.
    """
    import torch

    from kvasir_node.experts import run_expert
    from kvasir_node.recipes import load_expert
    from kvasir_node.residual import residual

    runtime = {feed.parameter: conversion.runtime(feed, expert).float() for feed in feeds}
    loaded = load_expert(recipe, expert, conversion.read)
    made = _dense(loaded)
    for parameter, tensor in runtime.items():
        for role, part in _roles(module, parameter, tensor):
            if not torch.equal(made[role], part):
                raise ConfigError(
                    f"layer {recipe.layer}: the recipe of expert {expert} makes another {role} than "
                    f"transformers does; {type(module).__name__} cannot be served"
                )
    generator = torch.Generator().manual_seed(recipe.layer)
    rows = torch.randn(4, made["up"].shape[1], generator=generator)
    with torch.no_grad():
        expected = module_output(module, runtime, rows)
    worst = float(residual(run_expert(loaded, recipe.formula, rows), expected).max())
    if not worst <= PROOF_LIMIT:
        raise ConfigError(
            f"layer {recipe.layer}: formula {recipe.formula.name!r} on expert {expert} differs from "
            f"{type(module).__name__} by d = {worst:.1e}; it cannot be served"
        )


def module_output(module: Any, runtime: dict[str, Tensor], rows: Tensor) -> Tensor:
    """What a transformers experts module computes for `rows` [n, width] with one expert's runtime tensors.

    The order of `transformers.integrations.moe.batched_mm_experts_forward`, with the module's own
    `_apply_gate` and norm; fp32 in and out.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        weight = runtime[name]
        y = x @ (weight if module.is_transposed else weight.t())
        return y + runtime[name + "_bias"] if module.has_bias else y

    if module.has_gate:
        hidden = module._apply_gate(linear(rows, "gate_up_proj"))
    else:
        hidden = module.act_fn(linear(rows, "up_proj"))
    out = linear(hidden, "down_proj")
    if module.has_post_expert_norm:
        import torch

        weight = {"weight": runtime["post_expert_norm.weight"]}
        out = torch.func.functional_call(module.post_expert_norm, weight, (out,))
    result: Tensor = out
    return result


def _dense(loaded: Any) -> dict[str, Tensor]:
    """Every role of a loaded expert in fp32."""
    from kvasir_node.numerics import to_fp32
    from kvasir_node.recipes import materialise

    expert = materialise(loaded)
    return {role: to_fp32(matrix) for role, matrix in expert.matrices.items()} | dict(expert.vectors)


def _roles(module: Any, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A runtime tensor of one expert as its roles, in `torch.nn.functional.linear` orientation."""
    if parameter == "post_expert_norm.weight":
        yield "norm", tensor
        return
    base, _, bias = parameter.partition("_proj")
    suffix = bias  # "" or "_bias"
    if module.is_transposed and tensor.dim() == 2:
        tensor = tensor.t()
    if base != "gate_up":
        yield base + suffix, tensor
        return
    half = tensor.shape[0] // 2
    if module.is_concatenated:
        yield "gate" + suffix, tensor[:half]
        yield "up" + suffix, tensor[half:]
    else:
        yield "gate" + suffix, tensor[::2]
        yield "up" + suffix, tensor[1::2]


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


def _fp8(feed: Feed) -> Iterator[_Dequantised]:
    """Fine-grained fp8: every weight with its `weight_scale_inv`; activation scales are not for us."""
    by_pattern = {slot.pattern: slot for slot in feed.slots}
    for slot in feed.slots:
        pattern = slot.pattern or ""
        if pattern.endswith(("_scale_inv", "activation_scale")):
            continue
        scale = by_pattern.get(pattern + "_scale_inv")
        if scale is None:
            yield _Dequantised(slot.pattern, (slot,), slot.shape, None)
        else:
            yield _Dequantised(slot.pattern, (slot, scale), slot.shape, _block_op(slot, scale))


def _mxfp4(feed: Feed) -> Iterator[_Dequantised]:
    """gpt-oss: `*_blocks` [out, groups, 16] with `*_scales` [out, groups]."""
    by_pattern = {slot.pattern: slot for slot in feed.slots}
    for slot in feed.slots:
        pattern = slot.pattern or ""
        if pattern.endswith("_blocks"):
            scale = by_pattern[pattern.removesuffix("_blocks") + "_scales"]
            rows, groups, packed = slot.shape
            yield _Dequantised(slot.pattern, (slot, scale), (rows, groups * packed * 2), ("dequant_mxfp4",))


def _block_op(slot: Slot, scale: Slot) -> tuple[Any, ...]:
    """The fp8 step of a weight [out, in] with its grid of scales (missing dimensions count as one)."""
    grid = (1, 1, *scale.shape)[-2:]
    if not slot.dtype.startswith("F8_E") or len(slot.shape) != 2:
        raise ConfigError(
            f"{slot.keys[0].name} has a scale but is stored as {slot.dtype}: no recipe for that"
        )
    rows, columns = slot.shape
    if rows % grid[0] or columns % grid[1]:
        raise ConfigError(f"{slot.keys[0].name} {slot.shape} is not a multiple of its scales {grid}")
    return ("dequant_fp8_block", rows // grid[0], columns // grid[1])


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

"""Quantised weights: which stored tensors make one, and the step that widens it.

Knows how transformers' quantisers name and combine stored tensors. Knows no structure and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relay.errors import ConfigError

from .conversion import Feed, Slot


@dataclass(frozen=True, slots=True)
class Dequantised:
    """One weight of a feed before its structural steps: the slots it is made of and the first step.

    `op` is None for a weight that is stored as it is; `shape` is that of the widened weight.
    """

    pattern: str | None
    slots: tuple[Slot, ...]
    shape: tuple[int, ...]
    op: tuple[Any, ...] | None


def dequantised(feed: Feed, quantizer: Any) -> Iterator[Dequantised]:
    """The weights that feed one parameter, in the order of the feed's slots, scales folded in.

    `quantizer` is transformers' own of this checkpoint, or None. Raises `ConfigError`.
    """
    first = type(feed.converter.operations[0]).__name__ if feed.converter is not None else ""
    if first == "Fp8Dequantize":
        yield from _fp8(feed)
    elif first == "Mxfp4Dequantize":
        yield from _mxfp4(feed)
    elif first == "CompressedTensorsDequantize":
        yield from _compressed(feed, quantizer)
    else:
        for slot in feed.slots:
            yield Dequantised(slot.pattern, (slot,), slot.shape, None)


def _compressed(feed: Feed, quantizer: Any) -> Iterator[Dequantised]:
    """compressed-tensors: int4 "pack-quantized", or fp8 with one scale a row or a tensor."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    scheme_of: Any = get_experts_scheme
    own = feed.converter.operations[0].scheme  # where attention and experts are quantised differently
    arguments = (own or scheme_of(quantizer.compressor.quantization_config)).weights
    by_pattern = {slot.pattern: slot for slot in feed.slots}
    for slot in feed.slots:
        pattern = slot.pattern or ""
        if pattern.endswith("weight_packed"):
            yield _packed_int4(feed, slot, by_pattern, arguments)
        elif pattern.endswith(".weight"):
            scale = by_pattern.get(pattern + "_scale")
            if scale is None:
                yield Dequantised(slot.pattern, (slot,), slot.shape, None)
            else:
                yield Dequantised(slot.pattern, (slot, scale), slot.shape, _block_op(slot, scale))


def _packed_int4(
    feed: Feed, slot: Slot, by_pattern: Mapping[str | None, Slot], arguments: Any
) -> Dequantised:
    """One packed weight with its scales, and its zero points where it has them."""
    stem = (slot.pattern or "").removesuffix("weight_packed")
    scale, zeros = by_pattern.get(stem + "weight_scale"), by_pattern.get(stem + "weight_zero_point")
    if arguments.num_bits != 4 or scale is None or len(slot.shape) != 2:
        raise ConfigError(f"{feed.target}: no recipe for packed weights of {arguments.num_bits} bits")
    shape = (slot.shape[0], slot.shape[1] * 8)
    group = arguments.group_size if arguments.group_size and arguments.group_size > 0 else shape[1]
    sources = (slot, scale) if zeros is None else (slot, scale, zeros)
    return Dequantised(slot.pattern, sources, shape, ("dequant_int4_packed", group, zeros is None))


def _fp8(feed: Feed) -> Iterator[Dequantised]:
    """Fine-grained fp8: every weight with its `weight_scale_inv`; activation scales are not for us."""
    by_pattern = {slot.pattern: slot for slot in feed.slots}
    for slot in feed.slots:
        pattern = slot.pattern or ""
        if pattern.endswith(("_scale_inv", "activation_scale")):
            continue
        scale = by_pattern.get(pattern + "_scale_inv")
        if scale is None:
            yield Dequantised(slot.pattern, (slot,), slot.shape, None)
        else:
            yield Dequantised(slot.pattern, (slot, scale), slot.shape, _block_op(slot, scale))


def _mxfp4(feed: Feed) -> Iterator[Dequantised]:
    """gpt-oss: `*_blocks` [out, groups, 16] with `*_scales` [out, groups]."""
    by_pattern = {slot.pattern: slot for slot in feed.slots}
    for slot in feed.slots:
        pattern = slot.pattern or ""
        if pattern.endswith("_blocks"):
            scale = by_pattern[pattern.removesuffix("_blocks") + "_scales"]
            rows, groups, packed = slot.shape
            yield Dequantised(slot.pattern, (slot, scale), (rows, groups * packed * 2), ("dequant_mxfp4",))


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

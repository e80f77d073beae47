"""Quantised checkpoint forms: the same bytes through transformers' own code, or by hand."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvasir_node.numerics import to_fp32
from kvasir_node.recipes import RecipeError, check_recipe, load_expert, materialise
from market.plans import LayerRecipe, Source, TensorRecipe
from tests.support.experts import SWIGLU, Memory


def layer(*tensors: TensorRecipe) -> LayerRecipe:
    recipe = LayerRecipe(0, 2, 2, SWIGLU, tensors)
    check_recipe(recipe)
    return recipe


def loaded(memory: Memory, recipe: LayerRecipe, expert: int = 1) -> dict[str, Tensor]:
    tensors = materialise(load_expert(recipe, expert, memory.read))
    return {role: to_fp32(matrix) for role, matrix in tensors.matrices.items()}


def transformers_fp8(values: Tensor, scales: Tensor) -> Tensor:
    dequantise = Fp8Dequantize(None)._dequantize_one  # type: ignore[no-untyped-call]
    expected = dequantise(values, scales, torch.float32)
    assert isinstance(expected, Tensor)
    return expected


Stored = tuple[tuple[Source, Source], Tensor, Tensor]


def fp8(
    memory: Memory, shape: tuple[int, int], block: tuple[int, int], scales: Tensor | None = None
) -> Stored:
    values = torch.randn(2, *shape).to(torch.float8_e4m3fn)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scales = torch.rand(2, *grid) + 0.01 if scales is None else scales
    dtype = "F8_E8M0" if scales.dtype == torch.uint8 else None
    return (memory.put(values), memory.put(scales, dtype=dtype)), values, scales


@pytest.mark.parametrize("block", [(4, 4), (8, 4), (1, 16), (8, 16)])
def test_fp8_blocks_equal_transformers(block: tuple[int, int]) -> None:
    memory = Memory()
    up, values, scales = fp8(memory, (8, 16), block)
    down, *_ = fp8(memory, (16, 8), (4, 4))
    op = ("dequant_fp8_block", *block)
    recipe = layer(
        TensorRecipe("up", (8, 16), up, (op,)),
        TensorRecipe("down", (16, 8), down, (("dequant_fp8_block", 4, 4),)),
    )
    expected = transformers_fp8(values[1], scales[1])
    assert torch.equal(loaded(memory, recipe)["up"], expected)


def test_fp8_blocks_that_do_not_divide_the_matrix() -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128: the last block is smaller."""
    memory = Memory()
    up, values, scales = fp8(memory, (10, 14), (4, 8))
    down, *_ = fp8(memory, (14, 10), (4, 4))
    recipe = layer(
        TensorRecipe("up", (10, 14), up, (("dequant_fp8_block", 4, 8),)),
        TensorRecipe("down", (14, 10), down, (("dequant_fp8_block", 4, 4),)),
    )
    expected = torch.empty(10, 14)
    for row in range(10):
        for column in range(14):
            expected[row, column] = values[1, row, column].float() * scales[1, row // 4, column // 8]
    assert torch.equal(loaded(memory, recipe)["up"], expected)


@pytest.mark.parametrize("kind", ["bf16", "e8m0"])
def test_fp8_scales_of_other_dtypes_equal_transformers(kind: str) -> None:
    memory = Memory()
    scales = torch.randint(115, 130, (2, 2, 4), dtype=torch.uint8) if kind == "e8m0" else torch.rand(2, 2, 4)
    scales = scales if kind == "e8m0" else scales.bfloat16()
    up, values, _ = fp8(memory, (8, 16), (4, 4), scales)
    down, *_ = fp8(memory, (16, 8), (4, 4))
    op = ("dequant_fp8_block", 4, 4)
    recipe = layer(TensorRecipe("up", (8, 16), up, (op,)), TensorRecipe("down", (16, 8), down, (op,)))
    expected = transformers_fp8(values[1], scales[1])
    assert torch.equal(loaded(memory, recipe)["up"], expected)


def test_mxfp4_interleaved_equals_transformers_and_stays_packed() -> None:
    """gpt_oss: blocks [2I, W/32, 16] and scales [2I, W/32]; gate in the even rows, up in the odd ones."""
    width, inner = 64, 32
    memory = Memory()
    blocks = torch.randint(0, 256, (2, 2 * inner, width // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 132, (2, 2 * inner, width // 32), dtype=torch.uint8)
    down_blocks = torch.randint(0, 256, (2, width, inner // 32, 16), dtype=torch.uint8)
    down_scales = torch.randint(118, 132, (2, width, inner // 32), dtype=torch.uint8)
    fused = (memory.put(blocks), memory.put(scales))
    down = (memory.put(down_blocks), memory.put(down_scales))
    op = ("dequant_mxfp4",)
    recipe = layer(
        TensorRecipe("gate", (inner, width), fused, (op, ("rows", 0, 2 * inner, 2))),
        TensorRecipe("up", (inner, width), fused, (op, ("rows", 1, 2 * inner, 2))),
        TensorRecipe("down", (width, inner), down, (op,)),
    )
    kept = load_expert(recipe, 1, memory.read)
    assert kept.nbytes == sum(source.nbytes for source in recipe.sources())  # packed, and the fused one once
    got = loaded(memory, recipe)
    runtime = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[1]  # [W, 2I]
    assert torch.equal(got["gate"], runtime[:, 0::2].T)
    assert torch.equal(got["up"], runtime[:, 1::2].T)
    assert torch.equal(
        got["down"], convert_moe_packed_tensors(down_blocks, down_scales, dtype=torch.float32)[1].T
    )
    # the same values in bf16, which is what transformers makes by default: exact there too
    assert torch.equal(got["down"], got["down"].bfloat16().float())


def test_fp4_packed_in_int8_as_deepseek_v4_stores_it() -> None:
    """Experts as [I, W/2] int8 with an E8M0 scale for each 32 inputs: transformers' own fp4 path."""
    memory = Memory()
    packed = torch.randint(-128, 128, (2, 8, 32), dtype=torch.int8)
    scales = torch.randint(118, 132, (2, 8, 2), dtype=torch.uint8)
    sources = (memory.put(packed), memory.put(scales, dtype="F8_E8M0"))
    op = ("dequant_mxfp4",)
    square = torch.randint(0, 256, (2, 64, 1, 16), dtype=torch.uint8)
    down = (memory.put(square), memory.put(torch.full((2, 64, 1), 127, dtype=torch.uint8)))
    recipe = layer(TensorRecipe("up", (8, 64), sources, (op,)), TensorRecipe("down", (64, 32), down, (op,)))
    expected = transformers_fp8(packed[1], scales[1])
    assert torch.equal(loaded(memory, recipe)["up"], expected)


def pack_int4(values: Tensor) -> Tensor:
    """compressed-tensors' packing by hand: eight values an int32, offset 8, low bits first."""
    shifted = (values + 8).to(torch.int64).view(*values.shape[:-1], -1, 8)
    words = sum(shifted[..., lane] << (4 * lane) for lane in range(8))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_packed_as_compressed_tensors_has_it(symmetric: bool, group: int, dtype: torch.dtype) -> None:
    """value = (q - zero) * scale, rounded to the scales' dtype; group 32 is the whole row here."""
    memory = Memory()
    values = torch.randint(-8, 8, (2, 16, 32))
    scales = (torch.rand(2, 16, 32 // group) + 0.01).to(dtype)
    zeros = torch.randint(-8, 8, (2, 16, 32 // group))
    sources = [memory.put(pack_int4(values)), memory.put(scales)]
    if not symmetric:  # zeros are packed along the rows
        sources.append(memory.put(pack_int4(zeros.transpose(1, 2)).transpose(1, 2).contiguous()))
    op = ("dequant_int4_packed", group, symmetric)
    down = dataclasses.replace(memory.put(torch.randn(2, 32, 16)), file=0)
    recipe = layer(
        TensorRecipe("up", (16, 32), tuple(sources), (op,)), TensorRecipe("down", (32, 16), (down,))
    )
    offset = zeros[1] if not symmetric else torch.zeros(16, 32 // group, dtype=torch.int64)
    spread = offset.repeat_interleave(group, 1)
    expected = (values[1] - spread).to(dtype) * scales[1].repeat_interleave(group, 1)
    assert torch.equal(loaded(memory, recipe)["up"], expected.float())


def test_int4_known_vector_of_compressed_tensors() -> None:
    """Packed and dequantised by compressed-tensors 0.20.1 (pack_to_int32, dequantize), group 8, bf16."""
    packed = torch.tensor([[[0, 0]], [[1985229328, -19088744]]], dtype=torch.int32)
    memory = Memory()
    scale = torch.tensor([[[1.0, 1.0]], [[0.25, 1.0]]]).bfloat16()
    up = (memory.put(packed), memory.put(scale))
    recipe = layer(
        TensorRecipe("up", (1, 16), up, (("dequant_int4_packed", 8, True),)),
        TensorRecipe("down", (16, 1), (memory.put(torch.ones(2, 16, 1)),)),
    )
    low = [-2.0, -1.75, -1.5, -1.25, -1.0, -0.75, -0.5, -0.25]
    high = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert loaded(memory, recipe)["up"].tolist() == [[*low, *high]]


def test_int4_asymmetric_known_vector_of_compressed_tensors() -> None:
    """As above: weights packed along the inputs, zero points along the rows (packed_dim=0)."""
    words = [
        [-1872306205, 235661128], [-1334501433, 1693391836], [-1716937171, -1512017378],
        [-1282087936, 590963759], [-287553711, -1284389957], [123280830, 258603758],
        [-1227309787, -27475720], [191328302, -1101084032],
    ]  # fmt: skip
    scales = [
        [0.57421875, 0.79296875], [0.546875, 0.375], [0.55078125, 0.25], [0.146484375, 0.640625],
        [0.5625, 0.7578125], [0.32421875, 0.0157470703125], [0.38671875, 0.0262451171875],
        [0.470703125, 0.75390625],
    ]  # fmt: skip
    memory = Memory()
    parts = (
        torch.tensor([words] * 2, dtype=torch.int32),
        torch.tensor([scales] * 2).bfloat16(),
        torch.tensor([[[1821230437, 1058583113]]] * 2, dtype=torch.int32),
    )
    sources = tuple(memory.put(part) for part in parts)
    recipe = layer(
        TensorRecipe("up", (8, 16), sources, (("dequant_int4_packed", 8, False),)),
        TensorRecipe("down", (16, 8), (memory.put(torch.ones(2, 16, 8)),)),
    )
    got = loaded(memory, recipe)["up"]
    first = [-1.1484375, 5.15625, 5.75, 4.59375, 0.57421875, 0.57421875, -2.875, 2.296875]
    assert got[0, :8].tolist() == first
    digest = "a25d130b7587eac42b1104e55a471b7ca2c7a7436504fbe3457bf1447c80501d"
    assert hashlib.sha256(got.numpy().tobytes()).hexdigest() == digest


def test_scales_that_do_not_fit_are_refused() -> None:
    memory = Memory()
    up, *_ = fp8(memory, (8, 16), (4, 4))
    recipe = layer(
        TensorRecipe("up", (8, 16), up, (("dequant_fp8_block", 2, 2),)),
        TensorRecipe("down", (16, 8), (memory.put(torch.ones(2, 16, 8)),)),
    )
    with pytest.raises(RecipeError, match="does not fit the stored shapes"):
        load_expert(recipe, 0, memory.read)


def test_a_quantised_tensor_that_is_not_finite_is_refused_at_load() -> None:
    memory = Memory()
    scales = torch.ones(2, 2, 4)
    scales[1, 0, 0] = float("nan")
    up, *_ = fp8(memory, (8, 16), (4, 4), scales)
    recipe = layer(
        TensorRecipe("up", (8, 16), up, (("dequant_fp8_block", 4, 4),)),
        TensorRecipe("down", (16, 8), (memory.put(torch.ones(2, 16, 8)),)),
    )
    load_expert(recipe, 0, memory.read)
    with pytest.raises(RecipeError, match="expert 1, 'up': the weights hold NaN"):
        load_expert(recipe, 1, memory.read)

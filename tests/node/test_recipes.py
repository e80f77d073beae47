"""Recipes executed: every step against an independent computation, and every way a plan can be wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir_node.numerics import DenseMatrix, to_fp32
from kvasir_node.recipes import RecipeError, check_recipe, load_expert, materialise
from market.plans import GateFormula, LayerRecipe, Source, TensorRecipe
from tests.support.experts import SWIGLU, Memory, layer_recipe, roles, weights


def recipe_of(*tensors: TensorRecipe, formula: GateFormula = SWIGLU) -> LayerRecipe:
    return LayerRecipe(3, 4, 2, formula, tensors)


def matrix(memory: Memory, recipe: LayerRecipe, role: str, expert: int) -> Tensor:
    return to_fp32(materialise(load_expert(recipe, expert, memory.read)).matrices[role])


def test_one_tensor_an_expert_in_several_places() -> None:
    """Experts that lie at any offset, as separate tensors of a checkpoint do."""
    memory = Memory()
    tensors = weights(roles(6, 4), 3)
    recipes = []
    for role, tensor in tensors.items():
        offsets = []
        for expert in (2, 0, 1):
            memory.data += b"\xab" * 7  # not even aligned
            offsets.append((expert, memory.put(tensor[expert : expert + 1]).start))
        starts = tuple(start for _, start in sorted(offsets))
        source = Source(0, "F32", tuple(tensor.shape[1:]), offsets=starts)
        recipes.append(TensorRecipe(role, tuple(tensor.shape[1:]), (source,)))
    recipe = recipe_of(*recipes)
    for expert in range(3):
        for role, tensor in tensors.items():
            assert torch.equal(matrix(memory, recipe, role, expert), tensor[expert])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_stay_and_are_not_copied(dtype: torch.dtype) -> None:
    memory = Memory()
    tensors = weights(roles(6, 4), 2, dtype=dtype)
    recipe = layer_recipe(memory, tensors)
    buffers: list[memoryview] = []

    def read(span: Any) -> memoryview:
        buffers.append(memory.read(span))
        return buffers[-1]

    loaded = load_expert(recipe, 1, read)
    for number, role in enumerate(tensors):
        kept = loaded.matrices[role]
        assert isinstance(kept, DenseMatrix)
        assert kept.tensor.dtype == dtype
        assert torch.equal(kept.tensor, tensors[role][1])
        shared = torch.frombuffer(buffers[number], dtype=torch.uint8)
        assert kept.tensor.data_ptr() == shared.data_ptr()
    assert loaded.nbytes == sum(t[0].nbytes for t in tensors.values())


def test_fused_transposed_and_interleaved() -> None:
    """gpt_oss keeps gate and up interleaved in one [W, 2I] tensor with biases, down as [I, W]."""
    memory = Memory()
    tensors = weights({"gate_up": (6, 8), "down": (4, 6), "gate_up_bias": (8,), "down_bias": (6,)}, 3)
    fused, down = memory.put(tensors["gate_up"]), memory.put(tensors["down"])
    bias, down_bias = memory.put(tensors["gate_up_bias"]), memory.put(tensors["down_bias"])
    recipe = recipe_of(
        TensorRecipe("gate", (4, 6), (fused,), (("transpose",), ("rows", 0, 8, 2))),
        TensorRecipe("up", (4, 6), (fused,), (("transpose",), ("rows", 1, 8, 2))),
        TensorRecipe("down", (6, 4), (down,), (("transpose",),)),
        TensorRecipe("gate_bias", (4,), (bias,), (("rows", 0, 8, 2),)),
        TensorRecipe("up_bias", (4,), (bias,), (("rows", 1, 8, 2),)),
        TensorRecipe("down_bias", (6,), (down_bias,)),
        formula=GateFormula("gpt_oss", "silu", 7.0, 1.702),
    )
    check_recipe(recipe)
    loaded = load_expert(recipe, 2, memory.read)
    gate_up = tensors["gate_up"][2]
    assert torch.equal(to_fp32(loaded.matrices["gate"]), gate_up[:, 0::2].T)
    assert torch.equal(to_fp32(loaded.matrices["up"]), gate_up[:, 1::2].T)
    assert torch.equal(to_fp32(loaded.matrices["down"]), tensors["down"][2].T)
    assert torch.equal(loaded.vectors["gate_bias"], tensors["gate_up_bias"][2, 0::2])
    assert torch.equal(loaded.vectors["up_bias"], tensors["gate_up_bias"][2, 1::2])
    assert torch.equal(loaded.vectors["down_bias"], tensors["down_bias"][2])


def test_a_norm_shared_by_all_experts_and_stored_minus_one() -> None:
    memory = Memory()
    tensors = weights(roles(6, 4), 4)
    norm = torch.randn(1, 6).bfloat16()
    source = dataclasses.replace(memory.put(norm), stride=0)
    recipe = layer_recipe(memory, tensors, formula=dataclasses.replace(SWIGLU, norm_eps=1e-5))
    recipe = dataclasses.replace(
        recipe, tensors=(*recipe.tensors, TensorRecipe("norm", (6,), (source,), (("add", 1.0),)))
    )
    for expert in (0, 3):
        assert torch.equal(load_expert(recipe, expert, memory.read).vectors["norm"], norm[0].float() + 1.0)


# --- what a plan can get wrong -------------------------------------------------------------------------


def spoil(change: Callable[[TensorRecipe], TensorRecipe], role: str = "down") -> tuple[Memory, LayerRecipe]:
    memory = Memory()
    recipe = layer_recipe(memory, weights(roles(6, 4), 4))
    tensors = tuple(change(t) if t.role == role else t for t in recipe.tensors)
    return memory, dataclasses.replace(recipe, layer=3, tensors=tensors)


def with_ops(*ops: tuple[Any, ...]) -> Callable[[TensorRecipe], TensorRecipe]:
    return lambda tensor: dataclasses.replace(tensor, ops=ops)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_ops(("execute", "rm")), "not one this version carries out"),
        (with_ops(()), "not one this version carries out"),
        (with_ops(("rows", 0, 6)), "not one this version carries out"),
        (with_ops(("rows", 0, 6, 0)), "not one this version carries out"),
        (with_ops(("rows", -6, 6, 1)), "not one this version carries out"),
        (with_ops(("rows", 4, 4, 1)), "not one this version carries out"),
        (with_ops(("transpose", 1)), "not one this version carries out"),
        (with_ops(("dequant_fp8_block", 0, 128)), "not one this version carries out"),
        (with_ops(("dequant_int4_packed", 0, True)), "not one this version carries out"),
        (with_ops(("dequant_mxfp4",)), "with 1 sources"),
        (with_ops(("dequant_int4_packed", 32, True)), "with 1 sources"),
        (lambda t: dataclasses.replace(t, role="router"), "an expert needs up and down"),
        (lambda t: dataclasses.replace(t, role="up"), "an expert needs up and down"),
        (lambda t: dataclasses.replace(t, shape=(6, 4, 1)), "number of dimensions"),
        (lambda t: dataclasses.replace(t, shape=(6,)), "number of dimensions"),
        (lambda t: dataclasses.replace(t, sources=()), "no sources"),
        (
            lambda t: dataclasses.replace(t, sources=(dataclasses.replace(t.sources[0], dtype="F4"),)),
            "unknown dtype",
        ),
        (
            lambda t: dataclasses.replace(
                t, sources=t.sources * 2, ops=(("rows", 0, 6, 1), ("dequant_mxfp4",))
            ),
            "must come first",
        ),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_before_anything_is_read(
    change: Callable[[TensorRecipe], TensorRecipe], reason: str
) -> None:
    _, recipe = spoil(change)
    with pytest.raises(RecipeError, match=reason) as caught:
        check_recipe(recipe)
    assert "layer 3" in str(caught.value)


def test_an_unknown_role_is_named() -> None:
    memory, recipe = spoil(lambda t: t)
    extra = dataclasses.replace(recipe.tensors[0], role="router")
    with pytest.raises(RecipeError, match="'router': unknown role"):
        check_recipe(dataclasses.replace(recipe, tensors=(*recipe.tensors, extra)))
    assert memory.data


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_ops(("transpose",)), r"came out as \(4, 6\), the plan says \(6, 4\)"),
        (with_ops(("rows", 0, 4, 1)), r"came out as \(4, 4\)"),
        (with_ops(("rows", 0, 7, 1)), "does not fit the stored shapes: it reaches past 6 rows"),
        (
            lambda t: dataclasses.replace(t, sources=(dataclasses.replace(t.sources[0], dtype="I32"),)),
            "need a dequantising step",
        ),
    ],
)
def test_bytes_that_do_not_become_what_the_plan_says(
    change: Callable[[TensorRecipe], TensorRecipe], reason: str
) -> None:
    memory, recipe = spoil(change)
    with pytest.raises(RecipeError, match=reason) as caught:
        load_expert(recipe, 1, memory.read)
    assert "layer 3, expert 1, 'down'" in str(caught.value)


def test_a_short_read_and_an_expert_that_the_plan_does_not_place() -> None:
    memory, recipe = spoil(lambda t: t)
    with pytest.raises(RecipeError, match="read 92 bytes where the plan says 96"):
        load_expert(recipe, 0, lambda span: memory.read(span)[:-4])
    offsets = dataclasses.replace(recipe.tensors[0].sources[0], offsets=(0,))
    lost = dataclasses.replace(
        recipe, tensors=(dataclasses.replace(recipe.tensors[0], sources=(offsets,)), *recipe.tensors[1:])
    )
    with pytest.raises(RecipeError, match="no offset for this expert"):
        load_expert(lost, 2, memory.read)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(bad: float, dtype: torch.dtype) -> None:
    memory = Memory()
    tensors = weights(roles(6, 4), 2, dtype=dtype)
    tensors["up"][1, 2, 3] = bad
    recipe = layer_recipe(memory, tensors)
    load_expert(recipe, 0, memory.read)
    with pytest.raises(RecipeError, match="layer 0, expert 1, 'up': the weights hold NaN"):
        load_expert(recipe, 1, memory.read)

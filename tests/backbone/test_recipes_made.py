"""Recipes made from transformers' own conversion mapping. These tests break when transformers changes it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.conversion import Conversion
from kvasir_backbone.equality import load_stock
from kvasir_backbone.formulas import find_formula
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.proof import prove
from kvasir_backbone.skeleton import find_experts
from kvasir_node.residual import residual
from market.plans import LayerRecipe, Plan, parse_plan, plan_fields
from relay.errors import ConfigError
from relay.identity import PROTOCOL_VERSION
from tests.support.tiny_models import CONFIGS, save_fp8, save_int4, save_mxfp4, save_tiny


def _stock_experts(folder: Path) -> dict[int, Any]:
    # float(): transformers leaves experts that it unpacked from int4 in their scales' bf16
    return {layer: module.float() for layer, (_, module) in find_experts(load_stock(folder)).items()}


def _agree(folder: Path) -> Plan:
    """Every expert of every layer: the recipe's output is that of stock's experts module."""
    with Checkpoint.open(folder) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32", rng=random.Random(7))
        local = LocalExperts(checkpoint.read, plan)
        stock = _stock_experts(folder)
        assert sorted(stock) == [recipe.layer for recipe in plan.layers]
        for recipe in plan.layers:
            rows = torch.randn(5, plan.width, generator=torch.Generator().manual_seed(recipe.layer))
            for expert in range(recipe.experts):
                ids, weights = torch.full((5, 1), expert), torch.ones(5, 1)
                with torch.no_grad():
                    expected = stock[recipe.layer](rows, ids, weights)
                assert float(residual(local.run(recipe.layer, expert, rows), expected).max()) < 1e-11
    assert parse_plan({"v": PROTOCOL_VERSION, **plan_fields(plan)}) == plan
    return plan


@pytest.mark.parametrize("name", CONFIGS)
def test_every_expert_of_every_architecture(tmp_path: Path, name: str) -> None:
    plan = _agree(save_tiny(tmp_path, name))
    assert len(plan.files) > 1, "the experts of these checkpoints lie in several shards"


def _ops(recipe: LayerRecipe) -> dict[str, tuple[tuple[Any, ...], ...]]:
    return {tensor.role: tensor.ops for tensor in recipe.tensors}


def test_a_fused_layout_is_sliced(tmp_path: Path) -> None:
    plan = _agree(save_tiny(tmp_path, "granitemoe"))
    recipe = plan.layers[0]
    assert _ops(recipe) == {
        "gate": (("rows", 0, 64, 1),), "up": (("rows", 64, 128, 1),), "down": (),
    }  # fmt: skip
    gate = next(tensor for tensor in recipe.tensors if tensor.role == "gate")
    assert gate.sources[0].stride == 128 * 64 * 4
    assert recipe.expert_bytes == 3 * 64 * 64 * 4, "the two halves of one tensor count once"


def test_a_transposed_interleaved_biased_layout(tmp_path: Path) -> None:
    plan = _agree(save_tiny(tmp_path, "gpt_oss"))
    assert _ops(plan.layers[0]) == {
        "gate": (("transpose",), ("rows", 0, 128, 2)),
        "up": (("transpose",), ("rows", 1, 128, 2)),
        "down": (("transpose",),),
        "gate_bias": (("rows", 0, 128, 2),),
        "up_bias": (("rows", 1, 128, 2),),
        "down_bias": (),
    }
    formula = plan.layers[0].formula
    assert (formula.name, formula.limit, formula.alpha) == ("gpt_oss", 7.0, 1.702)


def test_fp8_blocks(tmp_path: Path) -> None:
    plan = _agree(save_fp8(tmp_path))
    assert _ops(plan.layers[0]) == dict.fromkeys(("gate", "up", "down"), (("dequant_fp8_block", 8, 8),))
    assert {source.dtype for source in plan.layers[0].sources()} == {"F8_E4M3", "F32"}


def test_mxfp4(tmp_path: Path) -> None:
    plan = _agree(save_mxfp4(tmp_path))
    ops = _ops(plan.layers[0])
    assert ops["gate"] == (("dequant_mxfp4",), ("rows", 0, 128, 2))
    assert ops["down"] == (("dequant_mxfp4",),)


def test_int4_of_compressed_tensors(tmp_path: Path) -> None:
    plan = _agree(save_int4(tmp_path))
    expected = (("dequant_int4_packed", 32, True),)
    assert _ops(plan.layers[0]) == dict.fromkeys(("gate", "up", "down"), expected)


def test_quantised_with_other_layouts(tmp_path: Path) -> None:
    plan = _agree(save_fp8(tmp_path, "qwen3_moe", block=16))
    assert _ops(plan.layers[0])["down"] == (("dequant_fp8_block", 16, 16),)


# --- refusals ----------------------------------------------------------------------------------------


def _first_layer(checkpoint: Checkpoint) -> tuple[Conversion, Any, Any, LayerRecipe]:
    conversion = Conversion(checkpoint.skeleton, checkpoint.shards)
    recipe = checkpoint.recipes()[0]
    return conversion, checkpoint.skeleton.experts[recipe.layer][1], conversion.feeds[recipe.layer], recipe


def test_a_recipe_that_mixes_up_two_tensors_is_not_proven(bundled: Checkpoint) -> None:
    conversion, module, feeds, recipe = _first_layer(bundled)
    gate, up, down = recipe.tensors
    swapped = replace(recipe, tensors=(replace(gate, role="up"), replace(up, role="gate"), down))
    prove(conversion, module, feeds, recipe, 5)
    with pytest.raises(ConfigError, match="makes another"):
        prove(conversion, module, feeds, swapped, 5)


def test_a_recipe_with_the_wrong_formula_is_not_proven(bundled: Checkpoint) -> None:
    conversion, module, feeds, recipe = _first_layer(bundled)
    wrong = replace(recipe, formula=replace(recipe.formula, activation="gelu"))
    with pytest.raises(ConfigError, match="formula 'swiglu'"):
        prove(conversion, module, feeds, wrong, 5)


def test_a_gate_that_no_formula_computes_is_refused_by_name() -> None:
    class OddExperts(torch.nn.Module):
        has_gate, is_concatenated, has_post_expert_norm = True, True, False

        def _apply_gate(self, joined: torch.Tensor) -> torch.Tensor:
            gate, up = joined.chunk(2, dim=-1)
            return torch.sin(gate) * up

    with pytest.raises(ConfigError, match=r"OddForCausalLM cannot be served.*OddExperts"):
        find_formula("OddForCausalLM", OddExperts())


def test_formulas_are_found_under_the_modules_own_constants() -> None:
    class ClampedExperts(torch.nn.Module):
        has_gate, is_concatenated, has_post_expert_norm = True, True, False

        def __init__(self) -> None:
            super().__init__()
            self.swiglu_limit = 3.5

        def _apply_gate(self, joined: torch.Tensor) -> torch.Tensor:
            gate, up = joined.chunk(2, dim=-1)
            gate = torch.nn.functional.silu(gate.clamp(max=self.swiglu_limit))
            return gate * up.clamp(-self.swiglu_limit, self.swiglu_limit)

    formula = find_formula("Clamped", ClampedExperts())
    assert (formula.name, formula.activation, formula.limit) == ("swiglu_clamped", "silu", 3.5)


def test_one_missing_expert_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "mixtral")
    _drop(folder, lambda key: ".experts.3.w2" in key)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ConfigError, match="lacks number 3"):
        checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")


def test_experts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "mixtral")
    _drop(folder, lambda key: False, change=lambda key: ".layers.1." in key and ".experts.3.w2" in key)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ConfigError, match="differ in shape"):
        checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")


def test_not_a_number_in_an_expert_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "mixtral")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            if ".experts." in key:
                tensor[0, 0] = float("nan")
        save_file(tensors, file)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ConfigError, match="NaN"):
        checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")


def _drop(folder: Path, drop: Any, change: Any = lambda key: False) -> None:
    """Remove tensors, or halve them, in every file of a checkpoint."""
    for file in folder.glob("*.safetensors"):
        tensors = {key: tensor for key, tensor in load_file(file).items() if not drop(key)}
        save_file({k: t[: len(t) // 2].clone() if change(k) else t for k, t in tensors.items()}, file)

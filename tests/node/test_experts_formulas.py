"""Gate formulas against the experts modules of transformers themselves, and a guard on their list."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.activations import ACT2FN

from kvasir_node.experts import check_layer, load_expert, run_expert
from kvasir_node.formulas import (
    ACTIVATIONS,
    FORMULAS,
    TRANSFORMERS_ACTIVATIONS,
    apply_formula,
    check_formula,
    has_gate,
)
from market.plans import GateFormula, LayerRecipe, TensorRecipe
from relay.errors import ConfigError
from tests.support.experts import Memory, make_plan

W, INNER, E = 24, 20, 3
MODELS = Path(transformers.__file__).parent / "models"

CONFIG: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), W),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER),
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "silu"),
    "moe_latent_size": None,
    "swiglu_limit": 0.6,
    "swiglu_alpha": 1.702,
    "mlp_gate_softcap": 0.7,
    "mlp_up_softcap": 0.9,
    "post_norm_eps": 1e-5,
    "_experts_implementation": "eager",
}

OSS = GateFormula("gpt_oss", "silu", 0.6, 1.702)
CLAMPED = GateFormula("swiglu_clamped", "silu", 0.6)

MODULES: list[tuple[str, str, dict[str, Any], GateFormula]] = [
    ("qwen3_moe", "Qwen3MoeExperts", {}, GateFormula("swiglu", "silu")),
    ("qwen3_moe", "Qwen3MoeExperts", {"hidden_act": "gelu"}, GateFormula("swiglu", "gelu")),
    ("mixtral", "MixtralExperts", {}, GateFormula("swiglu", "silu")),
    ("lfm2_moe", "Lfm2MoeExperts", {}, GateFormula("swiglu", "silu")),
    ("beam", "BeamExperts", {}, GateFormula("swiglu", "silu")),
    ("aria", "AriaExperts", {}, GateFormula("swiglu", "silu")),
    (
        "gemma4",
        "Gemma4TextExperts",
        {"hidden_activation": "gelu_pytorch_tanh"},
        GateFormula("swiglu", "gelu_tanh"),
    ),
    ("gpt_oss", "GptOssExperts", {}, OSS),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", {}, OSS),
    ("minimax_m3_vl", "MiniMaxM3VLExperts", {}, OSS),
    ("deepseek_v4", "DeepseekV4Experts", {}, CLAMPED),
    ("glm5_next", "Glm5NextTextExperts", {}, CLAMPED),
    ("hy_v4", "HYV4Experts", {}, CLAMPED),
    ("inkling2", "Inkling2Experts", {}, GateFormula("swiglu_softcapped", "silu", 0.7, 0.9)),
    ("nemotron_h", "NemotronHExperts", {"mlp_hidden_act": "relu2"}, GateFormula("no_gate", "relu2")),
    ("muse_spark", "MuseSparkExperts", {}, GateFormula("swiglu", "silu", norm_eps=1e-5)),
]


def make_module(model: str, name: str, changes: dict[str, Any]) -> Any:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    experts = getattr(module, name)(SimpleNamespace(**{**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return experts


def recipe_from_module(experts: Any, formula: GateFormula) -> tuple[Memory, LayerRecipe]:
    """A recipe over the module's own parameters, by its own flags."""
    memory = Memory()
    turn: tuple[tuple[Any, ...], ...] = (("transpose",),) if experts.is_transposed else ()
    if not experts.is_concatenated:
        gate_rows, up_rows = ("rows", 0, 2 * INNER, 2), ("rows", 1, 2 * INNER, 2)
    else:
        gate_rows, up_rows = ("rows", 0, INNER, 1), ("rows", INNER, 2 * INNER, 1)
    tensors = [TensorRecipe("down", (W, INNER), (memory.put(experts.down_proj.data),), turn)]
    if experts.has_gate:
        fused = memory.put(experts.gate_up_proj.data)
        tensors.append(TensorRecipe("gate", (INNER, W), (fused,), (*turn, gate_rows)))
        tensors.append(TensorRecipe("up", (INNER, W), (fused,), (*turn, up_rows)))
    else:
        tensors.append(TensorRecipe("up", (INNER, W), (memory.put(experts.up_proj.data),), turn))
    if experts.has_bias:
        bias = memory.put(experts.gate_up_proj_bias.data)
        tensors.append(TensorRecipe("gate_bias", (INNER,), (bias,), (gate_rows,)))
        tensors.append(TensorRecipe("up_bias", (INNER,), (bias,), (up_rows,)))
        tensors.append(TensorRecipe("down_bias", (W,), (memory.put(experts.down_proj_bias.data),)))
    if experts.has_post_expert_norm:
        norm = dataclasses.replace(memory.put(experts.post_expert_norm.weight.data[None]), stride=0)
        tensors.append(TensorRecipe("norm", (W,), (norm,), (("add", 1.0),)))
    return memory, LayerRecipe(0, E, 1, formula, tuple(tensors))


@pytest.mark.parametrize(("model", "name", "changes", "formula"), MODULES, ids=[m[1] for m in MODULES])
def test_the_recipe_runs_as_the_model_s_own_module(
    model: str, name: str, changes: dict[str, Any], formula: GateFormula
) -> None:
    experts = make_module(model, name, changes)
    memory, recipe = recipe_from_module(experts, formula)
    check_layer(make_plan(memory, [recipe], width=W), recipe)
    rows = torch.randn(6, W, generator=torch.Generator().manual_seed(4)) * 2  # wide enough to hit the limits
    for expert in range(E):
        chosen, one = torch.full((6, 1), expert), torch.ones(6, 1)
        with torch.no_grad():
            expected = experts(rows, chosen, one)
        got = run_expert(load_expert(recipe, expert, memory.read), formula, rows)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


OWN_GATES = {
    "beam", "deepseek_v4", "glm5_next", "gpt_oss", "hy_v4", "inkling2", "minimax_m3_vl",
    "openai_privacy_filter",
}  # fmt: skip
FLAGGED = {
    "aria": "is_transposed=True",
    "gpt_oss": "is_concatenated=False, is_transposed=True, has_bias=True",
    "muse_spark": "has_post_expert_norm=True",
    "nemotron_h": "has_gate=False",
    "openai_privacy_filter": "is_transposed=True, has_bias=True",
}
DECORATED = re.compile(
    r"^@use_experts_implementation(?:\(([^\n]*)\))?\n(class \w+\(nn\.Module\):.*?)(?=^\S)",
    re.MULTILINE | re.DOTALL,
)


def test_transformers_has_no_expert_that_is_not_tested_above() -> None:
    """A new gate, flag or norm in transformers must be looked at, not guessed."""
    own, flagged = set(), {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for flags, body in DECORATED.findall(path.read_text(encoding="utf-8")):
            if "_apply_gate(self" in body:
                own.add(path.parent.name)
            if flags:
                flagged[path.parent.name] = flags
            assert re.search(r"ACT2FN\[|F\.silu|_apply_gate\(self|act_fn = \w+SoftcappedSwiGLU", body), path
    assert own == OWN_GATES
    assert flagged == FLAGGED


def test_every_activation_equals_the_one_of_transformers() -> None:
    x = torch.linspace(-12, 12, 4001)
    for name, ours in TRANSFORMERS_ACTIVATIONS.items():
        torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[name](x), atol=2e-6, rtol=2e-6)
    assert set(TRANSFORMERS_ACTIVATIONS.values()) == set(ACTIVATIONS)
    assert set(ACT2FN) - set(TRANSFORMERS_ACTIVATIONS) == {"prelu", "xielu"}


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        (GateFormula("mystery", "silu"), "'mystery' is not one this version knows"),
        (GateFormula("swiglu", "mystery"), "activation 'mystery'"),
        (GateFormula("swiglu", "silu", limit=7.0), "has no limit"),
        (GateFormula("swiglu_clamped", "silu"), "needs limit"),
        (GateFormula("swiglu_clamped", "silu", limit=-1.0), "not a positive number"),
        (GateFormula("swiglu_clamped", "silu", limit=float("nan")), "not a positive number"),
        (GateFormula("gpt_oss", "silu", limit=7.0), "needs alpha"),
        (GateFormula("gpt_oss", "gelu", limit=7.0, alpha=1.7), "has silu built in"),
        (GateFormula("swiglu", "silu", norm_eps=-1.0), "norm_eps"),
        (GateFormula("swiglu", "silu", norm_eps=float("inf")), "norm_eps"),
    ],
)
def test_a_formula_that_cannot_be_carried_out_is_refused_by_name(formula: GateFormula, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_formula(formula)


def test_the_list_is_closed_and_consistent() -> None:
    constants = {"swiglu_clamped": (1.0, None), "gpt_oss": (1.0, 1.0), "swiglu_softcapped": (1.0, 1.0)}
    for name in FORMULAS:
        formula = GateFormula(name, "silu", *constants.get(name, (None, None)))
        check_formula(formula)
        x: Tensor = torch.linspace(-3, 3, 7)
        assert apply_formula(formula, x if has_gate(formula) else None, x).shape == x.shape

"""What of transformers' private interfaces Kvasir stands on: a new version breaks here, not in a swarm."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AttentionInterface, GenerationMixin, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations import compressed_tensors, finegrained_fp8, moe, mxfp4
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from kvasir_backbone.formulas import find_formula
from kvasir_backbone.skeleton import is_experts_class
from market.plans import GateFormula
from relay.errors import ConfigError

PINNED = "5.23.0"
MODELS = Path(transformers.__file__).parent / "models"

CALLED: list[tuple[Any, list[str]]] = [
    (get_model_conversion_mapping, ["model", "key_mapping", "hf_quantizer", "add_legacy"]),
    (rename_source_key, ["source_key", "weight_renamings", "weight_converters", "base_model_prefix",
                         "meta_state_dict", "reverse"]),
    (WeightConverter.__init__, ["self", "source_patterns", "target_patterns", "operations", "force_cpu"]),
    (WeightConverter.copy, ["self", "source_patterns", "target_patterns", "kwargs"]),
    (WeightConverter.add_tensor, ["self", "target_key", "source_key", "source_pattern", "future"]),
    (WeightConverter.convert, ["self", "layer_name", "model", "config", "hf_quantizer", "loading_info"]),
    (WeightRenaming.__init__, ["self", "source_patterns", "target_patterns"]),
    (moe.use_experts_implementation, ["experts_class", "experts_interface", "is_concatenated",
                                      "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"]),
    (moe.ALL_EXPERTS_FUNCTIONS.register, ["key", "value"]),
    (moe.batched_mm_experts_forward, ["self", "hidden_states", "top_k_index", "top_k_weights"]),
    (compressed_tensors.get_experts_scheme, ["quantization_config"]),
    (AutoHfQuantizer.from_config, ["quantization_config", "kwargs"]),
    (HfQuantizer.preprocess_model, ["self", "model", "dtype", "kwargs"]),
    (HfQuantizer.validate_environment, ["self", "args", "kwargs"]),
    (GenerationMixin._supports_default_dynamic_cache, []),
    (AttentionInterface.register, ["key", "value"]),
    (Cache.update, ["self", "key_states", "value_states", "layer_idx", "args", "kwargs"]),
    (DynamicCache.__init__, ["self", "ddp_cache_data", "config", "offloading", "offload_only_non_sliding"]),
]  # fmt: skip
"""Every private function that is called or stood in for, and its parameters."""


def test_transformers_is_the_version_that_was_looked_at() -> None:
    assert transformers.__version__ == PINNED


@pytest.mark.parametrize(
    ("function", "parameters"), CALLED, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_a_private_function_takes_what_it_took(function: Any, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters


def test_dequantising_operations_have_the_names_that_recipes_are_chosen_by() -> None:
    assert finegrained_fp8.Fp8Dequantize.__name__ == "Fp8Dequantize"
    assert mxfp4.Mxfp4Dequantize.__name__ == "Mxfp4Dequantize"
    assert compressed_tensors.CompressedTensorsDequantize.__name__ == "CompressedTensorsDequantize"
    assert compressed_tensors.CompressedTensorsDequantize(None).scheme is None


def test_converters_have_what_is_read_of_them() -> None:
    merge = MergeModulelist(dim=0)
    converter = WeightConverter(
        "mlp.experts.*.gate_proj.weight", "mlp.experts.gate_up_proj", operations=[merge]
    )
    assert converter.source_patterns == ["mlp.experts.*.gate_proj.weight"]
    assert converter.target_patterns == ["mlp.experts.gate_up_proj"]
    assert list(converter.operations) == [merge]


def test_the_interface_is_recognised_by_its_closure_and_its_flags() -> None:
    @moe.use_experts_implementation(is_transposed=True, has_bias=True)
    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return hidden_states

    assert is_experts_class(Experts)
    assert not is_experts_class(torch.nn.Linear)
    made: Any = Experts(PreTrainedConfig())
    flags = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")
    assert [getattr(made, flag) for flag in flags] == [True, True, True, True, False]
    assert Experts._apply_gate is moe._default_apply_gate  # type: ignore[attr-defined]


# --- every experts class of transformers -------------------------------------------------------------

SWIGLU = GateFormula("swiglu", "silu")
GELU = GateFormula("swiglu", "gelu_tanh")
CLAMPED = GateFormula("swiglu_clamped", "silu", 10.0)
GPT_OSS = GateFormula("gpt_oss", "silu", 7.0, 1.702)
OTHERS: dict[str, GateFormula] = {
    "DeepseekV4Experts": CLAMPED,
    "DiffusionGemmaTextExperts": GELU,
    "Gemma4TextExperts": GELU,
    "Glm5NextTextExperts": CLAMPED,
    "GptOssExperts": GPT_OSS,
    "HYV4Experts": CLAMPED,
    "Inkling2Experts": GateFormula("swiglu_softcapped", "silu", 4.0, 25.0),
    "MiniMaxM3VLExperts": GPT_OSS,
    "MuseSparkExperts": GateFormula("swiglu", "silu", norm_eps=1e-8),
    "NemotronHExperts": GateFormula("no_gate", "relu2"),
    "OpenAIPrivacyFilterExperts": GPT_OSS,
}
"""Experts classes whose formula is not plain SwiGLU."""

REFUSED: frozenset[str] = frozenset()
"""Experts classes for which there is no recipe; `find_formula` names them."""

PARAMETERS = {
    "gate_up_proj", "gate_up_proj_bias", "up_proj", "down_proj", "down_proj_bias", "post_expert_norm.weight",
}  # fmt: skip
SIZES = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "top_k_experts": 2,
    "hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8,
}  # fmt: skip


def experts_classes() -> Iterator[tuple[type, Any]]:
    """Every experts class of transformers that goes through the interface, with its module."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if "@use_experts_implementation" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for cls in vars(module).values():
                if isinstance(cls, type) and cls.__module__ == module.__name__ and is_experts_class(cls):
                    yield cls, module


def build(cls: type, module: Any) -> Any:
    """That class on the meta device, made with the configuration of its model that fits."""
    package = module.__name__.rpartition(".")[0]
    name = module.__name__.rpartition(".modeling_")[2]
    configuration = importlib.import_module(f"{package}.configuration_{name}")
    configs = [
        value
        for value in vars(configuration).values()
        if isinstance(value, type) and issubclass(value, PreTrainedConfig) and value is not PreTrainedConfig
    ]
    configs.sort(key=lambda config: "Text" not in config.__name__)  # vision and audio have other activations
    init: Any = cls.__init__  # type: ignore[misc]
    width = {"intermediate_size": 8} if "intermediate_size" in inspect.signature(init).parameters else {}
    for config in configs:
        for sizes in ({}, SIZES):
            try:
                with torch.device("meta"):
                    return cls(config(**sizes), **width)
            except (AttributeError, TypeError, ValueError, StrictDataclassError):
                continue
    raise AssertionError(f"no configuration of {package} makes a {cls.__name__}")


def test_every_gate_of_transformers_is_a_formula_or_refused_by_name() -> None:
    found: dict[str, GateFormula] = {}
    refused: set[str] = set()
    for cls, module in experts_classes():
        experts = build(cls, module)
        assert {name for name, _ in experts.named_parameters()} <= PARAMETERS, cls.__name__
        try:
            found[cls.__name__] = find_formula(cls.__name__, experts)
        except ConfigError as error:
            refused.add(str(error).partition(" cannot be served")[0])
    assert len(found) + len(refused) > 60
    assert refused == REFUSED
    assert {name: formula for name, formula in found.items() if formula != SWIGLU} == OTHERS

"""The matrix of architectures: what each is expected to be, and tiny checkpoints of all of them.

`tests/backbone/test_architectures.py` proves every entry on a swarm of two nodes; `scripts/models.py` writes
`docs/models.md` from the same entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support import tiny_models
from tests.support.tiny_models import CONFIGS, save_tiny


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the matrix.

    `models` are public checkpoints of that architecture. `packed`: requests share one forward pass.
    `chunked`: a prompt may be computed in several pieces. `stored`: how its experts lie on disk ("one" tensor
    an expert and matrix, or "fused": one tensor for all experts of a layer), with what its recipes do beside
    slicing. `gate` is the formula. `save` makes a tiny checkpoint.
    """

    name: str
    models: str
    packed: bool
    chunked: bool
    stored: str
    gate: str = "silu(gate) * up"
    note: str = ""
    save: Callable[[Path], Path] | None = None

    @property
    def model_type(self) -> str:
        """The `model_type` of its configuration."""
        return self.name.partition(",")[0].partition(" ")[0]

    def checkpoint(self, folder: Path) -> Path:
        """A tiny random checkpoint of it in `folder`, saved as transformers stores that architecture."""
        return (self.save or _saver(self.model_type))(folder)


def _saver(name: str) -> Callable[[Path], Path]:
    return lambda folder: save_tiny(folder, name) if name in CONFIGS else save_small(folder, name)


# --- checkpoints with images, of which the text is served --------------------------------------------

_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}


def save_multimodal(folder: Path, name: str, text: str, vision: dict[str, Any], **fields: Any) -> Path:
    """A tiny checkpoint of the whole multimodal model `name`, around the text model of type `text`."""
    tiny_models._quiet()
    auto: Any = AutoModelForImageTextToText
    config = AutoConfig.for_model(
        name, text_config={**tiny_models._COMMON, **CONFIGS[text]}, vision_config=vision, **fields
    )
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08, generator=generator)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def save_qwen3_5_moe(folder: Path) -> Path:
    """As Qwen3.5 ships: text and images in one checkpoint."""
    vision = {**_VISION, "out_hidden_size": 64, "num_position_embeddings": 16}
    return save_multimodal(folder, "qwen3_5_moe", "qwen3_5_moe_text", vision)


def save_gemma4(folder: Path) -> Path:
    """As Gemma 4 ships: text and images in one checkpoint."""
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    return save_multimodal(folder, "gemma4", "gemma4_text", vision, audio_config=None)


# --- architectures that only this matrix has ---------------------------------------------------------

_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts",
)  # fmt: skip
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_EXPERTS, 16),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), 4),
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "first_k_dense_replace": 1, "num_dense_layers": 1, "sliding_window": 16,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4, "rotary_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "mamba_d_state": 16, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1,
}  # fmt: skip
"""Sizes by the names that configurations give them; a model type takes those that it knows."""

_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    "bailing_hybrid": {**_LATENT, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}


def save_small(folder: Path, name: str) -> Path:
    """A tiny checkpoint of a type that has no entry in `tiny_models.CONFIGS`."""
    config: Any = type(AutoConfig.for_model(name))
    default, renamed = config(), getattr(config, "attribute_map", {})
    sizes = {key: size for key, size in _SMALL.items() if hasattr(default, key) or key in renamed}
    return save_tiny(folder, name, **{**sizes, **_SPECIAL.get(name, {})})


# --- compressed-tensors in its other forms -----------------------------------------------------------


def save_rowwise_fp8(folder: Path) -> Path:
    """fp8 weights with one scale a row, compressed-tensors' "float-quantized", as GLM-4.5-Air-FP8 ships."""
    save_tiny(folder, "glm4_moe", dtype=torch.bfloat16)

    def quantise(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if ".experts." not in key:
            return {key: weight}
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 448.0
        values = (weight.float() / scale).to(torch.float8_e4m3fn)
        return {key: values, key + "_scale": scale.to(torch.bfloat16)}

    arguments = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    return _compressed(folder, quantise, "float-quantized", arguments)


def save_asymmetric_int4(folder: Path) -> Path:
    """int4 with zero points, packed by compressed-tensors itself."""
    save_tiny(folder, "qwen3_moe", dtype=torch.bfloat16)

    def quantise(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if ".experts." not in key:
            return {key: weight}
        rows, columns = weight.shape
        groups = weight.float().view(rows, columns // 32, 32)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).to(torch.bfloat16).float()
        zero = (-8 - low / scale).round().clamp(-8, 7)
        values = (groups / scale + zero).round().clamp(-8, 7).view(rows, columns).to(torch.int8)
        stem = key.removesuffix("weight")
        return {
            stem + "weight_packed": pack_to_int32(values, 4),
            stem + "weight_scale": scale[..., 0].to(torch.bfloat16),
            stem + "weight_zero_point": pack_to_int32(zero[..., 0].to(torch.int8), 4, packed_dim=0),
            stem + "weight_shape": torch.tensor([rows, columns]),
        }

    arguments = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False,
        "dynamic": False,
    }  # fmt: skip
    return _compressed(folder, quantise, "pack-quantized", arguments)


def _compressed(
    folder: Path,
    quantise: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    form: str,
    weights: dict[str, Any],
) -> Path:
    """Rewrite a checkpoint's tensors and say so in its configuration, as compressed-tensors does."""
    tiny_models._rewrite(folder, quantise)
    tiny_models.edit_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_experts.*",
                       "re:.*layers.0.mlp.*_proj$"],
        },
    )  # fmt: skip
    return folder


# --- the matrix --------------------------------------------------------------------------------------

_GELU = "gelu_tanh(gate) * up"
_CLAMPED = "(clamp(up) + 1) * clamp(gate) * sigmoid(1.702 clamp(gate)), limit 7"
_LIMIT = "silu(clamp(gate)) * clamp(up), limit 10"
_SLIDING = "sliding windows"
_KDA = "linear and latent attention"
_SPARSE = "sparse attention with an indexer"
_TEXT_ONLY = "text only; its image parts are loaded and never run"

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("qwen2_moe", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", True, True, "one"),
    Architecture("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", True, True, "one"),
    Architecture("mixtral", "Mixtral-8x7B, Mixtral-8x22B", True, True, "one"),
    Architecture("olmoe", "OLMoE-1B-7B", True, True, "one"),
    Architecture("minimax_m2", "MiniMax-M2, MiniMax-M2.5", True, True, "one"),
    Architecture("glm4_moe", "GLM-4.5, GLM-4.5-Air, GLM-4.6", True, True, "one"),
    Architecture("granitemoe", "Granite-3.x-1B-A400M, -3B-A800M", True, True, "fused"),
    Architecture("phimoe", "Phi-3.5-MoE", True, True, "one"),
    Architecture("ernie4_5_moe", "ERNIE-4.5-21B-A3B, -300B-A47B", True, True, "one"),
    Architecture("hunyuan_v1_moe", "Hunyuan-A13B", True, True, "one"),
    Architecture("dots1", "dots.llm1", True, True, "one"),
    Architecture("deepseek_v2", "DeepSeek-V2, DeepSeek-V2-Lite", False, True, "one", note="latent attention"),
    Architecture("deepseek_v3", "DeepSeek-V3, R1, Kimi-K2", False, True, "one", note="latent attention"),
    Architecture("gpt_oss", "gpt-oss-20b, gpt-oss-120b", False, True,
                 "fused, transposed, interleaved, biases", _CLAMPED, f"sinks and {_SLIDING}"),
    Architecture("qwen3_next", "Qwen3-Next-80B-A3B", False, True, "one", note="linear attention"),
    Architecture("qwen3_5_moe_text", "Qwen3.5-35B-A3B, -122B-A10B (text part)", False, True, "one",
                 note="linear attention"),
    Architecture("qwen3_5_moe", "Qwen3.5-35B-A3B, -122B-A10B, -397B-A17B", False, True, "one",
                 note=f"linear attention; {_TEXT_ONLY}", save=save_qwen3_5_moe),
    Architecture("gemma4_text", "Gemma-4-26B-A4B (text part)", False, True, "fused", _GELU, _SLIDING),
    Architecture("gemma4", "Gemma-4-26B-A4B", False, True, "fused", _GELU,
                 f"{_SLIDING}; {_TEXT_ONLY}", save_gemma4),
    Architecture("kimi_linear", "Kimi-Linear-48B-A3B", False, True, "one", note=_KDA),
    Architecture("lfm2_moe", "LFM2-8B-A1B", False, True, "one", note="short convolutions"),
    Architecture("jamba", "Jamba-1.5, Jamba-1.7", False, False, "one", note="state-space layers"),
    Architecture("nemotron_h", "Nemotron-3-Nano-30B-A3B", False, False, "one", "relu(up)^2, no gate",
                 "state-space layers"),
    Architecture("nemotron_h, latent", "Nemotron-3-Super-120B-A12B", False, False, "one",
                 "relu(up)^2, no gate", "state-space layers; rows narrower than the hidden size",
                 lambda folder: save_tiny(folder, "nemotron_h", moe_latent_size=32)),
    Architecture("afmoe", "Trinity-Mini", False, True, "one", note=_SLIDING),
    Architecture("aria_text", "Aria (text part)", True, True, "fused, transposed"),
    Architecture("axk1", "A.X-K1", False, True, "one", note="latent attention"),
    Architecture("axk2", "A.X-K2", False, False, "one", note=_SPARSE),
    Architecture("bailing_hybrid", "Ling-3.0-Flash", False, True, "one", note=_KDA),
    Architecture("beam", "Beam-1.0-501B-A23B", False, True, "one", note=_SLIDING),
    Architecture("cohere2_moe", "command-a-plus", False, True, "one", note=_SLIDING),
    Architecture("deepseek_v32", "DeepSeek-V3.2-Exp", False, False, "one", note=_SPARSE),
    Architecture("deepseek_v4", "DeepSeek-V4", False, False, "one", _LIMIT, _SPARSE),
    Architecture("exaone_moe", "K-EXAONE-236B-A23B", False, True, "one", note=_SLIDING),
    Architecture("flex_olmo", "FlexOlmo-7x7B", True, True, "one"),
    Architecture("flint", "flint", False, True, "one", note=_SLIDING),
    Architecture("glm4_moe_lite", "GLM-4.7-Flash", False, True, "one", note="latent attention"),
    Architecture("glm_moe_dsa", "GLM-5", False, False, "one", note=_SPARSE),
    Architecture("granitemoe_swa", "granite-swash-3b-a600m", False, True, "fused", note=_SLIDING),
    Architecture("granitemoehybrid", "Granite-4.0-H-Tiny, -Small", False, False, "fused",
                 note="state-space layers"),
    Architecture("granitemoeshared", "Granite MoE with shared experts", True, True, "fused"),
    Architecture("hy_v3", "Hy3-preview", True, True, "one"),
    Architecture("hy_v4", "Hy4-preview", False, False, "fused", _LIMIT, _SPARSE),
    Architecture("inkling_text", "Inkling (text part)", False, True, "fused", note=_SLIDING),
    Architecture("inkling2_text", "Inkling-2-Small (text part)", False, True, "fused, interleaved",
                 "softcap(gate) * sigmoid(gate) * softcap(up), 4 and 25", _SLIDING),
    Architecture("kolibri1", "Kolibri-1", False, True, "one", note=_SLIDING),
    Architecture("laguna", "laguna-XS.2", False, True, "one", note=_SLIDING),
    Architecture("mellum", "Mellum2-12B-A2.5B", False, True, "one", note=_SLIDING),
    Architecture("mimo_v2_flash", "MiMo-V2-Flash", False, True, "one", note=f"sinks and {_SLIDING}"),
    Architecture("minimax_m3_vl_text", "MiniMax-M3 (text part)", False, True, "fused", _CLAMPED,
                 "sparse attention"),
    Architecture("solar_open", "Solar-Open-100B", True, True, "one"),
    Architecture("zaya", "ZAYA1-8B", False, False, "fused", note="compressed convolutional attention"),
)  # fmt: skip

QUANTISED: tuple[Architecture, ...] = (
    Architecture("deepseek_v3 fp8", "DeepSeek-V3, R1", False, True, "one, fp8 with a scale a block",
                 save=tiny_models.save_fp8),
    Architecture("gpt_oss mxfp4", "gpt-oss-20b, gpt-oss-120b", False, True,
                 "fused, mxfp4, interleaved, biases", _CLAMPED, save=tiny_models.save_mxfp4),
    Architecture("qwen3_moe int4", "compressed-tensors, as Kimi-K2-Thinking", True, True,
                 "one, int4 with a scale a group", save=tiny_models.save_int4),
    Architecture("glm4_moe fp8, rows", "compressed-tensors, as GLM-4.5-Air-FP8", True, True,
                 "one, fp8 with a scale a row", save=save_rowwise_fp8),
)  # fmt: skip
"""Quantised checkpoints: nodes keep them as stored and widen an expert when it runs."""

OUTSIDE = "its experts do not go through transformers' experts interface"
NOT_CAUSAL = "transformers has no causal language model of this type"
STATE = "it keeps a state of its own beside transformers' cache"

NOT_SERVED: dict[str, str] = {
    **dict.fromkeys(("dbrx", "doge", "jetmoe", "llama4", "llama4_text", "longcat_flash"), OUTSIDE),
    **dict.fromkeys(
        (
            "aria", "deepseek_ocr2", "diffusion_gemma", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next",
            "inkling2", "inkling_mm_model", "minimax_m3_vl", "mistral4", "mistral_large4", "muse_spark",
            "nllb-moe", "openai_privacy_filter", "qwen3_omni_moe", "qwen3_vl_moe", "step3p7",
            "switch_transformers", "unlimited_ocr",
        ),
        NOT_CAUSAL,
    ),
    "minimax": STATE,
}  # fmt: skip
"""Model types that are refused by name, and why."""

UNTESTED = ("dots3_note", "dots3_note_text", "qwen4_exp", "qwen4_exp_text")
"""Model types that open and are proven expert by expert, but that no test compares with stock."""

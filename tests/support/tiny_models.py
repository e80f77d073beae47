"""Tiny random checkpoints of many architectures, saved by transformers itself."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

_COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 48, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 16, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 8},
    "minimax_m2": {"num_local_experts": 32, "num_experts_per_tok": 8, "rotary_dim": 16},
    "glm4_moe": {"n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "layer_types": ["full_attention"] * 3, "sliding_window": None,
    },
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 2},
    "deepseek_v3": {
        "head_dim": 8, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_next": {
        "num_experts": 16, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 32, **_LINEAR,
    },
    "deepseek_v2": {
        "head_dim": 8, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "lfm2_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "jamba": {
        "num_experts": 8, "num_experts_per_tok": 2, "use_mamba_kernels": False, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
    },
    "nemotron_h": {"n_routed_experts": 16, "num_experts_per_tok": 4},
    "qwen3_5_moe_text": {
        "num_experts": 16, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 32, **_LINEAR,
    },
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 32,
        "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8,
    },
    "kimi_linear": {
        "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
        "linear_head_dim": 16, "linear_num_heads": 4, "layer_types": _LINEAR["layer_types"],
    },
}  # fmt: skip
"""Model type -> what its configuration has beside `_COMMON`."""


@functools.lru_cache(maxsize=1)
def _quiet() -> None:
    logging: Any = transformers_logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def make_tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of that type, wide enough that its logits differ clearly."""
    _quiet()
    auto: Any = AutoModelForCausalLM
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(name, **{**_COMMON, **CONFIGS.get(name, {}), **overrides})
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08, generator=generator)
            elif "bias" in key:
                parameter.normal_(0, 0.02, generator=generator)
        for key, table in model.named_buffers():
            if key.endswith("tid2eid"):  # deepseek_v4 routes its first layers by the token: experts differ
                experts = torch.rand(table.shape[0], 16, generator=generator).argsort(dim=1)
                table.copy_(experts[:, : table.shape[1]])
    return model.to(dtype)


def save_tiny(folder: Path, name: str, **arguments: Any) -> Path:
    """Save `make_tiny(name)` into `folder`, in shards, as transformers stores that architecture."""
    model = make_tiny(name, **arguments)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def load_stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model as stock transformers loads it, experts by its eager path."""
    _quiet()
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a saved checkpoint's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# --- quantised checkpoints ---------------------------------------------------------------------------


def save_fp8(folder: Path, name: str = "deepseek_v3", *, block: int = 8) -> Path:
    """A checkpoint with fp8 weights and one fp32 scale a block, as DeepSeek-V3 ships."""
    save_tiny(folder, name)
    kept = ("embed_tokens", "lm_head", "gate.weight", "norm")

    def quantise(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if weight.dim() != 2 or any(part in key for part in kept):
            return {key: weight}
        rows, columns = weight.shape[0] // block, weight.shape[1] // block
        tiles = weight.view(rows, block, columns, block)
        scale = tiles.abs().amax(dim=(1, 3)) / 448.0
        values = (tiles / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
        return {key: values, key + "_scale_inv": scale}

    _rewrite(folder, quantise)
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block],
            "modules_to_not_convert": ["lm_head"],
        },
    )  # fmt: skip
    return folder


def save_mxfp4(folder: Path) -> Path:
    """A gpt-oss checkpoint with mxfp4 experts, as OpenAI ships."""
    save_tiny(folder, "gpt_oss")
    generator = torch.Generator().manual_seed(4)

    def quantise(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {key: weight}
        experts, inner, outer = weight.shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=generator)
        scales = torch.randint(120, 125, (experts, outer, inner // 32), generator=generator)
        return {key + "_blocks": blocks.to(torch.uint8), key + "_scales": scales.to(torch.uint8)}

    _rewrite(folder, quantise)
    edit_config(
        folder,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    )
    return folder


def save_int4(folder: Path, name: str = "qwen3_moe", *, group: int = 32) -> Path:
    """A checkpoint with int4 experts in compressed-tensors' "pack-quantized" format."""
    save_tiny(folder, name, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(5)

    def quantise(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if ".experts." not in key:
            return {key: weight}
        rows, columns = weight.shape
        packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator)
        scale = torch.rand(rows, columns // group, generator=generator) * 0.02 + 0.01
        stem = key.removesuffix("weight")
        return {
            stem + "weight_packed": packed.to(torch.int32),
            stem + "weight_scale": scale.to(torch.bfloat16),
            stem + "weight_shape": torch.tensor([rows, columns]),
        }

    _rewrite(folder, quantise)
    weights = {
        "num_bits": 4, "group_size": group, "strategy": "group", "symmetric": True, "type": "int",
        "dynamic": False,
    }  # fmt: skip
    edit_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        },
    )
    return folder


def _rewrite(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Replace every tensor of a saved checkpoint by what `change` makes of it, in one file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, weight in load_file(file).items():
            tensors.update(change(key, weight))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")

"""Real models and the memory that they take, computed from the sizes in their public configurations.

Each model is built on the meta device by the pinned transformers, as a checkpoint would be, and its
parameters are counted. No weights are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

INT8_BYTES: Final = 1 + 4 / 128
"""A weight at int8: one byte, and a 4-byte scale for every 128 inputs."""
INT4_BYTES: Final = 20 / 32
"""A weight at int4: 16 bytes for 32, with a 2-byte scale and a 2-byte minimum."""
STORED_BYTES: Final = {"bf16": 2.0, "fp8": 1 + 4 / 128**2, "mxfp4": 17 / 32}
"""A weight as published: fp8 has a 4-byte scale a block of 128 x 128, mxfp4 a byte of scale for 32."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """A public model: its type, the sizes in its config.json, how its experts are published."""

    name: str
    model_type: str
    stored: str
    sizes: dict[str, Any] = field(default_factory=dict)


REAL_MODELS: Final = (
    RealModel("MiniMax-M2", "minimax_m2", "fp8", {
        "num_hidden_layers": 62, "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256,
        "num_experts_per_tok": 8, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 200064,
    }),
    RealModel("Qwen3.5-122B-A10B", "qwen3_5_moe_text", "bf16", {
        "num_hidden_layers": 48, "hidden_size": 3072, "moe_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_tok": 8, "shared_expert_intermediate_size": 1024, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 64, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
    }),
    RealModel("DeepSeek-V3", "deepseek_v3", "fp8", {
        "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
    }),
    RealModel("GLM-4.5-Air", "glm4_moe", "bf16", {
        "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
    }),
    RealModel("gpt-oss-120b", "gpt_oss", "mxfp4", {
        "num_hidden_layers": 36, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 201088,
    }),
    RealModel("Qwen3-30B-A3B", "qwen3_moe", "bf16", {
        "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    }),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """What one model takes. Parameters are counts; bytes are exact, but for what aligns tensors in files."""

    model: RealModel
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    width: int
    dense: int
    routed: int
    kv_bytes: int
    """Bytes of keys and values of one position, bf16."""
    packed: bool

    @property
    def expert(self) -> int:
        """Parameters of one expert of one layer."""
        return self.routed // (self.moe_layers * self.experts)

    @property
    def total(self) -> int:
        """Parameters of the whole."""
        return self.dense + self.routed


def measure(model: RealModel) -> Size:
    """Build the model on the meta device and count."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvasir_backbone.model import kv_token_bytes, packed_fault
    from kvasir_backbone.skeleton import find_experts

    config: Any = AutoConfig.for_model(model.model_type, **model.sizes)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(config, dtype=torch.bfloat16)
    modules = [module for _, module in find_experts(built).values()]
    routed = sum(parameter.numel() for module in modules for parameter in module.parameters())
    whole = sum(parameter.numel() for parameter in built.parameters())
    return Size(
        model=model,
        layers=config.num_hidden_layers,
        moe_layers=len(modules),
        experts=int(modules[0].down_proj.shape[0]),
        top_k=config.num_experts_per_tok,
        width=int(modules[0].down_proj.shape[1 if not modules[0].is_transposed else 2]),
        dense=whole - routed,
        routed=routed,
        kv_bytes=kv_token_bytes(config, 2),
        packed=packed_fault(config) is None,
    )

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

    def checkpoint(self, folder: Path) -> Path:
        """A tiny random checkpoint of it in `folder`, saved as transformers stores that architecture."""
        return (self.save or _saver(self.name))(folder)


def _saver(name: str) -> Callable[[Path], Path]:
    return lambda folder: save_tiny(folder, name)


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


# --- the matrix --------------------------------------------------------------------------------------

_GELU = "gelu_tanh(gate) * up"
_CLAMPED = "(clamp(up) + 1) * clamp(gate) * sigmoid(1.702 clamp(gate)), limit 7"
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
    Architecture("gpt_oss", "gpt-oss-20b, gpt-oss-120b", False, True, "fused, transposed, interleaved, biases",
                 _CLAMPED, "sinks and sliding windows"),
    Architecture("qwen3_next", "Qwen3-Next-80B-A3B", False, True, "one", note="linear attention"),
    Architecture("qwen3_5_moe_text", "Qwen3.5-35B-A3B, -122B-A10B (text part)", False, True, "one",
                 note="linear attention"),
    Architecture("qwen3_5_moe", "Qwen3.5-35B-A3B, -122B-A10B, -397B-A17B", False, True, "one",
                 note=f"linear attention; {_TEXT_ONLY}", save=save_qwen3_5_moe),
    Architecture("gemma4_text", "Gemma-4-26B-A4B (text part)", False, True, "fused", _GELU, "sliding windows"),
    Architecture("gemma4", "Gemma-4-26B-A4B", False, True, "fused", _GELU,
                 f"sliding windows; {_TEXT_ONLY}", save_gemma4),
    Architecture("kimi_linear", "Kimi-Linear-48B-A3B", False, True, "one", note="linear and latent attention"),
    Architecture("lfm2_moe", "LFM2-8B-A1B", False, True, "one", note="short convolutions"),
    Architecture("jamba", "Jamba-1.5, Jamba-1.7", False, False, "one", note="state-space layers"),
    Architecture("nemotron_h", "Nemotron-3-Nano-30B-A3B, -Super", False, False, "one", "relu(up)^2, no gate",
                 "state-space layers; rows may be narrower than the hidden size"),
)  # fmt: skip

QUANTISED: tuple[Architecture, ...] = (
    Architecture("deepseek_v3 fp8", "DeepSeek-V3, R1", False, True, "one, fp8 with a scale a block",
                 save=tiny_models.save_fp8),
    Architecture("gpt_oss mxfp4", "gpt-oss-20b, gpt-oss-120b", False, True,
                 "fused, mxfp4, interleaved, biases", _CLAMPED, save=tiny_models.save_mxfp4),
    Architecture("qwen3_moe int4", "compressed-tensors pack-quantized", True, True,
                 "one, int4 with a scale a group", save=tiny_models.save_int4),
)  # fmt: skip
"""Quantised checkpoints: nodes keep them as stored and widen an expert when it runs."""

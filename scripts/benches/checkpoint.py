"""Makes random Mixture-of-Experts checkpoints of any size, shard by shard, in little memory.

Run as a module (`python -m benches.checkpoint FOLDER SHAPE-AS-JSON`) it works in a process of its own, so
that its memory is not counted to whoever measures.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Qwen3-MoE model. The default has 1.5 GB in bf16, 95 % of it in routed experts."""

    layers: int = 8
    experts: int = 64
    top_k: int = 8
    hidden: int = 1024
    expert_width: int = 448
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 192
    vocabulary: int = 2048
    positions: int = 2048


def make(folder: Path, shape: Shape) -> dict[str, float]:
    """Write the checkpoint into `folder`; its total and expert bytes.

    The weights are random (normal, 0.02), so its text is noise, but every byte is read, routed and
    multiplied as in any other model. The tokenizer is the bundled model's.
    """
    from kvasir_backbone.bundled import bundled_model_path

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled_model_path() / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1), encoding="utf-8")
    return _write_shards(folder, shape)


def config(shape: Shape) -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden * 2,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }


def _write_shards(folder: Path, shape: Shape) -> dict[str, float]:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    totals = {"total_bytes": 0.0, "expert_bytes": 0.0}
    shards = [_outer(shape, generator), *(_layer(shape, layer, generator) for layer in range(shape.layers))]
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = dict(tensors)
        save_file(shard, folder / name, metadata={"format": "pt"})
        for key, tensor in shard.items():
            weight_map[key] = name
            totals["total_bytes"] += tensor.nbytes
            totals["expert_bytes"] += tensor.nbytes if ".experts." in key else 0
    index = {"metadata": {"total_size": int(totals["total_bytes"])}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return totals


def _outer(shape: Shape, generator: object) -> Iterator[tuple[str, Tensor]]:
    import torch

    yield "model.embed_tokens.weight", _random(generator, shape.vocabulary, shape.hidden)
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)


def _layer(shape: Shape, layer: int, generator: object) -> Iterator[tuple[str, Tensor]]:
    import torch

    head = f"model.layers.{layer}."
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, rows, columns in (
        ("self_attn.q_proj", queries, shape.hidden),
        ("self_attn.k_proj", keys, shape.hidden),
        ("self_attn.v_proj", keys, shape.hidden),
        ("self_attn.o_proj", shape.hidden, queries),
        ("mlp.gate", shape.experts, shape.hidden),
    ):
        yield f"{head}{name}.weight", _random(generator, rows, columns)
    for name, size in (
        ("self_attn.q_norm", shape.head_dim),
        ("self_attn.k_norm", shape.head_dim),
        ("input_layernorm", shape.hidden),
        ("post_attention_layernorm", shape.hidden),
    ):
        yield f"{head}{name}.weight", torch.ones(size, dtype=torch.bfloat16)
    for expert in range(shape.experts):
        for name, rows, columns in (
            ("gate_proj", shape.expert_width, shape.hidden),
            ("up_proj", shape.expert_width, shape.hidden),
            ("down_proj", shape.hidden, shape.expert_width),
        ):
            yield f"{head}mlp.experts.{expert}.{name}.weight", _random(generator, rows, columns)


def _random(generator: object, rows: int, columns: int) -> Tensor:
    import torch

    assert isinstance(generator, torch.Generator)
    values = torch.empty(rows, columns, dtype=torch.bfloat16)
    return values.normal_(0.0, 0.02, generator=generator)


def shape_argument(shape: Shape) -> str:
    """The shape as the module's second argument."""
    return json.dumps(asdict(shape))


if __name__ == "__main__":
    print(json.dumps(make(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2])))))

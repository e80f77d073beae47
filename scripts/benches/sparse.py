"""Makes a checkpoint of a hundred gigabytes that takes a few megabytes of disk: headers, and holes.

Every tensor of a big Qwen3-MoE model is in the headers at its true size; the data are zeros that were never
written. Run as a module (`python -m benches.sparse FOLDER`). Needs a file system with sparse files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from .checkpoint import Shape, config

SHAPE = Shape(
    layers=48,
    experts=128,
    hidden=2048,
    expert_width=1344,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocabulary=32_000,
)
"""101 GB of experts in 18,432 tensors."""


def make(folder: Path, shape: Shape = SHAPE) -> dict[str, float]:
    """Write the checkpoint; its total bytes, as the files claim."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape)), encoding="utf-8")
    weight_map: dict[str, str] = {}
    total = 0
    shards = [_outer(shape), *(_layer(shape, layer) for layer in range(shape.layers))]
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write(folder / name, tensors)
        weight_map |= dict.fromkeys((tensor for tensor, _ in tensors), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if _blocks(folder.glob("*.safetensors")) > total // 10:
        sys.exit(f"{folder}: this file system writes holes out; choose another with --work-dir")
    return {"total_bytes": float(total)}


def _write(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> int:
    entries: dict[str, object] = {}
    place = 0
    for name, shape in tensors:
        size = 2
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + place)
    return 8 + len(header) + place


def _blocks(paths: Iterable[Path]) -> int:
    return sum(512 * getattr(path.stat(), "st_blocks", 0) for path in paths)


def _outer(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("model.embed_tokens.weight", (shape.vocabulary, shape.hidden)),
        ("model.norm.weight", (shape.hidden,)),
    ]


def _layer(shape: Shape, layer: int) -> list[tuple[str, tuple[int, ...]]]:
    head = f"model.layers.{layer}."
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    expert = ("gate_proj", "up_proj", "down_proj")
    inner, outer = (shape.expert_width, shape.hidden), (shape.hidden, shape.expert_width)
    return [
        (f"{head}self_attn.q_proj.weight", (queries, shape.hidden)),
        (f"{head}self_attn.k_proj.weight", (keys, shape.hidden)),
        (f"{head}self_attn.v_proj.weight", (keys, shape.hidden)),
        (f"{head}self_attn.o_proj.weight", (shape.hidden, queries)),
        (f"{head}self_attn.q_norm.weight", (shape.head_dim,)),
        (f"{head}self_attn.k_norm.weight", (shape.head_dim,)),
        (f"{head}input_layernorm.weight", (shape.hidden,)),
        (f"{head}post_attention_layernorm.weight", (shape.hidden,)),
        (f"{head}mlp.gate.weight", (shape.experts, shape.hidden)),
        *(
            (f"{head}mlp.experts.{number}.{name}.weight", outer if name == "down_proj" else inner)
            for number in range(shape.experts)
            for name in expert
        ),
    ]


if __name__ == "__main__":
    print(json.dumps(make(Path(sys.argv[1]))))

"""Writes docs/models.md: which models work, in what memory, and which do not.

    python3 scripts/models.py            write the file
    python3 scripts/models.py --check    say whether it is current (status 1 if not)

The tables come from the matrix that `tests/backbone/test_architectures.py` proves and from the sizes of real
models (`_real_models.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

from _env import ROOT, enter

PAGE = ROOT / "docs" / "models.md"

HEAD = """# Models

Written by `python3 scripts/models.py` from the tests' matrix; edit that, not this.

A checkpoint is a folder of safetensors with a `config.json`, or such a repository on the Hugging Face hub.
At start the backbone builds the model without weights, reads off how transformers makes each expert from
its stored tensors, and proves the result on one random expert of every layer, bit for bit. What it cannot
express it refuses, naming the architecture and the tensor. Nodes carry out the same recipes on torch alone.

## Architectures that work

Each is tested in this form: a tiny random checkpoint, saved by transformers itself, is planned, cut into
windows and served by two nodes; the logits of a prompt and of the tokens after it equal stock transformers
within 1e-4 in fp32, and the greedy text is stock's, token for token or to a near-tie that is shown.

- **packed**: all requests share one forward pass. **one by one**: one pass a request, side by side; rows
  meet at each layer and travel together, one message a worker. Both give the same text whatever else runs.
- **in chunks**: a long prompt is computed in pieces between other requests' steps; **whole**: in one piece.
- Experts on disk: *one* tensor an expert and matrix, or *fused*, all experts of a layer in one tensor.
"""

QUANTISED_HEAD = """## Quantised checkpoints

Nodes keep these experts as they are stored and widen one when it runs (`--precision stored`), or convert
them once (`bf16`, `int8`). The backbone's dense part is dequantised by transformers. Compared with
transformers' own dequantised load of the same checkpoint, in fp32.
"""

QUANTISED_TAIL = """\
Refused by name: every other `quant_method` (gptq, awq, bitsandbytes, ...), packed weights of other widths
than 4 bits, and int4 with zero points, which transformers cannot convert for experts.
"""

MEMORY_HEAD = """## Memory of real models

Computed from the sizes in their public configurations. **Backbone**: everything but the routed experts, in
bf16; add keys and values (the last column, for each position of every running request) and about 0.6 GB of
libraries. **Experts**: all of them once, spread over the nodes, at each precision; the swarm aims at two
replicas of every window. A quantised model is kept as published at `stored`; int4 only where the operator
allows it. GB are 10^9 bytes.
"""

EXPERT_HEAD = """\
What one expert takes, and what one token costs on the wire in one layer (bf16 rows: one row to each node
that owns a chosen expert, counted once here, and one row back for each expert):
"""

NOT_HEAD = """## What does not work, and why

Each of these is refused at start with a message that names it, before any weights are read; a test holds
that.
"""

NOT_TAIL = """\
Images and sound: of a multimodal checkpoint whose text model transformers offers as a causal language model
(Qwen3.5, Gemma 4), the text is served. The API takes no images.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def architectures() -> Iterator[str]:
    """The tables of what the matrix proves."""
    from tests.support.architectures import ARCHITECTURES, QUANTISED, UNTESTED, Architecture

    def row(entry: Architecture) -> list[str]:
        form, prompts = "packed" if entry.packed else "one by one", "in chunks" if entry.chunked else "whole"
        return [f"`{entry.name}`", entry.models, form, prompts, entry.stored, entry.gate, entry.note]

    ordered = sorted(ARCHITECTURES, key=lambda entry: (not entry.packed, not entry.chunked, entry.name))
    head = ["model type", "checkpoints", "requests", "prompts", "experts on disk", "gate", "remarks"]
    yield table(head, map(row, ordered))
    yield "Read and proven expert by expert, but not compared with stock by a test: " + (
        ", ".join(f"`{name}`" for name in UNTESTED) + ".\n"
    )
    yield QUANTISED_HEAD
    head = ["checkpoint", "as published by", "requests", "experts on disk", "gate"]
    yield table(head, ([row(entry)[column] for column in (0, 1, 2, 4, 5)] for entry in QUANTISED))
    yield QUANTISED_TAIL


def memory() -> Iterator[str]:
    """The tables of real models."""
    from _real_models import INT4_BYTES, INT8_BYTES, REAL_MODELS, STORED_BYTES, measure

    sizes = [measure(model) for model in REAL_MODELS]
    yield MEMORY_HEAD
    head = ["model", "parameters", "requests", "backbone GB", "experts GB stored", "bf16", "int8", "int4",
            "KV a position"]  # fmt: skip
    yield table(
        head,
        (
            [
                size.model.name,
                f"{size.total / 1e9:.1f} B",
                "packed" if size.packed else "one by one",
                f"{size.dense * 2 / 1e9:.1f}",
                f"{size.routed * STORED_BYTES[size.model.stored] / 1e9:.0f} ({size.model.stored})",
                *(f"{size.routed * each / 1e9:.0f}" for each in (2.0, INT8_BYTES, INT4_BYTES)),
                f"{size.kv_bytes / 1024:.0f} KiB",
            ]
            for size in sizes
        ),
    )
    yield EXPERT_HEAD
    head = ["model", "layers (MoE)", "experts / top-k", "row width", "MiB an expert bf16", "int8", "int4",
            "bytes out", "bytes back"]  # fmt: skip
    yield table(
        head,
        (
            [
                size.model.name,
                f"{size.layers} ({size.moe_layers})",
                f"{size.experts} / {size.top_k}",
                f"{size.width}",
                *(f"{size.expert * each / 2**20:.1f}" for each in (2.0, INT8_BYTES, INT4_BYTES)),
                f"{size.width * 2 + 2 * size.top_k:,}",
                f"{size.width * 2 * size.top_k:,}",
            ]
            for size in sizes
        ),
    )


def refusals() -> Iterator[str]:
    """The table of what is refused."""
    from tests.support.architectures import NOT_SERVED

    yield NOT_HEAD
    reasons = dict.fromkeys(NOT_SERVED.values())
    rows = [
        [", ".join(f"`{name}`" for name, why in NOT_SERVED.items() if why == reason), reason]
        for reason in reasons
    ]
    rows.append(["models without routed experts", "there is nothing that nodes could hold"])
    rows.append(["model types with code of their own in the repository", "such code is never run"])
    yield table(["model types", "why"], rows)
    yield NOT_TAIL


def render() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT))
    try:
        return "\n".join([HEAD, *architectures(), *memory(), *refusals()])
    finally:
        sys.path.remove(str(ROOT))


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Write docs/models.md from the tests' matrix.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if it is not current")
    chosen = parser.parse_args(arguments)
    text = render()
    if chosen.check:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE} is current" if current else f"{PAGE} is not current: run python3 scripts/models.py")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    enter("all")
    sys.exit(main(sys.argv[1:]))

"""What a training run leaves on disk: a checkpoint to resume from, and the model (Hugging Face layout)."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from .training import Corpus, Recipe, Run, encode, heldout_loss

CHECKPOINT = "checkpoint.pt"
HELDOUT = "heldout.txt"
LARGEST_SHARD = 32 * 1024 * 1024
"""Bytes that no file of the model may exceed."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""Joins the messages by newlines. A bare newline after a block would be trimmed by transformers."""


class FilesError(Exception):
    """A folder does not hold what it should. The message says what to do."""


def fingerprint(recipe: Recipe, corpus: Corpus) -> str:
    """Hex SHA-256 of the recipe and the tokens: runs with the same one take the same steps."""
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for ids in (corpus.train, corpus.heldout):
        digest.update(ids.numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(folder: Path, run: Run) -> None:
    """Write the run's state, whole or not at all (a temporary file renamed over the last one)."""
    new = folder / f"{CHECKPOINT}.new"
    with new.open("wb") as file:
        torch.save({"fingerprint": fingerprint(run.recipe, run.corpus), **run.state()}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / CHECKPOINT)


def load_checkpoint(folder: Path, run: Run) -> None:
    """Take up the state saved in a folder. Raises FilesError where it is of another recipe or text."""
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    if state["fingerprint"] != fingerprint(run.recipe, run.corpus):
        raise FilesError(
            f"{folder / CHECKPOINT} was made with another text, seed or number of steps: "
            "resume with the same options, or name another folder with --out."
        )
    run.restore(state)


def write_model(folder: Path, run: Run) -> None:
    """Write the model: bf16 safetensors in two shards with an index, configuration, tokenizer, held-out text.

    The model in `run` is rounded to bf16 by this: the run is over. Raises FilesError where a shard would be
    larger than 32 MB.
    """
    model = run.model.to(dtype=torch.bfloat16)  # type: ignore[call-arg]
    total = sum(parameter.nbytes for parameter in model.parameters())
    shard = total // 2 + model.get_input_embeddings().weight.nbytes  # the largest tensor as it is stored
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer = run.corpus.tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / HELDOUT).write_text(run.corpus.heldout_text, encoding="utf-8", newline="\n")
    for file in folder.glob("model-*.safetensors"):
        file.chmod(0o644)  # safetensors leaves them to their owner alone
        if file.stat().st_size > LARGEST_SHARD:
            raise FilesError(f"{file} is larger than {LARGEST_SHARD} bytes: store the model in more shards.")


def evaluate(folder: Path, tokens: int | None = None) -> float:
    """Held-out loss of the model in a folder, computed in fp32 on the folder's `heldout.txt`.

    `tokens` takes only so many from the start. Raises FilesError where the folder holds no such model.
    """
    for name in ("config.json", "tokenizer.json", HELDOUT):
        if not (folder / name).is_file():
            raise FilesError(f"{folder} has no {name}: name a folder that this script wrote.")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, experts_implementation="grouped_mm"
    )
    text = (folder / HELDOUT).read_bytes().decode("utf-8")
    return heldout_loss(model, encode(tokenizer, text)[:tokens])  # type: ignore[arg-type]


def same_preparation(folder: Path, reference: Path) -> bool:
    """Whether two models were made from the same text in the same way: equal held-out text and tokenizer."""
    texts = [(path / HELDOUT).read_bytes() for path in (folder, reference)]
    tokenizers = [json.loads((path / "tokenizer.json").read_bytes()) for path in (folder, reference)]
    return texts[0] == texts[1] and tokenizers[0] == tokenizers[1]

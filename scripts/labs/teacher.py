"""Teacher-forced passes: a model reads a given text and says at each place what it expects next.

The hook, the dispatcher and the packed attention are those that serve requests; only the text is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvasir_backbone import packed, routing
from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.packed import KvMemory, PackedBatch, PackedCache
from kvasir_backbone.routing import StepRouting
from kvasir_backbone.scheduler import Segment
from kvasir_backbone.seam import RowKey
from relay.errors import ConfigError

MakeStep = Callable[[Sequence[RowKey]], StepRouting]
"""The routing of one pass over rows with these keys."""


def heldout_text(model: Path) -> str:
    """The text kept back from a model's training: `heldout.txt` beside it, else the bundled model's."""
    own = model / "heldout.txt"
    return (own if own.is_file() else bundled_model_path() / "heldout.txt").read_text(encoding="utf-8")


def sequences(model: BackboneModel, text: str, *, length: int, most: int | None = None) -> Tensor:
    """`text` as whole sequences of `length` tokens, int64 [n, length], the first `most` of them."""
    with _short_warnings():
        ids = model.tokenizer(text)["input_ids"]
    count = len(ids) // length
    if count < 1:
        raise ConfigError(f"the text has {len(ids)} tokens, fewer than one sequence of {length}")
    return torch.tensor(ids[: count * length]).view(count, length)[:most]


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Without the tokenizer's warning that a whole book is longer than the model's context."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def read(model: BackboneModel, tokens: Tensor, make_step: MakeStep) -> tuple[Tensor, Tensor]:
    """Read `tokens` [n, length] in one pass: fp32 logits [n, length, vocabulary] and the ids that the
    model's own routers chose, int64 [n * length, MoE layers, k]."""
    count, length = tokens.shape
    way = _read_packed if model.packed else _read_apart
    logits, ids = way(model, tokens, make_step)
    return logits.view(count, length, -1), ids


def _read_packed(model: BackboneModel, tokens: Tensor, make_step: MakeStep) -> tuple[Tensor, Tensor]:
    count, length = tokens.shape
    memory = KvMemory(model.memory.attention)
    segments = [Segment(n + 1, 0, 0, length, length, False, 0, False) for n in range(count)]
    batch = PackedBatch(segments, memory)
    step = make_step(_keys(count, length))
    positions = torch.arange(length).repeat(count).unsqueeze(0)
    with model.own_code(), packed.packed(batch), routing.routing(step), torch.inference_mode():
        output = model.model(
            input_ids=tokens.reshape(1, -1),
            position_ids=positions,
            past_key_values=PackedCache(),
            use_cache=True,
        )
    return output.logits[0].float(), step.recorded().ids.to(torch.int64)


def _read_apart(model: BackboneModel, tokens: Tensor, make_step: MakeStep) -> tuple[Tensor, Tensor]:
    logits, ids = [], []
    for sequence in tokens:
        step = make_step(_keys(1, len(sequence)))
        with routing.routing(step), torch.inference_mode():
            logits.append(model.model(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0].float())
        ids.append(step.recorded().ids.to(torch.int64))
    return torch.cat(logits), torch.cat(ids)


def _keys(count: int, length: int) -> list[RowKey]:
    return [RowKey(n + 1, 0, position, False) for n in range(count) for position in range(length)]

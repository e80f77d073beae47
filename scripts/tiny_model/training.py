"""The recipe of `kvasir-tiny`: its shape, its tokenizer, the training loop and the held-out loss.

Everything that a step depends on (parameters, optimiser, the generator of the offsets, the step number) is in
a `Run`, so that a saved run goes on as if it had never stopped. Knows nothing of where texts come from or how
models are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

REFERENCE_LOSS = 3.551
"""Held-out loss of the bundled model (fp32, nats a token, windows of 256)."""
WINDOW = 256
"""Tokens in a window of the held-out loss."""
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All figures of one training run; the defaults are those of the bundled model."""

    steps: int = 2811  # updates; the schedule spans them
    seed: int = 0  # of the parameters and of the offsets
    vocabulary: int = 2048  # tokens, byte-level BPE
    hidden: int = 192  # width of the hidden rows
    layers: int = 4
    experts: int = 256  # routed experts a layer
    top_k: int = 8  # experts a token
    expert_width: int = 32  # inner width of one expert
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    positions: int = 2048  # longest sequence
    batch: int = 16  # sequences a step
    length: int = 128  # tokens a sequence
    peak_rate: float = 3e-3  # AdamW step size at the end of the warm-up
    last_share: float = 0.05  # of the peak, where the cosine ends
    warmup: int = 50  # steps
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0  # norm of the whole gradient
    router_loss: float = 0.001  # weight of the auxiliary load-balancing loss
    train_share: float = 0.97  # of the tokens; the rest, the end of the text, is held out

    def rate(self, step: int) -> float:
        """The step size of update `step` (from 0): linear warm-up times a cosine over all steps."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        warm = min(1.0, (step + 1) / self.warmup)
        return self.peak_rate * warm * (self.last_share + (1 - self.last_share) * cosine)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as tokens: int64 [n] each, the held-out ones after the training ones."""

    tokenizer: PreTrainedTokenizerFast
    train: Tensor
    heldout: Tensor

    @property
    def heldout_text(self) -> str:
        """The held-out part as text."""
        return str(self.tokenizer.decode(self.heldout.tolist()))


def train_tokenizer(text: str, recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE learned from the lines of the text; token 0 is the end of text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    learn = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(text.split("\n"), learn)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, bos_token=END, model_max_length=recipe.positions
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """The token ids of a text, int64 [n], with nothing added and nothing cut."""
    return torch.tensor(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def make_corpus(text: str, recipe: Recipe) -> Corpus:
    """Tokenise and split a text. Raises ValueError where a part is too short to train on or to evaluate."""
    tokenizer = train_tokenizer(text, recipe)
    ids = encode(tokenizer, text)
    cut = int(len(ids) * recipe.train_share)
    if cut < recipe.length + 2 or len(ids) - cut < 2:
        raise ValueError(f"the text has only {len(ids)} tokens: far too short, give a longer one.")
    return Corpus(tokenizer, ids[:cut], ids[cut:])


def make_model(recipe: Recipe) -> Qwen3MoeForCausalLM:
    """The untrained model, fp32. Seeds torch's global generator, so that the recipe alone decides."""
    torch.manual_seed(recipe.seed)
    config = Qwen3MoeConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=512,  # of dense layers, of which there are none
        moe_intermediate_size=recipe.expert_width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_width,  # type: ignore[call-arg]
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        norm_topk_prob=True,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=True,
        router_aux_loss_coef=recipe.router_loss,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


class Run:
    """A training run between two steps."""

    def __init__(self, recipe: Recipe, corpus: Corpus) -> None:
        self.recipe = recipe
        self.corpus = corpus
        self.model = make_model(recipe)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.peak_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.offsets = torch.Generator().manual_seed(recipe.seed)
        self.step = 0

    def advance(self) -> float:
        """One update. Returns the loss of its batch before it, nats a token, without the router's part."""
        recipe, train = self.recipe, self.corpus.train
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.rate(self.step)
        starts = torch.randint(0, len(train) - recipe.length - 1, (recipe.batch,), generator=self.offsets)
        batch = torch.stack([train[start : start + recipe.length] for start in starts.tolist()])
        self.model.train()
        output = self.model(input_ids=batch, labels=batch, output_router_logits=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return float(output.loss.detach() - recipe.router_loss * output.aux_loss.detach())

    def state(self) -> dict[str, Any]:
        """All that the next step depends on besides recipe and text."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "offsets": self.offsets.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved `state`."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.offsets.set_state(state["offsets"])

    def finish(self, after: Callable[[int, float], bool]) -> bool:
        """Train to the last step. `after(step, loss)` is called after each; where it says False, stop there.

        Returns whether the last step was reached.
        """
        while self.step < self.recipe.steps:
            loss = self.advance()
            if not after(self.step, loss):
                break
        return self.step >= self.recipe.steps


@torch.inference_mode()
def heldout_loss(model: Qwen3MoeForCausalLM, ids: Tensor) -> float:
    """Mean loss in nats over all tokens of `ids` (int64 [n]) that have a token before them in their window.

    Windows of 256 tokens follow each other without overlap; the last may be shorter. Each is read alone.
    """
    model.train(False)
    total, count = 0.0, 0
    for window in torch.split(ids, WINDOW):
        if len(window) > 1:
            row = window[None]
            total += float(model(input_ids=row, labels=row).loss) * (len(window) - 1)
            count += len(window) - 1
    return total / count

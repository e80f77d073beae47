"""What "equal to stock transformers" means, and the proof of it.

Two greedy texts are equal, or they part at a shown near-tie: the two tokens' logits are closer than 1e-4, or
somewhere before a router's last chosen and first rejected experts are closer than 1e-5. A trained model has
such ties (6 in 100,000 routing decisions of the bundled one), and two orders of summation fall on different
sides of them. Nothing else counts as equal.

Knows stock transformers and token ids. Runs the whole model, experts and all: for tests and the demo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

LOGIT_GAP: Final = 1e-4
"""Two tokens whose logits are closer than this are a near-tie."""
ROUTING_GAP: Final = 1e-5
"""Two experts whose selection scores are closer than this are a near-tie."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one greedy text compares with stock's.

    `matches` is the verdict. Where they differ, `place` is the first different token (0: the first
    generated one), `logit_gap` how far apart stock's logits of the two tokens are there, `routing_gap` the
    closest routing decision up to there, and `reason` one sentence.
    """

    matches: bool
    place: int | None = None
    logit_gap: float | None = None
    routing_gap: float | None = None
    reason: str = "equal token for token"


def load_stock(path: Path, dtype: str = "float32") -> Any:
    """The whole model of a checkpoint folder as stock transformers loads it, every expert in memory.

    In float32 all of it: transformers leaves what it unpacked from int4 in its scales' bf16.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .skeleton import load_config

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(
        path, config=load_config(path), dtype=getattr(torch, dtype), local_files_only=True
    )
    return (model.float() if dtype == "float32" else model).eval()


def stock_greedy(model: Any, prompt_ids: Sequence[int], count: int, *, ignore_eos: bool = False) -> list[int]:
    """Up to `count` greedy tokens by stock `generate`, the end-of-text token included where it comes."""
    import torch

    arguments: dict[str, Any] = {"eos_token_id": None} if ignore_eos else {}
    prompt = torch.tensor([list(prompt_ids)])
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, **arguments
    )
    tokens: list[int] = made[0, len(prompt_ids) :].tolist()
    return tokens


def compare_greedy(
    model: Any, prompt_ids: Sequence[int], ours: Sequence[int], stock: Sequence[int]
) -> Comparison:
    """Compare our greedy tokens with stock's for the same prompt; `model` is the stock model."""
    place = next((i for i, (a, b) in enumerate(zip(ours, stock, strict=False)) if a != b), None)
    if place is None:
        if len(ours) == len(stock):
            return Comparison(True)
        place = min(len(ours), len(stock))
        return Comparison(False, place, reason=f"{len(ours)} tokens where stock made {len(stock)}")
    logits, routing_gap = _inspect(model, [*prompt_ids, *stock[:place]])
    logit_gap = float((logits[stock[place]] - logits[ours[place]]).abs())
    where = f"token {place}: {ours[place]} where stock has {stock[place]}"
    gaps = f"logit gap {logit_gap:.1e}, closest routing decision {routing_gap:.1e}"
    if logit_gap < LOGIT_GAP or routing_gap < ROUTING_GAP:
        return Comparison(True, place, logit_gap, routing_gap, f"near-tie at {where} ({gaps})")
    return Comparison(False, place, logit_gap, routing_gap, f"differs at {where} ({gaps})")


def _inspect(model: Any, tokens: Sequence[int]) -> tuple[Tensor, float]:
    """Stock's logits [vocabulary] after `tokens`, and the closest routing decision on the way."""
    import torch

    gaps: list[float] = []
    with torch.no_grad(), _watch_routers(model, gaps):
        output = model(input_ids=torch.tensor([list(tokens)]))
    logits: Tensor = output.logits[0, -1].float()
    return logits, min(gaps, default=float("inf"))


@contextmanager
def _watch_routers(model: Any, gaps: list[float]) -> Iterator[None]:
    """Append to `gaps` the closest decision of every router call."""

    def watch(module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3:
            gaps.append(routing_gap(output[0], output[2], getattr(module, "e_score_correction_bias", None)))

    handles = [router.register_forward_hook(watch) for router in find_routers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_routers(model: Any) -> list[Any]:
    """The router module of every MoE layer, in order: the experts' sibling named as such."""
    from .skeleton import find_experts

    routers = []
    for name, _ in find_experts(model).values():
        parent = model.get_submodule(name.rpartition(".")[0])
        routers += [
            child for label, child in parent.named_children() if label in ("gate", "router", "gate_module")
        ]
    return routers


def routing_gap(logits: Tensor, ids: Tensor, bias: Tensor | None = None) -> float:
    """The smallest distance of a chosen expert's selection score from that of one just not chosen.

    `logits` [n, experts] of the router, `ids` [n, k] what it chose, `bias` its correction, where it has one
    (scores are then sigmoid(logit) + bias, as DeepSeek-V3 selects). Experts that a group limit excluded in
    spite of a higher score do not count.
    """
    scores = logits.float() if bias is None else logits.float().sigmoid() + bias.float()
    chosen = scores.gather(1, ids.long())
    least = chosen.amin(dim=1, keepdim=True)
    others = scores.scatter(1, ids.long(), float("-inf"))
    below = others.masked_fill(others > least, float("-inf")).amax(dim=1, keepdim=True)
    return float((least - below).min())

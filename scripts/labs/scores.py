"""How far one machine's reading of a text is from another's: choices, logits, perplexity, forks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Score:
    """One machine against the reference, summed over blocks of text.

    `differing[layer]` counts tokens whose chosen set of experts differs in that layer, `touched` tokens with
    a difference in some layer, `first` the place of the first such token of each sequence (None: nowhere).
    """

    tokens: int = 0
    predicted: int = 0
    agree: int = 0
    kl: float = 0.0
    nll: float = 0.0
    nll_reference: float = 0.0
    differing: list[int] = field(default_factory=list)
    touched: int = 0
    first: list[int | None] = field(default_factory=list)

    def add(
        self, tokens: Tensor, logits: Tensor, reference: Tensor, ids: Tensor, reference_ids: Tensor
    ) -> None:
        """A block: `tokens` [n, length], `logits` and `reference` fp32 [n, length, vocabulary], the ids
        chosen [n * length, layers, k] here and at the reference."""
        count, length = tokens.shape
        mine = torch.log_softmax(logits[:, :-1], -1)
        theirs = torch.log_softmax(reference[:, :-1], -1)
        targets = tokens[:, 1:].unsqueeze(-1)
        self.nll -= float(mine.gather(-1, targets).sum(dtype=torch.float64))
        self.nll_reference -= float(theirs.gather(-1, targets).sum(dtype=torch.float64))
        self.agree += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        self.kl += float((theirs.exp() * (theirs - mine)).sum(dtype=torch.float64))
        self.predicted += targets.numel()
        self.tokens += count * length
        differs = (ids.sort(-1).values != reference_ids.sort(-1).values).any(-1)
        by_layer = differs.sum(0).tolist()
        self.differing = [a + b for a, b in zip(self.differing or [0] * len(by_layer), by_layer, strict=True)]
        any_layer = differs.any(1).view(count, length)
        self.touched += int(any_layer.sum())
        self.first += [int(row.nonzero()[0, 0]) if bool(row.any()) else None for row in any_layer]

    @property
    def top1(self) -> float:
        """Share of places at which both expect the same token most."""
        return self.agree / self.predicted

    @property
    def mean_kl(self) -> float:
        """Mean KL divergence from the reference, nats a token."""
        return self.kl / self.predicted

    @property
    def perplexity(self) -> float:
        """Of the text, by this machine."""
        return math.exp(self.nll / self.predicted)

    @property
    def perplexity_change(self) -> float:
        """Relative to the reference, absolute value."""
        return abs(math.exp((self.nll - self.nll_reference) / self.predicted) - 1.0)

    @property
    def choices(self) -> float:
        """Share of (token, layer) whose experts are not the reference's."""
        return sum(self.differing) / (self.tokens * len(self.differing))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two texts of tokens differ; None: nowhere."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def forked_share(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of pairs of texts that differ somewhere."""
    forks = [first_difference(a, b) is not None for a, b in zip(ones, others, strict=True)]
    return sum(forks) / len(forks)

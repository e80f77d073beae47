"""What somebody who sees rows and expert ids, and has the public model, can say of the tokens behind them.

Each attack learns from the attacker's own text, which the attacker can run through the model at home, and is
scored on another text. Published attacks do better; these are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RIDGE = 1e-2
"""Regularisation of linear maps, relative to the features' mean square."""

SMOOTHING = 0.1
"""Added to every count of (token, expert)."""


def normalised(rows: Tensor) -> Tensor:
    """Rows [n, width] of length one."""
    return torch.nn.functional.normalize(rows, dim=-1)


def nearest(train: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """Guesses int64 [m] for rows `test` [m, width]: the label of the most similar row of `train`."""
    known = normalised(train)
    return torch.cat([labels[(normalised(part) @ known.T).argmax(1)] for part in test.split(512)])


def linear_map(train: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """The ridge regression from `train` [n, width] to `targets` [n, out], with an offset."""
    ones = torch.ones(len(train), 1)
    features = torch.cat([train, ones], 1).double()
    gram = features.T @ features
    gram += torch.eye(len(gram), dtype=torch.float64) * RIDGE * gram.diagonal().mean()
    weights = torch.linalg.solve(gram, features.T @ targets.double()).float()
    return lambda rows: torch.cat([rows, torch.ones(len(rows), 1)], 1) @ weights


def probe(train: Tensor, labels: Tensor, test: Tensor, vocabulary: int) -> Tensor:
    """Guesses by a linear probe from rows to tokens."""
    apply = linear_map(train, torch.nn.functional.one_hot(labels, vocabulary).float())
    return torch.cat([apply(part).argmax(1) for part in test.split(512)])


def token_scores(train: Tensor, labels: Tensor, test: Tensor, vocabulary: int) -> Tensor:
    """Log probabilities [m, vocabulary] of tokens from which experts were seen: naive Bayes.

    `train` [n, experts] and `test` [m, experts] are 1 where an expert was chosen and seen.
    """
    counts = torch.zeros(vocabulary, train.shape[1]).index_add_(0, labels, train.float()) + SMOOTHING
    tokens = torch.bincount(labels, minlength=vocabulary).float() + SMOOTHING
    likely = (counts / counts.sum(1, keepdim=True)).log()
    return test.float() @ likely.T + (tokens / tokens.sum()).log()


def linked_share(
    train: Sequence[Tensor], test: Sequence[Tensor], sessions: int, *, generator: torch.Generator
) -> float:
    """How often a shuffled batch of `sessions` rows is put back to the right session.

    `train` and `test` are texts as rows [length, width]. The attacker learnt how one row follows from the
    one before it, and takes for each session the row most like what should follow.
    """
    follow = linear_map(torch.cat([text[:-1] for text in train]), torch.cat([text[1:] for text in train]))
    right = tried = 0
    for _ in range(200):
        chosen = torch.randperm(len(test), generator=generator)[:sessions].tolist()
        places = [int(torch.randint(len(test[n]) - 1, (1,), generator=generator)) for n in chosen]
        before = torch.stack([test[n][place] for n, place in zip(chosen, places, strict=True)])
        after = torch.stack([test[n][place + 1] for n, place in zip(chosen, places, strict=True)])
        guesses = (normalised(follow(before)) @ normalised(after).T).argmax(1)
        right += int((guesses == torch.arange(len(chosen))).sum())
        tried += len(chosen)
    return right / tried


def replayed(
    observed: Tensor,
    guess_row: Callable[[list[int], Tensor], Tensor],
    candidates: Callable[[list[int], int], Tensor],
) -> list[int]:
    """Tokens from one worker's rows of one text [length, width], by trying what the next token may be.

    `candidates(prefix, place)` gives the tokens worth a try at `place`; `guess_row(prefix, tokens)` the rows
    [n, width] that the public model would send for `prefix` and each of them. The nearest one wins.
    """
    prefix: list[int] = []
    for place, row in enumerate(observed):
        tokens = candidates(prefix, place)
        distance = (guess_row(prefix, tokens) - row).square().sum(1)
        prefix.append(int(tokens[distance.argmin()]))
    return prefix

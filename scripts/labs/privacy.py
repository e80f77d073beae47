"""How much of a prompt one worker can recover, and what mitigations buy and cost.

The attacker holds some windows, notes the rows and ids it is sent, and has the public model. It learns on one
half of the held-out text and is scored on the other, which a swarm of int8 nodes computed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.routing import StepRouting

from . import Report, table
from .attacks import linked_share, nearest, probe, replayed, token_scores
from .inprocess import PRECISIONS, one_thread
from .rows import Capture, capture
from .svg import Bars, page
from .teacher import heldout_text, read, sequences

LENGTH: Final = 128
CANDIDATES: Final = 192
"""Tokens tried at each place of a replay: half by the row's look, half by what the model expects."""
SHARES: Final = (16, 8, 4, 2, 1)
"""A worker holds one part in so many of a layer's experts."""


@dataclass(slots=True)
class Seen:
    """What the experts were sent for some texts: tokens [n], and rows and ids by layer."""

    tokens: Tensor
    kept: Capture
    experts: int

    def rows(self, layer: int) -> Tensor:
        """fp32 [n, width]."""
        return self.kept.layer(layer)[0]

    def chosen(self, layer: int, part: slice = slice(None)) -> Tensor:
        """[n, experts] 1 where an expert was chosen; only those of `part`, the worker's own."""
        hot = torch.zeros(len(self.tokens), self.experts).scatter_(1, self.kept.layer(layer)[1], 1.0)
        mask = torch.zeros(self.experts)
        mask[part] = 1.0
        return hot * mask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(options: argparse.Namespace) -> Report:
    """Measure; see the module docstring."""
    one_thread()
    path = options.model or bundled_model_path()
    with Checkpoint.open(path) as checkpoint:
        return Attacker(checkpoint, path, short=options.short).report()


class Attacker:
    """Everything that one run measures."""

    def __init__(self, checkpoint: Checkpoint, path: Any, *, short: bool) -> None:
        plan = checkpoint.make_plan(window_bytes=1 << 28, wire_dtype="float32", precisions=PRECISIONS)
        self.short = short
        self._made: dict[tuple[int, ...], list[Tensor]] = {}
        self.model = BackboneModel.load(checkpoint, dtype="float32")
        self.vocabulary = self.model.vocabulary
        self.public = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 30)
        swarm = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 30, precision="int8")
        text = sequences(self.model, heldout_text(path), length=LENGTH, most=12 if short else None)
        half = len(text) // 2 if short else 2 * len(text) // 3
        self.layers = list(self.model.moe_layers)
        self.layer_bytes = [recipe.experts * recipe.expert_bytes for recipe in plan.layers]
        experts = max(recipe.experts for recipe in plan.layers)
        self.known = Seen(text[:half].flatten(), capture(self.model, self.public, text[:half]), experts)
        self.victim = text[half:]
        self.seen = Seen(self.victim.flatten(), capture(self.model, swarm, self.victim), experts)

    # --- attacks -------------------------------------------------------------------------------------

    def by_rows(self, layers: list[int], seen: Tensor | None = None) -> float:
        """Share of all tokens recovered from the rows of these layers, of which the worker got `seen` [n]."""
        right = self.seen.tokens
        hits = [guesses == right for guesses in self._guesses(tuple(layers))]
        return max(float((hit if seen is None else hit & seen).float().mean()) for hit in hits)

    def _guesses(self, layers: tuple[int, ...]) -> list[Tensor]:
        """What each attack says of every row of these layers; made once."""
        if layers not in self._made:
            train = torch.cat([self.known.rows(layer) for layer in layers], 1)
            test = torch.cat([self.seen.rows(layer) for layer in layers], 1)
            labels = self.known.tokens
            self._made[layers] = [
                nearest(train, labels, test),
                probe(train, labels, test, self.vocabulary),
            ]
        return self._made[layers]

    def by_ids(self, layers: list[int], part: slice = slice(None)) -> float:
        """The same from expert ids alone."""
        train = torch.cat([self.known.chosen(layer, part) for layer in layers], 1)
        test = torch.cat([self.seen.chosen(layer, part) for layer in layers], 1)
        scores = token_scores(train, self.known.tokens, test, self.vocabulary)
        return float((scores.argmax(1) == self.seen.tokens).float().mean())

    def guessing(self) -> float:
        """Share of tokens that are the attacker's most frequent one."""
        likely = torch.bincount(self.known.tokens).argmax()
        return float((self.seen.tokens == likely).float().mean())

    def by_part(self, layer: int, parts: int) -> tuple[float, float, float]:
        """A worker with the first of `parts` equal parts of a layer's experts: the share of tokens of which
        it sees the row, and what it recovers from rows and from ids."""
        part = slice(0, self.seen.experts // parts)
        seen = self.seen.chosen(layer, part).any(1)
        return float(seen.float().mean()), self.by_rows([layer], seen), self.by_ids([layer], part)

    def by_replay(self, layer: int) -> float:
        """Share of tokens recovered by trying tokens through the public model, from the rows of one layer."""
        texts, length = (1, 4) if self.short else (4, 12)
        rows = self.seen.rows(layer).view(len(self.victim), LENGTH, -1)
        train = torch.nn.functional.normalize(self.known.rows(layer), dim=-1)
        right = 0
        for number in range(texts):
            observed = rows[number, :length]

            def candidates(prefix: list[int], place: int, observed: Tensor = observed) -> Tensor:
                order = (train @ torch.nn.functional.normalize(observed[place], dim=0)).argsort(
                    descending=True
                )
                alike = self.known.tokens[order].tolist()
                by_look = list(dict.fromkeys(alike))[: CANDIDATES // 2]
                expected = self._expected(prefix) if prefix else torch.bincount(self.known.tokens).float()
                by_model = expected.argsort(descending=True)[: CANDIDATES // 2].tolist()
                return torch.tensor(list(dict.fromkeys([*by_look, *by_model])))

            found = replayed(
                observed, lambda prefix, tokens: self._rows_of(layer, prefix, tokens), candidates
            )
            right += sum(a == b for a, b in zip(found, self.victim[number].tolist(), strict=False))
        return right / (texts * length)

    def _expected(self, prefix: list[int]) -> Tensor:
        """The public model's logits after a prefix."""
        logits, _ = read(self.model, torch.tensor([prefix]), lambda keys: StepRouting(self.public, keys))
        return logits[0, -1]

    def _rows_of(self, layer: int, prefix: list[int], tokens: Tensor) -> Tensor:
        """The rows that the public model sends to a layer's experts for `prefix` and each of `tokens`."""
        texts = torch.cat(
            [torch.tensor(prefix, dtype=torch.int64).repeat(len(tokens), 1), tokens.unsqueeze(1)], 1
        )
        kept = capture(self.model, self.public, texts, rows=4096)
        return kept.layer(layer)[0].view(len(tokens), len(prefix) + 1, -1)[:, -1]

    def linked(self, layer: int, sessions: int) -> float:
        """Share of rows of a shuffled batch that are put back to their session."""
        width = self.known.rows(layer).shape[1]
        train = list(self.known.rows(layer).view(-1, LENGTH, width))
        test = list(self.seen.rows(layer).view(-1, LENGTH, width))
        return linked_share(train, test, min(sessions, len(test)), generator=torch.Generator().manual_seed(7))

    # --- costs ---------------------------------------------------------------------------------------

    def costs(self) -> list[float]:
        """CPU of a layer's experts over the CPU of everything else of a pass, for every MoE layer."""
        timed = _Timed(self.public)
        block = self.victim[: max(1, 1024 // LENGTH)]
        for _ in range(2):  # the second time all experts are in memory
            timed.spent = {}
            whole = time.thread_time()
            read(self.model, block, lambda keys: StepRouting(timed, keys))
            whole = time.thread_time() - whole
        rest = whole - sum(timed.spent.values())
        return [timed.spent[layer] / rest for layer in self.layers]

    # --- the report ----------------------------------------------------------------------------------

    def report(self) -> Report:
        """All attacks and mitigations."""
        layers, last = self.layers, self.layers[-1]
        rows = [self.by_rows([layer]) for layer in layers]
        ids = [self.by_ids([layer]) for layer in layers]
        parts = {parts: self.by_part(layers[0], parts) for parts in SHARES}
        replays = {layer: self.by_replay(layer) for layer in ({last} if self.short else {layers[0], last})}
        costs = self.costs()
        links = {
            (layer, sessions): self.linked(layer, sessions)
            for layer in (layers[0], last)
            for sessions in ((4,) if self.short else (8, 32))
        }
        figures: dict[str, object] = {
            "tokens": len(self.seen.tokens),
            "guessing": self.guessing(),
            **{f"rows_layer_{layer}": value for layer, value in zip(layers, rows, strict=True)},
            **{f"ids_layer_{layer}": value for layer, value in zip(layers, ids, strict=True)},
            "rows_first_half": self.by_rows(layers[: len(layers) // 2]),
            "rows_second_half": self.by_rows(layers[len(layers) // 2 :]),
            "rows_all": self.by_rows(layers),
            "ids_first_half": self.by_ids(layers[: len(layers) // 2]),
            "ids_second_half": self.by_ids(layers[len(layers) // 2 :]),
            "ids_all": self.by_ids(layers),
            **{f"rows_one_of_{count}": value[1] for count, value in parts.items()},
            **{f"replay_layer_{layer}": value for layer, value in replays.items()},
            **{f"linked_layer_{layer}_of_{n}": value for (layer, n), value in links.items()},
            **{f"local_cpu_layer_{layer}": value for layer, value in zip(layers, costs, strict=True)},
        }
        return Report(figures, self._tables(rows, ids, parts, costs), self._plot(figures, rows, ids))

    def _tables(
        self,
        rows: list[float],
        ids: list[float],
        parts: dict[int, tuple[float, float, float]],
        costs: list[float],
    ) -> list[str]:
        head = ["first MoE layers kept local", "best layer by rows", "by ids", "extra CPU", "memory, MB"]
        kept: list[list[object]] = [
            [
                number,
                max(rows[number:]),
                max(ids[number:]),
                sum(costs[:number]),
                sum(self.layer_bytes[:number]) / 1e6,
            ]
            for number in range(len(rows))
        ]
        lines = [*table(head, kept), ""]
        head = ["one wallet's part of the first layer", "sees rows of", "by rows", "by ids"]
        held: list[list[object]] = [[f"1 of {count}", *values] for count, values in parts.items()]
        return [*lines, *table(head, held), ""]

    def _plot(self, figures: dict[str, object], rows: list[float], ids: list[float]) -> str:
        names = [f"layer {layer}" for layer in self.layers]
        by_layer = Bars(
            "Tokens recovered by a worker that sees one layer",
            names,
            {"from rows": rows, "from ids alone": ids},
        )
        held = Bars(
            "Tokens recovered from rows by a worker that holds a part of the first layer",
            [f"1 of {count}" for count in SHARES],
            {"recovered": [float(str(figures[f"rows_one_of_{count}"])) for count in SHARES]},
        )
        replay = {key: float(str(value)) for key, value in figures.items() if key.startswith("replay")}
        tried = Bars(
            "Tokens recovered by trying tokens through the public model",
            [key.replace("replay_layer_", "from rows of layer ") for key in replay],
            {"recovered": list(replay.values())},
        )
        return page([by_layer, held, tried])


@dataclass(slots=True)
class _Timed:
    """A `Dispatcher` that sums the CPU seconds of each layer."""

    inner: LocalExperts
    spent: dict[int, float] = field(default_factory=dict)

    def dispatch(self, layer: int, *arguments: Any) -> Tensor:
        """See `Dispatcher.dispatch`."""
        started = time.thread_time()
        outputs = self.inner.dispatch(layer, *arguments)
        self.spent[layer] = self.spent.get(layer, 0.0) + time.thread_time() - started
        return outputs

"""A heterogeneous swarm with router authority and without it.

Each mix of nodes (`labs.mixes`) reads the held-out text, teacher-forced, beside an all-fp32 machine: once as
the product does, once with every owner routing for itself (`labs.unruled`). Then some mixes write texts,
greedily and by seeded sampling. Last, real daemons over real sessions serve requests. A decision is one
token, layer and mix.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from kvasir_backbone.auditing import References
from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.engine import Engine, EngineConfig, GenerationRequest
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.routing import StepRouting
from kvasir_backbone.seam import Dispatcher, RowKey

from . import Report, table
from .inprocess import Experts, InProcessSwarm, one_thread
from .mixes import BF16, BF16_BACKBONE, INT8, MIXES, WATCHED, Mix
from .residuals import Residuals, WatchedStep, watch_streams
from .scores import Score, first_difference, forked_share
from .svg import Bars, page
from .teacher import heldout_text, read, sequences
from .unruled import OwnRouters, UnruledModel, UnruledStep, router_of

LENGTH: Final = 256
"""Tokens of a sequence of held-out text."""
SEQUENCES: Final = 104
"""Sequences that every mix reads: over a million decisions in all."""
ROWS: Final = 2048
"""Rows of a pass."""
UNRULED_EVERY: Final = 2
"""The passes without authority read every second block."""
PROMPT: Final = 24
"""Tokens of a prompt."""
NEW: Final = 64
"""Tokens written after each."""
TEXTS: Final = 24
"""Texts that a mix writes each way."""
SHORT: Final = frozenset({INT8, BF16, BF16_BACKBONE, *WATCHED[:1]})
"""Mixes of the short form."""
KV_BYTES: Final = 256 << 20


@dataclass(slots=True)
class Outcome:
    """What one mix gave."""

    mix: Mix
    swarm: InProcessSwarm
    routers: OwnRouters
    ruled: Score = field(default_factory=Score)
    unruled: Score = field(default_factory=Score)
    forks: dict[str, float] = field(default_factory=dict)
    first_forks: list[int] = field(default_factory=list)


class Laboratory:
    """One checkpoint: the all-fp32 machine, the models by compute dtype, and every mix's swarm."""

    def __init__(self, path: Any, mixes: Sequence[Mix], *, length: int, most: int | None) -> None:
        self.checkpoint = Checkpoint.open(path)
        self.experts = Experts(self.checkpoint)
        self.models = {
            dtype: BackboneModel.load(self.checkpoint, dtype=dtype)
            for dtype in {m.dtype for m in mixes} | {"float32"}
        }
        self.references = {
            dtype: References(
                lambda precision, dtype=dtype: LocalExperts(  # type: ignore[misc]
                    self.checkpoint.read, self.experts.plan(dtype), cache_bytes=1 << 30, precision=precision
                )
            )
            for dtype in self.models
        }
        self.exact: Dispatcher = self.references["float32"].at("stored")
        self.tokens = sequences(self.models["float32"], heldout_text(path), length=length, most=most)
        self.outcomes = [self._outcome(mix) for mix in mixes]

    def close(self) -> None:
        """End the nodes' threads and close the checkpoint."""
        for outcome in self.outcomes:
            outcome.swarm.close()
        self.checkpoint.close()

    def _outcome(self, mix: Mix) -> Outcome:
        swarm = InProcessSwarm(self.experts, mix.nodes, wire_dtype=mix.wire_dtype)
        return Outcome(mix, swarm, OwnRouters(self.models[mix.dtype], swarm))

    def read_all(self, rows: int) -> None:
        """Every mix reads the held-out text beside the all-fp32 machine."""
        model = self.models["float32"]
        for number, block in enumerate(self.tokens.split(max(1, rows // self.tokens.shape[1]))):
            reference, chosen = read(model, block, lambda keys: StepRouting(self.exact, keys))
            for outcome in self.outcomes:
                self._read_block(outcome, block, reference, chosen, unruled=number % UNRULED_EVERY == 0)

    def _read_block(
        self, outcome: Outcome, block: Tensor, reference: Tensor, chosen: Tensor, *, unruled: bool
    ) -> None:
        model, swarm = self.models[outcome.mix.dtype], outcome.swarm
        logits, ids = read(model, block, lambda keys: StepRouting(swarm, keys))
        outcome.ruled.add(block, logits, reference, ids, chosen)
        if not unruled:
            return
        logits, ids = read(model, block, lambda keys: UnruledStep(swarm, keys, routers=outcome.routers))
        outcome.unruled.add(block, logits, reference, ids, chosen)

    def write_all(self, texts: int, new: int) -> None:
        """The mixes with `texts` write, each way, greedily and sampled; forks against the ruled swarm."""
        prompts = [row[:PROMPT].tolist() for row in self.tokens[:texts]]
        for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            exact = self._write(self.models["float32"], self.exact, prompts, new, temperature)
            for outcome in self.outcomes:
                if not outcome.mix.texts:
                    continue
                model = self.models[outcome.mix.dtype]
                ruled = self._write(model, outcome.swarm, prompts, new, temperature)
                unruled_model = UnruledModel.of(model, outcome.routers)
                unruled = self._write(unruled_model, outcome.swarm, prompts, new, temperature)
                outcome.forks[way] = forked_share(unruled, ruled)
                outcome.forks[f"{way} from fp32"] = forked_share(ruled, exact)
                places = [first_difference(a, b) for a, b in zip(unruled, ruled, strict=True)]
                outcome.first_forks += [place for place in places if place is not None]

    @staticmethod
    def _write(
        model: BackboneModel, dispatcher: Dispatcher, prompts: Sequence[Sequence[int]], new: int,
        temperature: float,
    ) -> list[list[int]]:  # fmt: skip
        """The tokens that follow each prompt, all requests at once through the product's engine."""

        async def one(engine: Engine, number: int) -> list[int]:
            request = GenerationRequest(
                prompts[number], new, temperature=temperature, seed=number, ignore_eos=True, metered=False
            )
            return [token.id async for token in engine.submit(request)]

        async def everyone() -> list[list[int]]:
            async with Engine(model, EngineConfig(kv_bytes=KV_BYTES)) as engine:
                return list(await asyncio.gather(*(one(engine, n) for n in range(len(prompts)))))

        model.dispatcher = dispatcher
        return asyncio.run(asyncio.wait_for(everyone(), 300))

    def watch(self, rows: int) -> Residuals:
        """Recompute every reply of the watched mixes on the first rows of the text."""
        residuals = Residuals()
        block = self.tokens[: max(1, rows // self.tokens.shape[1])]
        for outcome in self.outcomes:
            if outcome.mix.name not in WATCHED:
                continue
            model, swarm = self.models[outcome.mix.dtype], outcome.swarm
            references = self.references[outcome.mix.dtype]

            def step(keys: Sequence[RowKey], swarm: Any = swarm, references: Any = references) -> StepRouting:
                return WatchedStep(swarm, keys, swarm=swarm, references=references, residuals=residuals)

            undo = watch_streams(model.model, residuals)
            try:
                read(model, block, step)
            finally:
                undo()
        return residuals

    def router_share(self, rows: int) -> float:
        """CPU time of the routers over that of whole passes with all experts here; one thread."""
        model = self.models["float32"]
        spent, started = 0.0, 0.0

        def begin(*_: Any) -> None:
            nonlocal started
            started = time.thread_time()

        def end(*_: Any) -> None:
            nonlocal spent
            spent += time.thread_time() - started

        handles = []
        for layer in model.moe_layers:
            router = router_of(model.model, layer)
            handles += [router.register_forward_pre_hook(begin), router.register_forward_hook(end)]
        block = self.tokens[: max(1, rows // self.tokens.shape[1])]
        whole = time.thread_time()
        for _ in range(3):
            read(model, block, lambda keys: StepRouting(self.exact, keys))
        whole = time.thread_time() - whole
        for handle in handles:
            handle.remove()
        return spent / whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of its own."""
    parser.add_argument("--no-network", action="store_true", help="leave out the real daemons")


def run(options: argparse.Namespace) -> Report:
    """Measure; see the module docstring."""
    one_thread()
    path = options.model or bundled_model_path()
    mixes = tuple(mix for mix in MIXES if not options.short or mix.name in SHORT)
    length = 64 if options.short else LENGTH
    lab = Laboratory(path, mixes, length=length, most=8 if options.short else SEQUENCES)
    try:
        return _measure(lab, options)
    finally:
        lab.close()


def _measure(lab: Laboratory, options: argparse.Namespace) -> Report:
    lab.read_all(512 if options.short else ROWS)
    lab.write_all(4 if options.short else TEXTS, 12 if options.short else NEW)
    residuals = lab.watch(128 if options.short else 1024)
    share = lab.router_share(128 if options.short else 1024)
    network: dict[str, int] = {"decisions": 0, "mismatches": 0}
    if not options.no_network:
        from .network import serve_and_count

        network = serve_and_count(
            lab.checkpoint.path, requests=2 if options.short else 12, new=8 if options.short else 48
        )
    return report(lab.outcomes, residuals, share, network)


def report(
    outcomes: Sequence[Outcome], residuals: Residuals, router_share: float, network: dict[str, int]
) -> Report:
    """The figures of all mixes together, a table of each, and the plot."""
    by_name = {outcome.mix.name: outcome for outcome in outcomes}
    decisions = sum(outcome.swarm.decisions for outcome in outcomes) + network["decisions"]
    mismatches = sum(outcome.swarm.mismatches for outcome in outcomes) + network["mismatches"]
    own = sum(outcome.routers.decisions for outcome in outcomes)
    forks = [f for o in outcomes for way, f in o.forks.items() if way in ("greedy", "sampled")]
    places = sorted(place for outcome in outcomes for place in outcome.first_forks)
    bf16, int8, whole = (by_name[name].ruled for name in (BF16, INT8, BF16_BACKBONE))
    figures: dict[str, object] = {
        "decisions": decisions,
        "with_authority_mismatches": mismatches,
        "network_decisions": network["decisions"],
        "without_authority_decisions": own,
        "without_authority_mismatch_share": sum(o.routers.differing for o in outcomes) / own,
        "forked_share": sum(forks) / len(forks),
        "median_first_divergent_token": places[len(places) // 2] if places else None,
        "top1_bf16": bf16.top1,
        "top1_int8": int8.top1,
        "perplexity_change_bf16": bf16.perplexity_change,
        "perplexity_change_int8": int8.perplexity_change,
        "top1_bf16_backbone": whole.top1,
        "perplexity_change_bf16_backbone": whole.perplexity_change,
        "bit_equal_share": residuals.bit_equal / residuals.replies,
        "within_tolerance_share": residuals.within / residuals.replies,
        "worst_d": residuals.worst,
        "expert_error": residuals.expert / residuals.replies,
        "combined_error": residuals.combined / residuals.combines,
        "stream_error": residuals.stream / residuals.combines,
        "router_cpu_share": router_share,
        "mixes": [_mix_figures(outcome) for outcome in outcomes],
    }
    return Report(figures, _tables(outcomes), _plot(outcomes))


def _mix_figures(outcome: Outcome) -> dict[str, object]:
    routers = outcome.routers
    found: dict[str, object] = {
        "mix": outcome.mix.name,
        "decisions": outcome.swarm.decisions,
        "with_authority_mismatches": outcome.swarm.mismatches,
        "without_authority_mismatch_share": routers.differing / routers.decisions,
        "absent_experts": routers.absent / routers.decisions,
        "extra_experts": routers.extra / routers.decisions,
        "forks": outcome.forks,
    }
    for name, score in (("with", outcome.ruled), ("without", outcome.unruled)):
        found[name] = {
            "choices_not_fp32s": score.choices,
            "choices_not_fp32s_by_layer": [count / score.tokens for count in score.differing],
            "tokens_with_a_difference": score.touched / score.tokens,
            "sequences_with_a_difference": sum(place is not None for place in score.first) / len(score.first),
            "median_first_token": _median([place for place in score.first if place is not None]),
            "top1": score.top1,
            "kl": score.mean_kl,
            "perplexity": score.perplexity,
            "perplexity_change": score.perplexity_change,
        }
    return found


def _median(values: Sequence[int]) -> int | None:
    return sorted(values)[len(values) // 2] if values else None


def _tables(outcomes: Sequence[Outcome]) -> list[str]:
    head = ["executed against decided", "decisions", "wrong with", "wrong without", "absent", "extra"]
    rows: list[list[object]] = []
    for o in outcomes:
        r = o.routers
        counts = [r.differing / r.decisions, r.absent / r.decisions, r.extra / r.decisions]
        rows.append([o.mix.name, o.swarm.decisions, o.swarm.mismatches, *counts])
    lines = [*table(head, rows), ""]
    head = ["against an all-fp32 machine", "choices", "tokens", "top-1", "KL", "ppl change"]
    for title, name in (("with authority", "ruled"), ("without authority", "unruled")):
        rows = []
        for o in outcomes:
            s: Score = getattr(o, name)
            rows.append([o.mix.name, s.choices, s.touched / s.tokens, s.top1, s.mean_kl, s.perplexity_change])
        lines += [title, *table(head, rows), ""]
    head = ["texts", "greedy forks", "sampled forks", "ruled from fp32: greedy", "sampled", "median first"]
    rows = [
        [
            o.mix.name,
            *(o.forks[w] for w in ("greedy", "sampled", "greedy from fp32", "sampled from fp32")),
            str(_median(o.first_forks)),
        ]
        for o in outcomes
        if o.forks
    ]
    return [*lines, *table(head, rows), ""]


def _plot(outcomes: Sequence[Outcome]) -> str:
    """Two panels of bars: routing mismatches and forked texts, with and without."""
    mismatch = Bars(
        "Decisions whose executed experts are not the decided ones",
        [o.mix.name for o in outcomes],
        {
            "without authority": [o.routers.differing / o.routers.decisions for o in outcomes],
            "with authority": [o.swarm.mismatches / max(1, o.swarm.decisions) for o in outcomes],
        },
    )
    writing = [o for o in outcomes if o.forks]
    forks = Bars(
        "Texts that leave the swarm's own text when owners route for themselves",
        [o.mix.name for o in writing],
        {
            "greedy": [o.forks["greedy"] for o in writing],
            "sampled": [o.forks["sampled"] for o in writing],
        },
    )
    layers = Bars(
        "The backbone's choices that an all-fp32 machine would not make (with authority)",
        [o.mix.name for o in outcomes],
        {
            f"layer {number}": [o.ruled.differing[number] / o.ruled.tokens for o in outcomes]
            for number in range(len(outcomes[0].ruled.differing))
        },
    )
    return page([mismatch, forks, layers])

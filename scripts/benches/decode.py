"""Decoding through a swarm against stock transformers on this machine: one stream, and eight at once.

Two models: the bundled one, and a random one of 24 layers with 256 experts. A backbone and two nodes, each a
process, in fp32, drafting off; stock holds the whole model in one process and is given its fastest form: each
experts implementation on one thread and on two is tried first, for one stream and for a batch of eight on
their own. Then both write in turns; rates count from the first token of all to the last, so that no prompt is
in them. Every text is compared with stock's by the rule of `kvasir_backbone.equality`.

Run as a module (`python -m benches.decode MODEL`) it is the stock process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _processes import Children, Failed
from _sizing import Cut
from _swarm import DEADLINE_S, LocalSwarm, cut_of

from . import Report
from .call import Talker
from .checkpoint import Shape, shape_argument
from .clients import Stream, session, stream
from .process import in_child
from .statistic import Pair, interval, ratio

SHAPE: Final = Shape(
    layers=24, experts=256, top_k=8, hidden=256, expert_width=64, heads=4, kv_heads=2, head_dim=64
)
NODES, STREAMS = 2, 8
PROMPT_TOKENS, TOKENS = 16, 64
TRIAL_TOKENS = 12
PAIRS = 7
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@dataclass(slots=True)
class Found:
    """What one model gave: (ours, stock) in tokens a second for one stream and for eight, and the texts."""

    name: str
    one: list[Pair]
    many: list[Pair]
    best: dict[int, str]
    texts: list[tuple[list[int], list[int], list[int]]]
    """(prompt, ours, stock's)."""
    profile: dict[int, dict[str, float]]
    verdicts: list[dict[str, Any]]
    audit_cpu_share: float


def run(work_dir: Path | None) -> Report:
    """Measure both models; some minutes."""
    from kvasir_backbone.bundled import bundled_model_path

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-decode-", dir=work_dir)))
        random_model = (work_dir or folder) / "decode-model"
        if not (random_model / "model.safetensors.index.json").exists():
            in_child("checkpoint", str(random_model), shape_argument(SHAPE))
        found = [
            measure("bundled", bundled_model_path(), folder),
            measure("random", random_model, folder),
        ]
    return report_of(found)


def measure(name: str, model: Path, folder: Path) -> Found:
    """One model: a swarm and a stock process, in turns."""
    place = folder / name
    place.mkdir()
    with Children(place) as children, Talker("stock", sys.executable, "-m", "benches.decode", model) as stock:
        swarm = start(place, children, model)
        status = swarm.ask("status")
        assert stock.hear() == "ready"
        best = {count: fastest(stock, status, count) for count in (1, STREAMS)}
        found = Found(name, [], [], {}, [], {}, [], 0.0)
        spent = Spent(swarm)
        for count, pairs in ((1, found.one), (STREAMS, found.many)):
            experts, threads = best[count]
            found.best[count] = f"{experts}, {threads} thread(s)"
            before = swarm.ask("status")
            for turn in range(PAIRS):
                prompts = prompts_of(status, count, turn)
                theirs = stock.ask(
                    {"prompts": prompts, "tokens": TOKENS, "experts": experts, "threads": threads}
                )
                ours = asyncio.run(write(status, prompts))
                pairs.append((together(ours), theirs["rate"]))
                found.texts += zip(prompts, (text.token_ids for text in ours), theirs["texts"], strict=True)
            found.profile[count] = profile(before, swarm.ask("status"))
        found.audit_cpu_share = spent.audit_share()
        found.verdicts = stock.ask({"compare": found.texts})
    return found


def start(folder: Path, children: Children, model: Path) -> LocalSwarm:
    """A backbone and two nodes that hold half of the layers each, proven."""
    swarm = LocalSwarm(folder, children, lambda text: None)
    cut = cut_of(model, NODES) if model.name != "decode-model" else halves()
    status = swarm.start_backbone(model, cut, more=["--drafting", "off"])
    swarm.start_nodes(NODES, status["join"], None if cut is None else cut.budget)
    children.wait_for("an owner of every window", swarm.covered, timeout=DEADLINE_S)
    return swarm


def halves() -> Cut:
    """The random model in windows of half its layers."""
    size = SHAPE.layers // NODES * SHAPE.experts * 3 * SHAPE.hidden * SHAPE.expert_width * 2
    return Cut(size, (), size + size // 4)


class Spent:
    """CPU time of a backbone since this was made, and its audits' part of it."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self._swarm = swarm
        self._before = self._now()

    def audit_share(self) -> float:
        """The audit thread's share of the process's CPU time."""
        audits, whole = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return audits / whole if whole else 0.0

    def _now(self) -> tuple[float, float]:
        import psutil

        times = psutil.Process(self._swarm.children.pid("backbone")).cpu_times()
        return self._swarm.ask("status")["dispatch"]["audits"]["cpu_s"], times.user + times.system


def prompts_of(status: dict[str, Any], count: int, turn: int) -> list[list[int]]:
    """Prompts of one length, so that stock needs no padding."""
    rng = random.Random(1_000 * count + turn)
    return [[rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def write(status: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[Stream]:
    """Our texts, all asked for at once."""
    async with session() as http:
        asked = [stream(http, status["url"], status["model"], list(ids), TOKENS) for ids in prompts]
        found = await asyncio.gather(*asked)
    for text in found:
        if not text.complete:
            raise Failed(f"a text failed: {text.status} {text.error}")
    return list(found)


def together(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams, from when the last has begun until the first ends."""
    begin = max(text.times[0] for text in streams)
    end = min(text.times[-1] for text in streams)
    if end <= begin:
        raise Failed("the first stream ended before the last one began")
    return sum(begin < at <= end for text in streams for at in text.times) / (end - begin)


def fastest(stock: Talker, status: dict[str, Any], count: int) -> tuple[str, int]:
    """The experts implementation and number of threads with which stock is fastest."""
    rates = {}
    for name in IMPLEMENTATIONS:
        for threads in range(1, min(2, os.cpu_count() or 1) + 1):
            asked = {"prompts": prompts_of(status, count, 99), "experts": name, "threads": threads}
            stock.ask(asked | {"tokens": 3})
            rates[name, threads] = stock.ask(asked | {"tokens": TRIAL_TOKENS})["rate"]
    return max(rates, key=lambda key: rates[key])


def profile(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a step: in all, in dispatches, of which devices computed. Steps of two threads overlap."""

    def grown(part: str, name: str) -> float:
        return float(after[part][name] - before[part][name])

    steps = max(1.0, grown("engine", "steps"))
    return {
        "dispatch_ms": 1e3 * grown("dispatch", "seconds") / steps,
        "devices_ms": 1e3 * grown("dispatch", "service_s") / steps,
        "rows": grown("engine", "rows") / steps,
        "calls": grown("dispatch", "calls") / steps,
    }


# --- the report ---------------------------------------------------------------------------------------


def report_of(found: Sequence[Found]) -> Report:
    """Figures, the table, and whether the promises hold."""
    report = Report({})
    for name, pairs_of in (
        ("one_stream_vs_stock", {each.name: each.one for each in found}),
        ("eight_streams_vs_stock_batch", {each.name: each.many for each in found}),
    ):
        ratios = {model: round(ratio(pairs), 3) for model, pairs in pairs_of.items()}
        report.figures[name] = min(ratios.values())
        for model, pairs in pairs_of.items():
            report.figures[f"{name}_{model}"] = ratios[model]
            report.figures[f"{name}_{model}_interval"] = interval(ratio, pairs)
    verdicts = [verdict for each in found for verdict in each.verdicts]
    report.figures["outputs_equal"] = all(verdict["matches"] for verdict in verdicts)
    report.figures["texts"] = len(verdicts)
    report.figures["near_ties"] = sum("near-tie" in verdict["reason"] for verdict in verdicts)
    report.figures["audit_cpu_share"] = round(max(each.audit_cpu_share for each in found), 4)
    report.findings = [line for each in found for line in table(each)]
    report.findings += [verdict["reason"] for verdict in verdicts if not verdict["matches"]][:5]
    for name, bound in (("one_stream_vs_stock", 1.0), ("eight_streams_vs_stock_batch", 0.9)):
        value = report.figures[name]
        assert isinstance(value, float)
        report.promise(f"{name} {value} >= {bound:g}", value >= bound)
    report.promise("all texts are stock's", report.figures["outputs_equal"] is True)
    return report


def table(found: Found) -> list[str]:
    """Two lines for one model: rates, and where a step's time goes."""
    lines = []
    for count, pairs in ((1, found.one), (STREAMS, found.many)):
        ours, stock = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        step, parts = 1e3 * count / ours, found.profile[count]
        lines.append(
            f"{found.name}, {count} stream(s): {ours:.1f} tokens/s, stock {stock:.1f} ({found.best[count]}); "
            f"a token of each in {step:.2f} ms; a step of {parts['rows']:.1f} rows is "
            f"{parts['dispatch_ms']:.2f} ms in {parts['calls']:.1f} calls, of which the nodes computed "
            f"{parts['devices_ms']:.2f} ms"
        )
    return lines


# --- the stock process --------------------------------------------------------------------------------


class Clock:
    """Notes when each step of `generate` ends; a stopping criterion that never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Called by transformers after each token."""
        import torch

        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def stock(folder: Path) -> None:
    """Load the model, and answer each line of the input with texts and their rate, or with comparisons."""
    import torch

    from kvasir_backbone.equality import compare_greedy, load_stock

    model = load_stock(folder)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "compare" in asked:
            torch.set_num_threads(1)
            compared = [compare_greedy(model, *texts) for texts in asked["compare"]]
            answer: Any = [{"matches": each.matches, "reason": each.reason} for each in compared]
        else:
            torch.set_num_threads(asked["threads"])
            model.set_experts_implementation(asked["experts"])
            answer = generate(model, asked["prompts"], asked["tokens"])
        print(json.dumps(answer), flush=True)


def generate(model: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy texts of one batch by stock `generate`, and tokens a second after the first."""
    import torch
    from transformers import StoppingCriteriaList

    clock, ids = Clock(), torch.tensor(prompts)
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    seconds = clock.times[-1] - clock.times[0]
    return {"texts": made[:, ids.shape[1] :].tolist(), "rate": len(prompts) * (tokens - 1) / seconds}


if __name__ == "__main__":
    stock(Path(sys.argv[1]))

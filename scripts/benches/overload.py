"""Overload: ten times the load that a swarm can take, and what those notice who are let in.

A backbone and two nodes, each a process, write texts of the bundled model for clients in this process.
First the capacity is measured: requests' worth of tokens a second with more clients than places. Then they
arrive at random (a Poisson process) whether or not earlier ones have ended: at half the capacity,
which counts as unloaded, and at ten times the capacity. Compared are the 99th percentiles of those that were
let in, of the time to the first token and of the time between tokens; the worse of the two ratios counts. The
growth of the backbone's memory is the most it had during the overload against what it had just before.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp
import psutil
from _processes import Children, Failed
from _swarm import DEADLINE_S, LocalSwarm, cut_of

from . import Report
from .clients import Stream, percentile, session, stream

NODES = 2
TOKENS = 32
PROMPT_CHARACTERS = 80
WARM_S = 8.0
CAPACITY_S = 15.0
PHASE_S = 30.0
CLIENTS = 32
FACTOR = 10
PAUSE_S = 1.0
"""When a refused client asks again while the capacity is measured: what Retry-After says at least."""
MAX_RATIO, MAX_GROWTH = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """The API, its model, and texts to begin prompts with."""

    url: str
    model: str
    corpus: str

    def prompt(self, rng: Random) -> str:
        """A prompt that differs from request to request."""
        start = rng.randrange(len(self.corpus) - PROMPT_CHARACTERS)
        return self.corpus[start : start + PROMPT_CHARACTERS]


def run(work_dir: Path | None) -> Report:
    """Measure, and compare with the promised figures."""
    from kvasir_backbone.bundled import bundled_model_path

    model = bundled_model_path()
    corpus = (model / "heldout.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="kvasir-overload-", dir=work_dir) as name:
        folder = Path(name)
        with Children(folder) as children:
            swarm = LocalSwarm(folder, children, lambda text: None)
            cut = cut_of(model, NODES)
            status = swarm.start_backbone(model, cut)
            swarm.start_nodes(NODES, status["join"], None if cut is None else cut.budget)
            children.wait_for("a proven owner of every window", swarm.covered, timeout=DEADLINE_S)
            target = Target(status["url"], status["model"], corpus)
            return asyncio.run(_measure(target, psutil.Process(children.pid("backbone"))))


async def _measure(target: Target, backbone: psutil.Process) -> Report:
    rng = Random(5)
    async with session() as http:
        await _saturate(http, target, rng, WARM_S)
        capacity = await _saturate(http, target, rng, CAPACITY_S)
        unloaded = await _arrivals(http, target, rng, capacity / 2, PHASE_S)
        before = backbone.memory_info().rss
        watch = asyncio.create_task(_most_rss(backbone))
        overloaded = await _arrivals(http, target, rng, capacity * FACTOR, PHASE_S)
        watch.cancel()
        most = max(await watch)
    return _report(capacity, unloaded, overloaded, most / before - 1)


async def _saturate(http: aiohttp.ClientSession, target: Target, rng: Random, seconds: float) -> float:
    """Requests' worth of tokens a second while more clients ask than there are places."""
    end = time.monotonic() + seconds

    async def client() -> list[Stream]:
        mine = []
        while time.monotonic() < end:
            one = await stream(http, target.url, target.model, target.prompt(rng), TOKENS)
            mine.append(one)
            if not one.complete:
                await asyncio.sleep(PAUSE_S)
        return mine

    start = time.monotonic()
    everyone = await asyncio.gather(*(client() for _ in range(CLIENTS)))
    asked = [one for mine in everyone for one in mine]
    if not any(one.complete for one in asked):
        raise Failed(f"not one text of {len(asked)} came whole: {asked[0].status} {asked[0].error}")
    tokens = sum(at <= end for one in asked for at in one.times)
    return tokens / TOKENS / (end - start)


async def _arrivals(
    http: aiohttp.ClientSession, target: Target, rng: Random, rate: float, seconds: float
) -> list[Stream]:
    """Requests at random times, `rate` a second on average; all of them once they ended."""
    tasks: list[asyncio.Task[Stream]] = []
    at = start = time.monotonic()
    while (at := at + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.create_task(stream(http, target.url, target.model, target.prompt(rng), TOKENS)))
    return list(await asyncio.gather(*tasks))


async def _most_rss(process: psutil.Process) -> list[int]:
    """Resident bytes of the process, sampled until cancelled."""
    samples = [process.memory_info().rss]
    try:
        while True:
            samples.append(process.memory_info().rss)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return samples


def _report(
    capacity: float, unloaded: Sequence[Stream], overloaded: Sequence[Stream], rss_growth: float
) -> Report:
    calm, full = _waits(unloaded), _waits(overloaded)
    ratios = [b / a for a, b in zip(calm, full, strict=True)]
    worst = max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
    refused = [one for one in overloaded if one.status == 429]
    broken = Counter(one.error for one in [*unloaded, *overloaded] if not one.complete and one.status != 429)
    report = Report(
        {
            "p99_vs_unloaded": round(worst, 3),
            "refused_429": len(refused),
            "rss_growth": round(rss_growth, 4),
            "capacity_per_s": round(capacity, 2),
            "tokens": TOKENS,
            "unloaded_accepted": sum(one.complete for one in unloaded),
            "unloaded_refused": sum(one.status == 429 for one in unloaded),
            "overloaded_asked": len(overloaded),
            "overloaded_accepted": sum(one.complete for one in overloaded),
            "failed": sum(broken.values()),
            "first_token_p99_ms": [round(1000 * waits[0], 1) for waits in (calm, full)],
            "between_tokens_p99_ms": [round(1000 * waits[1], 1) for waits in (calm, full)],
            "first_token_p50_ms": [round(1000 * waits[2], 1) for waits in (calm, full)],
            "between_tokens_p50_ms": [round(1000 * waits[3], 1) for waits in (calm, full)],
        }
    )
    report.promise(f"p99 of the accepted is at most {MAX_RATIO} x unloaded", worst <= MAX_RATIO)
    report.promise("who is not let in is told 429, with a time", bool(refused) and all(
        one.retry_after for one in refused
    ))  # fmt: skip
    report.promise(f"the backbone grows by less than {MAX_GROWTH:.0%}", rss_growth < MAX_GROWTH)
    report.promise("no request fails", not broken)
    report.findings += [f"        {count} x {error}" for error, count in broken.most_common(5)]
    return report


def _waits(streams: Sequence[Stream]) -> list[float]:
    """Of those that were let in: p99 of the first token and between tokens, then the medians; seconds."""
    first = [one.first_s for one in streams if one.complete]
    gaps = [gap for one in streams if one.complete for gap in one.gaps]
    return [percentile(values, share) for share in (0.99, 0.5) for values in (first, gaps)]

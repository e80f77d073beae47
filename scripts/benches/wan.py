"""A swarm behind home links: 30 ms round trip by a user-space delay proxy, and 20 Mbit/s of upload a node.

The model has 48 layers of hidden size 256 with random weights; a token crosses the link once a layer, so one
stream can give at most 1 / (48 x round trip) tokens a second without drafting. The round trip is measured
through the proxy in the same run. Many streams fill the waits: their sum is bounded by processors, or by
what the nodes can upload: per token, 8 output rows a layer (ids-only) or one partial sum a layer and node
(weighted).

Everything runs on this machine in processes of its own: backbone, two nodes, one proxy for each node.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from _processes import Children, Failed
from _sizing import Cut
from _swarm import LocalSwarm

from . import Report
from .checkpoint import Shape, shape_argument
from .clients import Stream, session, stream
from .process import in_child

ROUND_TRIP_S: Final = 0.030
UPLOAD: Final = 20e6 / 8
"""Bytes a second."""

SHAPE: Final = Shape(
    layers=48, experts=64, top_k=8, hidden=256, expert_width=32, heads=4, kv_heads=2, head_dim=64
)
DTYPE: Final = "float32"
ROW_BYTES: Final = SHAPE.hidden * 4
NODES: Final = 2

ALONE_TOKENS: Final = 16
DRAFTED_TOKENS: Final = 96
STREAMS: Final = 256
STREAM_TOKENS: Final = 32
STEP_THREADS: Final = 4
UPLINK_STREAMS: Final = {"ids_only": 48, "weighted": 128}
UPLINK_TOKENS: Final = 10
LONG_PROMPT: Final = 512
REQUEST_S: Final = 600.0
"""How long a text may take at most."""

SEGMENT: Final = 8
"""Tokens of the piece of text that repeats itself in the drafting part."""


def run(work_dir: Path | None) -> Report:
    """Measure all of it; some five minutes."""
    with working_folder(work_dir) as folder:
        model = folder / "model"
        if not model.is_dir():
            in_child("checkpoint", str(model), shape_argument(SHAPE))
        figures: dict[str, object] = {"round_trip_ms": round(1e3 * round_trip(), 2)}
        limit = 1e3 / (SHAPE.layers * float(str(figures["round_trip_ms"])))
        figures["one_stream_limit_tokens_per_s"] = round(limit, 4)
        figures.update(latency_bound(folder / "far", model, limit))
        for mode in ("ids_only", "weighted"):
            figures.update(upload_bound(folder / mode, model, mode))
    ratios = [float(str(figures[f"uplink_vs_limit_{mode}"])) for mode in ("ids_only", "weighted")]
    figures["uplink_vs_limit"] = min(ratios)
    report = Report(figures)
    for name, bound in (
        ("one_stream_vs_limit", 0.9),
        ("drafting_vs_limit", 2.0),
        ("aggregate_tokens_per_s", 100.0),
        ("uplink_vs_limit", 0.8),
    ):
        value = float(str(figures[name]))
        report.promise(f"{name} {value} >= {bound}", value >= bound)
    return report


# --- the three parts ---------------------------------------------------------------------------------


def latency_bound(folder: Path, model: Path, limit: float) -> dict[str, object]:
    """One stream without and with drafting, then many streams."""
    whole_layers = layer_cut(SHAPE.layers // NODES)
    with swarm(folder, model, whole_layers, ROUND_TRIP_S, 0.0, ["--drafting", "off"]) as place:
        alone = place.ask([prompt(1, 16)], ALONE_TOKENS)[0]
    with swarm(folder, model, whole_layers, ROUND_TRIP_S, 0.0, ["--drafting", "auto"]) as place:
        drafted = place.ask([prompt(1, SEGMENT) * 6], DRAFTED_TOKENS)[0]
        trips = place.status()["engine"]
    # A weighted swarm: a node holds whole layers, so that its answer is one row a row instead of eight.
    more = ["--drafting", "off", "--weighted", "--step-threads", str(STEP_THREADS)]
    with swarm(folder, model, whole_layers, ROUND_TRIP_S, 0.0, more) as place:
        many = place.ask([prompt(seed, 8) for seed in range(STREAMS)], STREAM_TOKENS)
    return {
        "one_stream_tokens_per_s": round(alone.tokens_per_s, 4),
        "one_stream_vs_limit": round(alone.tokens_per_s / limit, 3),
        "drafting_tokens_per_s": round(drafted.tokens_per_s, 3),
        "drafting_vs_limit": round(drafted.tokens_per_s / limit, 2),
        "drafting_tokens_per_trip": round(float(trips["tokens_per_trip"]), 2),
        "drafting_text_period": period(drafted.token_ids),
        "aggregate_tokens_per_s": round(together(many), 1),
        "aggregate_swarm": f"weighted, {STREAMS} streams, {STEP_THREADS} step threads",
    }


def upload_bound(folder: Path, model: Path, mode: str) -> dict[str, object]:
    """Many streams, then one long prompt, where each node uploads at most `UPLOAD` bytes a second."""
    more = ["--drafting", "off", "--step-threads", str(STEP_THREADS)]
    more += ["--weighted"] if mode == "weighted" else []
    # Each layer's experts on both nodes, so that both upload at the same time.
    with swarm(folder, model, expert_cut(NODES), ROUND_TRIP_S, UPLOAD, more) as place:
        long = place.ask([prompt(7, LONG_PROMPT)], 1)[0]
        count = UPLINK_STREAMS[mode]
        many = place.ask([prompt(seed, 4) for seed in range(count)], UPLINK_TOKENS)
        shares = place.shares()
    rows = SHAPE.top_k * max(shares) if mode == "ids_only" else 1.0
    most = UPLOAD / (SHAPE.layers * rows * ROW_BYTES)
    reached = together(many)
    return {
        f"uplink_streams_{mode}": count,
        f"uplink_limit_tokens_per_s_{mode}": round(most, 2),
        f"uplink_tokens_per_s_{mode}": round(reached, 2),
        f"uplink_vs_limit_{mode}": round(reached / most, 3),
        f"first_token_512_s_{mode}": round(long.first_s, 2),
    }


def together(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams, from when all of them have begun until the first ends."""
    start = max(text.times[0] for text in streams)
    end = min(text.times[-1] for text in streams)
    if end <= start:
        raise Failed("the first stream ended before the last one began: give them more tokens")
    return sum(start < at <= end for text in streams for at in text.token_times) / (end - start)


def period(ids: Sequence[int]) -> int:
    """The shortest period of the second half of a text; 0 if it has none."""
    half = ids[len(ids) // 2 :]
    return next((p for p in range(1, len(half) // 2 + 1) if half[p:] == half[:-p]), 0)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of a prompt."""
    rng = random.Random(seed)
    return [rng.randrange(10, SHAPE.vocabulary) for _ in range(tokens)]


# --- the swarm ---------------------------------------------------------------------------------------


def _window(experts: int, layers: int) -> int:
    return layers * experts * 3 * SHAPE.hidden * SHAPE.expert_width * 2


def layer_cut(layers: int) -> Cut:
    """Windows of so many whole layers, one for each node."""
    size = _window(SHAPE.experts, layers)
    return Cut(size, (), size + size // 8)


def expert_cut(parts: int) -> Cut:
    """Each layer cut into `parts` windows; a node has room for its share of all and a few more."""
    size = _window(SHAPE.experts // parts, 1)
    return Cut(size, (), size * (SHAPE.layers + 3))


class Place:
    """A running swarm and how to ask it."""

    def __init__(self, swarm: LocalSwarm, url: str, model: str) -> None:
        self._swarm, self._url, self._model = swarm, url, model

    def status(self) -> dict[str, Any]:
        """What the backbone says to its operator."""
        return self._swarm.ask("status")

    def shares(self) -> list[float]:
        """The share of all experts that each node is the only owner of, at least; they add up to 1."""
        owners: dict[str, list[str]] = {}
        for node in self._swarm.ask("nodes")["nodes"]:
            for window in node["windows"]:
                owners.setdefault(window, []).append(node["device"])
        devices = sorted({device for holders in owners.values() for device in holders})
        held = {device: 0.0 for device in devices}
        for holders in owners.values():
            for device in holders:
                held[device] += 1 / len(holders) / len(owners)
        return list(held.values())

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Stream]:
        """Complete all prompts at once."""
        return asyncio.run(_ask_all(self._url, self._model, prompts, tokens))


@contextmanager
def swarm(
    folder: Path, model: Path, cut: Cut, round_trip_s: float, upload: float, more: Sequence[str]
) -> Iterator[Place]:
    """A backbone, and nodes that reach it through proxies only. Their states lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        children = stack.enter_context(Children(folder))
        port = free_port()
        proxies = [stack.enter_context(proxy(port, round_trip_s, upload)) for _ in range(NODES)]
        found = LocalSwarm(folder, children, lambda _: None, relay_only=True)
        # All streams at once, however much each slows the others: their sum is what is asked for here.
        options = ["--port", str(port), "--max-running", str(STREAMS + 8), *more]
        options += ["--max-slowdown", "1e9", "--max-wait", "600"]
        for far in proxies:
            options += ["--public-url", f"http://127.0.0.1:{far}"]
        status = found.start_backbone(model, cut, dtype=DTYPE, more=options)
        key = status["join"].partition("#")[2]
        for far in proxies:  # one after another, so that no two claim the same window
            name = found.add_node(f"http://127.0.0.1:{far}#{key}", cut.budget)
            children.wait_for(f"{name} to be full", partial(full, found, name), timeout=120.0)
        children.wait_for("every window with an owner", found.covered, timeout=240.0)
        yield Place(found, f"http://127.0.0.1:{port}", status["model"])


def full(swarm: LocalSwarm, name: str) -> bool | None:
    """True once a node has claimed what it has room for and serves all of it; else None."""
    status = swarm.node_status(name)
    if status is None or not status["windows"]:
        return None
    ready = all(window["state"] == "PROVEN" for window in status["windows"])
    room = status["budget_bytes"] - sum(window["kept_bytes"] for window in status["windows"])
    return True if ready and room < max(window["kept_bytes"] for window in status["windows"]) else None


@contextmanager
def proxy(target: int, round_trip_s: float, upload: float) -> Iterator[int]:
    """A delay proxy in a process of its own; its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benches.delay", str(target), str(round_trip_s / 2), str(upload)],
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield int(json.loads(process.stdout.readline())["port"])
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def round_trip(count: int = 40) -> float:
    """The median round trip of 1 KiB through a delay proxy to an echo, in seconds."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        port = stack.enter_context(proxy(listener.getsockname()[1], ROUND_TRIP_S, 0.0))
        near = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=10)))
        far = stack.enter_context(closing(listener.accept()[0]))
        times = []
        for _ in range(count):
            started = time.perf_counter()
            near.sendall(bytes(1024))
            far.sendall(_exactly(far, 1024))
            _exactly(near, 1024)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            raise Failed("the delay proxy closed a connection")
        data += piece
    return data


async def _ask_all(url: str, model: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Stream]:
    async with session(total_s=REQUEST_S, silent_s=REQUEST_S) as http:
        asked = [stream(http, url, model, list(ids), tokens) for ids in prompts]
        found = await asyncio.gather(*asked)
    for text in found:
        if not text.complete:
            raise Failed(f"a text failed: {text.status} {text.error}")
    return list(found)


@contextmanager
def working_folder(work_dir: Path | None) -> Iterator[Path]:
    """`work_dir`, or a temporary folder that is removed at the end."""
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
        yield work_dir
        return
    folder = Path(tempfile.mkdtemp(prefix="kvasir-wan-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

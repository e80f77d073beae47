"""Chaos: nodes are killed and frozen while texts are written. Is every text the same, how long is a stall?

A backbone and nodes, each a process, in fp32 and one numerics class. First the texts without kills, which are
the reference. Then clients ask for them again and again, while nodes die (SIGKILL, and a fresh process with
the warm cache follows) or freeze (SIGSTOP: no connection is reset, so only time tells; SIGCONT some seconds
later). In the first part every window has two replicas, and a node is hit only while each of its windows has
another proven one; in the second there is one, and the fallback takes over. A stall is the longest silence of
a text, before its first token or between two.

All nodes share this machine, where a starting Python that imports torch would take the processor from all the
others for seconds, as no other machine does. So a node is a copy of a process that has imported everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import aiohttp
from _processes import Children, Failed
from _swarm import DEADLINE_S, ENVIRONMENT, LocalSwarm, cut_of

from . import Report
from .clients import Stream, session, stream

KILLS, ONE_REPLICA_KILLS = 100, 12
NODES = 4
TOKENS = 48
CLIENTS = 2
PROMPTS, PROMPT_CHARACTERS = 6, 60
FROZEN_S = (0.5, 2.5)
FROZEN_SHARE = 0.7
"""How many of the kills are SIGSTOP: a new process takes seconds to start."""
PAUSE_S = 0.3
"""Between two kills at least."""
RECOVERY_S = 90.0
"""A node that was hit must serve again within this."""
MAX_STALL_S = 1.0


class Copies(Children):
    """Children of which the nodes are copies of one process that has imported what a node needs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # The server of copies finds what it is to import by this; it does not look at `sys.path` itself.
        scripts = str(Path(__file__).resolve().parent.parent)
        os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join(dict.fromkeys([scripts, *sys.path])))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benches.chaos_node"])

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        """See `Children.start`; a node's command runs in a copy."""
        if Path(command[0]).stem != "kvasir-node":
            super().start(name, command, environment)
            return
        from .chaos_node import run_node

        process = self._context.Process(target=run_node, args=(list(command[1:]), str(self.log(name))))
        process.start()
        self._children[name] = cast("subprocess.Popen[bytes]", _Copy(process))


class _Copy:
    """A copy with the face of a `Popen`, as far as `Children` looks at it."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.kill, self.terminate = process.kill, process.terminate

    def poll(self) -> int | None:
        """The process's status once it has ended."""
        status: int | None = self._process.exitcode
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("kvasir-node", timeout or 0.0)
        return int(self._process.exitcode)

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)


@dataclass(slots=True)
class Part:
    """What one part of it found."""

    kills: Counter[str] = field(default_factory=Counter)
    streams: list[tuple[str, Stream]] = field(default_factory=list)
    seconds: float = 0.0
    fallback_rows: int = 0


def run(work_dir: Path | None) -> Report:
    """Measure, and compare with the promised figures."""
    if sys.platform == "win32":
        raise Failed("this needs a system that can freeze a process: SIGSTOP")
    two, one, texts = asyncio.run(measure(work_dir, KILLS, ONE_REPLICA_KILLS))
    report = Report(figures_of(two, texts))
    single = figures_of(one, texts)
    report.figures |= {f"one_replica_{name}": value for name, value in single.items()}
    runs, stall = report.figures["runs"], report.figures["worst_stall_s"]
    assert isinstance(stall, float)
    report.promise(f"{KILLS} kills or more", sum(two.kills.values()) >= KILLS)
    report.promise("every text is the one without kills", report.figures["identical"] == runs)
    report.promise(f"no stall reaches {MAX_STALL_S:g} s", stall < MAX_STALL_S)
    report.promise("no request fails", report.figures["failed"] == 0)
    report.promise("with one replica, too", single["identical"] == single["runs"] and single["failed"] == 0)
    errors = Counter(found.error for _, found in [*two.streams, *one.streams] if not found.complete)
    report.findings += [f"        {count} x {error}" for error, count in errors.most_common(5)]
    return report


async def measure(
    work_dir: Path | None, kills: int, one_replica_kills: int
) -> tuple[Part, Part, Mapping[str, list[int]]]:
    """Both parts, the first with two replicas of every window; and the text of each prompt."""
    texts: dict[str, list[int]] = {}
    parts: list[Part] = []
    for replicas, hits in ((2, kills), (1, one_replica_kills)):
        with tempfile.TemporaryDirectory(prefix="kvasir-chaos-", dir=work_dir) as name:
            folder = Path(name)
            with Copies(folder) as children:
                swarm = _start(folder, children, replicas)
                chaos = Chaos(swarm, replicas, Random(7))
                parts.append(await chaos.run(texts, hits))
    return parts[0], parts[1], texts


def figures_of(part: Part, texts: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """The figures of one part."""
    whole = [(prompt, found) for prompt, found in part.streams if found.complete]
    return {
        "kills": sum(part.kills.values()),
        "runs": len(part.streams),
        "identical": sum(found.token_ids == texts[prompt] for prompt, found in whole),
        "worst_stall_s": round(max((found.worst_stall_s for _, found in whole), default=0.0), 3),
        "failed": len(part.streams) - len(whole),
        "sigkill": part.kills["SIGKILL"],
        "sigstop": part.kills["SIGSTOP"],
        "fallback_rows": part.fallback_rows,
        "seconds": round(part.seconds, 1),
    }


def _start(folder: Path, children: Children, replicas: int) -> LocalSwarm:
    """Nodes that hold every window so many times, proven."""
    from kvasir_backbone.bundled import bundled_model_path

    model = bundled_model_path()
    swarm = LocalSwarm(folder, children, lambda text: None)
    count = NODES if replicas > 1 else 1  # one node with everything: no window can have another owner
    share = count // replicas
    cut = cut_of(model, share)
    assert cut is not None
    status = swarm.start_backbone(model, cut)
    # Room for a share of the windows and half a one more.
    budget = cut.budget * (2 * len(cut.windows) // share + 1) // (2 * (-(-len(cut.windows) // share) + 1))
    swarm.start_nodes(count, status["join"], budget)

    def ready() -> bool | None:
        found = swarm.covered()
        held = Counter(window for node in (found or {"nodes": []})["nodes"] for window in node["windows"])
        return True if held and all(held[w.name] >= replicas for w in cut.windows) else None

    children.wait_for(f"{replicas} proven owners of every window", ready, timeout=DEADLINE_S)
    return swarm


class Chaos:
    """Kills nodes of a running swarm while clients write."""

    def __init__(self, swarm: LocalSwarm, replicas: int, rng: Random) -> None:
        self._swarm = swarm
        self._replicas = replicas
        self._rng = rng
        self._down: set[str] = set()
        self._part = Part()

    async def run(self, texts: dict[str, list[int]], kills: int) -> Part:
        """Kill so many times; `texts` takes the reference texts where it has none."""
        status = await asyncio.to_thread(self._swarm.ask, "status")
        async with session() as http:
            for prompt in _prompts():
                found = await stream(http, status["url"], status["model"], prompt, TOKENS)
                if not found.complete or texts.setdefault(prompt, found.token_ids) != found.token_ids:
                    raise Failed(f"the text without kills is not steady: {found.status} {found.error}")
            started, over = time.monotonic(), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(self._write(http, status, list(texts), number, over))
                try:
                    await self._kill(kills)
                finally:
                    over.set()
        status = await asyncio.to_thread(self._swarm.ask, "status")
        self._part.seconds = time.monotonic() - started
        self._part.fallback_rows = status["fallback_rows"]
        return self._part

    async def _write(
        self,
        http: aiohttp.ClientSession,
        status: Mapping[str, Any],
        prompts: Sequence[str],
        number: int,
        over: asyncio.Event,
    ) -> None:
        """One client: text after text until the killing is over."""
        while not over.is_set():
            prompt = prompts[number % len(prompts)]
            number += 1
            found = await stream(http, status["url"], status["model"], prompt, TOKENS)
            self._part.streams.append((prompt, found))
            if not found.complete:
                await asyncio.sleep(0.2)

    async def _kill(self, kills: int) -> None:
        """Hit nodes at random, as soon and as often as may be."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(kills):
                name = await self._victim()
                frozen = self._rng.random() < FROZEN_SHARE
                self._part.kills["SIGSTOP" if frozen else "SIGKILL"] += 1
                self._down.add(name)
                tasks.create_task(self._hit(name, frozen))
                await asyncio.sleep(PAUSE_S)

    async def _hit(self, name: str, frozen: bool) -> None:
        """Freeze or kill a node, and see to it that it serves again."""
        children = self._swarm.children
        if frozen:
            children.send(name, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._rng.uniform(*FROZEN_S))
            finally:
                children.send(name, signal.SIGCONT)
        else:
            await asyncio.to_thread(children.kill, name)
            self._swarm.restart_node(name)
        if not await asyncio.to_thread(self._recovers, name):
            raise Failed(f"{name} does not serve again:\n{children.tail(name)}")
        self._down.discard(name)

    async def _victim(self) -> str:
        """A node that may be hit now: without it, every window of its own keeps a proven owner that is up."""
        deadline = time.monotonic() + 2 * RECOVERY_S
        while time.monotonic() < deadline:
            serving = await asyncio.to_thread(self._serving)
            up = {name: windows for name, windows in serving.items() if name not in self._down}
            held = Counter(window for windows in up.values() for window in windows)
            able = [name for name, windows in up.items() if all(held[w] >= self._replicas for w in windows)]
            if able:
                return self._rng.choice(sorted(able))
            await asyncio.sleep(0.1)
        raise Failed("no node may be hit: some window never got its owners back")

    def _recovers(self, name: str) -> bool:
        """Wait until the node says that it serves (a dead one says nothing) and the backbone finds so too."""
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            own = self._swarm.node_status(name)
            if own is not None and own["phase"] == "serving" and name in self._serving():
                return True
            time.sleep(0.2)
        return False

    def _serving(self) -> dict[str, list[str]]:
        """Node -> the windows that it serves: proven, with a session, in the planner's favour, daemon up."""
        with contextlib.suppress(Failed):
            status = self._swarm.ask("status")
            found = {}
            for node in status["nodes"]:
                name = self._swarm.owner_of.get(node["wallet"], "")
                if node["windows"] and node["path"] != "none" and node["breaker"] is None:
                    found[name] = list(node["windows"])
            return found
        return {}


def _prompts() -> list[str]:
    from kvasir_backbone.bundled import bundled_model_path

    corpus = (bundled_model_path() / "heldout.txt").read_text(encoding="utf-8")
    return [corpus[start : start + PROMPT_CHARACTERS] for start in range(0, 1000 * PROMPTS, 1000)]

"""The cost of a hop: one expert call of one token against the same kernel run bare, and against hivemind.

Hidden 3072, bf16 on the wire, 8 experts, one worker, encrypted; relay, worker and backbone are processes of
their own, the worker's loop and the backbone's dispatcher the real ones. Calls come in trains, one right
after the other, as the layers of a model make them. In turns with the trains the bare kernel runs in the
worker, on the same weights and the same row, with a pause before each run that is as long as what is not
kernel in a call: its weights are then as cold as a call finds them. hivemind runs in an environment of its
own, made in the work folder: eight `RemoteExpert` calls at once, fp32 weights on both sides.

A pair is the median of a train and that of as many bare runs; figures are medians over the interleaved
pairs, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import Report
from .process import environment
from .statistic import Pair, interval, median_of, ratio, share

FOLDER = Path(__file__).resolve().parent.parent
HIDDEN, EXPERTS, NARROW = 3072, 8, 64
PAIRS = {"narrow": 48, "narrow_fp32": 24, "wide": 24}
TRAIN = {"narrow": 10, "narrow_fp32": 10, "wide": 4}
"""Calls of a train, and bare runs of a pair."""
WARM_UP = 40
RIVAL_PAIRS, RIVAL_RUNS = 24, 5
HIVEMIND = "hivemind==1.1.12"
INSTALL_S = 1_800


class Talker:
    """A process that answers lines of JSON with lines of JSON; leaving the context closes its input."""

    def __init__(self, name: str, *command: object) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [str(part) for part in command],
            cwd=FOLDER,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> Any:
        """The next line it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process {self._name} ended early; what it said is above")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        """Say a line, and hear one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def role(module: str, *arguments: object) -> Talker:
    """A process of one of our own roles."""
    return Talker(str(arguments[0]), sys.executable, "-m", f"benches.{module}", *arguments)


def run(work_dir: Path | None) -> Report:
    """Measure all of it; some minutes, most of them for the installation of hivemind."""
    report = Report({})
    with ExitStack() as stack:
        folder = work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        python = install(folder)
        seed = secrets.token_hex(8)
        relay = stack.enter_context(role("relay_roles", "relay", seed, "uvloop"))
        url = f"http://127.0.0.1:{relay.hear()}"
        worker = stack.enter_context(role("call_roles", "worker", seed, url))
        direct = f"http://127.0.0.1:{worker.hear()}"
        backbone = stack.enter_context(role("call_roles", "backbone", seed, direct, url))
        assert backbone.hear() == "ready"
        measured = {
            (case, path): pairs_of(worker, backbone, case, path)
            for case in PAIRS
            for path in ("direct", "relay")
        }
        rival = [] if python is None else against(python, backbone)
    report.figures = figures(measured, rival)
    report.findings = table(measured)
    promise(report)
    return report


def pairs_of(worker: Talker, backbone: Talker, case: str, path: str) -> list[Pair]:
    """(kernel alone, call) in seconds, medians of a train each, in turns."""
    backbone.ask([case, path, WARM_UP])
    found = []
    for _ in range(PAIRS[case]):
        alone = worker.ask([case, TRAIN[case]])
        call = backbone.ask([case, path, TRAIN[case]])
        found.append((statistics.median(alone), statistics.median(call)))
    return found


def against(python: Path, backbone: Talker) -> list[Pair]:
    """(hivemind, ours): medians of some calls each, in turns."""
    script = Path(__file__).parent / "hivemind_roles.py"
    with ExitStack() as stack:
        server = stack.enter_context(
            Talker("hivemind server", python, script, "server", HIDDEN, NARROW, EXPERTS)
        )
        addresses = server.hear()
        client = stack.enter_context(
            Talker("hivemind client", python, script, "client", HIDDEN, EXPERTS, *addresses)
        )
        assert client.hear() == "ready"
        client.ask(WARM_UP)
        return [
            (
                statistics.median(client.ask(RIVAL_RUNS)),
                statistics.median(backbone.ask(["narrow_fp32", "direct", RIVAL_RUNS])),
            )
            for _ in range(RIVAL_PAIRS)
        ]


def install(folder: Path) -> Path | None:
    """The interpreter of an environment with hivemind in it, or None where that cannot be had."""
    root = folder / "hivemind"
    python = root / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = root / "installed"
    if stamp.exists():
        return python
    print(f"Installing {HIVEMIND} into {root} ...", file=sys.stderr, flush=True)
    venv.create(root, with_pip=True)
    constraints = FOLDER.parent / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    for packages in ((torch,), ("-c", str(constraints), HIVEMIND)):
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        try:
            status = subprocess.run(command, stdout=sys.stderr, check=False, timeout=INSTALL_S).returncode
        except subprocess.TimeoutExpired:
            status = 1
        if status:
            print(f"pip install {' '.join(packages)} failed; see above", file=sys.stderr, flush=True)
            return None
    stamp.touch()
    return python


# --- figures ------------------------------------------------------------------------------------------


def added_ms(pairs: Sequence[Pair]) -> float:
    """What a call takes beyond the kernel, medians of both, in ms."""
    return (median_of(1, pairs) - median_of(0, pairs)) * 1e3


def figures(measured: dict[tuple[str, str], list[Pair]], rival: list[Pair]) -> dict[str, object]:
    """All figures by name."""
    found: dict[str, object] = {}
    for name, statistic, pairs in (
        ("direct_added_ms", added_ms, measured["narrow", "direct"]),
        ("relay_added_ms", added_ms, measured["narrow", "relay"]),
        ("kernel_share", share, measured["wide", "direct"]),
        ("kernel_share_relay", share, measured["wide", "relay"]),
        ("vs_hivemind", ratio, rival),
    ):
        found[name] = round(statistic(pairs), 3) if pairs else None
        found[f"{name}_interval"] = interval(statistic, pairs) if pairs else None
    found["hivemind_ms"] = round(median_of(0, rival) * 1e3, 2) if rival else None
    return found


def table(measured: dict[tuple[str, str], list[Pair]]) -> list[str]:
    """A line for each case and path."""
    lines = [f"{'p50 in ms':<24}{'kernel':>10}{'call':>10}{'added':>10}"]
    for (case, path), pairs in measured.items():
        kernel, call = median_of(0, pairs) * 1e3, median_of(1, pairs) * 1e3
        lines.append(f"{case + ', ' + path:<24}{kernel:>10.3f}{call:>10.3f}{call - kernel:>10.3f}")
    return lines


def promise(report: Report) -> None:
    """Compare with what is promised."""
    for name, sign, bound in (
        ("direct_added_ms", "<=", 0.4),
        ("relay_added_ms", "<=", 1.0),
        ("vs_hivemind", ">=", 10.0),
        ("kernel_share", ">=", 0.9),
    ):
        value = report.figures[name]
        holds = isinstance(value, float) and (value <= bound if sign == "<=" else value >= bound)
        report.promise(f"{name} {value} {sign} {bound:g}", holds)

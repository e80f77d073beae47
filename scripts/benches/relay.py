"""The relay against a bare byte-copy proxy, and what it does with many, frozen and returning peers.

Relay, proxy and ends are processes of their own, on the loopback. Speeds are medians over interleaved pairs
with a 95 % bootstrap interval; the proxy and its ends run on uvloop throughout.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import Report
from .statistic import interval

PAIRS = 24
IDLE = 5_000
CROWD = 1_000
FOLDER = Path(__file__).resolve().parent.parent


class Role:
    """A process of `relay_roles`; leaving the context closes its input and waits."""

    def __init__(self, role: str, seed: str, *arguments: object, loop: str = "uvloop") -> None:
        command = [sys.executable, "-m", "benches.relay_roles", role, seed, loop, *map(str, arguments)]
        self._name = role
        self._process = subprocess.Popen(
            command, cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def hear(self) -> Any:
        """The next line it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process {self._name} ended early; what it said is above")
        return json.loads(line)

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Have it end in order."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(work_dir: Path | None) -> Report:
    """Measure all of it; about two minutes."""
    figures: dict[str, object] = {}
    report = Report(figures)
    for loop, suffix in (("uvloop", ""), ("default", "_default_loop")):
        figures.update({name + suffix: value for name, value in speed(loop).items()})
    figures.update(idle_memory())
    figures.update(frozen_receiver())
    figures.update(reconnects())
    promises = (
        ("goodput_vs_proxy", ">=", 0.5),
        ("rtt_vs_proxy", "<=", 2.0),
        ("idle_circuit_kb", "<=", 60.0),
        ("frozen_receiver_p99", "<=", 1.1),
        ("reconnect_worst_second", "<=", 0.2),
        ("reconnect_all_s", "<=", 30.0),
    )
    for name, sign, bound in promises:
        value = figures[name]
        assert isinstance(value, float)
        report.promise(f"{name} {value} {sign} {bound}", value >= bound if sign == ">=" else value <= bound)
    return report


def speed(loop: str) -> dict[str, object]:
    """Round trips of 6 KiB and goodput of 48 KiB messages, relay against proxy."""
    seed = secrets.token_hex(8)
    with ExitStack() as stack:
        plain = stack.enter_context(Role("plain", seed))
        proxy = stack.enter_context(Role("proxy", seed, plain.hear()))
        relay = stack.enter_context(Role("relay", seed, loop=loop))
        url = f"http://127.0.0.1:{relay.hear()}"
        device = stack.enter_context(Role("device", seed, url, loop=loop))
        device.hear()
        near = stack.enter_context(Role("near", seed, url, proxy.hear(), PAIRS, loop=loop))
        found: dict[str, list[float]] = near.hear()
    rtt = [a / b for a, b in zip(found["rtt_relay"], found["rtt_proxy"], strict=True)]
    goodput = [a / b for a, b in zip(found["goodput_relay"], found["goodput_proxy"], strict=True)]
    return {
        "goodput_vs_proxy": round(statistics.median(goodput), 3),
        "goodput_vs_proxy_interval": interval(statistics.median, goodput),
        "rtt_vs_proxy": round(statistics.median(rtt), 3),
        "rtt_vs_proxy_interval": interval(statistics.median, rtt),
        "goodput_mb_s": round(statistics.median(found["goodput_relay"]) / 1e6, 1),
        "proxy_goodput_mb_s": round(statistics.median(found["goodput_proxy"]) / 1e6, 1),
        "rtt_us": round(statistics.median(found["rtt_relay"]) * 1e6, 1),
        "proxy_rtt_us": round(statistics.median(found["rtt_proxy"]) * 1e6, 1),
    }


def idle_memory(count: int = IDLE) -> dict[str, object]:
    """What a relay's memory grows by for each idle device with one circuit."""
    seed = secrets.token_hex(8)
    with ExitStack() as stack:
        relay = stack.enter_context(Role("relay", seed))
        url = f"http://127.0.0.1:{relay.hear()}"
        idle = stack.enter_context(Role("idle", seed, url, count))
        idle.hear()
        before = resident(relay.pid)
        circuits = idle.hear()
        after = resident(relay.pid)
        relay_rss = round(after / 1e6, 1)
    assert circuits == count
    return {"idle_circuit_kb": round((after - before) / count / 1024, 1), "idle_relay_rss_mb": relay_rss}


def resident(pid: int) -> int:
    """Bytes resident of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def frozen_receiver(pairs: int = PAIRS, seconds: float = 0.5) -> dict[str, object]:
    """The others' 99th percentile with one frozen receiver, against without."""
    seed = secrets.token_hex(8)
    with ExitStack() as stack:
        relay = stack.enter_context(Role("relay", seed))
        url = f"http://127.0.0.1:{relay.hear()}"
        stack.enter_context(Role("device", seed, url, 0, 4)).hear()
        found = stack.enter_context(Role("frozen", seed, url, 4, pairs, seconds)).hear()
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    return {
        "frozen_receiver_p99": round(statistics.median(ratios), 3),
        "frozen_receiver_p99_interval": interval(statistics.median, ratios),
        "p99_ms_without": round(statistics.median(found["without"]) * 1e3, 3),
    }


def reconnects(count: int = CROWD) -> dict[str, object]:
    """How clients come back after a relay was killed, and after it restarted in order; the worse of both."""
    worst, all_s = 0.0, 0.0
    shares: dict[str, object] = {}
    for how in ("killed", "restarted"):
        share, seconds = _reconnect(how, count)
        shares[f"reconnect_{how}"] = [round(share, 3), round(seconds, 1)]
        worst, all_s = max(worst, share), max(all_s, seconds)
    return {"reconnect_worst_second": round(worst, 3), "reconnect_all_s": round(all_s, 1), **shares}


def _reconnect(how: str, count: int) -> tuple[float, float]:
    seed = secrets.token_hex(8)
    with ExitStack() as stack:
        relay = stack.enter_context(Role("relay", seed))
        port = relay.hear()
        crowd = stack.enter_context(Role("crowd", seed, f"http://127.0.0.1:{port}", count))
        crowd.hear()
        gone = time.time()
        if how == "killed":
            relay.kill()
        else:
            relay.close()
        stack.enter_context(Role("relay", seed, port)).hear()
        found = crowd.hear()
    return worst_second(found["dials"]) / count, found["back"] - gone


def worst_second(dials: Sequence[tuple[int, float]]) -> int:
    """The most distinct clients that dial within any one second."""
    ordered = sorted(dials, key=lambda dial: dial[1])
    most, start = 0, 0
    for end in range(len(ordered)):
        while ordered[end][1] - ordered[start][1] > 1.0:
            start += 1
        most = max(most, len({number for number, _ in ordered[start : end + 1]}))
    return most

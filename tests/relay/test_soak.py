"""The short form of the soak: half a minute of churn leaves nothing behind in the relay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="optional: reads memory from /proc")
@pytest.mark.timeout(300)
def test_half_a_minute_of_churn_leaves_no_memory_behind() -> None:
    """The round trip is in the figures too, but other tests run beside this one: it is no test's to judge."""
    ended = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.5", "--warm-up", "10", "--json"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode in (0, 1), ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["rss_end_vs_start"] <= 1.05, figures  # half the time, half the growth
    assert figures["samples"] >= 10
    assert all(figures[f"churned_{way}"] > 0 for way in ("stay", "leave", "cut", "break", "freeze"))

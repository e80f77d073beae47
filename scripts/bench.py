"""Benchmarks. Each suite measures in processes of its own and prints its figures.

python3 scripts/bench.py                  the suites there are
python3 scripts/bench.py memory           run one
python3 scripts/bench.py memory --json    the figures as one JSON object on the last line
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from _env import enter


def machine() -> dict[str, object]:
    """Facts without which a figure means little."""
    return {
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def main(arguments: list[str]) -> int:
    """Run the suite that is asked for."""
    from benches import SUITES, load

    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Benchmarks, one suite at a time.",
        epilog="suites: " + "; ".join(f"{name} - {what}" for name, what in SUITES.items()),
    )
    parser.add_argument(
        "suite", nargs="?", choices=sorted(SUITES), help="which one; without it they are listed"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON, last")
    parser.add_argument("--work-dir", type=Path, help="folder for temporary files (default: the system's)")
    options = parser.parse_args(arguments)
    if options.suite is None:
        for name, what in SUITES.items():
            print(f"{name:<10} {what}")
        return 0
    report = load(options.suite).run(options.work_dir)
    for name, value in report.figures.items():
        print(f"{name:<28} {value}")
    for line in report.findings:
        print(line)
    if options.json:
        print(json.dumps({"suite": options.suite, **report.figures, "machine": machine()}), flush=True)
    return 0 if report.passed else 1


if __name__ == "__main__":
    enter("all")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

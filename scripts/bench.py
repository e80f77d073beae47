"""Benchmarks. Each suite measures in processes of its own and prints its figures.

The status is 0 whenever a suite has measured, whatever the figures; a promise that is broken is printed.

python3 scripts/bench.py                  the suites there are
python3 scripts/bench.py memory           run one
python3 scripts/bench.py memory --json    the figures as one JSON object on the last line
python3 scripts/bench.py memory --save FOLDER    keep them, for docs/benchmarks.md
python3 scripts/bench.py --page FOLDER    write docs/benchmarks.md from what was kept
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from _env import ROOT, enter


def machine() -> dict[str, object]:
    """Facts without which a figure means little."""
    import psutil

    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


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
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the figures in that folder")
    parser.add_argument(
        "--page", type=Path, metavar="FOLDER", help="write docs/benchmarks.md from it, and end"
    )
    parser.add_argument("--work-dir", type=Path, help="folder for temporary files (default: the system's)")
    options = parser.parse_args(arguments)
    if options.page is not None:
        from benches.page import write

        print(f"docs/benchmarks.md: {', '.join(write(options.page, ROOT / 'docs'))}")
        return 0
    if options.suite is None:
        for name, what in SUITES.items():
            print(f"{name:<10} {what}")
        return 0
    report = load(options.suite).run(options.work_dir)
    for name, value in report.figures.items():
        print(f"{name:<28} {value}")
    for line in report.findings:
        print(line)
    if options.save is not None:
        from benches.page import save

        save(options.save, options.suite, report.figures, report.findings, machine())
    if options.json:
        print(json.dumps({"suite": options.suite, **report.figures, "machine": machine()}), flush=True)
    return 0


if __name__ == "__main__":
    enter("all")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

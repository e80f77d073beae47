"""Mutated frames, messages, documents and handshakes against every decoder of the relay package.

    python3 scripts/fuzz.py                     1,000,000 inputs; a few minutes
    python3 scripts/fuzz.py --count 50000 --seed 7

Fails on anything that is raised and not meant, on an input that takes over a second, and on memory that
grows. The input that did it is printed in hex.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

from _env import ROOT, enter

GROWTH_MB = 16.0


def main(arguments: list[str]) -> int:
    """Run the fuzzer; status 1 if it found something."""
    sys.path.insert(0, str(ROOT))
    from tests.support.fuzzing import Finding, run, targets

    parser = argparse.ArgumentParser(prog="fuzz.py", description="Mutated input for every decoder.")
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="default: another each time"
    )
    options = parser.parse_args(arguments)
    found = targets()
    print(f"{len(found)} decoders, {options.count} inputs, seed {options.seed}", flush=True)
    warm = min(20_000, options.count // 5)
    started = time.monotonic()

    def progress(number: int) -> None:
        if number and sys.stderr.isatty():
            print(f"\r{number:>9}", end="", file=sys.stderr, flush=True)

    try:
        accepted = run(found, count=warm, seed=options.seed)
        before = _resident_mb()
        accepted += run(found, count=options.count - warm, seed=options.seed + 1, progress=progress)
    except Finding as finding:
        print(f"\nFOUND  {finding}")
        return 1
    growth = _resident_mb() - before
    print(f"{accepted} accepted, {options.count - accepted} refused, in {time.monotonic() - started:.0f} s")
    print(f"memory grew by {growth:.1f} MB")
    return 0 if growth < GROWTH_MB else 1


def _resident_mb() -> float:
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 / 1e6
    except OSError:
        import psutil

        return float(psutil.Process().memory_info().rss) / 1e6


if __name__ == "__main__":
    enter("all")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

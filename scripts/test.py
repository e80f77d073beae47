"""Every check of the project: ruff, mypy strict, the import order, the tests. Arguments go to pytest.

    python3 scripts/test.py                     everything; async tests on the default loop and on uvloop
    python3 scripts/test.py tests/relay -x      the same checks, and only those tests
    python3 scripts/test.py --loop both         each async test on both loops, not only those of sockets
    python3 scripts/test.py --no-uvloop         as on a machine without uvloop (Windows)
    python3 scripts/test.py -n 0                in one process instead of one for each processor

Files of tests run side by side in as many processes as there are processors, four at most. All checks run
even where an earlier one failed; the last lines say which passed. The exit status is 0 only if all of them
did. Tests that fail run once more, by themselves: what passes then is named in the summary as unsteady (a
busy machine, mostly), and what fails again has failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from _env import ROOT, enter

PACKAGES = ("relay", "market", "kvasir_node", "kvasir_backbone")
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_PROCESSES = 4
MOST_UNSTEADY = 12
"""More failures than this are no accident and get no second try."""


@dataclass(frozen=True, slots=True)
class Check:
    """One module to run in the environment, and what it is called in the summary."""

    name: str
    command: tuple[str, ...]


def checks(arguments: list[str]) -> list[Check]:
    """What to run, in order."""
    packages = [item for package in PACKAGES for item in ("-p", package)]
    return [
        Check("ruff check", ("ruff", "check", ".")),
        Check("ruff format", ("ruff", "format", "--check", ".")),
        Check("mypy strict", ("mypy", *packages)),
        Check("import order", ("pytest", "-q", "tests/test_import_order.py")),
        Check("tests", ("pytest", "-q", "--loop", "mixed", *side_by_side(), *arguments)),
    ]


def side_by_side() -> tuple[str, ...]:
    """pytest's arguments for one process a processor; a file's tests stay together, with their fixtures."""
    processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    return ("-n", str(processes), "--dist", "loadfile") if processes > 1 else ()


def run(check: Check) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took."""
    print(f"\n== {check.name}", flush=True)
    started = time.monotonic()
    status = subprocess.run([sys.executable, "-m", *check.command], cwd=ROOT, check=False).returncode
    return status == 0, time.monotonic() - started


def last_failed() -> list[str]:
    """The tests that failed in the last run of pytest, as it recorded them."""
    try:
        return sorted(json.loads(LAST_FAILED.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def run_tests(check: Check) -> tuple[bool, float, list[str]]:
    """Like `run`, with a second try for a few failures; also which tests needed it."""
    LAST_FAILED.unlink(missing_ok=True)
    passed, seconds = run(check)
    unsteady = [] if passed else last_failed()
    if not 0 < len(unsteady) <= MOST_UNSTEADY:
        return passed, seconds, []
    alone = ("-n", "0", "--last-failed", "--last-failed-no-failures", "none")
    again = Check("second try", (*check.command, *alone))
    passed, more = run(again)
    still = set(last_failed()) if not passed else set()
    return passed, seconds + more, [test for test in unsteady if test not in still]


def main(arguments: list[str]) -> int:
    """Run all checks and print the summary."""
    *first, tests = checks(arguments)
    results = [(check.name, *run(check)) for check in first]
    passed, seconds, unsteady = run_tests(tests)
    results.append((tests.name, passed, seconds))
    print("\n== summary")
    for test in unsteady:
        print(f"  unsteady: passed only at the second try: {test}")
    for name, passed, seconds in results:
        print(f"  {'passed' if passed else 'FAILED'}  {name:<13} {seconds:7.1f} s")
    failed = [name for name, passed, _ in results if not passed]
    print("All checks passed." if not failed else f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    enter("all")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

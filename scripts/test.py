"""Every check of the project: ruff, mypy strict, the import order, the tests. Arguments go to pytest.

    python3 scripts/test.py                     everything; async tests on the default loop and on uvloop
    python3 scripts/test.py tests/relay -x      the same checks, and only those tests
    python3 scripts/test.py --loop both         each async test on both loops, not only those of sockets
    python3 scripts/test.py --no-uvloop         as on a machine without uvloop (Windows)
    python3 scripts/test.py -n 0                in one process

Files of tests run side by side in one process more than there are processors, four at most, for tests wait
much of their time; mypy and the import order run beside them. All checks run even where an earlier one
failed; the last lines say which passed. The exit status is 0 only if all of them did. Tests that fail run
once more, by themselves: what passes then is named in the summary as unsteady (a busy machine, mostly), and
what fails again has failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from _env import ROOT, enter

PACKAGES = ("relay", "market", "kvasir_node", "kvasir_backbone")
IMPORT_ORDER = "tests/test_import_order.py"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_PROCESSES = 4
MOST_UNSTEADY = 12
"""More failures than this are no accident and get no second try."""


@dataclass(frozen=True, slots=True)
class Check:
    """One module to run in the environment, and what it is called in the summary."""

    name: str
    command: tuple[str, ...]


def quick_checks() -> list[Check]:
    """What takes a second each, and is the first to be wrong."""
    return [
        Check("ruff check", ("ruff", "check", ".")),
        Check("ruff format", ("ruff", "format", "--check", ".")),
    ]


def side_checks() -> list[Check]:
    """What runs beside the tests, one after the other."""
    packages = [item for package in PACKAGES for item in ("-p", package)]
    order = ("pytest", "-q", "-p", "no:cacheprovider", IMPORT_ORDER)  # that cache holds the tests' failures
    return [
        Check("mypy strict", ("mypy", *packages)),
        Check("mypy strict, scripts", ("mypy", "--explicit-package-bases", "scripts")),
        Check("import order", order),
    ]


def tests(arguments: list[str]) -> Check:
    """The tests. Those of the import order are a check by themselves, unless `arguments` name what to run."""
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    rest = () if named else (f"--ignore={IMPORT_ORDER}",)
    return Check("tests", ("pytest", "-q", "--loop", "mixed", *rest, *side_by_side(), *arguments))


def side_by_side() -> tuple[str, ...]:
    """pytest's arguments for several processes; a file's tests stay together, with their fixtures.

    Files start in the order of tests/conftest.py, the longest first: none is left to run alone at the end.
    """
    processes = min((os.cpu_count() or 1) + 1, MOST_PROCESSES)
    return ("-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder")


def environment() -> dict[str, str]:
    """This process's; compiled files are kept, for tests start the project's commands many times."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(check: Check) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took."""
    print(f"\n== {check.name}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", *check.command]
    status = subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode
    return status == 0, time.monotonic() - started


def run_aside(check: Check) -> tuple[bool, float, str]:
    """Like `run`, but what it prints is returned, last."""
    started = time.monotonic()
    command = [sys.executable, "-m", *check.command]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return ended.returncode == 0, time.monotonic() - started, ended.stdout


def last_failed() -> list[str]:
    """The tests that failed in the last run of pytest, as it recorded them."""
    try:
        return sorted(json.loads(LAST_FAILED.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def run_tests(
    check: Check, *, before_again: Callable[[], object] = lambda: None
) -> tuple[bool, float, list[str]]:
    """Like `run`, with a second try for a few failures; also which tests needed it.

    `before_again` is called before the second try: it returns when nothing runs beside it any more.
    """
    LAST_FAILED.unlink(missing_ok=True)
    passed, seconds = run(check)
    unsteady = [] if passed else last_failed()
    if not 0 < len(unsteady) <= MOST_UNSTEADY:
        return passed, seconds, []
    before_again()
    alone = ("-n", "0", "--last-failed", "--last-failed-no-failures", "none")
    again = Check("second try", (*check.command, *alone))
    passed, more = run(again)
    still = set(last_failed()) if not passed else set()
    return passed, seconds + more, [test for test in unsteady if test not in still]


def main(arguments: list[str]) -> int:
    """Run all checks and print the summary."""
    results = [(check.name, *run(check)) for check in quick_checks()]
    with ThreadPoolExecutor(1) as aside:
        beside = [(check.name, aside.submit(run_aside, check)) for check in side_checks()]
        passed, seconds, unsteady = run_tests(
            tests(arguments), before_again=lambda: wait(side for _, side in beside)
        )
    for name, side in beside:
        good, took, printed = side.result()
        print(f"\n== {name}\n{printed}", end="", flush=True)
        results.append((name, good, took))
    results.append(("tests", passed, seconds))
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

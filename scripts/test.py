"""Every check of the project: ruff, mypy strict, the import order, the tests. Arguments go to pytest.

    python3 scripts/test.py                     everything; async tests on the default loop and on uvloop
    python3 scripts/test.py tests/relay -x      the same checks, and only those tests
    python3 scripts/test.py --no-uvloop         as on a machine without uvloop (Windows)

All checks run even where an earlier one failed; the last lines say which passed. The exit status is 0 only
if all of them did.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from _env import ROOT, enter

PACKAGES = ("relay", "market", "kvasir_node", "kvasir_backbone")


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
        Check("tests", ("pytest", "-q", "--loop", "both", *arguments)),
    ]


def run(check: Check) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took."""
    print(f"\n== {check.name}", flush=True)
    started = time.monotonic()
    status = subprocess.run([sys.executable, "-m", *check.command], cwd=ROOT, check=False).returncode
    return status == 0, time.monotonic() - started


def main(arguments: list[str]) -> int:
    """Run all checks and print the summary."""
    results = [(check.name, *run(check)) for check in checks(arguments)]
    print("\n== summary")
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

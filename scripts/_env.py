"""The scripts' own environment: makes `.venv`, installs the pinned packages, runs the script inside it.

Standard library only, any platform with Python 3.11 or newer. Safe to repeat: what was installed is
stamped with a hash of `pyproject.toml`, `constraints.txt` and the interpreter, so a second start costs
milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OLDEST = (3, 11)

_STAMP = VENV / "kvasir-stamp.txt"


def venv_python() -> Path:
    """The interpreter of the environment."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def venv_command(name: str) -> str:
    """A command installed in the environment, such as `kvasir-node`."""
    return str(VENV / (f"Scripts/{name}.exe" if os.name == "nt" else f"bin/{name}"))


def enter(extra: str = "all") -> None:
    """Return inside the environment with the project and `extra` (`backbone` or `all`) installed.

    Called first thing by each script. Outside the environment it sets it up where needed and starts the
    script again in it. Ends the process with a message and status 1 where that fails.
    """
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, and this is {found}: use a newer python3."
        )
    inside = Path(sys.prefix).resolve() == VENV.resolve()
    if _installed() not in (extra, "all"):
        with _lock():
            if _installed() not in (extra, "all"):
                _install(extra)
        inside = False  # packages imported by this process may be older than those installed now
    if not inside:
        _restart()


def _wanted() -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    digest.update(f"{sys.version_info[:2]} {sys.platform} {ROOT}".encode())
    return digest.hexdigest()


def _installed() -> str:
    """The extra that is installed at the wanted pins, or "" for none."""
    try:
        extra, digest = _STAMP.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return ""
    return extra if digest == _wanted() and venv_python().exists() else ""


def _install(extra: str) -> None:
    print(f"Setting up {VENV} (only the first time, and when a pin changes) ...", file=sys.stderr, flush=True)
    if not venv_python().exists():
        venv.create(VENV, with_pip=True, symlinks=os.name != "nt")
    _pip(f"torch=={_pin('torch')}")  # first, and never without its pin: it is by far the largest
    _pip("-c", "constraints.txt", "-e", f".[{extra}]")
    _STAMP.write_text(f"{extra} {_wanted()}\n", encoding="utf-8")


def _pin(package: str) -> str:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    if found is None:
        sys.exit(f"constraints.txt has no pin of {package}: add the line {package}==VERSION.")
    return found[1]


def _pip(*arguments: str) -> None:
    quiet = [] if sys.stderr.isatty() else ["-qq"]
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    print("  pip install " + " ".join(arguments), file=sys.stderr, flush=True)
    status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if status:
        sys.exit(f"pip failed with status {status}; what it said is above. Mend that and start this again.")


def _restart() -> None:
    command = [str(venv_python()), *sys.argv]
    if os.name != "nt":
        os.execv(command[0], command)
    # Windows has no exec that keeps the console and the exit status: run and hand the status on.
    try:
        sys.exit(subprocess.run(command, check=False).returncode)
    except KeyboardInterrupt:
        sys.exit(130)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Two scripts started at once install one after the other. The system drops the lock with the process."""
    with (ROOT / ".venv.lock").open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield

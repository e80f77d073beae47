"""Measuring one process from inside: its peak memory and the bytes it had the system read for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MB = 1_000_000


def peak_rss_mb() -> float:
    """The most memory this process ever had resident, file-backed pages included, in MB (10^6 bytes)."""
    try:  # Linux: of this program alone, where getrusage counts what the process was before exec
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
    except OSError:
        pass
    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / MB
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MB


def storage_bytes() -> int | None:
    """Bytes fetched from storage for this process so far, memory-mapped pages included; Linux only."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    counts = dict(line.split(": ") for line in text.splitlines())
    return int(counts["read_bytes"])


def forget_cached(folder: Path) -> None:
    """Have the system drop its cached pages of all files in `folder`, so that reads reach the storage."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def environment() -> dict[str, str]:
    """The environment of a measuring process: one compute thread, no network."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet}


def in_child(module: str, *arguments: str, timeout: float = 600.0) -> dict[str, Any]:
    """Run `python -m benches.MODULE ARGUMENTS` and return the JSON object on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"benches.{module}", *arguments],
        cwd=Path(__file__).resolve().parent.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the measuring process {module} {' '.join(arguments)} failed; what it said is above")
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found

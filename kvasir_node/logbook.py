"""The node's log file: JSON lines, bounded by turning the file over, copied to a second stream if wanted.

Knows files of lines. Knows nothing of what is logged.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

LOG_FILE: Final = "node.log"
MAX_LOG_BYTES: Final = 16 * 1024 * 1024
"""The file is renamed to `node.log.1` at this size, and that one replaced: twice this on disk at most."""


class LogBook(io.TextIOBase):
    """A text stream that appends to `path`; `copy`, if any, gets everything too. Thread-safe."""

    def __init__(self, path: Path, *, copy: TextIO | None = None, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._copy = copy
        self._max = max_bytes
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _append(path)

    def write(self, text: str) -> int:
        """Append; a disk that refuses loses the line, never the daemon."""
        with self._lock:
            with contextlib.suppress(OSError):
                if self._file.tell() + len(text) > self._max:
                    self._turn_over()
                self._file.write(text.encode("utf-8", "backslashreplace"))
                self._file.flush()
            if self._copy is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._copy.write(text)
        return len(text)

    def flush(self) -> None:
        """Everything is on its way already; flushes the copy."""
        if self._copy is not None:
            with contextlib.suppress(OSError, ValueError):
                self._copy.flush()

    def close(self) -> None:
        """Close the file; the copy stays open."""
        self._file.close()
        super().close()

    def _turn_over(self) -> None:
        self._file.close()
        try:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        finally:
            self._file = _append(self._path)


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log, going back into `path`.1 where needed."""
    lines: deque[str] = deque(maxlen=count)
    for part in (path.with_name(path.name + ".1"), path):
        with contextlib.suppress(FileNotFoundError), part.open(encoding="utf-8", errors="replace") as file:
            lines.extend(line.rstrip("\n") for line in file)
    return list(lines)


def new_lines(path: Path) -> Iterator[str | None]:
    """Lines as they are appended to `path`, from its end on; None whenever there is none for now."""
    file: TextIO | None = None
    try:
        while True:
            if file is None and path.exists():
                file = path.open(encoding="utf-8", errors="replace")
                file.seek(0, os.SEEK_END)
            line = file.readline() if file is not None else ""
            if line.endswith("\n"):
                yield line.rstrip("\n")
                continue
            if file is not None:
                file.seek(file.tell() - len(line.encode("utf-8")))
                with contextlib.suppress(OSError):
                    if not os.path.samestat(path.stat(), os.fstat(file.fileno())):  # turned over
                        file.close()
                        file = path.open(encoding="utf-8", errors="replace")
            yield None
    finally:
        if file is not None:
            file.close()


def _append(path: Path) -> io.BufferedWriter:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
    return os.fdopen(descriptor, "ab")

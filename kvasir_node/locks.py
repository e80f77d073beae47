"""One owner a folder: a file lock that the system lets go when its process dies.

Knows fcntl and msvcrt. Knows nothing of what the folder holds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relay.errors import ConfigError


class FolderLock:
    """An exclusive, advisory lock on `folder`, held until `close` or the end of the process.

    Raises `ConfigError` if another process holds it.
    """

    def __init__(self, folder: Path, *, name: str = "lock", owner: str = "kvasir-node") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / name
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            _lock(self._file)
        except OSError:
            os.close(self._file)
            raise ConfigError(
                f"another {owner} uses {folder}: stop it, or give this one its own folder (--state-dir)"
            ) from None

    def close(self) -> None:
        """Let the folder go. The lock file stays: removing it would race with the next owner."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

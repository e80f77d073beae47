"""Pieces of experts on disk: at most so many bytes, the least recently used go first, all verified.

A piece is a file named by its place in the model; its first 32 bytes are the SHA-256 of the rest, checked
whenever it is read. A piece that is damaged, or not what the caller knows it must be, is forgotten.

Knows files and bounds. Knows no network, no plan and no experts. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

import structlog

from market.plans import ByteRange

_DIGEST: Final = 32
_FULL: Final = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
_log = structlog.get_logger("backbone")


class ExpertCache:
    """Pieces under `folder`, at most `cap_bytes` over all models in it. `model`, a commit, names ours."""

    def __init__(self, folder: Path, model: str, *, cap_bytes: int) -> None:
        self._folder = folder
        self._own = folder / model
        self._cap = cap_bytes
        self._lock = threading.Lock()
        self._pieces: OrderedDict[Path, int] = OrderedDict()
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._own.mkdir(parents=True, exist_ok=True)
        found = []
        for path in folder.glob("*/*.piece"):
            with contextlib.suppress(OSError):
                facts = path.stat()
                found.append((facts.st_mtime, path, facts.st_size))
        for _, path, size in sorted(found):
            self._pieces[path] = size
            self.used_bytes += size
        with self._lock:
            self._shrink(0)

    def get(self, where: ByteRange, expected: bytes | None = None) -> bytes | None:
        """The bytes of that piece; None where it is not here, damaged, or has not the hash `expected`."""
        path = self._path(where)
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        digest, body = data[:_DIGEST], data[_DIGEST:]
        good = len(body) == where.nbytes and hashlib.sha256(body).digest() == digest
        if not good or (expected is not None and digest != expected):
            with self._lock:
                self.misses += 1
                self._forget(path)
            return None
        with self._lock:
            self.hits += 1
            if path in self._pieces:
                self._pieces.move_to_end(path)
        with contextlib.suppress(OSError):
            path.touch()
        return body

    def put(self, where: ByteRange, data: bytes) -> None:
        """Keep a piece. A disk that is full keeps nothing, and says so."""
        path, size = self._path(where), _DIGEST + len(data)
        if size > self._cap:
            return
        with self._lock:
            self._forget(path)
            self._shrink(size)
        staging = path.with_name(f"{path.name}.{threading.get_ident()}.new")
        try:
            staging.write_bytes(hashlib.sha256(data).digest() + data)
            staging.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)
            if error.errno not in _FULL:
                raise
            _log.warning("expert.dropped", reason="the disk is full", size_bytes=size)
            return
        with self._lock:
            self.used_bytes += size - self._pieces.pop(path, 0)
            self._pieces[path] = size

    def _path(self, where: ByteRange) -> Path:
        return self._own / f"{where.file}-{where.start}-{where.end}.piece"

    def _shrink(self, need: int) -> None:
        while self._pieces and self.used_bytes + need > self._cap:
            self._forget(next(iter(self._pieces)))

    def _forget(self, path: Path) -> None:
        self.used_bytes -= self._pieces.pop(path, 0)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

"""Verified weights on disk: one file a window, a journal of the chunks known good, a hard cap.

A window's bytes lie in `<plan>/<window>.bin`, the plan's ranges one after another; `<window>.log` holds a
header that binds it to the chunk hashes and then four bytes for every chunk that was verified and written,
so a kill loses at most the chunk being written. Every chunk is hashed again when a window is opened:
nothing unverified is ever used. Opened windows are pinned; of the others the least recently used goes first.

Knows files, hashes and bounds. Knows no network and no tensors. All calls block: run them off the loop.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from market.plans import ByteRange, Plan, PlanId
from market.windows import Window
from relay.errors import ConfigError, KvasirError

from .locks import FolderLock

_MAGIC: Final = b"KVW1"
_HEADER: Final = struct.Struct(">4sI32s")  # magic, chunks, identity
_MARK: Final = struct.Struct(">I")
_RESIDENT_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a mapped window that reading makes resident before they are let go of."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})


class CacheFull(KvasirError):  # noqa: N818 - a state of the disk, not a failure of ours
    """The cap, the reserve or the disk leaves no room for a window; the message says what is needed."""

    code = "quota"


@dataclass(frozen=True, slots=True)
class CachedWindow:
    """A window on disk: its plan's id in hex, its name, its size in bytes, when it was last used."""

    plan: str
    window: str
    size: int
    used_at: float
    path: Path


class WindowBytes:
    """A whole, verified window, memory-mapped. `read` gives views; nothing is copied.

    Pages that were read are let go of every now and then: an expert made from them may have a copy of its
    own, and where it has none they come back from the system's cache at their first use.
    """

    def __init__(self, entry: CacheEntry, map_: mmap.mmap) -> None:
        self._entry = entry
        self._resident = 0
        self._map = map_
        self._view = memoryview(map_)
        self.nbytes = entry.total_bytes

    def read(self, wanted: ByteRange) -> memoryview:
        """The bytes of `wanted`, read-only. Raises `KeyError` if they do not lie in this window."""
        start = self._entry.locate(wanted)
        self._resident += wanted.nbytes
        if self._resident > _RESIDENT_BYTES:
            self.forget_pages()
            self._resident = wanted.nbytes
        return self._view[start : start + wanted.nbytes]

    def forget_pages(self) -> None:
        """Give the mapped pages back to the system, which keeps them as long as it likes."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap (unless views are still out: then when they are gone) and unpin the window."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        self._entry.close()


class ChunkWriter:
    """One chunk on its way to disk, part by part: hashed and written as it comes, in one thread at a time.

    Until its last byte has come and the hash is right the journal does not name it, so it is never used.
    """

    def __init__(self, entry: CacheEntry, index: int, place: int, size: int) -> None:
        self._entry = entry
        self._index = index
        self._place = place
        self._left = size
        self._digest = hashlib.sha256()

    def add(self, parts: Sequence[bytes | bytearray | memoryview]) -> bool | None:
        """The next bytes. None while more are to come; then whether the chunk is right, and kept.

        Raises `CacheFull` when the disk is full.
        """
        size = sum(len(part) for part in parts)
        assert size <= self._left, "more bytes than the chunk has"
        for part in parts:
            self._digest.update(part)
        self._left -= size
        good = None if self._left else self._digest.digest() == self._entry.hash_of(self._index)
        if good is not False:
            self._entry.write(self._place, parts, self._index if good else None)
        self._place += size
        return good


class CacheEntry:
    """One window being filled or read. Pinned until `close`. Safe to use from several threads."""

    def __init__(
        self, cache: WeightCache, stem: Path, chunks: Sequence[ByteRange], hashes: Sequence[bytes]
    ) -> None:
        self._cache = cache
        self._stem = stem
        self._chunks = tuple(chunks)
        self._hashes = tuple(hashes)
        self._offsets: list[int] = []
        self._lock = threading.Lock()
        self._closed = False
        self.total_bytes = 0
        for chunk in self._chunks:
            self._offsets.append(self.total_bytes)
            self.total_bytes += chunk.nbytes
        self._starts = [(chunk.file, chunk.start) for chunk in self._chunks]
        self._identity = hashlib.sha256(struct.pack(">Q", self.total_bytes) + b"".join(self._hashes)).digest()
        self._data = -1
        self._log = -1

    @property
    def path(self) -> Path:
        """The data file."""
        return self._stem.with_suffix(".bin")

    def allocate(self) -> None:
        """Open the files and give the data its full size on disk. Raises `CacheFull` or `OSError`."""
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        fresh = not self.path.exists()
        self._data = os.open(self.path, flags, 0o600)
        self._log = os.open(self._stem.with_suffix(".log"), flags, 0o600)
        try:
            if os.fstat(self._data).st_size != self.total_bytes:
                os.ftruncate(self._data, self.total_bytes)
            if fresh:
                _reserve(self._data, self.total_bytes)
            if os.fstat(self._log).st_size < _HEADER.size or self._header() != self._identity:
                os.ftruncate(self._log, 0)
                _write_at(self._log, 0, _HEADER.pack(_MAGIC, len(self._chunks), self._identity))
        except OSError as error:
            self.close()
            if fresh or error.errno in _FULL:
                self.discard()
            raise _full_or(error, self.total_bytes, self.path) from error
        os.utime(self._stem.with_suffix(".log"))

    def is_open(self) -> bool:
        """Whether `close` was not called yet; what follows from it holds under the lock."""
        return not self._closed

    def verify(self, progress: Callable[[int], None] | None = None) -> set[int]:
        """Hash every chunk the journal names; the indices that are good. The journal keeps only those."""
        with self._lock:
            if not self.is_open():
                return set()
            os.lseek(self._log, _HEADER.size, os.SEEK_SET)
            marks = _read_all(self._log, len(self._chunks) * _MARK.size * 4)
        usable = len(marks) // _MARK.size * _MARK.size
        named = {index for (index,) in _MARK.iter_unpack(marks[:usable]) if index < len(self._chunks)}
        good: set[int] = set()
        for index in sorted(named):
            with self._lock:
                if not self.is_open():
                    return good
                data = _read_at(self._data, self._offsets[index], self._chunks[index].nbytes)
            if hashlib.sha256(data).digest() == self._hashes[index]:
                good.add(index)
            if progress is not None:
                progress(len(data))
        with self._lock:
            if not self.is_open():  # its descriptors may be another file's by now
                return good
            if good != named or len(marks) != len(good) * _MARK.size:
                os.ftruncate(self._log, _HEADER.size)
                _write_at(self._log, _HEADER.size, b"".join(_MARK.pack(index) for index in sorted(good)))
            os.lseek(self._log, 0, os.SEEK_END)
        return good

    def store(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify a chunk and keep it; False if its SHA-256 is not the plan's, and then nothing is kept.

        Raises `CacheFull` when the disk is full.
        """
        if len(data) != self._chunks[index].nbytes or hashlib.sha256(data).digest() != self._hashes[index]:
            return False
        self.write(self._offsets[index], (data,), index)
        return True

    def writer(self, index: int) -> ChunkWriter:
        """Take a chunk's bytes as they come."""
        return ChunkWriter(self, index, self._offsets[index], self._chunks[index].nbytes)

    def hash_of(self, index: int) -> bytes:
        """The SHA-256 that the chunk must have."""
        return self._hashes[index]

    def write(
        self, place: int, parts: Sequence[bytes | bytearray | memoryview], done: int | None = None
    ) -> None:
        """Write `parts` at `place` of the data file; then name chunk `done` in the journal, if given.

        Nothing happens once the entry is closed: the fetch was given up. Raises `CacheFull` or `OSError`.
        """
        with self._lock:
            if self._closed:
                return
            try:
                for part in parts:
                    _write_at(self._data, place, part)
                    place += len(part)
                if done is not None:
                    os.lseek(self._log, 0, os.SEEK_END)
                    os.write(self._log, _MARK.pack(done))
            except OSError as error:
                raise _full_or(error, self.total_bytes, self.path) from error

    def map(self) -> WindowBytes:
        """The whole window, memory-mapped; call when every chunk is stored.

        Nothing is forced to the disk: what a power cut takes is missed when the window is opened again.
        """
        with self._lock:
            if self._closed:
                raise OSError("the window was closed before it was mapped")
            return WindowBytes(self, mmap.mmap(self._data, self.total_bytes, access=mmap.ACCESS_READ))

    def locate(self, wanted: ByteRange) -> int:
        """Where `wanted` starts in the data file. Raises `KeyError` if the window does not hold it all."""
        index = bisect_right(self._starts, (wanted.file, wanted.start)) - 1
        if index < 0 or self._chunks[index].file != wanted.file:
            raise KeyError(wanted)
        place = self._offsets[index] + wanted.start - self._chunks[index].start
        end = self._chunks[index].end
        while end < wanted.end:
            index += 1
            if index == len(self._chunks) or self._starts[index] != (wanted.file, end):
                raise KeyError(wanted)
            end = self._chunks[index].end
        return place

    def close(self) -> None:
        """Close the files and unpin. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for file in (self._data, self._log):
                    if file >= 0:
                        os.close(file)
                self._cache._unpin(self._stem)

    def discard(self) -> None:
        """Remove the window's files from disk; call after `close`."""
        _remove(self._stem)

    def _header(self) -> bytes:
        magic, _, identity = _HEADER.unpack(_read_at(self._log, 0, _HEADER.size))
        return identity if magic == _MAGIC else b""


class WeightCache:
    """The windows on disk under `folder`: at most `cap_bytes`, leaving `reserve_bytes` of the disk free.

    One process at a time: raises `ConfigError` if another holds the folder.
    """

    def __init__(self, folder: Path, *, cap_bytes: int, reserve_bytes: int = 0) -> None:
        self._folder = folder
        self.cap_bytes = cap_bytes
        self._reserve = reserve_bytes
        self._pins: dict[Path, int] = {}
        self._lock = threading.RLock()
        self._owner = FolderLock(folder)

    def open(self, plan: Plan, plan_id: PlanId, window: Window, hashes: Sequence[bytes]) -> CacheEntry:
        """Pin a window and make room for it, evicting unpinned ones, the least recently used first.

        `hashes` are the SHA-256 of `plan.window_chunks(window)`. Raises `CacheFull` before anything is
        written if the cap, the reserve or the disk does not allow it.
        """
        chunks = plan.window_chunks(window)
        if len(chunks) != len(hashes):
            raise KvasirError(
                f"{window}: {len(hashes)} hashes for {len(chunks)} chunks: the backbone made them for "
                "another plan",
                code="bad_request",
            )
        stem = self._stem(plan_id, window)
        entry = CacheEntry(self, stem, chunks, hashes)
        with self._lock:
            self._pins[stem] = self._pins.get(stem, 0) + 1
            try:
                if _size(stem) != entry.total_bytes:
                    self._make_room(stem, entry.total_bytes)
                entry.allocate()
            except BaseException:
                entry.close()
                raise
        return entry

    def whole_windows(self, limit: int = 1024) -> tuple[tuple[PlanId, Window], ...]:
        """Windows whose journals name every chunk, the latest used first: opening them transfers nothing."""
        found = []
        for cached in reversed(self.windows()):
            with contextlib.suppress(OSError, ValueError, struct.error, ConfigError):
                journal = cached.path.with_suffix(".log")
                with journal.open("rb") as file:
                    magic, chunks, _ = _HEADER.unpack(file.read(_HEADER.size))
                marks = (journal.stat().st_size - _HEADER.size) // _MARK.size
                if magic == _MAGIC and 0 < chunks <= marks and cached.size:
                    found.append((PlanId(bytes.fromhex(cached.plan)), Window.parse(cached.window)))
        return tuple(found[:limit])

    def windows(self) -> tuple[CachedWindow, ...]:
        """What is on disk, the least recently used first."""
        found = []
        for log in self._folder.glob("*/*.log"):
            with contextlib.suppress(OSError):
                found.append(
                    CachedWindow(
                        plan=log.parent.name,
                        window=log.stem.replace("_", "/"),
                        size=_size(log.with_suffix("")),
                        used_at=log.stat().st_mtime,
                        path=log.with_suffix(""),
                    )
                )
        return tuple(sorted(found, key=lambda cached: (cached.used_at, cached.path)))

    @property
    def used_bytes(self) -> int:
        """Bytes of all windows on disk, unfinished ones at their full size."""
        return sum(cached.size for cached in self.windows())

    def close(self) -> None:
        """Let other processes use the folder."""
        self._owner.close()

    def _stem(self, plan_id: PlanId, window: Window) -> Path:
        return self._folder / plan_id.hex() / window.name.replace("/", "_")

    def check_room(
        self, plan_id: PlanId, window: Window, need: int, *, freed: tuple[PlanId, Window] | None = None
    ) -> None:
        """Raise `CacheFull` if `open` could not make room for a window of `need` bytes. Changes nothing.

        `freed` is a window that is to be let go before, although it is in use now.
        """
        stem = self._stem(plan_id, window)
        pins = self._pins.keys() - ({self._stem(*freed)} if freed is not None else set())
        self._check_cap(need)
        with self._lock:
            own, others = _size(stem), [cached for cached in self.windows() if cached.path != stem]
            pinned = sum(cached.size for cached in others if cached.path in pins)
        evictable = sum(cached.size for cached in others) - pinned
        free = shutil.disk_usage(self._folder).free + own + evictable
        if own != need and (pinned + need > self.cap_bytes or free - need < self._reserve):
            raise self._full(need, pinned)

    def _check_cap(self, need: int) -> None:
        if need > self.cap_bytes:
            raise CacheFull(
                f"a window of {need:,} bytes is more than the cache may hold ({self.cap_bytes:,}): "
                "raise --cache-bytes"
            )

    def _full(self, need: int, used: int) -> CacheFull:
        free = shutil.disk_usage(self._folder).free
        return CacheFull(
            f"no room for a window of {need:,} bytes: {used:,} of {self.cap_bytes:,} are in use by other "
            f"windows, the disk has {free:,} bytes free and {self._reserve:,} are kept in reserve. "
            "Free some disk, or raise --cache-bytes"
        )

    def _make_room(self, stem: Path, need: int) -> None:
        self._check_cap(need)
        others = [cached for cached in self.windows() if cached.path != stem]
        used = sum(cached.size for cached in others)
        own = _size(stem)

        def fits() -> bool:
            free = shutil.disk_usage(self._folder).free + own
            return used + need <= self.cap_bytes and free - need >= self._reserve

        for cached in others:
            if fits():
                return
            if cached.path not in self._pins and _remove(cached.path):
                used -= cached.size
        if not fits():
            raise self._full(need, used)

    def _unpin(self, stem: Path) -> None:
        with self._lock:
            left = self._pins.get(stem, 0) - 1
            if left > 0:
                self._pins[stem] = left
            else:
                self._pins.pop(stem, None)


def _size(stem: Path) -> int:
    try:
        return stem.with_suffix(".bin").stat().st_size
    except OSError:
        return 0


def _remove(stem: Path) -> bool:
    """Remove a window's files, journal first; False if the system does not let us (open on Windows)."""
    try:
        stem.with_suffix(".log").unlink(missing_ok=True)
        stem.with_suffix(".bin").unlink(missing_ok=True)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        stem.parent.rmdir()
    return True


def _reserve(file: int, size: int) -> None:
    """Claim the blocks now, where the system can, so that a full disk shows before the download."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno in _FULL:
            raise


def _full_or(error: OSError, size: int, path: Path) -> BaseException:
    if error.errno in _FULL:
        return CacheFull(
            f"the disk is full: {path.parent} cannot take a window of {size:,} bytes "
            f"({error.strerror}). Free some disk, or lower --cache-bytes"
        )
    return error


def _write_at(file: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    os.lseek(file, offset, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read_at(file: int, offset: int, size: int) -> bytes:
    os.lseek(file, offset, os.SEEK_SET)
    return _read_all(file, size)


def _read_all(file: int, limit: int) -> bytes:
    parts = []
    while limit > 0 and (part := os.read(file, limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)

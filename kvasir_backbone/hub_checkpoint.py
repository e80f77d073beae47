"""A checkpoint on the hub as the swarm sees it, read by ranges and never stored whole.

At the start come the headers and the dense tensors. A window is streamed once for its hashes, passing
through memory. Single experts, for fallback and audits, are read in the chunks of the plan into a bounded
cache on disk; a chunk whose window has been hashed is checked against that hash before it is used, so audits
compare what nodes hold with the same bytes.

Knows which bytes are wanted when. Fetching is `hub_reader`, the folder for transformers `dense`, the cache
`expert_cache`.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from market.plans import ByteRange, Plan, PlanFile, WindowHashes
from market.windows import Window
from relay.errors import ConfigError

from .checkpoint import Checkpoint, id_of
from .dense import dense_tensors, write_dense
from .expert_cache import ExpertCache
from .hub import HubAccess, HubModel, HubReference, open_model
from .hub_reader import HubReader
from .shards import MAX_HEADER_BYTES, Shards
from .skeleton import Skeleton, build_skeleton, check_folder
from .weights import HubRanges

_log = structlog.get_logger("backbone")

SPAN_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one request while a window is hashed."""

SPANS_AHEAD: Final = 4
RECENT: Final = 12
"""Ranges kept in memory while the plan is made: a proof reads each tensor of its expert twice."""

_TRIES: Final = 3


class HubFile:
    """A `ByteFile` on the hub. `head` are its first bytes, header included; the rest `read` fetches."""

    def __init__(
        self, read: Callable[[ByteRange], bytes], number: int, file: PlanFile, label: str, head: bytes
    ) -> None:
        self.name = file.name
        self.size = file.size
        self.label = label
        self._read = read
        self._number = number
        self._head = head

    def read(self, start: int, end: int) -> bytes:
        """See `ByteFile.read`. Raises `Unreachable` as well."""
        if end <= len(self._head):
            return self._head[start:end]
        return self._read(ByteRange(self._number, start, end))

    def close(self) -> None:
        """See `ByteFile.close`; the reader belongs to the checkpoint."""


class HubCheckpoint(Checkpoint):
    """See the module docstring. Safe to read from several threads."""

    def __init__(
        self, model: HubModel, reader: HubReader, shards: Shards, skeleton: Skeleton, cache: ExpertCache
    ) -> None:
        super().__init__(model.folder / "dense", shards, skeleton, source=model.source)
        self._model = model
        self._cache = cache
        self.reader = reader
        self._chunks: _Chunks | None = None
        self._forget_recent: Callable[[], None] = lambda: None

    @classmethod
    def open_hub(
        cls,
        reference: HubReference,
        access: HubAccess,
        home: Path,
        *,
        cache_bytes: int,
        interruptible: Callable[[Callable[[], None]], None] = lambda end: None,
    ) -> HubCheckpoint:
        """Pin the model, bring its small files and headers under `home`, read nothing else.

        `interruptible` is given what makes waits for the hub fail at once, callable from any thread.
        Raises as `Checkpoint.open` does, and `Unreachable` or `Refused` where the hub is away or busy.
        """
        ended = threading.Event()
        interruptible(ended.set)
        model = open_model(reference, access, home / "models", ended=ended)
        check_folder(model.folder)
        skeleton = build_skeleton(model.folder)
        reader = HubReader(model, access)
        interruptible(reader.close)
        try:
            cache = ExpertCache(home / "experts", model.revision, cap_bytes=cache_bytes)
            recent = functools.lru_cache(maxsize=RECENT)(reader.read)
            files = _open_files(model, reader, recent)
            made = cls(model, reader, Shards(files, f"{model.source}@{model.revision}"), skeleton, cache)
            made._forget_recent = recent.cache_clear
            return made
        except BaseException:
            reader.close()
            raise

    @property
    def name(self) -> str:
        """The repository."""
        return self._model.source

    @property
    def revision(self) -> str:
        """The commit."""
        return self._model.revision

    def make_plan(self, **arguments: Any) -> Plan:
        """See `Checkpoint.make_plan`; from now on experts are read in the plan's chunks, and cached."""
        return self._follow(super().make_plan(**arguments))

    def whole_plan(self, plan: Plan, window_bytes: int) -> Plan:
        """See `Checkpoint.whole_plan`; experts are read in its chunks, which are the plan's and some more."""
        return self._follow(super().whole_plan(plan, window_bytes))

    def _follow(self, plan: Plan) -> Plan:
        self._forget_recent()
        self._chunks = _Chunks(plan, self._model.folder / "hashes" / id_of(plan).hex())
        return plan

    def read(self, where: ByteRange) -> memoryview:
        """The bytes of that range, of an expert from the cache where it has them."""
        found = [] if self._chunks is None else self._chunks.covering(where)
        if not found:
            return super().read(where)
        data: dict[ByteRange, bytes] = {}
        for chunk in found:
            cached = self._cache.get(chunk.range, chunk.hash)
            if cached is not None:
                data[chunk.range] = cached
        missing = [chunk for chunk in found if chunk.range not in data]
        for chunk, fetched in zip(missing, self.reader.read_many(c.range for c in missing), strict=True):
            data[chunk.range] = self._verified(chunk, fetched)
            self._cache.put(chunk.range, data[chunk.range])
        start = where.start - found[0].range.start
        if len(found) == 1:
            return memoryview(data[found[0].range])[start : start + where.nbytes]
        return memoryview(b"".join(data[c.range] for c in found))[start : start + where.nbytes]

    def hash_window(self, plan: Plan, window: Window) -> WindowHashes:
        """See `Checkpoint.hash_window`: every byte of the window is fetched once, and none is kept."""
        started = time.monotonic()
        chunks = plan.window_chunks(window)
        digests: list[bytes] = []
        groups = list(_spans(chunks))
        streamed = self.reader.read_many(
            (ByteRange(g[0].file, g[0].start, g[-1].end) for g in groups), ahead=SPANS_AHEAD
        )
        for group, data in zip(groups, streamed, strict=True):
            view = memoryview(data)
            for chunk in group:
                place = chunk.start - group[0].start
                digests.append(hashlib.sha256(view[place : place + chunk.nbytes]).digest())
        if self._chunks is not None:
            self._chunks.learn(window, digests)
        _log.info(
            "window.hashed",
            window=window.name,
            total_bytes=sum(chunk.nbytes for chunk in chunks),
            seconds=round(time.monotonic() - started, 3),
        )
        return WindowHashes(id_of(plan), window, tuple(digests))

    @functools.cached_property
    def dense_path(self) -> Path:
        """The dense part as a folder for transformers, brought here at the first call. Blocks; minutes."""
        started = time.monotonic()
        classes = self.skeleton.model
        tensors = dense_tensors(
            self.shards.tensors,
            self.recipes(),
            layers=int(self.skeleton.text_config.num_hidden_layers),
            ignored=classes._keys_to_ignore_on_load_unexpected or (),
        )
        small = [path for path in sorted(self._model.folder.iterdir()) if path.is_file()]
        small = [path for path in small if not path.name.startswith((".", "kvasir-"))]
        fetched = write_dense(self.path, tensors, self.reader.read_many, small_files=small)
        _log.info(
            "dense.fetched",
            total_bytes=sum(tensor.end - tensor.start for tensor in tensors),
            received_bytes=fetched,
            seconds=round(time.monotonic() - started, 3),
        )
        return self.path

    def served(self) -> HubRanges:
        """See `Checkpoint.served`: nodes that do not ask the hub get its bytes passed on, none kept."""
        return HubRanges(self.reader)

    def close(self) -> None:
        """End its connections."""
        super().close()
        self.reader.close()

    def _verified(self, chunk: _Chunk, data: bytes) -> bytes:
        """The chunk, fetched again where it is not what was hashed. Raises `ConfigError`."""
        for _ in range(_TRIES):
            if chunk.hash is None or hashlib.sha256(data).digest() == chunk.hash:
                return data
            _log.warning(
                "chunk.rejected", source=self.reader.name, window=chunk.window.name, chunk=chunk.index
            )
            data = self.reader.read(chunk.range)
        raise ConfigError(
            f"the hub gives other bytes for {chunk.window} than those that were hashed: the model's files "
            "there are damaged, or something on the way changes them"
        )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of the plan, and the hash it must have, where that is known."""

    range: ByteRange
    window: Window
    index: int
    hash: bytes | None


class _Chunks:
    """Where every expert's bytes lie in the plan's chunks; the hashes known so far, kept in `folder`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._hashes: dict[Window, tuple[bytes, ...]] = {}
        self._chunks = sorted(
            (chunk, window, index)
            for window in plan.windows
            for index, chunk in enumerate(plan.window_chunks(window))
        )
        self._starts = [(chunk.file, chunk.start) for chunk, _, _ in self._chunks]

    def covering(self, where: ByteRange) -> list[_Chunk]:
        """The chunks that hold `where`, in order; none where some of it is in no window."""
        first = bisect_right(self._starts, (where.file, where.start)) - 1
        found: list[_Chunk] = []
        position = where.start
        for number in range(max(0, first), len(self._chunks)):
            chunk, window, index = self._chunks[number]
            if chunk.file != where.file or not chunk.start <= position < chunk.end:
                return []
            hashes = self._known(window)
            found.append(_Chunk(chunk, window, index, hashes[index] if hashes else None))
            position = chunk.end
            if position >= where.end:
                return found
        return []

    def learn(self, window: Window, digests: Iterable[bytes]) -> None:
        """That window has been hashed."""
        self._hashes[window] = tuple(digests)
        self._folder.mkdir(parents=True, exist_ok=True)
        staging = self._path(window).with_suffix(".new")
        staging.write_bytes(b"".join(self._hashes[window]))
        staging.replace(self._path(window))

    def _known(self, window: Window) -> tuple[bytes, ...]:
        """The window's hashes from this start or an earlier one; empty where it was never hashed."""
        if window not in self._hashes:
            try:
                data = self._path(window).read_bytes()
            except OSError:
                data = b""
            whole = len(data) == 32 * len(self._plan.window_chunks(window))
            cut = (data[place : place + 32] for place in range(0, len(data), 32)) if whole else ()
            self._hashes[window] = tuple(cut)
        return self._hashes[window]

    def _path(self, window: Window) -> Path:
        return self._folder / f"{window.name.replace('/', '_')}.sha256"


def _spans(chunks: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
    """Runs of chunks that follow one another in a file, of at most `SPAN_BYTES`."""
    group: list[ByteRange] = []
    for chunk in chunks:
        follows = group and group[-1].file == chunk.file and group[-1].end == chunk.start
        if group and not (follows and chunk.end - group[0].start <= SPAN_BYTES):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _open_files(model: HubModel, reader: HubReader, read: Callable[[ByteRange], bytes]) -> list[HubFile]:
    """Every file with its header, all headers fetched at once; kept beside the model for the next start.

    `read` fetches what lies after the headers.
    """
    folder = model.folder / "headers"
    folder.mkdir(exist_ok=True)
    labels = [f"{model.source}@{model.revision[:12]}: {file.name}" for file in model.files]
    kept = [_kept_head(folder / f"{number}.head") for number in range(len(model.files))]
    wanted = [number for number, head in enumerate(kept) if not head]
    small = next((labels[number] for number in wanted if model.files[number].size < 8), None)
    if small is not None:
        raise ConfigError(f"{small} is truncated or not a safetensors file")
    prefixes = list(reader.read_many(ByteRange(number, 0, 8) for number in wanted))
    # A length that lies is left to `Shards`, which refuses it before anything of it is read.
    lengths = [int.from_bytes(prefix, "little") for prefix in prefixes]
    believed = [
        8 + length if 2 <= length <= min(MAX_HEADER_BYTES, model.files[number].size - 8) else 8
        for number, length in zip(wanted, lengths, strict=True)
    ]
    rest = reader.read_many(
        ByteRange(number, 8, end) for number, end in zip(wanted, believed, strict=True) if end > 8
    )
    for number, prefix, end in zip(wanted, prefixes, believed, strict=True):
        kept[number] = prefix + (next(rest) if end > 8 else b"")
        if end > 8:
            (folder / f"{number}.head").write_bytes(hashlib.sha256(kept[number]).digest() + kept[number])
    return [
        HubFile(read, number, file, labels[number], kept[number]) for number, file in enumerate(model.files)
    ]


def _kept_head(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else b""

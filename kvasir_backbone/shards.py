"""The safetensors files of a checkpoint folder: what lies where, and exact bytes on demand.

Knows the safetensors format (https://github.com/huggingface/safetensors#format: an 8-byte little-endian
header length, a JSON header, then the data) and the sharded index of the Hugging Face hub. Checks every
header before anything is believed. Knows no torch, no transformers and no model.

Local reads go through positional file reads and never through a memory map, so that the pages of experts
which were hashed or served do not count against this process. Files elsewhere (`ByteFile`) are read as their
owner can.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from market.plans import STORED_DTYPES, ByteRange, PlanFile
from relay.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound on a header."""

MAX_INDEX_BYTES = 256 * 1024 * 1024
"""An index larger than this is no index."""

_PREAD = hasattr(os, "pread")
_ADVISE = hasattr(os, "posix_fadvise")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: bytes `start` up to `end` of file number `file`."""

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class ByteFile(Protocol):
    """One safetensors file, wherever it is. Reads are safe from several threads.

    `name` is relative to the model, `label` names it to people, `size` is in bytes.
    """

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def size(self) -> int: ...

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Bytes `start` up to `end`. Raises `ConfigError` where they are gone."""
        ...

    def close(self) -> None:
        """Nothing is read any more."""
        ...


class LocalFile:
    """A `ByteFile` of a folder here. Raises `ConfigError` where it is missing or leads out of the folder."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / name
        if not path.is_file():
            raise ConfigError(f"the checkpoint's index names {name}, which is not in {folder}")
        _refuse_outside(folder, path)
        self.name = name
        self.label = str(path)
        self._lock = threading.Lock()
        self._handle = path.open("rb", buffering=0)
        if _ADVISE:  # single experts and samples are read: no use in what lies behind them
            os.posix_fadvise(self._handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.size = os.fstat(self._handle.fileno()).st_size

    def read(self, start: int, end: int) -> bytes:
        """See `ByteFile.read`."""
        if not _PREAD:
            with self._lock:
                self._handle.seek(start)
                return self._whole(self._handle.read(end - start) or b"", start, end)
        data = os.pread(self._handle.fileno(), end - start, start)
        while len(data) < end - start:  # a single read stops at 2 GiB, or earlier on some file systems
            more = os.pread(self._handle.fileno(), end - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return self._whole(data, start, end)

    def close(self) -> None:
        """See `ByteFile.close`."""
        self._handle.close()

    def _whole(self, data: bytes, start: int, end: int) -> bytes:
        if len(data) != end - start:
            raise ConfigError(
                f"{self.label} has changed while it was open: bytes {start} to {end} are gone; put the file "
                "back and start again"
            )
        return data


class Shards:
    """Every tensor of a checkpoint by name, from the headers of its files, which it owns.

    Raises `ConfigError` for headers that are truncated, oversized, overlapping or lying. `where` names the
    checkpoint to people. Reads are safe from several threads.
    """

    def __init__(self, files: Sequence[ByteFile], where: str) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._files = tuple(files)
        self._headers: list[bytes] = []
        try:
            for number, file in enumerate(self._files):
                self._add(file, number, where)
        except BaseException:
            self.close()
            raise
        self.files = tuple(PlanFile(file.name, file.size) for file in self._files)

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Open every safetensors file that the index names (or all of them where there is no index).

        Raises `ConfigError` for a folder without safetensors, an index that names missing files or paths
        outside the folder, and bad headers.
        """
        index = folder / INDEX_NAME
        if index.is_file():
            names = index_names(index)
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ConfigError(
                f"{folder} holds no .safetensors files: convert the checkpoint to safetensors first "
                "(save_pretrained writes them)"
            )
        files: list[LocalFile] = []
        try:
            for name in names:
                files.append(LocalFile(folder, name))
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(files, str(folder))

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def read(self, where: ByteRange) -> memoryview:
        """The bytes of that range. Raises `ConfigError` where they are gone."""
        return memoryview(self._files[where.file].read(where.start, where.end))

    def revision(self) -> str:
        """A name for these exact bytes: SHA-256 over every name, size and header and 64 samples a file.

        The data itself is pinned chunk by chunk in the windows' hash documents; the samples tell apart two
        checkpoints of one shape without reading a hundred gigabytes.
        """
        digest = hashlib.sha256(b"kvasir local revision 1")
        for number, file in enumerate(self.files):
            digest.update(f"{file.name}\0{file.size}\0".encode())
            digest.update(self._headers[number])
            for sample in range(64):
                start = file.size * sample // 64
                digest.update(self.read(ByteRange(number, start, min(start + 4096, file.size))))
        return "local-" + digest.hexdigest()[:40]

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; reads afterwards fail."""
        for file in self._files:
            file.close()

    def _add(self, file: ByteFile, number: int, where: str) -> None:
        header = _read_header(file)
        self._headers.append(header)
        for tensor in _parse_header(file.label, header, file.size, number):
            if tensor.name in self.tensors:
                raise ConfigError(f"tensor {tensor.name} is in two files of {where}; keep one")
            self.tensors[tensor.name] = tensor


def index_names(index: Path) -> list[str]:
    """The distinct file names of a sharded index, sorted. Raises `ConfigError` for any outside its folder."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES:,} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error}") from None
    for name in names:
        if not name.endswith(".safetensors") or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"{index} names {name!r}, which is not a safetensors file of this folder")
    return names


def _refuse_outside(folder: Path, path: Path) -> None:
    """A shard must lie in the model's folder, or in the hub cache's `blobs` beside it."""
    real, home = path.resolve(), folder.resolve()
    cache = home.parent.parent if home.parent.name == "snapshots" else home
    if not real.is_relative_to(home) and not real.is_relative_to(cache):
        raise ConfigError(f"{path} is a link out of the model's folder, to {real}: copy the file in")


def header_length(prefix: bytes | memoryview, label: str, size: int) -> int:
    """Bytes of the header after the first 8 bytes of a file of `size` bytes. Raises `ConfigError`."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ConfigError(f"{label} is truncated or not a safetensors file: fetch it again")
    return length


def _read_header(file: ByteFile) -> bytes:
    if file.size < 8:
        raise ConfigError(f"{file.label} is truncated or not a safetensors file: fetch it again")
    length = header_length(file.read(0, 8), file.label, file.size)
    return bytes(file.read(8, 8 + length))


def _parse_header(path: str, header: bytes, size: int, number: int) -> Iterator[StoredTensor]:
    """The tensors of one header, checked: known dtypes, true lengths, inside the file, disjoint."""
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        base = 8 + len(header)
        tensors = [_stored_tensor(name, entry, base, number) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the header of {path} is malformed ({error}): fetch the file again") from None
    end = base
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start < end or tensor.end > size:
            raise ConfigError(
                f"{path}: tensor {tensor.name} overlaps another or lies outside the file, which is truncated "
                "or corrupt: fetch it again"
            )
        end = tensor.end
    yield from tensors


def _stored_tensor(name: str, entry: dict[str, Any], base: int, number: int) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(value) is not int for value in (*shape, begin, end)):
        raise ValueError(f"{name} is not described by a dtype and whole numbers")
    elements = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"{name} has a negative dimension")
        elements *= size
    if dtype in STORED_DTYPES and end - begin != elements * STORED_DTYPES[dtype]:
        raise ValueError(f"{name} claims {end - begin} bytes for {shape} of {dtype}")
    if not 0 <= begin <= end:
        raise ValueError(f"{name} has offsets {begin} to {end}")
    return StoredTensor(name, number, dtype, shape, base + begin, base + end)

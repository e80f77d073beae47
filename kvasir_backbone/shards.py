"""The safetensors files of a checkpoint folder: what lies where, and exact bytes on demand.

Knows the safetensors format (https://github.com/huggingface/safetensors#format: an 8-byte little-endian
header length, a JSON header, then the data) and the sharded index of the Hugging Face hub. Checks every
header before anything is believed. Knows no torch, no transformers and no model.

Reads go through positional file reads and never through a memory map, so that the pages of experts which
were hashed or served do not count against this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from market.plans import STORED_DTYPES, ByteRange, PlanFile
from relay.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound on a header."""

_PREAD = hasattr(os, "pread")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: bytes `start` up to `end` of file number `file`."""

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Shards:
    """Every tensor of a checkpoint folder by name. Reads are safe from several threads."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._handles: list[BinaryIO] = []
        self._locks: list[threading.Lock] = []
        self._headers: list[bytes] = []
        files: list[PlanFile] = []
        try:
            for name in names:
                files.append(self._add(name, len(files)))
        except BaseException:
            self.close()
            raise
        self.files = tuple(files)

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Open every safetensors file that the index names (or all of them where there is no index).

        Raises `ConfigError` for a folder without safetensors, an index that names missing files or paths
        outside the folder, and headers that are truncated, oversized, overlapping or lying.
        """
        index = folder / INDEX_NAME
        if index.is_file():
            names = _index_names(index)
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ConfigError(
                f"{folder} holds no .safetensors files: convert the checkpoint to safetensors first "
                "(save_pretrained writes them)"
            )
        return cls(folder, names)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def read(self, where: ByteRange) -> memoryview:
        """The bytes of that range. Raises `ConfigError` where the file has become shorter."""
        handle, want = self._handles[where.file], where.nbytes
        if _PREAD:
            data = os.pread(handle.fileno(), want, where.start)
            while len(data) < want:  # a single read stops at 2 GiB, or earlier on some file systems
                more = os.pread(handle.fileno(), want - len(data), where.start + len(data))
                if not more:
                    break
                data += more
        else:
            with self._locks[where.file]:
                handle.seek(where.start)
                data = handle.read(want)
        if len(data) != want:
            raise ConfigError(
                f"{self.folder / self.files[where.file].name} has changed while it was open: bytes "
                f"{where.start} to {where.end} are gone; put the file back and start again"
            )
        return memoryview(data)

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
        for handle in self._handles:
            handle.close()

    def _add(self, name: str, number: int) -> PlanFile:
        path = self.folder / name
        if not path.is_file():
            raise ConfigError(f"the checkpoint's index names {name}, which is not in {self.folder}")
        _refuse_outside(self.folder, path)
        size = path.stat().st_size
        handle = path.open("rb", buffering=0)
        self._handles.append(handle)
        self._locks.append(threading.Lock())
        header = _read_header(path, handle, size)
        self._headers.append(header)
        for tensor in _parse_header(path, header, size, number):
            if tensor.name in self.tensors:
                raise ConfigError(f"tensor {tensor.name} is in two files of {self.folder}; keep one")
            self.tensors[tensor.name] = tensor
        return PlanFile(name, size)


def _index_names(index: Path) -> list[str]:
    """The distinct file names of a sharded index, sorted."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def _read_header(path: Path, handle: BinaryIO, size: int) -> bytes:
    prefix = handle.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ConfigError(f"{path} is truncated or not a safetensors file: fetch it again")
    header = handle.read(length)
    if len(header) != length:
        raise ConfigError(f"{path} is truncated: fetch it again")
    return header


def _parse_header(path: Path, header: bytes, size: int, number: int) -> Iterator[StoredTensor]:
    """The tensors of one header, checked: known dtypes, true lengths, inside the file, disjoint."""
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        base = 8 + len(header)
        tensors = [_stored_tensor(name, entry, base, number) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
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

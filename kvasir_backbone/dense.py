"""The dense part of a hub model as a folder that transformers can load: the same tensors, no experts.

For every file of the model that holds dense tensors one small safetensors file is written with those alone,
byte for byte, and an index over them; configuration and tokenizer lie beside it. A file is complete or not
there, and is hashed again at each start before it is used.

Knows the safetensors format and folders. Knows no HTTP and no experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from market.plans import ByteRange, LayerRecipe
from relay.errors import ConfigError

from .shards import INDEX_NAME, StoredTensor

SPAN_BYTES: Final = 16 * 1024 * 1024
"""Bytes asked for at a time."""

_EXPERT: Final = re.compile(r"(?:^|\.)experts\.\d+\.")
_LAYER: Final = re.compile(r"^(?:model\.)?layers\.(\d+)\.")

ReadMany = Callable[[Iterable[ByteRange]], Iterator[bytes]]
"""Ranges -> their bytes, in order."""


def dense_tensors(
    tensors: Mapping[str, StoredTensor],
    recipes: Sequence[LayerRecipe],
    *,
    layers: int,
    ignored: Iterable[str],
) -> tuple[StoredTensor, ...]:
    """The tensors of the model that are not of a routed expert and that transformers would load.

    `layers` is how many layers the model has (checkpoints carry more: prediction heads), `ignored` the
    patterns of keys that its class does not load.
    """
    routed = {
        (span.file, span.start)
        for recipe in recipes
        for source in recipe.sources()
        for span in map(source.locate, range(recipe.experts))
    }
    patterns = [re.compile(pattern) for pattern in ignored]

    def wanted(tensor: StoredTensor) -> bool:
        if (tensor.file, tensor.start) in routed and tensor.end > tensor.start:
            return False
        layer = _LAYER.match(tensor.name)
        if _EXPERT.search(tensor.name) or (layer is not None and int(layer[1]) >= layers):
            return False
        return not any(pattern.search(tensor.name) for pattern in patterns)

    return tuple(sorted(filter(wanted, tensors.values()), key=lambda t: (t.file, t.start, t.end)))


def write_dense(
    folder: Path, tensors: Sequence[StoredTensor], read_many: ReadMany, *, small_files: Iterable[Path]
) -> int:
    """Make or complete the folder; the bytes read for it. Raises `ConfigError` where the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in small_files:
            if path.name != INDEX_NAME:
                shutil.copyfile(path, folder / path.name)
        numbers = sorted({tensor.file for tensor in tensors})
        names = {number: f"dense-{number + 1:05d}.safetensors" for number in numbers}
        read = 0
        for number in numbers:
            own = [tensor for tensor in tensors if tensor.file == number]
            if not _is_whole(folder / names[number], own):
                read += _write_file(folder / names[number], own, read_many)
        weight_map = {tensor.name: names[tensor.file] for tensor in tensors}
        total = sum(tensor.end - tensor.start for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _replace(folder / INDEX_NAME, json.dumps(index).encode())
        return read
    except OSError as error:
        raise ConfigError(
            f"cannot write the dense part of the model to {folder}: {error.strerror or error}. Free some "
            "disk, or give another --state-dir"
        ) from error


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        size = tensor.end - tensor.start
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, tensors: Sequence[StoredTensor], read_many: ReadMany) -> int:
    header = _header(tensors)
    digest = hashlib.sha256(header)
    staging = path.with_suffix(".part")
    read = 0
    try:
        with staging.open("wb") as file:
            file.write(header)
            for data in read_many(spans(tensors)):
                digest.update(data)
                file.write(data)
                read += len(data)
            file.flush()
            os.fsync(file.fileno())
        _replace(path.with_suffix(".sha256"), digest.hexdigest().encode("ascii"))
        staging.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
    return read


def spans(tensors: Iterable[StoredTensor]) -> Iterator[ByteRange]:
    """The bytes of tensors (sorted, of one file) as ranges of at most `SPAN_BYTES`, none wider than they."""
    joined: list[ByteRange] = []
    for tensor in tensors:
        if joined and joined[-1].end == tensor.start:
            joined[-1] = ByteRange(tensor.file, joined[-1].start, tensor.end)
        elif tensor.end > tensor.start:
            joined.append(ByteRange(tensor.file, tensor.start, tensor.end))
    for whole in joined:
        for start in range(whole.start, whole.end, SPAN_BYTES):
            yield ByteRange(whole.file, start, min(start + SPAN_BYTES, whole.end))


def _is_whole(path: Path, tensors: Sequence[StoredTensor]) -> bool:
    """Whether an earlier start wrote that file, and it is still what it wrote."""
    header = _header(tensors)
    size = len(header) + sum(tensor.end - tensor.start for tensor in tensors)
    try:
        expected = path.with_suffix(".sha256").read_text("ascii")
        if path.stat().st_size != size:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                return False
            digest.update(header)
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError):
        return False
    return digest.hexdigest() == expected


def _replace(path: Path, data: bytes) -> None:
    staging = path.with_name(path.name + ".new")
    staging.write_bytes(data)
    staging.replace(path)

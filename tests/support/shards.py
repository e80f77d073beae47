"""safetensors files written by hand, well formed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def raw_safetensors(header: dict[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header; `length` overrides the true header length in front of it."""
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_index(folder: Path, weight_map: Any) -> None:
    """An index that names files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

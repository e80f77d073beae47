"""safetensors files on disk: exact bytes, and every way in which a header can lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvasir_backbone.shards import Shards
from market.plans import ByteRange
from relay.errors import ConfigError
from tests.support.shards import entry, raw_safetensors, write_index


def test_reads_exact_bytes_of_every_tensor(tmp_path: Path) -> None:
    one, two = torch.randn(5, 7), torch.arange(12, dtype=torch.int32).view(3, 4)
    save_file({"one": one, "two": two}, tmp_path / "model.safetensors")
    with Shards.open(tmp_path) as shards:
        for name, tensor in (("one", one), ("two", two)):
            stored = shards.tensors[name]
            data = shards.read(ByteRange(stored.file, stored.start, stored.end))
            assert data == tensor.numpy().tobytes()
            assert stored.shape == tuple(tensor.shape)
        assert shards.total_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_an_index_decides_which_files_count(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with Shards.open(tmp_path) as shards:
        assert [file.name for file in shards.files] == ["model-1.safetensors", "model-2.safetensors"]
        assert sorted(shards.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry("F32", [2], 0, 8)}, b"1234", "outside the file"),
        ({"a": entry("F32", [3], 0, 8)}, bytes(8), "claims 8 bytes"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, bytes(6), "overlaps"),
        ({"a": entry("F32", [-1], 0, 4)}, bytes(4), "negative"),
        ({"a": entry("F32", [1], 4, 0)}, bytes(4), "bytes"),
        ({"a": entry("F32", [2], 0, 8) | {"shape": [2.0]}}, bytes(8), "whole numbers"),
        ({"a": entry("F32", [1], 0, 4) | {"data_offsets": [False, 4]}}, bytes(4), "whole numbers"),
        ({"a": entry("F32", [1], 0, 4) | {"dtype": 32}}, bytes(4), "whole numbers"),
        ({"a": entry("F32", [2**62, 2**62], 0, 4)}, bytes(4), "claims 4 bytes"),
        ({"a": entry("F32", [1], 0, 1 << 70) | {"shape": [1 << 68]}}, bytes(4), "outside the file"),
        ({"a": {"dtype": "F32"}}, b"", "malformed"),
        ({"a": 7}, b"", "malformed"),
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, header: dict[str, object], data: bytes, says: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(header, data))
    with pytest.raises(ConfigError, match=says):
        Shards.open(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08", raw_safetensors({}, length=1 << 40), raw_safetensors({}, length=0), b"\xff" * 64],
)
def test_truncated_and_oversized_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="truncated"):
        Shards.open(tmp_path)


def test_a_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json")
    with pytest.raises(ConfigError, match="malformed"):
        Shards.open(tmp_path)


def test_a_header_nested_without_end_is_refused(tmp_path: Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ConfigError, match="malformed"):
        Shards.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ConfigError, match="not a safetensors index"):
        Shards.open(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "model.bin", 7])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(ConfigError, match="index"):
        Shards.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], "x"])
def test_a_malformed_index_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ConfigError):
        Shards.open(tmp_path)


def test_an_index_that_names_a_missing_file_says_which(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "model-9.safetensors"})
    with pytest.raises(ConfigError, match=r"model-9\.safetensors"):
        Shards.open(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="optional: links need a privilege there")
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    model = tmp_path / "model"
    elsewhere.mkdir()
    model.mkdir()
    save_file({"a": torch.ones(1)}, elsewhere / "secret.safetensors")
    (model / "model.safetensors").symlink_to(elsewhere / "secret.safetensors")
    with pytest.raises(ConfigError, match="link out of"):
        Shards.open(model)


@pytest.mark.skipif(sys.platform == "win32", reason="optional: links need a privilege there")
def test_the_hub_caches_own_links_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(blobs / "0123")
    with Shards.open(snapshot) as shards:
        assert "a" in shards.tensors


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="two files"):
        Shards.open(tmp_path)


def test_no_safetensors_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="convert the checkpoint"):
        Shards.open(tmp_path)


def test_the_revision_tells_contents_apart(tmp_path: Path) -> None:
    revisions = []
    for number, value in enumerate((1.0, 1.0, 2.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"a": torch.full((100,), value)}, folder / "model.safetensors")
        with Shards.open(folder) as shards:
            revisions.append(shards.revision())
    assert revisions[0] == revisions[1] != revisions[2]


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    with Shards.open(tmp_path) as shards:
        stored = shards.tensors["a"]
        os.truncate(file, stored.start + 4)
        with pytest.raises(ConfigError, match="changed while it was open"):
            shards.read(ByteRange(0, stored.start, stored.end))

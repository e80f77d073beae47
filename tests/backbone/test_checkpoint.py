"""A checkpoint opened: what is refused and by which name, and the plan made of it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from market.plans import ByteRange, Plan, parse_plan, plan_fields, plan_id, sign_plan
from relay.errors import ConfigError
from relay.identity import PROTOCOL_VERSION, SigningKey


def test_a_missing_path_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="give the folder"):
        Checkpoint.open(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no config.json"), ("{", "not valid JSON"), ("[]", "model_type"), ('{"a": 1}', "model_type")],
)
def test_a_folder_needs_a_configuration(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        Checkpoint.open(tmp_path)


def test_cheap_refusals_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from kvasir_backbone.checkpoint import Checkpoint\n"
        f"try:\n    Checkpoint.open({str(tmp_path)!r})\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "ConfigError"), done.stderr


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_without_routed_experts_is_refused(tmp_path: Path, name: str) -> None:
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"\({name}\) has no routed experts"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["llama4_text", "jetmoe", "longcat_flash", "doge", "dbrx", "nllb-moe"])
def test_an_architecture_that_is_not_covered_is_refused_by_name(tmp_path: Path, name: str) -> None:
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=name):  # imports what the architecture needs
        Checkpoint.open(tmp_path)
    started = time.process_time()
    with pytest.raises(ConfigError, match="cannot serve it"):
        Checkpoint.open(tmp_path)
    assert time.process_time() - started < 5.0  # to load its code and build it takes longer


def test_an_unknown_model_type_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_moe"}')
    with pytest.raises(ConfigError, match="no_such_moe"):
        Checkpoint.open(tmp_path)


def test_an_unknown_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    config = json.loads((bundled_model_path() / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="gptq"):
        Checkpoint.open(tmp_path)


def test_a_checkpoint_whose_experts_are_missing_says_which(tmp_path: Path) -> None:
    source = bundled_model_path()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        shutil.copy(source / name, tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ConfigError, match=r"layers\.\d.*experts"):
        checkpoint.make_plan(window_bytes=8 << 20, wire_dtype="float32")


def test_the_bundled_plan_is_whole(bundled: Checkpoint, bundled_plan: Plan) -> None:
    plan = bundled_plan
    assert (plan.width, plan.wire_dtype, plan.architecture) == (192, "float32", "Qwen3MoeForCausalLM")
    assert [(layer.layer, layer.experts, layer.top_k) for layer in plan.layers] == [
        (number, 256, 8) for number in range(4)
    ]
    assert bundled.moe_layers == (0, 1, 2, 3)
    covered = [
        (layer.layer, expert)
        for window in plan.windows
        for layer in plan.window_layers(window)
        for expert in range(window.expert_start, window.expert_end)
    ]
    assert sorted(covered) == [(layer, expert) for layer in range(4) for expert in range(256)]
    held = sum(chunk.nbytes for window in plan.windows for chunk in plan.window_chunks(window))
    assert held == 4 * 256 * 3 * 32 * 192 * 2
    assert held / bundled.total_bytes > 0.94


def test_a_plan_survives_the_wire(bundled_plan: Plan) -> None:
    assert parse_plan({"v": PROTOCOL_VERSION, **plan_fields(bundled_plan)}) == bundled_plan


def test_a_plan_does_not_depend_on_which_experts_prove_it(bundled_plan: Plan) -> None:
    with Checkpoint.open(bundled_model_path()) as again:
        other = again.make_plan(window_bytes=8 << 20, wire_dtype="float32", rng=random.Random(99))
    assert other == bundled_plan


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"wire_dtype": "float8"}, "float8"),
        ({"precisions": ("int3",)}, "int3"),
        ({"precisions": ()}, "precisions"),
        ({"window_bytes": 0}, "window-bytes"),
    ],
)
def test_bad_plan_arguments_are_refused(bundled: Checkpoint, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bundled.make_plan(**{"window_bytes": 1 << 20, "wire_dtype": "float32", **arguments})  # type: ignore[arg-type]


def test_hashes_are_those_of_the_files_bytes(bundled: Checkpoint, bundled_plan: Plan) -> None:
    window = bundled_plan.windows[3]
    hashes = bundled.hash_window(bundled_plan, window)
    hashes.check(bundled_plan)
    assert hashes.plan == plan_id(sign_plan(bundled_plan, SigningKey.generate()))
    for chunk, digest in zip(bundled_plan.window_chunks(window), hashes.chunks, strict=True):
        data = (bundled.path / bundled_plan.files[chunk.file].name).read_bytes()
        assert hashlib.sha256(data[chunk.start : chunk.end]).digest() == digest


def test_what_is_read_ahead_of_loading_is_the_dense_part_and_nothing_else(
    bundled: Checkpoint, bundled_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ByteRange] = []
    monkeypatch.setattr(bundled, "read", seen.append)
    bundled.warm_dense()
    routed = [chunk for window in bundled_plan.windows for chunk in bundled_plan.window_chunks(window)]
    assert not any(a.file == b.file and a.start < b.end and b.start < a.end for a in seen for b in routed)
    held = sum(tensor.end - tensor.start for tensor in bundled.shards.tensors.values())
    assert sum(span.nbytes for span in seen) == held - sum(chunk.nbytes for chunk in routed)

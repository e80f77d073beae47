"""docs/models.md is what its script writes now, and real models in it have the sizes that are published."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.architectures import ARCHITECTURES, NOT_SERVED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
PUBLISHED = {
    "MiniMax-M2": 228.7, "Qwen3.5-122B-A10B": 122.1, "DeepSeek-V3": 671.0, "GLM-4.5-Air": 106.9,
    "gpt-oss-120b": 116.8, "Qwen3-30B-A3B": 30.5,
}  # fmt: skip
"""Parameters in 10^9 without prediction heads, which are not loaded."""


@pytest.fixture(autouse=True)
def scripts_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield
    for name in ("models", "_real_models", "_env"):
        sys.modules.pop(name, None)


def test_the_page_is_current() -> None:
    import models

    assert PAGE.read_text(encoding="utf-8") == models.render(), "run python3 scripts/models.py"


def test_the_page_names_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in [entry.name for entry in ARCHITECTURES] + list(NOT_SERVED):
        assert f"`{name}`" in text


def test_a_changed_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import models

    monkeypatch.setattr(models, "render", lambda: "# Models\n")
    monkeypatch.setattr(models, "PAGE", tmp_path / "models.md")
    assert models.main(["--check"]) == 1
    assert models.main([]) == 0
    assert models.main(["--check"]) == 0


def test_real_models_have_their_published_size() -> None:
    from _real_models import REAL_MODELS, measure

    assert {model.name for model in REAL_MODELS} == set(PUBLISHED)
    for size in map(measure, REAL_MODELS):
        assert size.total / 1e9 == pytest.approx(PUBLISHED[size.model.name], rel=2e-3)


def test_kept_bytes_of_a_weight_are_those_of_a_plan() -> None:
    from _real_models import INT4_BYTES, INT8_BYTES

    from kvasir_backbone.bundled import bundled_model_path
    from kvasir_backbone.checkpoint import Checkpoint

    with Checkpoint.open(bundled_model_path()) as checkpoint:
        plan = checkpoint.make_plan(
            window_bytes=1 << 30, wire_dtype="float32", precisions=("stored", "int8", "int4")
        )
    (window,) = plan.windows
    stored = plan.kept_bytes(window)
    assert stored == sum(recipe.expert_bytes * recipe.experts for recipe in plan.layers)
    assert plan.kept_bytes(window, "int4") == stored / 2 * INT4_BYTES
    # inputs of 192 and 32: the last group of 128 is shorter, and has its scale all the same
    assert INT8_BYTES < plan.kept_bytes(window, "int8") * 2 / stored < INT8_BYTES + 0.1

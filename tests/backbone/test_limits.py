"""The calibrated limits: which replicas have one, and which fall back to the start values."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from kvasir_backbone.audit import LIMIT, limit_of
from kvasir_backbone.limits import calibrated, read_limits
from kvasir_node.execution import KERNEL_LIMITS
from kvasir_node.precision import QUANTISERS
from relay.errors import ConfigError

SHIPPED = read_limits(resources.files("kvasir_backbone").joinpath("limits.json").read_text("utf-8"))


def test_every_precision_and_wire_has_a_limit_of_enough_rows() -> None:
    assert {(each.weights, each.wire) for each in SHIPPED} == {
        (weights, wire) for weights in QUANTISERS.values() for wire in ("float32", "bfloat16")
    }
    for each in SHIPPED:
        assert each.rows >= 300_000  # fewer than 3 / rows are over the largest, with 95 % confidence
        assert each.limit >= 2 * each.largest
        # A kernel that passes a node's own self-check is never over it.
        activations = "none" if each.weights in ("stored", "bf16") else "int16"
        assert each.limit >= KERNEL_LIMITS[activations]


@pytest.mark.parametrize("each", SHIPPED, ids=lambda each: f"{each.weights}-{each.wire}")
def test_replicas_with_measured_kernels_have_the_calibrated_limit(each) -> None:  # type: ignore[no-untyped-def]
    precision = next(name for name, weights in QUANTISERS.items() if weights == each.weights)
    for family in ("c1", "torch-2.13.0"):
        for activations in ("none", "int16"):
            numerics = f"1/{each.weights}/{activations}/{each.wire}/fp32b524288/{family}/0123456789ab"
            assert limit_of(numerics, precision) == each.limit


@pytest.mark.parametrize(
    "numerics",
    [
        "1/stored/none/float32/fp32b524288/cuda-sm90-torch-2.13.0/abc",
        "1/stored/none/float16/fp32b524288/c1/abc",
        "1/stored/int8/float32/fp32b524288/c1/abc",
        "1/int8g128/int16/float32/fp32b524288/c1/abc",  # says another quantiser than it was leased at
        "1/stored/none/float32",
        "",
    ],
)
def test_other_classes_keep_the_start_value(numerics: str) -> None:
    assert calibrated("stored", numerics) is None
    assert limit_of(numerics, "stored") == LIMIT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"v": 2, "limits": []}),
        json.dumps({"v": 1, "limits": [{"weights": "stored"}]}),
        json.dumps(
            {"v": 1, "limits": [
                {"weights": "stored", "wire": "float32", "families": [], "limit": 1e-9, "rows": 1,
                 "largest": 1e-8}
            ]}
        ),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_limits(text)

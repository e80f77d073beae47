"""The quantisers, bit for bit: against arithmetic written out by hand, and known digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvasir_node.execution import synthetic_rows
from kvasir_node.numerics import (
    DenseMatrix,
    Int4Matrix,
    Int8Matrix,
    Matrix,
    hash_tensor,
    quantise_int4,
    quantise_int8,
    to_fp32,
)
from relay.errors import ConfigError

WIDTHS = (1, 5, 16, 31, 32, 33, 127, 128, 129, 200, 256)


def example(width: int, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    weights = torch.randn(6, width, generator=torch.Generator().manual_seed(seed)) * scale
    weights[1] = 0.0
    weights[2] = -3.25 * scale
    weights[3, 0] *= 100
    return weights


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def bf16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).bfloat16().float().item()


def half_even(value: float) -> int:
    return round(value)  # Python rounds halves to even


@pytest.mark.parametrize("width", WIDTHS)
def test_int8_is_what_its_definition_says(width: int) -> None:
    weights = example(width)
    kept = quantise_int8(weights)
    assert kept.values.dtype == torch.int8
    assert kept.scale.shape == (6, math.ceil(width / 128))
    values = to_fp32(kept)
    for row in range(6):
        for group in range(kept.scale.shape[1]):
            columns = range(group * 128, min(width, group * 128 + 128))
            scale = fp32(max(abs(weights[row, c].item()) for c in columns) / 127)
            assert kept.scale[row, group].item() == scale
            for column in columns:
                q = half_even(fp32(weights[row, column].item() / scale)) if scale else 0
                assert kept.values[row, column].item() == max(-127, min(127, q))
                assert values[row, column].item() == fp32(max(-127, min(127, q)) * scale)


@pytest.mark.parametrize("width", WIDTHS)
def test_int4_is_what_its_definition_says(width: int) -> None:
    weights = example(width)
    kept = quantise_int4(weights)
    groups = math.ceil(width / 32)
    assert kept.packed.shape == (6, groups * 16)
    assert kept.scale.dtype == kept.minimum.dtype == torch.bfloat16
    values = to_fp32(kept)
    for row in range(6):
        for group in range(groups):
            columns = range(group * 32, min(width, group * 32 + 32))
            inside = [weights[row, c].item() for c in columns]
            low = bf16(min(inside))
            scale = bf16(fp32(max(0.0, fp32(max(inside) - low)) / 15))
            assert kept.minimum[row, group].item() == low
            assert kept.scale[row, group].item() == scale
            for place in range(32):
                byte = int(kept.packed[row, group * 16 + place % 16].item())
                stored = byte >> 4 if place >= 16 else byte & 15
                if place >= len(inside):
                    assert stored == 0
                    continue
                q = half_even(fp32(fp32(inside[place] - low) / scale)) if scale else 0
                assert stored == max(0, min(15, q))
                assert values[row, group * 32 + place].item() == fp32(stored * scale + low)


@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_quantisation_errors_stay_within_a_step(width: int, seed: int, scale: float) -> None:
    weights = example(width, seed=seed, scale=scale)
    eight = quantise_int8(weights)
    step = eight.scale.repeat_interleave(128, 1)[:, :width]
    assert ((to_fp32(eight) - weights).abs() <= step * 0.5001).all()
    four = quantise_int4(weights)
    coarse = four.scale.float().repeat_interleave(32, 1)[:, :width]
    edge = four.minimum.float().abs().repeat_interleave(32, 1)[:, :width] / 128
    assert ((to_fp32(four) - weights).abs() <= coarse * 0.6 + edge).all()


@pytest.mark.parametrize("make", [DenseMatrix, quantise_int8, quantise_int4])
def test_blocks_of_rows_equal_the_whole(make: type[DenseMatrix]) -> None:
    matrix: Matrix = make(example(161))
    whole = to_fp32(matrix)
    for start, stop in ((0, 1), (2, 5), (5, 6)):
        block = torch.full((stop - start, 161), float("nan"))
        matrix.fill(start, stop, block)
        assert torch.equal(block, whole[start:stop])
    assert matrix.shape == (6, 161)
    assert matrix.nbytes == sum(part.nbytes for part in matrix.parts())


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_int4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(quantise: type[Int8Matrix], bad: float) -> None:
    weights = example(40)
    weights[4, 39] = bad
    with pytest.raises(ConfigError, match="NaN or infinity"):
        quantise(weights)  # type: ignore[call-arg]


def test_a_range_that_bf16_does_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit int4"):
        quantise_int4(torch.tensor([[-3.4e38, 3.4e38]]))


def digest_of(matrix: Matrix) -> str:
    digest = hashlib.sha256()
    for part in matrix.parts():
        hash_tensor(digest, part)
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", "e928da864c4010c6127a4ba349ad2b6153997ad197b156f519c7b860b4cab0f6"),
        ("int8", "1891dab4a5c5c1a784ea04443c307e57eac8bdc6bcd806ee2382472784432637"),
        ("int4", "d9fb29825145a73e4336cb22e3e59e2b64fbccf071d7b04435b19e59231c051e"),
    ],
)
def test_known_digests(name: str, expected: str) -> None:
    """Weights made by integer arithmetic alone, so every machine must get these digests."""
    weights = synthetic_rows(8, 200)
    make: dict[str, Callable[[Tensor], Matrix]] = {
        "dense": DenseMatrix,
        "int8": quantise_int8,
        "int4": quantise_int4,
    }
    assert digest_of(make[name](weights)) == expected


def test_the_hash_sees_dtype_shape_and_bytes() -> None:
    base = digest_of(DenseMatrix(torch.zeros(2, 4)))
    assert base != digest_of(DenseMatrix(torch.zeros(4, 2)))
    assert base != digest_of(DenseMatrix(torch.zeros(2, 4, dtype=torch.int32)))
    changed = torch.zeros(2, 4)
    changed[1, 3] = -0.0
    assert base != digest_of(DenseMatrix(changed))
    assert isinstance(quantise_int4(torch.zeros(2, 4)), Int4Matrix)

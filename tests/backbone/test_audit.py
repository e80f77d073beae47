"""Cheap checks, the norm band, proving calls and the trust state machine."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kvasir_backbone.audit import (
    ALWAYS_FIRST,
    GROSS,
    LIMIT,
    LIMIT_INT8_ACTIVATIONS,
    STRIKE_WINDOW,
    NormBand,
    Sample,
    Trust,
    judge_proof,
    judge_sample,
    limit_of,
    make_proofs,
    unfinite_rows,
)
from kvasir_node.precision import QUANTISERS
from tests.support.rosters import flat_plan

PLAN = flat_plan(width=16)
WEIGHTS = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(5))


def reference(layer: int, expert: int, rows: Tensor, precision: str) -> Tensor:
    assert precision == "stored"
    return torch.nn.functional.linear(rows, WEIGHTS[layer, expert])


def honest(proof_rows: Tensor, layer: int, ids: tuple[int, ...]) -> Tensor:
    outputs = torch.stack([reference(layer, expert, proof_rows, "stored") for expert in ids], dim=1)
    return outputs.reshape(-1, proof_rows.shape[1])


def test_rows_with_values_that_are_not_finite_are_found() -> None:
    good = torch.ones(4, 16)
    assert unfinite_rows(good) == []
    for bad in (math.nan, math.inf, -math.inf):
        broken = good.clone()
        broken[2, 3] = bad
        assert unfinite_rows(broken) == [2]
    both = good.clone()
    both[0, 0], both[1, 1] = math.inf, -math.inf
    assert unfinite_rows(both) == [0, 1]
    assert unfinite_rows(torch.full((2, 16), 3e38)) == []  # large, and finite


def test_the_norm_band_points_at_rows_far_outside_what_was_seen() -> None:
    band = NormBand()
    rows = torch.randn(64, 16)
    outputs = honest(rows, 0, (3,))
    assert band.suspects(0, rows, torch.zeros_like(outputs)) == []  # nothing known yet
    band.learn(0, rows, outputs)
    assert band.suspects(0, rows, outputs) == []
    assert band.suspects(1, rows, 1000 * outputs) == []  # another layer
    outputs[7] *= 1000
    outputs[9] = 0
    assert band.suspects(0, rows, outputs) == [7, 9]


def test_a_proving_call_covers_every_layer_of_the_window_with_its_own_experts() -> None:
    window = PLAN.windows[1]
    proofs = make_proofs(PLAN, window, torch.float32, random.Random(1))
    assert [proof.layer for proof in proofs] == [0]
    for proof in proofs:
        assert proof.rows.shape[1] == PLAN.width
        assert all(window.contains(proof.layer, expert) for expert in proof.ids)
        assert len(set(proof.ids)) == len(proof.ids)
    other = make_proofs(PLAN, window, torch.float32, random.Random(2))
    assert not torch.equal(proofs[0].rows, other[0].rows)


def test_an_honest_proof_passes_and_teaches_the_band() -> None:
    (proof,) = make_proofs(PLAN, PLAN.windows[0], torch.float32, random.Random(1))
    band = NormBand()
    outputs = honest(proof.rows, proof.layer, proof.ids)
    assert judge_proof(proof, outputs, "stored", reference, band) <= LIMIT
    assert band.suspects(0, proof.rows, torch.zeros_like(proof.rows)) == [0, 1, 2, 3]


@pytest.mark.parametrize("cheat", ["zeros", "swapped experts", "noise", "nan", "short", "last row stale"])
def test_a_wrong_proof_is_seen(cheat: str) -> None:
    (proof,) = make_proofs(PLAN, PLAN.windows[0], torch.float32, random.Random(1))
    outputs = honest(proof.rows, proof.layer, proof.ids)
    match cheat:
        case "zeros":
            outputs = torch.zeros_like(outputs)
        case "swapped experts":
            outputs = honest(proof.rows, proof.layer, proof.ids[::-1])
        case "noise":
            outputs = outputs + 0.02 * torch.randn(outputs.shape)
        case "nan":
            outputs[0, 0] = math.nan
        case "short":
            outputs = outputs[:-1]
        case "last row stale":
            outputs[-1] = outputs[0]
    assert judge_proof(proof, outputs, "stored", reference, NormBand()) > LIMIT


def test_a_sample_is_judged_against_the_recompute_of_its_expert() -> None:
    row = torch.randn(16)
    right = reference(1, 6, row.unsqueeze(0), "stored")[0]
    assert judge_sample(Sample(1, 6, row, right), "stored", reference, NormBand()) <= LIMIT
    assert judge_sample(Sample(1, 5, row, right), "stored", reference, NormBand()) > GROSS


def test_the_limit_follows_the_numerics_class() -> None:
    assert limit_of("1/stored/none/float32/fp32b524288/cuda-sm90-torch-2.13.0/abc", "stored") == LIMIT
    int8, int4 = QUANTISERS["int8"], QUANTISERS["int4"]
    assert limit_of(f"1/{int8}/none/float32/fp32b524288/mps-torch-2.13.0/abc", "int8") == LIMIT
    assert limit_of(f"1/{int4}/int8/bfloat16/fp32/avx2/abc", "int4") == LIMIT_INT8_ACTIVATIONS


@pytest.mark.parametrize(
    ("numerics", "precision"),
    [
        ("1/stored/int8/bfloat16/fp32/avx2/abc", "stored"),
        ("1/bf16/int8/bfloat16/fp32/avx2/abc", "bf16"),
        (f"1/{QUANTISERS['int4']}/int8/bfloat16/fp32/avx2/abc", "stored"),
        (f"1/{QUANTISERS['int4']}/int8/bfloat16/fp32/avx2/abc", "int8"),
        ("x/y/int8", "int8"),
    ],
)
def test_no_device_earns_a_wider_limit_than_its_leased_precision_allows(
    numerics: str, precision: str
) -> None:
    assert limit_of(numerics, precision) == LIMIT


def test_all_of_the_first_calls_are_audited_then_a_falling_share_down_to_the_floor() -> None:
    trust, rng = Trust(), random.Random(1)
    assert all(trust.wants_audit(rng) for _ in range(ALWAYS_FIRST))
    assert trust.sample_rate() == pytest.approx(0.1)
    picked = sum(trust.wants_audit(rng) for _ in range(20_000))
    assert trust.sample_rate() == 0.02
    assert 300 < picked < 600


def test_one_gross_error_is_enough() -> None:
    reason = Trust().verdict(0.06, LIMIT)
    assert reason is not None
    assert "0.06" in reason


def test_three_violations_within_a_thousand_audited_rows_are_enough() -> None:
    trust = Trust()
    assert trust.verdict(1e-3, LIMIT) is None
    assert trust.verdict(1e-3, LIMIT) is None
    assert all(trust.verdict(1e-7, LIMIT) is None for _ in range(STRIKE_WINDOW - 3))
    assert trust.verdict(1e-3, LIMIT) is not None


def test_violations_older_than_a_thousand_audited_rows_are_forgotten() -> None:
    trust = Trust()
    assert trust.verdict(1e-3, LIMIT) is None
    assert trust.verdict(1e-3, LIMIT) is None
    assert all(trust.verdict(1e-7, LIMIT) is None for _ in range(STRIKE_WINDOW))
    assert trust.verdict(1e-3, LIMIT) is None
    assert trust.worst_d == 1e-3


def test_honest_rows_never_lead_to_quarantine() -> None:
    trust, rng = Trust(), random.Random(7)
    assert all(trust.verdict(rng.uniform(0, LIMIT), LIMIT) is None for _ in range(50_000))

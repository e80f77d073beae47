"""Sampling: greedy, nucleus, and noise that is a pure function of seed, choice and place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.sampling import Sampler, gumbel, nucleus
from relay.errors import ConfigError

LOGITS = np.array([0.5, 2.0, -1.0, 1.9, -4.0, 2.0], dtype=np.float32)


def test_greedy_takes_the_first_of_equal_bests() -> None:
    assert Sampler(temperature=0.0).sample(LOGITS, 0) == 1


def test_a_token_is_a_function_of_seed_choice_and_place() -> None:
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    drawn = {
        (seed, choice, place): Sampler(1.0, 1.0, seed, choice).sample(logits, place)
        for seed in (0, 1, 2**63, -1)
        for choice in (0, 1)
        for place in range(8)
    }
    for (seed, choice, place), token in drawn.items():
        assert Sampler(1.0, 1.0, seed, choice).sample(logits, place) == token
    assert len(set(drawn.values())) > len(drawn) // 2


def test_the_noise_is_the_same_on_every_machine() -> None:
    expected = [-0.15571997982265635, 0.3428359696391164, 1.4370676720842045, -1.3777709240087803]
    np.testing.assert_allclose(gumbel(1, 0, 3, 4), expected, rtol=1e-6)


def test_more_noise_does_not_change_the_first() -> None:
    np.testing.assert_array_equal(gumbel(7, 1, 5, 1000)[:10], gumbel(7, 1, 5, 10))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.9), (1.0, 0.6)])
def test_frequencies_are_the_probabilities(temperature: float, top_p: float) -> None:
    scaled = LOGITS.astype(np.float64) / temperature
    kept = nucleus(scaled, top_p)
    weights = np.exp(scaled)
    if kept is not None:
        weights[np.setdiff1d(np.arange(6), kept)] = 0
    expected = weights / weights.sum()
    count = 4000
    drawn = [Sampler(temperature, top_p, seed=11).sample(LOGITS, place) for place in range(count)]
    observed = np.bincount(drawn, minlength=6) / count
    bound = 5 * np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(observed - expected) <= bound).all()


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=200),
    st.floats(0.01, 0.9999),
)
def test_the_nucleus_is_the_smallest_sufficient_set(values: list[float], top_p: float) -> None:
    scaled = np.array(values, dtype=np.float64)
    kept = nucleus(scaled, top_p)
    assert kept is not None
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    assert weights[kept].sum() >= top_p - 1e-9
    assert (weights[kept].min() >= np.delete(weights, kept)).all()
    assert weights[kept].sum() - weights[kept].min() < top_p + 1e-9


def test_a_wide_nucleus_looks_past_the_first_candidates() -> None:
    scaled = np.zeros(5000)
    kept = nucleus(scaled, 0.5)
    assert kept is not None
    np.testing.assert_array_equal(kept, np.arange(len(kept)))
    assert 2499 <= len(kept) <= 2501


def test_a_tiny_top_p_is_greedy() -> None:
    assert {Sampler(1.0, 1e-9, seed).sample(LOGITS, 0) for seed in range(50)} == {1}


@pytest.mark.parametrize("logits", [[np.nan, 1.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(logits: list[float], temperature: float) -> None:
    with pytest.raises(FloatingPointError):
        Sampler(temperature).sample(np.array(logits, dtype=np.float32), 0)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(-0.1, 1.0), (2.1, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 1.1)]
)
def test_values_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ConfigError):
        Sampler(temperature, top_p)

from __future__ import annotations

import random

import pytest

from relay.errors import RemoteProtocolError
from tests.support.fuzzing import Finding, Target, mutate, run, targets

TARGETS = targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_honest_samples_are_accepted(target: Target) -> None:
    for sample in target.samples:
        if target.name in ("packet", "handshake message"):
            continue  # valid once, or made for another handshake
        target.read(sample)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutated_input_raises_only_what_is_meant(target: Target) -> None:
    run([target], count=300, seed=1)


def test_the_fuzzer_finds_what_is_there() -> None:
    def fragile(data: bytes) -> None:
        if len(data) > 40:
            raise IndexError
        raise RemoteProtocolError("short")

    with pytest.raises(Finding, match="fragile: IndexError"):
        run([Target("fragile", [bytes(30)], fragile)], count=1_000, seed=3)


def test_mutations_differ_and_stay_bounded() -> None:
    rng = random.Random(5)
    mutants = {mutate(rng, [b"abcdefgh" * 20]) for _ in range(500)}
    assert len(mutants) > 350
    assert max(map(len, mutants)) <= 200_000

"""How running requests are split over step threads."""

from __future__ import annotations

import pytest

from kvasir_backbone.microbatches import StepPace, share, split


@pytest.mark.parametrize(
    ("busy", "waited", "batches"),
    [(0.01, 0.0, 1), (0.01, 0.003, 1), (0.01, 0.01, 2), (0.01, 0.1, 9), (0.01, 1.44, 116)],
)
def test_the_more_a_step_waits_the_more_batches_hide_each_other(
    busy: float, waited: float, batches: int
) -> None:
    assert split(busy, waited) == batches


@pytest.mark.parametrize("now", [1, 2])
def test_near_a_bound_nothing_changes(now: int) -> None:
    assert split(1.0, 0.5, now) == now
    assert split(1.0, 0.42, now) == now
    assert split(1.0, 0.6, now) == now


def test_one_stream_is_one_batch_and_threads_are_a_bound() -> None:
    pace = StepPace()
    assert pace.split(8, 2) == 1, "nothing is known yet"
    for _ in range(40):
        pace.observe(0.05, 1.4)
    assert pace.split(1, 4) == 1
    assert pace.split(8, 2) == 2
    assert pace.split(3, 4) == 3
    for _ in range(80):
        pace.observe(0.05, 0.0)
    assert pace.split(8, 2) == 1


def test_shares_cover_everyone() -> None:
    assert share(8, 1) is None
    for ready in range(1, 40):
        for batches in range(2, 6):
            taken = share(ready, batches)
            assert taken is not None
            assert batches * taken >= ready
            assert taken <= ready

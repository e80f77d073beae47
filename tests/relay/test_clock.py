from __future__ import annotations

from relay.clock import SteadyClock


class Times:
    """A wall clock and a steady one, moved by hand."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 50.0
        self.clock = SteadyClock(wall=lambda: self.wall, steady=lambda: self.steady, settle_s=60.0)

    def pass_by(self, seconds: float) -> float:
        self.wall += seconds
        self.steady += seconds
        return self.clock()


def test_time_passes_and_small_corrections_count() -> None:
    times = Times()
    assert times.pass_by(10.0) == 1_000_010.0
    times.wall -= 2.0
    assert times.clock() == 1_000_008.0


def test_a_jump_that_is_taken_back_is_never_seen() -> None:
    for jump in (3600.0, -3600.0):
        times = Times()
        times.wall += jump
        assert times.clock() == 1_000_000.0
        assert times.pass_by(30.0) == 1_000_030.0
        times.wall -= jump
        assert times.pass_by(100.0) == 1_000_130.0


def test_a_jump_that_stands_is_believed() -> None:
    times = Times()
    times.wall += 3600.0
    assert times.clock() == 1_000_000.0
    assert times.pass_by(59.0) == 1_000_059.0
    assert times.pass_by(1.0) == 1_003_660.0


def test_another_jump_starts_the_wait_anew() -> None:
    times = Times()
    times.wall += 3600.0
    times.clock()
    times.pass_by(50.0)
    times.wall += 3600.0
    assert times.pass_by(20.0) == 1_000_070.0
    assert times.pass_by(60.0) == 1_007_330.0

"""Which loop a daemon runs on, and what its collector of cycles is spared."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from relay.loop import loop_factory, run


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """What a test spares the collector is this process's again afterwards."""
    yield
    gc.unfreeze()


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_daemon_runs_on_the_loop_it_asked_for(use_uvloop: bool) -> None:
    wanted = loop_factory(use_uvloop=use_uvloop)
    assert (wanted is not None) == use_uvloop, "uvloop is installed where the tests run"
    made = type(run(_loop(), use_uvloop=use_uvloop))
    assert made.__module__.startswith("uvloop" if use_uvloop else "asyncio")


def test_a_full_collection_does_not_walk_through_what_lived_at_the_start() -> None:
    gc.collect()
    before = len(gc.get_objects())

    async def left() -> int:
        return len(gc.get_objects())

    assert run(left(), use_uvloop=False) < before / 10
    assert gc.get_freeze_count() > before / 2

"""Downloads killed at random bytes: the short form of `bench.py kills`, which kills 200 times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name == "benches" or name.startswith("benches.")]:
        del sys.modules[name]


async def test_killed_at_random_bytes_the_final_bytes_are_right(tmp_path: Path) -> None:
    from benches.kills import STREAMS, kill_downloads

    tally = await kill_downloads(tmp_path, kills=8, rng=Random())
    assert tally.kills == 8
    assert tally.downloads >= 1
    assert tally.wrong_chunks == 0
    assert tally.most_lost <= STREAMS

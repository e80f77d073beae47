"""asyncio's debug mode still says where a future and a task were made."""

from __future__ import annotations

import asyncio
import traceback
from asyncio.constants import DEBUG_STACK_DEPTH
from typing import Any


async def test_a_future_and_a_task_know_where_they_were_made() -> None:
    loop = asyncio.get_running_loop()
    assert loop.get_debug()
    future, task = loop.create_future(), asyncio.create_task(asyncio.sleep(0))
    made: Any
    for made in (future, task):
        (line,) = [frame.line for frame in made._source_traceback if frame.filename == __file__]
        assert line == "future, task = loop.create_future(), asyncio.create_task(asyncio.sleep(0))"
    await task


def test_a_stack_has_the_innermost_frames_and_their_lines() -> None:
    found = traceback.extract_stack()
    assert (found[-1].name, found[-1].line) == (
        "test_a_stack_has_the_innermost_frames_and_their_lines",
        "found = traceback.extract_stack()",
    )
    assert len(found) == DEBUG_STACK_DEPTH
    assert [frame.name for frame in traceback.extract_stack(limit=2)] == [frame.name for frame in found[-2:]]
    assert traceback.extract_stack(limit=-2)[0].name != found[-1].name  # the oldest two, as ever

"""Cheap stacks for asyncio's debug mode, which notes one for every handle, task and future that is made.

The standard library asks the file system about each source file of each stack, and reads the lines of all
frames: half of all time in tests of swarms. Here the files are taken not to change during a run, the lines
are read when somebody prints them, and a stack ends after as many frames as asyncio itself shows.
"""

from __future__ import annotations

import traceback
from asyncio.constants import DEBUG_STACK_DEPTH
from collections.abc import Iterable
from itertools import islice
from types import FrameType

_extract = traceback.StackSummary.extract


def extract(
    frames: Iterable[tuple[FrameType, int]],
    *,
    limit: int | None = None,
    lookup_lines: bool = True,
    capture_locals: bool = False,
) -> traceback.StackSummary:
    """Like `traceback.StackSummary.extract`, whose arguments these are; of a stack the innermost frames."""
    if capture_locals or (limit is not None and limit < 0):
        return _extract(iter(frames), limit=limit, lookup_lines=lookup_lines, capture_locals=capture_locals)
    first = islice(frames, DEBUG_STACK_DEPTH if limit is None else limit)
    return traceback.StackSummary(
        traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        for frame, line in first
    )


def install() -> None:
    """From now on in this process, for the default loop and for uvloop."""
    traceback.StackSummary.extract = staticmethod(extract)  # type: ignore[assignment]

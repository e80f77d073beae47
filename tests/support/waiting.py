"""Waiting in tests: on a condition, under a deadline, never a blind sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

SHORTEST_S, LONGEST_S = 0.01, 0.1
SHARE = 0.1
"""How much later than it could a wait may end: the condition may be a request, which costs time itself."""


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, timeout: float = 10.0, what: str = ""
) -> None:
    """Return once `condition()` holds. Raises `AssertionError` naming `what` after `timeout` seconds."""
    pause = asyncio.Event()
    clock = asyncio.get_running_loop().time
    started = clock()
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        waited = clock() - started
        if waited >= timeout:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        longest = min(LONGEST_S, timeout - waited)
        try:
            await asyncio.wait_for(pause.wait(), timeout=min(longest, max(SHORTEST_S, SHARE * waited)))
        except TimeoutError:
            continue

"""Waiting in tests: on a condition, under a deadline, never a blind sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, timeout: float = 10.0, what: str = ""
) -> None:
    """Return once `condition()` holds. Raises `AssertionError` naming `what` after `timeout` seconds."""
    pause = asyncio.Event()
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        try:
            await asyncio.wait_for(pause.wait(), timeout=min(0.01, left))
        except TimeoutError:
            continue

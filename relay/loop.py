"""Which event loop a daemon runs on: uvloop where it is installed, asyncio's own otherwise.

Knows nothing of what runs on it. Nothing else in Kvasir depends on uvloop.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory(*, use_uvloop: bool = True) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop: uvloop's maker if it is wanted and installed, else None (asyncio's default)."""
    if not use_uvloop:
        return None
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, T], *, use_uvloop: bool = True) -> T:
    """Run `main` to its end on a new event loop and return its result.

    SIGINT cancels `main` and raises `KeyboardInterrupt`, as `asyncio.run` does.
    """
    with asyncio.Runner(loop_factory=loop_factory(use_uvloop=use_uvloop)) as runner:
        return runner.run(main)

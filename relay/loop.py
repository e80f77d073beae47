"""Which event loop a daemon runs on: uvloop where it is installed, asyncio's own otherwise.

Knows nothing of what runs on it. Nothing else in Kvasir depends on uvloop.
"""

from __future__ import annotations

import asyncio
import gc
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


def spare_memory() -> None:
    """Have the collector of cycles never look again at what lives now: modules, above all.

    A full collection walks through every object of the process and stops all its threads meanwhile: a second
    for one that has imported a large library. To be called where a daemon has loaded what it keeps.
    """
    gc.freeze()


def run(main: Coroutine[Any, Any, T], *, use_uvloop: bool = True) -> T:
    """Run `main` to its end on a new event loop and return its result.

    SIGINT cancels `main` and raises `KeyboardInterrupt`, as `asyncio.run` does.
    """
    spare_memory()
    with asyncio.Runner(loop_factory=loop_factory(use_uvloop=use_uvloop)) as runner:
        return runner.run(main)

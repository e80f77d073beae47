"""The line in front of the engine: who may start does, others wait for their turn, briefly, or are refused.

Carries out what `admission.py` decides, on one event loop. Knows futures. Knows no requests and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from .admission import Admission


@dataclass(slots=True)
class Visit:
    """So many streams that were let in. `heard` is to be told of every token of theirs."""

    heard: Callable[[float | None], None]
    """Takes the seconds since the stream's token before; None for its first."""


@dataclass(slots=True, eq=False)
class _Waiting:
    streams: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Door:
    """Lets streams in, first come, first served. `clock` gives monotonic seconds."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self.admission = admission
        self._clock = clock
        self._line: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Streams in line."""
        return sum(one.streams for one in self._line)

    def check(self, streams: int = 1) -> None:
        """Raise `Refused("overloaded")` where so many more would be refused now."""
        self.admission.check(self._clock(), streams, self.waiting)

    @contextlib.asynccontextmanager
    async def enter(self, streams: int) -> AsyncIterator[Visit]:
        """Let so many streams in while the context lasts. Raises `Refused("overloaded")`."""
        self.check(streams)
        await self._take_turn(streams)
        started, silent = self._clock(), streams

        def heard(gap_s: float | None) -> None:
            nonlocal silent
            now = self._clock()
            if gap_s is not None:
                self.admission.observe(gap_s, now)
                return
            silent -= 1
            self.admission.began(now - started, now)
            self._admit()

        try:
            yield Visit(heard)
        finally:
            self.admission.leave(streams, silent, self._clock() - started)
            self._admit()

    async def _take_turn(self, streams: int) -> None:
        """Wait for the turn of so many streams; on return they have entered."""
        if not self._line and self.admission.may_start(self._clock(), streams):
            self.admission.enter(streams)
            return
        mine = _Waiting(streams)
        self._line.append(mine)
        try:
            async with asyncio.timeout(self.admission.max_wait_s):
                await asyncio.shield(mine.turn)
        except BaseException as ended:
            if mine.turn.done():  # let in at the last moment
                if isinstance(ended, TimeoutError):
                    return
                self.admission.leave(streams, streams, 0.0)
            else:
                self._line.remove(mine)
            self._admit()
            if isinstance(ended, TimeoutError):
                now = self._clock()
                places = self.admission.places(now)
                wait = self.admission.expected_wait_s(now, places, streams)
                raise self.admission.refusal(places, wait, streams) from None
            raise

    def _admit(self) -> None:
        """Let in whoever is first in line and may start."""
        while self._line and self.admission.may_start(self._clock(), self._line[0].streams):
            first = self._line.popleft()
            self.admission.enter(first.streams)
            first.turn.set_result(None)

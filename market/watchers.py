"""Who waits for changes of which plan: events on the loop, set after each commit that touched the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Watchers:
    """The waiting handlers of one process."""

    def __init__(self) -> None:
        self._events: dict[bytes, set[asyncio.Event]] = {}
        self.closing = False
        """Set when the market goes away: whoever waits stops."""

    @property
    def count(self) -> int:
        """How many wait now."""
        return sum(len(events) for events in self._events.values())

    @contextmanager
    def watching(self, plan: bytes) -> Iterator[asyncio.Event]:
        """An event that is set whenever `plan` changes, until the block ends."""
        event = asyncio.Event()
        events = self._events.setdefault(plan, set())
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events:
                self._events.pop(plan, None)

    def wake(self, plans: Iterable[bytes]) -> None:
        """Tell everybody who watches one of these plans."""
        for plan in plans:
            for event in self._events.get(plan, ()):
                event.set()

    def close(self) -> None:
        """Tell everybody to stop."""
        self.closing = True
        self.wake(tuple(self._events))


async def within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` was set within that many seconds."""
    if timeout_s <= 0:
        return event.is_set()
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True

"""Pause and resume: by the owner's word, and by the rules the owner gave.

Looks at the machine every few seconds. On a reason to pause the node withdraws (leases given back in order,
memory free, weights kept on disk); once there is none any more it may serve again. The machine must be well
at two looks in a row, so that a loose plug does not move windows about.

Knows when. What withdrawing means is the daemon's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from .limits import OwnerRules, Surroundings, why_paused
from .surroundings import look

log = structlog.get_logger("node")

LINK_EVERY: Final = 6
"""The link is asked about at every sixth look: that starts a program of the system."""


class Pausing:
    """`run` until cancelled; `allowed` is set while the node may serve.

    `withdraw(reason)` is awaited when a pause begins, `come_back()` called when it is over, `said(reason)`
    called at each look that finds a reason.
    """

    def __init__(
        self,
        rules: OwnerRules,
        *,
        withdraw: Callable[[str], Awaitable[None]],
        come_back: Callable[[], None],
        said: Callable[[str], None],
        every_s: float,
        look: Callable[..., Surroundings] = look,
    ) -> None:
        self._rules = rules
        self._withdraw = withdraw
        self._come_back = come_back
        self._said = said
        self._every_s = every_s
        self._look = look
        self._asked = False
        self._changed = asyncio.Event()
        self._metered = False
        self._looks = 0
        self._well = 0
        self.paused = False
        self.allowed = asyncio.Event()

    def ask(self, paused: bool) -> None:
        """The owner wants the node to pause, or to go on."""
        self._asked = paused
        self._changed.set()

    async def run(self) -> None:
        """Follow the owner and the machine."""
        while True:
            await self._step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._changed.wait()
            self._changed.clear()

    async def _step(self) -> None:
        around = Surroundings(0) if self._asked else await self._around()
        reason = why_paused(self._rules, around, asked=self._asked)
        if reason is not None:
            self._well = 0 if not self._asked else 2  # resumed by hand, it goes on at once
            self._said(reason)
            if not self.paused:
                self.paused = True
                self.allowed.clear()
                log.info("node.paused", reason=reason)
                await self._withdraw(reason)
            return
        self._well += 1
        if self.paused and self._well >= 2:
            self.paused = False
            self._come_back()
            log.info("node.resumed")
        if not self.paused:
            self.allowed.set()

    async def _around(self) -> Surroundings:
        ask_link = not self._rules.on_metered and self._looks % LINK_EVERY == 0
        self._looks += 1
        around = await asyncio.to_thread(self._look, watch_link=ask_link)
        if ask_link:
            self._metered = around.metered
        return Surroundings(around.minute, around.battery, self._metered)

"""Which relays this node is at: looked at again and again, chosen by `relay.choosing`, told to the market.

The node looks at the relays it is at and at a few others, by their own word and its own clock, and moves when
one drains, dies, refuses it, is overloaded, or another is markedly better. The market learns with the next
heartbeat, names the relays in the node's claims, and backbones follow. A relay that the node leaves is kept
until the sessions through it have moved.

Knows when to look and what was seen. Connections are `circuits`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import aiohttp
import structlog

from market.messages import RelayInfo, RelayReading
from relay.choosing import WANTED, Candidate, choose
from relay.errors import KvasirError
from relay.identity import PublicKey
from relay.measuring import TIMEOUT_S, Look, looks

from .circuits import Circuits
from .joining import Membership
from .status import NodeStatus

log = structlog.get_logger("node")

LOOK_S: Final = 120.0
HURRY_S: Final = 20.0
"""Mean pause between looks, and while a chosen relay is not connected; drawn from half to one and a half."""

LIST_S: Final = 60.0
"""How old the market's list may be before a look asks for it again."""

SOON_S: Final = 0.3
"""Shortest pause between looks, however much happens; ten times as long between two lists."""

SETTLE_S: Final = 60.0
"""After a change the node stays where it is for so long, unless it has to move."""

CONNECT_S: Final = 10.0
SHUN_S: Final = 60.0
"""A relay that has not taken the node in for `CONNECT_S` is left alone for `SHUN_S`."""

OTHERS: Final = 6
"""Relays looked at besides those in use."""

READINGS: Final = 3
"""Round trips remembered of each relay; the median counts."""

FIRST_LOOK_S: Final = 1.0
"""How long the first look may take: nothing is chosen yet, and windows wait."""


class RelayKeeper:
    """Chooses this node's relays. `run` owns all tasks; `on_change` runs when other relays are in use."""

    def __init__(
        self,
        member: Callable[[], Membership],
        circuits: Circuits,
        *,
        http: aiohttp.ClientSession,
        status: NodeStatus,
        rng: Random,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member = member
        self._circuits = circuits
        self._http = http
        self._status = status
        self._rng = rng
        self._clock = clock
        self.on_change = on_change
        self._listed: dict[PublicKey, RelayInfo] = {}
        self._listed_at: float | None = None
        self._chosen: tuple[PublicKey, ...] = ()
        self._known: dict[PublicKey, RelayInfo] = {}  # those chosen, listed or not
        self._moved_at: float | None = None
        self._asked_at: dict[PublicKey, float] = {}  # since when a chosen relay has not been connected
        self._shunned: dict[PublicKey, float] = {}
        self._round_trips: dict[PublicKey, deque[float]] = {}
        self._found: dict[PublicKey, Look] = {}
        self._used: tuple[PublicKey, ...] = ()
        self._needed = False
        self._wake = asyncio.Event()
        circuits.on_change = self._noticed

    # --- what others ask ---

    def need(self) -> None:
        """The node holds a window: be at relays from now on."""
        if not self._needed:
            self._needed = True
            self._connect()

    def leave(self) -> None:
        """The node holds nothing any more: leave all relays."""
        self._needed = False
        self._circuits.want(())

    def readings(self) -> tuple[RelayReading, ...]:
        """What a heartbeat tells the market: the relays in use first, then others that were looked at."""
        others = [key for key in self._found if key not in self._used]
        return tuple(
            RelayReading(key, self._round_trip(key), key in self._used) for key in (*self._used, *others)
        )

    # --- the loop ---

    async def run(self) -> None:
        """Look and choose until cancelled."""
        first = True
        while True:
            self._wake.clear()
            try:
                await self._look(first)
            except KvasirError as error:
                log.debug("relays.unlisted", reason=str(error))
            else:
                first = False
            await asyncio.sleep(SOON_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()

    def _pause(self) -> float:
        """How long until the next look, if nothing happens."""
        if not self._chosen:
            return 1.0
        lost = self._needed and not all(self._circuits.connected(self._info(k).url) for k in self._chosen)
        return (HURRY_S if lost else LOOK_S) * self._rng.uniform(0.5, 1.5)

    async def _look(self, first: bool) -> None:
        await self._list()
        keys = self._worth_a_look()
        urls = {bytes(key): self._info(key).url for key in keys}
        found = await looks(urls, http=self._http, timeout=FIRST_LOOK_S if first else TIMEOUT_S)
        now = self._clock()
        self._found = {}
        for key in keys:
            look = found[bytes(key)]
            if look is None:
                self._round_trips.pop(key, None)
            else:
                self._found[key] = look
                self._round_trips.setdefault(key, deque(maxlen=READINGS)).append(look.rtt_s)
        self._status.relay_loads = {self._info(key).url: look.load.share for key, look in self._found.items()}
        self._shun(now)
        self._decide(keys, now)

    async def _list(self) -> None:
        """The market's list, where it is old, or where what is known of it is not enough. May raise."""
        now = self._clock()
        age = None if self._listed_at is None else now - self._listed_at
        lost = any(not self._circuits.connected(self._info(key).url) for key in self._chosen)
        most = SOON_S * 10 if lost or len(self._chosen) < 2 else LIST_S
        if age is not None and age < most:
            return
        try:
            relays = (await self._member().market.swarm()).relays
        except KvasirError:
            if self._listed_at is None:
                raise
            return
        self._listed, self._listed_at = {relay.key: relay for relay in relays}, now
        kept = self._listed.keys() | self._known.keys()
        self._round_trips = {key: seen for key, seen in self._round_trips.items() if key in kept}

    def _worth_a_look(self) -> list[PublicKey]:
        """Those in use, and a few others: the idlest by their own word, and some by chance."""
        now = self._clock()
        others = [
            relay
            for relay in self._listed.values()
            if relay.key not in self._chosen
            and self._shunned.get(relay.key, 0.0) <= now
            and not (relay.load is not None and relay.load.draining)
        ]
        self._rng.shuffle(others)
        idlest = sorted(others, key=lambda relay: 0.0 if relay.load is None else relay.load.share)
        picked = dict.fromkeys(relay.key for relay in (*idlest[: OTHERS // 2], *others))
        return [*self._chosen, *list(picked)[:OTHERS]]

    def _shun(self, now: float) -> None:
        """Leave relays alone that were chosen and do not take this node in."""
        for key in self._chosen:
            if not self._needed or self._circuits.connected(self._info(key).url):
                self._asked_at.pop(key, None)
            elif now - self._asked_at.setdefault(key, now) >= CONNECT_S:
                self._shunned[key] = now + SHUN_S
                del self._asked_at[key]
        self._shunned = {key: until for key, until in self._shunned.items() if until > now}

    def _decide(self, keys: Sequence[PublicKey], now: float) -> None:
        connected = [key for key in self._chosen if self._circuits.connected(self._info(key).url)]
        lost = [key for key in self._chosen if key not in connected]
        chosen = choose(
            [self._candidate(key) for key in keys],
            [*connected, *lost],
            device=self._member().keys.signing.public,
            draw=self._rng.random(),
            settled=self._moved_at is None or now - self._moved_at >= SETTLE_S,
        )
        chosen = chosen or tuple(keys[:WANTED])  # it may be that only this look does not get through
        if chosen != self._chosen:
            before = [self._info(key).url for key in self._chosen]
            self._known = {key: self._info(key) for key in chosen}
            if set(chosen) != set(self._chosen):
                self._moved_at = now if self._chosen else None
            self._chosen = chosen
            log.info("relays.chosen", relays=[self._info(key).url for key in chosen], before=before)
        self._connect()

    def _candidate(self, key: PublicKey) -> Candidate:
        look = self._found.get(key)
        url = self._info(key).url
        connected = self._circuits.connected(url)
        shunned = key in self._shunned
        if look is None:  # its HTTP may fail where its WebSocket stands
            return Candidate(key, self._circuits.round_trip(url) if connected else None)
        leaving = look.load.draining or self._circuits.leaving(url)
        return Candidate(key, None if shunned else self._round_trip(key), look.load.share, leaving)

    def _round_trip(self, key: PublicKey) -> float | None:
        readings = self._round_trips.get(key)
        return statistics.median(readings) if readings else None

    def _info(self, key: PublicKey) -> RelayInfo:
        found = self._listed.get(key) or self._known.get(key)
        assert found is not None
        return found

    # --- connections ---

    def _connect(self) -> None:
        if self._needed:
            self._circuits.want([self._info(key) for key in self._chosen])
            self._note_used()

    def _noticed(self) -> None:
        """A relay was connected, drains, or is gone."""
        self._note_used()
        self._wake.set()

    def _note_used(self) -> None:
        """Tell the market at once where this node is to be found now."""
        usable = [
            key
            for key in self._chosen
            if self._circuits.connected(self._info(key).url)
            and not self._circuits.leaving(self._info(key).url)
        ]
        used = tuple(usable) or self._chosen
        if used != self._used:
            self._used = used
            self.on_change()

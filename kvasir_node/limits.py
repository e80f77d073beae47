"""What the owner lets the node use, and when: hours of the day, processor time, upload, power, link.

Pure but for two small shells: `CpuPacer` is asked by compute threads, `UploadPacer` delays what is sent.
Knows clocks as arguments, no windows and no peers. How the machine is at the moment is `surroundings`'
business, what a pause does to leases the daemon's.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from relay.errors import ConfigError

if TYPE_CHECKING:
    from .peers import Session

_SPAN: Final = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?")
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")
DAY: Final = 24 * 60

CPU_BURST_S: Final = 0.25
"""Seconds of the whole allowance that may be used at once after a rest."""

UPLOAD_BURST_S: Final = 0.25
"""Likewise for bytes sent."""

LONGEST_REST_S: Final = 0.5
"""One rest of a compute thread; it asks again after it."""


# --- hours -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of the local day, in minutes since midnight: [start, end), over midnight where end <= start."""

    spans: tuple[tuple[int, int], ...]

    def include(self, minute: int) -> bool:
        """Whether the node may serve at that minute of the day (0 to 1439)."""
        return any(
            start <= minute < end if start < end else minute >= start or minute < end
            for start, end in self.spans
        )

    def __str__(self) -> str:
        return ", ".join(
            f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}" for start, end in self.spans
        )


def parse_hours(text: str) -> Hours:
    """Hours of the day such as "22-7" or "12:30-13:15,20-23". Raises `ConfigError`."""
    spans = []
    for part in text.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{text!r} are not hours: write for example 22-7, or 12:30-13:15,20-23")
        hour, minute, to_hour, to_minute = (int(group or 0) for group in match.groups())
        start, end = hour * 60 + minute, to_hour * 60 + to_minute
        if max(minute, to_minute) > 59 or max(start, end) > DAY or start == DAY:
            raise ConfigError(
                f"{part.strip()!r}: a day has the hours 0 to 24 and an hour the minutes 0 to 59"
            )
        if start == end:
            raise ConfigError(f"{part.strip()!r} begins where it ends: leave --hours out to serve all day")
        spans.append((start, end))
    return Hours(tuple(spans))


def parse_share(text: str) -> float:
    """A share such as "50%" or "0.5", above 0 and at most 1. Raises `ConfigError`."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{text!r} is not a share: write for example 50% or 0.5 (at most 100%)")
    return share


# --- may it serve now --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnerRules:
    """When the node pauses by itself: outside `hours` (None: never), on battery, on a metered link."""

    hours: Hours | None = None
    on_battery: bool = False
    on_metered: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine at this moment: minute of the local day, on battery, on a metered link.

    What cannot be found out is False: a machine that tells nothing serves.
    """

    minute: int
    battery: bool = False
    metered: bool = False


def why_paused(rules: OwnerRules, around: Surroundings, *, asked: bool) -> str | None:
    """Why the node must not serve now, in words for its owner; None if it may."""
    if asked:
        return "paused by its owner: `kvasir-node resume` goes on"
    if rules.hours is not None and not rules.hours.include(around.minute):
        return f"outside the hours in which it may serve ({rules.hours})"
    if around.battery and not rules.on_battery:
        return "the machine runs on its battery (--on-battery serves all the same)"
    if around.metered and not rules.on_metered:
        return "the network connection is metered (--on-metered serves all the same)"
    return None


# --- how much ----------------------------------------------------------------------------------------


class TokenBucket:
    """`rate` units a second, `burst` at once. Units may be owed: what was used counts, then one rests."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._balance, self._at = burst, now

    def take(self, units: float, now: float) -> float:
        """Use `units` at `now` (seconds of one clock); the seconds to rest before anything more is used."""
        self._balance = min(self.burst, self._balance + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        self._balance -= units
        return max(0.0, -self._balance / self.rate)


class CpuPacer:
    """Keeps this process at `share` of the machine's processors, by rests between two experts.

    The time counted is the whole process's (network, hashing and kernels too), what rests is only the
    computing: so the share is kept on average, not within every second. Thread-safe.
    """

    def __init__(
        self,
        share: float,
        processors: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        rate = share * processors
        self._clock, self._used = clock, used
        self._bucket = TokenBucket(rate, rate * CPU_BURST_S, clock())
        self._seen = used()
        self._lock = threading.Lock()

    def rest_s(self) -> float:
        """Seconds that the calling thread should rest now, at most `LONGEST_REST_S`."""
        with self._lock:
            used = self._used()
            rest = self._bucket.take(used - self._seen, self._clock())
            self._seen = used
        return min(rest, LONGEST_REST_S)

    def rest(self, *_: object) -> None:
        """Rest as `rest_s` says, in a thread that loads; a progress call's arguments are ignored."""
        if (pause := self.rest_s()) > 0.001:
            time.sleep(pause)


class UploadPacer:
    """Delays what is sent so that all sessions together send `rate` bytes a second on average."""

    def __init__(self, rate: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(rate, rate * UPLOAD_BURST_S, clock())

    async def wait(self, size: int) -> None:
        """Wait until `size` bytes more may be sent; callers are served in the order in which they ask."""
        pause = self._bucket.take(size, self._clock())
        if pause > 0:
            await asyncio.sleep(pause)


class PacedSession:
    """A session whose sending waits for an `UploadPacer`; everything else passes through."""

    def __init__(self, session: Session, pacer: UploadPacer) -> None:
        self._session, self._pacer = session, pacer

    async def send(self, message: bytes | Sequence[bytes | memoryview]) -> None:
        """Send one message when its turn has come. Raises `Unreachable`."""
        size = len(message) if isinstance(message, bytes) else sum(len(part) for part in message)
        await self._pacer.wait(size)
        await self._session.send(message)

    def try_send(self, message: bytes | Sequence[bytes | memoryview]) -> bool:
        """Never at once: `send` waits its turn."""
        return False

    def listen(self, handler: Callable[[bytes], None]) -> None:
        """From now on `handler` is given each message as it arrives."""
        self._session.listen(handler)

    def hold(self) -> None:
        """Give the handler nothing until `read_on`."""
        self._session.hold()

    def read_on(self) -> None:
        """The end of `hold`."""
        self._session.read_on()

    async def ended(self) -> NoReturn:
        """Wait for the end. Raises what the handler raised, or `Unreachable`."""
        await self._session.ended()

    async def close(self, code: str = "closed", message: str = "") -> None:
        """End the session, telling the peer why."""
        await self._session.close(code, message)

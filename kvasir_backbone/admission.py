"""Who is let in: as many streams as may run without slowing each other too much, and a short wait at most.

A swarm under more load than it can take must refuse somebody. Refusing by count alone lets those who are in
pay for it: with every further stream all tokens come later. So the number of places is found by time. The
time between two tokens of a stream is noted beside how many streams there were; a straight line through that,
`a + b x streams`, says what one more would cost. There are as many places as keep it within `stretch` times
what a stream has by itself: where compute is the limit (a large `b`) few, where the network is (a large `a`)
many. One who finds no place may wait for the next that comes free, if that is expected within `max_wait_s`;
everyone else is refused at once and told when to come back.

Pure: time is an argument. Knows counts and seconds. Knows no requests, no model and no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from relay.errors import ConfigError, Refused

HALF_LIFE_S: Final = 60.0
"""An observation counts half after this time."""
LEAST_WEIGHT: Final = 0.05
"""What an observation counts at least: under steady load only old ones tell what fewer streams cost."""
BIN_TOKENS: Final = 512.0
"""About over how many tokens of one stream count the time between tokens is averaged."""
SERVICE_REQUESTS: Final = 32.0
"""About over how many requests the time that one holds its place is averaged."""
FIRST_GUESS_S: Final = 5.0
"""How long a request holds its place, while none has ended yet."""
MAX_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The bounds of admission."""

    stretch: float = 2.5
    """The time between tokens with all places taken, as a multiple of what a stream has by itself."""
    max_wait_s: float = 0.05
    """How long a request may be expected to wait for a place before it is refused."""
    least_places: int = 8
    """Places that there are whatever was measured."""
    most_places: int = 256
    """Places that there are at most: as many as an engine runs at one time."""

    def __post_init__(self) -> None:
        if self.stretch < 1:
            raise ConfigError("--max-slowdown must be at least 1: the speed of a stream by itself")
        if self.max_wait_s < 0:
            raise ConfigError("--max-wait must not be negative")
        if not 1 <= self.least_places <= self.most_places:
            raise ConfigError("there must be at least one place, and no more than the most")


@dataclass(slots=True)
class _Bin:
    """Averages over observations with about the same number of streams."""

    streams: float
    gap_s: float
    seen: float = 1.0
    at: float = 0.0

    def observe(self, streams: int, gap_s: float, now: float) -> None:
        self.seen = min(BIN_TOKENS, self.seen + 1)
        self.streams += (streams - self.streams) / self.seen
        self.gap_s += (gap_s - self.gap_s) / self.seen
        self.at = now


@dataclass(slots=True)
class Admission:
    """Keeps count of the streams that are in. `enter` and `leave` for each, `observe` for each token."""

    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    streams: int = 0
    """Streams that are in: running or waiting for a place."""
    refused: int = 0
    """Streams that were refused."""
    _bins: dict[int, _Bin] = field(default_factory=dict)
    _held_s: float = FIRST_GUESS_S
    _held: float = 0.0

    def check(self, now: float, streams: int = 1) -> None:
        """Raise `Refused("overloaded")` with the time to come back where so many more are not let in.

        Whoever finds nobody in is let in, however many streams that is.
        """
        if self.streams == 0:
            return
        places = self.places(now)
        wait = self.expected_wait_s(places, streams)
        if wait <= self.config.max_wait_s:
            return
        self.refused += streams
        message = (
            f"{self.streams} texts are being written already, and this swarm has places for {places}: ask "
            f"again in {wait:.0f} s"
            if wait >= 1
            else f"All {places} places are taken: ask again in a moment"
        )
        raise Refused("overloaded", message, retry_after_s=min(MAX_RETRY_S, wait))

    def enter(self, now: float, streams: int = 1) -> None:
        """Let so many streams in. Raises as `check` does."""
        self.check(now, streams)
        self.streams += streams

    def leave(self, streams: int, held_s: float) -> None:
        """So many streams have ended, however, after that many seconds."""
        self.streams -= streams
        self._held = min(SERVICE_REQUESTS, self._held + 1)
        self._held_s += (held_s - self._held_s) / self._held

    def observe(self, gap_s: float, now: float) -> None:
        """A stream's next token came `gap_s` seconds after the one before."""
        streams = min(self.streams, self.config.most_places)  # more are not run, and cost the others nothing
        key = streams.bit_length()  # 1, 2-3, 4-7, ...
        kept = self._bins.get(key)
        if kept is None:
            self._bins[key] = _Bin(streams, gap_s, at=now)
        else:
            kept.observe(streams, gap_s, now)

    def places(self, now: float) -> int:
        """How many streams may run."""
        line = self._line(now)
        if line is None:
            return self.config.most_places
        alone, slope = line
        if slope <= 0 or alone <= 0:
            return self.config.most_places
        # alone + slope x (n - 1) <= stretch x alone
        count = 1 + (self.config.stretch - 1) * alone / slope
        return int(max(self.config.least_places, min(self.config.most_places, count)))

    def expected_wait_s(self, places: int, streams: int) -> float:
        """How long until so many more streams all have a place: one comes free every (time held / places)."""
        short = self.streams + streams - places
        return 0.0 if short <= 0 else short * self._held_s / places

    def _line(self, now: float) -> tuple[float, float] | None:
        """The time between tokens of a stream by itself, and by how much each further one lengthens it.

        Least squares over the averages, the newer the heavier. None while only one number of streams was
        seen.
        """
        points = [
            (kept.streams, kept.gap_s, kept.seen * max(LEAST_WEIGHT, 0.5 ** ((now - kept.at) / HALF_LIFE_S)))
            for kept in self._bins.values()
        ]
        if len(points) < 2:
            return None
        total = sum(weight for _, _, weight in points)
        n = sum(count * weight for count, _, weight in points) / total
        gap = sum(seconds * weight for _, seconds, weight in points) / total
        spread = sum(weight * (count - n) ** 2 for count, _, weight in points)
        slope = sum(weight * (count - n) * (seconds - gap) for count, seconds, weight in points) / spread
        alone = gap - slope * (n - 1)
        if alone > 0:
            return alone, slope
        # Steeper than any line through the origin: every stream costs as much as the first.
        return gap / n, gap / n

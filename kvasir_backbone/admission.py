"""Who is let in: as many streams as may run without slowing each other too much, and a short wait at most.

A swarm under more load than it can take must refuse somebody. Refusing by count alone lets those who are in
pay for it: with every further stream all tokens come later. So the number of places is found by time. The
time between two tokens of a stream is noted beside how many streams there were; a straight line through that,
`a + b x streams`, says what one more would cost. There are as many places as keep it within `stretch` times
what a stream has by itself: where compute is the limit (a large `b`) few, where the network is (a large `a`)
many. A prompt may cost those who write more than another stream does; then, while some write, prompts start
one after another. Whoever cannot start at once may wait in line for a moment, a tenth of the time that a
first token takes; everyone else is refused at once and told when to come back.

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
"""How long a first token takes and a request holds its place, while none is known."""
WAIT_SHARE: Final = 0.1
"""How long a request may wait in line unless said otherwise, as a share of the time that a first token takes:
under steady overload whoever is let in has waited that long, and it comes on top."""
MAX_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The bounds of admission."""

    stretch: float = 2.0
    """The time between tokens with all places taken, as a multiple of what a stream has by itself."""
    max_wait_s: float | None = None
    """How long a request may wait in line; None: `WAIT_SHARE` of the time that a first token takes."""
    least_places: int = 8
    """Places that there are whatever was measured."""
    most_places: int = 4096
    """Places that there are at most; the engine has bounds of its own."""

    def __post_init__(self) -> None:
        if self.stretch < 1:
            raise ConfigError("--max-slowdown must be at least 1: the speed of a stream by itself")
        if self.max_wait_s is not None and self.max_wait_s < 0:
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
class _Mean:
    """A running mean, over about the last `most` values; a first guess before there is one."""

    value: float
    most: float
    seen: float = 0.0

    def observe(self, value: float) -> None:
        self.seen = min(self.most, self.seen + 1)
        self.value += (value - self.value) / self.seen


@dataclass(slots=True)
class Admission:
    """Keeps count of the streams that are in: `enter`, `began` at the first token, `observe`, `leave`."""

    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    streams: int = 0
    """Streams that are in."""
    starting: int = 0
    """Those of them that have no token yet."""
    refused: int = 0
    """Streams that were refused."""
    _bins: dict[int, _Bin] = field(default_factory=dict)
    _service: _Mean = field(default_factory=lambda: _Mean(FIRST_GUESS_S, SERVICE_REQUESTS))
    _first: _Mean = field(default_factory=lambda: _Mean(FIRST_GUESS_S, SERVICE_REQUESTS))
    _calm: _Mean = field(default_factory=lambda: _Mean(0.0, BIN_TOKENS))
    _disturbed: _Mean = field(default_factory=lambda: _Mean(0.0, BIN_TOKENS))
    _began_at: float = float("-inf")

    @property
    def max_wait_s(self) -> float:
        """How long a request may wait in line."""
        wait = self.config.max_wait_s
        return WAIT_SHARE * self._first.value if wait is None else wait

    def may_start(self, now: float, streams: int = 1) -> bool:
        """Whether so many more streams may start at once. Whoever finds nobody in may, however many."""
        if self.streams == 0:
            return True
        writing = self.streams - self.starting
        if writing >= self.config.least_places // 2 and self.starting >= self.starts(now):
            return False
        return self.streams + streams <= self.places(now)

    def check(self, now: float, streams: int = 1, ahead: int = 0) -> None:
        """Raise `Refused("overloaded")`, with the time to come back, where waiting in line is no use.

        `ahead` streams are in line already.
        """
        if ahead == 0 and self.may_start(now, streams):
            return
        places = self.places(now)
        wait = self.expected_wait_s(now, places, streams + ahead)
        if wait > self.max_wait_s:
            raise self.refusal(places, wait, streams)

    def refusal(self, places: int, wait: float, streams: int = 1) -> Refused:
        """The refusal of so many streams, which is counted."""
        self.refused += streams
        message = (
            f"{self.streams} texts are being written already, and this swarm has places for {places}: ask "
            f"again in {wait:.0f} s"
            if wait >= 1
            else f"All {places} places are taken: ask again in a moment"
        )
        return Refused("overloaded", message, retry_after_s=min(MAX_RETRY_S, wait))

    def enter(self, streams: int = 1) -> None:
        """So many streams are let in."""
        self.streams += streams
        self.starting += streams

    def began(self, first_s: float, now: float) -> None:
        """A stream's first token came, so many seconds after it was let in."""
        self.starting -= 1
        self._first.observe(first_s)
        self._began_at = now

    def leave(self, streams: int, silent: int, held_s: float) -> None:
        """So many streams have ended, however, after that many seconds; `silent` of them without a token."""
        self.streams -= streams
        self.starting -= silent
        self._service.observe(held_s)

    def observe(self, gap_s: float, now: float) -> None:
        """A stream's next token came `gap_s` seconds after the one before."""
        disturbed = self.starting > 0 or now - self._began_at <= gap_s
        (self._disturbed if disturbed else self._calm).observe(gap_s)
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

    def starts(self, now: float) -> int:
        """How many streams may be without a token at one time while others write.

        As many as lengthen the time between tokens of the others by no more than taking all places does.
        """
        cost_s = self._disturbed.value - self._calm.value
        if not self._calm.seen or cost_s <= 0:
            return self.config.most_places
        return max(1, int((self.config.stretch - 1) * self._calm.value / cost_s))

    def expected_wait_s(self, now: float, places: int, streams: int) -> float:
        """How long until so many more streams have all started.

        A place comes free every (time held / places), and a start every (time to a first token / starts).
        """
        short = self.streams + streams - places
        for_place = max(0, short) * self._service.value / places
        starts = self.starts(now)
        for_start = max(0, self.starting + streams - starts) * self._first.value / starts
        return max(for_place, for_start)

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

"""Who fetches which chunk next, and which source has lost our trust: pure decisions.

Knows chunks by index, sources by name and the time as an argument. Knows no sockets and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from market.plans import ByteRange

STRIKES: Final = 3
"""A source is dropped at its third wrong chunk, or at its third failure in a row without a good chunk."""

MAX_PAUSE_S: Final = 300.0
"""No source can make us wait longer than this at once, whatever its Retry-After says."""

_MISSING, _TAKEN, _DONE = range(3)


@dataclass(frozen=True, slots=True)
class Span:
    """Chunks `first` up to `last` (half-open), one after another in `range` of one file: one request."""

    first: int
    last: int
    range: ByteRange


class ChunkBoard:
    """The chunks of a window: missing, taken by a stream, or done.

    `chunks` in the plan's order, `done` the indices already verified.
    """

    def __init__(self, chunks: Sequence[ByteRange], done: Iterable[int] = ()) -> None:
        self._chunks = tuple(chunks)
        self._state = bytearray(len(self._chunks))
        self._wrong: dict[int, set[str]] = {}
        self._cursor = 0
        self.total_bytes = sum(chunk.nbytes for chunk in self._chunks)
        self.done_bytes = 0
        for index in done:
            self.done(index)

    @property
    def finished(self) -> bool:
        """Whether every chunk is done."""
        return self.done_bytes == self.total_bytes

    @property
    def missing(self) -> int:
        """Chunks that are neither done nor taken."""
        return self._state.count(_MISSING)

    def take(
        self, source: str, max_bytes: int, *, others: Iterable[str] = (), gap_bytes: int = 0
    ) -> Span | None:
        """The next run of missing chunks for `source`, at most `max_bytes` (but one chunk at least).

        Between two chunks of a run lie at most `gap_bytes` that nobody wants. A chunk that `source` got
        wrong is left to `others` (the sources that may serve it now) while one of them has not tried it.
        None if nothing is to do for this source now.
        """
        alternatives = set(others) - {source}
        while self._cursor < len(self._state) and self._state[self._cursor] == _DONE:
            self._cursor += 1
        first = self._cursor
        while first < len(self._state) and not self._wanted(first, source, alternatives):
            first += 1
        if first == len(self._state):
            return None
        last, end = first + 1, self._chunks[first].end
        while (
            last < len(self._state)
            and self._wanted(last, source, alternatives)
            and self._chunks[last].file == self._chunks[first].file
            and 0 <= self._chunks[last].start - end <= gap_bytes
            and self._chunks[last].end - self._chunks[first].start <= max_bytes
        ):
            end = self._chunks[last].end
            last += 1
        for index in range(first, last):
            self._state[index] = _TAKEN
        return Span(first, last, ByteRange(self._chunks[first].file, self._chunks[first].start, end))

    def done(self, index: int) -> None:
        """That chunk is verified and stored."""
        if self._state[index] != _DONE:
            self._state[index] = _DONE
            self.done_bytes += self._chunks[index].nbytes

    def wrong(self, index: int, source: str) -> None:
        """`source` served other bytes for that chunk; it is missing again."""
        self._wrong.setdefault(index, set()).add(source)
        self._state[index] = _MISSING
        self._cursor = min(self._cursor, index)

    def give_back(self, span: Span) -> None:
        """The stream ended: what it took of `span` and did not finish is missing again."""
        for index in range(span.first, span.last):
            if self._state[index] == _TAKEN:
                self._state[index] = _MISSING
                self._cursor = min(self._cursor, index)

    def _wanted(self, index: int, source: str, alternatives: set[str]) -> bool:
        if self._state[index] != _MISSING:
            return False
        wrong = self._wrong.get(index)
        return wrong is None or source not in wrong or alternatives <= wrong


class SourceHealth:
    """What a source has done to us, and what follows: go on, wait, or never again.

    `dropped` is None or the reason, for a person. Times are seconds of one monotonic clock.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped: str | None = None
        self.paused_until = float("-inf")
        self._wrong_chunks = 0
        self._failures = 0
        self._waits = 0

    def pause_s(self, now: float) -> float:
        """Seconds until this source may be asked again; 0 if now."""
        return max(0.0, self.paused_until - now)

    def well(self, now: float) -> bool:
        """Whether it can be asked now, and its last answer was no failure."""
        return self.dropped is None and not self._failures and now >= self.paused_until

    def served(self) -> None:
        """It served a good chunk: its failures in a row are forgiven, wrong chunks are not."""
        self._failures = 0
        self._waits = 0

    def served_wrong_bytes(self) -> None:
        """A chunk's SHA-256 was not the plan's."""
        self._wrong_chunks += 1
        if self._wrong_chunks >= STRIKES:
            self._drop(f"served wrong bytes {self._wrong_chunks} times")

    def failed(self, now: float, why: str, rng: Random) -> None:
        """A connection, status or length failure; retry after a growing pause with jitter.

        Streams that fail together, or while the source is paused anyway, count once.
        """
        if now < self.paused_until:
            return
        self._failures += 1
        if self._failures >= STRIKES:
            self._drop(f"failed {self._failures} times in a row, last: {why}")
        self._pause(now, 0.5 * 2 ** (self._failures - 1) * rng.uniform(0.5, 1.5))

    def broke_rules(self, why: str) -> None:
        """It ignores Range, or changed the file under us: never again."""
        self._drop(why)

    def asked_to_wait(self, now: float, retry_after_s: float | None, rng: Random) -> None:
        """429 or 503: not a strike. Without Retry-After the pause doubles from 1 s, with jitter."""
        self._waits += 1
        if retry_after_s is None:
            retry_after_s = min(60.0, 2.0 ** (self._waits - 1)) * rng.uniform(0.5, 1.5)
        self._pause(now, retry_after_s)

    def _pause(self, now: float, seconds: float) -> None:
        self.paused_until = max(self.paused_until, now + min(max(seconds, 0.0), MAX_PAUSE_S))

    def _drop(self, why: str) -> None:
        if self.dropped is None:
            self.dropped = why

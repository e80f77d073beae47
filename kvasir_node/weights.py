"""A window's bytes onto this machine: several sources at once, resumed, every chunk verified before use.

Each source gets a few streams; a stream takes a run of missing chunks, asks for them as one range, and
hands the bytes to the cache as they come, which hashes and writes them in threads while the next ones
arrive. A chunk is kept before the next one of its stream is begun, so a kill costs at most one chunk a
stream. A bad chunk is fetched again alone; a source that errs three times, ignores Range or changes the
file is dropped. Sources of a higher rank wait until those below are not well.

Knows the order of things. Decisions are in `chunks`, HTTP in `sources`, files in `cache`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Final

import aiohttp
import structlog

from market.plans import Plan, PlanId
from market.windows import Window
from relay.errors import ConfigError, RemoteProtocolError, Unreachable

from .cache import CacheEntry, CacheFull, WeightCache, WindowBytes
from .chunks import ChunkBoard, SourceHealth, Span
from .sources import RangeReader, WaitAsked, WeightSource

log = structlog.get_logger("weights")

Progress = Callable[[int, int, float], None]
"""(verified bytes, total bytes, bytes a second over the last seconds): called on the loop, often."""

_RATE_WINDOW_S: Final = 5.0
_BATCH_BYTES: Final = 1 << 20
"""Bytes handed to the hashing threads at a time."""


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How weights are fetched."""

    streams: int = 3
    """Parallel requests to each source."""
    span_bytes: int = 32 * 1024 * 1024
    """Bytes asked for in one request, at most."""
    connect_timeout_s: float = 10.0
    """Seconds for a source to accept a connection."""
    read_timeout_s: float = 30.0
    """Seconds of silence after which a request has failed."""
    patience_s: float = 600.0
    """Seconds without one verified chunk after which the fetch is given up."""

    def __post_init__(self) -> None:
        if self.streams < 1 or self.span_bytes < 1:
            raise ConfigError("a fetch needs one stream and one byte a request at least")
        if min(self.connect_timeout_s, self.read_timeout_s, self.patience_s) <= 0:
            raise ConfigError("a fetch needs positive timeouts")


class Rate:
    """Bytes a second over the last few seconds. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._marks: list[tuple[float, int]] = [(now, 0)]

    def add(self, now: float, total: int) -> float:
        """Note that `total` bytes had come by `now`; the rate."""
        self._marks.append((now, total))
        while len(self._marks) > 2 and now - self._marks[1][0] > _RATE_WINDOW_S:
            self._marks.pop(0)
        since, before = self._marks[0]
        return (total - before) / (now - since) if now > since else 0.0


async def fetch_window(
    plan: Plan,
    plan_id: PlanId,
    window: Window,
    hashes: Sequence[bytes],
    *,
    sources: Sequence[WeightSource],
    cache: WeightCache,
    http: aiohttp.ClientSession,
    progress: Progress | None = None,
    config: FetchConfig | None = None,
    rng: Random | None = None,
) -> WindowBytes:
    """Bring a whole window into `cache` and map it; what is there already is verified, not transferred.

    `hashes` are the SHA-256 (32 bytes each) of `plan.window_chunks(window)`, from the backbone's signed
    document. Close the result to unpin the window. Raises `CacheFull` (no room, disk full) or
    `Unreachable` (no source is left, or no chunk came for `patience_s`); what was verified stays in the
    cache, and the next call resumes there.
    """
    config = config or FetchConfig()
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weights")
    try:
        entry = await _open(pool, cache, plan, plan_id, window, hashes)
        try:
            done = await loop.run_in_executor(pool, entry.verify)
            fetch = _Fetch(plan, window, entry, done, sources, http, pool, progress, config, rng or Random())
            await fetch.run()
            return await loop.run_in_executor(pool, entry.map)
        except BaseException:
            entry.close()
            raise
    finally:
        # Cancelled, a thread may be hashing gigabytes yet: the loop and its heartbeats must not wait for it.
        pool.shutdown(wait=False, cancel_futures=True)


async def _open(
    pool: ThreadPoolExecutor,
    cache: WeightCache,
    plan: Plan,
    plan_id: PlanId,
    window: Window,
    hashes: Sequence[bytes],
) -> CacheEntry:
    """Open a window's entry; cancelled meanwhile, it is closed as soon as it is open."""
    opening = pool.submit(cache.open, plan, plan_id, window, hashes)
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: Future[CacheEntry]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class _Fetch:
    """One run of `fetch_window`."""

    def __init__(
        self,
        plan: Plan,
        window: Window,
        entry: CacheEntry,
        done: set[int],
        sources: Sequence[WeightSource],
        http: aiohttp.ClientSession,
        pool: ThreadPoolExecutor,
        progress: Progress | None,
        config: FetchConfig,
        rng: Random,
    ) -> None:
        self._window = window
        self._entry = entry
        self._chunks = plan.window_chunks(window)
        self._board = ChunkBoard(self._chunks, done)
        self._pool = pool
        self._progress = progress
        self._config = config
        self._rng = rng
        self._readers = [
            RangeReader(
                source,
                plan,
                http,
                connect_timeout_s=config.connect_timeout_s,
                read_timeout_s=config.read_timeout_s,
            )
            for source in sources
        ]
        self._health = {source.name: SourceHealth(source.name) for source in sources}
        self._changed = asyncio.Event()
        self._received = 0
        self._refetched = 0
        self._started = self._last_chunk = time.monotonic()
        self._rate = Rate(self._started)
        self._fatal: Exception | None = None

    async def run(self) -> None:
        self._report()
        if not self._board.finished:
            async with asyncio.TaskGroup() as group:
                for reader in self._readers:
                    for _ in range(self._config.streams):
                        group.create_task(self._stream(reader))
        outcome = "fetched" if self._board.finished else "failed"
        log.info(
            "window.fetched",
            window=self._window.name,
            outcome=outcome,
            total_bytes=self._board.total_bytes,
            verified_bytes=self._board.done_bytes,
            received_bytes=self._received,
            refetched_chunks=self._refetched,
            seconds=round(time.monotonic() - self._started, 3),
            dropped={health.name: health.dropped for health in self._health.values() if health.dropped},
        )
        if self._fatal is not None:
            raise self._fatal
        if not self._board.finished:
            raise Unreachable(self._why())

    async def _stream(self, reader: RangeReader) -> None:
        """Take spans for one source until the window is whole, the source dropped or patience gone."""
        health = self._health[reader.source.name]
        while not self._board.finished and health.dropped is None and self._fatal is None:
            now = time.monotonic()
            if now - self._last_chunk > self._config.patience_s:
                health.broke_rules(f"gave no chunk for {self._config.patience_s:.0f} s")
                break
            if pause := health.pause_s(now):
                await self._wait(min(pause, self._last_chunk + self._config.patience_s - now + 0.01))
                continue
            if self._better(reader.source):
                await self._wait(self._config.patience_s)
                continue
            span = self._board.take(
                reader.source.name,
                self._config.span_bytes,
                others=self._alive(reader.source.rank),
                gap_bytes=reader.source.gap_bytes,
            )
            if span is None:
                await self._wait(self._config.patience_s)
                continue
            try:
                await self._fetch_span(reader, health, span)
            finally:
                self._board.give_back(span)
                self._wake()
        self._wake()

    async def _fetch_span(self, reader: RangeReader, health: SourceHealth, span: Span) -> None:
        """One request; whatever goes wrong with it ends here, as a mark against the source."""
        try:
            async with reader.open(span.range) as body:
                await self._receive(body, health, span)
        except WaitAsked as wait:
            health.asked_to_wait(time.monotonic(), wait.retry_after_s, self._rng)
        except RemoteProtocolError as error:
            health.broke_rules(str(error))
        except (aiohttp.ClientError, Unreachable, TimeoutError, EOFError, ConnectionError) as error:
            health.failed(time.monotonic(), str(error) or type(error).__name__, self._rng)
        except (OSError, CacheFull) as error:  # the cache: no room, or the disk failed
            self._fatal = error
        if health.dropped is not None:
            log.warning("source.dropped", source=health.name, window=self._window.name, reason=health.dropped)

    async def _receive(self, body: aiohttp.StreamReader, health: SourceHealth, span: Span) -> None:
        """Cut the body into chunks, and keep each before the next one is begun."""
        feed = _Feed(body)
        position = span.range.start
        for index in range(span.first, span.last):
            chunk = self._chunks[index]
            await feed.skip(chunk.start - position)
            good = await self._store(feed, index, chunk.nbytes)
            position = chunk.end
            self._settle(index, good, health)
            if health.dropped is not None:
                return
        if not await feed.ended():
            raise RemoteProtocolError(f"{health.name} sent more than the range asked for")

    async def _store(self, feed: _Feed, index: int, left: int) -> bool:
        """One chunk from the body to the cache: a batch is hashed and written while the next one arrives."""
        loop = asyncio.get_running_loop()
        writer = self._entry.writer(index)
        writing: asyncio.Future[bool | None] | None = None
        good: bool | None = None
        try:
            while left:
                parts = await feed.batch(min(left, _BATCH_BYTES))
                size = sum(map(len, parts))
                left -= size
                self._received += size
                if writing is not None:
                    await writing
                writing = loop.run_in_executor(self._pool, writer.add, parts)
            assert writing is not None
            good = await writing
        finally:
            if writing is not None and not writing.done():  # its own failure no longer matters
                writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return bool(good)

    def _settle(self, index: int, good: bool, health: SourceHealth) -> None:
        """A chunk was stored, or was not what the plan says."""
        if good:
            self._board.done(index)
            self._last_chunk = time.monotonic()
            health.served()
            self._report()
            return
        self._refetched += 1
        self._board.wrong(index, health.name)
        health.served_wrong_bytes()
        log.warning("chunk.rejected", source=health.name, window=self._window.name, chunk=index)

    def _report(self) -> None:
        if self._progress is not None:
            rate = self._rate.add(time.monotonic(), self._received)
            self._progress(self._board.done_bytes, self._board.total_bytes, rate)

    def _alive(self, rank: int) -> list[str]:
        """The sources up to that rank that are not dropped."""
        sources = (reader.source for reader in self._readers)
        return [s.name for s in sources if s.rank <= rank and self._health[s.name].dropped is None]

    def _better(self, source: WeightSource) -> bool:
        """Whether a source of a lower rank is well, and this one need not be troubled."""
        now = time.monotonic()
        return any(
            reader.source.rank < source.rank and self._health[reader.source.name].well(now)
            for reader in self._readers
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, timeout_s: float) -> None:
        """Until another stream changed something, or for `timeout_s`."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def _why(self) -> str:
        reasons = "; ".join(f"{h.name}: {h.dropped}" for h in self._health.values() if h.dropped)
        return (
            f"{self._window}: {self._board.done_bytes:,} of {self._board.total_bytes:,} bytes are here, and "
            f"no source is left ({reasons or 'none was given'}). What is here is kept; it goes on from there"
        )


class _Feed:
    """The body of one answer, in parts as they came from the network; nothing is copied together."""

    def __init__(self, body: aiohttp.StreamReader) -> None:
        self._body = body
        self._rest = memoryview(b"")

    async def batch(self, size: int) -> list[memoryview]:
        """Exactly the next `size` bytes. Raises `EOFError` if the body ends before."""
        parts: list[memoryview] = []
        while size:
            if not self._rest:
                self._rest = memoryview(await self._body.readany())
                if not self._rest:
                    raise EOFError(f"the answer ended at least {size} bytes early")
            part, self._rest = self._rest[:size], self._rest[size:]
            parts.append(part)
            size -= len(part)
        return parts

    async def skip(self, size: int) -> None:
        """Throw away the next `size` bytes."""
        await self.batch(size)

    async def ended(self) -> bool:
        """Whether nothing more comes."""
        return not self._rest and not await self._body.readany()

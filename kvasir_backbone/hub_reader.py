"""Exact bytes of a model's files on the hub, on demand, from any thread.

One thread of its own runs an event loop with one HTTP session; `read` hands it a range and waits. The rules
of an answer (206, the pinned commit, sizes, redirects, the token that never leaves the hub) are those of
`kvasir_node.sources`. What fails is asked again: after Retry-After where the hub is busy, after a growing
pause where the network fails, until a deadline.

Knows ranges. Knows no tensors, no plan and no files on disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Final, TypeVar

import aiohttp
import structlog

from kvasir_node.sources import PinnedFiles, RangeReader, WaitAsked, hub_source
from market.plans import ByteRange
from relay.errors import ConfigError, RemoteProtocolError, Unreachable

from .hub import HubAccess

_T = TypeVar("_T")
_log = structlog.get_logger("backbone")

DEADLINE_S: Final = 120.0
"""A read that the hub does not answer for this long fails."""

CONNECTIONS: Final = 8
_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 30.0
_MAX_PAUSE_S: Final = 60.0


class HubReader:
    """See the module docstring. `fetched_bytes` and `requests` count what came and what was asked."""

    def __init__(self, model: PinnedFiles, access: HubAccess, *, connections: int = CONNECTIONS) -> None:
        self._model = model
        self._access = access
        self._connections = connections
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._started = threading.Event()
        self._http: aiohttp.ClientSession
        self.name = f"hub {model.source}"
        self._ranges: RangeReader
        self._slots: asyncio.Semaphore
        self._quiet_until = 0.0
        self.fetched_bytes = 0
        self.requests = 0
        self._thread.start()
        self._started.wait()

    def read(self, where: ByteRange, *, deadline_s: float = DEADLINE_S) -> bytes:
        """The bytes of that range.

        Raises `ConfigError` where the hub refuses or breaks the rules, `Unreachable` where it did not give
        them within `deadline_s`.
        """
        return self._wait(self._submit(self._fetch(where, deadline_s)))

    def read_many(self, ranges: Iterable[ByteRange], *, ahead: int = CONNECTIONS) -> Iterator[bytes]:
        """The bytes of each range in order, `ahead` of them on their way at once. Raises as `read`."""
        rest = iter(ranges)
        running: deque[concurrent.futures.Future[bytes]] = deque()
        try:
            while True:
                while len(running) < ahead and (where := next(rest, None)) is not None:
                    running.append(self._submit(self._fetch(where, DEADLINE_S)))
                if not running:
                    return
                yield self._wait(running.popleft())
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        """End the thread; reads that wait fail. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._open())
            self._started.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _open(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections), trust_env=False
        )
        self._slots = asyncio.Semaphore(self._connections)
        self._ranges = RangeReader(
            hub_source(self._model, endpoint=self._access.endpoint, token=self._access.token),
            self._model,
            self._http,
            connect_timeout_s=_CONNECT_S,
            read_timeout_s=_SILENCE_S,
        )

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()
        await asyncio.sleep(0)  # lets transports say that they are closed

    def _submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        with self._lock:
            if self._closed:
                work.close()
                raise Unreachable("the checkpoint is closed: the backbone ends")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, future: concurrent.futures.Future[_T]) -> _T:
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Unreachable("the checkpoint was closed while the hub was read") from None

    async def _fetch(self, where: ByteRange, deadline_s: float) -> bytes:
        """One range, asked for until it comes or the time is over."""
        name = self._model.files[where.file].name
        until = time.monotonic() + deadline_s
        failures = 0
        while True:
            await self._quiet(until)
            try:
                async with asyncio.timeout(max(0.001, until - time.monotonic())), self._slots:
                    return await self._once(where)
            except RemoteProtocolError as error:
                raise ConfigError(f"{name} cannot be read from the hub: {error}") from None
            except WaitAsked as busy:
                reason: Exception = busy
                pause = 2.0**failures if busy.retry_after_s is None else busy.retry_after_s
                self._quiet_until = time.monotonic() + min(pause, _MAX_PAUSE_S)  # for every read
            except (aiohttp.ClientError, Unreachable, TimeoutError, OSError, EOFError) as error:
                reason, pause = error, 0.25 * 2.0**failures
            pause = min(_MAX_PAUSE_S, pause) + random.uniform(0.0, 0.25)
            failures = min(failures + 1, 8)
            if time.monotonic() + pause > until:
                said = str(reason) or type(reason).__name__
                raise Unreachable(f"the hub did not give bytes of {name} within {deadline_s:.0f} s: {said}")
            _log.info("hub.delayed", file=name, reason=str(reason), retry_s=round(pause, 1))
            await asyncio.sleep(pause)

    async def _quiet(self, until: float) -> None:
        """While the hub wants to be left alone, or until the deadline."""
        pause = min(self._quiet_until, until) - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)

    async def _once(self, where: ByteRange) -> bytes:
        self.requests += 1
        async with self._ranges.open(where) as body:
            parts, left = [], where.nbytes
            while part := await body.readany():
                parts.append(part)
                left -= len(part)
                self.fetched_bytes += len(part)
                if left < 0:
                    raise RemoteProtocolError(
                        f"{self._ranges.source.name} sent more than the range asked for"
                    )
            if left:
                raise EOFError(f"the answer ended {left} bytes early")
            return b"".join(parts)

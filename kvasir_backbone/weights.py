"""The weights endpoint: ranges of the original safetensors files, for the holders of claims on them.

`GET /weights/v1/{plan_hex}/{file_index}` with one `Range: bytes=a-b`, signed by the device key, is answered
206 with a strong ETag. A range must lie in the windows that the device has leases on; nothing else of the
model is served. Nothing is converted or stored: the bytes are those on disk, or those of the hub, passed on.

Knows files, ranges and who may have them. Knows nothing of tensors, and nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import web

from market.plans import ByteRange, Plan, PlanFile, PlanId
from market.requests import Author, NonceBook, verify_request
from market.windows import Window
from relay.errors import IdentityError, KvasirError, Refused, RemoteProtocolError
from relay.identity import PublicKey, address_of

if TYPE_CHECKING:
    from .hub_reader import HubReader

WEIGHTS_PATH: Final = "/weights/v1/{plan}/{file}"
BLOCK_BYTES: Final = 1 << 20
"""Bytes read and written at a time."""

PER_DEVICE: Final = 8
"""Transfers of one device at once; more are answered 429."""

CLAIM_WAIT_S: Final = 5.0
"""A device may ask before word of its claim has come from the market: wait for it this long."""

WAITING: Final = 64
"""Requests that wait for word of a claim at once; more are answered 429. Any key may ask."""

WRITE_TIMEOUT_S: Final = 30.0
"""A client that takes no data for this long is closed."""

HUB_DEADLINE_S: Final = 20.0
"""The hub has this long to give a block that is passed on; nodes take 30 s of silence for a failure."""

_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_log = structlog.get_logger("backbone")

Leased = Callable[[PublicKey, float], Awaitable[Collection[Window]]]
"""(device, seconds to wait while there are none) -> the windows it holds leases on."""


Read = Callable[[int, int], bytes]
"""(first byte, bytes) -> exactly those bytes of one file. Blocks."""


class FileRanges:
    """The plan's files on this machine: `paths[i]` is file number i."""

    threads: Final = 2
    block_bytes: Final = BLOCK_BYTES

    def __init__(self, paths: Collection[Path]) -> None:
        self._paths = tuple(paths)

    @contextlib.contextmanager
    def open(self, file: PlanFile, number: int) -> Iterator[Read]:
        """A reader of that file. Raises `Refused` if it is not as long as planned, `OSError`."""
        opened = os.open(self._paths[number], os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            if os.fstat(opened).st_size != file.size:
                raise Refused("internal", f"file {file.name} has changed since it was planned")
            yield functools.partial(_read_at, opened)
        finally:
            os.close(opened)


class HubRanges:
    """The plan's files on the hub, passed on from memory to the node that asks."""

    threads: Final = 8
    block_bytes: Final = 2 << 20

    def __init__(self, reader: HubReader) -> None:
        self._reader = reader

    @contextlib.contextmanager
    def open(self, file: PlanFile, number: int) -> Iterator[Read]:
        """A reader of that file, which raises `KvasirError` where the hub does not give the bytes."""
        read = self._reader.read
        yield lambda position, size: read(
            ByteRange(number, position, position + size), deadline_s=HUB_DEADLINE_S
        )


class WeightsEndpoint:
    """Serves one plan's files, which `source` reads.

    `leased` says which windows a device holds. `transfers` bounds what is served at once. `close` ends the
    reading threads.
    """

    def __init__(
        self,
        plan: Plan,
        plan_id: PlanId,
        source: FileRanges | HubRanges,
        *,
        root: PublicKey,
        leased: Leased,
        transfers: int = 32,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan = plan
        self._plan_hex = plan_id.hex()
        self._source = source
        self._root = root
        self._leased = leased
        self._limit = transfers
        self._clock = clock
        self._nonces = NonceBook()
        self._running: Counter[PublicKey] = Counter()
        self._waiting = 0
        self._threads = ThreadPoolExecutor(source.threads, thread_name_prefix="weights")
        self._ranges = functools.lru_cache(maxsize=1024)(plan.window_ranges)
        self.bytes_served = 0
        """Bytes sent since the start."""

    def close(self) -> None:
        """End the reading threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. Errors are JSON, as everywhere."""
        try:
            author = self._verify(request)
            span = self._parse(request)
            await self._check_lease(author.key, span)
            # only now: who holds no claim must not fill the book that its holders need
            self._nonces.use(author.key, author.nonce, now=self._clock())
            return await self._serve(request, author.key, span)
        except KvasirError as error:
            _log.info("weights.refused", code=error.code, reason=str(error), path=request.path)
            return error_response(error)

    def _verify(self, request: web.Request) -> Author:
        return verify_request(
            request.headers,
            request.method,
            request.raw_path,
            now=self._clock(),
            root=self._root,
            nonces=None,
        )

    def _parse(self, request: web.Request) -> ByteRange:
        if request.match_info["plan"] != self._plan_hex:
            raise Refused(
                "not_found", "this backbone serves another plan: ask the market for the current one"
            )
        name = request.match_info["file"]
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= len(self._plan.files):
            raise Refused(
                "not_found", f"the plan has files 0 to {len(self._plan.files) - 1}, not {name[:20]!r}"
            )
        match = _RANGE.fullmatch(request.headers.get("Range", ""))
        if match is None:
            raise RangeNotSatisfiable(
                "send exactly one range, as in Range: bytes=0-1023", self._size(int(name))
            )
        first, last = map(int, match.groups())
        if last < first or last >= self._size(int(name)):
            raise RangeNotSatisfiable("the range is not inside the file", self._size(int(name)))
        return ByteRange(int(name), first, last + 1)

    def _size(self, file: int) -> int:
        return self._plan.files[file].size

    async def _check_lease(self, device: PublicKey, span: ByteRange) -> None:
        windows = await self._leased(device, 0.0) or await self._wait_for_claim(device)
        if not windows:
            raise Refused("forbidden", f"device {address_of(device)} holds no claim: claim a window first")
        spans = sorted(part for window in windows for part in self._ranges(window))
        if not _inside(span, spans):
            raise Refused("forbidden", "the range is not inside the windows that this device holds")

    async def _wait_for_claim(self, device: PublicKey) -> Collection[Window]:
        """At most `WAITING` at once: a key costs nothing to make."""
        if self._waiting >= WAITING:
            raise Refused(
                "overloaded", "too many wait for word of their claims: ask again", retry_after_s=1.0
            )
        self._waiting += 1
        try:
            return await self._leased(device, CLAIM_WAIT_S)
        finally:
            self._waiting -= 1

    async def _serve(self, request: web.Request, device: PublicKey, span: ByteRange) -> web.StreamResponse:
        if self._running.total() >= self._limit or self._running[device] >= PER_DEVICE:
            raise Refused("overloaded", "too many transfers at once: ask again", retry_after_s=1.0)
        response = web.StreamResponse(status=206)
        response.headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{self._size(span.file)}"
        response.headers["ETag"] = f'"{self._plan_hex[:32]}-{span.file}"'
        response.headers["Accept-Ranges"] = "bytes"
        response.content_type = "application/octet-stream"
        response.content_length = span.nbytes
        self._running[device] += 1
        try:
            await self._copy(request, response, span)
        except (TimeoutError, OSError, KvasirError) as error:
            if isinstance(error, KvasirError) and not response.prepared:
                raise
            _log.info("weights.broken", device=address_of(device), reason=str(error) or type(error).__name__)
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._running[device] -= 1
            if not self._running[device]:
                del self._running[device]
        return response

    async def _copy(self, request: web.Request, response: web.StreamResponse, span: ByteRange) -> None:
        """Send the range; the next block is read while one is sent."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            opened = self._source.open(self._plan.files[span.file], span.file)
            read = await loop.run_in_executor(self._threads, stack.enter_context, opened)
            step = self._source.block_bytes
            blocks = [(place, min(step, span.end - place)) for place in range(span.start, span.end, step)]
            reading = [loop.run_in_executor(self._threads, read, *blocks[0])]
            try:
                for number in range(len(blocks)):
                    block = await reading.pop()
                    if number + 1 < len(blocks):
                        reading.append(loop.run_in_executor(self._threads, read, *blocks[number + 1]))
                    if not response.prepared:
                        await response.prepare(request)
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.write(block)
                    self.bytes_served += len(block)
                await response.write_eof()
            finally:  # the file is closed only when no thread reads it
                await asyncio.gather(*reading, return_exceptions=True)


class RangeNotSatisfiable(KvasirError):  # noqa: N818 - HTTP's own name for it
    """The request's range is missing, malformed or outside the file of `size` bytes."""

    code = "bad_request"

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


def _read_at(file: int, position: int, size: int) -> bytes:
    if hasattr(os, "pread"):
        data = os.pread(file, size, position)
    else:  # Windows has none; the descriptor is this request's own
        os.lseek(file, position, os.SEEK_SET)
        data = os.read(file, size)
    if len(data) != size:
        raise OSError("the file ended early: it was truncated while it was served")
    return data


def _inside(span: ByteRange, spans: list[ByteRange]) -> bool:
    """Whether `span` lies in the union of sorted `spans`."""
    position = span.start
    start = bisect_right(spans, ByteRange(span.file, span.start, 2**63)) - 1
    for part in spans[max(0, start) :]:
        if part.file != span.file or part.start > position:
            if (part.file, part.start) > (span.file, position):
                break
            continue
        position = max(position, part.end)
        if position >= span.end:
            return True
    return False


_STATUS: Final = {
    "bad_request": 400, "version": 400, "wrong_swarm": 403, "bad_signature": 401, "expired": 401,
    "replay": 401, "forbidden": 403, "quarantined": 403, "not_found": 404, "conflict": 409,
    "overloaded": 429, "quota": 429, "busy": 429, "draining": 503, "unreachable": 503, "internal": 500,
}  # fmt: skip


def error_response(error: KvasirError) -> web.Response:
    """The JSON answer to a refused request, with a fitting status and Retry-After."""
    retry = getattr(error, "retry_after_s", None)
    body = {"error": {"code": error.code, "message": str(error), "retry_after_s": retry}}
    status = _STATUS.get(error.code, 400)
    headers: dict[str, str] = {}
    if isinstance(error, RangeNotSatisfiable):
        status, headers["Content-Range"] = 416, f"bytes */{error.size}"
    elif isinstance(error, IdentityError) and status == 400:
        status = 401
    elif isinstance(error, RemoteProtocolError):
        status = 400
    if retry is not None:
        headers["Retry-After"] = str(max(1, round(retry)))
    return web.json_response(body, status=status, headers=headers)

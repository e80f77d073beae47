"""Fetching a window from real HTTP servers that err in every way the design names."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import aiohttp
import pytest
from aiohttp import web

from kvasir_node.cache import CacheEntry, CacheFull, WeightCache, WindowBytes
from kvasir_node.sources import WeightSource, backbone_source, hub_source, mirror_source
from kvasir_node.weights import FetchConfig, fetch_window
from market.plans import ByteRange, Plan
from relay.errors import ConfigError, Unreachable
from tests.support.waiting import until
from tests.support.weights import (
    PLAN_ID,
    WINDOW,
    Ask,
    RangeServer,
    cut_off,
    make_files,
    make_hashes,
    make_plan,
    serving,
    stall,
)

FILES = make_files()
PLAN = make_plan(FILES)
HASHES = make_hashes(PLAN, FILES)
TOTAL = sum(chunk.nbytes for chunk in PLAN.window_chunks(WINDOW))
CHUNKS = PLAN.window_chunks(WINDOW)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", cap_bytes=64 << 20)


def source_of(server: RangeServer, *, name: str | None = None) -> WeightSource:
    source = mirror_source(server.url, PLAN)
    return WeightSource(name or server.url, source.kind, source.url)


async def fetch(
    cache: WeightCache,
    http: aiohttp.ClientSession,
    sources: Sequence[WeightSource],
    *,
    plan: Plan = PLAN,
    progress: list[tuple[int, int, float]] | None = None,
    **config: float,
) -> WindowBytes:
    return await fetch_window(
        plan,
        PLAN_ID,
        WINDOW,
        HASHES,
        sources=sources,
        cache=cache,
        http=http,
        progress=None if progress is None else lambda *facts: progress.append(facts),
        config=FetchConfig(**({"streams": 2, "span_bytes": 2 << 20} | config)),  # type: ignore[arg-type]
        rng=Random(1),
    )


def check(window: WindowBytes) -> None:
    for chunk in CHUNKS:
        assert window.read(chunk) == FILES[chunk.file][chunk.start : chunk.end]
    assert window.nbytes == TOTAL
    window.close()


async def test_fetches_every_byte_once_and_a_warm_cache_transfers_nothing(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    seen: list[tuple[int, int, float]] = []
    async with serving(FILES) as server:
        check(await fetch(cache, http, [source_of(server)], progress=seen))
        assert server.served_bytes == TOTAL
        assert seen[0][:2] == (0, TOTAL)
        assert seen[-1][:2] == (TOTAL, TOTAL)
        assert seen[-1][2] > 0
        assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
        check(await fetch(cache, http, [source_of(server)]))
        assert server.served_bytes == TOTAL


async def test_neighbouring_chunks_share_a_request(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    async with serving(FILES) as server:
        check(await fetch(cache, http, [source_of(server)], span_bytes=64 << 20))
    ranges = PLAN.window_ranges(WINDOW)
    assert len(ranges) < len(CHUNKS)
    assert sorted(server.asked) == [(r.file, r.start, r.end) for r in ranges]


async def test_reads_across_chunks_and_nothing_outside(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    async with serving(FILES) as server:
        window = await fetch(cache, http, [source_of(server)])
    edge = CHUNKS[0].end
    assert window.read(ByteRange(0, edge - 7, edge + 9)) == FILES[0][edge - 7 : edge + 9]
    for outside in (
        ByteRange(0, 0, 64),
        ByteRange(1, 0, 32),
        ByteRange(2, 0, 1),
        ByteRange(1, 40, len(FILES[1]) + 1),
    ):
        with pytest.raises(KeyError):
            window.read(outside)
    window.close()


async def test_only_the_corrupt_chunk_is_fetched_again(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    target = CHUNKS[1]

    async def corrupt_once(ask: Ask) -> web.StreamResponse | None:
        if ask.start <= target.start < ask.end and not done.is_set():
            done.set()
            at = target.start - ask.start + 100
            body = ask.data[:at] + bytes([ask.data[at] ^ 1]) + ask.data[at + 1 :]
            return web.Response(status=206, body=body, headers=ask.headers())
        return None

    done = asyncio.Event()
    async with serving(FILES, corrupt_once) as server:
        check(await fetch(cache, http, [source_of(server)], span_bytes=64 << 20))
    again = Counter(server.asked) - Counter((r.file, r.start, r.end) for r in PLAN.window_ranges(WINDOW))
    assert again == {(target.file, target.start, target.end): 1}


async def test_a_source_of_wrong_bytes_is_dropped_after_three_and_another_serves(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    async def lie(ask: Ask) -> web.StreamResponse:
        return web.Response(status=206, body=bytes(len(ask.data)), headers=ask.headers())

    async with serving(FILES, lie) as liar, serving(FILES) as honest:
        check(await fetch(cache, http, [source_of(liar), source_of(honest)], streams=1, span_bytes=1))
        assert 1 <= len(liar.asked) <= 3
        assert honest.served_bytes == TOTAL


async def test_nothing_unverified_is_ever_mapped(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    async def lie(ask: Ask) -> web.StreamResponse:
        return web.Response(status=206, body=bytes(len(ask.data)), headers=ask.headers())

    async with serving(FILES, lie) as liar:
        with pytest.raises(Unreachable, match="served wrong bytes 3 times"):
            await fetch(cache, http, [source_of(liar)], streams=1, span_bytes=1)
        assert len(liar.asked) == 3


async def refuse_range(ask: Ask) -> web.StreamResponse:
    return web.Response(status=200, body=bytes(ask.size))


async def other_length(ask: Ask) -> web.StreamResponse:
    changed = ask.headers(Content_Range=f"bytes {ask.start}-{ask.end - 1}/{ask.size + 1}")
    return web.Response(status=206, body=ask.data, headers=changed)


async def other_range(ask: Ask) -> web.StreamResponse:
    changed = ask.headers(Content_Range=f"bytes {ask.start + 1}-{ask.end}/{ask.size}")
    return web.Response(status=206, body=ask.data, headers=changed)


async def other_etag(ask: Ask) -> web.StreamResponse:
    return web.Response(status=206, body=ask.data, headers=ask.headers(ETag=f'"{ask.count}"'))


async def no_content_range(ask: Ask) -> web.StreamResponse:
    return web.Response(status=206, body=ask.data)


async def encoded(ask: Ask) -> web.StreamResponse:
    return web.Response(status=206, body=ask.data, headers=ask.headers(Content_Encoding="zstd"))


async def too_much(ask: Ask) -> web.StreamResponse:
    response = web.StreamResponse(status=206, headers=ask.headers())
    response.enable_chunked_encoding()
    await response.prepare(ask.request)
    await response.write(ask.data + b"more")
    await response.write_eof()
    return response


async def to_elsewhere(ask: Ask) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "ftp://127.0.0.1/model"})


async def in_circles(ask: Ask) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": str(ask.request.url)})


@pytest.mark.parametrize(
    ("misbehave", "why"),
    [
        (refuse_range, "ignores Range"),
        (other_length, "bytes there"),
        (other_range, "not the range asked for"),
        (other_etag, "changed during the download"),
        (no_content_range, "without a Content-Range"),
        (encoded, "encodes the bytes"),
        (too_much, "more than the range"),
        (to_elsewhere, "not HTTP"),
        (in_circles, "redirects more than"),
    ],
)
async def test_a_server_that_breaks_the_rules_is_dropped_at_once(
    cache: WeightCache,
    http: aiohttp.ClientSession,
    misbehave: object,
    why: str,
) -> None:
    async with serving(FILES, misbehave) as server:  # type: ignore[arg-type]
        with pytest.raises(Unreachable, match=why):
            await fetch(cache, http, [source_of(server)], streams=1)
        assert len(server.asked) <= 7
    async with serving(FILES) as honest:
        check(await fetch(cache, http, [source_of(honest)]))


async def test_a_429_storm_is_waited_out_as_the_server_asks(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    loop = asyncio.get_running_loop()
    refused: list[float] = []

    async def storm(ask: Ask) -> web.StreamResponse | None:
        if len(refused) < 4:
            refused.append(loop.time())
            return web.Response(status=429, headers={"Retry-After": "1" if len(refused) == 4 else "0"})
        return None

    async with serving(FILES, storm) as server:
        check(await fetch(cache, http, [source_of(server)], streams=1))
        assert len(refused) == 4
        assert loop.time() - refused[-1] >= 1.0


async def test_endless_429_ends_at_patience(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    async def storm(ask: Ask) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "3000"})

    async with serving(FILES, storm) as server:
        with pytest.raises(Unreachable, match="gave no chunk"):
            await fetch(cache, http, [source_of(server)], patience_s=0.3)
        assert len(server.asked) <= 2


async def test_truncated_answers_keep_their_whole_chunks(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    progress: list[tuple[int, int, float]] = []

    async def truncate(ask: Ask) -> web.StreamResponse | None:
        if ask.count > 1:
            return None
        response = web.StreamResponse(status=206, headers=ask.headers(Content_Length=str(len(ask.data))))
        await response.prepare(ask.request)
        await response.write(ask.data[: CHUNKS[0].nbytes + 1000])
        await until(lambda: any(done >= CHUNKS[0].nbytes for done, _, _ in progress), timeout=30)
        assert ask.request.transport is not None
        ask.request.transport.close()
        return response

    async with serving(FILES, truncate) as server:
        sources = [source_of(server)]
        check(await fetch(cache, http, sources, progress=progress, streams=1, span_bytes=64 << 20))
    assert server.asked[1][1] == CHUNKS[1].start  # the first chunk was whole and is not fetched again


async def test_a_server_that_always_truncates_is_dropped_after_three(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    async def truncate(ask: Ask) -> web.StreamResponse:
        return await cut_off(ask, 1000)()

    async with serving(FILES, truncate) as server:
        with pytest.raises(Unreachable, match="failed 3 times in a row"):
            await fetch(cache, http, [source_of(server)], streams=1)
        assert len(server.asked) == 3


async def test_silence_is_a_failure(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    async with serving(FILES, stall) as server:
        with pytest.raises(Unreachable, match="failed 3 times"):
            await fetch(cache, http, [source_of(server)], read_timeout_s=0.1)


async def test_nobody_there(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    async with serving(FILES) as server:
        pass
    with pytest.raises(Unreachable, match="failed 3 times"):
        await fetch(cache, http, [source_of(server)], streams=1)
    with pytest.raises(Unreachable, match="none was given"):
        await fetch(cache, http, [])


async def test_the_refusal_of_a_backbone_is_shown(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    signed: list[str] = []

    async def refuse(ask: Ask) -> web.StreamResponse:
        signed.append(ask.request.headers["Kvasir-Test"])
        error = {"error": {"code": "forbidden", "message": "no lease on that window"}}
        return web.json_response(error, status=403)

    async with serving(FILES, refuse) as server:
        source = backbone_source(
            server.url, PLAN_ID, lambda method, url: {"Kvasir-Test": f"{method} {url.path} {len(signed)}"}
        )
        with pytest.raises(Unreachable, match="answered 403: no lease on that window"):
            await fetch(cache, http, [source], streams=1)
    path = f"/weights/v1/{PLAN_ID.hex()}/0"
    assert signed == [f"GET {path} 0", f"GET {path} 1", f"GET {path} 2"]


async def test_a_backbone_may_not_redirect(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    async def redirect(ask: Ask) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with serving(FILES, redirect) as server:
        with pytest.raises(Unreachable, match="redirects a signed request"):
            await fetch(cache, http, [backbone_source(server.url, PLAN_ID, lambda m, u: {})])


async def test_the_hub_redirects_and_its_token_stays_there(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    tokens: list[str | None] = []
    paths: list[str] = []

    async def store(ask: Ask) -> web.StreamResponse | None:
        tokens.append(ask.request.headers.get("Authorization"))
        return None

    async with serving(FILES, store) as cdn:

        async def resolve(ask: Ask) -> web.StreamResponse:
            assert ask.request.headers.get("Authorization") == "Bearer secret"
            paths.append(ask.request.path)
            name = ask.request.path.rsplit("/", 1)[-1]
            return web.Response(status=302, headers={"Location": f"{cdn.url}/{name}"})

        async with serving(FILES, resolve) as hub:
            check(await fetch(cache, http, [hub_source(PLAN, endpoint=hub.url, token="secret")]))
    assert set(tokens) == {None}
    assert paths[0].startswith("/org/test/resolve/r1/model-")


async def test_a_full_cache_is_said_before_anything_is_asked(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    small = WeightCache(tmp_path / "small", cap_bytes=TOTAL - 1)
    async with serving(FILES) as server:
        with pytest.raises(CacheFull, match="raise --cache-bytes"):
            await fetch(small, http, [source_of(server)])
        assert server.asked == []
    assert small.used_bytes == 0


def test_bad_settings() -> None:
    for bad in ({"streams": 0}, {"span_bytes": 0}, {"patience_s": 0.0}):
        with pytest.raises(ConfigError):
            FetchConfig(**bad)  # type: ignore[arg-type]


async def test_cancelling_a_fetch_leaves_a_cache_that_resumes(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    async def stall_late(ask: Ask) -> web.StreamResponse | None:
        return await stall(ask) if ask.count > 2 else None

    seen: list[tuple[int, int, float]] = []
    async with serving(FILES, stall_late) as server:
        task = asyncio.create_task(
            fetch(cache, http, [source_of(server)], streams=1, span_bytes=1, progress=seen)
        )
        await until(lambda: len(server.asked) == 3 and seen[-1][0] > 0, what="two chunks")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = server.served_bytes
        server.misbehave = None
        check(await fetch(cache, http, [source_of(server)]))
        assert server.served_bytes - before <= TOTAL - CHUNKS[0].nbytes


async def test_a_cancelled_fetch_does_not_wait_for_the_thread_that_hashes(
    cache: WeightCache, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(FILES) as server:
        check(await fetch(cache, http, [source_of(server)]))
        started, release, ended = threading.Event(), threading.Event(), threading.Event()
        verify = CacheEntry.verify

        def slow(entry: CacheEntry) -> set[int]:
            started.set()
            assert release.wait(30)
            try:
                return verify(entry)
            finally:
                ended.set()

        monkeypatch.setattr(CacheEntry, "verify", slow)
        try:
            task = asyncio.create_task(fetch(cache, http, [source_of(server)]))
            await until(started.is_set, what="the hashing")
            task.cancel()
            async with asyncio.timeout(5):
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not ended.is_set()
        finally:
            release.set()
        await until(ended.is_set, what="the end of the thread")
        monkeypatch.setattr(CacheEntry, "verify", verify)
        before = server.served_bytes
        check(await fetch(cache, http, [source_of(server)]))
        assert server.served_bytes == before, "the journal was left as it was"


KILLED = """
import asyncio, sys, aiohttp
from pathlib import Path
from kvasir_node.cache import WeightCache
from kvasir_node.sources import mirror_source
from kvasir_node.weights import FetchConfig, fetch_window
from tests.support.weights import *

async def main(folder, url):
    files = make_files()
    plan = make_plan(files)
    cache = WeightCache(Path(folder), cap_bytes=64 << 20)
    async with aiohttp.ClientSession() as http:
        await fetch_window(
            plan, PLAN_ID, WINDOW, make_hashes(plan, files), sources=[mirror_source(url, plan)],
            cache=cache, http=http, config=FetchConfig(streams=1, span_bytes=1),
        )

asyncio.run(main(*sys.argv[1:]))
"""


async def test_killed_and_started_again_it_goes_on(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    folder = tmp_path / "cache"
    held = asyncio.Event()

    async def hold_third(ask: Ask) -> web.StreamResponse | None:
        if ask.count >= 3:
            held.set()
            return await stall(ask)
        return None

    async with serving(FILES, hold_third) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(folder), server.url, cwd=Path(__file__).parents[2]
        )
        async with asyncio.timeout(60):
            await held.wait()
            with pytest.raises(ConfigError, match="another kvasir-node uses"):
                WeightCache(folder, cap_bytes=64 << 20)
            process.kill()
            await process.wait()
        server.misbehave = None
        fetched_before = server.served_bytes
        cache = WeightCache(folder, cap_bytes=64 << 20)
        check(await fetch(cache, http, [source_of(server)]))
        # Two chunks had been served; the second may have been lost with the process, no more than that.
        assert fetched_before == CHUNKS[0].nbytes + CHUNKS[1].nbytes
        assert server.served_bytes - fetched_before <= TOTAL - CHUNKS[0].nbytes

"""Which source is asked, in which order, what becomes of those that fail; disks and memory that run out."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from kvasir_node import cache as cache_module
from kvasir_node.cache import CacheFull, WeightCache, WindowBytes
from kvasir_node.config import NodeConfig
from kvasir_node.loading import Loader, MemoryShort, _memory_refused
from kvasir_node.sources import WeightSource, backbone_source, hub_source, mirror_source
from kvasir_node.weights import FetchConfig, fetch_window
from market.client import MarketClient
from market.plans import PlanId
from relay.errors import ConfigError, Unreachable
from relay.identity import SigningKey
from relay.links import parse_join_link
from tests.support.hub import FakeHub, hub_running
from tests.support.weights import (
    PLAN_ID,
    WINDOW,
    Ask,
    RangeServer,
    make_files,
    make_hashes,
    make_plan,
    serving,
)

FILES = make_files()
PLAN = make_plan(FILES)
HASHES = make_hashes(PLAN, FILES)
CHUNKS = PLAN.window_chunks(WINDOW)
TOTAL = sum(chunk.nbytes for chunk in CHUNKS)
TOKEN = "hf_secret"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", cap_bytes=64 << 20)


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    files = {file.name: data for file, data in zip(PLAN.files, FILES, strict=True)}
    async with hub_running(FakeHub(files, PLAN.source, PLAN.revision, TOKEN)) as running:
        yield running


@pytest.fixture
async def backbone() -> AsyncIterator[RangeServer]:
    async with serving(FILES) as server:
        yield server


def both(hub: FakeHub, backbone: RangeServer, *, token: str | None = TOKEN) -> list[WeightSource]:
    """The hub, and the backbone behind it."""
    return [
        backbone_source(backbone.url, PLAN_ID, lambda method, url: {}, rank=1),
        hub_source(PLAN, endpoint=hub.url, token=token),
    ]


async def fetch(
    cache: WeightCache, http: aiohttp.ClientSession, sources: list[WeightSource], **config: Any
) -> WindowBytes:
    settings = FetchConfig(**({"streams": 2, "span_bytes": 2 << 20} | config))
    return await fetch_window(
        PLAN, PLAN_ID, WINDOW, HASHES, sources=sources, cache=cache, http=http, config=settings, rng=Random(1)
    )


def check(window: WindowBytes) -> None:
    for chunk in CHUNKS:
        assert window.read(chunk) == FILES[chunk.file][chunk.start : chunk.end]
    window.close()


async def test_while_the_hub_is_well_the_backbone_is_left_alone(
    cache: WeightCache, http: aiohttp.ClientSession, hub: FakeHub, backbone: RangeServer
) -> None:
    check(await fetch(cache, http, both(hub, backbone)))
    assert backbone.asked == []
    assert sum(hub.served.values()) >= TOTAL
    assert {asked.authorization for asked in hub.asked if asked.path.startswith("/blobs/")} == {None}
    resolved = [asked for asked in hub.asked if "/resolve/" in asked.path]
    assert len(resolved) <= 4 < len(hub.ranges)  # where they lead is remembered, stream by stream at first


async def other_commit(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"X-Repo-Commit": "r2", "Location": "/x"})


async def too_many(request: web.Request) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "3000"})


async def gone(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404)


@pytest.mark.parametrize(("trouble", "most"), [(other_commit, 2), (too_many, 2), (gone, 2)])
async def test_a_hub_that_will_not_serve_is_left_at_once(
    cache: WeightCache,
    http: aiohttp.ClientSession,
    hub: FakeHub,
    backbone: RangeServer,
    trouble: Callable[[web.Request], Any],
    most: int,
) -> None:
    hub.trouble = trouble
    check(await fetch(cache, http, both(hub, backbone)))
    assert len(hub.asked) <= most
    assert backbone.served_bytes == TOTAL


async def test_without_a_token_the_reason_names_the_variable(
    cache: WeightCache, http: aiohttp.ClientSession, hub: FakeHub
) -> None:
    with pytest.raises(Unreachable, match="set HF_TOKEN"):
        await fetch(cache, http, [hub_source(PLAN, endpoint=hub.url)])


async def test_a_hub_of_wrong_bytes_is_dropped_after_three_and_the_backbone_goes_on(
    cache: WeightCache, http: aiohttp.ClientSession, hub: FakeHub, backbone: RangeServer
) -> None:
    hub.files = {name: bytes(len(data)) for name, data in hub.files.items()}
    check(await fetch(cache, http, both(hub, backbone), streams=1, span_bytes=1))
    assert len(hub.ranges) == 3
    assert backbone.served_bytes == TOTAL


async def test_small_gaps_are_fetched_over_where_the_source_allows_it(
    cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    async with serving(FILES) as server:
        check(await fetch(cache, http, [mirror_source(server.url, PLAN)], span_bytes=64 << 20))
        assert len(server.asked) == len(PLAN.files) < len(PLAN.window_ranges(WINDOW))
        assert server.served_bytes == TOTAL + 2 * 16  # a gap in each file


async def test_a_redirect_within_the_hub_keeps_the_token(
    cache: WeightCache, http: aiohttp.ClientSession, hub: FakeHub
) -> None:
    async def renamed(request: web.Request) -> web.StreamResponse | None:
        if "old" in request.path:
            return web.Response(status=307, headers={"Location": request.path.replace("old", "test")})
        return None

    hub.trouble = renamed
    old = replace(PLAN, source="org/old")
    check(await fetch(cache, http, [hub_source(old, endpoint=hub.url, token=TOKEN)]))
    sent = {asked.authorization for asked in hub.asked if "/resolve/" in asked.path}
    assert sent == {f"Bearer {TOKEN}"}


# --- which sources there are -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "source", "settings", "expected"),
    [
        ("auto", "local", {}, [("backbone", 0)]),
        ("auto", "local", {"mirrors": ("http://m",)}, [("mirror", 0), ("backbone", 0)]),
        ("auto", "org/m", {}, [("hub", 0), ("backbone", 1)]),
        ("auto", "org/m", {"mirrors": ("http://m",)}, [("mirror", 0), ("hub", 0), ("backbone", 1)]),
        ("auto", "org/m", {"hub": False}, [("backbone", 0)]),
        ("backbone", "org/m", {"mirrors": ("http://m",)}, [("backbone", 0)]),
        ("hub", "org/m", {"mirrors": ("http://m",)}, [("hub", 0)]),
        ("https://mirror/x", "org/m", {}, [("mirror", 0)]),
    ],
)
async def test_where_weights_may_come_from(
    tmp_path: Path,
    cache: WeightCache,
    http: aiohttp.ClientSession,
    wanted: str,
    source: str,
    settings: dict[str, Any],
    expected: list[tuple[str, int]],
) -> None:
    loader = make_loader(tmp_path, cache, http, weights_from=wanted, **settings)
    found = await loader.sources(replace(PLAN, source=source), PlanId(PLAN_ID))
    assert [(one.kind, one.rank) for one in found] == expected


async def test_the_hub_alone_cannot_serve_a_local_model(
    tmp_path: Path, cache: WeightCache, http: aiohttp.ClientSession
) -> None:
    loader = make_loader(tmp_path, cache, http, weights_from="hub")
    with pytest.raises(ConfigError, match="only on its backbone"):
        await loader.sources(replace(PLAN, source="local"), PLAN_ID)


@pytest.mark.parametrize(
    "settings", [{"weights_from": "elsewhere"}, {"hub_endpoint": "hub"}, {"mirrors": ("ftp://m",)}]
)
def test_places_that_are_no_places(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NodeConfig(join=parse_join_link("http://127.0.0.1:1"), state_dir=tmp_path, **settings)


def make_loader(folder: Path, cache: WeightCache, http: aiohttp.ClientSession, **settings: Any) -> Loader:
    config = NodeConfig(join=parse_join_link("http://127.0.0.1:1"), state_dir=folder, **settings)
    return Loader(
        config,
        market=MarketClient("http://127.0.0.1:1", http=http),
        key=SigningKey.generate(),
        cache=cache,
        http=http,
        compute=ThreadPoolExecutor(1),
        rng=Random(0),
    )


# --- what runs out ------------------------------------------------------------------------------------------


async def test_a_disk_that_fills_in_mid_download_ends_it_and_later_it_goes_on(
    cache: WeightCache, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 5 << 20
    write = cache_module._write_at

    def filling(file: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, offset, data)

    async with serving(FILES) as server:
        monkeypatch.setattr(cache_module, "_write_at", filling)
        with pytest.raises(CacheFull, match="the disk is full"):
            await fetch(cache, http, [mirror_source(server.url, PLAN)], streams=1)
        monkeypatch.undo()
        before = server.served_bytes
        check(await fetch(cache, http, [mirror_source(server.url, PLAN)], streams=1))
        assert server.served_bytes - before < TOTAL


@pytest.mark.parametrize("ask", [lambda: torch.empty(1 << 60), lambda: bytearray(1 << 62)])
def test_memory_that_the_system_refuses_is_said_in_words(ask: Callable[[], object]) -> None:
    with pytest.raises(MemoryShort, match="smaller --budget"), _memory_refused():
        ask()


def test_other_failures_are_not_taken_for_memory() -> None:
    with pytest.raises(RuntimeError, match="shape"), _memory_refused():
        torch.ones(2, 3).view(7)


async def test_a_backbone_is_never_asked_for_a_gap(cache: WeightCache, http: aiohttp.ClientSession) -> None:
    asked: list[tuple[int, int, int]] = []

    async def note(ask: Ask) -> web.StreamResponse | None:
        asked.append((ask.file, ask.start, ask.end))
        return None

    async with serving(FILES, note) as server:
        source = backbone_source(server.url, PLAN_ID, lambda method, url: {})
        check(await fetch(cache, http, [source], span_bytes=64 << 20))
    assert sorted(asked) == [(part.file, part.start, part.end) for part in PLAN.window_ranges(WINDOW)]

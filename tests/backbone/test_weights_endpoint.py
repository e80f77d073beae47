"""The weights endpoint over HTTP: exactly the leased bytes, to exactly their holder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone import weights
from kvasir_backbone.weights import WEIGHTS_PATH, FileRanges, WeightsEndpoint, _inside
from market.plans import ByteRange, PlanId
from market.requests import sign_request
from market.windows import Window
from relay.identity import PublicKey, SigningKey
from tests.support.rosters import flat_plan
from tests.support.waiting import until

PLAN = flat_plan(width=64)
PLAN_ID = PlanId(b"\7" * 32)
DATA = bytes((n * 7 + n // 251) % 256 for n in range(PLAN.files[0].size))
WINDOW = PLAN.windows[1]


class Site:
    """A server with the endpoint, and a device that signs its requests."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        self.path.write_bytes(DATA)
        self.device = SigningKey.generate()
        self.held: dict[PublicKey, Collection[Window]] = {self.device.public: [WINDOW]}
        self.waits: list[float] = []
        self.endpoint = WeightsEndpoint(
            PLAN,
            PLAN_ID,
            FileRanges([self.path]),
            root=SigningKey.generate().public,
            leased=self.leased,
            transfers=4,
        )
        self.server: TestServer
        self.http: aiohttp.ClientSession

    async def leased(self, device: PublicKey, wait_s: float) -> Collection[Window]:
        self.waits.append(wait_s)
        return self.held.get(device, ())

    async def get(
        self,
        span: str | None,
        *,
        key: SigningKey | None = None,
        path: str = f"/weights/v1/{PLAN_ID.hex()}/0",
        signed: bool = True,
        now: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        sent = dict(headers or {})
        if signed and headers is None:
            sent |= sign_request(key or self.device, "GET", path, now=time.time() if now is None else now)
        if span is not None:
            sent["Range"] = span
        async with self.http.get(self.server.make_url(path), headers=sent) as response:
            return response.status, await response.read(), response.headers


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    app = web.Application()
    app.router.add_get(WEIGHTS_PATH, made.endpoint.handle)
    made.server = TestServer(app)
    await made.server.start_server()
    async with aiohttp.ClientSession() as made.http:
        yield made
    await made.server.close()
    made.endpoint.close()


FIRST = PLAN.window_ranges(WINDOW)[0]


async def test_a_leased_range_comes_back_exactly_with_a_strong_etag(site: Site) -> None:
    for span in PLAN.window_ranges(WINDOW):
        status, body, headers = await site.get(f"bytes={span.start}-{span.end - 1}")
        assert status == 206
        assert body == DATA[span.start : span.end]
        assert headers["Content-Range"] == f"bytes {span.start}-{span.end - 1}/{len(DATA)}"
        assert headers["ETag"].startswith('"')
    again = await site.get(f"bytes={FIRST.start}-{FIRST.start}")
    assert again[2]["ETag"] == headers["ETag"]
    assert site.endpoint.bytes_served == sum(s.nbytes for s in PLAN.window_ranges(WINDOW)) + 1


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 10), (FIRST.start - 1, FIRST.start + 1), (FIRST.end - 1, FIRST.end + 1), (0, len(DATA))],
)
async def test_bytes_outside_the_leased_windows_are_forbidden(site: Site, start: int, end: int) -> None:
    status, body, _ = await site.get(f"bytes={start}-{end - 1}")
    assert status == 403
    assert b"not inside the windows" in body


async def test_who_holds_no_claim_gets_nothing_after_the_claim_was_waited_for(site: Site) -> None:
    status, body, _ = await site.get(f"bytes={FIRST.start}-{FIRST.start}", key=SigningKey.generate())
    assert status == 403
    assert b"claim a window first" in body
    assert site.waits == [0.0, weights.CLAIM_WAIT_S]


async def test_keys_without_claims_neither_fill_the_book_of_nonces_nor_wait_without_bound(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = f"bytes={FIRST.start}-{FIRST.start}"
    for _ in range(3):
        assert (await site.get(span, key=SigningKey.generate()))[0] == 403
    assert len(site.endpoint._nonces._seen) == 0
    gate = asyncio.Event()

    async def leased(device: PublicKey, wait_s: float) -> Collection[Window]:
        if wait_s and device not in site.held:
            await gate.wait()
        return site.held.get(device, ())

    monkeypatch.setattr(weights, "WAITING", 2)
    monkeypatch.setattr(site.endpoint, "_leased", leased)
    first = [asyncio.create_task(site.get(span, key=SigningKey.generate())) for _ in range(2)]
    await until(lambda: site.endpoint._waiting == 2, what="two requests that wait")
    status, _, headers = await site.get(span, key=SigningKey.generate())
    assert (status, headers["Retry-After"]) == (429, "1")
    assert (await site.get(span))[0] == 206, "who holds a claim is served meanwhile"
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*first)] == [403] * 2
    assert site.endpoint._waiting == 0


@pytest.mark.parametrize(
    "span",
    [
        None,
        "bytes=",
        "bytes=5-",
        "bytes=-5",
        "bytes=9-3",
        "bytes=0-1,4-5",
        "items=0-1",
        "bytes=0-99999999999",
    ],
)
async def test_anything_but_one_range_inside_the_file_is_416(site: Site, span: str | None) -> None:
    status, body, headers = await site.get(span)
    assert status == 416
    assert headers["Content-Range"] == f"bytes */{len(DATA)}"
    assert b'"error"' in body


@pytest.mark.parametrize("file", ["1", "99999999999", "-1", "x", "0x0"])
async def test_an_unknown_file_or_plan_is_404(site: Site, file: str) -> None:
    assert (await site.get("bytes=0-0", path=f"/weights/v1/{PLAN_ID.hex()}/{file}"))[0] == 404
    assert (await site.get("bytes=0-0", path=f"/weights/v1/{bytes(32).hex()}/0"))[0] == 404


async def test_unsigned_stale_and_replayed_requests_are_refused(site: Site) -> None:
    span = f"bytes={FIRST.start}-{FIRST.start}"
    assert (await site.get(span, signed=False))[0] == 401
    assert (await site.get(span, now=time.time() - 600))[0] == 401
    headers = sign_request(site.device, "GET", f"/weights/v1/{PLAN_ID.hex()}/0", now=time.time())
    assert (await site.get(span, headers=dict(headers)))[0] == 206
    assert (await site.get(span, headers=dict(headers)))[0] == 401
    elsewhere = sign_request(site.device, "GET", "/weights/v1/other/0", now=time.time())
    assert (await site.get(span, headers=dict(elsewhere)))[0] == 401


async def test_a_file_that_changed_since_it_was_planned_is_not_served(site: Site) -> None:
    site.path.write_bytes(DATA + b"more")
    status, body, _ = await site.get(f"bytes={FIRST.start}-{FIRST.start}")
    assert status == 500
    assert b"has changed" in body


async def test_more_transfers_than_the_bound_are_asked_to_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, original = asyncio.Event(), WeightsEndpoint._copy

    async def slow(self: WeightsEndpoint, *arguments: object) -> None:
        await gate.wait()
        await original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightsEndpoint, "_copy", slow)
    span = f"bytes={FIRST.start}-{FIRST.start}"
    first = [asyncio.create_task(site.get(span)) for _ in range(4)]
    await until(lambda: site.endpoint._running.total() == 4, what="four transfers")
    status, _, headers = await site.get(span)
    assert status == 429
    assert headers["Retry-After"] == "1"
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*first)] == [206] * 4
    assert site.endpoint._running.total() == 0


SPANS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 8)).map(
        lambda part: ByteRange(part[0], part[1], part[1] + part[2])
    ),
    max_size=8,
)


@given(spans=SPANS, file=st.integers(0, 1), start=st.integers(0, 30), length=st.integers(1, 12))
def test_a_range_is_inside_exactly_if_each_of_its_bytes_is(
    spans: list[ByteRange], file: int, start: int, length: int
) -> None:
    covered = {(span.file, byte) for span in spans for byte in range(span.start, span.end)}
    wanted = {(file, byte) for byte in range(start, start + length)}
    assert _inside(ByteRange(file, start, start + length), sorted(spans)) == (wanted <= covered)

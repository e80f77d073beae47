"""A model on the hub: pinned, read by ranges, never whole; and every way in which a hub can be in the way."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from aiohttp import web

from kvasir_backbone import hub as hub_module
from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.expert_cache import ExpertCache
from kvasir_backbone.hub import HubAccess, HubReference, open_model, parse_model
from kvasir_backbone.hub_checkpoint import HubCheckpoint
from kvasir_backbone.hub_reader import HubReader
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from market.plans import ByteRange, Plan
from relay.errors import ConfigError, Refused, Unreachable
from tests.support.hub import COMMIT, REPOSITORY, FakeHub, hub_running

_T = TypeVar("_T")
MAIN = HubReference(REPOSITORY)
TOKEN = "hf_secret"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own hub may be asked, though tests run with HF_HUB_OFFLINE set."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    async with hub_running(FakeHub.of_folder(bundled_model_path(), token=TOKEN)) as running:
        yield running


async def on_thread(work: Callable[[], _T]) -> _T:
    async with asyncio.timeout(60):
        return await asyncio.to_thread(work)


async def opened(hub: FakeHub, home: Path, **settings: Any) -> HubCheckpoint:
    access = HubAccess(hub.url, TOKEN)
    settings = {"cache_bytes": 1 << 30} | settings
    return await on_thread(lambda: HubCheckpoint.open_hub(MAIN, access, home, **settings))


async def planned(checkpoint: HubCheckpoint) -> Plan:
    def work() -> Plan:
        return checkpoint.make_plan(window_bytes=8 << 20, wire_dtype="float32", rng=random.Random(3))

    return await on_thread(work)


def below(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def expert_bytes(hub: FakeHub, plan: Plan) -> int:
    """Bytes of routed experts that the store was asked for."""
    return sum(
        hub.overlap(plan.files[part.file].name, part.start, part.end)
        for window in plan.windows
        for part in plan.window_ranges(window)
    )


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/model", HubReference("org/model")),
        ("hf://org/model", HubReference("org/model")),
        ("org/model.v2@refs/pr/3", HubReference("org/model.v2", "refs/pr/3")),
        (f"hf://org/m@{COMMIT}", HubReference("org/m", COMMIT)),
        ("./org/model", Path("org/model")),
        ("/data/model", Path("/data/model")),
        ("model", Path("model")),
        ("org/../model", Path("org/../model")),
        ("a/b/c", Path("a/b/c")),
    ],
)
def test_what_the_operator_may_name(text: str, expected: object) -> None:
    assert parse_model(text) == expected


def test_a_folder_here_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_model("org/model") == Path("org/model")
    assert parse_model("hf://org/model") == HubReference("org/model")


@pytest.mark.parametrize("text", ["hf://", "hf://model", "hf:///a/b", "hf://a/b@"])
def test_a_malformed_hub_name_says_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="hf://OWNER/NAME"):
        parse_model(text)


def test_the_token_is_never_shown() -> None:
    assert TOKEN not in repr(HubAccess("https://hub", TOKEN))


# --- what is read, and what is not -----------------------------------------------------------------------


async def test_experts_are_never_fetched_but_for_their_proof_their_hashes_and_themselves(
    hub: FakeHub, tmp_path: Path, bundled: Checkpoint
) -> None:
    checkpoint = await opened(hub, tmp_path)
    headers = sum(8 + int.from_bytes(data[:8], "little") for data in hub.large.values())
    assert sum(hub.served.values()) == headers
    plan = await planned(checkpoint)
    proving = sum(recipe.expert_bytes for recipe in plan.layers)
    assert 0 < expert_bytes(hub, plan) <= proving  # one expert a layer
    await on_thread(lambda: checkpoint.dense_path)
    assert expert_bytes(hub, plan) <= proving
    stored = sum(path.stat().st_size for path in below(tmp_path, "*.safetensors"))
    dense = sum(hub.served.values()) - headers - expert_bytes(hub, plan)
    assert 0 < dense <= stored < sum(map(len, hub.large.values())) // 10

    local = bundled.make_plan(window_bytes=8 << 20, wire_dtype="float32")
    assert (plan.windows, plan.layers, plan.files) == (local.windows, local.layers, local.files)
    assert (plan.source, plan.revision) == (REPOSITORY, COMMIT)

    before, window = sum(hub.served.values()), plan.windows[2]
    hashes = await on_thread(lambda: checkpoint.hash_window(plan, window))
    assert hashes.chunks == bundled.hash_window(local, window).chunks
    assert sum(hub.served.values()) - before == sum(part.nbytes for part in plan.window_ranges(window))
    assert not below(tmp_path, "*.piece")
    checkpoint.close()


async def test_the_dense_part_is_the_model_that_a_folder_gives(
    hub: FakeHub, tmp_path: Path, bundled_model: BackboneModel
) -> None:
    checkpoint = await opened(hub, tmp_path)
    plan = await planned(checkpoint)
    experts = LocalExperts(checkpoint.read, plan)
    model = await on_thread(lambda: BackboneModel.load(checkpoint, dtype="float32", dispatcher=experts))
    expected, found = dict(bundled_model.weights()), dict(model.weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.tokenizer.encode("In the beginning") == bundled_model.tokenizer.encode("In the beginning")
    checkpoint.close()


async def test_a_second_start_asks_for_nothing_it_has(hub: FakeHub, tmp_path: Path) -> None:
    first = await opened(hub, tmp_path)
    await planned(first)
    await on_thread(lambda: first.dense_path)
    first.close()
    hub.ranges.clear()
    hub.asked.clear()
    again = await opened(hub, tmp_path)
    plan = await planned(again)
    await on_thread(lambda: again.dense_path)
    assert sum(end - start for _, start, end in hub.ranges) == expert_bytes(hub, plan)  # the proofs alone
    assert [
        asked.path for asked in hub.asked if "/resolve/" not in asked.path and "/blobs/" not in asked.path
    ] == [f"/api/models/{REPOSITORY}/revision/main"]
    again.close()
    damaged = below(tmp_path, "dense-00001.safetensors")[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    right = damaged.with_suffix(".sha256").read_text()
    mended = await opened(hub, tmp_path)
    await planned(mended)
    await on_thread(lambda: mended.dense_path)
    assert hashlib.sha256(damaged.read_bytes()).hexdigest() == right
    mended.close()


async def test_a_whole_commit_that_is_known_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    access = HubAccess(hub.url, TOKEN)
    model = await on_thread(lambda: open_model(MAIN, access, tmp_path))
    hub.asked.clear()
    pinned = HubReference(REPOSITORY, COMMIT)
    assert await on_thread(lambda: open_model(pinned, access, tmp_path)) == model
    assert hub.asked == []


async def test_the_token_goes_to_the_hub_and_never_onwards(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = await opened(hub, tmp_path)
    await planned(checkpoint)
    await on_thread(lambda: checkpoint.dense_path)
    checkpoint.close()
    store = [asked.authorization for asked in hub.asked if asked.path.startswith("/blobs/")]
    own = [asked.authorization for asked in hub.asked if not asked.path.startswith("/blobs/")]
    assert store
    assert set(store) == {None}
    assert set(own) == {f"Bearer {TOKEN}"}
    asked = {asked.path.split("/")[4] for asked in hub.asked if "/resolve/" in asked.path}
    assert asked == {COMMIT}  # the branch was asked for once


# --- single experts, and their cache -----------------------------------------------------------------------


async def test_an_experts_bytes_come_once_and_are_the_files(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = await opened(hub, tmp_path)
    plan = await planned(checkpoint)
    where = next(plan.layers[1].sources()).locate(17)
    truth = hub.files[plan.files[where.file].name][where.start : where.end]
    before = sum(hub.served.values())
    assert await on_thread(lambda: checkpoint.read(where)) == truth
    fetched = sum(hub.served.values()) - before
    assert where.nbytes <= fetched <= 2 * (4 << 20)
    assert await on_thread(lambda: checkpoint.read(where)) == truth
    assert sum(hub.served.values()) - before == fetched
    checkpoint.close()


async def test_bytes_that_are_not_those_that_were_hashed_are_never_used(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = await opened(hub, tmp_path)
    plan = await planned(checkpoint)
    window = plan.windows[0]
    await on_thread(lambda: checkpoint.hash_window(plan, window))
    where = next(plan.window_layers(window)[0].sources()).locate(5)
    name = plan.files[where.file].name
    truth = hub.files[name]
    hub.files[name] = truth[: where.start] + bytes(where.nbytes) + truth[where.end :]
    hub.commit = COMMIT

    async def same_etag(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith(name):
            headers = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(truth))}
            headers["Location"] = f"{hub.store_url}/blobs/{name}?signature=0"
            return web.Response(status=302, headers=headers)
        return None

    hub.trouble = same_etag
    with pytest.raises(ConfigError, match="other bytes for"):
        await on_thread(lambda: checkpoint.read(where))
    hub.files[name] = truth
    assert await on_thread(lambda: checkpoint.read(where)) == truth[where.start : where.end]
    checkpoint.close()


async def test_the_hashes_of_an_earlier_start_still_hold(hub: FakeHub, tmp_path: Path) -> None:
    first = await opened(hub, tmp_path)
    plan = await planned(first)
    await on_thread(lambda: first.hash_window(plan, plan.windows[0]))
    first.close()
    again = await opened(hub, tmp_path)
    plan = await planned(again)
    where = next(plan.window_layers(plan.windows[0])[0].sources()).locate(5)
    name = plan.files[where.file].name

    async def lie(request: web.Request) -> web.StreamResponse:
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        size = len(hub.files[name])
        headers = {"Content-Range": f"bytes {first}-{last}/{size}"}
        return web.Response(status=206, body=bytes(last + 1 - first), headers=headers)

    hub.store_trouble = lie
    with pytest.raises(ConfigError, match="other bytes for"):
        await on_thread(lambda: again.read(where))
    again.close()


def test_the_cache_keeps_its_bound_and_forgets_the_least_used(tmp_path: Path) -> None:
    cache = ExpertCache(tmp_path, COMMIT, cap_bytes=3 * 132)
    pieces = [ByteRange(0, 100 * n, 100 * n + 100) for n in range(4)]
    for number, piece in enumerate(pieces[:3]):
        cache.put(piece, bytes([number]) * 100)
    assert cache.get(pieces[0]) == bytes(100)
    cache.put(pieces[3], b"\3" * 100)
    assert cache.get(pieces[1]) is None
    assert cache.get(pieces[0]) == bytes(100)
    assert cache.used_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.piece")) == 3 * 132
    cache.put(pieces[1], bytes(1000))  # larger than the whole cache
    assert cache.used_bytes == 3 * 132
    smaller = ExpertCache(tmp_path, "other", cap_bytes=132)
    assert smaller.used_bytes == 132


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:40] + b"x" + d[41:], lambda d: b""])
def test_a_damaged_piece_is_forgotten(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    cache = ExpertCache(tmp_path, COMMIT, cap_bytes=1000)
    piece = ByteRange(1, 5, 105)
    cache.put(piece, bytes(100))
    (path,) = tmp_path.rglob("*.piece")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(piece) is None
    assert not path.exists()
    cache.put(piece, bytes(100))
    assert cache.get(piece, hashlib.sha256(bytes(100)).digest()) == bytes(100)
    assert cache.get(piece, bytes(32)) is None  # not what it must be
    assert cache.used_bytes == 0


# --- a hub that is in the way ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "token", "says"),
    [
        (HubReference("kvasir/other"), TOKEN, "no such model or revision|check the name"),
        (HubReference(REPOSITORY, "v9"), TOKEN, "check the name and the revision"),
        (MAIN, None, "HF_TOKEN"),
        (MAIN, "wrong", "of an account that may read it"),
    ],
)
async def test_what_the_operator_must_change_is_said(
    hub: FakeHub, tmp_path: Path, reference: HubReference, token: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await on_thread(lambda: open_model(reference, HubAccess(hub.url, token), tmp_path))


async def test_a_gated_model_says_where_to_accept(hub: FakeHub, tmp_path: Path) -> None:
    async def gated(request: web.Request) -> web.StreamResponse:
        return web.Response(status=403, headers={"X-Error-Code": "GatedRepo"})

    hub.trouble = gated
    with pytest.raises(ConfigError, match=f"accept its conditions at {hub.url}/{REPOSITORY}"):
        await on_thread(lambda: open_model(MAIN, HubAccess(hub.url, TOKEN), tmp_path))


async def test_a_busy_hub_is_asked_again_when_it_says(hub: FakeHub, tmp_path: Path) -> None:
    refused: list[str] = []

    async def storm(request: web.Request) -> web.StreamResponse | None:
        if len(refused) < 3:
            refused.append(request.path)
            return web.Response(status=429, headers={"Retry-After": "0"})
        return None

    hub.trouble = storm
    model = await on_thread(lambda: open_model(MAIN, HubAccess(hub.url, TOKEN), tmp_path))
    assert len(refused) == 3
    assert model.revision == COMMIT


async def test_a_hub_that_stays_busy_or_away_is_given_up(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "ATTEMPTS", 2)

    async def storm(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "0"})

    hub.trouble = storm
    with pytest.raises(Refused, match="429"):
        await on_thread(lambda: open_model(MAIN, HubAccess(hub.url, TOKEN), tmp_path))
    with pytest.raises(Unreachable, match="does not answer"):
        await on_thread(lambda: open_model(MAIN, HubAccess("http://127.0.0.1:9", TOKEN), tmp_path))


async def test_waiting_for_the_hub_ends_with_the_daemon(hub: FakeHub, tmp_path: Path) -> None:
    ended = threading.Event()

    async def storm(request: web.Request) -> web.StreamResponse:
        ended.set()
        return web.Response(status=429, headers={"Retry-After": "3000"})

    hub.trouble = storm
    with pytest.raises(Refused, match="429"):
        await on_thread(lambda: open_model(MAIN, HubAccess(hub.url, TOKEN), tmp_path, ended=ended))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'},
            "not a safetensors",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
            "not in the repository",
        ),
        ({"model.safetensors.index.json": b"[" * 100_000}, "not a safetensors index"),
        ({"pytorch_model.bin": b"x"}, "no .safetensors files"),
        ({"model.safetensors": b""}, "no size"),
    ],
)
async def test_a_repository_that_cannot_be_served_says_why(
    tmp_path: Path, files: dict[str, bytes], says: str
) -> None:
    async with hub_running(FakeHub({"config.json": b"{}", **files})) as hub:
        with pytest.raises(ConfigError, match=says):
            await on_thread(lambda: open_model(MAIN, HubAccess(hub.url), tmp_path))


@pytest.mark.parametrize(
    "data", [b"\0" * 7, b"\xff" * 64, (50).to_bytes(8, "little") + b"{" * 50, (1 << 40).to_bytes(8, "little")]
)
async def test_a_lying_header_is_refused_before_it_is_fetched(tmp_path: Path, data: bytes) -> None:
    config = (bundled_model_path() / "config.json").read_bytes()
    async with hub_running(FakeHub({"config.json": config, "model.safetensors": data})) as hub:
        with pytest.raises(ConfigError, match=r"truncated|malformed"):
            await on_thread(
                lambda: HubCheckpoint.open_hub(MAIN, HubAccess(hub.url), tmp_path, cache_bytes=1000)
            )
        assert hub.served["model.safetensors"] <= len(data)


async def test_files_with_odd_names_and_code_are_left_alone(tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "model.safetensors": b"\0" * 16,
        "../outside.json": b"{}",
        "sub/other.json": b"{}",
        "modeling_evil.py": b"raise SystemExit",
        ".hidden.json": b"{}",
    }
    async with hub_running(FakeHub(files)) as hub:
        await on_thread(lambda: open_model(MAIN, HubAccess(hub.url), tmp_path / "home"))
    names = {path.name for path in below(tmp_path, "*") if path.is_file()}
    assert not names & {"outside.json", "other.json", "modeling_evil.py", ".hidden.json"}


# --- the reader --------------------------------------------------------------------------------------------


@pytest.fixture
async def reader(hub: FakeHub, tmp_path: Path) -> AsyncIterator[HubReader]:
    access = HubAccess(hub.url, TOKEN)
    model = await on_thread(lambda: open_model(MAIN, access, tmp_path))
    made = HubReader(model, access)
    yield made
    await on_thread(made.close)


SOME = ByteRange(0, 1000, 5000)


async def test_signed_addresses_are_reused_and_asked_for_anew_when_they_expire(
    hub: FakeHub, reader: HubReader
) -> None:
    truth = hub.files["model-00001-of-00002.safetensors"]
    assert await on_thread(lambda: reader.read(SOME)) == truth[1000:5000]
    hub.asked.clear()
    assert await on_thread(lambda: reader.read(ByteRange(0, 0, 10))) == truth[:10]
    assert [asked.path.split("/")[1] for asked in hub.asked] == ["blobs"]
    hub.expire()
    hub.asked.clear()
    assert await on_thread(lambda: reader.read(SOME)) == truth[1000:5000]
    assert [asked.path.split("/")[1] for asked in hub.asked] == ["blobs", "kvasir", "blobs"]


async def test_many_ranges_come_in_order(hub: FakeHub, reader: HubReader) -> None:
    truth = hub.files["model-00002-of-00002.safetensors"]
    spans = [ByteRange(1, 777 * n, 777 * n + 500) for n in range(100)]
    got = await on_thread(lambda: list(reader.read_many(spans)))
    assert got == [truth[span.start : span.end] for span in spans]
    assert reader.fetched_bytes == 50_000


async def test_short_answers_and_lost_connections_are_asked_for_again(
    hub: FakeHub, reader: HubReader
) -> None:
    broken: list[str] = []

    async def cut(request: web.Request) -> web.StreamResponse | None:
        if len(broken) == 2:
            return None
        broken.append(request.path)
        response = web.StreamResponse(
            status=206,
            headers={"Content-Range": f"bytes 1000-4999/{len(hub.files[request.match_info['file']])}"},
        )
        response.content_length = 4000
        await response.prepare(request)
        await response.write(bytes(100))
        assert request.transport is not None
        request.transport.close()
        return response

    hub.store_trouble = cut
    assert (
        await on_thread(lambda: reader.read(SOME)) == hub.files["model-00001-of-00002.safetensors"][1000:5000]
    )
    assert len(broken) == 2


async def other_commit(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"X-Repo-Commit": "f" * 40, "Location": "/x"})


async def other_size(request: web.Request) -> web.StreamResponse:
    headers = {"X-Repo-Commit": COMMIT, "X-Linked-Size": "17", "Location": "/x"}
    return web.Response(status=302, headers=headers)


async def to_a_file(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "file:///etc/passwd"})


async def in_circles(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": str(request.url)})


async def everything(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(100))


async def forbidden(request: web.Request) -> web.StreamResponse:
    return web.Response(status=403)


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (other_commit, "serves commit fff"),
        (other_size, "has 17 bytes there"),
        (to_a_file, "not HTTP"),
        (in_circles, "redirects more than"),
        (everything, "ignores Range"),
        (forbidden, "accept its conditions"),
    ],
)
async def test_a_hub_that_breaks_the_rules_is_not_asked_again(
    hub: FakeHub, reader: HubReader, trouble: Any, says: str
) -> None:
    hub.trouble = trouble
    hub.asked.clear()
    with pytest.raises(ConfigError, match=says):
        await on_thread(lambda: reader.read(SOME))
    assert len(hub.asked) <= 7


async def test_a_storm_of_429_holds_every_read_and_ends_at_the_deadline(
    hub: FakeHub, reader: HubReader
) -> None:
    async def storm(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "30"})

    hub.trouble = storm
    hub.asked.clear()
    with pytest.raises(Unreachable, match="within 1 s"):
        await on_thread(lambda: reader.read(SOME, deadline_s=1.0))
    assert len(hub.asked) == 1


async def test_closing_the_reader_ends_reads_that_wait(hub: FakeHub, tmp_path: Path) -> None:
    access = HubAccess(hub.url, TOKEN)
    model = await on_thread(lambda: open_model(MAIN, access, tmp_path))
    reader = HubReader(model, access)
    asked = asyncio.Event()

    async def silence(request: web.Request) -> web.StreamResponse | None:
        asked.set()
        await asyncio.Event().wait()
        return None

    hub.trouble = silence
    reading = asyncio.create_task(on_thread(lambda: reader.read(SOME)))
    async with asyncio.timeout(20):
        await asked.wait()
    await on_thread(reader.close)
    with pytest.raises(Unreachable, match="closed"):
        await reading
    with pytest.raises(Unreachable, match="closed"):
        reader.read(SOME)

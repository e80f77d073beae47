"""The weight cache on a real disk: journal, pins, eviction, a full disk, damage between two starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from kvasir_node.cache import CacheEntry, CacheFull, WeightCache
from kvasir_node.chunks import MAX_PAUSE_S, ChunkBoard, SourceHealth
from kvasir_node.sources import check_redirect, retry_after_s
from market.plans import ByteRange, PlanId
from relay.errors import ConfigError, KvasirError, RemoteProtocolError
from tests.support.weights import PLAN_ID, WINDOW, make_files, make_hashes, make_plan

SMALL = 64 * 1024
FILES = make_files(expert_bytes=SMALL)
PLAN = make_plan(FILES, expert_bytes=SMALL)
HASHES = make_hashes(PLAN, FILES)
CHUNKS = PLAN.window_chunks(WINDOW)
TOTAL = sum(chunk.nbytes for chunk in CHUNKS)


def data_of(index: int) -> bytes:
    chunk = CHUNKS[index]
    return FILES[chunk.file][chunk.start : chunk.end]


def fill(cache: WeightCache, number: int = 0, *, close: bool = True) -> CacheEntry:
    """Store the whole window under plan id `number`."""
    entry = cache.open(PLAN, PlanId(bytes([number]) * 32), WINDOW, HASHES)
    for index in range(len(CHUNKS)):
        assert entry.store(index, data_of(index))
    if close:
        entry.close()
    return entry


def test_what_was_stored_is_found_again(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=TOTAL)
    fill(cache)
    plan = PlanId(bytes(32))
    assert cache.whole_windows() == ((plan, WINDOW),)
    assert cache.used_bytes == TOTAL
    cache.close()
    again = WeightCache(tmp_path, cap_bytes=TOTAL)
    entry = again.open(PLAN, plan, WINDOW, HASHES)
    read: list[int] = []
    assert entry.verify(read.append) == set(range(len(CHUNKS)))
    assert sum(read) == TOTAL
    window = entry.map()
    assert window.read(CHUNKS[0]) == data_of(0)
    window.close()


def test_wrong_bytes_are_not_kept(tmp_path: Path) -> None:
    entry = WeightCache(tmp_path, cap_bytes=TOTAL).open(PLAN, PLAN_ID, WINDOW, HASHES)
    assert not entry.store(0, bytes(CHUNKS[0].nbytes))
    assert not entry.store(0, data_of(0)[:-1])
    assert entry.verify() == set()


def test_damage_on_disk_costs_only_the_damaged_chunk(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=TOTAL)
    entry = fill(cache)
    with entry.path.open("r+b") as file:
        file.seek(CHUNKS[0].nbytes + 5)
        file.write(b"\x00\x01\x02\x03")
    entry = cache.open(PLAN, PlanId(bytes(32)), WINDOW, HASHES)
    assert entry.verify() == set(range(len(CHUNKS))) - {1}
    assert entry.store(1, data_of(1))
    entry.close()
    assert cache.open(PLAN, PlanId(bytes(32)), WINDOW, HASHES).verify() == set(range(len(CHUNKS)))


@pytest.mark.parametrize("junk", [b"\x00\x00", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00" * 3])
def test_a_torn_or_odd_journal_is_mended(tmp_path: Path, junk: bytes) -> None:
    cache = WeightCache(tmp_path, cap_bytes=TOTAL)
    entry = fill(cache)
    journal = entry.path.with_suffix(".log")
    whole = journal.read_bytes()
    journal.write_bytes(whole + junk)
    entry = cache.open(PLAN, PlanId(bytes(32)), WINDOW, HASHES)
    assert entry.verify() == set(range(len(CHUNKS)))
    assert journal.read_bytes() == whole


def test_other_hashes_start_the_window_anew(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=TOTAL)
    fill(cache)
    other = (b"h" * 32, *HASHES[1:])
    entry = cache.open(PLAN, PlanId(bytes(32)), WINDOW, other)
    assert entry.verify() == set()


def test_hashes_for_another_cut_are_refused(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=TOTAL)
    with pytest.raises(KvasirError, match="hashes for"):
        cache.open(PLAN, PLAN_ID, WINDOW, HASHES[:-1])


def test_the_least_recently_used_goes_first_and_pins_stay(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=3 * TOTAL)
    entries = [fill(cache, number) for number in range(3)]
    for age, entry in enumerate(entries):
        os.utime(entry.path.with_suffix(".log"), (1000 + age, 1000 + age))
    pinned = cache.open(PLAN, PlanId(bytes(32)), WINDOW, HASHES)  # the oldest, now in use
    os.utime(entries[0].path.with_suffix(".log"), (1000, 1000))
    fill(cache, 3)
    assert [cached.plan[:2] for cached in cache.windows()] == ["00", "02", "03"]
    assert cache.used_bytes == 3 * TOTAL
    pinned.close()
    fill(cache, 4)
    assert [cached.plan[:2] for cached in cache.windows()] == ["02", "03", "04"]


def test_pinned_windows_are_never_evicted(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=2 * TOTAL)
    held = [fill(cache, number, close=False) for number in range(2)]
    with pytest.raises(CacheFull, match="in use by other windows"):
        fill(cache, 2)
    assert len(cache.windows()) == 2
    for entry in held:
        entry.close()
    fill(cache, 2)


def test_the_reserve_of_the_disk_is_left_free(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, cap_bytes=2 * TOTAL, reserve_bytes=1 << 60)
    with pytest.raises(CacheFull, match="kept in reserve"):
        fill(cache)
    assert cache.used_bytes == 0


def test_one_process_a_folder(tmp_path: Path) -> None:
    first = WeightCache(tmp_path, cap_bytes=TOTAL)
    with pytest.raises(ConfigError, match="--state-dir"):
        WeightCache(tmp_path, cap_bytes=TOTAL)
    first.close()
    WeightCache(tmp_path, cap_bytes=TOTAL).close()


FULL_DISK = """
import resource, sys
from pathlib import Path
from kvasir_node.cache import CacheFull, WeightCache
from tests.support.weights import *

files = make_files(expert_bytes=65536)
plan = make_plan(files, expert_bytes=65536)
cache = WeightCache(Path(sys.argv[1]), cap_bytes=1 << 30)
if sys.argv[2] == "late":
    entry = cache.open(plan, PLAN_ID, WINDOW, make_hashes(plan, files))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    if sys.argv[2] == "early":
        entry = cache.open(plan, PLAN_ID, WINDOW, make_hashes(plan, files))
    chunk = plan.window_chunks(WINDOW)[0]
    entry.store(0, files[chunk.file][chunk.start:chunk.end])
except CacheFull as error:
    print("CacheFull", error, len(cache.windows()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the limit on file sizes is a POSIX one")
@pytest.mark.parametrize(("when", "left"), [("early", 0), ("late", 1)])
def test_a_disk_that_refuses_more_bytes_is_reported_as_full(tmp_path: Path, when: str, left: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "cache"), when],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith("CacheFull the disk is full"), done.stderr
    assert done.stdout.endswith(f" {left}\n")


# --- the pure decisions ------------------------------------------------------------------------------


def test_a_wrong_chunk_goes_to_another_source_first() -> None:
    chunks = [ByteRange(0, 0, 10), ByteRange(0, 10, 20), ByteRange(1, 0, 10)]
    board = ChunkBoard(chunks)
    span = board.take("a", 100)
    assert span is not None
    assert (span.first, span.last, span.range) == (0, 2, ByteRange(0, 0, 20))
    board.done(0)
    board.wrong(1, "a")
    board.give_back(span)
    other = board.take("a", 100, others=["a", "b"])
    assert other is not None
    assert other.first == 2
    assert board.take("a", 100, others=["a", "b"]) is None
    again = board.take("a", 100, others=["a"])  # b is gone: a may try once more
    assert again is not None
    assert again.first == 1


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=30),
    moves=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 20), st.integers(0, 3)), max_size=60),
)
def test_every_chunk_is_taken_by_one_stream_at_a_time(
    sizes: list[tuple[int, int]], moves: list[tuple[str, int, int]]
) -> None:
    chunks, place = [], [0, 0, 0]
    for file, size in sorted(sizes):
        chunks.append(ByteRange(file, place[file], place[file] + size))
        place[file] += size
    board = ChunkBoard(chunks)
    done: set[int] = set()
    for source, limit, good in moves:
        span = board.take(source, limit, others="ab")
        if span is None:
            continue
        indices = range(span.first, span.last)
        assert done.isdisjoint(indices)
        assert span.range.nbytes == sum(chunks[i].nbytes for i in indices)
        assert span.range.nbytes <= limit or len(indices) == 1
        for index in list(indices)[:good]:
            board.done(index)
            done.add(index)
        board.give_back(span)
    assert board.done_bytes == sum(chunks[i].nbytes for i in done)
    assert board.missing == len(chunks) - len(done)
    assert board.finished == (len(done) == len(chunks))


def test_failures_in_a_row_drop_a_source_and_a_good_chunk_forgives() -> None:
    rng, health = Random(0), SourceHealth("s")
    health.failed(0.0, "reset", rng)
    health.failed(0.0, "reset", rng)  # the same moment: another stream saw the same failure
    assert 0.25 <= health.pause_s(0.0) <= 0.75
    health.failed(10.0, "reset", rng)
    health.served()
    health.failed(20.0, "reset", rng)
    health.failed(30.0, "reset", rng)
    assert health.dropped is None
    health.failed(40.0, "timed out", rng)
    assert health.dropped is not None
    assert "timed out" in health.dropped


def test_waits_follow_retry_after_and_are_bounded() -> None:
    rng, health = Random(0), SourceHealth("s")
    health.asked_to_wait(0.0, 7.0, rng)
    assert health.pause_s(0.0) == 7.0
    health.asked_to_wait(0.0, 1e9, rng)
    assert health.pause_s(0.0) == MAX_PAUSE_S
    fresh = SourceHealth("s")
    pauses = []
    for _ in range(10):
        fresh.asked_to_wait(0.0, None, rng)
        pauses.append(fresh.pause_s(0.0))
    assert pauses[0] <= 1.5
    assert pauses[-1] <= 90.0
    assert fresh.dropped is None


def test_retry_after_in_both_forms() -> None:
    assert retry_after_s(None) is None
    assert retry_after_s("120") == 120.0
    assert retry_after_s("-5") == 0.0
    assert retry_after_s("soon") is None
    assert retry_after_s("Sun, 06 Nov 1994 08:49:37 GMT", now=784111770.0) == 7.0


@pytest.mark.parametrize(
    ("origin", "target", "allowed"),
    [
        ("https://hub.example/a", "https://cdn.example/b", True),
        ("http://mirror.example/a", "https://mirror.example/a", True),
        ("http://127.0.0.1:1/a", "http://127.0.0.1:2/a", True),
        ("https://hub.example/a", "http://cdn.example/b", False),
        ("https://hub.example/a", "https://127.0.0.1/b", False),
        ("https://hub.example/a", "https://169.254.169.254/b", False),
        ("https://hub.example/a", "https://[::1]/b", False),
        ("https://hub.example/a", "https://localhost/b", False),
        ("https://hub.example/a", "file:///etc/passwd", False),
    ],
)
def test_where_a_redirect_may_lead(origin: str, target: str, allowed: bool) -> None:
    if allowed:
        check_redirect(URL(origin), URL(target))
    else:
        with pytest.raises(RemoteProtocolError):
            check_redirect(URL(origin), URL(target))

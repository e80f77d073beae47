"""The owner's limits: hours, shares, reasons to pause, and the pacing of processor and upload."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.config import NodeConfig
from kvasir_node.limits import (
    CPU_BURST_S,
    LONGEST_REST_S,
    CpuPacer,
    Hours,
    OwnerRules,
    PacedSession,
    Surroundings,
    TokenBucket,
    UploadPacer,
    parse_hours,
    parse_share,
    why_paused,
)
from relay.errors import ConfigError, Unreachable
from relay.links import JoinLink
from tests.support.sessions import session_pair


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-7", (22 * 60, 23 * 60 + 59, 0, 6 * 60 + 59), (7 * 60, 12 * 60, 21 * 60 + 59)),
        ("9-17", (9 * 60, 16 * 60 + 59), (17 * 60, 0, 8 * 60 + 59)),
        ("12:30-13:15, 20-24", (750, 794, 1200, 1439), (749, 795, 1199, 0)),
    ],
)
def test_hours(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    hours = parse_hours(text)
    assert all(hours.include(minute) for minute in inside)
    assert not any(hours.include(minute) for minute in outside)


def test_hours_are_said_as_they_are_meant() -> None:
    assert str(parse_hours("22-7, 12:05-13")) == "22:00-07:00, 12:05-13:00"


@pytest.mark.parametrize("text", ["", "22", "22-", "25-3", "8-8", "8:60-9", "24-3", "all night", "1-2-3"])
def test_bad_hours(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_hours(text)


def test_shares() -> None:
    assert [parse_share(text) for text in ("50%", "0.5", "100%", "1", "12.5 %")] == [0.5, 0.5, 1, 1, 0.125]
    for text in ("0", "0%", "101%", "1.5", "-1", "half", ""):
        with pytest.raises(ConfigError):
            parse_share(text)


def test_reasons_to_pause() -> None:
    day, night = 12 * 60, 23 * 60
    rules = OwnerRules(hours=Hours(((22 * 60, 7 * 60),)))
    assert why_paused(rules, Surroundings(night), asked=False) is None
    assert "outside the hours" in str(why_paused(rules, Surroundings(day), asked=False))
    assert "kvasir-node resume" in str(why_paused(rules, Surroundings(night), asked=True))
    assert "--on-battery" in str(why_paused(rules, Surroundings(night, battery=True), asked=False))
    assert "--on-metered" in str(why_paused(rules, Surroundings(night, metered=True), asked=False))
    lenient = OwnerRules(on_battery=True, on_metered=True)
    assert why_paused(lenient, Surroundings(day, battery=True, metered=True), asked=False) is None


@given(
    rate=st.floats(0.1, 1e6),
    burst=st.floats(0.01, 1e6),
    uses=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 100)), min_size=1, max_size=50),
)
def test_a_bucket_never_lets_more_through_than_its_rate(
    rate: float, burst: float, uses: list[tuple[float, float]]
) -> None:
    """Whoever rests as told has used at most burst + rate x time before each new use."""
    bucket = TokenBucket(rate, burst, 0.0)
    now = used = 0.0
    for units, idle in uses:
        assert used <= (burst + rate * now) * (1 + 1e-6) + 1e-6
        rest = bucket.take(units, now)
        used += units
        now += rest + idle


def test_the_processor_share_is_kept_by_resting() -> None:
    """A busy thread that rests as told uses its share of all processors, whatever one step costs."""
    now, used = [0.0], [0.0]
    pacer = CpuPacer(0.25, 2, clock=lambda: now[0], used=lambda: used[0])
    for step in itertools.cycle((0.003, 0.05, 0.2)):
        now[0] += step
        used[0] += step
        rest = pacer.rest_s()
        assert 0 <= rest <= LONGEST_REST_S
        now[0] += rest
        if now[0] > 200:
            break
    assert used[0] / now[0] == pytest.approx(0.5, rel=0.02)
    assert CPU_BURST_S < 1


def test_a_process_within_its_share_never_rests() -> None:
    now, used = [0.0], [0.0]
    pacer = CpuPacer(0.5, 2, clock=lambda: now[0], used=lambda: used[0])
    for _ in range(100):
        now[0] += 0.01
        used[0] += 0.008
        assert pacer.rest_s() == 0


async def test_uploads_of_all_sessions_share_one_rate() -> None:
    pacer = UploadPacer(400_000)
    pairs = [session_pair() for _ in range(2)]
    message = bytes(50_000)

    async def answer(device: PacedSession) -> None:
        for _ in range(4):
            await device.send((message[:10], memoryview(message)[10:]))

    started = time.monotonic()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _, device in pairs:
            group.create_task(answer(PacedSession(device, pacer)))
        for backbone, _ in pairs:
            for _ in range(4):
                assert await backbone.receive() == message
    # 400 kB, of which a quarter of a second's worth goes at once; the last one waits for what is over it.
    assert time.monotonic() - started >= (400_000 - 100_000) / 400_000 - 0.01


async def test_a_paced_session_is_a_session() -> None:
    backbone, device = session_pair()
    paced = PacedSession(device, UploadPacer(1_000_000))
    heard: list[bytes] = []
    paced.listen(heard.append)
    paced.hold()
    assert not paced.try_send(b"answer")
    await backbone.send(b"call")
    paced.read_on()
    await paced.close("draining", "good bye")
    with pytest.raises(Unreachable):
        await paced.ended()
    assert heard == [b"call"]
    assert device.closed_with == ("draining", "good bye")


def test_limits_are_said() -> None:
    from pathlib import Path

    link = JoinLink("http://127.0.0.1:1", None)
    config = NodeConfig(
        link, Path("x"), max_cpu=0.25, upload_limit=2_000_000, rules=OwnerRules(parse_hours("22-7"))
    )
    text = config.describe_limits()
    assert text == "serves from 22:00-07:00, at most 25% of the processors, at most 2.0 MB/s sent"
    assert NodeConfig(link, Path("x")).describe_limits() == ""
    for bad in ({"max_cpu": 0.0}, {"max_cpu": 1.1}, {"upload_limit": 10}, {"look_s": 0.0}, {"device": "tpu"}):
        with pytest.raises(ConfigError):
            NodeConfig(link, Path("x"), **bad)  # type: ignore[arg-type]

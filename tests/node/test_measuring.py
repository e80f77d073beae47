"""What a machine can do, measured: memory, disk, CPU and the link, and what is said of it at the start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvasir_node import measuring
from kvasir_node.measuring import (
    LARGEST_PROBE,
    Speed,
    cpu_features,
    measure_disk,
    measure_link,
    measure_machine,
    measure_memory,
)
from kvasir_node.status import Phase
from market.client import MarketClient
from relay.errors import Refused, Unreachable
from relay.identity import SigningKey
from tests.node.test_daemon import node
from tests.support.node_swarm import node_swarm
from tests.support.waiting import until


def test_this_machine_is_tried_out(tmp_path: Path) -> None:
    speed = measure_machine(tmp_path, kernel=lambda: "a kernel")
    assert 1e8 < speed.memory_read < 1e13
    assert speed.disk_write is not None
    assert speed.disk_read is not None
    assert 1e5 < speed.disk_write < 1e12
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"
    text = speed.describe()
    assert "memory reads" in text
    assert "a kernel" in text
    assert speed.describe_link() == "not measured"
    assert speed.facts()["memory_read_bytes_s"] == round(speed.memory_read)


def test_a_disk_that_cannot_be_written_is_not_measured(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "absent") == (None, None)
    speed = Speed(1e9, None, None, "AVX2", "torch")
    assert "disk writes not measured" in speed.describe()


def test_memory_is_measured_by_what_is_read() -> None:
    assert measure_memory(8 << 20) > 1e8


def test_features_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_features()
    flags = "processor : 0\nflags : fpu avx2 fma avx512f avx512_vnni\n"
    assert measuring._flags(flags) == {"fpu", "avx2", "fma", "avx512f", "avx512_vnni"}
    assert measuring._flags("Features : fp asimd asimddp") == {"fp", "asimd", "asimddp"}
    monkeypatch.setattr(measuring.sys, "platform", "darwin")
    assert cpu_features()


class SimulatedLink:
    """A link of known rates (bytes a second) and round trip (s)."""

    def __init__(self, up: float, down: float, trip: float) -> None:
        self.up, self.down, self.trip = up, down, trip
        self.largest = 0

    async def __call__(self, *, send_bytes: int, receive_bytes: int) -> float:
        self.largest = max(self.largest, send_bytes, receive_bytes)
        return self.trip + send_bytes / self.up + receive_bytes / self.down


@pytest.mark.parametrize(
    ("up", "down", "trip"), [(1.25e6, 12.5e6, 0.02), (125e6, 125e6, 0.0005), (2e4, 1e5, 0.3)]
)
async def test_the_link_is_measured_by_carrying_bytes(up: float, down: float, trip: float) -> None:
    simulated = SimulatedLink(up, down, trip)
    link = await measure_link(simulated)
    assert link is not None
    assert (link.upload, link.download, link.rtt_s) == pytest.approx((up, down, trip), rel=0.01)
    assert simulated.largest <= LARGEST_PROBE


async def test_a_link_that_fails_is_not_measured() -> None:
    async def probe(*, send_bytes: int, receive_bytes: int) -> float:
        raise Unreachable("gone")

    assert await measure_link(probe) is None


async def test_the_market_carries_padding_for_devices(tmp_path: Path) -> None:
    async with node_swarm(tmp_path) as swarm:
        market = MarketClient(
            swarm.market_site.url, http=swarm.http, root=swarm.keys.root_public, key=SigningKey.generate()
        )
        link = await measure_link(market.probe_link)
        assert link is not None
        assert link.upload > 1e5
        assert link.download > 1e5
        assert await market.probe_link(send_bytes=LARGEST_PROBE, receive_bytes=LARGEST_PROBE) > 0
        with pytest.raises(Refused, match="for a device"):
            await swarm.client.probe_link(send_bytes=0, receive_bytes=0)
        results = await asyncio.gather(
            *(market.probe_link(send_bytes=10, receive_bytes=500_000) for _ in range(40)),
            return_exceptions=True,
        )
        refused = [error for error in results if isinstance(error, Refused)]
        assert all(error.code == "overloaded" for error in refused)
        assert any(isinstance(result, float) for result in results)


async def test_a_node_says_at_its_start_what_it_can_serve_and_will_use(tmp_path: Path) -> None:
    async with node_swarm(tmp_path) as swarm:
        await swarm.publish()
        async with node(swarm, tmp_path / "node") as running:
            await running.proven(2)
            await running.reaches(Phase.SERVING)
            snapshot = running.status.snapshot()
            said = [notice["text"] for notice in snapshot["notices"]]
            assert any("memory free" in text for text in said)
            assert any("memory reads" in text for text in said)
            assert any(text.startswith("link: ") and "round trip" in text for text in said)
            assert any("up to 10.0 MB memory for experts" in text for text in said)
            assert "this machine can hold tiny: all windows as stored" in "\n".join(said)
            assert snapshot["speed"]["upload_bytes_s"] > 0
            names = ("stored", "bf16", "int8", "int4")
            assert snapshot["capacity"] == [
                "tiny: " + " or ".join(f"all windows as {name}" for name in names)
            ]
            await running.end()


async def test_a_node_that_is_too_small_says_what_it_lacks_and_fetches_nothing(tmp_path: Path) -> None:
    async with node_swarm(tmp_path) as swarm:
        await swarm.publish()
        async with node(swarm, tmp_path / "node", measure=False, budget_bytes=1000) as running:
            await running.reaches(Phase.VOLUNTEERING)
            await until(lambda: "raise --budget" in running.status.message, what="advice")
            assert "raise --budget" in running.status.snapshot()["capacity"][0]
            assert await swarm.leases() == []
            assert swarm.weights.bytes_served == 0
            await running.end()


async def test_a_window_that_does_not_fit_the_cache_is_never_claimed(tmp_path: Path) -> None:
    async with node_swarm(tmp_path) as swarm:
        await swarm.publish()
        async with node(swarm, tmp_path / "node", measure=False, cache_bytes=1000) as running:
            await until(lambda: "raise --cache-bytes" in running.status.message, what="advice")
            assert await swarm.leases() == []
            assert swarm.weights.bytes_served == 0
            assert not list((tmp_path / "node" / "cache").glob("*/*.bin"))
            await running.end()

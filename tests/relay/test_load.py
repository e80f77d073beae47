"""How busy a relay says it is, and how that is asked for."""

from __future__ import annotations

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import RemoteProtocolError, Unreachable
from relay.load import SAMPLE_S, LoadMeter, RelayLoad
from relay.measuring import look_at, looks
from tests.support.relays import running_relay


def _read(meter: LoadMeter, now: float, *, total: int = 0, connections: int = 0) -> RelayLoad:
    return meter.read(
        now, bytes_forwarded=lambda: total, connections=connections, peers=3, circuits=2, draining=False
    )


def test_the_share_is_that_of_what_is_scarcest() -> None:
    busy = [0.0]
    meter = LoadMeter(connections=100, bandwidth=1000.0, processor=lambda: busy[0])
    assert _read(meter, 0.0, connections=25).share == 0.25
    busy[0] = 0.5
    assert _read(meter, 1.0, total=9000, connections=25).share == 0.25  # too soon for a rate
    found = _read(meter, 10.0, total=6000, connections=25)
    assert found.bytes_per_s == 600.0
    assert found.share == 0.6
    busy[0] += 9.0
    assert _read(meter, 20.0, total=6000, connections=25).share == pytest.approx(0.9)
    assert _read(meter, 30.0, total=99_000, connections=25).share == 1.0


def test_counters_are_asked_only_when_a_sample_is_due() -> None:
    asked = [0]

    def total() -> int:
        asked[0] += 1
        return 0

    meter = LoadMeter(connections=10, bandwidth=0.0, processor=lambda: 0.0)
    for step in range(100):
        meter.read(
            step * SAMPLE_S / 50, bytes_forwarded=total, connections=0, peers=0, circuits=0, draining=False
        )
    assert asked[0] <= 3


@given(
    st.builds(
        RelayLoad,
        st.floats(0, 1).map(lambda share: round(share, 4)),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
        st.floats(0, 1e12).map(lambda rate: round(rate, 1)),
        st.booleans(),
    )
)
def test_a_load_survives_its_fields(load: RelayLoad) -> None:
    assert RelayLoad.from_fields(load.to_fields()) == load


@pytest.mark.parametrize(
    "fields",
    [None, [], {}, {"share": -1, "peers": 0, "circuits": 0, "bytes_per_s": 0},
     {"share": True, "peers": 0, "circuits": 0, "bytes_per_s": 0},
     {"share": 0.1, "peers": 0, "circuits": 0, "bytes_per_s": float("inf")},
     {"share": 0.1, "peers": 0, "circuits": 0, "bytes_per_s": 0, "draining": 1}],
)  # fmt: skip
def test_what_is_no_load_is_refused(fields: object) -> None:
    with pytest.raises(RemoteProtocolError):
        RelayLoad.from_fields(fields)


async def test_a_relay_is_looked_at_over_http() -> None:
    async with running_relay() as rig, aiohttp.ClientSession() as http:
        look = await look_at(rig.url, http=http)
        assert 0 < look.rtt_s < 3
        assert look.load.peers == 0
        assert not look.load.draining
        with pytest.raises(Unreachable):
            await look_at("http://127.0.0.1:1", http=http, timeout=1.0)
        found = await looks({b"a": rig.url, b"b": "http://127.0.0.1:1"}, http=http, timeout=1.0)
        assert found[b"a"] is not None
        assert found[b"b"] is None

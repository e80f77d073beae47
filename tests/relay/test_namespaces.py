"""Real routers, real NAT: hosts in network namespaces talk through a relay, directly, and move between."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from tests.support.netns import Lab, Process, missing
from tests.support.waiting import until

WHY_NOT = missing()
pytestmark = [
    pytest.mark.any_loop,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

RELAY = "http://203.0.113.1:8421"


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    with Lab() as found:
        found.host("relay", "203.0.113.1")
        yield found


async def _relay(lab: Lab, seed: str) -> Process:
    relay = lab.start("relay", "relay", seed)
    await until(lambda: bool(relay.of("listening")), timeout=20.0)
    return relay


def _calls(backbone: Process, path: str) -> int:
    return sum(call["path"] == path for call in backbone.of("call"))


def _first_after(backbone: Process, path: str) -> float:
    """Seconds from the backbone's start to its first answered call on `path`."""
    call = next(call for call in backbone.of("call") if call["path"] == path)
    return float(call["at"]) - float(backbone.of("started")[0]["at"])


async def test_two_hosts_behind_nat_talk_through_a_relay_within_two_seconds(lab: Lab) -> None:
    """Both homes even use the same addresses; nothing but the relay is reachable from either."""
    seed = secrets.token_hex(8)
    for side in ("a", "b"):
        lab.router(f"home{side}", f"203.0.113.{10 + ord(side)}")
        lab.behind(f"home{side}", f"host{side}", "192.168.1.2")
    relay = await _relay(lab, seed)
    device = lab.start("hosta", "device", seed, RELAY)
    await until(lambda: bool(device.of("announced")), timeout=20.0)
    backbone = lab.start("hostb", "backbone", seed, RELAY, "http://192.168.1.2:8422")
    await until(lambda: _calls(backbone, "relay") >= 5, timeout=20.0)
    assert _first_after(backbone, "relay") < 2.0
    assert _calls(backbone, "direct") == 0
    await until(lambda: relay.of("carried")[-1]["bytes"] > 5 * 6_000, timeout=5.0)


async def test_hosts_of_one_lan_find_each_other_and_leave_the_relay_alone(lab: Lab) -> None:
    """No address is configured: the backbone learns it by multicast DNS."""
    seed = secrets.token_hex(8)
    lab.router("home", "203.0.113.10")
    lab.behind("home", "hosta", "192.168.1.2")
    lab.behind("home", "hostb", "192.168.1.3")
    await _relay(lab, seed)
    device = lab.start("hosta", "device", seed, RELAY)
    await until(lambda: bool(device.of("announced")), timeout=20.0)
    backbone = lab.start("hostb", "backbone", seed, RELAY)
    await until(lambda: _calls(backbone, "direct") >= 5, timeout=20.0)
    assert _first_after(backbone, "direct") < 2.0


async def test_a_call_in_flight_survives_the_cut_of_the_direct_link(lab: Lab) -> None:
    """Both sides lose each other without a word; the relay stays reachable. Calls go on within a second."""
    seed = secrets.token_hex(8)
    lab.router("home", "203.0.113.10")
    lab.behind("home", "hosta", "192.168.1.2")
    lab.behind("home", "hostb", "192.168.1.3")
    relay = await _relay(lab, seed)
    lab.start("hosta", "device", seed, RELAY)
    await until(lambda: relay.of("carried")[-1:] and relay.of("carried")[-1]["devices"] == 1, timeout=20.0)
    backbone = lab.start("hostb", "backbone", seed, RELAY, "http://192.168.1.2:8422")
    await until(lambda: _calls(backbone, "direct") >= 10, timeout=20.0)
    lab.part(("hosta", "192.168.1.2"), ("hostb", "192.168.1.3"))
    await until(lambda: _calls(backbone, "relay") >= 5, timeout=20.0)
    (moved,) = [call for call in backbone.of("call") if call["tries"] > 1]
    assert moved["path"] == "relay"
    assert moved["seconds"] < 1.0
    numbers = [call["number"] for call in backbone.of("call")]
    assert numbers == list(range(1, len(numbers) + 1))  # each answered, and counted, once


async def test_a_host_whose_address_changes_is_back_by_itself(lab: Lab) -> None:
    seed = secrets.token_hex(8)
    for side in ("a", "b"):
        lab.router(f"home{side}", f"203.0.113.{10 + ord(side)}")
        lab.behind(f"home{side}", f"host{side}", "192.168.1.2")
    await _relay(lab, seed)
    lab.start("hosta", "device", seed, RELAY)
    backbone = lab.start("hostb", "backbone", seed, RELAY)
    await until(lambda: _calls(backbone, "relay") >= 5, timeout=20.0)
    await asyncio.to_thread(lab.address, "hosta", "192.168.1.2", "192.168.1.77")
    before = len(backbone.of("call"))
    await until(lambda: len(backbone.of("call")) >= before + 10, timeout=20.0)


async def test_a_link_that_is_lost_and_comes_back(lab: Lab) -> None:
    seed = secrets.token_hex(8)
    for side in ("a", "b"):
        lab.router(f"home{side}", f"203.0.113.{10 + ord(side)}")
        lab.behind(f"home{side}", f"host{side}", "192.168.1.2")
    relay = await _relay(lab, seed)
    lab.start("hosta", "device", seed, RELAY)
    backbone = lab.start("hostb", "backbone", seed, RELAY)
    await until(lambda: _calls(backbone, "relay") >= 5, timeout=20.0)
    await asyncio.to_thread(lab.unplug, "hosta")
    await until(lambda: relay.of("carried")[-1]["devices"] == 0, timeout=10.0)  # half-open, and noticed
    await asyncio.to_thread(lab.plug_in, "hosta")
    before = len(backbone.of("call"))
    await until(lambda: len(backbone.of("call")) >= before + 10, timeout=20.0)

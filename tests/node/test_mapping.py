"""A port asked of a router by UPnP: found, opened, renewed, given back; and what a router may do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from kvasir_node import mapping
from kvasir_node.mapping import LEASE_S, PortMapper, find_router
from relay.errors import Unreachable
from tests.support.gateway import Gateway, running_gateway
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "SEARCH_S", 1)


@asynccontextmanager
async def mapping_port(gateway: Gateway, port: int = 9000) -> AsyncIterator[PortMapper]:
    mapper = PortMapper(port=port, rng=Random(1), target=gateway.search)
    running = asyncio.create_task(mapper.run())
    try:
        yield mapper
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_port_is_opened_and_given_back() -> None:
    async with running_gateway(Gateway()) as gateway:
        async with mapping_port(gateway) as mapper:
            await until(lambda: mapper.url is not None, timeout=30)
            assert mapper.url == "http://8.8.8.8:9000"
            assert gateway.mapped == {9000: ("127.0.0.1", 9000, LEASE_S)}
        assert gateway.mapped == {}
        assert mapper.url is None


async def test_a_mapping_is_renewed_and_follows_the_routers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "RENEW_S", 0.1)
    async with running_gateway(Gateway()) as gateway, mapping_port(gateway) as mapper:
        await until(lambda: gateway.calls.count("AddPortMapping") >= 3, timeout=30)
        gateway.external = "9.9.9.9"
        await until(lambda: mapper.url == "http://9.9.9.9:9000", timeout=30)
        gateway.mapped.clear()  # the router started again
        await until(lambda: 9000 in gateway.mapped, timeout=30)


async def test_another_machines_port_is_left_alone() -> None:
    async with running_gateway(Gateway(taken=frozenset({9000}))) as gateway:
        async with mapping_port(gateway) as mapper:
            await until(lambda: mapper.url is not None, timeout=30)
            (external,) = gateway.mapped
            assert external != 9000
            assert mapper.url == f"http://8.8.8.8:{external}"
            assert gateway.mapped[external][1] == 9000
        assert gateway.mapped == {}


async def test_a_router_without_leases_gets_its_port_back_at_the_end() -> None:
    async with running_gateway(Gateway(permanent_only=True)) as gateway:
        async with mapping_port(gateway) as mapper:
            await until(lambda: mapper.url is not None, timeout=30)
            assert gateway.mapped[9000][2] == 0
        assert gateway.mapped == {}


@pytest.mark.parametrize("external", ["192.168.1.2", "100.64.3.4", ""])
async def test_an_address_that_nobody_outside_can_dial_is_not_offered(external: str) -> None:
    async with running_gateway(Gateway(external=external)) as gateway, mapping_port(gateway) as mapper:
        await until(lambda: bool(gateway.calls), timeout=30)
        await until(lambda: gateway.calls[-1] == "GetExternalIPAddress", timeout=30)
        assert mapper.url is None
        assert gateway.mapped == {}


async def test_routers_are_asked_only_for_themselves_and_within_bounds() -> None:
    elsewhere = Gateway(location="http://169.254.169.254/device.xml")
    async with running_gateway(elsewhere):
        with pytest.raises(Unreachable, match="no router answers"):
            await find_router(elsewhere.search)
    async with running_gateway(Gateway(padding=1 << 20)) as endless:
        with pytest.raises(Unreachable, match=r"without end|cannot be asked"):
            await find_router(endless.search)


async def test_no_router_is_said_so() -> None:
    with pytest.raises(Unreachable, match="forward the port by hand"):
        await find_router(("127.0.0.1", 9))

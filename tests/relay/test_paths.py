"""Which way to a device is taken, with a real relay and real listeners in this process."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from relay.channel import Channel
from relay.direct import DirectListener
from relay.errors import ConfigError, KvasirError
from relay.paths import PathConfig, Paths
from relay.secure import SecureSession
from tests.support.peers import echoing
from tests.support.relays import Device, RelayRig, running_relay
from tests.support.waiting import until

QUICK = PathConfig(head_start_s=0.2, direct_timeout_s=0.5, relay_timeout_s=1.0)


@asynccontextmanager
async def listening(rig: RelayRig, device: Device) -> AsyncIterator[str]:
    """A direct listener of `device`, which echoes; its URL."""
    app = web.Application()
    DirectListener(echoing(rig, device)).attach(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def ways(
    device: Device, addresses: list[str], *, at_relay: bool = True
) -> AsyncIterator[tuple[RelayRig, Paths, list[str]]]:
    """A relay with `device` at it, and the paths of the swarm's backbone to the device."""
    generation = itertools.count(1)
    async with running_relay() as rig:
        if at_relay:
            await rig.start(rig.client(device.key, "device", serve=echoing(rig, device)))
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)

        async def handshake(channel: Channel) -> SecureSession:
            return await rig.swarm.connect(channel, device, generation=next(generation), timeout=1.0)

        yield (
            rig,
            Paths(
                device.key.public,
                addresses=lambda: addresses,
                relays=lambda: (backbone,),
                handshake=handshake,
                http=rig.http,
                config=QUICK,
            ),
            addresses,
        )


async def _works(session: SecureSession) -> None:
    await session.send(b"hello")
    assert await session.receive() == b"hello"


async def test_the_direct_way_is_taken_where_there_is_one() -> None:
    device = Device()
    async with ways(device, []) as (rig, paths, addresses), listening(rig, device) as url:
        addresses += ["http://127.0.0.1:1", url]  # the first is nobody's
        session = await paths.connect()
        assert session.path == "direct"
        await _works(session)
        assert rig.relay.meters.circuits_opened == 0
        await session.close()


async def test_without_addresses_the_relay_is_taken_at_once() -> None:
    async with ways(Device(), []) as (_, paths, _):
        started = time.monotonic()
        session = await paths.connect()
        assert session.path == "relay"
        assert time.monotonic() - started < 5.0
        await _works(session)


async def test_a_stranger_at_the_devices_address_is_no_way() -> None:
    device, stranger = Device(), Device()
    async with ways(device, []) as (rig, paths, addresses), listening(rig, stranger) as url:
        addresses.append(url)
        session = await paths.connect()
        assert session.path == "relay"
        await _works(session)


async def test_an_address_that_never_answers_costs_a_head_start_alone() -> None:
    async with ways(Device(), []) as (_, paths, addresses):
        with socket.create_server(("127.0.0.1", 0)) as silent:  # its connections are never accepted
            addresses.append(f"http://127.0.0.1:{silent.getsockname()[1]}")
            session = await paths.connect()
            assert session.path == "relay"
            await _works(session)


async def test_a_relayed_session_moves_when_a_direct_way_appears() -> None:
    """The call in flight is answered on one of the two; the device ends the older session by itself."""
    device = Device()
    async with ways(device, []) as (rig, paths, addresses):
        first = await paths.connect()
        await _works(first)
        assert await paths.improve(first) is None
        async with listening(rig, device) as url:
            addresses.append(url)
            second = await paths.improve(first)
            assert second is not None
            assert second.path == "direct"
            await _works(second)
            await _works(first)  # until its owner lets it go
            await first.close()
            assert await paths.improve(second) is None
            await second.close()


async def test_a_cut_direct_link_is_followed_by_the_relay_without_a_head_start() -> None:
    device = Device()
    async with ways(device, []) as (rig, paths, addresses), listening(rig, device) as url:
        addresses.append(url)
        direct = await paths.connect()
        assert direct.path == "direct"
        direct.channel._socket.abort()  # type: ignore[attr-defined]
        await until(lambda: direct.closed)
        assert direct.outcome == "peer_gone"
        session = await paths.connect()
        assert session.path == "relay"
        await _works(session)


async def test_no_way_at_all_says_why() -> None:
    async with ways(Device(), ["http://127.0.0.1:1"], at_relay=False) as (_, paths, _):
        with pytest.raises(KvasirError, match=r"cannot reach|not connected"):
            await paths.connect()


def test_times_are_checked() -> None:
    with pytest.raises(ConfigError):
        PathConfig(direct_timeout_s=0.0)

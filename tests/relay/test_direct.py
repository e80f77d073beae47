from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from relay.channel import Channel
from relay.circuit import Rules
from relay.direct import DirectListener, connect_direct, session_endpoint
from relay.errors import ConfigError, Unreachable
from relay.frames import MAX_PACKET
from relay.secure import SecureSession
from tests.support.relays import Device, Swarm

SWARM = Swarm()


@asynccontextmanager
async def listening(
    on_channel: Callable[[Channel], Awaitable[None]], rules: Rules | None = None
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """A listener on a free port: its address, and a client session."""
    app = web.Application()
    DirectListener(on_channel, rules=rules).attach(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", http
        finally:
            await runner.cleanup()


def echoing(device: Device) -> Callable[[Channel], Awaitable[None]]:
    async def serve(channel: Channel) -> None:
        session = await SWARM.accept(channel, device)
        while True:
            await session.send(await session.receive())

    return serve


async def _session(url: str, http: aiohttp.ClientSession, device: Device) -> SecureSession:
    channel = await connect_direct(url, device.key.public, http=http, timeout=5.0)
    return await SWARM.connect(channel, device)


async def test_the_same_session_without_a_relay() -> None:
    device = Device()
    async with listening(echoing(device)) as (url, http):
        session = await _session(url, http, device)
        assert session.path == "direct"
        for size in (1, 65_518, 1_000_000):
            message = secrets.token_bytes(size)
            async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
                tasks.create_task(session.send(message))
                assert await session.receive() == message
        await session.close()
        with pytest.raises(Unreachable):
            await session.receive()


async def test_a_stranger_gets_no_session() -> None:
    device, wrong = Device(), Device()
    async with listening(echoing(device)) as (url, http):
        channel = await connect_direct(url, wrong.key.public, http=http, timeout=5.0)
        with pytest.raises(Exception, match=r"decrypt|grant|refused|closed"):
            await SWARM.connect(channel, wrong)


async def test_a_link_that_ends_is_noticed_on_both_sides() -> None:
    ended = asyncio.Event()

    async def serve(channel: Channel) -> None:
        assert await channel.receive() == b"one"
        with pytest.raises(Unreachable, match="closed"):
            await channel.receive()
        with pytest.raises(Unreachable):
            await channel.send(b"too late")
        ended.set()

    async with listening(serve) as (url, http):
        channel = await connect_direct(url, Device().key.public, http=http, timeout=5.0)
        await channel.send(b"one")
        await channel.close()
        await channel.close()
        await asyncio.wait_for(ended.wait(), 5.0)
        with pytest.raises(Unreachable):
            await channel.send(b"two")
        with pytest.raises(Unreachable):
            await channel.receive()


async def test_only_packets_pass() -> None:
    reasons: list[str] = []

    async def serve(channel: Channel) -> None:
        with pytest.raises(Unreachable) as caught:
            await channel.receive()
        reasons.append(str(caught.value))

    async with listening(serve) as (url, http):
        for break_it in ("text", "empty", "long"):
            async with http.ws_connect(session_endpoint(url)) as socket:
                if break_it == "text":
                    await socket.send_str("hello")
                else:
                    await socket.send_bytes(b"" if break_it == "empty" else bytes(MAX_PACKET + 1))
                await socket.receive(timeout=5.0)
    assert len(reasons) == 3


async def test_a_crashing_handler_ends_its_link_alone_and_links_are_bounded() -> None:
    async def serve(channel: Channel) -> None:
        if await channel.receive() == b"crash":
            raise ZeroDivisionError
        await channel.send(b"fine")
        await channel.receive()

    async with listening(serve, Rules(connections=2, address_connections=2)) as (url, http):
        key = Device().key.public
        first = await connect_direct(url, key, http=http, timeout=5.0)
        second = await connect_direct(url, key, http=http, timeout=5.0)
        with pytest.raises(Unreachable, match="429"):
            await connect_direct(url, key, http=http, timeout=5.0)
        await first.send(b"crash")
        with pytest.raises(Unreachable):
            await first.receive()
        await second.send(b"hello")
        assert await second.receive() == b"fine"
        for channel in (first, second):
            await channel.close()


async def test_nobody_there() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(Unreachable, match="cannot reach"):
            await connect_direct("http://127.0.0.1:1", Device().key.public, http=http, timeout=5.0)
    with pytest.raises(ConfigError):
        session_endpoint("ftp://host")

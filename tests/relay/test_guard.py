from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from relay.addresses import parse_networks
from relay.circuit import Rules
from relay.guard import HEAD_BYTES, ListenerGuard, raise_descriptor_limit
from tests.support.waiting import until

HEAD = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def guarded(guard: ListenerGuard) -> AsyncIterator[int]:
    """A server behind `guard`; its port."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello " + (await request.text()))

    app = web.Application()
    app.router.add_route("*", "/hello", hello)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    server = await guard.listen(runner, host="127.0.0.1")
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()


async def test_requests_pass_through_whole() -> None:
    guard = ListenerGuard()
    async with guarded(guard) as port, aiohttp.ClientSession() as http:
        body = "x" * 200_000
        for _ in range(3):
            async with http.post(f"http://127.0.0.1:{port}/hello", data=body) as response:
                assert await response.text() == "hello " + body
        assert guard.connections == 1
    await until(lambda: guard.connections == 0)


async def test_the_head_may_come_a_byte_at_a_time_if_it_comes() -> None:
    async with guarded(ListenerGuard()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in HEAD:
            writer.write(bytes((byte,)))
            await writer.drain()
        assert b"hello" in await asyncio.wait_for(reader.readuntil(b"hello"), 5.0)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("said", [b"", HEAD[:-2]])
async def test_who_dawdles_before_the_first_request_is_cut_off(said: bytes) -> None:
    guard = ListenerGuard(head_s=0.1)
    async with guarded(guard) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 5.0)
        assert guard.refused == {"expired": 1}
        assert guard.connections == 0
        writer.close()


async def test_an_endless_head_is_cut_off() -> None:
    guard = ListenerGuard()
    async with guarded(guard) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /hello HTTP/1.1\r\n" + b"X: y\r\n" * (HEAD_BYTES // 4))
        try:
            async with asyncio.timeout(5.0):
                while await reader.read(65_536):
                    pass
        except ConnectionError:
            pass
        await until(lambda: guard.connections == 0)
        writer.close()


async def test_ten_thousand_connections_of_one_address_cost_it_a_few() -> None:
    """10,000 tries; the rest of the world is still served, and so is that address once it lets go."""
    asyncio.get_running_loop().set_debug(False)  # 10,000 stack traces are not what is tested
    guard = ListenerGuard(Rules(address_connections=32), head_s=120.0)
    async with guarded(guard) as port:
        held = ExitStack()
        for _ in range(32):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            held.callback(writer.close)
        refusals = await asyncio.to_thread(_flood, port, 10_000)
        assert refusals > 9_900
        assert guard.refused == {"quota": 10_000}
        assert guard.connections == 32
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get(f"http://127.0.0.1:{port}/hello") as response,
        ):
            assert response.status == 200
        held.close()
        await until(lambda: guard.connections == 0)


def _flood(port: int, count: int) -> int:
    """Connect so often, one after the other; how many heard why not (a close may overtake the answer)."""
    heard = 0
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
            try:
                heard += connection.recv(4096).startswith(b"HTTP/1.1 429 ")
            except ConnectionError:
                continue
    return heard


async def test_a_trusted_proxy_is_not_counted() -> None:
    guard = ListenerGuard(Rules(address_connections=1), trusted=parse_networks(["127.0.0.1"]))
    async with guarded(guard) as port:
        held = ExitStack()
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            held.callback(writer.close)
            writer.write(HEAD)
            assert await asyncio.wait_for(reader.readuntil(b"hello"), 5.0)
        assert guard.refused == {}
        held.close()


@pytest.mark.skipif(sys.platform == "win32", reason="optional: no such limit there")
def test_the_soft_limit_on_descriptors_is_raised_within_the_hard_one() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        raise_descriptor_limit(250)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300  # never lowered
        raise_descriptor_limit(400)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

"""The processes of the relay suite: a relay, a bare byte-copy proxy, and the two ends.

    python -m benches.relay_roles ROLE SEED LOOP [ARGUMENTS]

Servers print their port as JSON, and serve until their input closes. Ends print what they measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import aiohttp

from relay.channel import Channel
from relay.config import RelayConfig, TransportConfig
from relay.errors import KvasirError
from relay.frames import MAX_FRAME, FrameType, decode, encode
from relay.loop import run
from relay.messages import Auth, Hello
from relay.secure import SecureSession
from relay.tickets import auth_message
from relay.transport import RelayClient
from relay.wire import WebSocket, dial

from .relay_swarm import Device, Swarm, quiet, serve_relay, until_stdin_closes

SMALL, LARGE, BURST = 6 * 1024, 48 * 1024, 64
ECHO, SINK, LAST = b"E", b"S", b"L"  # the first byte of a message: answer it, drop it, drop it and say so
WIDE = RelayConfig(address_connections=20_000, drain_s=0.5)


def say(value: object) -> None:
    """One line of JSON to the parent."""
    print(json.dumps(value), flush=True)


# --- servers ---


async def relay(swarm: Swarm, port: str = "0") -> None:
    """A relay; at the end it drains."""
    runner, _, found = await serve_relay(swarm, int(port), WIDE)
    say(found)
    await until_stdin_closes()
    await runner.cleanup()


class _Half(asyncio.Protocol):
    """One side of a proxied connection: what it reads the other writes."""

    def __init__(self) -> None:
        self.other: _Half
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.transport.close()


class _Front(asyncio.Protocol):
    """The accepted side until the other side is connected: it keeps what comes early."""

    def __init__(self, target: int, tasks: set[asyncio.Task[None]]) -> None:
        self._target, self._tasks = target, tasks
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(self._connect(transport)))

    def data_received(self, data: bytes) -> None:
        self._early += data

    async def _connect(self, transport: asyncio.BaseTransport) -> None:
        front, back = _Half(), _Half()
        front.other, back.other = back, front
        front.connection_made(transport)
        await asyncio.get_running_loop().create_connection(lambda: back, "127.0.0.1", self._target)
        back.transport.write(bytes(self._early))
        front.transport.set_protocol(front)


async def proxy(swarm: Swarm, target: str) -> None:
    """A bare proxy: it copies bytes to and from the port `target`."""
    tasks: set[asyncio.Task[None]] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: _Front(int(target), tasks), "127.0.0.1", 0
    )
    say(server.sockets[0].getsockname()[1])
    await until_stdin_closes()
    server.close()


async def plain(swarm: Swarm) -> None:
    """The far end behind the proxy: messages behind a u32 length, over asyncio's streams."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = await read_plain(reader)
                if message[:1] == ECHO:
                    write_plain(writer, message)
                elif message[:1] == LAST:
                    write_plain(writer, b"done")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 18)
    say(server.sockets[0].getsockname()[1])
    await until_stdin_closes()
    server.close()


async def read_plain(reader: asyncio.StreamReader) -> bytes:
    """The next message of a plain stream."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


def write_plain(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Write one message to a plain stream."""
    writer.writelines((len(message).to_bytes(4, "big"), message))


async def device(swarm: Swarm, url: str, first: str = "0", count: str = "1") -> None:
    """The far ends behind the relay: devices `first` to `first + count - 1`."""
    clients = []
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(int(first), int(first) + int(count)):
            found = swarm.device(number)
            client = swarm.client(url, found.key, "device", http, on_circuit=_answering(swarm, found))
            clients.append((client, tasks.create_task(client.run())))
        for client, _ in clients:
            await client.wait_connected(30.0)
        say(len(clients))
        await until_stdin_closes()
        for _, task in clients:
            task.cancel()


def _answering(swarm: Swarm, device: Device) -> Callable[[Channel], Awaitable[None]]:
    async def serve(channel: Channel) -> None:
        session = await swarm.accept(channel, device)
        while True:
            message = await session.receive()
            if message[:1] == ECHO:
                await session.send(message)
            elif message[:1] == LAST:
                await session.send(b"done")

    return serve


# --- speed ---


class _Plain:
    """Messages through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: bytes) -> None:
        write_plain(self._writer, message)
        await self._writer.drain()

    async def receive(self) -> bytes:
        return await read_plain(self._reader)


async def _round_trip(link: _Plain | SecureSession, times: int) -> float:
    """Seconds a round trip of a small message: the median of `times`, so that a busy machine shows less."""
    message, taken = ECHO + os.urandom(SMALL - 1), []
    for _ in range(times):
        started = time.perf_counter()
        await link.send(message)
        await link.receive()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


async def _goodput(link: _Plain | SecureSession, times: int) -> float:
    """Bytes a second of large messages one way, the median of `times` bursts of 3 MiB."""
    body = os.urandom(LARGE - 1)
    sink, last, rates = SINK + body, LAST + body, []
    for _ in range(times):
        started = time.perf_counter()
        for _ in range(BURST - 1):
            await link.send(sink)
        await link.send(last)
        await link.receive()
        rates.append(BURST * LARGE / (time.perf_counter() - started))
    return statistics.median(rates)


async def near(swarm: Swarm, url: str, port: str, pairs: str) -> None:
    """The near end of both: interleaved pairs of round trips and of goodput."""
    streams = await asyncio.open_connection("127.0.0.1", int(port), limit=1 << 18)
    bare = _Plain(*streams)
    found: dict[str, list[float]] = {
        name: [] for name in ("rtt_proxy", "rtt_relay", "goodput_proxy", "goodput_relay")
    }
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        client = swarm.client(url, swarm.backbone.key, "backbone", http)
        running = tasks.create_task(client.run())
        await client.wait_connected(10.0)
        target = swarm.device(0)
        session = await swarm.connect(await client.open(target.key.public, timeout=10.0), target)
        for number in range(-1, int(pairs)):  # the first round warms up
            links: list[tuple[str, _Plain | SecureSession]] = [("proxy", bare), ("relay", session)]
            for name, link in links if number % 2 else links[::-1]:
                rtt, goodput = await _round_trip(link, 200), await _goodput(link, 7)
                if number >= 0:
                    found[f"rtt_{name}"].append(rtt)
                    found[f"goodput_{name}"].append(goodput)
        running.cancel()
    say(found)


# --- many idle circuits ---


async def idle(swarm: Swarm, url: str, count: str) -> None:
    """Bring up `count` devices and a circuit to each, and hold them until the input closes."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        client = swarm.client(url, swarm.backbone.key, "backbone", http)
        running = tasks.create_task(client.run())
        await client.wait_connected(10.0)
        say("connected")
        sockets = []
        for number in range(int(count)):
            found = swarm.device(number)
            sockets.append(await _bare_device(swarm, client.url, found, http))
            await client.open(found.key.public, timeout=10.0)
        say(client.circuits)
        await until_stdin_closes()
        for socket in sockets:
            socket.close()
        running.cancel()


async def _bare_device(swarm: Swarm, url: str, device: Device, http: aiohttp.ClientSession) -> WebSocket:
    """A device that proves itself and answers pings, and does no more."""
    socket = await dial(http, url, max_bytes=MAX_FRAME)
    hello = Hello.from_bytes(decode(await socket.receive())[2])
    ticket = swarm.ticket(device.key.public, "device")
    signature = device.key.sign(auth_message(hello.nonce, swarm.relay.key.public, ticket))
    socket.write(encode(FrameType.AUTH, 0, Auth(ticket, 1, signature).to_bytes()))
    if decode(await socket.receive())[0] is not FrameType.WELCOME:
        raise SystemExit("the relay did not welcome a device")

    def answer(frame: bytearray | memoryview) -> None:
        kind, _, payload = decode(frame)
        if kind is FrameType.PING:
            socket.write(encode(FrameType.PONG, 0, payload))

    socket.attach(answer)
    return socket


# --- a frozen receiver ---


async def frozen(swarm: Swarm, url: str, count: str, pairs: str, seconds: str) -> None:
    """99th percentiles of round trips to `count` devices, without and with one more that reads nothing."""
    p99: dict[str, list[float]] = {"without": [], "with": []}
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        config = TransportConfig(send_timeout_s=0.05)
        client = swarm.client(url, swarm.backbone.key, "backbone", http, config=config)
        running = tasks.create_task(client.run())
        await client.wait_connected(10.0)
        sessions = []
        for number in range(int(count)):
            found = swarm.device(number)
            sessions.append(await swarm.connect(await client.open(found.key.public, timeout=10.0), found))
        for number in range(-1, int(pairs)):
            for name in ("without", "with") if number % 2 else ("with", "without"):
                stuck = await _freeze(swarm, client, http) if name == "with" else None
                found_p99 = await _p99(sessions, float(seconds))
                if number >= 0:
                    p99[name].append(found_p99)
                if stuck is not None:
                    stuck.abort()
        running.cancel()
    say(p99)


async def _freeze(swarm: Swarm, client: RelayClient, http: aiohttp.ClientSession) -> WebSocket:
    """A device that reads nothing any more, with a whole window on its way to it."""
    device = swarm.device(1_000_000)
    socket = await _bare_device(swarm, client.url, device, http)
    channel = await client.open(device.key.public, timeout=10.0)
    socket.hold()
    try:
        for _ in range(64):
            await channel.send(bytes(60_000))
    except KvasirError:
        pass  # the window is full, as it should be
    return socket


async def _p99(sessions: list[SecureSession], seconds: float) -> float:
    """The 99th percentile of round trips on all sessions at once, in seconds."""
    message, samples = ECHO + os.urandom(SMALL - 1), []
    end = time.perf_counter() + seconds

    async def calls(session: SecureSession) -> None:
        while (started := time.perf_counter()) < end:
            await session.send(message)
            await session.receive()
            samples.append(time.perf_counter() - started)

    await asyncio.gather(*map(calls, sessions))
    return sorted(samples)[int(len(samples) * 0.99)]


# --- coming back ---


async def crowd(swarm: Swarm, url: str, count: str) -> None:
    """`count` devices that stay connected; at the end of the input, when each dialled and was back."""
    dials: list[tuple[int, float]] = []
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        clients = []
        for number in range(int(count)):
            key = swarm.device(number).key

            def dialled(number: int = number) -> None:
                dials.append((number, time.time()))

            clients.append(swarm.client(url, key, "device", http, on_dial=dialled))
        running = [tasks.create_task(client.run()) for client in clients]
        for client in clients:
            await client.wait_connected(60.0)
        dials.clear()
        say("connected")
        gone = asyncio.ensure_future(until_stdin_closes())
        back = await _all_back(clients)
        say({"dials": dials, "back": back})
        await gone
        for task in running:
            task.cancel()


async def _all_back(clients: list[RelayClient]) -> float:
    """When all clients were connected again after the relay went, in Unix seconds."""
    tick = asyncio.Event()

    async def pause() -> None:
        try:
            await asyncio.wait_for(tick.wait(), 0.02)
        except TimeoutError:
            return

    while all(client.connected for client in clients):
        await pause()
    for client in clients:
        await client.wait_connected(120.0)
    return time.time()


# --- a long time ---


async def steady(swarm: Swarm, url: str, port: str, seconds: str) -> None:
    """Round trips through one circuit over those through the proxy, a figure every second; then null."""
    bare = _Plain(*await asyncio.open_connection("127.0.0.1", int(port), limit=1 << 18))
    end = time.monotonic() + float(seconds)
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        client = swarm.client(url, swarm.backbone.key, "backbone", http)
        running = tasks.create_task(client.run())
        await client.wait_connected(30.0)
        target = swarm.device(0)
        session = await swarm.connect(await client.open(target.key.public, timeout=10.0), target)
        while time.monotonic() < end:
            ratios = []
            for _ in range(8):
                proxied, relayed = await _round_trip(bare, 10), await _round_trip(session, 10)
                ratios.append(relayed / proxied)
            say(statistics.median(ratios))
            await asyncio.sleep(min(1.0, float(seconds) / 60))
        running.cancel()
    say(None)


async def churn(swarm: Swarm, url: str, seconds: str) -> None:
    """Devices that come and go in every way there is, one after the other; how many, at the end."""
    end, rng = time.monotonic() + float(seconds), random.Random(0)
    counts: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        held: deque[WebSocket] = deque()
        while time.monotonic() < end:
            counts["devices"] += 1
            socket = await _bare_device(
                swarm, url + "/relay/v1", swarm.device(1 + counts["devices"] % 500), http
            )
            way = rng.choice(("stay", "leave", "cut", "break", "freeze"))
            counts[way] += 1
            if way == "leave":
                socket.close()
            elif way == "cut":
                socket.abort()
            elif way == "break":
                socket.write(rng.randbytes(40))
            else:
                held.append(socket)
                if way == "freeze":
                    socket.hold()
            if len(held) > 100:
                held.popleft().abort()
            if counts["devices"] % 10 == 0:
                await _stranger(url, http)
            await asyncio.sleep(0.01)
    say({"churned_" + way: number for way, number in sorted(counts.items())})


async def _stranger(url: str, http: aiohttp.ClientSession) -> None:
    """Somebody without a ticket."""
    socket = await dial(http, url + "/relay/v1", max_bytes=MAX_FRAME)
    socket.write(encode(FrameType.AUTH, 0, b"let me in"))
    try:
        while True:
            await socket.receive()
    except KvasirError:
        socket.close()


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    role.__name__: role for role in (relay, proxy, plain, device, near, idle, frozen, crowd, steady, churn)
}


def main(arguments: list[str]) -> None:
    """Run one role."""
    quiet()
    role, seed, loop, *rest = arguments
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536) if hard > 0 else 65_536, hard))

    async def play() -> None:
        await ROLES[role](Swarm(seed), *rest)

    run(play(), use_uvloop=loop == "uvloop")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The peers that run inside network namespaces: a relay, a device, a backbone. Each prints JSON lines.

python -m tests.support.netns_peers relay SEED
python -m tests.support.netns_peers device SEED RELAY_URL
python -m tests.support.netns_peers backbone SEED RELAY_URL [DIRECT_URL ...]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from contextlib import AsyncExitStack

import aiohttp
import structlog
from aiohttp import web

from kvasir_node.listening import interface_addresses
from relay.channel import Channel
from relay.config import RelayConfig, TransportConfig
from relay.direct import DirectListener
from relay.discovery import Announcer, Finder
from relay.errors import KvasirError
from relay.identity import ExchangeKey, Role, SigningKey, issue_certificate
from relay.loop import run
from relay.paths import PathConfig, Paths
from relay.secure import SecureSession
from relay.server import FixedMarket, Relay
from relay.session import GenerationClock
from relay.transport import RelayClient
from tests.support.relays import Device, Operator, Swarm

RELAY_PORT, DEVICE_PORT = 8421, 8422
QUICK = TransportConfig(
    vanished_spread_s=0.2, max_backoff_s=0.5, ping_s=0.5, pong_timeout_s=1.0, connect_timeout_s=2.0
)


class SeededSwarm(Swarm):
    """A swarm whose keys follow from a seed, so that processes share it."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self.root_key = SigningKey(self._bytes("root"))
        self.root = self.root_key.public
        self.market, self.relay, self.backbone = map(self.certify, ("market", "relay", "backbone"))

    def _bytes(self, name: str) -> bytes:
        return hashlib.sha256(f"{self._seed} {name}".encode()).digest()

    def certify(self, role: Role, *, id: bytes | None = None, serial: int = 1) -> Operator:
        key, exchange = SigningKey(self._bytes(role)), ExchangeKey(self._bytes(f"{role} exchange"))
        certificate = issue_certificate(
            self.root_key,
            role=role,
            id=id or role.encode().ljust(16, b"-"),
            serial=serial,
            ed25519=key.public,
            x25519=exchange.public,
            now=int(time.time()),
        )
        return Operator(key, exchange, certificate)

    def device(self) -> Device:
        return Device(SigningKey(self._bytes("device")), ExchangeKey(self._bytes("device exchange")))


def say(event: str, **data: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **data}), flush=True)


async def relay(seed: str) -> None:
    swarm = SeededSwarm(seed)
    config = RelayConfig(ping_s=0.5, ping_jitter_s=(0.0, 0.1), pong_timeout_s=1.0)
    found = Relay(
        config,
        certificate=swarm.relay.certificate,
        key=swarm.relay.key,
        market=FixedMarket(lambda: [swarm.market.key.public]),
    )
    app = web.Application()
    found.attach(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", RELAY_PORT).start()
    say("listening")
    while True:
        await asyncio.sleep(0.5)
        say("carried", bytes=found.meters.bytes_forwarded, devices=found.meters.devices)


async def device(seed: str, url: str) -> None:
    swarm = SeededSwarm(seed)
    own = swarm.device()
    older: list[SecureSession] = []

    async def serve(channel: Channel) -> None:
        session = await swarm.accept(channel, own)
        say("session", path=session.path)
        for other in older:
            await other.close("closed", "a newer session took over")
        older[:] = [session]
        while True:
            await session.send(await session.receive())

    app = web.Application()
    DirectListener(serve).attach(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", DEVICE_PORT).start()
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        client = RelayClient(
            url,
            own.key,
            role="device",
            root=swarm.root,
            ticket=swarm.ticketing(own.key.public, "device"),
            start_generation=1,
            on_circuit=serve,
            config=QUICK,
            http=http,
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(client.run())
        await stack.enter_async_context(Announcer(own.key.public, DEVICE_PORT, interface_addresses()))
        say("announced", addresses=interface_addresses())
        await asyncio.Event().wait()


class Calls:
    """Numbered calls one after the other; one in flight is sent again on each new session."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._session: SecureSession | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                number += 1
                started, tries = time.monotonic(), 0
                while True:
                    tries += 1
                    session = await self._up(tasks)
                    try:
                        async with asyncio.timeout(5.0):
                            await session.send(number.to_bytes(8, "big") + os.urandom(6_000))
                            while int.from_bytes((await session.receive())[:8], "big") != number:
                                continue
                        break
                    except (KvasirError, TimeoutError) as error:
                        say("lost", path=session.path, reason=str(error))
                        if self._session is session:
                            self._session = None
                        await session.close()
                say("call", number=number, path=session.path, seconds=time.monotonic() - started, tries=tries)
                await asyncio.sleep(0.02)

    async def _up(self, tasks: asyncio.TaskGroup) -> SecureSession:
        while self._session is None:
            try:
                self._session = await self._paths.connect()
                say("session", path=self._session.path)
            except KvasirError as error:
                say("unreachable", reason=str(error))
                await asyncio.sleep(0.1)
            else:
                if self._session.path == "relay":
                    tasks.create_task(self._improve(self._session))
        return self._session

    async def _improve(self, session: SecureSession) -> None:
        while not session.closed:
            await asyncio.sleep(self._paths.config.improve_every_s)
            better = await self._paths.improve(session)
            if better is not None:
                self._session = better
                say("session", path=better.path)
                await session.close()
                return


async def backbone(seed: str, url: str, *direct: str) -> None:
    swarm, clock = SeededSwarm(seed), GenerationClock()
    target = swarm.device()

    async def handshake(channel: Channel) -> SecureSession:
        return await swarm.connect(channel, target, generation=clock.next(time.time()), timeout=2.0)

    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        finder = await stack.enter_async_context(Finder())
        client = RelayClient(
            url,
            swarm.backbone.key,
            role="backbone",
            root=swarm.root,
            ticket=swarm.ticketing(swarm.backbone.key.public, "backbone"),
            start_generation=1,
            config=QUICK,
            http=http,
        )
        paths = Paths(
            target.key.public,
            addresses=lambda: (*direct, *finder.addresses(target.key.public)),
            relays=lambda: (client,),
            handshake=handshake,
            http=http,
            config=PathConfig(improve_every_s=0.3),
        )
        say("started")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.run())
            tasks.create_task(Calls(paths).run())


def main(arguments: list[str]) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    role, *rest = arguments
    run({"relay": relay, "device": device, "backbone": backbone}[role](*rest))


if __name__ == "__main__":
    main(sys.argv[1:])

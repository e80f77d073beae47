"""A swarm's keys and a real relay in this process, on a free port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from aiohttp import web

from relay.config import RelayConfig
from relay.frames import MAX_FRAME
from relay.identity import (
    Certificate,
    ExchangeKey,
    PublicKey,
    Role,
    SerialBook,
    SignedDocument,
    SigningKey,
    issue_certificate,
)
from relay.secure import SecureSession
from relay.server import Relay
from relay.session import GenerationBook, RekeyLimits
from relay.tickets import PeerRole, issue_ticket
from relay.transport import Channel, RelayClient, TransportConfig


class Clock:
    """Unix time that a test may move."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset


@dataclass
class Operator:
    """A certified operating key."""

    key: SigningKey
    exchange: ExchangeKey
    certificate: Certificate


@dataclass
class Device:
    """A device's keys, its grant hash and what it remembers of backbones."""

    key: SigningKey = field(default_factory=SigningKey.generate)
    exchange: ExchangeKey = field(default_factory=ExchangeKey.generate)
    grant_hash: bytes = b"g" * 32
    generations: GenerationBook = field(default_factory=GenerationBook)
    serials: SerialBook = field(default_factory=SerialBook)


_ROLES: Final[tuple[Role, ...]] = ("market", "relay", "backbone")


class Swarm:
    """A root key, and one certified market, relay and backbone."""

    def __init__(self) -> None:
        self.root_key = SigningKey.generate()
        self.root = self.root_key.public
        self.market, self.relay, self.backbone = (self.certify(role) for role in _ROLES)

    def certify(self, role: Role, *, id: bytes | None = None, serial: int = 1) -> Operator:
        """A new operating key of `role`."""
        key, exchange = SigningKey.generate(), ExchangeKey.generate()
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

    def ticket(
        self,
        subject: PublicKey,
        role: PeerRole,
        *,
        generation: int = 1,
        now: float | None = None,
        relay: PublicKey | None = None,
        key: SigningKey | None = None,
    ) -> SignedDocument:
        """A ticket as the market would sign it."""
        return issue_ticket(
            key or self.market.key,
            subject=subject,
            role=role,
            relay=relay or self.relay.key.public,
            start_generation=generation,
            now=time.time() if now is None else now,
        )

    def ticketing(
        self, subject: PublicKey, role: PeerRole, generation: int = 1
    ) -> Callable[[], Awaitable[SignedDocument]]:
        """The callback that a client asks for tickets."""

        async def ticket() -> SignedDocument:
            return self.ticket(subject, role, generation=generation)

        return ticket

    async def connect(
        self,
        channel: Channel,
        device: Device,
        *,
        generation: int = 1,
        operator: Operator | None = None,
        limits: RekeyLimits | None = None,
        grant_hash: bytes | None = None,
        timeout: float = 5.0,
    ) -> SecureSession:
        """The backbone's side of a session with `device`."""
        backbone = operator or self.backbone
        return await SecureSession.connect(
            channel,
            certificate=backbone.certificate,
            key=backbone.exchange,
            device_key=device.exchange.public,
            root=self.root,
            grant_hash=grant_hash or device.grant_hash,
            generation=generation,
            timeout=timeout,
            limits=limits,
        )

    async def accept(
        self, channel: Channel, device: Device, *, limits: RekeyLimits | None = None, timeout: float = 5.0
    ) -> SecureSession:
        """The device's side of a session."""
        return await SecureSession.accept(
            channel,
            key=device.exchange,
            root=self.root,
            grant_hash=device.grant_hash,
            generations=device.generations,
            serials=device.serials,
            timeout=timeout,
            limits=limits,
        )


class MarketState:
    """A `MarketView` that a test may set."""

    def __init__(self, *keys: PublicKey) -> None:
        self.current = list(keys)
        self.up = True

    def keys(self) -> list[PublicKey]:
        return self.current

    def reachable(self) -> bool:
        return self.up


FAST = TransportConfig(max_backoff_s=0.05, vanished_spread_s=0.05, connect_timeout_s=5.0, send_timeout_s=5.0)
"""A client that dials again at once."""


class RelayRig:
    """A running relay and what a test needs to talk to it."""

    def __init__(self, swarm: Swarm, config: RelayConfig, http: aiohttp.ClientSession) -> None:
        self.swarm = swarm
        self.http = http
        self.clock = Clock()
        self.market = MarketState(swarm.market.key.public)
        self.relay = Relay(
            config,
            certificate=swarm.relay.certificate,
            key=swarm.relay.key,
            market=self.market,
            clock=self.clock,
        )
        self.url = ""
        self.sockets: list[aiohttp.ClientWebSocketResponse] = []
        self.tasks: asyncio.TaskGroup

    def client(
        self,
        key: SigningKey,
        role: PeerRole,
        *,
        generation: int = 1,
        serve: Callable[[Channel], Awaitable[None]] | None = None,
        ticket: Callable[[], Awaitable[SignedDocument]] | None = None,
        config: TransportConfig = FAST,
    ) -> RelayClient:
        """A client of this relay, not started."""
        return RelayClient(
            self.url,
            key,
            role=role,
            root=self.swarm.root,
            ticket=ticket or self.swarm.ticketing(key.public, role, generation),
            start_generation=generation,
            on_circuit=serve,
            config=config,
            http=self.http,
        )

    async def dial(self) -> aiohttp.ClientWebSocketResponse:
        """A bare WebSocket to the relay, closed with the rig."""
        socket = await self.http.ws_connect(
            self.url + "/relay/v1",
            max_msg_size=MAX_FRAME + 1,
            compress=0,
            timeout=aiohttp.ClientWSTimeout(ws_close=0.1),
        )
        self.sockets.append(socket)
        return socket

    async def start(self, client: RelayClient) -> asyncio.Task[None]:
        """Run `client` until the rig ends, and wait until it is connected."""
        task = self.tasks.create_task(client.run())
        await client.wait_connected(10.0)
        return task


@asynccontextmanager
async def running_relay(
    config: RelayConfig | None = None, swarm: Swarm | None = None, port: int = 0
) -> AsyncIterator[RelayRig]:
    """A relay on a free port of this machine."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        rig = RelayRig(swarm or Swarm(), config or RelayConfig(drain_s=0.2), http)
        app = web.Application()
        rig.relay.attach(app)
        runner = web.AppRunner(app, shutdown_timeout=1.0, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        rig.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        tasks = asyncio.TaskGroup()
        async with tasks:
            rig.tasks = tasks
            try:
                yield rig
            finally:
                for socket in rig.sockets:
                    await socket.close()
                for task in list(tasks._tasks):
                    task.cancel()

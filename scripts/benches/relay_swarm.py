"""The keys that all processes of the relay suite share, made from one seed, and what each makes of them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import aiohttp
import structlog
from aiohttp import web

from relay.channel import Channel
from relay.config import RelayConfig, TransportConfig
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
from relay.server import FixedMarket, Relay
from relay.session import GenerationBook, GenerationClock
from relay.tickets import PeerRole, issue_ticket
from relay.transport import RelayClient


@dataclass(frozen=True)
class Operator:
    """A certified operating key."""

    key: SigningKey
    exchange: ExchangeKey
    certificate: Certificate


@dataclass(frozen=True)
class Device:
    """A device's keys and grant hash."""

    key: SigningKey
    exchange: ExchangeKey
    grant_hash: bytes


class Swarm:
    """A root key and the operators it certified; the same in every process that is given the same seed."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._root = SigningKey(self._bytes("root"))
        self.root: PublicKey = self._root.public
        self.market = self._operator("market")
        self.relay = self._operator("relay")
        self.backbone = self._operator("backbone")
        self.generations = GenerationClock()

    def _bytes(self, name: str) -> bytes:
        return hashlib.sha256(f"{self._seed} {name}".encode()).digest()

    def _operator(self, role: Role) -> Operator:
        key, exchange = SigningKey(self._bytes(role)), ExchangeKey(self._bytes(role + " exchange"))
        certificate = issue_certificate(
            self._root,
            role=role,
            id=role.encode().ljust(16, b"-"),
            serial=1,
            ed25519=key.public,
            x25519=exchange.public,
            now=int(time.time()),
        )
        return Operator(key, exchange, certificate)

    def device(self, number: int) -> Device:
        """Device `number`."""
        name = f"device {number}"
        return Device(
            SigningKey(self._bytes(name)), ExchangeKey(self._bytes(name + " x")), self._bytes(name + " g")
        )

    def ticket(self, key: PublicKey, role: PeerRole) -> SignedDocument:
        """A ticket as the market would sign it."""
        return issue_ticket(
            self.market.key,
            subject=key,
            role=role,
            relay=self.relay.key.public,
            start_generation=1,
            now=time.time(),
        )

    def client(
        self,
        url: str,
        key: SigningKey,
        role: PeerRole,
        http: aiohttp.ClientSession,
        *,
        on_circuit: Callable[[Channel], Awaitable[None]] | None = None,
        on_dial: Callable[[], None] | None = None,
        config: TransportConfig | None = None,
    ) -> RelayClient:
        """A client of the relay at `url`; `on_dial` is called at each try to connect."""

        async def ticket() -> SignedDocument:
            if on_dial is not None:
                on_dial()
            return self.ticket(key.public, role)

        return RelayClient(
            url,
            key,
            role=role,
            root=self.root,
            ticket=ticket,
            start_generation=1,
            on_circuit=on_circuit,
            config=config,
            http=http,
        )

    async def connect(self, channel: Channel, device: Device) -> SecureSession:
        """The backbone's side of a session."""
        return await SecureSession.connect(
            channel,
            certificate=self.backbone.certificate,
            key=self.backbone.exchange,
            device_key=device.exchange.public,
            root=self.root,
            grant_hash=device.grant_hash,
            generation=self.generations.next(time.time()),
            timeout=10.0,
        )

    async def accept(self, channel: Channel, device: Device) -> SecureSession:
        """The device's side of a session."""
        return await SecureSession.accept(
            channel,
            key=device.exchange,
            root=self.root,
            grant_hash=device.grant_hash,
            generations=GenerationBook(),
            serials=SerialBook(),
            timeout=10.0,
        )


async def serve_relay(swarm: Swarm, port: int, config: RelayConfig) -> tuple[web.AppRunner, Relay, int]:
    """A relay on 127.0.0.1; its runner, itself, and its port."""
    keys: Iterable[PublicKey] = (swarm.market.key.public,)
    relay = Relay(
        config, certificate=swarm.relay.certificate, key=swarm.relay.key, market=FixedMarket(lambda: keys)
    )
    app = web.Application()
    relay.attach(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096, reuse_address=True).start()
    return runner, relay, int(runner.addresses[0][1])


def quiet() -> None:
    """No log lines: they would be measured, too."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


async def until_stdin_closes() -> None:
    """Return when the parent closes this process's input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    import sys

    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()

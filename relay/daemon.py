"""A stand-alone relay: its keys, its look at the market, its listener, its orderly end.

The market tells which of its keys sign tickets, and lists the relay with its load for others to find, for as
long as the relay keeps saying that it is there. While the market does not answer, what it said last still
counts, and expired tickets an hour longer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
import structlog
from aiohttp import web

from .config import RelayConfig
from .errors import ConfigError, KvasirError, RemoteProtocolError, Unreachable
from .guard import ListenerGuard, bounded_rules
from .identity import (
    Certificate,
    PublicKey,
    SignedDocument,
    SigningKey,
    address_of,
    open_certificate,
)
from .links import JoinLink, parse_join_link
from .load import RelayLoad
from .operator import OperatorKey, load_certificate, load_key
from .requests import decode_bytes, sign_request
from .server import Relay

MARKET_TIMEOUT_S = 10.0
FAREWELL_S = 2.0
"""How long the market may take to hear that the relay goes away."""

ASK_AGAIN_S = 3.0
"""Pause after the market did not answer."""

MAX_ANSWER_BYTES = 1 << 20

log = structlog.get_logger("relay")


class MarketLink:
    """The market as a stand-alone relay sees it; a `server.MarketView`."""

    def __init__(self, link: JoinLink, http: aiohttp.ClientSession) -> None:
        if link.root is None:
            raise ConfigError("name the market with its swarm: --market http://HOST:PORT#SWARM")
        self.root: PublicKey = link.root
        self._url = link.url
        self._http = http
        self._certificates: dict[PublicKey, Certificate] = {}
        self._answered = False

    def keys(self) -> Iterable[PublicKey]:
        """The market's current key, and the one before it while its certificate lasts."""
        now = time.time()
        return [key for key, found in self._certificates.items() if found.expires_at > now]

    def reachable(self) -> bool:
        """Whether the market answered when it was asked last."""
        return self._answered

    async def look(self) -> None:
        """Ask the market who it is. Raises `KvasirError`; what was known before is kept."""
        try:
            await self._learn()
        except KvasirError:
            self._answered = False
            raise
        self._answered = True

    async def _learn(self) -> None:
        listing = await self._ask("GET", "/market/v1/swarm")
        document = listing.get("certificate")
        if not isinstance(document, str):
            raise RemoteProtocolError(f"{self._url} is no market: its answer has no certificate")
        certificate = open_certificate(
            SignedDocument.from_bytes(decode_bytes(document, "the market's certificate")),
            swarm=self.root,
            now=time.time(),
            role="market",
        )
        self._certificates[certificate.ed25519] = certificate
        for key in sorted(self._certificates, key=lambda k: self._certificates[k].serial)[:-2]:
            del self._certificates[key]

    async def announce(self, url: str, load: RelayLoad, certificate: Certificate, key: SigningKey) -> None:
        """Have the market list this relay at `url`, with its load. Raises `KvasirError`."""
        body = json.dumps({"url": url, "load": load.to_fields()}).encode()
        path = "/market/v1/relays"
        signed = sign_request(key, "POST", path, body, now=time.time(), certificate=certificate)
        await self._ask("POST", path, body, {"Content-Type": "application/json", **signed})

    async def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> dict[str, object]:
        timeout = aiohttp.ClientTimeout(total=MARKET_TIMEOUT_S)
        try:
            async with self._http.request(
                method, self._url + path, data=body or None, headers=headers, timeout=timeout
            ) as response:
                data = await response.content.read(MAX_ANSWER_BYTES)
                if response.status != 200:
                    raise Unreachable(f"the market {self._url} answered with status {response.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"the market {self._url} does not answer: {error}") from None
        try:
            answer = json.loads(data)
        except ValueError:
            raise RemoteProtocolError(f"{self._url} is no market: its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise RemoteProtocolError(f"{self._url} is no market: its answer is not an object")
        return answer


async def run(config: RelayConfig, *, stop: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set or the task is cancelled, then drain. Raises `ConfigError`."""
    stop = stop or asyncio.Event()
    if config.state_dir is None:
        raise ConfigError("a stand-alone relay keeps its keys in a folder: --state-dir DIR")
    folder = config.state_dir
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        market = MarketLink(parse_join_link(config.market_url), http)
        key = await asyncio.to_thread(load_key, folder)
        certificate = await asyncio.to_thread(
            load_certificate, folder, key, root=market.root, now=time.time()
        )
        relay = Relay(config, certificate=certificate, key=key.signing, market=market)
        app = web.Application()
        relay.attach(app)
        app.router.add_get("/health", relay.health)
        app.router.add_get("/metrics", relay.metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        address = await _listen(runner, config, stack)
        log.info("relay.listening", address=address, relay=address_of(key.signing.public))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(_follow(relay, market, key, config))
            await stop.wait()
            following.cancel()  # whatever the market takes its time for
        async with asyncio.TaskGroup() as leaving:
            leaving.create_task(relay.drain())
            leaving.create_task(_say_farewell(relay, market, key, config))


async def _listen(runner: web.AppRunner, config: RelayConfig, stack: AsyncExitStack) -> str:
    rules = bounded_rules(config.rules)
    if rules.connections < config.connections:
        log.warning("connections.bounded", wanted=config.connections, connections=rules.connections)
    guard = ListenerGuard(rules, trusted=config.proxies, head_s=config.head_timeout_s)
    try:
        server = await guard.listen(runner, host=config.host, port=config.port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}: "
            "choose another port with --port"
        ) from None
    host, port = server.sockets[0].getsockname()[:2]
    stack.push_async_callback(_stop_listening, server)
    return f"{host}:{port}"


async def _stop_listening(server: asyncio.Server) -> None:
    server.close()


async def _follow(relay: Relay, market: MarketLink, key: OperatorKey, config: RelayConfig) -> None:
    """Look at the market and at the certificate on disk, again and again, until cancelled."""
    rng = random.SystemRandom()
    while True:
        pause = config.market_poll_s
        try:
            await market.look()
            if config.public_url:
                await market.announce(config.public_url, relay.load, relay.certificate, key.signing)
        except KvasirError as error:
            pause = min(pause, ASK_AGAIN_S)
            log.warning("market.unreachable", market=config.market_url, reason=str(error))
        await _take_newer_certificate(relay, market.root, key, config)
        await asyncio.sleep(pause * rng.uniform(0.9, 1.1))


async def _say_farewell(relay: Relay, market: MarketLink, key: OperatorKey, config: RelayConfig) -> None:
    """Tell the market that this relay drains, so that it sends nobody here any more."""
    if not config.public_url:
        return
    load = replace(relay.load, draining=True)
    try:
        async with asyncio.timeout(FAREWELL_S):
            await market.announce(config.public_url, load, relay.certificate, key.signing)
    except (KvasirError, TimeoutError) as error:
        log.warning("market.unreachable", market=config.market_url, reason=str(error) or "no answer in time")


async def _take_newer_certificate(
    relay: Relay, root: PublicKey, key: OperatorKey, config: RelayConfig
) -> None:
    assert config.state_dir is not None
    try:
        found = await asyncio.to_thread(load_certificate, config.state_dir, key, root=root, now=time.time())
    except KvasirError as error:
        log.warning("certificate.unusable", reason=str(error))
        return
    if found.serial > relay.certificate.serial:
        relay.renew(found, key.signing)
        log.info("certificate.renewed", serial=found.serial, expires_at=found.expires_at)

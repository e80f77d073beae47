"""What strangers cannot use up: memory for bodies, sign-ins, waits, reads of the store, connections."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from market import admission, bodies, overview
from market.bodies import BodyBudget
from market.config import MarketConfig
from market.messages import Heartbeat, LeaseBeat
from market.plans import WindowHashes, sign_hashes
from market.requests import BODY_HEADER, encode_bytes, sign_request
from market.routes import PREFIX, SMALL_BODY
from market.wallet import CHALLENGE_LIFETIME_S
from relay.errors import ConfigError, Refused, RemoteProtocolError
from relay.guard import bounded_rules
from relay.identity import ExchangeKey, SigningKey

from ..support.markets import NUMERICS, Stall, abilities, stall
from ..support.waiting import until

MB = 1_000_000


def tight(config: MarketConfig) -> MarketConfig:
    return replace(config, body_bytes=16 * 64 * 1024, address_waits=2, gaps_s=1.0)


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    """A market with room for 64 KiB of strangers' bodies from one address."""
    async with stall(tmp_path, sweeping=False, configure=tight) as running:
        yield running


class Raw:
    """One connection that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def post(cls, market: Stall, path: str, size: int, headers: dict[str, str] | None = None) -> Raw:
        """Begin a request with a body of `size` bytes, and send none of them."""
        parts = urlsplit(market.url)
        raw = cls(*await asyncio.open_connection(parts.hostname, parts.port))
        lines = [f"POST {PREFIX}{path} HTTP/1.1", "Host: market", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        raw.writer.write("\r\n".join([*lines, "", ""]).encode())
        return raw

    async def code(self) -> str:
        """The code of the refusal that comes, and the end of the connection."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = json.loads(await self.reader.readexactly(length))
        await self.close()
        return str(answer["error"]["code"])

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def signed(market: Stall, path: str, body_hash: bytes | None, **changes: str) -> dict[str, str]:
    """The backbone's headers for a body of which `body_hash` is told."""
    key = market.keys.backbone
    headers = sign_request(
        key.signing, "POST", PREFIX + path, b"", now=market.clock(), certificate=key.certificate
    )
    if body_hash is not None:
        headers[BODY_HEADER] = encode_bytes(body_hash)
    return headers | changes


# --- bodies ------------------------------------------------------------------------------------------------


async def test_large_bodies_are_refused_by_their_head_alone(market: Stall) -> None:
    device = await market.device()
    stranger = sign_request(device.key, "POST", f"{PREFIX}/plans", b"", now=market.clock())
    known = hashlib.sha256(b"x").digest()
    for headers, code in (
        ({}, "bad_signature"),
        (stranger, "forbidden"),
        (signed(market, "/plans", known), "bad_signature"),  # the certificate is public; its key is not
        (signed(market, "/plans", None), "bad_request"),
    ):
        raw = await Raw.post(market, "/plans", 90 * MB, headers)
        assert await raw.code() == code
    assert market.market._bodies.held == 0


async def test_a_body_that_is_not_the_one_signed_for_is_refused(market: Stall) -> None:
    device = await market.device()
    headers = sign_request(device.key, "POST", f"{PREFIX}/volunteer", b"{}", now=market.clock())
    async with market.http.post(f"{market.url}{PREFIX}/volunteer", data=b"[]", headers=headers) as response:
        assert (await response.json())["error"]["code"] == "bad_signature"


async def test_strangers_bodies_in_flight_are_bounded_and_the_swarms_own_get_through(market: Stall) -> None:
    device, backbone = await market.device(), market.backbone()
    held = [await Raw.post(market, "/challenges", SMALL_BODY) for _ in range(4)]
    for raw in held:
        raw.writer.write(b"x" * 16_384)
    budget = market.market._bodies
    await until(lambda: budget.held == 65_536)
    more = await Raw.post(market, "/challenges", 16_384)
    more.writer.write(b"x" * 16_384)
    assert await more.code() == "overloaded"
    await device.client.volunteer(abilities())
    plan_id, _ = await market.publish()
    assert await backbone.assignments(plan_id)
    for raw in held:
        await raw.close()
    await until(lambda: budget.held == budget.open_held == 0)
    await market.device()


async def test_a_body_that_dawdles_is_given_up(market: Stall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BASE_S", 0.05)
    raw = await Raw.post(market, "/challenges", 100)
    raw.writer.write(b"{")
    assert await raw.code() == "bad_request"
    await until(lambda: market.market._bodies.held == 0)


def test_the_budget_has_parts_for_the_verified_for_strangers_and_for_each_address() -> None:
    budget = BodyBudget(1600)
    ours = budget.hold("a", verified=True)
    ours.take(1200)
    one, other = budget.hold("a", verified=False), budget.hold("b", verified=False)
    one.take(100)
    with pytest.raises(Refused) as refused:
        one.take(1)
    assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", bodies.RETRY_S)
    other.take(100)
    with pytest.raises(Refused):
        budget.hold("c", verified=True).take(201)
    assert (budget.held, budget.open_held) == (1400, 200)
    for hold in (one, other, ours, ours):
        hold.release()
    assert (budget.held, budget.open_held) == (0, 0)
    budget.hold("c", verified=True).take(1600)


async def test_a_verified_body_is_held_for_before_it_comes() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    async def chunks(*sizes: int) -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes(size)

    budget = BodyBudget(100)
    with pytest.raises(Refused):
        await budget.hold("a", verified=True).read(nothing(), 101, 200)
    with pytest.raises(RemoteProtocolError, match="over the bound"):
        await budget.hold("a", verified=True).read(nothing(), 101, 100)
    hold = budget.hold("a", verified=True)
    assert len(await hold.read(chunks(10, 20), 30, 100)) == 30
    assert budget.held == 30
    endless = budget.hold("a", verified=True)
    with pytest.raises(Refused):
        await endless.read(chunks(*[10] * 10), None, 1000)
    endless.release()
    assert budget.held == 30


# --- sign-ins ----------------------------------------------------------------------------------------------


def test_sign_ins_begun_are_bounded_by_address_and_by_wallet_and_forgotten() -> None:
    sign_ins = admission.SignIns()
    for n in range(admission.WALLET_CHALLENGES):
        sign_ins.enter("a", b"w", f"w{n}", now=0.0)
    with pytest.raises(Refused, match="for this wallet") as refused:
        sign_ins.enter("a", b"w", "x", now=0.0)
    assert refused.value.code == "quota"
    for n in range(admission.ADDRESS_CHALLENGES - admission.WALLET_CHALLENGES):
        sign_ins.enter("a", b"%d" % n, f"n{n}", now=1.0)
    with pytest.raises(Refused, match="from a"):
        sign_ins.enter("a", b"v", "x", now=1.0)
    sign_ins.enter("b", b"w", "y", now=1.0)  # nobody locks a wallet out elsewhere
    sign_ins.leave("n0")
    sign_ins.leave("n0")
    sign_ins.leave(None)
    sign_ins.enter("a", b"v", "x", now=1.0)
    later = CHALLENGE_LIFETIME_S + 2.0
    for n in range(admission.ADDRESS_CHALLENGES):
        sign_ins.enter("a", b"%d" % (n % 8), f"l{n}", now=later)


async def test_one_address_does_not_block_the_sign_ins_of_others(market: Stall) -> None:
    client = market.client()

    async def ask(client: object = client) -> None:
        keys = (SigningKey.generate().public, SigningKey.generate().public, ExchangeKey.generate().public)
        await client.challenge(*keys, lifetime_s=3600)  # type: ignore[attr-defined]

    for _ in range(admission.ADDRESS_CHALLENGES):
        await ask()
    with pytest.raises(Refused) as refused:
        await ask()
    assert refused.value.code == "quota"
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as http:
        await ask(market.client(http=http))
    market.clock.ahead = CHALLENGE_LIFETIME_S + 1.0
    await ask()


async def test_quotas_count_the_client_that_a_trusted_proxy_names(tmp_path: Path) -> None:
    def proxied(config: MarketConfig) -> MarketConfig:
        return replace(config, trusted_proxies=("127.0.0.1",))

    wallet, device, exchange = SigningKey.generate(), SigningKey.generate(), ExchangeKey.generate()

    async def ask(market: Stall, address: str) -> None:
        async with aiohttp.ClientSession(headers={"X-Forwarded-For": f"9.9.9.9, {address}"}) as http:
            keys = (wallet.public, device.public, exchange.public)
            await market.client(http=http).challenge(*keys, lifetime_s=3600)

    async with stall(tmp_path, sweeping=False, configure=proxied) as market:
        for _ in range(admission.WALLET_CHALLENGES):
            await ask(market, "10.0.0.1")
        with pytest.raises(Refused):
            await ask(market, "10.0.0.1")
        await ask(market, "10.0.0.2")


# --- waits and reads ---------------------------------------------------------------------------------------


async def test_few_may_wait_for_hashes_and_changes_elsewhere_do_not_wake_them(
    market: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_id, plan = await market.publish()
    handlers = market.market._handlers
    reads: list[str] = []
    original = handlers._read_hashes

    async def counting(plan: bytes, window: object) -> object:
        reads.append(str(window))
        return await original(plan, window)  # type: ignore[arg-type]

    monkeypatch.setattr(handlers, "_read_hashes", counting)
    window = plan.windows[0]
    waiting = [asyncio.create_task(market.client().hashes(plan_id, window, wait_s=10)) for _ in range(2)]
    await until(lambda: handlers._awaiting.count == 2 and len(reads) == 4)
    with pytest.raises(Refused) as refused:
        await asyncio.wait_for(market.client().hashes(plan_id, window, wait_s=10), 5)
    assert refused.value.code == "not_found"
    reads.clear()
    for _ in range(50):
        handlers.watchers.wake([plan_id])
    await market.client().swarm()
    assert len(reads) <= 2  # the look each second at most
    chunks = tuple(bytes([n + 1]) * 32 for n in range(len(plan.window_chunks(window))))
    made = WindowHashes(plan_id, window, chunks)
    await market.backbone().publish_hashes(sign_hashes(made, market.keys.backbone.signing))
    assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [made, made]
    assert handlers._waits.total() == 0


async def test_gaps_are_found_out_once_a_second(market: Stall, monkeypatch: pytest.MonkeyPatch) -> None:
    await market.publish()
    handlers = market.market._handlers
    counted: list[int] = []
    original = overview.gaps

    def counting(*arguments: object) -> object:
        counted.append(1)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(overview, "gaps", counting)
    handlers.config = replace(handlers.config, gaps_s=3600.0)
    answers = await asyncio.gather(*(market.client().gaps() for _ in range(20)))
    assert len(counted) == 1
    assert all(answer == answers[0] for answer in answers)
    handlers.config = replace(handlers.config, gaps_s=0.0)
    await market.client().gaps()
    assert len(counted) == 2


# --- leases ------------------------------------------------------------------------------------------------


async def test_a_lease_does_not_outlive_its_grant(market: Stall) -> None:
    await market.publish()
    device = await market.device()
    key, exchange = SigningKey.generate(), ExchangeKey.generate()
    client = market.client(key=key)
    await client.login(device.wallet, key, exchange, lifetime_s=90)
    offer = (await client.volunteer(abilities())).offers[0]
    market.clock.ahead = 50.0
    lease = await client.claim(offer, numerics=NUMERICS, start_generation=1)
    assert 35 < lease.expires_in_s <= 40
    market.clock.ahead = 60.0
    beat = Heartbeat(1, (LeaseBeat(lease.id, lease.epoch, 0),), ())
    (status,) = (await client.heartbeat(beat)).leases
    assert 25 < status.expires_in_s <= 30


# --- connections -------------------------------------------------------------------------------------------


def test_connections_never_take_all_descriptors() -> None:
    for descriptors in (256, 1024, 20_000, 1_000_000):
        rules = bounded_rules(descriptors=descriptors)
        assert rules.connections <= min(20_000, descriptors * 3 // 4)
        assert rules.address_connections <= rules.connections // 2
    assert bounded_rules(descriptors=1024).address_connections == 384
    assert bounded_rules(descriptors=1_000_000).address_connections == 1024


async def test_silent_connections_to_a_market_are_refused_above_a_bound_and_others_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("market.server.bounded_rules", lambda: bounded_rules(descriptors=300))
    async with stall(tmp_path, sweeping=False) as market:
        parts = urlsplit(market.url)
        silent = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            silent.append((reader, writer))
        refused = silent[-1][0]
        assert (await asyncio.wait_for(refused.readline(), 5)).startswith(b"HTTP/1.1 429 ")
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=connector) as http:
            await market.client(http=http).swarm()
        for _, writer in silent:
            writer.close()


def test_bounds_that_cannot_be_are_named() -> None:
    for change in ({"body_bytes": 0}, {"gaps_s": -1.0}, {"trusted_proxies": ("everywhere",)}):
        with pytest.raises(ConfigError):
            replace(MarketConfig("sqlite:///x", ()), **change)

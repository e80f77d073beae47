"""Relays as the market lists them: who is there, how busy, how far, and in whose claims."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import update

from market import tables as t
from market.client import MarketClient
from market.messages import Heartbeat, LeaseBeat, RelayInfo, RelayListing, RelayReading
from market.relays import RELAY_SILENCE_S, RelayBook
from market.swarm import CertificateRequest, OperatingKey, certify
from relay.errors import Refused, RemoteProtocolError
from relay.identity import ExchangeKey, PublicKey, SigningKey, issue_certificate
from relay.load import RelayLoad

from ..support.markets import NUMERICS, Device, Stall, abilities, stall
from ..support.waiting import until

BUSY = RelayLoad(0.8, 40, 30, 1e6)
IDLE = RelayLoad(0.1, 4, 3, 1e4)


@pytest.fixture
async def market(tmp_path: Path, database: str) -> AsyncIterator[Stall]:
    async with stall(tmp_path, database=database) as running:
        yield running


def _relay(market: Stall, number: int) -> tuple[MarketClient, PublicKey]:
    """A stand-alone relay's client of the market, and the relay's key."""
    signing, exchange = SigningKey.generate(), ExchangeKey.generate()
    request = CertificateRequest("relay", number.to_bytes(16, "big"), signing.public, exchange.public)
    assert market.keys.root is not None
    certificate = certify(market.keys.root, request, serial=1, now=market.clock())
    key = OperatingKey("relay", request.id, signing, exchange, certificate)
    return market.client(key=key.signing, certificate=key.certificate), signing.public


async def _listed(market: Stall) -> dict[str, RelayInfo]:
    return {info.url: info for info in (await market.client().swarm()).relays}


async def test_relays_are_listed_with_their_load_until_they_fall_silent(market: Stall) -> None:
    one, _ = _relay(market, 1)
    two, _ = _relay(market, 2)
    await one.announce_relay("wss://one.example:8421", BUSY)
    await two.announce_relay("https://two.example")
    listed = await _listed(market)
    assert set(listed) == {f"{market.url}/relay/v1", "wss://one.example:8421", "https://two.example"}
    assert listed["wss://one.example:8421"].load == BUSY
    assert listed["https://two.example"].load is None
    await one.announce_relay("wss://one.example:8421", IDLE)
    assert (await _listed(market))["wss://one.example:8421"].load == IDLE

    async def age(seconds: float) -> None:
        """As if so long had passed since relays were heard; PostgreSQL goes by a clock of its own."""
        older = update(t.relays).values(seen_at=t.relays.c.seen_at - seconds)
        await market.market._store.write(lambda session: session.run(older))

    await age(RELAY_SILENCE_S - 10)
    await one.announce_relay("wss://one.example:8421", IDLE)
    await age(15)

    async def gone() -> bool:
        return "https://two.example" not in await _listed(market)

    await until(gone, timeout=30)
    assert "wss://one.example:8421" in await _listed(market)


@pytest.mark.parametrize(
    ("url", "load"),
    [
        ("file:///etc/passwd", None),
        ("https://" + "x" * 600, None),
        ("https://one.example", RelayLoad(1.5, 0, 0, 0.0)),
        ("https://one.example", RelayLoad(0.5, -1, 0, 0.0)),
    ],
)
async def test_what_no_relay_says_of_itself_is_refused(
    tmp_path: Path, url: str, load: RelayLoad | None
) -> None:
    async with stall(tmp_path) as market:
        relay, _ = _relay(market, 1)
        with pytest.raises((Refused, RemoteProtocolError)):
            await relay.announce_relay(url, load)
        with pytest.raises(Refused):  # a backbone is no relay
            await market.backbone().announce_relay("https://one.example", IDLE)
        assert len(await _listed(market)) == 1


async def _beat(device: Device, lease: bytes, epoch: int, *relays: RelayReading) -> None:
    beat = Heartbeat(device.start_generation, (LeaseBeat(lease, epoch, 0),), (), relays)
    await device.client.heartbeat(beat)


async def test_round_trips_are_the_median_of_what_devices_saw(market: Stall) -> None:
    relay, key = _relay(market, 1)
    await relay.announce_relay("https://one.example", IDLE)
    for rtt_s in (0.020, 0.030, 9.0, None):
        device = await market.device()
        await device.client.heartbeat(Heartbeat(1, (), (), (RelayReading(key, rtt_s, True),)))

    async def seen() -> bool:
        found = (await _listed(market))["https://one.example"]
        return (found.rtt_s, found.seen_by) == (0.030, 3)

    await until(seen, timeout=30)
    device = await market.device()
    with pytest.raises((Refused, RemoteProtocolError)):
        await device.client.heartbeat(Heartbeat(1, (), (), (RelayReading(key, -1.0),)))


async def test_claims_name_the_relays_their_device_uses_and_backbones_hear_of_a_move(market: Stall) -> None:
    (one, first), (two, second) = _relay(market, 1), _relay(market, 2)
    await one.announce_relay("https://one.example", IDLE)
    await two.announce_relay("https://two.example", BUSY)
    plan_id, _ = await market.publish()
    device = await market.device()
    offers = (await device.client.volunteer(abilities())).offers
    lease = await device.client.claim(offers[0], numerics=NUMERICS, start_generation=1)
    backbone = market.backbone()

    async def named() -> tuple[int, list[PublicKey]]:
        snapshot = await backbone.assignments(plan_id)
        (assignment,) = snapshot.leases
        assert assignment.epoch == lease.epoch
        return snapshot.revision, [relay.key for relay in assignment.relays]

    revision, relays = await named()
    assert set(relays) == {first, second, market.keys.relay.signing.public}
    assert relays.index(first) < relays.index(second)  # the idler one first
    seen = RelayReading(first, 0.05), RelayReading(second, 0.01, True)
    await _beat(device, lease.id, lease.epoch, *seen)
    moved, relays = await named()
    assert moved > revision
    assert relays == [second]
    await _beat(device, lease.id, lease.epoch, *seen)
    assert (await named())[0] == moved  # the same again is no news
    await _beat(
        device, lease.id, lease.epoch, RelayReading(first, 0.05, True), RelayReading(second, 0.01, True)
    )
    assert (await named())[1] == [first, second]
    stranger = SigningKey.generate().public
    await _beat(device, lease.id, lease.epoch, RelayReading(stranger, 0.01, True))
    assert set((await named())[1]) > {first, second}  # none that is listed: any may be tried
    nodes = await backbone.nodes()
    assert nodes[0].relays == (RelayReading(stranger, 0.01, True),)


def test_a_draining_relay_is_named_in_no_new_claim() -> None:
    root, now = SigningKey.generate(), 1_700_000_000
    listings = []
    for number, load in enumerate((BUSY, RelayLoad(0.0, 0, 0, 0.0, draining=True), IDLE, None)):
        certificate = issue_certificate(
            root,
            role="relay",
            id=number.to_bytes(16, "big"),
            serial=1,
            ed25519=SigningKey.generate().public,
            x25519=ExchangeKey.generate().public,
            now=now,
        )
        listings.append(RelayListing(f"https://{number}.example", certificate.document, load))
    book = RelayBook(root.public, tuple, lambda: float(now))
    book.refresh(listings, {})
    assert len(book.listed) == 4
    assert [url for url, _ in book.for_claims()] == [
        "https://3.example",
        "https://2.example",
        "https://0.example",
    ]

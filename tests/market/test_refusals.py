"""Through the real HTTP server: every refusal of the wallet proof, of signatures, of malformed requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from market import messages as m
from market.client import MarketClient
from market.plans import sign_plan
from market.requests import sign_request
from market.wallet import CHAIN_ID, sign_challenge
from market.wire import to_json
from relay.errors import IdentityError, KvasirError, Refused, Unreachable
from relay.identity import ExchangeKey, SigningKey, address_of, issue_certificate

from ..support.markets import NUMERICS, Stall, abilities, small_plan, stall

DAY = 86_400


@pytest.fixture
async def market(tmp_path: Path) -> AsyncIterator[Stall]:
    async with stall(tmp_path, sweeping=False) as running:
        yield running


@pytest.fixture
async def either_market(database: str, tmp_path: Path) -> AsyncIterator[Stall]:
    """On SQLite and on PostgreSQL: for whatever the database decides."""
    async with stall(tmp_path, database=database) as running:
        yield running


class Joiner:
    """A wallet and a device on the way to a grant."""

    def __init__(self, market: Stall) -> None:
        self.market = market
        self.wallet, self.device, self.exchange = (
            SigningKey.generate(),
            SigningKey.generate(),
            ExchangeKey.generate(),
        )
        self.client = market.client(key=self.device)

    async def text(self, lifetime_s: int = 30 * DAY) -> str:
        return await self.client.challenge(
            self.wallet.public, self.device.public, self.exchange.public, lifetime_s=lifetime_s
        )

    async def hand_in(self, text: str, signature: bytes, signer: SigningKey | None = None) -> str:
        """Post a grant as it is, past the client's own checks; returns the outcome."""
        body = json.dumps(to_json(m.GrantRequest(1, text, signature))).encode()
        path = "/market/v1/grants"
        headers = sign_request(signer or self.device, "POST", path, body, now=self.market.clock())
        return await outcome(self.market, path, body, headers)


async def outcome(market: Stall, path: str, body: bytes, headers: dict[str, str] | None = None) -> str:
    async with market.http.post(market.url + path, data=body, headers=headers) as response:
        answer = await response.json()
    return "ok" if response.status == 200 else str(answer["error"]["code"])


async def test_one_challenge_replayed_by_a_hundred_at_once_succeeds_once(either_market: Stall) -> None:
    market = either_market
    joiner = Joiner(market)
    text = await joiner.text()
    signature = sign_challenge(text, joiner.wallet)
    outcomes = await asyncio.gather(*(joiner.hand_in(text, signature) for _ in range(100)))
    assert outcomes.count("ok") == 1
    assert outcomes.count("replay") == 99


async def test_a_challenge_is_used_up_by_a_failure(either_market: Stall) -> None:
    market = either_market
    joiner = Joiner(market)
    text = await joiner.text()
    assert await joiner.hand_in(text, bytes(64)) == "bad_signature"
    assert await joiner.hand_in(text, sign_challenge(text, joiner.wallet)) == "replay"


async def test_a_challenge_is_used_up_even_by_a_text_that_was_changed(market: Stall) -> None:
    joiner = Joiner(market)
    text = await joiner.text()
    changed = text.replace("Version: 1", "Version: 2")
    assert await joiner.hand_in(changed, sign_challenge(changed, joiner.wallet)) == "bad_signature"
    assert await joiner.hand_in(text, sign_challenge(text, joiner.wallet)) == "replay"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (CHAIN_ID, "EtWTRABZaYq6iMfeYKouRu166VU2xqa1"),
        ("wants you to sign in", "wants you to  sign in"),
        ("127.0.0.1", "127.0.0.2"),
        ("scope:serve", "scope:serve\n- urn:kvasir:scope:all"),
        ("Expiration Time: 2", "Expiration Time: 3"),
    ],
)
async def test_a_changed_text_is_refused_though_the_wallet_signed_it(
    market: Stall, old: str, new: str
) -> None:
    joiner = Joiner(market)
    text = (await joiner.text()).replace(old, new, 1)
    assert await joiner.hand_in(text, sign_challenge(text, joiner.wallet)) == "bad_signature"


async def test_a_nonce_that_was_never_issued_is_refused(market: Stall) -> None:
    joiner = Joiner(market)
    text = await joiner.text()
    nonce = text.partition("Nonce: ")[2].partition("\n")[0]
    forged = text.replace(nonce, "f" * len(nonce))
    assert await joiner.hand_in(forged, sign_challenge(forged, joiner.wallet)) == "replay"


async def test_a_challenge_is_good_for_300_s(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False) as market:
        early, late = Joiner(market), Joiner(market)
        texts = [await joiner.text() for joiner in (early, late)]
        market.clock.ahead += 299
        assert await early.hand_in(texts[0], sign_challenge(texts[0], early.wallet)) == "ok"
        market.clock.ahead += 2
        assert await late.hand_in(texts[1], sign_challenge(texts[1], late.wallet)) == "expired"


async def test_another_device_cannot_hand_a_grant_in(market: Stall) -> None:
    joiner = Joiner(market)
    text = await joiner.text()
    stranger = SigningKey.generate()
    assert await joiner.hand_in(text, sign_challenge(text, joiner.wallet), stranger) == "bad_signature"


async def test_a_malleable_signature_is_refused(market: Stall) -> None:
    joiner = Joiner(market)
    text = await joiner.text()
    good = sign_challenge(text, joiner.wallet)
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(good[32:], "little") + order
    assert await joiner.hand_in(text, good[:32] + s.to_bytes(32, "little")) == "bad_signature"


SMALL = ["1" * 32, address_of((1).to_bytes(32, "little")), address_of((2**255 - 20).to_bytes(32, "little"))]


@pytest.mark.parametrize("key", [*SMALL, "", "1" * 31, "0" * 44, "2" * 45])
@pytest.mark.parametrize("field", ["wallet", "device"])
async def test_a_challenge_for_an_unusable_key_is_refused(market: Stall, field: str, key: str) -> None:
    body = to_json(
        m.ChallengeRequest(
            1,
            market.url,
            SigningKey.generate().public,
            SigningKey.generate().public,
            ExchangeKey.generate().public,
            "serve",
            DAY,
        )
    )
    body[field] = key
    assert await outcome(market, "/market/v1/challenges", json.dumps(body).encode()) == "bad_request"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"url": "http://real.example"}, "forbidden"),
        ({"url": "http://127.0.0.1:1\nURI: x"}, "forbidden"),
        ({"scope": "all"}, "bad_signature"),
        ({"lifetime_s": 31 * DAY}, "bad_signature"),
        ({"lifetime_s": 0}, "bad_signature"),
        ({"v": 2}, "version"),
        ({"exchange": "00"}, "bad_request"),
    ],
    ids=str,
)
async def test_a_challenge_for_anything_else_is_refused(
    market: Stall, changes: dict[str, Any], code: str
) -> None:
    keys = SigningKey.generate().public, SigningKey.generate().public, ExchangeKey.generate().public
    body = to_json(m.ChallengeRequest(1, market.url, *keys, "serve", DAY)) | changes
    assert await outcome(market, "/market/v1/challenges", json.dumps(body).encode()) == code


async def test_a_rogue_market_cannot_pass_anothers_challenge_on(market: Stall) -> None:
    """The rogue forwards everything to the real market, changing the URL so that the market plays along."""
    from aiohttp import web

    async def forward(request: web.Request) -> web.Response:
        body = (await request.text()).replace(rogue_url, market.url)
        async with market.http.request(request.method, market.url + request.raw_path, data=body) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    rogue_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    device = SigningKey.generate()
    client = MarketClient(rogue_url, http=market.http, root=market.keys.root_public, key=device)
    with pytest.raises(IdentityError, match="you dialled"):
        await client.login(SigningKey.generate(), device, ExchangeKey.generate())
    await runner.cleanup()


async def test_a_client_that_pins_another_swarm_goes_no_further(market: Stall) -> None:
    client = MarketClient(market.url, http=market.http, root=SigningKey.generate().public)
    with pytest.raises(IdentityError) as refused:
        await client.swarm()
    assert refused.value.code == "wrong_swarm"


# --- who may ask what ------------------------------------------------------------


async def test_a_device_without_a_grant_is_refused(market: Stall) -> None:
    with pytest.raises(Refused, match="no grant here") as refused:
        await market.client(key=SigningKey.generate()).volunteer(abilities())
    assert refused.value.code == "forbidden"


async def test_a_grant_that_ran_out_is_refused(tmp_path: Path) -> None:
    async with stall(tmp_path, sweeping=False) as market:
        joiner = Joiner(market)
        await joiner.client.login(joiner.wallet, joiner.device, joiner.exchange, lifetime_s=DAY)
        market.clock.ahead += DAY + 1
        with pytest.raises(Refused) as refused:
            await joiner.client.volunteer(abilities())
        assert refused.value.code == "expired"


async def test_a_device_cannot_do_what_backbones_do(market: Stall) -> None:
    plan_id, plan = await market.publish()
    device = await market.device()
    client = device.client
    tries = [
        client.publish_plan(sign_plan(plan, device.key)),
        client.report_demand(plan_id, {}),
        client.declare_proven(bytes(16), 1, d=0.0),
        client.revoke(bytes(16), 1, reason="x"),
        client.assignments(plan_id),
        client.nodes(),
        client.credit_table(),
        client.announce_relay("http://x"),
    ]
    for attempt in tries:
        with pytest.raises(Refused) as refused:
            await attempt
        assert refused.value.code == "forbidden"
    with pytest.raises(Refused):
        await anext(client.watch(plan_id, 0))


async def test_a_backbone_cannot_do_what_devices_do(market: Stall) -> None:
    with pytest.raises(Refused) as refused:
        await market.backbone().volunteer(abilities())
    assert refused.value.code == "forbidden"


async def test_a_backbone_of_another_swarm_is_refused(market: Stall) -> None:
    root, key = SigningKey.generate(), SigningKey.generate()
    certificate = issue_certificate(
        root,
        role="backbone",
        id=bytes(16),
        serial=1,
        ed25519=key.public,
        x25519=ExchangeKey.generate().public,
        now=int(market.clock()),
    )
    client = MarketClient(market.url, http=market.http, key=key, certificate=certificate)
    with pytest.raises(Refused) as refused:
        await client.publish_plan(sign_plan(small_plan(), key))
    assert refused.value.code == "wrong_swarm"


async def test_a_plan_signed_by_another_key_is_refused(market: Stall) -> None:
    with pytest.raises(Refused) as refused:
        await market.backbone().publish_plan(sign_plan(small_plan(), SigningKey.generate()))
    assert refused.value.code == "bad_signature"


async def test_a_replayed_request_is_refused(either_market: Stall) -> None:
    market = either_market
    device = await market.device()
    body = json.dumps(to_json(abilities())).encode()
    path = "/market/v1/volunteer"
    headers = sign_request(device.key, "POST", path, body, now=market.clock())
    outcomes = await asyncio.gather(*(outcome(market, path, body, headers) for _ in range(20)))
    assert sorted(outcomes) == ["ok"] + ["replay"] * 19


async def test_a_request_with_another_body_is_refused(market: Stall) -> None:
    device = await market.device()
    path = "/market/v1/volunteer"
    headers = sign_request(device.key, "POST", path, b"{}", now=market.clock())
    assert await outcome(market, path, b'{"v":1}', headers) == "bad_signature"


async def test_a_device_whose_clock_is_off_is_told_so(market: Stall) -> None:
    device = await market.device()
    off = MarketClient(
        market.url,
        http=market.http,
        root=market.keys.root_public,
        key=device.key,
        clock=lambda: market.clock() + 70,
    )
    with pytest.raises(Refused, match="set the clock") as refused:
        await off.volunteer(abilities())
    assert refused.value.code == "expired"


async def test_a_lease_is_its_devices_alone(either_market: Stall) -> None:
    market = either_market
    await market.publish()
    one, other = await market.device(), await market.device()
    offer = (await one.client.volunteer(abilities())).offers[0]
    lease = await one.client.claim(offer, numerics=NUMERICS, start_generation=1)
    for attempt in (
        other.client.release(lease.id, 1, reason="mine"),
        other.client.loaded(lease.id, 1, numerics="", quantised_hash=bytes(32), kept_bytes=0),
    ):
        with pytest.raises(Refused) as refused:
            await attempt
        assert refused.value.code == "forbidden"
    with pytest.raises(Refused) as refused:
        await one.client.release(bytes(16), 1, reason="x")
    assert refused.value.code == "not_found"


# --- malformed requests ------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"v":1}', b"\xff", b"[" * 100_000, b'{"v":1e999}'],
    ids=lambda b: repr(b[:8]),
)
async def test_malformed_bodies_are_refused(market: Stall, body: bytes) -> None:
    assert await outcome(market, "/market/v1/challenges", body) == "bad_request"


async def test_an_endless_body_is_refused(market: Stall) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536

    with pytest.raises((aiohttp.ClientError, AssertionError)):
        async with market.http.post(market.url + "/market/v1/challenges", data=endless()) as response:
            assert response.status == 200


async def test_a_body_that_says_it_is_too_long_is_refused_at_once(market: Stall) -> None:
    assert await outcome(market, "/market/v1/challenges", b"x" * 300_000) == "bad_request"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/nothing", "not_found"),
        ("/plans/zz", "bad_request"),
        ("/plans/" + "0" * 64, "not_found"),
        ("/plans/" + "0" * 64 + "/hashes?window=L1", "bad_request"),
        ("/plans/" + "0" * 64 + "/hashes?window=L00-00/E000-007", "not_found"),
        ("/plans/" + "0" * 64 + "/hashes?window=L00-00/E000-007&wait=x", "bad_request"),
        ("/plans/" + "0" * 64 + "/assignments", "bad_signature"),
        ("/credits/xyz", "bad_request"),
        ("/credits", "bad_signature"),
    ],
)
async def test_paths_that_do_not_fit_are_refused(market: Stall, path: str, code: str) -> None:
    async with market.http.get(f"{market.url}/market/v1{path}") as response:
        answer = await response.json()
    assert answer["error"]["code"] == code
    assert answer["error"]["message"]
    assert response.status >= 400


async def test_an_unreachable_market_and_something_else_are_told_apart(market: Stall) -> None:
    client = MarketClient("http://127.0.0.1:9", http=market.http, timeout=2)
    with pytest.raises(Unreachable, match="cannot be reached"):
        await client.swarm()
    nested = MarketClient(market.url + "/nothing", http=market.http)
    with pytest.raises(KvasirError):
        await nested.swarm()


async def test_the_openapi_document_is_served(market: Stall) -> None:
    async with market.http.get(f"{market.url}/market/v1/openapi.json") as response:
        document = await response.json()
    assert "/market/v1/claims" in document["paths"]


async def test_the_metrics_count_outcomes(market: Stall) -> None:
    await market.device()
    async with market.http.get(f"{market.url}/market/v1/metrics") as response:
        text = await response.text()
    assert 'kvasir_market_requests_total{route="grant",outcome="ok"} 1' in text


async def test_a_market_on_its_own_has_health_and_metrics_at_the_top(market: Stall) -> None:
    async with market.http.get(f"{market.url}/health") as response:
        assert (await response.json())["outcome"] == "ok"
    async with market.http.get(f"{market.url}/metrics") as response:
        assert "kvasir_market_leases" in await response.text()

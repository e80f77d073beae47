"""The wallet proof: the text, what it refuses, and wallet files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market.wallet import (
    CHAIN_ID,
    STATEMENT,
    Challenge,
    check_challenge,
    create_wallet,
    format_time,
    grant_hash,
    load_wallet,
    new_nonce,
    normalise_url,
    open_grant,
    parse_challenge,
    parse_time,
    sign_challenge,
)
from relay.errors import ConfigError, IdentityError
from relay.identity import ExchangeKey, ExchangePublic, PublicKey, SigningKey, address_of

WALLET, DEVICE, ROOT = (SigningKey(bytes([n]) * 32) for n in (1, 2, 3))
EXCHANGE = ExchangeKey(bytes([4]) * 32)
NOW = 1_700_000_000
DAY = 86_400


def challenge(**changes: object) -> Challenge:
    made = Challenge(
        url="http://192.168.1.5:8420",
        wallet=WALLET.public,
        device=DEVICE.public,
        exchange=EXCHANGE.public,
        swarm=ROOT.public,
        scope="serve",
        nonce="0123456789abcdef0123456789abcdef",
        issued_at=NOW,
        expires_at=NOW + 30 * DAY,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_text_is_caip_122_byte_for_byte() -> None:
    assert challenge().text == (
        "192.168.1.5:8420 wants you to sign in with your Solana account:\n"
        f"{WALLET.address}\n\n{STATEMENT}\n\n"
        "URI: http://192.168.1.5:8420/market/v1\n"
        "Version: 1\n"
        "Chain ID: 5eykt4UsFv8P8NJdTREpY1vzqKqZKvdp\n"
        "Nonce: 0123456789abcdef0123456789abcdef\n"
        "Issued At: 2023-11-14T22:13:20Z\n"
        "Expiration Time: 2023-12-14T22:13:20Z\n"
        "Resources:\n"
        f"- urn:kvasir:swarm:{ROOT.address}\n"
        f"- urn:kvasir:device:{DEVICE.address}\n"
        f"- urn:kvasir:exchange:{EXCHANGE.public.hex()}\n"
        "- urn:kvasir:scope:serve"
    )


@given(st.integers(0, 4_000_000_000), st.integers(1, 30 * DAY), st.binary(min_size=32, max_size=32))
def test_every_text_is_read_back(issued_at: int, lifetime: int, exchange: bytes) -> None:
    made = challenge(
        issued_at=issued_at,
        expires_at=issued_at + lifetime,
        exchange=ExchangePublic(exchange),
        nonce=new_nonce(),
    )
    assert parse_challenge(made.text) == made


def test_a_grant_is_the_signed_text() -> None:
    text = challenge().text
    grant = open_grant(text, sign_challenge(text, WALLET), root=ROOT.public, now=NOW + 5)
    assert grant.hash == grant_hash(text)
    assert (grant.wallet, grant.device, grant.exchange) == (WALLET.public, DEVICE.public, EXCHANGE.public)
    assert grant.expires_at == NOW + 30 * DAY


def _grant(
    text: str, signature: bytes | None = None, root: PublicKey = ROOT.public, now: float = NOW
) -> None:
    open_grant(text, sign_challenge(text, WALLET) if signature is None else signature, root=root, now=now)


L = 2**252 + 27742317777372353535851937790883648493


def test_a_signature_with_s_over_l_is_refused() -> None:
    text = challenge().text
    good = sign_challenge(text, WALLET)
    malleable = good[:32] + (int.from_bytes(good[32:], "little") + L).to_bytes(32, "little")
    with pytest.raises(IdentityError, match="malleable"):
        _grant(text, malleable)


@pytest.mark.parametrize("bits", [0, 255, 256, 300, 511])
def test_a_flipped_bit_is_refused(bits: int) -> None:
    text = challenge().text
    signature = bytearray(sign_challenge(text, WALLET))
    signature[bits // 8] ^= 1 << bits % 8
    with pytest.raises(IdentityError):
        _grant(text, bytes(signature))


SMALL_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    (2**255 - 20).to_bytes(32, "little"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    (2**255 - 19).to_bytes(32, "little"),  # not canonical: 0
    (2**255 - 18).to_bytes(32, "little"),  # not canonical: 1
]


@pytest.mark.parametrize("key", SMALL_ORDER, ids=lambda key: key.hex()[:8])
@pytest.mark.parametrize("field", ["wallet", "device", "swarm"])
def test_small_order_and_non_canonical_keys_are_refused(field: str, key: bytes) -> None:
    text = challenge().text.replace(address_of(getattr(challenge(), field)), address_of(key))
    with pytest.raises(IdentityError):
        parse_challenge(text)


@pytest.mark.parametrize(
    "address", ["", "1" * 31, "1" * 45, WALLET.address + "1", "0" * 44, WALLET.address[:-2]]
)
def test_an_address_of_the_wrong_length_or_alphabet_is_refused(address: str) -> None:
    text = challenge().text.replace(WALLET.address, address)
    with pytest.raises(IdentityError):
        parse_challenge(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "http://a\nURI: http://b"},
        {"url": "http://a b"},
        {"url": "http://user@a"},
        {"url": "http://a?x=1"},
        {"url": "ftp://a"},
        {"url": "http://a/b\n"},
        {"nonce": "short"},
        {"nonce": "0123456789abcdef01234567\n89abcdef"},
        {"scope": "serve\n- urn:kvasir:scope:all"},
        {"scope": "everything"},
        {"exchange": ExchangePublic(bytes(31))},
        {"expires_at": NOW + 30 * DAY + 1},
        {"expires_at": NOW},
    ],
    ids=str,
)
def test_parts_that_would_change_the_text_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(IdentityError):
        _ = challenge(**changes).text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (CHAIN_ID, "EtWTRABZaYq6iMfeYKouRu166VU2xqa1"),
        ("Version: 1", "Version: 2"),
        (STATEMENT, STATEMENT + " And all my funds."),
        ("http://192.168.1.5:8420/market", "http://other:8420/market"),
        ("192.168.1.5:8420 wants", "evil.example wants"),
        ("Nonce: ", "Nonce:  "),
        ("\nResources:", "\nRequest ID: 1\nResources:"),
        ("scope:serve", "scope:serve\n"),
        ("2023-11-14T22:13:20Z", "2023-13-14T22:13:20Z"),
        ("2023-11-14T22:13:20Z", "2023-11-14T22:13:60Z"),
        ("2023-11-14T22:13:20Z", "2023-11-14T22:13:20z"),
        ("urn:kvasir:exchange:", "urn:kvasir:exchange:00"),
    ],
)
def test_a_text_that_was_changed_anywhere_is_refused(old: str, new: str) -> None:
    text = challenge().text
    assert old in text
    with pytest.raises(IdentityError):
        parse_challenge(text.replace(old, new, 1))


def test_a_text_of_endless_length_is_refused() -> None:
    with pytest.raises(IdentityError):
        parse_challenge(challenge().text + "x" * 3000)


def test_a_grant_of_another_swarm_or_out_of_time_is_refused() -> None:
    text = challenge().text
    with pytest.raises(IdentityError) as refused:
        _grant(text, root=DEVICE.public)
    assert refused.value.code == "wrong_swarm"
    with pytest.raises(IdentityError) as refused:
        _grant(text, now=NOW + 30 * DAY + 1)
    assert refused.value.code == "expired"
    _grant(text, now=NOW - 60)
    with pytest.raises(IdentityError, match="clocks"):
        _grant(text, now=NOW - 61)


def test_another_wallets_signature_is_refused() -> None:
    text = challenge().text
    with pytest.raises(IdentityError):
        _grant(text, sign_challenge(text, DEVICE))


def test_the_client_takes_the_text_it_asked_for_and_no_other() -> None:
    asked = challenge(nonce="", issued_at=0, expires_at=0)
    check_challenge(challenge().text, asked, now=NOW + 60, lifetime_s=30 * DAY)


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "http://real.example"},
        {"wallet": DEVICE.public},
        {"device": WALLET.public},
        {"exchange": ExchangePublic(bytes(32))},
        {"swarm": WALLET.public},
        {"expires_at": NOW + DAY},
        {"issued_at": NOW - 100, "expires_at": NOW - 100 + 30 * DAY},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_client_refuses_a_text_for_anything_else(changes: dict[str, object]) -> None:
    asked = challenge(nonce="", issued_at=0, expires_at=0)
    with pytest.raises(IdentityError):
        check_challenge(challenge(**changes).text, asked, now=NOW, lifetime_s=30 * DAY)


@pytest.mark.parametrize(
    ("given_url", "normal"),
    [
        ("http://Host:8420/", "http://host:8420"),
        (" https://a.example/kvasir/ ", "https://a.example/kvasir"),
        ("http://[fe80::1]:8420", "http://[fe80::1]:8420"),
    ],
)
def test_urls_are_written_one_way(given_url: str, normal: str) -> None:
    assert normalise_url(given_url) == normal


@pytest.mark.parametrize("url", ["", "host:8420", "ftp://host", "http://", "http://a/b c", "http://u:p@a"])
def test_what_is_no_market_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        normalise_url(url)


@given(st.integers(0, 4_000_000_000))
def test_times_are_read_back(moment: int) -> None:
    assert parse_time(format_time(moment)) == moment


# --- wallet files ------------------------------------------------------------------------------------------


def test_a_wallet_is_stored_as_solana_stores_it(tmp_path: Path) -> None:
    path = tmp_path / "id.json"
    key = create_wallet(path)
    assert json.loads(path.read_text()) == list(key.seed + key.public)
    assert load_wallet(path).public == key.public
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(IdentityError, match="exists"):
        create_wallet(path)


def test_an_encrypted_wallet_needs_its_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "wallet"
    key = create_wallet(path, passphrase=b"correct horse")
    assert load_wallet(path, passphrase=b"correct horse").public == key.public
    with pytest.raises(IdentityError):
        load_wallet(path, passphrase=b"battery staple")
    with pytest.raises(IdentityError, match="encrypted"):
        load_wallet(path)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1,2]", json.dumps([256] * 64), json.dumps([True] * 64), json.dumps(list(range(64)))],
)
def test_what_is_no_wallet_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "id.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError):
        load_wallet(path)


@pytest.mark.skipif(os.name != "posix", reason="optional: POSIX modes")
def test_a_wallet_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "id.json"
    create_wallet(path)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        load_wallet(path)

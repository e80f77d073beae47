from __future__ import annotations

import dataclasses
import secrets

import pytest

from relay.errors import IdentityError, Refused, RemoteProtocolError
from relay.identity import SigningKey, sign_document
from relay.tickets import TICKET_LIFETIME_S, auth_message, check_auth, issue_ticket, open_ticket, read_ticket

NOW = 1_800_000_000
MARKET, RELAY, DEVICE = (SigningKey(bytes([i]) * 32) for i in (1, 2, 3))
DOCUMENT = issue_ticket(
    MARKET, subject=DEVICE.public, role="device", relay=RELAY.public, start_generation=7, now=NOW
)


def _open(now: float = NOW, **changes: object) -> object:
    arguments: dict[str, object] = {"market_key": MARKET.public, "relay_key": RELAY.public, "now": now}
    return open_ticket(DOCUMENT, **(arguments | changes))  # type: ignore[arg-type]


def test_a_ticket_says_who_where_and_until_when() -> None:
    ticket = _open()
    assert ticket == read_ticket(DOCUMENT)
    assert read_ticket(DOCUMENT).subject == DEVICE.public
    assert read_ticket(DOCUMENT).start_generation == 7
    assert read_ticket(DOCUMENT).expires_at == NOW + TICKET_LIFETIME_S


def test_it_expires_after_two_minutes() -> None:
    _open(NOW + 120)
    with pytest.raises(IdentityError, match="expired") as caught:
        _open(NOW + 121)
    assert caught.value.code == "expired"


def test_grace_makes_it_last_longer_and_no_more() -> None:
    _open(NOW + 3720, grace_s=3600.0)
    with pytest.raises(IdentityError):
        _open(NOW + 3721, grace_s=3600.0)


def test_a_ticket_from_the_future_is_refused() -> None:
    _open(NOW - 60)
    with pytest.raises(IdentityError, match="not valid yet"):
        _open(NOW - 61)


def test_another_market_another_relay_another_signature() -> None:
    with pytest.raises(IdentityError):
        _open(market_key=SigningKey.generate().public)
    with pytest.raises(IdentityError, match="not for this one"):
        _open(relay_key=SigningKey.generate().public)
    forged = dataclasses.replace(DOCUMENT, signature=bytes(64))
    with pytest.raises(IdentityError):
        open_ticket(forged, market_key=MARKET.public, relay_key=RELAY.public, now=NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "market"},
        {"start_generation": -1},
        {"start_generation": True},
        {"subject": b"short"},
        {"relay": None},
        {"expires_at": NOW + 121},
        {"expires_at": NOW},
        {"subject": bytes(32)},
        {"v": 2},
    ],
)
def test_fields_out_of_range(changes: dict[str, object]) -> None:
    fields = {
        "subject": DEVICE.public,
        "role": "device",
        "relay": RELAY.public,
        "start_generation": 7,
        "issued_at": NOW,
        "expires_at": NOW + 60,
    }
    document = sign_document("ticket", fields | changes, MARKET)
    with pytest.raises((IdentityError, RemoteProtocolError, Refused)):
        open_ticket(document, market_key=MARKET.public, relay_key=RELAY.public, now=NOW)


def test_only_its_subject_can_use_it() -> None:
    ticket = read_ticket(DOCUMENT)
    nonce = secrets.token_bytes(32)
    message = auth_message(nonce, RELAY.public, DOCUMENT)

    def check(signature: bytes, *, nonce: bytes = nonce, generation: int = 7) -> None:
        check_auth(ticket, nonce=nonce, relay_key=RELAY.public, generation=generation, signature=signature)

    check(DEVICE.sign(message))
    with pytest.raises(IdentityError):
        check(SigningKey.generate().sign(message))
    with pytest.raises(IdentityError):
        check(DEVICE.sign(message), nonce=secrets.token_bytes(32))
    with pytest.raises(IdentityError, match="start generation"):
        check(DEVICE.sign(message), generation=8)

"""Signed requests: what verifies, and every way in which one does not."""

from __future__ import annotations

import pytest

from market.requests import (
    CERTIFICATE_HEADER,
    KEY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    NonceBook,
    decode_bytes,
    encode_bytes,
    sign_request,
    verify_request,
)
from relay.errors import IdentityError, KvasirError, Refused, RemoteProtocolError
from relay.identity import Certificate, ExchangeKey, SerialBook, SigningKey, issue_certificate

ROOT, KEY = SigningKey(bytes([1]) * 32), SigningKey(bytes([2]) * 32)
NOW = 1_700_000_000.0
TARGET = "/market/v1/claims?x=1"
BODY = b'{"v":1}'


def certificate(key: SigningKey = KEY, root: SigningKey = ROOT, serial: int = 1) -> Certificate:
    exchange = ExchangeKey(bytes([3]) * 32).public
    return issue_certificate(
        root, role="backbone", id=bytes(16), serial=serial, ed25519=key.public, x25519=exchange, now=int(NOW)
    )


def check(headers: dict[str, str], **changes: object) -> object:
    given = {"method": "POST", "target": TARGET, "body": BODY, "now": NOW, "nonces": NonceBook(), **changes}
    return verify_request(headers, root=ROOT.public, **given)  # type: ignore[arg-type]


def test_a_devices_request_names_its_key() -> None:
    author = verify_request(
        sign_request(KEY, "POST", TARGET, BODY, now=NOW),
        "POST",
        TARGET,
        BODY,
        now=NOW + 59,
        root=ROOT.public,
        nonces=NonceBook(),
    )
    assert author.key == KEY.public
    assert author.role == "device"


def test_a_backbones_request_carries_its_certificate() -> None:
    headers = sign_request(KEY, "POST", TARGET, BODY, now=NOW, certificate=certificate())
    assert getattr(check(headers), "role") == "backbone"  # noqa: B009


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "GET"},
        {"target": "/market/v1/claims"},
        {"body": b"{}"},
        {"now": NOW + 61},
        {"now": NOW - 62},
    ],
    ids=str,
)
def test_anything_else_than_was_signed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(IdentityError):
        check(sign_request(KEY, "POST", TARGET, BODY, now=NOW), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {SIGNATURE_HEADER: encode_bytes(bytes(64))},
        {SIGNATURE_HEADER: encode_bytes(bytes(63))},
        {SIGNATURE_HEADER: "***"},
        {KEY_HEADER: SigningKey(bytes([9]) * 32).address},
        {KEY_HEADER: ""},
        {NONCE_HEADER: encode_bytes(bytes(15))},
        {NONCE_HEADER: ""},
        {TIME_HEADER: "now"},
        {TIME_HEADER: "1e9"},
        {TIME_HEADER: "9" * 40},
        {CERTIFICATE_HEADER: "AAAA"},
    ],
    ids=str,
)
def test_headers_that_do_not_fit_are_refused(changes: dict[str, str]) -> None:
    headers = sign_request(KEY, "POST", TARGET, BODY, now=NOW) | changes
    with pytest.raises((IdentityError, RemoteProtocolError)):
        check(headers)


def test_an_unsigned_request_is_refused() -> None:
    with pytest.raises(IdentityError, match="must be signed"):
        check({})


def test_a_replay_is_refused_and_another_nonce_is_not() -> None:
    nonces = NonceBook()
    headers = sign_request(KEY, "POST", TARGET, BODY, now=NOW)
    check(headers, nonces=nonces)
    with pytest.raises(Refused) as refused:
        check(headers, nonces=nonces)
    assert refused.value.code == "replay"
    check(sign_request(KEY, "POST", TARGET, BODY, now=NOW), nonces=nonces)


def test_the_nonce_book_forgets_what_time_refuses_and_has_a_bound() -> None:
    nonces = NonceBook(capacity=2)
    nonces.use(b"k", b"1", now=0)
    nonces.use(b"k", b"2", now=0)
    with pytest.raises(Refused) as refused:
        nonces.use(b"k", b"3", now=119)
    assert refused.value.code == "overloaded"
    nonces.use(b"k", b"3", now=121)
    nonces.use(b"k", b"1", now=121)


@pytest.mark.parametrize(
    "wrong",
    [certificate(key=ROOT), certificate(root=KEY)],
    ids=["another key's certificate", "another swarm's certificate"],
)
def test_a_certificate_that_does_not_fit_is_refused(wrong: Certificate) -> None:
    with pytest.raises(KvasirError):
        check(sign_request(KEY, "POST", TARGET, BODY, now=NOW, certificate=wrong))


def test_a_replaced_certificate_is_refused() -> None:
    serials = SerialBook()
    for serial in (3, 2):
        headers = sign_request(KEY, "POST", TARGET, BODY, now=NOW, certificate=certificate(serial=serial))
        check(headers, serials=serials)
    with pytest.raises(IdentityError, match="replaced"):
        check(
            sign_request(KEY, "POST", TARGET, BODY, now=NOW, certificate=certificate(serial=1)),
            serials=serials,
        )


def test_an_expired_certificate_is_refused() -> None:
    late = NOW + 31 * 86_400
    with pytest.raises(IdentityError) as refused:
        check(sign_request(KEY, "POST", TARGET, BODY, now=late, certificate=certificate()), now=late)
    assert refused.value.code == "expired"


@pytest.mark.parametrize("text", ["AB", "A", "AA==", "A A", "AA\n", "+/8A"])
def test_base64_is_read_strictly(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_bytes(text, "it")

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay import messages as m
from relay.errors import KvasirError, Refused, RemoteProtocolError
from relay.identity import PublicKey, SignedDocument, SigningKey, pack, sign_document, unpack

KEY = SigningKey(b"k" * 32)
DOCUMENT = sign_document("ticket", {"x": 1}, KEY)
ALL: list[Any] = [
    m.Hello(DOCUMENT, b"n" * 32),
    m.Auth(DOCUMENT, 2**64 - 1, b"s" * 64),
    m.Welcome(15.0, 1 << 20, 66_000, 64, b"p" * 64),
    m.RefusedMessage("quota", "too many", 2.5),
    m.RefusedMessage("forbidden", "no", None),
    m.Open(KEY.public),
    m.Incoming(KEY.public, "backbone"),
    m.Close("closed", "", "closed"),
    m.Close("busy", "over the window", "busy"),
    m.GoAway("restart", 2.0),
    m.Renewal(DOCUMENT),
    m.SessionOffer(DOCUMENT, b"g" * 32, 5, b"noise"),
    m.SessionAnswer(b"noise"),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    data = message.to_bytes()
    assert type(message).from_bytes(data) == message
    assert unpack(data)["v"] == 1


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_each_field_is_checked(message: Any) -> None:
    fields = unpack(message.to_bytes())
    kind = type(message)
    for name in fields:
        if name in ("v", "retry_after_s"):
            continue
        without = {key: value for key, value in fields.items() if key != name}
        for broken in (without, fields | {name: ["nonsense"]}, fields | {name: True}):
            with pytest.raises(RemoteProtocolError):
                kind.from_bytes(pack(broken))


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_another_version_is_refused_naming_both(message: Any) -> None:
    fields = unpack(message.to_bytes()) | {"v": 2}
    with pytest.raises(Refused, match=r"version 1 .* version 2") as caught:
        type(message).from_bytes(pack(fields))
    assert caught.value.code == "version"


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_truncated_or_not_a_map(message: Any) -> None:
    data = message.to_bytes()
    for length in range(len(data)):
        with pytest.raises(KvasirError):
            type(message).from_bytes(data[:length])
    with pytest.raises(RemoteProtocolError):
        type(message).from_bytes(pack([1, 2]))
    with pytest.raises(RemoteProtocolError):
        type(message).from_bytes(data + b"\0")


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_raise_one_of_ours(data: bytes) -> None:
    for kind in {type(message) for message in ALL}:
        with contextlib.suppress(KvasirError):
            kind.from_bytes(data)


def test_a_message_over_the_bound() -> None:
    with pytest.raises(RemoteProtocolError, match="over the bound"):
        m.Open.from_bytes(bytes(m.MAX_MESSAGE_BYTES + 1))


def test_a_session_refusal_carries_its_code() -> None:
    answer = m.SessionAnswer.from_bytes(m.SessionAnswer(b"", Refused("replay", "old")).to_bytes())
    assert answer.refusal is not None
    assert (answer.refusal.code, str(answer.refusal)) == ("replay", "old")


def test_unknown_codes_and_long_texts_are_tamed() -> None:
    close = m.Close.from_bytes(pack({"v": 1, "code": "sing", "message": "x" * 9000, "outcome": "busy"}))
    assert close.code == "internal"
    assert len(close.message) == m.MAX_TEXT


def test_unknown_fields_are_for_later_versions() -> None:
    data = pack(unpack(m.Open(KEY.public).to_bytes()) | {"later": 1})
    assert m.Open.from_bytes(data) == m.Open(KEY.public)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (m.Welcome(15.0, 1 << 20, 66_000, 64, b"p" * 64), {"ping_s": 0}),
        (m.Welcome(15.0, 1 << 20, 66_000, 64, b"p" * 64), {"window_bytes": 5}),
        (m.Welcome(15.0, 1 << 20, 66_000, 64, b"p" * 64), {"ping_s": float("nan")}),
        (m.GoAway("x", 1.0), {"retry_after_s": -1.0}),
        (m.GoAway("x", 1.0), {"retry_after_s": float("inf")}),
        (m.Auth(DOCUMENT, 1, b"s" * 64), {"generation": -1}),
        (m.Incoming(KEY.public, "device"), {"role": "market"}),
        (m.Open(KEY.public), {"to": b"short"}),
    ],
)
def test_values_out_of_range(kind: Any, changes: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        type(kind).from_bytes(pack(unpack(kind.to_bytes()) | changes))


def test_close_records() -> None:
    assert m.unpack_close_record(m.pack_close_record("closed", "done")) == ("closed", "done")
    assert m.unpack_close_record(m.pack_close_record("draining", "later")) == ("draining", "later")


def test_documents_inside_are_parsed_not_trusted() -> None:
    hello = m.Hello.from_bytes(m.Hello(DOCUMENT, b"n" * 32).to_bytes())
    assert isinstance(hello.certificate, SignedDocument)
    assert hello.certificate.signer == PublicKey(KEY.public)

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import LocalProtocolError, RemoteProtocolError
from relay.websocket import (
    BINARY,
    CLOSE,
    FRONT,
    PING,
    PONG,
    MaskSource,
    MessageReader,
    close_payload,
    header,
    mask_in_place,
)

MASK = b"\x01\x80\xff\x10"


class Taken:
    """A reader and what it delivered."""

    def __init__(self, *, masked: bool = False, max_bytes: int = 66_000) -> None:
        self.messages: list[bytes] = []
        self.control: list[tuple[int, bytes]] = []
        self.reader = MessageReader(
            lambda payload: self.messages.append(bytes(payload)),
            lambda opcode, payload: self.control.append((opcode, payload)),
            masked=masked,
            max_bytes=max_bytes,
        )


def frame(payload: bytes, *, masked: bool = False, first: int = 0x80 | BINARY) -> bytes:
    """One frame as a peer would send it."""
    head = bytearray(header(len(payload), mask=MASK if masked else b""))
    head[0] = first
    body = bytearray(payload)
    if masked:
        mask_in_place(MASK, body)
    return bytes(head) + bytes(body)


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536, 66_000])
@pytest.mark.parametrize("mask", [b"", MASK])
def test_headers(size: int, mask: bytes) -> None:
    head = header(size, mask=mask)
    bit = 0x80 if mask else 0
    if size < 126:
        length = bytes([bit | size])
    elif size < 65_536:
        length = bytes([bit | 126]) + struct.pack(">H", size)
    else:
        length = bytes([bit | 127]) + struct.pack(">Q", size)
    assert head == b"\x82" + length + mask


def test_the_masking_of_rfc_6455() -> None:
    """The example of section 5.7: a masked "Hello"."""
    mask = bytes.fromhex("37fa213d")
    body = bytearray(b"Hello")
    mask_in_place(mask, body)
    assert body == bytes.fromhex("7f9f4d5158")
    taken = Taken(masked=True)
    taken.reader.feed(b"\x82\x85" + mask + bytes.fromhex("7f9f4d5158"))
    assert taken.messages == [b"Hello"]


def test_masks_differ() -> None:
    source = MaskSource()
    masks = [source.next() for _ in range(3000)]
    assert all(len(mask) == 4 for mask in masks)
    assert len(set(masks)) > 2_990


@given(
    st.lists(st.one_of(st.binary(max_size=300), st.just(b"x" * 65_536)), max_size=6),
    st.lists(st.integers(0, 1 << 20), max_size=12),
    st.booleans(),
)
def test_any_chunking_gives_the_same_messages(messages: list[bytes], cuts: list[int], masked: bool) -> None:
    taken = Taken(masked=masked)
    for chunk in chunked(b"".join(frame(message, masked=masked) for message in messages), cuts):
        taken.reader.feed(chunk)
    assert taken.messages == messages


@pytest.mark.parametrize("masked", [False, True])
def test_a_byte_at_a_time_with_fragments_and_control_between(masked: bool) -> None:
    taken = Taken(masked=masked)
    stream = b"".join(
        (
            frame(b"one", masked=masked, first=BINARY),
            frame(b"ping", masked=masked, first=0x80 | PING),
            frame(b"", masked=masked, first=0),
            frame(b"two", masked=masked, first=0x80),
            frame(b"x" * 200, masked=masked),
            frame(b"pong", masked=masked, first=0x80 | PONG),
            frame(close_payload(1001, b"bye"), masked=masked, first=0x80 | CLOSE),
        )
    )
    for byte in stream:
        taken.reader.feed(bytes((byte,)))
    assert taken.messages == [b"onetwo", b"x" * 200]
    assert taken.control == [(PING, b"ping"), (PONG, b"pong"), (CLOSE, b"\x03\xe9bye")]


BREACHES = {
    "text": frame(b"hi", first=0x81),
    "a reserved bit": frame(b"hi", first=0xC2),
    "an unknown opcode": frame(b"hi", first=0x83),
    "masked by a server": frame(b"hi", masked=True),
    "too long": frame(bytes(66_001)),
    "a fragmented ping": frame(b"", first=PING),
    "a long ping": frame(bytes(126), first=0x80 | PING),
    "a continuation of nothing": frame(b"x", first=0x80),
    "a message within a message": frame(b"a", first=BINARY) + frame(b"b"),
    "fragments too long together": frame(bytes(65_000), first=BINARY) + frame(bytes(1_001), first=0x80),
    "a length not in its shortest form": b"\x82\x7e\x00\x05hello",
    "a long length not in its shortest form": b"\x82\x7f" + (65_535).to_bytes(8, "big"),
    "a length of 2^63": b"\x82\x7f" + (1 << 63).to_bytes(8, "big"),
}


@pytest.mark.parametrize("breach", BREACHES)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_a_breach_is_told_and_ends_the_reading(breach: str, step: int) -> None:
    taken, data = Taken(), frame(b"before") + BREACHES[breach]
    with pytest.raises(RemoteProtocolError):  # noqa: PT012 - which byte tells is the reader's affair
        for start in range(0, len(data), step):
            taken.reader.feed(data[start : start + step])
    assert taken.messages == [b"before"]
    taken.reader.feed(frame(b"after"))
    assert taken.messages == [b"before"]


def test_a_server_refuses_what_is_not_masked() -> None:
    with pytest.raises(RemoteProtocolError, match="mask"):
        Taken(masked=True).reader.feed(frame(b"hi"))


def test_a_huge_length_allocates_nothing() -> None:
    with pytest.raises(RemoteProtocolError, match="bound"):
        Taken().reader.feed(b"\x82\x7f" + (1 << 40).to_bytes(8, "big"))


def test_reading_stops_within_one_read() -> None:
    taken = Taken()
    taken.reader = MessageReader(
        lambda payload: (taken.messages.append(bytes(payload)), taken.reader.stop()),  # type: ignore[arg-type, return-value]
        lambda *_: None,
        masked=False,
        max_bytes=100,
    )
    taken.reader.feed(frame(b"one") + frame(b"two"))
    taken.reader.feed(frame(b"three"))
    assert taken.messages == [b"one"]


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_raise_only_what_is_meant(data: bytes, masked: bool) -> None:
    taken = Taken(masked=masked)
    try:
        for byte in data:
            taken.reader.feed(bytes((byte,)))
    except RemoteProtocolError:
        assert data


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 125, 126, 300, 65_536]), st.booleans()), max_size=8),
    st.lists(st.integers(0, 1 << 18), max_size=6),
)
def test_free_bytes_lie_before_each_payload(sizes: list[tuple[int, bool]], cuts: list[int]) -> None:
    """Whole or in fragments, in however many reads: the same payloads, behind bytes that may be used."""
    kept: list[bytearray | memoryview] = []
    reader = MessageReader(kept.append, lambda *_: None, masked=True, max_bytes=70_000, front=FRONT)
    stream, expected = b"", []
    for number, (size, split) in enumerate(sizes):
        body = bytes((number + index) % 256 for index in range(size))
        expected.append(body)
        if split:
            stream += frame(body[: size // 2], masked=True, first=BINARY)
            stream += frame(body[size // 2 :], masked=True, first=0x80)
        else:
            stream += frame(body, masked=True)
    for part in chunked(stream, cuts):
        reader.feed(part)
    assert [bytes(payload[FRONT:]) for payload in kept] == expected
    assert all(isinstance(payload, bytearray) for payload in kept)


def test_free_bytes_are_for_what_is_kept() -> None:
    for masked, front in ((False, FRONT), (True, 3)):
        with pytest.raises(LocalProtocolError, match="free bytes"):
            MessageReader(lambda _: None, lambda *_: None, masked=masked, max_bytes=100, front=front)

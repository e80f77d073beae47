from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import RemoteProtocolError
from relay.frames import (
    HEADER,
    MAX_FRAME,
    MAX_PACKET,
    FrameType,
    cost,
    decode,
    decode_u32,
    decode_u64,
    encode,
    encode_u32,
    encode_u64,
)

ON_CIRCUIT = ["OPEN", "INCOMING", "OPENED", "DATA", "CREDIT", "CLOSE", "BUSY"]


def test_the_bytes_of_a_frame() -> None:
    assert encode(FrameType.DATA, 0x01020304, b"hi") == bytes([8, 1, 2, 3, 4]) + b"hi"
    assert encode(FrameType.PING, 0, encode_u64(5)) == bytes([12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5])
    assert {kind.name: int(kind) for kind in FrameType} == {
        "HELLO": 1,
        "AUTH": 2,
        "WELCOME": 3,
        "REFUSED": 4,
        "OPEN": 5,
        "INCOMING": 6,
        "OPENED": 7,
        "DATA": 8,
        "CREDIT": 9,
        "CLOSE": 10,
        "BUSY": 11,
        "PING": 12,
        "PONG": 13,
        "GOAWAY": 14,
        "TICKET": 15,
    }


@given(st.sampled_from(FrameType), st.integers(1, (1 << 32) - 1), st.binary(min_size=1, max_size=300))
def test_round_trip(kind: FrameType, circuit: int, payload: bytes) -> None:
    number = circuit if kind.name in ON_CIRCUIT else 0
    assert decode(encode(kind, number, payload)) == (kind, number, payload)


@given(st.binary(max_size=600))
def test_any_bytes_decode_or_raise(data: bytes) -> None:
    try:
        kind, circuit, payload = decode(data)
    except RemoteProtocolError:
        return
    assert encode(kind, circuit, payload) == data


def test_a_frame_byte_by_byte_is_a_frame_only_when_whole() -> None:
    frame = encode(FrameType.CREDIT, 9, encode_u32(77))
    for length in range(len(frame)):
        with pytest.raises(RemoteProtocolError):  # noqa: PT012 - the payload is part of the decoding
            _, _, payload = decode(frame[:length])
            decode_u32(payload)
    assert decode_u32(decode(frame)[2]) == 77


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x08\0\0\0",
        bytes([0, 0, 0, 0, 1]),
        bytes([16, 0, 0, 0, 0]),
        bytes([255, 0, 0, 0, 1]) + b"x",
        encode(FrameType.DATA, 1),  # no payload
        encode(FrameType.DATA, 0, b"x"),  # the connection carries no data
        encode(FrameType.PING, 1, bytes(8)),  # a ping is nobody's
        encode(FrameType.DATA, 1, bytes(MAX_PACKET + 1)),
        encode(FrameType.HELLO, 0, bytes(MAX_FRAME)),
    ],
)
def test_partial_oversized_and_unknown_frames(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frame)


def test_the_longest_packet_fits() -> None:
    frame = encode(FrameType.DATA, 1, bytes(MAX_PACKET))
    assert len(frame) == MAX_PACKET + HEADER.size <= MAX_FRAME
    assert len(decode(frame)[2]) == MAX_PACKET


@pytest.mark.parametrize("payload", [b"", b"\0\0\0", b"\0\0\0\0", b"\0\0\0\0\1"])
def test_amounts_are_positive_u32(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_u32(payload)


@pytest.mark.parametrize("payload", [b"", bytes(7), bytes(9)])
def test_ping_ids_are_u64(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_u64(payload)


def test_tiny_frames_cost_something() -> None:
    assert cost(1) == 64
    assert cost(64) == 64
    assert cost(48 * 1024) == 48 * 1024

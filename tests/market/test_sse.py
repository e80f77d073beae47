"""Server-sent events: written, and read in pieces of any size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market.sse import KEEP_ALIVE, MAX_EVENT_BYTES, SseParser, encode_event
from relay.errors import RemoteProtocolError


@given(st.lists(st.text(max_size=30), max_size=10), st.integers(1, 7))
def test_events_are_read_back_in_any_chunks(texts: list[str], size: int) -> None:
    data = [json.dumps(text) for text in texts]
    stream = b"".join(encode_event(item) + KEEP_ALIVE for item in data)
    parser = SseParser()
    found = [e for i in range(0, len(stream), size) for e in parser.receive_data(stream[i : i + size])]
    assert found == data


def test_line_ends_and_other_fields() -> None:
    stream = b"event: x\r\nid: 1\r\ndata: a\r\ndata:b\r\n\r\n: comment\n\ndata: c\n\n"
    assert SseParser().receive_data(stream) == ["a\nb", "c"]


@pytest.mark.parametrize(
    "stream",
    [
        b"data: " + b"x" * (MAX_EVENT_BYTES + 1),
        b"x" * (MAX_EVENT_BYTES + 1),
        (b"data: " + b"x" * 1000 + b"\n") * (MAX_EVENT_BYTES // 1000 + 1),
        b"data: \xff\n\n",
    ],
    ids=["long data", "long line", "many lines", "not UTF-8"],
)
def test_what_is_too_long_or_not_text_is_refused(stream: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SseParser().receive_data(stream)

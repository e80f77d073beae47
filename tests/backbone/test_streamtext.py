"""Streamed text equals decoded text, and no part of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.streamtext import Detokeniser, StopScanner, TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer of single bytes: ids 0 to 255; greater ids are special and have no text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def decode_stripping(ids: Sequence[int]) -> str:
    """As sentencepiece: every word brings its leading space, and the first one loses it."""
    words = ("and", "the", "king", "said")
    return " ".join(words[i] for i in ids)


@given(st.text())
def test_streamed_text_is_the_whole_text(text: str) -> None:
    detokeniser = Detokeniser(decode_bytes)
    pieces = [detokeniser.feed(byte) for byte in text.encode("utf-8")]
    assert "".join(pieces) + detokeniser.finish() == text


@given(st.binary(max_size=60))
def test_broken_bytes_end_as_the_tokenizer_shows_them(data: bytes) -> None:
    detokeniser = Detokeniser(decode_bytes)
    pieces = [detokeniser.feed(byte) for byte in data]
    assert "".join(pieces) + detokeniser.finish() == data.decode("utf-8", errors="replace")


@given(st.text(alphabet="é😀€a", max_size=8))
def test_no_half_character_is_shown(text: str) -> None:
    detokeniser = Detokeniser(decode_bytes)
    for byte in text.encode("utf-8"):
        assert "\ufffd" not in detokeniser.feed(byte)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_spaces_between_words_survive(ids: list[int]) -> None:
    detokeniser = Detokeniser(decode_stripping)
    pieces = [detokeniser.feed(token) for token in ids]
    assert "".join(pieces) + detokeniser.finish() == decode_stripping(ids)


def test_a_special_token_has_no_text() -> None:
    detokeniser = Detokeniser(decode_bytes)
    assert [detokeniser.feed(token) for token in (65, 300, 66)] == ["A", "", "B"]


def first_stop(text: str, stops: Sequence[str]) -> str:
    """The reference: read character by character, stop at the first stop string that is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


@given(TEXT, STOPS, st.lists(st.integers(1, 5), min_size=30, max_size=30))
def test_stop_strings_do_not_depend_on_chunks(text: str, stops: list[str], sizes: list[int]) -> None:
    scanner = StopScanner(stops)
    shown, at = "", 0
    for size in sizes:
        shown += scanner.feed(text[at : at + size])
        at += size
        assert first_stop(text, stops).startswith(shown), "a part of a stop string was shown"
    shown += scanner.finish()
    assert shown == first_stop(text, stops)
    assert scanner.stopped == (shown != text or any(text.endswith(stop) for stop in stops))


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["\n"], "one\ntwo", "one"),
        (["and he"], "so and she and he said", "so and she "),
        (["abcd", "bc"], "xabcd", "xa"),
        (["é"], "caféx", "caf"),
        (["😀"], "smile 😀 more", "smile "),
    ],
)
def test_stop_strings_over_bytes(stops: list[str], text: str, shown: str) -> None:
    stream = TextStream(decode_bytes, stops)
    out = "".join(stream.feed(byte) for byte in text.encode("utf-8"))
    assert out + stream.finish() == shown
    assert stream.stopped


def test_what_is_held_comes_out_at_the_end() -> None:
    stream = TextStream(decode_bytes, ["end."])
    assert "".join(stream.feed(byte) for byte in b"the en") == "the "
    assert stream.finish() == "en"
    assert not stream.stopped

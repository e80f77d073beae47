"""Every bad value of an API body is refused with the right status, param and code; good ones are kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.openai_types import (
    Answer,
    ApiError,
    Choice,
    Message,
    parse_chat,
    parse_completion,
    parse_json,
)

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Hello"} | fields


def test_chat_defaults() -> None:
    body = parse_chat(chat())
    assert body.messages == (Message("user", "Hello"),)
    assert (body.sampling.temperature, body.sampling.top_p, body.sampling.n) == (1.0, 1.0, 1)
    assert (body.sampling.seed, body.sampling.stops, body.sampling.max_tokens) == (None, (), None)
    assert not body.stream
    assert body.is_chat


def test_everything_that_is_supported_is_kept() -> None:
    body = parse_chat(
        chat(temperature=0, top_p=0.5, seed=-7, stop="x", max_completion_tokens=9, n=3, stream=True,
             stream_options={"include_usage": True}, user="me", metadata={}, frequency_penalty=0,
             logprobs=False, tools=[], response_format={"type": "text"}, logit_bias=None)
    )  # fmt: skip
    sampling = body.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, -7)
    assert (sampling.stops, sampling.max_tokens, sampling.n) == (("x",), 9, 3)
    assert body.stream
    assert body.include_usage


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse_chat(chat(messages=[{"role": "developer", "content": parts}, *HELLO]))
    assert body.messages == (Message("system", "ab"), Message("user", "Hello"))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("", ("",)),
    ],
)
def test_every_form_of_prompt(prompt: Any, prompts: Any) -> None:
    body = parse_completion(completion(prompt=prompt))
    assert body.prompts == prompts
    assert body.sampling.max_tokens == 16


BAD_SAMPLING = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.01}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": 1e400}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 9}, "n", "integer_above_max_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", 1]}, "stop", "invalid_type"),
    ({"stop": {}}, "stop", "invalid_type"),
    ({"stop": list("abcde")}, "stop", "array_above_max_length"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"x": 1}}, "x", "unknown_parameter"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
    ({"presence_penalty": -1}, "presence_penalty", "unsupported_parameter"),
    ({"top_k": 5}, "top_k", "unknown_parameter"),
    ({"model": None}, "model", "missing_parameter"),
    ({"model": 5}, "model", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_SAMPLING)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_bad_values(kind: str, fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(chat(**fields)) if kind == "chat" else parse_completion(completion(**fields))
    error = caught.value
    assert (error.status, error.type, error.param, error.error_code) == (
        400, "invalid_request_error", param, code,
    )  # fmt: skip
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ],
)
def test_bad_chat(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(chat(**fields))
    assert (caught.value.status, caught.value.param, caught.value.error_code) == (400, param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt", "invalid_type"),
        ({"prompt": ["a", 5]}, "prompt", "invalid_type"),
        ({"prompt": [1, True]}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 33}, "prompt", "array_above_max_length"),
        ({"logprobs": 1}, "logprobs", "unsupported_parameter"),
        ({"logprobs": 0}, "logprobs", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ],
)
def test_bad_completion(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(completion(**fields))
    assert (caught.value.status, caught.value.param, caught.value.error_code) == (400, param, code)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": Infinity}', b"\xff\xfe", b"[" * 100_000, b"null",
     b'{"prompt": "\\ud800"}', b'{"prompt": "\\uD83D x"}'],
)  # fmt: skip
def test_malformed_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert caught.value.status == 400


def test_a_character_spelt_as_two_escapes_is_text() -> None:
    assert parse_json(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\N{GRINNING FACE}"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["temperature", "top_p", "n", "seed", "stop", "max_tokens", "stream", "stream_options", "logprobs",
     "logit_bias", "tools", "messages", "prompt", "model", "response_format", "echo", "best_of"]
)  # fmt: skip


@given(st.dictionaries(NAMES, JSON, max_size=6))
def test_any_json_is_accepted_or_refused_with_a_typed_error(fields: dict[str, Any]) -> None:
    for parse, base in ((parse_chat, chat()), (parse_completion, completion())):
        refusals = []
        try:
            assert 0 <= parse(base | fields).sampling.temperature <= 2
        except ApiError as error:
            refusals.append((error.status, bool(error.message)))
        assert refusals in ([], [(400, True)])


def test_bodies_of_a_chat_answer() -> None:
    answer = Answer("chatcmpl-1", "m", 5, is_chat=True, include_usage=True)
    whole = answer.whole([Choice(0, "Hi", "stop")], 3, 2)
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    opening = answer.opening(1, [7])
    assert opening is not None
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["usage"] is None
    assert answer.closing(1, "length")["choices"][0]["finish_reason"] == "length"
    assert answer.usage_chunk(3, 2)["choices"] == []


def test_bodies_of_a_text_answer() -> None:
    answer = Answer("cmpl-1", "m", 5, is_chat=False)
    assert answer.whole([Choice(0, "Hi", "length")], 1, 1)["choices"] == [
        {"index": 0, "logprobs": None, "finish_reason": "length", "text": "Hi"}
    ]
    assert answer.opening(0, [7]) is None
    assert answer.chunk(0, "x")["choices"][0]["text"] == "x"
    assert "usage" not in answer.chunk(0, "x")


def test_text_may_go_on_after_its_end_where_asked_for() -> None:
    assert parse_completion(completion(ignore_eos=True)).sampling.ignore_eos
    assert not parse_completion(completion()).sampling.ignore_eos
    with pytest.raises(ApiError, match="a boolean"):
        parse_completion(completion(ignore_eos=1))


def test_token_ids_where_asked_for() -> None:
    assert parse_completion(completion(return_token_ids=True)).token_ids
    answer = Answer("cmpl-1", "m", 5, is_chat=False, token_ids=True)
    opening = answer.opening(0, [7, 8])
    assert opening is not None
    assert opening["choices"][0]["prompt_token_ids"] == [7, 8]
    assert answer.chunk(0, "x", [1, 2])["choices"][0]["token_ids"] == [1, 2]
    whole = answer.whole([Choice(0, "x", "stop", (7, 8), (1, 2))], 2, 2)["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == ([7, 8], [1, 2])

"""What the OpenAI-compatible API accepts and says: bodies -> checked dataclasses, results -> bodies.

Source: the OpenAI API reference for `/v1/models`, `/v1/chat/completions`, `/v1/completions` and its error
object. A field that would change the answer and is not supported is refused by name; it is never ignored.

Pure. Knows no socket, no tokenizer and no engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from relay.errors import KvasirError

MAX_STOPS: Final = 4
MAX_STOP_CHARACTERS: Final = 256
MAX_CHOICES: Final = 8
MAX_PROMPTS: Final = 32
MAX_MESSAGES: Final = 2048
DEFAULT_COMPLETION_TOKENS: Final = 16  # the API reference's default of max_tokens for /v1/completions
SEED_RANGE: Final = (-(2**63), 2**63 - 1)

FinishReason = Literal["stop", "length"]


class ApiError(KvasirError):
    """An answer that is an OpenAI error object.

    `status` is the HTTP status, `type` and `error_code` the object's `type` and `code`, `param` the field
    that is wrong or None, `retry_after_s` the value of a Retry-After header or None.
    """

    code = "bad_request"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        error_code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.error_code = error_code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.error_code}
        return {"error": fields}


def bad_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400 for a field of the right type with a value that cannot be used."""
    return ApiError(400, f"Invalid '{param}': {message}", param=param, error_code=code)


def bad_type(param: str, expected: str, value: object) -> ApiError:
    """400 for a field of the wrong JSON type."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    found = "null" if value is None else names.get(type(value), "an object")
    message = f"Invalid type for '{param}': expected {expected}, but got {found} instead."
    return ApiError(400, message, param=param, error_code="invalid_type")


def unsupported(param: str, what: str) -> ApiError:
    """400 for something the API has and this server has not."""
    message = f"'{param}' {what} is not supported by this server. Leave '{param}' out."
    return ApiError(400, message, param=param, error_code="unsupported_parameter")


def context_too_long(limit: int, prompt: int, completion: int, param: str) -> ApiError:
    """400 for prompt + completion tokens above the model's context length."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + completion} tokens ({prompt} in the {param}, {completion} in the completion). "
        f"Please reduce the length of the {param} or of the completion.",
        param=param,
        error_code="context_length_exceeded",
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. `seed` None: the server draws one. `max_tokens` None: up to the context's end."""

    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    max_tokens: int | None
    n: int
    ignore_eos: bool = False
    """Whether to go on after an end-of-text token (an extension that vLLM has as well)."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, its text parts joined."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Body:
    """A checked request. Exactly one of `messages` (chat) and `prompts` (completions) is non-empty.

    A prompt is a string or a tuple of token ids (not yet checked against the vocabulary).
    """

    model: str
    sampling: Sampling
    stream: bool
    include_usage: bool
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    token_ids: bool = False
    """Whether the answer shows token ids too (`return_token_ids`, an extension that vLLM has as well)."""

    @property
    def is_chat(self) -> bool:
        """Whether this is a chat completion."""
        return bool(self.messages)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises `ApiError` 400 for anything else, NaN and Infinity included."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse)
        if b"\\ud" in raw.lower():  # escapes can spell half a character, which is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # Unicode errors are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"We could not parse the JSON body of your request: {reason}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body of your request must be a JSON object.")
    return value


# Fields that may be sent because they cannot change the text, and fields that may be sent with the value
# that changes nothing.
_INERT: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "parallel_tool_calls", "prompt_cache_retention"}
)  # fmt: skip
_NEUTRAL: Final[Mapping[str, Callable[[Any], bool]]] = {
    "frequency_penalty": lambda value: _is_number(value) and value == 0,
    "presence_penalty": lambda value: _is_number(value) and value == 0,
    "logit_bias": lambda value: value == {},
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0 and value is not False,
    "response_format": lambda value: value == {"type": "text"},
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "echo": lambda value: value is False,
    "best_of": lambda value: value == 1 and value is not True,
    "suffix": lambda value: value == "",
    "audio": lambda value: False,
    "prediction": lambda value: False,
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
}


class _Fields:
    """The body's fields, taken one by one; null means absent; what is left at the end is refused."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not _is_number(value):
            raise bad_type(name, "a number", value)
        if not (math.isfinite(value) and low <= value <= high):
            raise bad_value(name, f"expected a number from {low:g} to {high:g}, but got {value}.")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad_type(name, "an integer", value)
        if value < low:
            raise bad_value(name, f"expected a value >= {low}, but got {value}.", "integer_below_min_value")
        if value > high:
            raise bad_value(name, f"expected a value <= {high}, but got {value}.", "integer_above_max_value")
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise bad_type(name, "a boolean", value)
        return value

    def refuse_rest(self) -> None:
        for name, value in self._left.items():
            if name in _INERT or (name in _NEUTRAL and _NEUTRAL[name](value)):
                continue
            if name in _NEUTRAL:
                raise unsupported(name, f"with the value {_shorten(value)}")
            message = f"Unrecognized request argument supplied: {name}"
            raise ApiError(400, message, param=name, error_code="unknown_parameter")


def parse_chat(body: Mapping[str, Any]) -> Body:
    """The checked body of `POST /v1/chat/completions`. Raises `ApiError` naming the first bad field."""
    fields = _Fields(body)
    model = _model(fields)
    messages = _messages(fields.take("messages"))
    sampling = _sampling(fields, default_max_tokens=None)
    stream, include_usage = _stream(fields)
    token_ids = fields.boolean("return_token_ids")
    fields.refuse_rest()
    return Body(model, sampling, stream, include_usage, messages=messages, token_ids=token_ids)


def parse_completion(body: Mapping[str, Any]) -> Body:
    """The checked body of `POST /v1/completions`. Raises `ApiError` naming the first bad field."""
    fields = _Fields(body)
    model = _model(fields)
    prompts = _prompts(fields.take("prompt"))
    sampling = _sampling(fields, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    stream, include_usage = _stream(fields)
    token_ids = fields.boolean("return_token_ids")
    fields.refuse_rest()
    return Body(model, sampling, stream, include_usage, prompts=prompts, token_ids=token_ids)


def _model(fields: _Fields) -> str:
    model = fields.take("model")
    if model is None:
        raise ApiError(
            400, "you must provide a model parameter", param="model", error_code="missing_parameter"
        )
    if not isinstance(model, str):
        raise bad_type("model", "a string", model)
    return model


def _sampling(fields: _Fields, *, default_max_tokens: int | None) -> Sampling:
    old = fields.integer("max_tokens", 1, 2**31 - 1)
    new = fields.integer("max_completion_tokens", 1, 2**31 - 1)
    if old is not None and new is not None and old != new:
        raise bad_value("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
    max_tokens = new if new is not None else old
    n = fields.integer("n", 1, MAX_CHOICES)
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_top_p(fields),
        seed=fields.integer("seed", *SEED_RANGE),
        stops=_stops(fields.take("stop")),
        max_tokens=max_tokens if max_tokens is not None else default_max_tokens,
        n=1 if n is None else n,
        ignore_eos=fields.boolean("ignore_eos"),
    )


def _top_p(fields: _Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise bad_value("top_p", "expected a number above 0; for the likeliest token set 'temperature' to 0.")
    return top_p


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise bad_type("stop", "a string or an array of strings", value)
    if len(stops) > MAX_STOPS:
        message = f"expected at most {MAX_STOPS} stop strings, but got {len(stops)}."
        raise bad_value("stop", message, "array_above_max_length")
    for stop in stops:
        if not isinstance(stop, str):
            raise bad_type("stop", "an array of strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise bad_value("stop", f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters.")
    return tuple(stops)


def _stream(fields: _Fields) -> tuple[bool, bool]:
    stream = fields.boolean("stream")
    options = fields.take("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise bad_type("stream_options", "an object", options)
    if not stream:
        message = "the 'stream_options' parameter is only allowed when 'stream' is true."
        raise bad_value("stream_options", message)
    inner = _Fields(options)
    include_usage = inner.boolean("include_usage")
    inner.take(
        "include_obfuscation"
    )  # hides token lengths from eavesdroppers by padding; no part of the text
    inner.refuse_rest()
    return stream, include_usage


def _messages(value: Any) -> tuple[Message, ...]:
    if value is None:
        message = "Missing required parameter: 'messages'."
        raise ApiError(400, message, param="messages", error_code="missing_required_parameter")
    if not isinstance(value, list):
        raise bad_type("messages", "an array of objects", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise bad_value("messages", f"expected 1 to {MAX_MESSAGES} messages, but got {len(value)}.")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise bad_type(where, "an object", value)
    role = value.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        expected = "'system', 'developer', 'user' or 'assistant'"
        raise bad_value(f"{where}.role", f"expected {expected}, but got {_shorten(role)}.")
    for name, inner in value.items():
        empty = inner is None or inner == []
        if name not in ("role", "content", "name") and not empty:
            raise unsupported(f"{where}.{name}", "in a message")
    # Chat templates know "system"; "developer" is the API's newer word for the same role.
    return Message("system" if role == "developer" else role, _content(value.get("content"), where))


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise bad_type(f"{where}.content", "a string or an array of text parts", value)
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise bad_type(f"{where}.content[{i}]", "an object", part)
        if part.get("type") != "text":
            raise unsupported(f"{where}.content[{i}]", f"of type {_shorten(part.get('type'))}")
        text = part.get("text")
        if not isinstance(text, str):
            raise bad_type(f"{where}.content[{i}].text", "a string", text)
        texts.append(text)
    return "".join(texts)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        message = "Missing required parameter: 'prompt'."
        raise ApiError(400, message, param="prompt", error_code="missing_required_parameter")
    if isinstance(value, str):
        return (value,)
    expected = "a string, an array of strings, an array of token ids or an array of those"
    if not isinstance(value, list):
        raise bad_type("prompt", expected, value)
    if not value:
        raise bad_value("prompt", "it is an empty array.", "empty_array")
    if all(_is_token(item) for item in value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        message = f"expected at most {MAX_PROMPTS} prompts, but got {len(value)}."
        raise bad_value("prompt", message, "array_above_max_length")
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and all(_is_token(token) for token in item):
            prompts.append(tuple(item))
        else:
            raise bad_type("prompt", expected, item)
    return tuple(prompts)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `prompt` and `tokens` are ids."""

    index: int
    text: str
    finish_reason: FinishReason
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Builds the bodies of one request's answer. `created` is in unix seconds."""

    id: str
    model: str
    created: int
    is_chat: bool
    include_usage: bool = False
    token_ids: bool = False

    def whole(self, choices: Sequence[Choice], prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return self._head("chat.completion" if self.is_chat else "text_completion") | {
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage(prompt_tokens, completion_tokens),
        }

    def opening(self, index: int, prompt: Sequence[int]) -> dict[str, Any] | None:
        """A choice's first chunk: a chat's role, and the prompt's ids where ids are shown; else None."""
        if not (self.is_chat or self.token_ids):
            return None
        return self._chunk(
            index, {"role": "assistant", "content": ""} if self.is_chat else "", None, prompt=prompt
        )

    def chunk(self, index: int, text: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
        """A chunk with text and the tokens behind it."""
        return self._chunk(index, {"content": text} if self.is_chat else text, None, tokens=tokens)

    def closing(self, index: int, finish_reason: FinishReason) -> dict[str, Any]:
        """A choice's last chunk."""
        return self._chunk(index, {} if self.is_chat else "", finish_reason)

    def usage_chunk(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        """The stream's last chunk where `include_usage` was asked for: usage and no choice."""
        return self._stream_head() | {"choices": [], "usage": usage(prompt_tokens, completion_tokens)}

    def _chunk(
        self,
        index: int,
        piece: Any,
        finish_reason: FinishReason | None,
        *,
        prompt: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> dict[str, Any]:
        name = "delta" if self.is_chat else "text"
        choice = {"index": index, name: piece, "logprobs": None, "finish_reason": finish_reason}
        body = self._stream_head() | {"choices": [choice | self._ids(prompt, tokens)]}
        return body | {"usage": None} if self.include_usage else body

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        piece = {"message": message} if self.is_chat else {"text": choice.text}
        head = {"index": choice.index, "logprobs": None, "finish_reason": choice.finish_reason}
        return head | piece | self._ids(choice.prompt, choice.tokens)

    def _ids(self, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
        if not self.token_ids:
            return {}
        shown = {"token_ids": list(tokens)}
        return shown | {"prompt_token_ids": list(prompt)} if prompt else shown

    def _stream_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The usage object, in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

"""How an API answer leaves: whole as JSON, or as server-sent events while the text is made.

Knows HTTP responses and the client's connection. Knows no engine and no tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from aiohttp import web

from relay.errors import ConfigError, KvasirError, Refused, Unreachable

from .completions import Piece
from .openai_types import Answer, ApiError, Choice, FinishReason
from .seam import DispatchFailed

NUMERICS_HEADER: Final = "X-Kvasir-Numerics"
REQUEST_ID_HEADER: Final = "X-Request-Id"

Numerics = Literal["exact", "mixed"]

_RETRY_S: Final = 1.0  # Retry-After where the refusing side names no time
_TOO_MANY: Final = frozenset({"overloaded", "busy", "quota"})


class ClientGone(Exception):  # noqa: N818 - a state, not a failure of ours
    """The client closed its connection, or takes no data any more."""


@dataclass(slots=True)
class Tally:
    """What is known of one request, for its canonical log line. Times in seconds of one monotonic clock."""

    id: str
    route: str
    started: float
    clock: Callable[[], float]
    streamed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None

    def count(self, pieces: Sequence[Piece]) -> None:
        """Note the tokens behind `pieces`."""
        tokens = sum(len(piece.tokens) for piece in pieces)
        if tokens and self.first_token_s is None:
            self.first_token_s = self.clock() - self.started
        self.completion_tokens += tokens


def as_api_error(error: KvasirError) -> ApiError:
    """The error object for any failure of ours or of the swarm.

    429 where there is no capacity now, 503 where experts have no owner or the server is leaving, 400 for
    what the client can mend, 500 for the rest.
    """
    if isinstance(error, ApiError):
        return error
    retry = getattr(error, "retry_after_s", None)
    if error.code in _TOO_MANY:
        retry = _RETRY_S if retry is None else retry
        return ApiError(
            429, error.message, type="rate_limit_error", error_code="no_capacity", retry_after_s=retry
        )
    if isinstance(error, DispatchFailed):
        where = (
            f" (expert window {error.window})" if error.window and error.window not in error.message else ""
        )
        return ApiError(
            503,
            error.message + where,
            type="server_error",
            error_code="window_unavailable",
            retry_after_s=_RETRY_S,
        )
    if error.code == "draining" or isinstance(error, Unreachable):
        retry = _RETRY_S if retry is None else retry
        return ApiError(
            503, error.message, type="server_error", error_code="service_unavailable", retry_after_s=retry
        )
    # The engine's own limits, such as a request that no KV cache holds; not a peer's bad reply.
    if isinstance(error, ConfigError) or (isinstance(error, Refused) and error.code == "bad_request"):
        return ApiError(400, error.message, error_code="invalid_value")
    return ApiError(500, error.message, type="server_error", error_code="internal_error")


def id_header(request_id: str) -> dict[str, str]:
    """The header that names the request."""
    return {REQUEST_ID_HEADER: request_id}


def error_response(error: ApiError, request_id: str) -> web.Response:
    """An error object as a response. Retry-After is whole seconds, at least 1 (RFC 9110 section 10.2.3)."""
    headers = id_header(request_id)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return web.json_response(error.body(), status=error.status, headers=headers)


def _check_client(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ClientGone


Prompts = Sequence[Sequence[int]]
"""The prompt's ids of each choice, by the choice's index."""


@dataclass(slots=True)
class _Growing:
    """A choice while it is made."""

    prompt: Sequence[int]
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def ended(self, index: int) -> Choice:
        text = "".join(self.texts)
        return Choice(index, text, self.finish_reason, tuple(self.prompt), tuple(self.tokens))


class WholeAnswer:
    """Collects the text of all choices and sends one JSON body at the end."""

    started = False
    """A whole answer has sent nothing before its end, so any failure still has its own status."""

    def __init__(self, request: web.Request, answer: Answer, tally: Tally, prompts: Prompts) -> None:
        self._request = request
        self._answer = answer
        self._tally = tally
        self._choices = [_Growing(prompt) for prompt in prompts]

    async def deliver(self, pieces: Sequence[Piece]) -> None:
        """Take pieces. Raises `ClientGone` where nobody waits for the answer any more."""
        _check_client(self._request)
        self._tally.count(pieces)
        for piece in pieces:
            choice = self._choices[piece.index]
            choice.texts.append(piece.text)
            choice.tokens.extend(piece.tokens)
            choice.finish_reason = piece.finish_reason or choice.finish_reason

    async def end(self, numerics: Numerics) -> web.StreamResponse:
        """The response."""
        choices = [choice.ended(index) for index, choice in enumerate(self._choices)]
        body = self._answer.whole(choices, self._tally.prompt_tokens, self._tally.completion_tokens)
        headers = id_header(self._tally.id) | {NUMERICS_HEADER: numerics}
        return web.json_response(body, headers=headers)


class StreamAnswer:
    """Sends each piece as a server-sent event (WHATWG HTML, section 9.2).

    Headers go out with the first piece, so that a failure before it has a status of its own; while the
    first piece takes longer than a tick they go out alone, and comment lines keep the connection alive.
    """

    def __init__(
        self,
        request: web.Request,
        answer: Answer,
        tally: Tally,
        prompts: Prompts,
        *,
        numerics: Callable[[], Numerics],
        write_timeout_s: float,
    ) -> None:
        self.started = False
        """Whether the headers were sent, so that the status can no longer change."""
        self._request = request
        self._answer = answer
        self._tally = tally
        self._prompts = prompts
        self._numerics = numerics
        self._write_timeout_s = write_timeout_s
        self._response = web.StreamResponse()

    async def deliver(self, pieces: Sequence[Piece]) -> None:
        """Send pieces, or a comment line where there are none. Raises `ClientGone`."""
        _check_client(self._request)
        self._tally.count(pieces)
        if not self.started:
            await self._start()
        if not pieces:
            await self._write(b": waiting\n\n")
            return
        events = b""
        for piece in pieces:
            if piece.text or (piece.tokens and self._answer.token_ids):
                events += _event(self._answer.chunk(piece.index, piece.text, piece.tokens))
            if piece.finish_reason is not None:
                events += _event(self._answer.closing(piece.index, piece.finish_reason))
        if events:
            await self._write(events)

    async def end(self, numerics: Numerics) -> web.StreamResponse:
        """Send the usage chunk where asked for, and the end mark."""
        events = b""
        if self._answer.include_usage:
            chunk = self._answer.usage_chunk(self._tally.prompt_tokens, self._tally.completion_tokens)
            events = _event(chunk)
        return await self._finish(events + b"data: [DONE]\n\n")

    async def break_off(self, error: ApiError) -> web.StreamResponse:
        """End a stream that failed after its headers: an error event, and no end mark."""
        return await self._finish(_event(error.body()))

    async def _start(self) -> None:
        self.started = True
        self._response.headers.update(
            id_header(self._tally.id)
            | {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx: pass each event on at once
                NUMERICS_HEADER: self._numerics(),
            }
        )
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error
        openings = [self._answer.opening(index, prompt) for index, prompt in enumerate(self._prompts)]
        await self._write(b"".join(_event(opening) for opening in openings if opening is not None))

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._response.write(data)
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone from error

    async def _finish(self, data: bytes) -> web.StreamResponse:
        await self._write(data)
        try:
            await self._response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return self._response


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8") + b"\n\n"

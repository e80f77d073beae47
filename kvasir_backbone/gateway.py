"""The OpenAI-compatible API: `/v1/models`, `/v1/chat/completions`, `/v1/completions`.

A thin shell: `openai_types` checks bodies, `prompting` makes ids, the engine makes tokens, `streamtext`
makes text, `answers` sends it. Every answer carries a request id; every failure is an OpenAI error
object; one canonical line is logged for each request. A client that goes away cancels its request.

Knows HTTP and the engine's front door. Knows no expert, window or node.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog
from aiohttp import web

from relay.errors import ConfigError, KvasirError, Refused

from .admission import Admission, AdmissionConfig
from .answers import (
    ClientGone,
    Numerics,
    Prompts,
    StreamAnswer,
    Tally,
    WholeAnswer,
    as_api_error,
    error_response,
    id_header,
)
from .completions import FrontDoor, run_choices
from .door import Door
from .engine import GenerationRequest
from .openai_types import Answer, ApiError, Body, context_too_long, parse_chat, parse_completion, parse_json
from .prompting import Prompter

Outcome = Literal["completed", "refused", "failed", "cancelled"]

Parse = Callable[[dict[str, Any]], Body]

OFF_LOOP_BYTES: Final = 64 * 1024
"""Longer bodies are parsed off the event loop."""

_log = structlog.get_logger("backbone")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of the API."""

    model: str
    """The model's name in `/v1/models` and in requests."""
    created: int = 0
    """When the model was taken into service, in unix seconds."""
    max_body_bytes: int = 4 * 1024 * 1024
    """A longer body is answered 413."""
    max_requests: int = 256
    """Requests open at once; more are answered 429."""
    body_timeout_s: float = 30.0
    """A body must have arrived whole within this time."""
    write_timeout_s: float = 30.0
    """A client that takes no data for this long counts as gone."""
    tick_s: float = 2.0
    """While no token comes: how often a vanished client is looked for and a stream kept alive."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("the model needs a name: give --model-name")
        for name in ("max_body_bytes", "max_requests", "body_timeout_s", "write_timeout_s", "tick_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0")


class Gateway:
    """The API over one engine.

    `numerics` says whether the swarm's owners share one numerics class at the moment; `admission` says who is
    let in (None: everyone for whom there is a place by count). The gateway owns one thread for tokenising;
    `close` ends it.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        engine: FrontDoor,
        prompter: Prompter,
        numerics: Callable[[], Numerics] = lambda: "exact",
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.counts: dict[Outcome, int] = {"completed": 0, "refused": 0, "failed": 0, "cancelled": 0}
        """Requests ended, by outcome."""
        self._engine = engine
        self._prompter = prompter
        self._numerics = numerics
        self._door = Door(admission or Admission(AdmissionConfig(least_places=256)), clock)
        self._clock = clock
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, app: web.Application) -> None:
        """Mount the API's routes. The last one answers every other path under `/v1` with an error object."""
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model:.+}", self._show_model)
        app.router.add_post("/v1/chat/completions", self._completions(parse_chat))
        app.router.add_post("/v1/completions", self._completions(parse_completion))
        app.router.add_route("*", "/v1/{path:.*}", self._unknown)

    @property
    def open_requests(self) -> int:
        """Requests being served."""
        return self._open

    async def drain(self, timeout: float) -> bool:
        """Take no more requests and wait up to `timeout` seconds for the open ones; whether all ended."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the tokenising thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _list_models(self, request: web.Request) -> web.Response:
        request_id = _new_id()
        try:
            body = {"object": "list", "data": [self._model()]}
        except KvasirError as error:  # the model is still loading
            return error_response(as_api_error(error), request_id)
        return web.json_response(body, headers=id_header(request_id))

    async def _show_model(self, request: web.Request) -> web.Response:
        request_id = _new_id()
        name = request.match_info["model"]
        try:
            if name != self.config.model:
                raise self._unknown_model(name)
            return web.json_response(self._model(), headers=id_header(request_id))
        except KvasirError as error:
            return error_response(as_api_error(error), request_id)

    async def _unknown(self, request: web.Request) -> web.Response:
        methods = {"models": "GET", "chat/completions": "POST", "completions": "POST"}
        path = request.match_info["path"]
        allowed = methods.get("models" if path.startswith("models/") else path)
        what = f"{request.method} {request.path}"
        if allowed is None:
            return error_response(
                ApiError(404, f"Unknown request URL: {what}.", error_code="unknown_url"), _new_id()
            )
        error = ApiError(405, f"Not allowed: {what}. Use {allowed}.", error_code="method_not_supported")
        response = error_response(error, _new_id())
        response.headers["Allow"] = allowed
        return response

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.config.model,
            "object": "model",
            "created": self.config.created,
            "owned_by": "kvasir",
            "max_model_len": self._engine.room(0),
        }

    def _unknown_model(self, name: str) -> ApiError:
        message = f"The model '{name[:200]}' does not exist here. This server has '{self.config.model}'."
        return ApiError(404, message, param="model", error_code="model_not_found")

    def _completions(self, parse: Parse) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            tally = Tally(_new_id(), request.path, self._clock(), self._clock)
            self._open += 1
            self._idle.clear()
            try:
                return await self._guard(request, parse, tally)
            finally:
                self._open -= 1
                if not self._open:
                    self._idle.set()

        return handle

    async def _guard(self, request: web.Request, parse: Parse, tally: Tally) -> web.StreamResponse:
        """The one boundary of a request: every ending becomes an answer and one log line."""
        try:
            return await self._answer(request, parse, tally)
        except ClientGone:
            self._log(tally, "cancelled", 499)
            return error_response(ApiError(499, "The client went away."), tally.id)
        except asyncio.CancelledError:
            self._log(tally, "cancelled", 499)
            raise
        except KvasirError as caught:
            error = as_api_error(caught)
        except Exception:
            _log.exception("request.crashed", request=tally.id, route=tally.route)
            message = f"The server failed. Tell its operator the request id {tally.id}."
            error = ApiError(500, message, type="server_error", error_code="internal_error")
        self._log_error(tally, error)
        return error_response(error, tally.id)

    async def _answer(self, request: web.Request, parse: Parse, tally: Tally) -> web.StreamResponse:
        self._check_capacity()
        raw = await self._read(request)
        if len(raw) > OFF_LOOP_BYTES:
            body = await asyncio.to_thread(lambda: parse(parse_json(raw)))
        else:
            body = parse(parse_json(raw))
        if body.model != self.config.model:
            raise self._unknown_model(body.model)
        generations = await self._prepare(body, tally)
        sink = self._sink(request, body, tally, [generation.prompt_ids for generation in generations])
        try:
            async with self._door.enter(len(generations)) as visit:
                await run_choices(
                    self._engine,
                    self._prompter.decode,
                    generations,
                    body.sampling.stops,
                    sink.deliver,
                    tick_s=self.config.tick_s,
                    heard=visit.heard,
                    each_token=body.stream and body.token_ids,
                )
        except KvasirError as caught:
            if isinstance(sink, WholeAnswer) or not sink.started:
                raise
            error = as_api_error(caught)
            self._log_error(tally, error)
            return await sink.break_off(error)
        response = await sink.end(self._numerics())
        self._log(tally, "completed", 200)
        return response

    def _sink(
        self, request: web.Request, body: Body, tally: Tally, prompts: Prompts
    ) -> WholeAnswer | StreamAnswer:
        answer = Answer(
            id=f"{'chatcmpl' if body.is_chat else 'cmpl'}-{tally.id}",
            model=body.model,
            created=int(time.time()),
            is_chat=body.is_chat,
            include_usage=body.include_usage,
            token_ids=body.token_ids,
        )
        tally.streamed = body.stream
        if not body.stream:
            return WholeAnswer(request, answer, tally, prompts)
        timeout = self.config.write_timeout_s
        return StreamAnswer(request, answer, tally, prompts, numerics=self._numerics, write_timeout_s=timeout)

    def _check_capacity(self) -> None:
        if self._draining:
            raise Refused("draining", "This server is shutting down. Ask again soon.", retry_after_s=5.0)
        if self._open > self.config.max_requests:
            message = f"All {self.config.max_requests} places are taken. Ask again soon."
            raise Refused("overloaded", message, retry_after_s=1.0)
        self._door.check()

    async def _read(self, request: web.Request) -> bytes:
        """The whole body. Raises `ApiError` 408, 413, 415."""
        limit = self.config.max_body_bytes
        if request.content_type != "application/json":
            found = request.content_type
            message = f"The body must be JSON: send 'Content-Type: application/json', not {found!r}."
            raise ApiError(415, message, error_code="unsupported_media_type")
        too_large = ApiError(413, f"The body is above {limit} bytes.", error_code="request_too_large")
        if (request.content_length or 0) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                async for data in request.content.iter_any():
                    body += data
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            message = f"The body did not arrive within {self.config.body_timeout_s:g} s."
            raise ApiError(408, message, error_code="request_timeout") from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise ClientGone from error
        return bytes(body)

    async def _prepare(self, body: Body, tally: Tally) -> list[GenerationRequest]:
        """Token ids, limits and seeds of every choice, prompt by prompt. Raises `ApiError` 400."""
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._threads, self._encode, body)
        tally.prompt_tokens = sum(map(len, prompts))
        seed = body.sampling.seed if body.sampling.seed is not None else secrets.randbits(63)
        return [
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=self._room(prompt, body),
                temperature=body.sampling.temperature,
                top_p=body.sampling.top_p,
                seed=seed,
                choice=choice,
                ignore_eos=body.sampling.ignore_eos,
            )
            for prompt in prompts
            for choice in range(body.sampling.n)
        ]

    def _room(self, prompt: Sequence[int], body: Body) -> int:
        """How many tokens the completion may have."""
        room = self._engine.room(len(prompt))
        wanted = body.sampling.max_tokens
        if room < (wanted or 1):
            param = "messages" if body.is_chat else "prompt"
            raise context_too_long(len(prompt) + room, len(prompt), wanted or 1, param)
        return room if wanted is None else wanted

    def _encode(self, body: Body) -> list[tuple[int, ...]]:
        if body.is_chat:
            return [self._prompter.encode_chat(body.messages)]
        return [self._prompter.encode_prompt(prompt) for prompt in body.prompts]

    def _log_error(self, tally: Tally, error: ApiError) -> None:
        outcome: Outcome = "failed" if error.status >= 500 else "refused"
        self._log(tally, outcome, error.status, code=error.error_code, reason=error.message)

    def _log(self, tally: Tally, outcome: Outcome, status: int, **facts: Any) -> None:
        self.counts[outcome] += 1
        _log.info(
            "request.closed",
            outcome=outcome,
            request=tally.id,
            route=tally.route,
            status=status,
            streamed=tally.streamed,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            first_token_s=None if tally.first_token_s is None else round(tally.first_token_s, 4),
            total_s=round(self._clock() - tally.started, 4),
            **facts,
        )


def _new_id() -> str:
    return secrets.token_hex(12)

"""What the API refuses, and how it ends what goes wrong: status, error object, headers, log line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import openai
import pytest
import structlog
from torch import Tensor

from kvasir_backbone import gateway
from kvasir_backbone.engine import EngineConfig
from kvasir_backbone.seam import DispatchFailed, RowKey
from tests.support.api import MODEL, Api, local_model, running_api
from tests.support.waiting import until

PROMPT = "And the king said"


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


async def post(api: Api, path: str, data: bytes | str, **headers: str) -> tuple[int, dict[str, Any], Any]:
    given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with (
        aiohttp.ClientSession() as http,
        http.post(api.url + path, data=data, headers=given) as response,
    ):
        assert response.headers["X-Request-Id"]
        return response.status, (await response.json())["error"], response.headers


async def test_unknown_model(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.client.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert MODEL in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        await api.client.models.retrieve("owner/other")


@pytest.mark.parametrize("size", [1_000, 200_000])
async def test_long_bodies_are_parsed_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads: list[threading.Thread] = []
    original = gateway.parse_json

    def parse(raw: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return original(raw)

    monkeypatch.setattr(gateway, "parse_json", parse)
    status, error, _ = await post(api, "/v1/completions", json.dumps({"pad": "x" * size}))
    assert status == 400
    assert error["message"]
    assert (threads == [threading.main_thread()]) is (size < gateway.OFF_LOOP_BYTES)


async def test_a_prompt_longer_than_the_context(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.completions.create(model=MODEL, prompt=[5] * 3000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in str(caught.value)
    messages = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as chat:
        await api.client.chat.completions.create(model=MODEL, messages=messages)
    assert (chat.value.code, chat.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="in the completion"):
        await api.client.completions.create(model=MODEL, prompt="x", max_tokens=5000)


async def test_a_prompt_longer_than_the_kv_cache() -> None:
    async with running_api(engine_config=EngineConfig(kv_bytes=400_000)) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.client.completions.create(model=MODEL, prompt=[5] * 500, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 100}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"prompt": [1, 2, 99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
    ],
)
async def test_bad_values_reach_the_client_as_errors(api: Api, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.completions.create(**({"model": MODEL, "prompt": "x"} | fields))
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


@pytest.mark.parametrize("data", ["", "{", "[1]", "NaN", '"text"', '{"model": ', b"\xff\xfe{"])
async def test_malformed_json(api: Api, data: Any) -> None:
    status, error, _ = await post(api, "/v1/completions", data)
    assert status == 400
    assert error["type"] == "invalid_request_error"


async def test_another_content_type(api: Api) -> None:
    status, error, _ = await post(api, "/v1/completions", "{}", Content_Type="text/plain")
    assert status == 415
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    async with running_api(max_body_bytes=10_000) as api:
        status, error, _ = await post(api, "/v1/completions", pieces() if chunked else b" " * 20_000)  # type: ignore[arg-type]
    assert (status, error["code"]) == (413, "request_too_large")


async def test_a_body_that_does_not_come() -> None:
    async with running_api(body_timeout_s=0.05) as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        writer.close()
    assert b"408" in head


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/embeddings", 404),
        ("DELETE", "/v1/files/x", 404),
    ],
)
async def test_what_is_not_there(api: Api, method: str, path: str, status: int) -> None:
    async with aiohttp.ClientSession() as http, http.request(method, api.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert ("Allow" in response.headers) == (status == 405)


class Held:
    """Local experts that wait until they are let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        self.entered.set()
        assert self.go.wait(20)
        return local_model()[1].dispatch(layer, rows, ids, keys, deadline_s)


class Ownerless:
    """A dispatcher whose last window lost its owner after `good` dispatches."""

    def __init__(self, good: int = 0) -> None:
        self.good = good

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        if self.good > 0:
            self.good -= 1
            return local_model()[1].dispatch(layer, rows, ids, keys, deadline_s)
        message = "no live owner of L00-00/E000-255"
        raise DispatchFailed(message, rows=range(len(keys)), window="L00-00/E000-255")


async def test_too_many_requests() -> None:
    held = Held()
    config = EngineConfig(kv_bytes=32 * 2**20, max_waiting=2, max_running=1)
    async with running_api(dispatcher=held, engine_config=config) as api:
        try:
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(
                    api.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
                )
                await until(held.entered.is_set)
                with pytest.raises(openai.RateLimitError) as caught:
                    await api.client.completions.create(model=MODEL, prompt=[PROMPT] * 3, max_tokens=2)
                assert caught.value.code == "no_capacity"
                assert caught.value.response.headers["retry-after"] == "1"
                held.go.set()
            assert first.result().choices
            stats = api.engine.stats
            assert stats.waiting == 0, "the prompts that did fit were given up with the one that did not"
        finally:
            held.go.set()


async def test_too_many_connections() -> None:
    held = Held()
    async with running_api(dispatcher=held, max_requests=1) as api:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(api.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1))
                await until(held.entered.is_set)
                with pytest.raises(openai.RateLimitError):
                    await api.client.completions.create(model=MODEL, prompt=PROMPT)
                held.go.set()
        finally:
            held.go.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_no_owner_is_named(stream: bool) -> None:
    async with running_api(dispatcher=Ownerless()) as api:
        with pytest.raises(openai.InternalServerError) as caught:
            await api.client.completions.create(model=MODEL, prompt=PROMPT, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "window_unavailable")
    assert "L00-00/E000-255" in str(caught.value)
    assert caught.value.response.headers["retry-after"] == "1"


async def test_a_stream_that_fails_later_ends_with_an_error_event() -> None:
    async with running_api(dispatcher=Ownerless(good=4 * 3)) as api:
        stream = await api.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stream=True
        )
        texts: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError, match="L00-00/E000-255"):
            await read()
        assert "".join(texts)
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{api.url}/v1/completions", json=body) as response,
        ):
            assert response.status == 503, "nothing was sent yet, so the status can still say it"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    held = Held()
    async with running_api(dispatcher=held, tick_s=0.02) as api:
        try:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 500, "stream": stream}
            data = json.dumps(body).encode()
            host, port = api.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
            )
            await until(held.entered.is_set)
            assert api.gateway.open_requests == 1
            writer.close()
            await until(lambda: api.gateway.open_requests == 0)
            assert api.gateway.counts["cancelled"] == 1
            held.go.set()
            await until(lambda: api.engine.stats.finished["cancelled"] == 1)
        finally:
            held.go.set()


async def test_a_stream_is_kept_alive_while_nothing_comes() -> None:
    held = Held()
    async with running_api(dispatcher=held, tick_s=0.02) as api:
        try:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": True}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{api.url}/v1/completions", json=body) as response,
            ):
                assert await response.content.readline() == b": waiting\n"
                held.go.set()
                assert b"data: [DONE]" in await response.read()
        finally:
            held.go.set()


async def test_draining_lets_open_requests_end_and_refuses_new_ones() -> None:
    held = Held()
    async with running_api(dispatcher=held) as api:
        try:
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(
                    api.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
                )
                await until(held.entered.is_set)
                assert not await api.gateway.drain(0.01)
                with pytest.raises(openai.InternalServerError) as caught:
                    await api.client.completions.create(model=MODEL, prompt=PROMPT)
                assert caught.value.status_code == 503
                held.go.set()
            assert await api.gateway.drain(5)
            assert first.result().choices[0].finish_reason == "length"
        finally:
            held.go.set()


async def test_one_line_is_logged_for_each_request(api: Api) -> None:
    with structlog.testing.capture_logs() as lines:
        await api.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0)
        with pytest.raises(openai.BadRequestError):
            await api.client.completions.create(model=MODEL, prompt=PROMPT, temperature=9)
    closed = [line for line in lines if line["event"] == "request.closed"]
    assert [line["outcome"] for line in closed] == ["completed", "refused"]
    assert closed[0]["completion_tokens"] == 3
    assert closed[0]["first_token_s"] > 0
    assert (closed[1]["status"], closed[1]["code"]) == (400, "invalid_value")
    assert PROMPT not in repr(closed)

"""The API as the official `openai` client sees it: the bundled model, a real server, every endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.api import MODEL, Api, local_model, running_api

PROMPT = "And the king said unto him, Why hast thou"
CHAT = [{"role": "user", "content": "And the king said"}]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


async def test_models(api: Api) -> None:
    models = await api.client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    model = await api.client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "kvasir")


async def test_completion_and_its_stream_say_the_same(api: Api) -> None:
    whole = await api.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    stream = await api.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert len(text) > 20
    assert whole.choices[0].finish_reason == "length"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_chat_and_its_stream_say_the_same(api: Api) -> None:
    whole = await api.client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=16, temperature=0)
    stream = await api.client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=16, temperature=0, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.choices[0].message.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat_without_a_bound_runs_to_the_end_of_the_context_or_stops(api: Api) -> None:
    answer = await api.client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, stop="\n")
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_greedy_text_is_that_of_the_same_tokens_decoded_at_once(api: Api) -> None:
    answer = await api.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0].model_dump()
    tokenizer = local_model()[0].tokenizer
    assert choice["prompt_token_ids"] == tokenizer(PROMPT)["input_ids"]
    assert len(choice["token_ids"]) == 40
    assert choice["text"] == tokenizer.decode(choice["token_ids"])


async def test_streamed_token_ids_are_complete(api: Api) -> None:
    stream = await api.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0.9,
        seed=5,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    ids = [token async for chunk in stream for token in chunk.choices[0].model_dump()["token_ids"]]
    assert len(ids) == 12


async def test_token_ids_come_one_by_one_while_their_text_is_held_back(api: Api) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = (await api.client.completions.create(**asked)).choices[0].text
    stream = await api.client.completions.create(
        **asked, stop=text + "never", stream=True, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0] async for chunk in stream]
    ids = [choice.model_dump()["token_ids"] for choice in choices]
    assert [len(each) for each in ids if each] == [1] * 12
    assert "".join(choice.text for choice in choices) == text
    assert not any(choice.text for choice in choices[:11])


async def test_a_seed_repeats_and_choices_differ(api: Api) -> None:
    async def sample(seed: int, n: int) -> list[str]:
        answer = await api.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1.2, top_p=0.95, seed=seed, n=n
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    first = await sample(7, 3)
    assert await sample(7, 3) == first
    assert len(set(first)) == 3
    assert await sample(8, 1) != first[:1]
    assert await sample(7, 1) == first[:1], "choice 0 does not depend on how many are asked for"


async def test_several_prompts_in_every_form(api: Api) -> None:
    tokenizer = local_model()[0].tokenizer
    ids = tokenizer(PROMPT)["input_ids"]
    answer = await api.client.completions.create(
        model=MODEL, prompt=[PROMPT, "In the beginning"], max_tokens=8, temperature=0, n=2
    )
    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 4
    assert texts[0] == texts[1]
    assert texts[2] == texts[3] != texts[0]
    by_ids = await api.client.completions.create(model=MODEL, prompt=[ids], max_tokens=8, temperature=0)
    assert by_ids.choices[0].text == texts[0]


async def test_streamed_choices_keep_apart(api: Api) -> None:
    whole = await api.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=10, temperature=1, seed=3, n=3
    )
    stream = await api.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=10, temperature=1, seed=3, n=3, stream=True
    )
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_a_stop_string_ends_the_text_before_it(api: Api) -> None:
    plain = await api.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
    text = plain.choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 7]
    stopped = await api.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=["never said", stop]
    )
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 40
    stream = await api.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=True
    )
    shown = "".join([chunk.choices[0].text async for chunk in stream])
    assert shown == text[: text.index(stop)]


async def test_an_empty_prompt_begins_a_text(api: Api) -> None:
    answer = await api.client.completions.create(model=MODEL, prompt="", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1


async def test_headers_name_the_request_and_the_numerics(api: Api) -> None:
    raw = await api.client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert raw.headers["x-kvasir-numerics"] == "exact"
    assert raw.headers["x-request-id"] in raw.parse().id
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{api.url}/v1/completions", json=body) as response,
    ):
        assert response.headers["X-Kvasir-Numerics"] == "exact"
        assert response.content_type == "text/event-stream"
        assert (await response.text()).endswith("data: [DONE]\n\n")

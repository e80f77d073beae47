"""Drafts in the step loop: they change how fast a text comes, never what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.drafting import Drafting, Speculation, StepCost
from kvasir_backbone.engine import Engine, EngineConfig, GenerationRequest
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.microbatches import StepPace
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.seam import Dispatcher
from tests.support.dispatchers import Recording
from tests.support.generating import collect, generate
from tests.support.tiny_models import save_tiny

OFF = EngineConfig(drafting=False)
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}]


class _Knowing(Speculation):
    """Drafts the text that will come, with every `wrong`-th token changed (0: none)."""

    def __init__(
        self, prompt: Sequence[int], texts: Mapping[tuple[int, ...], Sequence[int]], wrong: int
    ) -> None:
        super().__init__(prompt)
        self._text, self._wrong, self._made = list(texts[tuple(prompt)]), wrong, 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._made += len(tokens)
        places = range(self._made, min(self._made + 6, len(self._text)))
        self.draft = tuple(
            (self._text[place] + 1) % 512 if self._wrong and place % self._wrong == 0 else self._text[place]
            for place in places
        )


class _Forced(Drafting):
    """Drafts whatever there is, whatever it costs."""

    def __init__(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], wrong: int) -> None:
        super().__init__(StepCost(256, 8))
        self._texts = {tuple(prompt): text for prompt, text in texts}
        self._wrong = wrong

    def begin(self, prompt: Sequence[int]) -> Speculation:
        return _Knowing(prompt, self._texts, self._wrong)

    def choose(
        self, offers: Mapping[int, tuple[Speculation, int]], requests: int, rows: int
    ) -> dict[int, int]:
        return {request: most for request, (_, most) in offers.items() if most > 0}


class _Split(StepPace):
    def split(self, ready: int, threads: int) -> int:
        return max(1, min(ready, threads))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackboneModel]:
    """A random model, whose greedy text soon repeats itself."""
    with Checkpoint.open(save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe")) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")
        local = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 24)
        yield BackboneModel.load(checkpoint, dtype="float32", dispatcher=local)


@pytest.fixture
def prompts() -> list[list[int]]:
    """One over several prefill chunks, one short, one that repeats itself."""
    return [[3 + 7 * place % 500 for place in range(300)], [20, 21], [5, 9, 11] * 6]


async def _drafted(
    model: BackboneModel,
    prompts: list[list[int]],
    texts: list[list[int]],
    wrong: int,
    config: EngineConfig,
    **sampling: Any,
) -> tuple[list[list[int]], Engine]:
    drafting = _Forced(list(zip(prompts, texts, strict=True)), wrong)
    async with Engine(model, config, pace=_Split(), drafting=drafting) as engine:
        count = len(texts[0])
        made = await asyncio.gather(*(collect(engine, prompt, count, **sampling) for prompt in prompts))
        assert engine.stats.kv_blocks_free == engine.stats.kv_blocks
    assert model.kv_bytes == 0
    return made, engine


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_drafts_right_or_wrong_change_no_text(
    tiny_model: BackboneModel, prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    texts = await generate(tiny_model, prompts, 20, OFF, **sampling)
    for wrong in (0, 1, 3):
        made, engine = await _drafted(tiny_model, prompts, texts, wrong, EngineConfig(), **sampling)
        assert made == texts
        stats = engine.stats
        assert stats.drafted > 0
        assert (stats.accepted == 0) == (wrong == 1)
        assert stats.tokens_per_trip == pytest.approx(60 / stats.trips)
        assert wrong or stats.tokens_per_trip > 4
    assert await generate(tiny_model, prompts, 20, **sampling) == texts, "as it is by default"


async def test_drafts_and_preemption_change_no_text(
    tiny_model: BackboneModel, prompts: list[list[int]]
) -> None:
    texts = await generate(tiny_model, prompts, 40, OFF)
    blocks = -(-(max(map(len, prompts)) + 40) // 32) + 1
    tight = EngineConfig(kv_bytes=tiny_model.kv_token_bytes * 32 * blocks)
    made, engine = await _drafted(tiny_model, prompts, texts, 4, tight)
    assert made == texts
    assert engine.stats.preemptions > 0
    assert engine.stats.accepted > 0


async def test_a_text_ends_in_the_middle_of_a_draft(tiny_model: BackboneModel) -> None:
    prompt = [10, 20, 30]
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 2}
    text = (await generate(tiny_model, [prompt], 24, OFF, **sampling))[0]
    end = next(place for place in range(5, 24) if text[place] not in text[:place])
    drafting = _Forced([(prompt, text)], 0)
    eos, tiny_model.eos_ids = tiny_model.eos_ids, frozenset({text[end]})
    try:
        async with Engine(tiny_model, drafting=drafting) as engine:
            generation = engine.submit(GenerationRequest(prompt, 24, **sampling))
            made = [token.id async for token in generation]
            assert made == text[: end + 1]
            assert generation.finish_reason == "stop"
            assert await collect(engine, prompt, 7, **sampling) == text[:7]
    finally:
        tiny_model.eos_ids = eos
    stats = generation.stats
    assert stats.generated_tokens == len(made)
    assert stats.trips < len(made)
    assert stats.accepted == len(made) - stats.trips
    assert stats.drafted >= stats.accepted


async def test_a_reader_that_pauses_is_never_given_more_than_its_outbox(tiny_model: BackboneModel) -> None:
    prompt = [10, 20, 30]
    text = (await generate(tiny_model, [prompt], 30, OFF))[0]
    config = EngineConfig(outbox_tokens=4)
    async with Engine(tiny_model, config, drafting=_Forced([(prompt, text)], 0)) as engine:
        generation = engine.submit(GenerationRequest(prompt, 30, temperature=0.0, ignore_eos=True))
        made: list[int] = []
        async for token in generation:
            made.append(token.id)
            assert generation.stats.generated_tokens - len(made) <= 4
    assert made == text


async def test_rejected_drafts_are_keyed_by_steps_that_never_come_again(tiny_model: BackboneModel) -> None:
    prompt = [10, 20, 30]
    text = (await generate(tiny_model, [prompt], 16, OFF))[0]
    assert tiny_model.dispatcher is not None
    recorder = Recording(tiny_model.dispatcher)
    inner, tiny_model.dispatcher = tiny_model.dispatcher, recorder
    try:
        async with Engine(tiny_model, drafting=_Forced([(prompt, text)], 2)) as engine:
            assert await collect(engine, prompt, 16) == text
    finally:
        tiny_model.dispatcher = inner
    units = [(key, layer) for layer, keys, _ in recorder.calls for key in keys]
    assert len(set(units)) == len(units)
    positions = [(key.position, layer) for key, layer in units]
    assert len(set(positions)) < len(positions), "some drafts were wrong, and their places computed again"


@dataclass
class _Far:
    """Experts behind a round trip of 30 ms by a clock of its own; more rows cost a little."""

    inner: Dispatcher
    now: float = 0.0

    def dispatch(self, layer: int, rows: Any, ids: Any, keys: Any, deadline_s: float) -> Any:
        self.now += 0.030 + 0.0001 * len(keys)
        return self.inner.dispatch(layer, rows, ids, keys, deadline_s)


async def test_a_text_that_repeats_itself_is_drafted_where_trips_are_dear(
    tiny_model: BackboneModel,
) -> None:
    prompt = [5, 9, 11] * 4
    text = (await generate(tiny_model, [prompt], 60, OFF))[0]
    assert tiny_model.dispatcher is not None
    inner, tiny_model.dispatcher = tiny_model.dispatcher, _Far(tiny_model.dispatcher)
    far = tiny_model.dispatcher
    try:
        async with Engine(tiny_model, clock=lambda: far.now) as engine:
            assert await collect(engine, prompt, 60) == text
            assert engine.stats.tokens_per_trip >= 2
            assert await collect(engine, prompt, 30, temperature=1.5, seed=1)
    finally:
        tiny_model.dispatcher = inner

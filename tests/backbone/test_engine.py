"""The step loop: several requests at once, each as if it were alone."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.engine import Engine, EngineConfig, GenerationRequest
from kvasir_backbone.equality import compare_greedy, stock_greedy
from kvasir_backbone.microbatches import StepPace
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.scheduler import Scheduler, Step
from kvasir_backbone.seam import Dispatcher, DispatchFailed
from relay.errors import ConfigError, KvasirError, Refused
from tests.support.dispatchers import Failing, Held
from tests.support.generating import collect, generate
from tests.support.waiting import until


@pytest.fixture
def prompts(bundled_model: BackboneModel) -> list[list[int]]:
    """Short and long ones; the longest crosses several prefill chunks."""
    held_out = (bundled_model_path() / "heldout.txt").read_text()
    texts = ["And the king said unto", held_out[:1500], "Blessed are", held_out[5000:5400], "Now"]
    return [bundled_model.tokenizer(text).input_ids for text in texts]


@contextmanager
def _dispatching(model: BackboneModel, dispatcher: Dispatcher) -> Iterator[None]:
    inner, model.dispatcher = model.dispatcher, dispatcher
    try:
        yield
    finally:
        model.dispatcher = inner


def _inner(model: BackboneModel) -> Dispatcher:
    assert model.dispatcher is not None
    return model.dispatcher


async def test_several_prompts_at_once_equal_stock_generate(
    bundled_model: BackboneModel, bundled_stock: Any, prompts: list[list[int]]
) -> None:
    assert max(map(len, prompts)) > 3 * EngineConfig().chunk_rows
    texts = await generate(bundled_model, prompts, 24)
    for prompt, ours in zip(prompts, texts, strict=True):
        stock = stock_greedy(bundled_stock, prompt, 24, ignore_eos=True)
        comparison = compare_greedy(bundled_stock, prompt, ours, stock)
        assert comparison.matches, comparison.reason


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}])
async def test_a_text_does_not_depend_on_what_else_runs(
    bundled_model: BackboneModel, prompts: list[list[int]], sampling: dict[str, float]
) -> None:
    together = await generate(bundled_model, prompts, 16, **sampling)
    alone = [(await generate(bundled_model, [prompt], 16, **sampling))[0] for prompt in prompts]
    assert together == alone


async def test_preemption_changes_no_text(bundled_model: BackboneModel, prompts: list[list[int]]) -> None:
    sampling = {"temperature": 0.8, "seed": 5}
    free = await generate(bundled_model, prompts, 40, **sampling)
    longest = -(-(max(map(len, prompts)) + 40) // 32)
    tight = EngineConfig(kv_bytes=bundled_model.kv_token_bytes * 32 * (longest + 1))
    async with Engine(bundled_model, tight) as engine:
        generations = [
            engine.submit(GenerationRequest(prompt, 40, ignore_eos=True, **sampling))  # type: ignore[arg-type]
            for prompt in prompts
        ]
        texts = [[token.id async for token in generation] for generation in generations]
        assert engine.stats.preemptions > 0
        assert engine.stats.kv_blocks_free == engine.stats.kv_blocks
    assert texts == free
    assert bundled_model.kv_bytes == 0


async def test_seeds_and_choices_tell_texts_apart(bundled_model: BackboneModel) -> None:
    async with Engine(bundled_model) as engine:
        prompt, sampled = [10, 20, 30], {"temperature": 1.0}
        texts = [
            await collect(engine, prompt, 12, seed=seed, choice=choice, **sampled)
            for seed, choice in ((1, 0), (1, 0), (1, 1), (2, 0))
        ]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


async def test_an_unseeded_request_draws_a_seed(bundled_model: BackboneModel) -> None:
    seeds = iter([7, 8])
    async with Engine(bundled_model, draw_seed=lambda: next(seeds)) as engine:
        first = await collect(engine, [10, 20], 12, temperature=1.0)
        second = await collect(engine, [10, 20], 12, temperature=1.0)
        assert first == await collect(engine, [10, 20], 12, temperature=1.0, seed=7)
        assert second == await collect(engine, [10, 20], 12, temperature=1.0, seed=8)


async def test_a_text_ends_at_its_end_token(bundled_model: BackboneModel) -> None:
    async with Engine(bundled_model) as engine:
        text = await collect(engine, [10, 20, 30], 40)
        end = text[5]
        eos, bundled_model.eos_ids = bundled_model.eos_ids, frozenset({end})
        try:
            generation = engine.submit(GenerationRequest([10, 20, 30], 40, temperature=0.0))
            tokens = [token async for token in generation]
        finally:
            bundled_model.eos_ids = eos
    assert [token.id for token in tokens] == text[: text.index(end) + 1]
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert generation.finish_reason == "stop"
    stats = generation.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.outcome) == (3, len(tokens), "stop")
    assert stats.first_token_at is not None
    assert stats.finished_at is not None
    assert stats.submitted_at <= tokens[0].at == stats.first_token_at <= stats.finished_at


async def test_max_tokens_may_be_left_to_the_context(bundled_model: BackboneModel) -> None:
    async with Engine(bundled_model, EngineConfig(kv_bytes=bundled_model.kv_token_bytes * 64)) as engine:
        generation = engine.submit(GenerationRequest(list(range(3, 40)), temperature=0.0, ignore_eos=True))
        assert len([token async for token in generation]) == 64 - 37 == engine.room(37)
        assert generation.finish_reason == "length"


async def test_a_failed_dispatch_fails_only_its_own_request(bundled_model: BackboneModel) -> None:
    prompts = [[10, 11, 12], [20, 21], [30]]
    expected = await generate(bundled_model, prompts, 12)
    for with_outputs in (True, False):
        async with Engine(bundled_model, EngineConfig(drafting=False)) as engine:
            generations = [
                engine.submit(GenerationRequest(prompt, 12, temperature=0.0, ignore_eos=True))
                for prompt in prompts
            ]
            doomed = generations[1].id
            failing = Failing(
                _inner(bundled_model),
                lambda layer, key, doomed=doomed: (  # type: ignore[misc]
                    key.request == doomed and layer == 2 and key.position >= 6
                ),
                with_outputs,
            )
            with _dispatching(bundled_model, failing):
                results = await asyncio.gather(*map(_text, generations), return_exceptions=True)
            assert results[0] == expected[0]
            assert results[2] == expected[2]
            assert isinstance(results[1], DispatchFailed)
            assert results[1].window == "L01-01/E000-003"
            assert generations[1].stats.outcome == "failed"
            assert generations[1].stats.generated_tokens == 5
            assert engine.stats.finished["failed"] == 1
            assert await collect(engine, prompts[1], 12) == expected[1], "the engine goes on"
    assert bundled_model.kv_bytes == 0


async def test_a_broken_step_fails_its_requests_and_the_engine_goes_on(bundled_model: BackboneModel) -> None:
    class Broken:
        def dispatch(self, *_: Any) -> Any:
            raise RuntimeError("out of memory")

    async with Engine(bundled_model) as engine:
        with _dispatching(bundled_model, Broken()), pytest.raises(KvasirError, match="out of memory"):
            await collect(engine, [10, 11], 4)
        assert len(await collect(engine, [10, 11], 4)) == 4
    assert bundled_model.kv_bytes == 0


async def test_a_step_thread_that_crashes_leaves_nobody_waiting(
    bundled_model: BackboneModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Step:
        raise RuntimeError("a bug in the scheduler")

    async with Engine(bundled_model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "schedule", broken)
            with pytest.raises(KvasirError, match="a bug in the scheduler"):
                await collect(engine, [10, 11], 4)
        with pytest.raises(Refused):
            engine.submit(GenerationRequest([10], 4))


async def _text(generation: Any) -> list[int]:
    return [token.id async for token in generation]


async def test_a_cancelled_request_stops_and_frees_its_memory(bundled_model: BackboneModel) -> None:
    async with Engine(bundled_model, EngineConfig(outbox_tokens=4)) as engine:
        generation = engine.submit(GenerationRequest([10, 11], 1000, temperature=0.0, ignore_eos=True))
        seen = [token.id async for token in _first(generation, 3)]
        generation.cancel()
        generation.cancel()
        rest = [token.id async for token in generation]
        assert len(seen) == 3
        assert len(rest) <= 5
        assert generation.stats.outcome == "cancelled"
        with pytest.raises(KvasirError):
            _ = generation.finish_reason
        await until(lambda: engine.stats.running == 0)
        assert engine.stats.kv_blocks_free == engine.stats.kv_blocks
    assert bundled_model.kv_bytes == 0


async def _first(generation: Any, count: int) -> Any:
    async for token in generation:
        yield token
        count -= 1
        if not count:
            return


async def test_a_request_cancelled_before_it_runs_never_runs(bundled_model: BackboneModel) -> None:
    held = Held(_inner(bundled_model))
    with _dispatching(bundled_model, held):
        async with Engine(bundled_model, EngineConfig(max_running=1)) as engine:
            first = asyncio.ensure_future(collect(engine, [10, 11], 4))
            await until(held.entered.is_set)
            second = engine.submit(GenerationRequest([20], 4))
            second.cancel()
            held.gate.set()
            assert [token async for token in second] == []
            assert len(await first) == 4
            assert second.stats.steps == 0


async def test_a_client_that_does_not_read_pauses_only_itself(bundled_model: BackboneModel) -> None:
    async with Engine(bundled_model, EngineConfig(outbox_tokens=4)) as engine:
        lazy = engine.submit(GenerationRequest([10, 11], 40, temperature=0.0, ignore_eos=True))
        assert len(await collect(engine, [20, 21], 30)) == 30
        await until(lambda: lazy.stats.generated_tokens == 4)
        assert len(await collect(engine, [20, 21], 30)) == 30
        assert lazy.stats.generated_tokens == 4, "it waits for its reader"
        text = await _text(lazy)
    assert text == (await generate(bundled_model, [[10, 11]], 40))[0]


async def test_a_lazy_client_gives_its_memory_to_others(bundled_model: BackboneModel) -> None:
    tight = EngineConfig(outbox_tokens=4, kv_bytes=bundled_model.kv_token_bytes * 32 * 3)
    async with Engine(bundled_model, tight) as engine:
        lazy = engine.submit(GenerationRequest(list(range(10, 60)), 40, temperature=0.0, ignore_eos=True))
        await until(lambda: lazy.stats.generated_tokens == 4)
        assert len(await collect(engine, list(range(70, 120)), 40)) == 40
        text = await _text(lazy)
        assert lazy.stats.preemptions == 1
    assert text == (await generate(bundled_model, [list(range(10, 60))], 40))[0]


async def test_too_many_requests_are_refused(bundled_model: BackboneModel) -> None:
    held = Held(_inner(bundled_model))
    with _dispatching(bundled_model, held):
        async with Engine(bundled_model, EngineConfig(max_running=1, max_waiting=2)) as engine:
            running = asyncio.ensure_future(collect(engine, [10], 2))
            await until(held.entered.is_set)
            waiting = [asyncio.ensure_future(collect(engine, [number], 2)) for number in (20, 30)]
            await until(lambda: engine.stats.waiting == 2)
            with pytest.raises(Refused) as refusal:
                engine.submit(GenerationRequest([40], 2))
            held.gate.set()
            assert [len(text) for text in await asyncio.gather(running, *waiting)] == [2, 2, 2]
    assert refusal.value.code == "overloaded"
    assert refusal.value.retry_after_s


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (GenerationRequest([]), "empty"),
        (GenerationRequest([5000], 4), "outside 0 to 2047"),
        (GenerationRequest([-1], 4), "outside"),
        (GenerationRequest([5] * 2048, 1), "context of 2048"),
        (GenerationRequest([5] * 2000, 100), "context of 2048"),
        (GenerationRequest([5], 0), "room for one more"),
        (GenerationRequest([5] * 300, 4), "--kv-bytes"),
        (GenerationRequest([5] * 300), "--kv-bytes"),
        (GenerationRequest([5], 4, temperature=3.0), "temperature"),
        (GenerationRequest([5], 4, top_p=0.0), "top_p"),
    ],
)
async def test_bad_requests_are_refused_at_once(
    bundled_model: BackboneModel, request_: GenerationRequest, says: str
) -> None:
    async with Engine(bundled_model, EngineConfig(kv_bytes=bundled_model.kv_token_bytes * 256)) as engine:
        with pytest.raises(ConfigError, match=says):
            engine.submit(request_)
        assert engine.stats.waiting == 0


def test_a_kv_cache_too_small_for_one_block_says_so(bundled_model: BackboneModel) -> None:
    with pytest.raises(ConfigError, match=r"--kv-bytes 1000 is too small"):
        Engine(bundled_model, EngineConfig(kv_bytes=1000))


@pytest.mark.parametrize("field", ["kv_bytes", "chunk_rows", "max_running", "outbox_tokens"])
def test_bounds_are_checked(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: 0})


async def test_stopping_tells_every_request(bundled_model: BackboneModel) -> None:
    held = Held(_inner(bundled_model))
    with _dispatching(bundled_model, held):
        engine = Engine(bundled_model, EngineConfig(max_running=1))
        with pytest.raises(Refused):
            engine.submit(GenerationRequest([10], 4))
        engine.start()
        pending = [asyncio.ensure_future(collect(engine, [number], 100)) for number in (10, 20)]
        await until(held.entered.is_set)
        stopping = asyncio.ensure_future(engine.stop())
        await until(lambda: engine._stopping)
        held.gate.set()
        await stopping
        results = await asyncio.gather(*pending, return_exceptions=True)
    assert [result.code for result in results if isinstance(result, Refused)] == ["draining", "draining"]
    with pytest.raises(Refused):
        engine.submit(GenerationRequest([10], 4))
    assert bundled_model.kv_bytes == 0


async def test_a_stopped_engine_starts_again(bundled_model: BackboneModel) -> None:
    engine = Engine(bundled_model)
    for _ in range(2):
        engine.start()
        assert len(await collect(engine, [10, 11], 3)) == 3
        await engine.stop()


async def test_the_loop_stays_free_while_the_model_works(bundled_model: BackboneModel) -> None:
    async with Engine(bundled_model) as engine:
        seen: set[str] = set()
        inner = _inner(bundled_model)

        class Watch:
            def dispatch(self, *arguments: Any) -> Any:
                seen.add(threading.current_thread().name)
                return inner.dispatch(*arguments)

        with _dispatching(bundled_model, Watch()):
            await collect(engine, [10, 11], 3)
    assert seen <= {"kvasir-step-1", "kvasir-step-2"}
    assert seen


async def test_readers_on_a_closed_loop_do_not_disturb_others(bundled_model: BackboneModel) -> None:
    engine = Engine(bundled_model, EngineConfig(outbox_tokens=1000))
    engine.start()

    def elsewhere() -> None:
        async def leave() -> None:
            engine.submit(GenerationRequest([10, 11], 60, temperature=0.0, ignore_eos=True))

        asyncio.run(leave())

    try:
        await asyncio.to_thread(elsewhere)
        gc.collect()
        assert len(await collect(engine, [20, 21], 20)) == 20
        await until(lambda: engine.stats.running == 0)
    finally:
        await engine.stop()


class _Split(StepPace):
    """As many micro-batches as there are threads, whatever steps cost."""

    def split(self, ready: int, threads: int) -> int:
        return max(1, min(ready, threads))


@dataclass
class _HeldFor:
    """Holds the calls that carry rows of `request` until `gate` is set; `entered`: one of them waits."""

    inner: Dispatcher
    request: int = -1
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def dispatch(self, layer: int, rows: Any, ids: Any, keys: Any, deadline_s: float) -> Any:
        if any(key.request == self.request for key in keys):
            self.entered.set()
            assert self.gate.wait(30), "the test never opened the gate"
        return self.inner.dispatch(layer, rows, ids, keys, deadline_s)


@pytest.mark.parametrize("threads", [2, 3])
async def test_a_text_does_not_depend_on_step_threads(
    bundled_model: BackboneModel, prompts: list[list[int]], threads: int
) -> None:
    expected = await generate(bundled_model, prompts, 12, EngineConfig(step_threads=1))
    blocks = -(-(max(map(len, prompts)) + 12) // 32) + 1
    for kv_bytes in (1 << 28, bundled_model.kv_token_bytes * 32 * blocks):
        config = EngineConfig(step_threads=threads, kv_bytes=kv_bytes)
        async with Engine(bundled_model, config, pace=_Split()) as engine:
            texts = await asyncio.gather(*(collect(engine, prompt, 12) for prompt in prompts))
            assert engine.stats.kv_blocks_free == engine.stats.kv_blocks
        assert texts == expected
    assert bundled_model.kv_bytes == 0


async def test_tokens_are_handed_over_before_the_next_step_may_begin(bundled_model: BackboneModel) -> None:
    """Two threads may take turns with one request: only the lock keeps its tokens in order."""
    free: list[object] = []

    class Watched(Engine):
        def _hand_over(self, deliveries: Any) -> None:
            free.extend(each for each in deliveries if each[1] is not None and not self._lock._is_owned())  # type: ignore[attr-defined]
            super()._hand_over(deliveries)

    async with Watched(bundled_model, pace=_Split()) as engine:
        await asyncio.gather(collect(engine, [10, 11], 6), collect(engine, [20], 6))
    assert free == []


async def test_one_thread_computes_while_another_waits(bundled_model: BackboneModel) -> None:
    held = _HeldFor(_inner(bundled_model))
    with _dispatching(bundled_model, held):
        async with Engine(bundled_model, pace=_Split()) as engine:
            slow = engine.submit(GenerationRequest([10, 11], 4, temperature=0.0, ignore_eos=True))
            held.request = slow.id
            await until(held.entered.is_set)
            assert len(await collect(engine, [20, 21], 6)) == 6
            assert slow.stats.generated_tokens == 0
            held.gate.set()
            assert len(await _text(slow)) == 4


async def test_a_request_cancelled_in_flight_ends_with_its_step(bundled_model: BackboneModel) -> None:
    held = _HeldFor(_inner(bundled_model))
    with _dispatching(bundled_model, held):
        async with Engine(bundled_model, pace=_Split()) as engine:
            doomed = engine.submit(GenerationRequest([10, 11], 40, temperature=0.0, ignore_eos=True))
            held.request = doomed.id
            await until(held.entered.is_set)
            doomed.cancel()
            assert len(await collect(engine, [20, 21], 6)) == 6
            assert engine.stats.running == 1, "its thread still uses its memory"
            held.gate.set()
            assert await _text(doomed) == []
            assert doomed.stats.outcome == "cancelled"
            assert engine.stats.kv_blocks_free == engine.stats.kv_blocks
    assert bundled_model.kv_bytes == 0


async def test_a_crash_fails_those_in_flight_elsewhere_when_their_step_ends(
    bundled_model: BackboneModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _HeldFor(_inner(bundled_model))

    def broken(*_: Any) -> Step:
        raise RuntimeError("a bug in the scheduler")

    with _dispatching(bundled_model, held):
        async with Engine(bundled_model, pace=_Split()) as engine:
            slow = engine.submit(GenerationRequest([10, 11], 4, temperature=0.0))
            held.request = slow.id
            await until(held.entered.is_set)
            with monkeypatch.context() as patch:
                patch.setattr(Scheduler, "schedule", broken)
                with pytest.raises(KvasirError, match="a bug in the scheduler"):
                    await collect(engine, [20, 21], 6)
                held.gate.set()
                with pytest.raises(KvasirError, match="a bug in the scheduler"):
                    await _text(slow)
            assert engine.stats.running == 0
    assert bundled_model.kv_bytes == 0


async def test_stopping_waits_for_every_thread(bundled_model: BackboneModel) -> None:
    held = Held(_inner(bundled_model))
    with _dispatching(bundled_model, held):
        engine = Engine(bundled_model, pace=_Split())
        engine.start()
        first = asyncio.ensure_future(collect(engine, [10], 50))
        await until(held.entered.is_set)
        second = asyncio.ensure_future(collect(engine, [20], 50))
        stopping = asyncio.ensure_future(engine.stop())
        await until(lambda: engine._stopping)
        assert not stopping.done()
        held.gate.set()
        await stopping
        results = await asyncio.gather(first, second, return_exceptions=True)
    assert [result.code for result in results if isinstance(result, Refused)] == ["draining", "draining"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvasir-step")]

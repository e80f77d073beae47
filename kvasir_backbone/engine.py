"""The step loop: requests in, tokens out.

Step threads run the model; the event loop submits requests and reads their tokens. Between the two lie one
inbox for the threads and one bounded outbox a request: a client that stops reading pauses its own request
and no other. A failed dispatch fails only the requests whose rows it carried.

Each thread takes a micro-batch of the requests that no other has in flight, so that one computes while
another waits for experts; `microbatches.py` says how many of them pay. A request in flight belongs to its
thread: whoever cancels it only leaves word.

Knows the scheduler, the model's `forward` and the sampler. Knows no HTTP, no text and no owners.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from relay.errors import KvasirError, Refused

from .drafting import Drafting, Speculation, StepCost
from .engine_state import (
    Counters,
    Delivery,
    EngineConfig,
    EngineStats,
    Model,
    RequestState,
    check_prompt,
    hand_over,
    scheduling,
)
from .generation import Generation, GenerationRequest, Outcome, RequestStats, Token
from .microbatches import StepPace, share
from .sampling import Sampler
from .scheduler import Scheduler, Segment, Step

if TYPE_CHECKING:
    from .model import StepResult, Work

__all__ = ["Engine", "EngineConfig", "EngineStats", "Generation", "GenerationRequest", "Model", "Token"]

_log = structlog.get_logger("backbone")

IDLE_S: Final = 0.05
"""How long a step thread waits where requests exist and none can go on, seconds."""
SPARE_S: Final = 1.0
"""How often a step thread looks around that was not woken, seconds."""


class Engine:
    """Several requests at once over one model. `start`, `submit`, `stop`; or as an async context manager.

    `clock` gives monotonic seconds, `draw_seed` the seed of a sampled request without one; `pace` decides
    into how many micro-batches the running requests are split, `drafting` what is drafted.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        pace: StepPace | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model
        self._clock = clock
        self._draw_seed = draw_seed
        self._scheduler = Scheduler(scheduling(self.config, model))
        self._states: dict[int, RequestState] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Condition()
        self._arrived: deque[RequestState] = deque()
        self._cancelled: deque[int] = deque()
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._stopping = False
        self._crash: KvasirError | None = None
        self._in_flight = 0
        self._pace = pace or StepPace()
        self._drafting: Drafting | None = None
        if self.config.drafting and model.packed:
            self._drafting = drafting or Drafting(StepCost(*model.routed))
        self._counters = Counters()

    async def __aenter__(self) -> Engine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Start the step threads."""
        assert not self._threads, "the engine runs already"
        self._stopping, self._crash = False, None
        count = self.config.step_threads if self.model.packed else 1
        self._threads = [
            threading.Thread(target=self._run, name=f"kvasir-step-{number}", daemon=True)
            for number in range(1, count + 1)
        ]
        self._alive, self._in_flight = count, 0
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """End every request with `Refused("draining")` after the steps that run, and join the threads."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        threads, self._threads = self._threads, []
        for thread in threads:
            await asyncio.to_thread(thread.join)

    def room(self, prompt_tokens: int) -> int:
        """How many tokens may follow a prompt of that length; 0 or less: it is too long."""
        return min(self.model.context_length, self._scheduler.capacity()) - prompt_tokens

    def submit(self, request: GenerationRequest) -> Generation:
        """Take a request in; its tokens are read on the running loop.

        Raises `ConfigError` for a prompt that is empty, too long for the context or the KV cache, or holds
        ids that the model does not have, and for bad sampling values; `Refused("overloaded")` when too many
        wait, `Refused("draining")` when the engine does not run.
        """
        prompt = list(request.prompt_ids)
        max_tokens = self._max_tokens(request, prompt)
        sampler = Sampler(
            request.temperature,
            request.top_p,
            self._draw_seed() if request.seed is None else request.seed,
            request.choice,
        )
        generation = Generation(next(self._ids), request, self, asyncio.get_running_loop())
        state = RequestState(generation, prompt, len(prompt), max_tokens, sampler, self._clock())
        if self._drafting is not None:
            state.speculation = self._drafting.begin(prompt)
        with self._lock:
            if not self._threads or self._stopping:
                raise Refused("draining", "the engine is not running")
            waiting = self._scheduler.waiting + len(self._arrived)
            if waiting >= self.config.max_waiting:
                message = f"{waiting} requests are waiting already; try again in a moment"
                raise Refused("overloaded", message, retry_after_s=1.0)
            self._states[generation.id] = state
            self._arrived.append(state)
            self._lock.notify()
        return generation

    @property
    def stats(self) -> EngineStats:
        """The engine's figures now."""
        with self._lock:
            counters, scheduler, drafting = self._counters, self._scheduler, self._drafting
            return EngineStats(
                running=scheduler.running,
                waiting=scheduler.waiting + len(self._arrived),
                steps=counters.steps,
                rows=counters.rows,
                generated_tokens=counters.tokens,
                finished=dict(counters.finished),
                preemptions=counters.preemptions,
                kv_blocks=scheduler.config.total_blocks,
                kv_blocks_free=scheduler.free_blocks,
                step_s=counters.step_s,
                step_threads=self._alive,
                micro_batches=min(self._pace.batches, self.config.step_threads),
                trips=counters.trips,
                drafted=0 if drafting is None else drafting.drafted,
                accepted=0 if drafting is None else drafting.accepted,
                tokens_per_trip=counters.tokens / counters.trips if counters.trips else 0.0,
            )

    # --- called by generations ---------------------------------------------------------------------------

    def cancel(self, request: int) -> None:
        """See `Owner.cancel`."""
        with self._lock:
            if request in self._states:
                self._cancelled.append(request)
                self._lock.notify()

    def consumed(self, request: int) -> None:
        """See `Owner.consumed`."""
        with self._lock:
            state = self._states.get(request)
            if state is not None:
                state.unread -= 1
                if state.unread == self.config.outbox_tokens // 2:
                    self._scheduler.pause(request, False)
                    self._lock.notify()

    def request_stats(self, generation: Generation) -> RequestStats:
        """See `Owner.request_stats`."""
        with self._lock:
            state = self._states.get(generation.id)
            stats = generation.final if state is None else state.stats
        assert stats is not None
        return stats

    # --- the step threads --------------------------------------------------------------------------------

    def _run(self) -> None:
        step: Step | None = None
        try:
            while (step := self._next_step()) is not None:
                self._compute(step)
        except Exception as fault:  # our own bug: nobody may wait for ever for a thread that is gone
            _log.error("engine.crashed", reason=str(fault), trace="".join(traceback.format_exception(fault)))
            self._crash = KvasirError(f"the engine failed: {fault}: restart the backbone")
        self._leave(() if step is None else step.segments)

    def _leave(self, segments: Sequence[Segment]) -> None:
        """A thread ends, and the engine with it: every request but those in flight elsewhere ends now."""
        mine = {segment.request for segment in segments}
        with self._lock:
            self._stopping = True
            self._alive -= 1
            self._arrived.clear()
            ended = [
                state
                for number, state in self._states.items()
                if not self._alive or number in mine or not self._scheduler.in_flight(number)
            ]
            error = self._crash or Refused("draining", "the backbone is shutting down")
            deliveries = [self._end_anyway(state, error) for state in ended]
            self._lock.notify_all()
        self._hand_over(deliveries)

    def _next_step(self) -> Step | None:
        """The next micro-batch for this thread, waiting while there is none; None once the engine stops."""
        with self._lock:
            while True:
                self._take_in()
                if self._stopping:
                    return None
                step = self._schedule()
                if step is not None:
                    return step
                stuck = not self._in_flight and self._runnable()
                self._lock.wait(IDLE_S if stuck else SPARE_S)

    def _take_in(self) -> None:
        """Give the scheduler what arrived, and end what was cancelled. The lock is held."""
        while self._arrived:
            state = self._arrived.popleft()
            self._scheduler.add(state.generation.id, state.prompt)
        ended = []
        for number in dict.fromkeys(self._cancelled):
            state_or_none = self._states.get(number)
            if state_or_none is not None and self._scheduler.in_flight(number):
                state_or_none.cancelled = True  # the thread that computes it ends it
            elif state_or_none is not None:
                ended.append(self._end(state_or_none, "cancelled", None))
        self._cancelled.clear()
        self._hand_over(ended)

    def _schedule(self) -> Step | None:
        """A step of what no thread computes now, if one more micro-batch pays. The lock is held."""
        scheduler = self._scheduler
        room = self.config.max_running - scheduler.running
        batches = self._pace.split(scheduler.ready + min(scheduler.waiting, room), self._alive)
        if self._in_flight >= batches:
            return None
        step = scheduler.schedule(
            share(scheduler.ready, batches), None if self._drafting is None else self._draft
        )
        for request in step.preempted:
            self._states[request].preemptions += 1
            self.model.release(request)  # before anyone else may compute it again
        self._counters.preemptions += len(step.preempted)
        if not step.segments:
            return None
        self._in_flight += 1
        if self._in_flight < batches and (scheduler.idle or scheduler.waiting):
            self._lock.notify()
        return step

    def _draft(self, requests: Sequence[int], rows: int) -> Mapping[int, int]:
        """See `DraftRule`: how many drafted rows each of these requests carries. The lock is held."""
        assert self._drafting is not None
        offers: dict[int, tuple[Speculation, int]] = {}
        for request in requests:
            state = self._states[request]
            if state.speculation is not None and state.speculation.draft:
                # None beyond the last token, and none that the reader has no room for.
                left = min(state.max_tokens - state.generated, self.config.outbox_tokens - state.unread) - 1
                offers[request] = (state.speculation, min(len(state.speculation.draft), left))
        return self._drafting.choose(offers, len(requests), rows) if offers else {}

    def _runnable(self) -> bool:
        return any(state.unread < self.config.outbox_tokens for state in self._states.values())

    def _compute(self, step: Step) -> None:
        started, busy = self._clock(), time.thread_time()
        result: StepResult | None = None
        works = [self._work(segment) for segment in step.segments]
        try:
            result = self.model.forward(works)
        except Exception as fault:  # the boundary of one step: its requests fail, the engine goes on
            self._hand_over(self._failed(step.segments, fault))
        else:
            self._take_results(step.segments, result)
        seconds = self._clock() - started
        with self._lock:
            self._in_flight -= 1
            self._counters.steps += 1
            self._counters.rows += step.rows
            self._counters.step_s += seconds
            if result is not None:
                self._pace.observe(time.thread_time() - busy, result.waited_s)
            decoded = result is not None and all(segment.decodes for segment in step.segments)
            if self._drafting is not None and decoded:
                self._drafting.cost.observe(step.rows, seconds)

    def _failed(self, segments: Sequence[Segment], fault: Exception) -> list[Delivery]:
        """End every request of a step that broke, whatever broke it."""
        if isinstance(fault, KvasirError):
            error = fault
            _log.warning("step.failed", requests=len(segments), reason=str(fault))
        else:
            error = KvasirError(f"the model could not compute this step: {fault}")
            # As text: a renderer that prints locals would print what people wrote.
            trace = traceback.format_exception(fault)
            _log.error("step.failed", requests=len(segments), reason=str(fault), trace="".join(trace))
        return [self._end(self._states[segment.request], "failed", error) for segment in segments]

    def _work(self, segment: Segment) -> Work:
        from .model import Work

        state = self._states[segment.request]
        state.steps += 1
        tokens = state.tokens[segment.start : segment.end - segment.drafts]
        if segment.drafts:
            assert state.speculation is not None
            tokens += state.speculation.draft[: segment.drafts]
        return Work(segment, tokens, state.generation.request.metered)

    def _take_results(self, segments: Sequence[Segment], result: StepResult) -> None:
        """Sample where a segment samples; end what failed, was cancelled or is complete.

        Tokens are handed over before another thread may compute the next ones: they keep their order.
        """
        sampled = [self._sample(segment, result) for segment in segments]
        with self._lock:
            settled = map(self._settle, segments, sampled)
            self._hand_over(list(itertools.chain.from_iterable(settled)))

    def _sample(self, segment: Segment, result: StepResult) -> list[int] | KvasirError:
        """The new tokens that a segment gave, or why its request failed.

        After each drafted token that is the one sampled in its place, the next row counts as well.
        """
        failure = result.failures.get(segment.request)
        if failure is not None:
            return failure
        state = self._states[segment.request]
        speculation = state.speculation
        made: list[int] = []
        for place, logits in enumerate(result.logits.get(segment.request, ())):
            try:
                made.append(state.sampler.sample(logits, state.generated + place))
            except FloatingPointError as error:
                return KvasirError(f"{error}: the model or an expert's weights are damaged")
            if state.finish(made, self.model.eos_ids) is not None:
                break
            if place < segment.drafts and speculation is not None and made[-1] != speculation.draft[place]:
                break
        if made and speculation is not None:
            assert self._drafting is not None
            with self._lock:
                self._drafting.learn(speculation, segment.drafts, len(made) - 1)
            speculation.extend(made)
        return made

    def _settle(self, segment: Segment, sampled: list[int] | KvasirError) -> list[Delivery]:
        """What a computed segment means for its request. The lock is held."""
        state = self._states[segment.request]
        if isinstance(sampled, KvasirError):
            return [self._end(state, "failed", sampled)]
        if state.cancelled:
            return [self._end(state, "cancelled", None)]
        rejected = segment.drafts - len(sampled) + 1 if segment.drafts else 0
        self._scheduler.advance([segment], {segment.request: rejected})
        if rejected:
            self.model.trim(segment.request, segment.end - rejected)
        if sampled:
            state.trips += 1
            state.drafted += segment.drafts
            state.accepted += len(sampled) - 1
            self._counters.trips += 1
        return [self._append(state, token) for token in sampled]

    def _append(self, state: RequestState, id: int) -> Delivery:
        """Note one new token; end the request where it is the last. The lock is held."""
        now = self._clock()
        token = Token(id, state.generated, now)
        state.tokens.append(id)
        state.first_token_at = state.first_token_at or now
        self._counters.tokens += 1
        state.unread += 1
        finish = state.finish((), self.model.eos_ids)
        if finish is not None:
            self._end(state, finish, None)
            return (state.generation, token, True, finish, None)
        self._scheduler.append(state.generation.id)
        if state.unread >= self.config.outbox_tokens:
            self._scheduler.pause(state.generation.id, True)
        return (state.generation, token, False, None, None)

    def _end(self, state: RequestState, outcome: Outcome, error: BaseException | None) -> Delivery:
        """Forget a request everywhere; what is left is to tell its reader."""
        number = state.generation.id
        state.outcome, state.finished_at = outcome, self._clock()
        with self._lock:
            self._states.pop(number, None)
            state.generation.final = state.stats
            self._scheduler.finish(number)
            self._counters.finished[outcome] += 1
        self.model.forget(number)
        return (state.generation, None, True, None, error)

    def _end_anyway(self, state: RequestState, error: KvasirError) -> Delivery:
        """End a request of an engine that may have crashed: its reader hears of it, whatever is broken."""
        try:
            return self._end(state, "failed", error)
        except Exception as fault:
            _log.error("engine.crashed", reason=str(fault), trace="".join(traceback.format_exception(fault)))
            return (state.generation, None, True, None, error)

    def _hand_over(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the readers."""
        hand_over(deliveries)

    # --- checks ------------------------------------------------------------------------------------------

    def _max_tokens(self, request: GenerationRequest, prompt: Collection[int]) -> int:
        check_prompt(request, prompt, self.model)
        wanted = request.max_tokens
        if wanted is None:
            wanted = max(1, self.room(len(prompt)))
        self._scheduler.check(len(prompt), wanted)
        return wanted

"""What an engine and its requests are made of: bounds, figures, a request's state, what its reader is told.

Knows generations, samplers and guesses. Knows no threads, no scheduler and no steps; those are `engine`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import structlog

from relay.errors import ConfigError

from .drafting import Speculation
from .generation import FinishReason, Generation, GenerationRequest, Outcome, RequestStats, Token
from .sampling import Sampler
from .scheduler import SchedulerConfig

if TYPE_CHECKING:
    from .model import StepResult, Work

_log = structlog.get_logger("backbone")


class Model(Protocol):
    """What the engine needs of a model; `BackboneModel` is one."""

    packed: bool
    chunked: bool
    kv_token_bytes: int
    state_bytes: int
    context_length: int
    vocabulary: int
    eos_ids: frozenset[int]
    routed: tuple[int, int]

    def forward(self, works: Sequence[Work]) -> StepResult:
        """Compute these segments."""
        ...

    def release(self, request: int) -> None:
        """Free a request's keys and values."""
        ...

    def trim(self, request: int, positions: int) -> None:
        """Forget what was noted of a request beyond its first `positions`: rejected drafts."""
        ...

    def forget(self, request: int) -> object:
        """Free everything of a request. What it returns is not looked at."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The bounds of an engine."""

    kv_bytes: int = 1 << 30
    """Bytes that the keys and values of all requests together may take."""
    block_tokens: int = 32
    """Positions a KV block holds."""
    chunk_rows: int = 128
    """Rows of a prefill chunk. Part of the numerics: another value gives other last bits."""
    step_rows: int = 512
    """Rows of a step over which no further prefill chunk is added."""
    step_threads: int = 2
    """Threads that compute steps. Models whose requests cannot share a pass use one: its passes run side
    by side by themselves."""
    max_running: int = 256
    """Requests computed at one time, as far as the KV cache holds them."""
    max_waiting: int = 256
    """Requests waiting for that; one more is refused."""
    outbox_tokens: int = 256
    """Tokens that a client may leave unread before its request pauses."""
    drafting: bool = True
    """Guess coming tokens where that pays. Only models whose requests share a pass: in the others a row's
    last bits depend on how many rows are computed with it, and drafts would show in the text."""

    def __post_init__(self) -> None:
        bounds = ("kv_bytes", "block_tokens", "chunk_rows", "step_rows")
        for name in (*bounds, "step_threads", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.outbox_tokens < 2:
            raise ConfigError("outbox_tokens must be at least 2")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's figures since it started."""

    running: int
    waiting: int
    steps: int
    rows: int
    generated_tokens: int
    finished: Mapping[str, int]
    preemptions: int
    kv_blocks: int
    kv_blocks_free: int
    step_s: float
    step_threads: int
    micro_batches: int
    """Into how many the running requests are split now."""
    trips: int
    """Steps of a request that gave it tokens, over all requests."""
    drafted: int
    """Drafted tokens that were computed."""
    accepted: int
    """Those of them that stood."""
    tokens_per_trip: float
    """Tokens that a step gave to a request on average; 1 without drafting."""


@dataclass(slots=True)
class RequestState:
    """A request as the step threads see it. Tokens include the prompt's; times are monotonic seconds."""

    generation: Generation
    tokens: list[int]
    prompt: int
    max_tokens: int
    sampler: Sampler
    submitted_at: float
    unread: int = 0
    cancelled: bool = False
    speculation: Speculation | None = None
    trips: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    preemptions: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None
    outcome: Outcome | None = None

    @property
    def generated(self) -> int:
        """How many tokens it has got so far."""
        return len(self.tokens) - self.prompt

    def finish(self, more: Sequence[int], eos_ids: Collection[int]) -> FinishReason | None:
        """Whether the newest token is the last, and why; `more` are tokens that are not yet noted."""
        newest = more[-1] if more else self.tokens[-1]
        if newest in eos_ids and not self.generation.request.ignore_eos:
            return "stop"
        return "length" if self.generated + len(more) >= self.max_tokens else None

    @property
    def stats(self) -> RequestStats:
        """Its figures so far."""
        return RequestStats(
            prompt_tokens=self.prompt,
            generated_tokens=self.generated,
            submitted_at=self.submitted_at,
            first_token_at=self.first_token_at,
            finished_at=self.finished_at,
            steps=self.steps,
            preemptions=self.preemptions,
            outcome=self.outcome,
            trips=self.trips,
            drafted=self.drafted,
            accepted=self.accepted,
        )


@dataclass(slots=True)
class Counters:
    """What an engine counts."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    trips: int = 0
    preemptions: int = 0
    step_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(
        ("stop", "length", "cancelled", "failed"), 0
    ))  # fmt: skip


Delivery = tuple[Generation, Token | None, bool, FinishReason | None, BaseException | None]
"""What a reader gets: its generation, a token, whether it is the end, why, or an error."""


def hand_over(deliveries: Sequence[Delivery]) -> None:
    """Wake every loop once with all it has to hear of. May be called from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for delivery in deliveries:
        by_loop.setdefault(delivery[0].loop, []).append(delivery)
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_all, mine)
        except RuntimeError:  # the loop is closed, and its readers with it
            _log.debug("loop.closed", requests=len(mine))


def _deliver_all(deliveries: Sequence[Delivery]) -> None:
    for generation, token, ended, finish, error in deliveries:
        generation.deliver(token, ended, finish, error)


def scheduling(config: EngineConfig, model: Model) -> SchedulerConfig:
    """The scheduler's bounds for a model. Raises `ConfigError` if `kv_bytes` holds no request."""
    block = config.block_tokens * model.kv_token_bytes
    state_blocks = -(-model.state_bytes // block)  # what a request keeps beside its positions
    least = block * (1 + state_blocks)
    if config.kv_bytes < least:
        raise ConfigError(
            f"--kv-bytes {config.kv_bytes} is too small for this model: one request of "
            f"{config.block_tokens} positions takes {least} bytes"
        )
    return SchedulerConfig(
        total_blocks=config.kv_bytes // block,
        state_blocks=state_blocks,
        block_tokens=config.block_tokens,
        chunk_rows=config.chunk_rows if model.chunked else model.context_length,
        rowwise_rows=config.chunk_rows if model.packed else 1,
        step_rows=max(config.step_rows, config.max_running),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
    )


def check_prompt(request: GenerationRequest, prompt: Collection[int], model: Model) -> None:
    """Raise `ConfigError` for a prompt that the model cannot take."""
    if not prompt:
        raise ConfigError("the prompt is empty")
    if not all(0 <= token < model.vocabulary for token in prompt):
        raise ConfigError(f"the prompt holds token ids outside 0 to {model.vocabulary - 1}")
    context = model.context_length
    if len(prompt) + (request.max_tokens or 1) > context:
        raise ConfigError(
            f"{len(prompt)} prompt tokens and {request.max_tokens or 1} new ones are more than the "
            f"model's context of {context}: shorten the prompt or ask for fewer tokens"
        )

"""A request as its reader sees it: what was asked, the tokens as they come, and the figures.

Knows one event loop and one request. Knows no model, no scheduler and no threads but that others deliver.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from relay.errors import KvasirError

FinishReason = Literal["stop", "length"]
Outcome = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. `max_tokens` None: as many as context and KV cache have room for.

    `temperature` 0 is greedy; `seed` None draws one. `choice` tells several completions of one prompt apart.
    `ignore_eos` goes on after an end-of-text token. `metered`: the demand is paid for.
    """

    prompt_ids: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    choice: int = 0
    ignore_eos: bool = False
    metered: bool = True


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: its id, its place (0 for the first), when it was sampled (monotonic seconds)."""

    id: int
    index: int
    at: float


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request's figures so far. Times are monotonic seconds.

    A trip is a step that gave the request tokens: `generated_tokens / trips` of them on average.
    """

    prompt_tokens: int
    generated_tokens: int
    submitted_at: float
    first_token_at: float | None
    finished_at: float | None
    steps: int
    preemptions: int
    outcome: Outcome | None
    trips: int = 0
    drafted: int = 0
    accepted: int = 0


class Owner(Protocol):
    """What a generation asks of its engine; every method may be called from any thread."""

    def cancel(self, request: int) -> None:
        """Give a request up; unknown ones are ignored."""
        ...

    def consumed(self, request: int) -> None:
        """The reader took one token."""
        ...

    def request_stats(self, generation: Generation) -> RequestStats:
        """The figures of a request."""
        ...


class Generation:
    """A submitted request: an async iterator over its tokens, to be read by one task of its loop.

    After the last token `finish_reason` says why it was the last. The iteration raises the `KvasirError`
    that ended a failed request, and `Refused("draining")` where the engine stopped first.
    """

    def __init__(
        self, id: int, request: GenerationRequest, engine: Owner, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.id = id
        self.request = request
        self._engine = engine
        self.loop = loop
        self._tokens: deque[Token] = deque()
        self._ready = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._finish: FinishReason | None = None
        self.final: RequestStats | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """ "stop" after an end-of-text token, "length" after `max_tokens`."""
        if self._finish is None:
            raise KvasirError("the request has not ended by itself")
        return self._finish

    @property
    def stats(self) -> RequestStats:
        """The request's figures; final once the iteration ended."""
        return self.final or self._engine.request_stats(self)

    def cancel(self) -> None:
        """Give the request up: no more tokens come. Without effect once it ended. From any thread."""
        self._engine.cancel(self.id)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Token:
        while not self._tokens:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        token = self._tokens.popleft()
        self._engine.consumed(self.id)
        return token

    def deliver(
        self, token: Token | None, ended: bool, finish: FinishReason | None, error: BaseException | None
    ) -> None:
        """Runs on the loop: what the step thread had for this request."""
        if token is not None:
            self._tokens.append(token)
        if ended:
            self._ended, self._finish, self._error = True, finish, error
        self._ready.set()

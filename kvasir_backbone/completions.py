"""One API request as the engine sees it: its choices run side by side, their text comes out in pieces.

Knows the engine's front door and how tokens become text. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .engine import Generation, GenerationRequest
from .openai_types import FinishReason
from .streamtext import Decoder, TextStream

QUEUE_PIECES = 64
"""Pieces waiting for a slow client before its choices are no longer read from the engine."""


class FrontDoor(Protocol):
    """What the API needs of an engine; `Engine` is one."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Take a request in. Raises `Refused("overloaded")` where there is no room for it now."""
        ...

    def room(self, prompt_tokens: int) -> int:
        """How many tokens may follow a prompt of that length; 0 or less: it is too long."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice (may be empty), the ids behind it, and why the choice ended if it did."""

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


Deliver = Callable[[Sequence[Piece]], Awaitable[None]]
"""Takes the pieces that are ready; an empty sequence is a tick, sent while no token comes."""


async def run_choices(
    engine: FrontDoor,
    decode: Decoder,
    requests: Sequence[GenerationRequest],
    stops: Sequence[str],
    deliver: Deliver,
    *,
    tick_s: float,
    heard: Callable[[float | None], None] = lambda gap_s: None,
    each_token: bool = False,
) -> None:
    """Run all `requests` to their ends, handing every piece to `deliver`, choices interleaved as they come.

    `heard` is told of every token: the seconds since the choice's token before, None for its first. With
    `each_token` a token is handed on even while its text is held back (part of a character or stop string).

    Ends early with the first failure of a choice or of `deliver`; whatever way it ends, nothing is left
    running in the engine. Raises `KvasirError` from the engine, and whatever `deliver` raises.
    """
    queue: asyncio.Queue[Piece] = asyncio.Queue(QUEUE_PIECES)
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(engine.submit(request))
        async with asyncio.TaskGroup() as tasks:
            for index, generation in enumerate(generations):
                tasks.create_task(
                    _pump(index, generation, TextStream(decode, stops), queue, heard, each_token)
                )
            await _deliver_all(queue, len(generations), deliver, tick_s)
    except BaseExceptionGroup as group:
        raise _first_leaf(group) from None
    finally:
        for generation in generations:
            generation.cancel()


async def _pump(
    index: int,
    generation: Generation,
    text: TextStream,
    queue: asyncio.Queue[Piece],
    heard: Callable[[float | None], None],
    each_token: bool,
) -> None:
    """One choice: tokens -> pieces, up to its end or its stop string."""
    tokens: list[int] = []
    last_at: float | None = None
    async for token in generation:
        heard(None if last_at is None else token.at - last_at)
        last_at = token.at
        tokens.append(token.id)
        shown = text.feed(token.id)
        if text.stopped:
            await queue.put(Piece(index, shown, tuple(tokens), "stop"))
            return
        if shown or each_token:
            await queue.put(Piece(index, shown, tuple(tokens)))
            tokens.clear()
    rest = text.finish()
    reason = "stop" if text.stopped else generation.finish_reason
    await queue.put(Piece(index, rest, tuple(tokens), reason))


async def _deliver_all(queue: asyncio.Queue[Piece], choices: int, deliver: Deliver, tick_s: float) -> None:
    while choices:
        pieces = await _next_pieces(queue, tick_s)
        choices -= sum(piece.finish_reason is not None for piece in pieces)
        await deliver(pieces)


async def _next_pieces(queue: asyncio.Queue[Piece], tick_s: float) -> list[Piece]:
    """All pieces that are ready, waiting up to `tick_s` seconds for the first."""
    pieces: list[Piece] = []
    try:
        async with asyncio.timeout(tick_s):
            pieces.append(await queue.get())
    except TimeoutError:
        return pieces
    while not queue.empty():
        pieces.append(queue.get_nowait())
    return pieces


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

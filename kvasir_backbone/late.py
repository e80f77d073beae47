"""The API while the model loads: the port answers, and says that it is too early.

Stands in for engine and prompter until `set` is called. Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.errors import Unreachable

from .completions import FrontDoor
from .engine import Generation, GenerationRequest
from .openai_types import Message
from .prompting import Prompter


class LateEngine:
    """A `FrontDoor` that opens when the engine is there."""

    def __init__(self) -> None:
        self._engine: FrontDoor | None = None

    def set(self, engine: FrontDoor) -> None:
        """From now on, requests go to `engine`."""
        self._engine = engine

    def submit(self, request: GenerationRequest) -> Generation:
        """See `FrontDoor.submit`. Raises `Unreachable` while the model loads."""
        if self._engine is None:
            raise _too_early()
        return self._engine.submit(request)

    def room(self, prompt_tokens: int) -> int:
        """See `FrontDoor.room`. Raises `Unreachable` while the model loads."""
        if self._engine is None:
            raise _too_early()
        return self._engine.room(prompt_tokens)


class LatePrompter(Prompter):
    """A `Prompter` that works when the tokenizer is there; raises `Unreachable` until then."""

    def __init__(self) -> None:
        self._real: Prompter | None = None

    def set(self, prompter: Prompter) -> None:
        """From now on, texts go to `prompter`."""
        self._real = prompter

    def _get(self) -> Prompter:
        if self._real is None:
            raise _too_early()
        return self._real

    def decode(self, ids: Sequence[int]) -> str:
        """See `Prompter.decode`."""
        return self._get().decode(ids)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See `Prompter.encode_chat`."""
        return self._get().encode_chat(messages)

    def encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """See `Prompter.encode_prompt`."""
        return self._get().encode_prompt(prompt)


def _too_early() -> Unreachable:
    return Unreachable("the model is still loading: ask again in a few seconds")

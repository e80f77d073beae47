"""Text from an engine in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvasir_backbone.engine import Engine, EngineConfig, GenerationRequest, Model


async def collect(engine: Engine, prompt: Sequence[int], max_tokens: int, **arguments: Any) -> list[int]:
    """The token ids of one request, greedy unless said otherwise."""
    arguments = {"temperature": 0.0, "ignore_eos": True, **arguments}
    request = GenerationRequest(prompt_ids=prompt, max_tokens=max_tokens, **arguments)
    return [token.id async for token in engine.submit(request)]


async def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    config: EngineConfig | None = None,
    **arguments: Any,
) -> list[list[int]]:
    """The token ids of several requests at once."""
    async with Engine(model, config) as engine:
        return await asyncio.gather(*(collect(engine, prompt, max_tokens, **arguments) for prompt in prompts))

"""The bundled model behind the real API: an engine with local experts, aiohttp, the official client."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import openai
import torch
from aiohttp import web

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.engine import Engine, EngineConfig
from kvasir_backbone.gateway import Gateway, GatewayConfig
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.prompting import Prompter
from kvasir_backbone.seam import Dispatcher

MODEL = "kvasir-tiny"


@functools.cache
def local_model() -> tuple[BackboneModel, LocalExperts]:
    """The bundled model in fp32 and its experts from disk, loaded once a process."""
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(bundled_model_path())
    plan = checkpoint.make_plan(window_bytes=10**7, wire_dtype="float32")
    experts = LocalExperts(checkpoint.read, plan)
    return BackboneModel.load(checkpoint, dtype="float32"), experts


@dataclass(frozen=True, slots=True)
class Api:
    """A running API: its base URL, its parts, and an `openai` client that does not try again by itself."""

    url: str
    gateway: Gateway
    engine: Engine
    client: openai.AsyncOpenAI


@asynccontextmanager
async def running_api(
    *,
    dispatcher: Dispatcher | None = None,
    engine_config: EngineConfig | None = None,
    **settings: object,
) -> AsyncIterator[Api]:
    """Serve the bundled model; `settings` are those of `GatewayConfig`."""
    model, experts = local_model()
    model.dispatcher = dispatcher or experts
    config = GatewayConfig(model=MODEL, created=1, **settings)  # type: ignore[arg-type]
    async with Engine(model, engine_config or EngineConfig(kv_bytes=32 * 2**20)) as engine:
        gateway = Gateway(config, engine=engine, prompter=Prompter(model.tokenizer, model.vocabulary))
        app = web.Application()
        gateway.attach(app)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30
            ) as client:
                yield Api(url, gateway, engine, client)
        finally:
            await runner.cleanup()
            gateway.close()

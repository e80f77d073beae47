"""A model that lies on a hub, served by a swarm: the same text, and never whole on the backbone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.config import BackboneConfig
from kvasir_backbone.daemon import run as run_backbone
from kvasir_backbone.hub import HubAccess, HubReference
from tests.support.hub import COMMIT, REPOSITORY, FakeHub, hub_running
from tests.support.swarms import running_swarm
from tests.support.waiting import until

pytestmark = pytest.mark.any_loop

PROMPT = "In the beginning"
TOKENS = 16
TOKEN = "hf_secret"


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    async with hub_running(FakeHub.of_folder(bundled_model_path(), token=TOKEN)) as running:
        yield running


def bytes_below(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


async def test_a_hub_model_is_served_without_ever_being_whole_here(tmp_path: Path, hub: FakeHub) -> None:
    async with running_swarm(tmp_path / "local") as swarm:
        await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
        expected = await swarm.text(PROMPT, TOKENS)

    def node(number: int) -> dict[str, Any]:
        if number == 0:  # through the backbone, which passes the hub's bytes on
            return {"weights_from": "backbone"}
        return {"hub": True, "hub_endpoint": hub.url, "hub_token": TOKEN}

    settings: dict[str, Any] = {
        "hub": HubReference(REPOSITORY),
        "hub_access": HubAccess(hub.url, TOKEN),
        "expert_cache_bytes": 4 << 20,
    }
    async with running_swarm(tmp_path / "hub", nodes=2, node=node, **settings) as swarm:
        await swarm.covered(replicas=2)
        assert await swarm.text(PROMPT, TOKENS) == expected
        status = await swarm.ask("status")
        backbone = swarm.backbone
        assert backbone.plan is not None
        assert backbone.weights is not None
        plan = backbone.plan
        experts = sum(part.nbytes for window in plan.windows for part in plan.window_ranges(window))
        served = backbone.weights.bytes_served
        for running in swarm.nodes:
            await running.kill()
        alone = await swarm.text(PROMPT, TOKENS)
    assert (plan.source, plan.revision) == (REPOSITORY, COMMIT)
    assert (status["coverage"], status["fallback_rows"]) == (1.0, 0)
    assert alone == expected  # the fallback reads single experts from the hub
    assert served == experts  # one node by the backbone, the other straight from the hub
    kept = tmp_path / "hub" / "backbone" / "hub"
    assert 0 < bytes_below(kept, "*.piece") <= 4 << 20
    dense = bytes_below(kept, "*.safetensors")
    assert 0 < dense < sum(map(len, hub.large.values())) // 10
    assert bytes_below(kept) < sum(map(len, hub.large.values())) // 3
    store = {asked.authorization for asked in hub.asked if asked.path.startswith("/blobs/")}
    assert store == {None}


@pytest.mark.parametrize("retry_after", ["3000", None])
async def test_the_backbone_stops_at_once_while_it_waits_for_the_hub(
    tmp_path: Path, hub: FakeHub, retry_after: str | None
) -> None:
    """A hub that is busy for an hour, and one that answers what it says of files but no range."""

    async def trouble(request: web.Request) -> web.StreamResponse | None:
        if retry_after is not None:
            return web.Response(status=429, headers={"Retry-After": retry_after})
        if "Range" in request.headers and request.path.endswith(".safetensors"):
            await asyncio.Event().wait()
        return None

    hub.trouble = trouble
    config = BackboneConfig(
        hub=HubReference(REPOSITORY),
        hub_access=HubAccess(hub.url, TOKEN),
        port=0,
        state_dir=tmp_path,
    )
    stop = asyncio.Event()
    task = asyncio.create_task(run_backbone(config, stop=stop))

    def waits() -> bool:
        if task.done():
            task.result()
        return any(retry_after or asked.span for asked in hub.asked)

    await until(waits, timeout=60, what="the backbone's first question")
    stop.set()
    async with asyncio.timeout(20):
        await task

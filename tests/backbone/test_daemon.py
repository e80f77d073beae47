"""The backbone daemon from start to end, and what an operator may get wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from kvasir_backbone import daemon
from kvasir_backbone.addresses import find_door, local_urls
from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.config import BackboneConfig
from kvasir_backbone.daemon import Backbone, next_generation, run
from relay.errors import ConfigError, Unreachable
from relay.guard import bounded_rules
from relay.identity import address_of
from tests.support.swarms import running_swarm
from tests.support.waiting import until


def config(folder: Path, **settings: Any) -> BackboneConfig:
    return BackboneConfig(**{"port": 0, "state_dir": folder / "state", "kv_bytes": 1 << 24, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70_000}, "--port"),
        ({"dtype": "int3"}, "--dtype"),
        ({"fallback": "magic"}, "--fallback"),
        ({"kv_bytes": 0}, "--kv-bytes"),
        ({"window_bytes": 0}, "--window-bytes"),
        ({"public_urls": ("kvasir.example",)}, "--public-url"),
        ({"trusted_proxies": ("proxy.example",)}, "no address or network"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **settings)


async def test_a_missing_model_and_one_without_experts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        await run(config(tmp_path, model=tmp_path / "nothing"))
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64})
    )
    with pytest.raises(ConfigError, match=r"(?i)llama"):
        await run(config(tmp_path, model=dense))


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            await run(config(tmp_path, port=port))


async def test_two_backbones_do_not_share_a_state_directory(tmp_path: Path) -> None:
    async with running_swarm(tmp_path, wires=1) as swarm:
        with pytest.raises(ConfigError, match="another kvasir-backbone uses"):
            await run(replace(swarm.backbone.config, port=0))


async def test_the_port_answers_while_the_model_loads_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    original = daemon._Daemon._load

    async def late(self: Any, *arguments: Any) -> None:
        await gate.wait()
        await original(self, *arguments)

    monkeypatch.setattr(daemon._Daemon, "_load", late)
    async with running_swarm(tmp_path, wires=1) as swarm:
        body = {"model": "kvasir-tiny", "prompt": "x", "max_tokens": 1}
        async with swarm.http.post(f"{swarm.url}/v1/completions", json=body) as response:
            assert response.status == 503
            assert "still loading" in (await response.json())["error"]["message"]
            assert int(response.headers["Retry-After"]) >= 1
        async with swarm.http.get(f"{swarm.url}/health") as response:
            assert response.status == 503
            assert (await response.json())["status"] == "loading"
        async with swarm.http.get(f"{swarm.url}/market/v1/swarm") as response:
            assert (await response.json())["swarm"] == address_of(swarm.backbone.keys.root_public)
        gate.set()
        await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
        async with swarm.http.get(f"{swarm.url}/health") as response:
            assert response.status == 200
            assert (await response.json())["status"] == "ok"
        async with swarm.http.get(f"{swarm.url}/metrics") as response:
            text = await response.text()
    assert "kvasir_coverage 0\n" in text
    for line in text.splitlines():
        name, value = line.rsplit(" ", 1)
        assert name.startswith("kvasir_")
        float(value)


async def test_silent_connections_to_the_one_port_are_bounded_and_the_rest_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "bounded_rules", lambda: bounded_rules(descriptors=300))
    async with running_swarm(tmp_path, wires=1) as swarm:
        silent = []
        for _ in range(60):
            address = ("127.0.0.1", swarm.backbone.port)
            silent.append(await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0)))
        async with asyncio.timeout(10):
            refusal = await silent[-1][0].readline()
        assert refusal.startswith(b"HTTP/1.1 429 ")
        async with swarm.http.get(f"{swarm.url}/market/v1/swarm") as response:
            assert response.status == 200
        for _, writer in silent:
            writer.close()


async def test_the_end_comes_in_the_stated_order_and_open_requests_finish(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running_swarm(tmp_path, wires=1) as swarm:
            await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
            running = asyncio.create_task(swarm.complete("In the beginning", 64))
            engine = swarm.backbone.engine
            assert engine is not None
            await until(lambda: engine.stats.generated_tokens > 2, timeout=60, what="some tokens")
            swarm.backbone.stop.set()
            answer = await running
            assert answer["usage"]["completion_tokens"] == 64
    order = [entry["event"] for entry in logs]
    ends = ["backbone.draining", "request.closed", "relay.disconnected", "relay.draining"]
    places = [order.index(event) for event in ends]
    assert places == sorted(places)
    with pytest.raises(Unreachable):
        find_door(tmp_path / "backbone")


async def test_requests_during_the_drain_are_refused(tmp_path: Path) -> None:
    async with running_swarm(tmp_path, wires=1) as swarm:
        await until(swarm.backbone.serving.is_set, timeout=60, what="the model")
        running = asyncio.create_task(swarm.complete("In the beginning", 64))
        engine = swarm.backbone.engine
        assert engine is not None
        await until(lambda: engine.stats.generated_tokens > 2, timeout=60, what="some tokens")
        swarm.backbone.stop.set()
        await until(lambda: swarm.backbone.phase == "draining", timeout=60, what="the drain")
        body = {"model": "kvasir-tiny", "prompt": "x", "max_tokens": 1}
        async with swarm.http.post(f"{swarm.url}/v1/completions", json=body) as response:
            assert response.status == 503
        await running


async def test_the_operators_answers_need_the_machine_or_the_token_and_commands_the_token(
    tmp_path: Path,
) -> None:
    async with running_swarm(tmp_path, wires=1) as swarm:
        door = find_door(tmp_path / "backbone")
        url = f"{swarm.url}/backbone/v1"
        proxied = {"X-Forwarded-For": "203.0.113.9"}
        token = {"Authorization": f"Bearer {door.token}"}
        assert await _status(swarm.http, "GET", f"{url}/status", {}) == 200
        assert await _status(swarm.http, "GET", f"{url}/status", proxied) == 403
        assert await _status(swarm.http, "GET", f"{url}/status", proxied | token) == 200
        assert await _status(swarm.http, "POST", f"{url}/drain", {}) == 403
        wrong = {"Authorization": "Bearer wrong"}
        assert await _status(swarm.http, "POST", f"{url}/drain", wrong) == 403
        reader, writer = await asyncio.open_connection("127.0.0.1", swarm.backbone.port)
        writer.write(b"POST /backbone/v1/drain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert b" 403 " in await reader.readline()
        writer.close()
        async with swarm.http.post(f"{url}/drain", headers=token, data=b"{") as response:
            assert response.status == 400
        assert not swarm.backbone.stop.is_set()
        assert await _status(swarm.http, "POST", f"{url}/drain", token) == 200
        assert swarm.backbone.stop.is_set()


async def _status(http: aiohttp.ClientSession, method: str, url: str, headers: dict[str, str]) -> int:
    async with http.request(method, url, headers=headers) as response:
        return response.status


async def test_the_plan_is_the_same_at_every_start_and_the_swarm_keeps_its_root(tmp_path: Path) -> None:
    seen: list[tuple[bytes | None, bytes]] = []
    for _ in range(2):
        async with running_swarm(tmp_path, wires=1) as swarm:
            backbone: Backbone = swarm.backbone
            await until(lambda b=backbone: b.plan_id is not None, timeout=60, what="the plan")  # type: ignore[misc]
            seen.append((backbone.plan_id, backbone.keys.root_public))
    assert seen[0] == seen[1]


def test_start_generations_rise_even_if_the_file_or_the_clock_is_lost(tmp_path: Path) -> None:
    first = next_generation(tmp_path, now=1000.0)
    assert next_generation(tmp_path, now=500.0) == first + 1
    (tmp_path / "generation").write_text("damaged")
    assert next_generation(tmp_path, now=2000.0) == 2000


def test_a_wildcard_listener_is_reached_by_every_address_of_the_machine() -> None:
    urls = local_urls("0.0.0.0", 8420)
    assert "http://127.0.0.1:8420" in urls
    assert "http://localhost:8420" in urls
    assert all("0.0.0.0" not in url for url in urls)
    assert local_urls("127.0.0.1", 1)[0] == "http://127.0.0.1:1"
    assert local_urls("::1", 1) == ("http://[::1]:1",)


def test_the_bundled_model_is_there() -> None:
    assert (bundled_model_path() / "config.json").is_file()

"""A whole swarm behind a reverse proxy that ends TLS: real nginx, real processes, a private authority."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from kvasir_backbone.addresses import find_door
from relay.transport import relay_endpoint
from tests.support.proxy import NGINX, PrivateAuthority, documented_server, nginx
from tests.support.standalone import free_port
from tests.support.waiting import until
from tests.swarm.test_processes import ENVIRONMENT, PROMPT, Outside, _join_link, process
from tests.swarm.test_relays import RelayProcess, _node_status, _place, _relays

pytestmark = [
    pytest.mark.any_loop,
    pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


async def _refusal_from(url: str, authority: PrivateAuthority, client: str) -> None:
    """Knock at a relay without a ticket, from an address of the loopback network."""
    connector = aiohttp.TCPConnector(ssl=authority.context(), local_addr=(client, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.ws_connect(relay_endpoint(url)) as socket,
        asyncio.timeout(20),
    ):
        await socket.receive()
        await socket.send_bytes(b"no frame")
        while (await socket.receive()).type is aiohttp.WSMsgType.BINARY:
            pass


def _refused_addresses(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"peer.refused"' in line]
    return [line["address"] for line in lines]


@pytest.mark.timeout(600)
async def test_a_swarm_behind_nginx_with_tls(tmp_path: Path) -> None:
    authority = PrivateAuthority(tmp_path / "ca")
    trusting = {**ENVIRONMENT, "SSL_CERT_FILE": str(authority.file)}
    port, front, relay_front = free_port(), free_port(), free_port()
    state, url, relay_url = tmp_path / "b", f"https://localhost:{front}", f"https://localhost:{relay_front}"
    up = ("up", "--port", str(port), "--state-dir", str(state), "--dtype", "float32", "--kv-bytes", "64MiB",
          "--public-url", url, "--trusted-proxy", "127.0.0.1", "--relay-only",
          "--fallback", "none")  # fmt: skip
    async with AsyncExitStack() as stack:
        log = tmp_path / "up.log"
        backbone = await stack.enter_async_context(
            process("kvasir_backbone.cli", *up, log=log, environment=trusting)
        )
        link = await _join_link(state, log, backbone)
        assert link.startswith(url)
        relay = RelayProcess("relay", tmp_path, link, state / "swarm", public_url=relay_url)
        servers = [
            documented_server(authority, port=front, target=port, with_map=True),
            documented_server(authority, port=relay_front, target=relay.port, with_map=False),
        ]
        access = await stack.enter_async_context(nginx(tmp_path / "nginx", *servers))
        await relay.start(stack, "--trusted-proxy", "127.0.0.1", environment=trusting)
        node = ("run", link, "--state-dir", str(tmp_path / "node"), "--budget", "200MB",
                "--precision", "stored")  # fmt: skip
        await stack.enter_async_context(
            process("kvasir_node.cli", *node, log=tmp_path / "node.log", environment=trusting)
        )
        plain = await stack.enter_async_context(aiohttp.ClientSession())
        inside = Outside(plain, find_door(state).url)
        await until(inside.covered, timeout=240, what="coverage through the proxy")
        assert set(await _relays(inside)) >= {relay_url}
        assert await _place(inside) in (relay_url, find_door(state).url)
        shown = await _node_status(tmp_path / "node")
        assert {r["url"].removesuffix("/relay/v1") for r in shown["relays"]} == {url, relay_url}
        assert all(r["connected"] for r in shown["relays"])

        secure = aiohttp.TCPConnector(ssl=authority.context())
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=secure))
        outside = Outside(http, url)
        assert await outside.text() == await inside.text()
        body = {"model": "kvasir-tiny", "prompt": PROMPT, "max_tokens": 24, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            pieces = [line async for line in response.content if line.startswith(b"data:")]
        assert len(pieces) > 3
        assert pieces[-1].strip() == b"data: [DONE]"
        async with http.get(f"{url}/backbone/v1/status") as response:
            assert response.status == 403  # the operator's page: this machine alone, or the token

        for client in ("127.0.0.5", "127.0.0.6"):
            await _refusal_from(relay_url, authority, client)
            await _refusal_from(url, authority, client)
        for seen in (relay.log, log):
            await until(
                lambda seen=seen: {"127.0.0.5", "127.0.0.6"} <= set(_refused_addresses(seen)),  # type: ignore[misc]
                what="the clients' own addresses",
            )
        passed = access.read_text()
        for what in ("POST /market/v1/claims", "GET /weights/", "GET /relay/v1 ", "POST /v1/completions"):
            assert what in passed, what
        assert " 101 " in passed
        assert " 206 " in passed


@pytest.mark.timeout(300)
async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    authority = PrivateAuthority(tmp_path / "ca")
    front = free_port()
    server = documented_server(authority, port=front, target=free_port(), with_map=True)
    async with nginx(tmp_path / "nginx", server):
        log = tmp_path / "node.log"
        node = ("run", f"https://localhost:{front}", "--state-dir", str(tmp_path / "node"))
        async with process("kvasir_node.cli", *node, log=log):
            await until(
                lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(), timeout=240, what="the refusal"
            )

"""What a stand-alone relay needs around it: a market's page of its swarm, and certified keys in a folder."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from market.requests import NonceBook, verify_request
from market.swarm import CertificateRequest, certify
from relay.identity import address_of
from relay.links import JoinLink
from relay.operator import load_key
from tests.support.relays import Swarm


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class SwarmPage:
    """What a market shows of its swarm, and the relays that announced themselves to it."""

    swarm: Swarm
    url: str = ""
    up: bool = True
    nonces: NonceBook = field(default_factory=NonceBook)
    announced: list[tuple[str, str]] = field(default_factory=list)

    @property
    def link(self) -> str:
        return JoinLink(self.url, self.swarm.root).text

    async def show(self, request: web.Request) -> web.Response:
        if not self.up:
            return web.json_response({"error": {}}, status=503)
        certificate = _b64(self.swarm.market.certificate.document.to_bytes())
        return web.json_response({"v": 1, "swarm": address_of(self.swarm.root), "certificate": certificate})

    async def announce(self, request: web.Request) -> web.Response:
        body = await request.read()
        author = verify_request(
            request.headers,
            request.method,
            request.raw_path,
            body,
            now=time.time(),
            root=self.swarm.root,
            nonces=self.nonces,
        )
        self.announced.append((author.role, json.loads(body)["url"]))
        return web.json_response({"done": True})


@asynccontextmanager
async def swarm_page(swarm: Swarm | None = None) -> AsyncIterator[SwarmPage]:
    page = SwarmPage(swarm or Swarm())
    app = web.Application()
    app.router.add_get("/market/v1/swarm", page.show)
    app.router.add_post("/market/v1/relays", page.announce)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    page.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield page
    finally:
        await runner.cleanup()


def certify_folder(swarm: Swarm, folder: Path, *, serial: int = 1) -> None:
    """What the holder of the root does with a relay's request."""
    word = load_key(folder).request()
    request = CertificateRequest.from_bytes(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)))
    certificate = certify(swarm.root_key, request, serial=serial, now=time.time())
    (folder / "relay.cert").write_bytes(certificate.document.to_bytes())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

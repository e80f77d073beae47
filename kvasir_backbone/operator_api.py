"""The operator's HTTP API, health and metrics: `/backbone/v1/...`, `/health`, `/metrics`.

`/health` and `/metrics` are for anyone. The rest is for who is on this machine or has the token of
`operator.json`; commands need the token always. Reads the daemon, and asks the market as a client.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from market.client import MarketClient
from market.messages import CreditStatement, CreditTable, GapsAnswer
from relay.errors import KvasirError, Refused, RemoteProtocolError
from relay.identity import PublicKey, address_of, fingerprint, parse_address

from . import overview
from .weights import error_response

if TYPE_CHECKING:
    from .daemon import Backbone

PREFIX: Final = "/backbone/v1"
VERSION: Final = version("kvasir")
CACHE_S: Final = 1.0
"""The market's word is asked for at most this often."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Operator:
    """Serves one daemon's operator. `token` is that of its `operator.json`."""

    def __init__(self, backbone: Backbone, token: str) -> None:
        self._backbone = backbone
        self._token = token
        self._rate = overview.TokenRate()
        self._carried = overview.TokenRate()
        self._said: tuple[float, GapsAnswer | None] = (float("-inf"), None)
        self._table: tuple[float, CreditTable | None] = (float("-inf"), None)
        self._asking = asyncio.Lock()

    def attach(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        questions = {
            "status": self._status, "gaps": self._gaps, "nodes": self._nodes, "credits": self._credits,
            "trust": self._trust, "disputes": self._disputes,
            "relays": self._relays,
        }  # fmt: skip
        for name, handler in questions.items():
            app.router.add_get(f"{PREFIX}/{name}", self._guard(handler, command=False))
        app.router.add_post(f"{PREFIX}/drain", self._guard(self._drain, command=True))
        app.router.add_post(f"{PREFIX}/decide", self._guard(self._decide, command=True))

    # --- who may ask ---------------------------------------------------------------------------------

    def _guard(self, handler: Handler, *, command: bool) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                if not self._has_token(request) and (command or not _is_local(request)):
                    raise Refused("forbidden", "send the token of operator.json in the state directory")
                return await handler(request)
            except KvasirError as error:
                return error_response(error)

        return guarded

    def _has_token(self, request: web.Request) -> bool:
        offered = request.headers.get("Authorization", "")
        return hmac.compare_digest(
            offered.encode("utf-8", "surrogateescape"), f"Bearer {self._token}".encode("ascii")
        )

    # --- for anyone ----------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        backbone = self._backbone
        swarm = backbone.swarm
        body = {
            "status": "ok" if backbone.phase == "serving" else backbone.phase,
            "version": VERSION,
            "model": backbone.config.name,
            "swarm": address_of(backbone.keys.root_public),
            "coverage": 0.0 if swarm is None else swarm.roster().coverage(),
            "relays_connected": 0 if swarm is None else swarm.relays_connected,
        }
        return web.json_response(body, status=200 if backbone.phase == "serving" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        backbone = self._backbone
        stats = None if backbone.engine is None else backbone.engine.stats
        text = overview.metrics_text(
            backbone.swarm, stats, backbone.relay.meters, time.monotonic() - backbone.started
        )
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    # --- for the operator ----------------------------------------------------------------------------

    async def _status(self, request: web.Request) -> web.Response:
        backbone = self._backbone
        body: dict[str, Any] = {
            "v": 1,
            "phase": backbone.phase,
            "version": VERSION,
            "model": backbone.config.name,
            "url": backbone.url,
            "join": backbone.join,
            "swarm": address_of(backbone.keys.root_public),
            "fingerprint": fingerprint(backbone.keys.root_public),
            "uptime_s": time.monotonic() - backbone.started,
            "fallback": backbone.config.fallback,
            "relay": overview.show_relay(backbone.relay.meters),
        }
        if backbone.engine is not None:
            stats = backbone.engine.stats
            self._rate.note(time.monotonic(), stats.generated_tokens)
            body["engine"] = overview.show_engine(stats)
            body["tokens_per_s"] = self._rate.value(time.monotonic())
        if backbone.swarm is not None:
            body |= await self._swarm_status()
        return web.json_response(body)

    async def _swarm_status(self) -> dict[str, Any]:
        swarm = self._backbone.swarm
        assert swarm is not None
        return {
            "plan": swarm.plan_id.hex(),
            "wire_dtype": swarm.plan.wire_dtype,
            "audit": overview.show_audit(swarm),
            "carried": overview.show_carried(swarm, self._carried, time.monotonic()),
            "numerics": swarm.numerics(),
            "coverage": swarm.roster().coverage(),
            "fallback_rows": swarm.dispatcher.stats.fallback_rows,
            "windows": overview.show_windows(swarm, await self._ask_gaps()),
            "nodes": overview.show_nodes(swarm, await self._credit_by_wallet()),
            "dispatch": overview.show_dispatch(swarm),
            "relays": overview.show_relays(swarm),
        }

    async def _gaps(self, request: web.Request) -> web.Response:
        swarm = self._backbone.swarm
        if swarm is None:
            raise Refused("overloaded", "the plan is being made: ask again", retry_after_s=1)
        body = {
            "coverage": swarm.roster().coverage(),
            "fallback": self._backbone.config.fallback,
            "fallback_rows": swarm.dispatcher.stats.fallback_rows,
            "windows": overview.show_windows(swarm, await self._ask_gaps()),
            "moves": overview.show_moves(await self._ask_gaps()),
        }
        return web.json_response(body)

    async def _nodes(self, request: web.Request) -> web.Response:
        swarm = self._backbone.swarm
        nodes = [] if swarm is None else overview.show_nodes(swarm, await self._credit_by_wallet())
        return web.json_response({"nodes": nodes})

    async def _relays(self, request: web.Request) -> web.Response:
        swarm = self._backbone.swarm
        return web.json_response({"relays": [] if swarm is None else overview.show_relays(swarm)})

    async def _credits(self, request: web.Request) -> web.Response:
        client = self._backbone.client
        if client is None:
            raise Refused("overloaded", "the backbone is starting: ask again", retry_after_s=1)
        return web.json_response(overview.show_credits(await client.credit_table(whole=True)))

    async def _drain(self, request: web.Request) -> web.Response:
        """Without a device: the whole backbone ends in order. With one: its claims end in order."""
        body = _json_body(await request.read())
        device = body.get("device") if isinstance(body, dict) else None
        if device is None:
            self._backbone.stop.set()
            return web.json_response({"draining": "backbone"})
        swarm = self._backbone.swarm
        if swarm is None:
            raise Refused("not_found", "no device is known yet")
        found = [key for key in swarm.directory.holders() if address_of(key).startswith(str(device))]
        if len(found) != 1 or not device:
            raise Refused("not_found", f"{len(found)} devices with claims have an address like {device!r}")
        ended = await swarm.drain_device(found[0], "drained by the operator")
        return web.json_response({"draining": address_of(found[0]), "claims": ended})

    # --- trust and disputes --------------------------------------------------------------------------

    def _market(self) -> MarketClient:
        client = self._backbone.client
        if client is None:
            raise Refused("overloaded", "the backbone is starting: ask again", retry_after_s=1)
        return client

    async def _trust(self, request: web.Request) -> web.Response:
        """Without a wallet: the latest records of all. With one: everything on record about it."""
        market, wallet = self._market(), request.query.get("wallet")
        if wallet is None:
            records = [overview.show_record(record) for record in await market.records()]
            return web.json_response({"records": records})
        return web.json_response(overview.show_trust(await market.trust(parse_address(wallet))))

    async def _disputes(self, request: web.Request) -> web.Response:
        records = [overview.show_record(record) for record in await self._market().disputes()]
        return web.json_response({"records": records})

    async def _decide(self, request: web.Request) -> web.Response:
        """Uphold or overturn a violation or quarantine, for a reason that its owner reads."""
        match _json_body(await request.read()):
            case {"record": str(record), "uphold": bool(uphold), "reason": str(reason)}:
                pass
            case _:
                raise RemoteProtocolError("say which record, whether to uphold it, and the reason")
        decided = await self._market().decide(_record_id(record), uphold=uphold, reason=reason)
        return web.json_response(overview.show_record(decided))

    # --- the market's word, not asked for more often than useful ------------------------------------

    async def _ask_gaps(self) -> GapsAnswer | None:
        client = self._backbone.client
        async with self._asking:
            if client is not None and time.monotonic() - self._said[0] > CACHE_S:
                try:
                    self._said = (time.monotonic(), await client.gaps())
                except KvasirError:
                    self._said = (time.monotonic(), None)
        return self._said[1]

    async def _credit_by_wallet(self) -> dict[PublicKey, CreditStatement]:
        client = self._backbone.client
        async with self._asking:
            if client is not None and time.monotonic() - self._table[0] > CACHE_S:
                try:
                    self._table = (time.monotonic(), await client.credit_table())
                except KvasirError:
                    self._table = (time.monotonic(), None)
        table = self._table[1]
        return {} if table is None else {row.wallet: row for row in table.wallets}


def _json_body(data: bytes) -> Any:
    try:
        return json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise RemoteProtocolError("the body is not JSON") from None


def _record_id(text: str) -> bytes:
    try:
        id_ = bytes.fromhex(text)
    except ValueError:
        id_ = b""
    if len(id_) != 16:
        raise RemoteProtocolError(f"{text!r} is no record's id: 32 hexadecimal digits, as `trust` shows them")
    return id_


def _is_local(request: web.Request) -> bool:
    """Whether the request comes from this machine, not through a proxy."""
    if any(name in request.headers for name in ("X-Forwarded-For", "Forwarded")):
        return False
    try:
        return ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        return False

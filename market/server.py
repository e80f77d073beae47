"""The market daemon: who asked is verified here, what they asked is answered in `market.handlers`.

`Market` can be attached to any aiohttp application (the embedded daemon has one for everything) or run on
its own with `serve`. One boundary turns every error into a typed answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import structlog
from aiohttp import web
from sqlalchemy import insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from relay.addresses import client_address, quota_key
from relay.errors import ConfigError, KvasirError, Refused, RemoteProtocolError
from relay.guard import ListenerGuard, bounded_rules
from relay.identity import PublicKey, SerialBook
from relay.links import JoinLink

from . import admission, escrow, judging, leasing, movers, moves, overview, publishing
from . import messages as m
from . import relays as relaying
from . import tables as t
from .bodies import BodyBudget, Hold
from .config import MarketConfig
from .handlers import Call, Handlers
from .openapi import document as openapi_document
from .relays import RelayBook
from .requests import BODY_HEADER, Author, Claim, read_claim
from .routes import PREFIX, ROUTES, SMALL_BODY, Route
from .store import Session, Store
from .swarm import OperatingKey, SwarmKeys
from .wallet import normalise_url
from .wire import from_json, to_json

log = structlog.get_logger("market")

STATUS: Final = {
    "bad_request": 400, "version": 400, "wrong_swarm": 403, "bad_signature": 401, "replay": 409,
    "forbidden": 403, "quarantined": 403, "not_found": 404, "conflict": 409, "duplicate": 409,
    "stale_epoch": 409, "expired": 410, "quota": 429, "busy": 429, "overloaded": 503, "draining": 503,
    "unreachable": 503, "internal": 500, "not_mine": 404,
}  # fmt: skip
"""The HTTP status that goes with each code."""

OFF_LOOP_BYTES: Final = 64 * 1024
"""Bodies above this are hashed and parsed off the event loop."""

_LARGE: Final = (
    m.SnapshotListing,
    m.NodesAnswer,
    m.GapsAnswer,
    m.CreditTable,
    m.Published,
    m.TrustAnswer,
    m.DisputesAnswer,
)
"""Answers that may be large: turned into JSON off the event loop."""

ALIVE: Final = "alive"
RENEWAL_S: Final = 3600.0
"""How often a market on its own looks whether its certificate is due."""


@dataclass(frozen=True, slots=True)
class _Head:
    """A request before its body: from where (as quotas count), who it says it is, who it proved to be."""

    address: str
    claim: Claim | None
    author: Author | None


class Market:
    """The market of one swarm. `await open()`, `attach(app)`, keep `run()` going, and `await close()` last.

    `keys` gives the market's current operating key, `relays` the relays that need not announce themselves
    (their URL may be relative to the market's own).
    """

    def __init__(
        self,
        config: MarketConfig,
        *,
        root: PublicKey,
        keys: Callable[[], OperatingKey],
        relays: Callable[[], Sequence[m.RelayListing]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.root = root
        self._clock = clock
        self._store = Store(config.database, clock=clock)
        self._relays = RelayBook(root, relays, clock)
        self._handlers = Handlers(config, self._store, root=root, keys=keys, relays=self._relays, clock=clock)
        self._store.on_commit = self._handlers.watchers.wake
        self._serials = SerialBook()
        self._bodies = BodyBudget(config.body_bytes)
        self._proxies = config.proxies
        self._noted: set[tuple[bytes, int]] = set()
        self._revisions: dict[bytes, int] = {}
        self._counted: Counter[tuple[str, str]] = Counter()

    # --- life

    async def open(self) -> None:
        """Open the store, migrate it, and give every lease one more TTL if the market was down.

        Raises `ConfigError` if the database cannot be used.
        """

        def start(session: Session) -> Sequence[m.RelayListing]:
            admission.load_serials(session, self._serials, root=self.root)
            alive = session.value(select(t.meta.c.value).where(t.meta.c.name == ALIVE))
            if alive is not None and session.now - float(alive) > 3 * self.config.sweep_s:
                leasing.add_ttl(session, self._handlers.desk())
            _note_alive(session)
            return relaying.announced_relays(session)

        await self._store.open()
        self._relays.refresh(await self._store.write(start))
        log.info("market.opened", database=self.config.database.partition(":")[0])

    def attach(self, app: web.Application) -> None:
        """Add the market's routes to an application."""
        for route in ROUTES:
            app.router.add_route(route.method, PREFIX + route.path, self._handler(route))
        app.router.add_get(f"{PREFIX}/openapi.json", self._openapi)
        app.router.add_get(f"{PREFIX}/metrics", self.metrics_answer)
        app.router.add_route("*", PREFIX + "/{tail:.*}", self._unknown)
        app.on_shutdown.append(self._shutdown)

    def add_public_url(self, url: str) -> None:
        """Answer for one more URL, known only once the market listens. Raises `ConfigError`."""
        url = normalise_url(url)
        if url not in self._handlers.public_urls:
            self._handlers.public_urls.append(url)

    async def run(self) -> None:
        """End what is over, move targets, release escrow, for ever; meanwhile, check the ledger once."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_ledger())
            tasks.create_task(self._keep_releasing())
            await self._keep_sweeping()

    async def _keep_sweeping(self) -> None:
        last_targets = last_moves = 0.0
        while True:
            await asyncio.sleep(self.config.sweep_s)
            now = self._clock()
            targets = now - last_targets >= self.config.target_s
            last_targets = now if targets else last_targets
            try:
                await self._sweep(targets)
                if now - last_moves >= self.config.move_s:
                    last_moves = now
                    await self._move()
            except SQLAlchemyError as error:
                log.error("market.store_failed", reason=str(error.__cause__ or error))

    async def _keep_releasing(self) -> None:
        while True:
            await asyncio.sleep(self.config.release_s)
            try:
                await self.release_escrow()
            except SQLAlchemyError as error:
                log.error("market.store_failed", reason=str(error.__cause__ or error))

    async def release_escrow(self) -> int:
        """Release what is earned for good; returns how many bytes."""
        rules, total = self.config.escrow_rules, 0

        def work(session: Session) -> list[tuple[PublicKey, int]]:
            released = escrow.release_due(session, rules)
            for wallet, amount in released:
                if amount:
                    judging.note_released(session, wallet, amount, rules)
            return released

        await self._store.write(escrow.note_leavers)
        while True:
            released = await self._store.write(work)
            amount = sum(amount for _, amount in released)
            total += amount
            if not amount:
                return total

    async def _check_ledger(self) -> None:
        try:
            await self._handlers.check_ledger(whole=True)
        except SQLAlchemyError as error:
            log.error("market.store_failed", reason=str(error.__cause__ or error))

    async def close(self) -> None:
        """End the watches and close the store."""
        self._handlers.close()
        await self._store.close()

    async def _sweep(self, targets: bool) -> None:
        def work(
            session: Session,
        ) -> tuple[Sequence[m.RelayListing], dict[PublicKey, list[float]] | None, dict[bytes, int]]:
            leasing.sweep(session)
            _note_alive(session)
            if targets:
                publishing.retire_plans(session, self.config.plan_silence_s)
                leasing.drain_retired(session, self._handlers.desk())
                movers.note_shortages(session, publishing.set_targets(session, self.config.scarcity))
                leasing.forget_ended(session)
                moves.forget_old(session)
                admission.purge(session)
            revisions = session.rows(select(t.plans.c.plan, t.plans.c.revision))
            seen = relaying.round_trips(session) if targets else None
            return relaying.announced_relays(session), seen, {row.plan: row.revision for row in revisions}

        announced, round_trips, revisions = await self._store.write(work)
        self._relays.refresh(announced, round_trips)
        changed = [plan for plan, number in revisions.items() if self._revisions.get(plan) != number]
        self._revisions = revisions
        self._handlers.watchers.wake(changed)

    async def _move(self) -> None:
        """Look at what could move; on its own, for whoever does waits for this market's other replicas."""
        desk = self._handlers.desk().moves
        await self._store.write(lambda session: moves.propose(session, desk))

    async def _shutdown(self, app: web.Application) -> None:
        self._handlers.close()

    # --- HTTP

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        serve_call: Callable[[Call], Awaitable[Any]] = getattr(self._handlers, route.name)

        async def handle(request: web.Request) -> web.StreamResponse:
            outcome = "ok"
            hold: Hold | None = None
            try:
                head = self._read_head(route, request)
                hold = self._bodies.hold(head.address, verified=head.author is not None)
                answer = await serve_call(await self._admit(route, request, head, hold))
                if isinstance(answer, web.StreamResponse):
                    return answer
                if isinstance(answer, _LARGE):
                    return await asyncio.to_thread(lambda: _respond(to_json(answer)))
                return _respond(to_json(answer))
            except KvasirError as error:
                outcome = error.code
                return _refuse(error, request)
            except SQLAlchemyError as error:
                outcome = "internal"
                log.error("market.store_failed", reason=str(error.__cause__ or error), route=route.name)
                return _refuse(Refused("internal", "the market's database failed", retry_after_s=2), request)
            finally:
                if hold is not None:
                    hold.release()
                self._counted[route.name, outcome] += 1
                log.debug("request.served", route=route.name, outcome=outcome)

        return handle

    def _read_head(self, route: Route, request: web.Request) -> _Head:
        """Who asks, by the headers alone; verified before the body is read if they name the body's hash.

        Raises `KvasirError`: what is refused here is never read.
        """
        forwarded = request.headers.getall("X-Forwarded-For", ())
        address = quota_key(client_address(request.remote or "unknown", forwarded, self._proxies))
        if route.who == "anyone":
            return _Head(address, None, None)
        claim = read_claim(request.headers, now=self._clock(), root=self.root)
        allowed = ("device", "backbone") if route.who == "signed" else (route.who,)
        if claim.role not in allowed:
            raise Refused("forbidden", f"this is for a {' or a '.join(allowed)}, not for a {claim.role}")
        author = None if claim.body_hash is None else self._verify(claim, request, claim.body_hash)
        return _Head(address, claim, author)

    def _verify(self, claim: Claim, request: web.Request, body_hash: bytes) -> Author:
        return claim.verify(
            request.method,
            _target(request.raw_path),
            body_hash,
            now=self._clock(),
            nonces=None,
            serials=self._serials,
        )

    async def _admit(self, route: Route, request: web.Request, head: _Head, hold: Hold) -> Call:
        """Read, verify and parse one request. Raises `KvasirError`."""
        length, limit = request.content_length, route.max_body
        if head.author is None and route.who != "anyone":
            limit = min(limit, SMALL_BODY)
            if length is not None and limit < length <= route.max_body:
                raise RemoteProtocolError(
                    f"a body of over {limit} bytes is read only if {BODY_HEADER} names its SHA-256"
                )
        body = await hold.read(request.content.iter_any(), length, limit)
        admit = self._author_and_body
        if len(body) > OFF_LOOP_BYTES:
            author, parsed = await asyncio.to_thread(admit, route, request, head, body)
        else:
            author, parsed = admit(route, request, head, body)
        if author is not None and author.certificate is not None:
            await self._note_operator(author)
        return Call(request, author, parsed, head.address)

    def _author_and_body(
        self, route: Route, request: web.Request, head: _Head, body: bytes
    ) -> tuple[Author | None, Any]:
        author = head.author
        if head.claim is not None:
            body_hash = hashlib.sha256(body).digest()
            head.claim.check_body(body_hash)
            author = author or self._verify(head.claim, request, body_hash)
        return author, None if route.body is None else from_json(route.body, _json(body))

    async def _note_operator(self, author: Author) -> None:
        """Remember a new certificate, so that the ones it replaces stay replaced after a restart."""
        certificate = author.certificate
        assert certificate is not None
        known = (certificate.id, certificate.serial)
        if known not in self._noted:
            await self._store.write(lambda session: admission.note_operator(session, certificate))
            self._noted.add(known)

    async def _openapi(self, request: web.Request) -> web.Response:
        return _respond(openapi_document())

    async def _unknown(self, request: web.Request) -> web.Response:
        message = f"the market has no {request.method} {request.path}: see {PREFIX}/openapi.json"
        return _refuse(Refused("not_found", message), request)

    async def health_answer(self, request: web.Request) -> web.StreamResponse:
        """Serves /health of a market on its own: the same as `/market/v1/health`."""
        return await self._handler(next(route for route in ROUTES if route.name == "health"))(request)

    async def metrics_answer(self, request: web.Request) -> web.Response:
        """Serves the market's figures in Prometheus' text format."""
        return web.Response(text=await self.metrics(), content_type="text/plain")

    async def metrics(self) -> str:
        """The market's figures in Prometheus' text format."""
        states = await self._store.read(overview.leases_by_state)
        lines = ["# TYPE kvasir_market_leases gauge"]
        lines += [f'kvasir_market_leases{{state="{state}"}} {n}' for state, n in sorted(states.items())]
        lines.append("# TYPE kvasir_market_requests_total counter")
        lines += [
            f'kvasir_market_requests_total{{route="{route}",outcome="{outcome}"}} {count}'
            for (route, outcome), count in sorted(self._counted.items())
        ]
        lines.append("# TYPE kvasir_market_moves gauge")
        moved = await self._store.read(moves.moves_by_state)
        lines += [f'kvasir_market_moves{{state="{state}"}} {n}' for state, n in sorted(moved.items())]
        lines.append("# TYPE kvasir_market_watches gauge")
        lines.append(f"kvasir_market_watches {self._handlers.watchers.count}")
        return "\n".join(lines) + "\n"


def _target(raw_path: str) -> str:
    """Path and query from the prefix on, so that a proxy may put the market below a path of its own."""
    start = raw_path.find(PREFIX)
    return raw_path[start:] if start >= 0 else raw_path


def _json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RemoteProtocolError("the body is not JSON") from None


def _respond(answer: dict[str, Any], status: int = 200) -> web.Response:
    body = json.dumps(answer, separators=(",", ":")).encode("utf-8")
    return web.Response(body=body, status=status, content_type="application/json")


def _refuse(error: KvasirError, request: web.Request) -> web.Response:
    """A typed refusal."""
    retry_after_s = error.retry_after_s if isinstance(error, Refused) else None
    answer = to_json(m.ErrorAnswer(m.ErrorBody(error.code, str(error), retry_after_s)))
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    body = json.dumps(answer, separators=(",", ":")).encode("utf-8")
    return web.Response(
        body=body, status=STATUS[error.code], headers=headers, content_type="application/json"
    )


def _note_alive(session: Session) -> None:
    """Write down that the market is running: leases get one more TTL only after it was down."""
    value = repr(session.now)
    if not session.run(update(t.meta).where(t.meta.c.name == ALIVE).values(value=value)):
        session.insert_once(insert(t.meta).values(name=ALIVE, value=value))


# --- on its own --------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(market: Market) -> AsyncIterator[str]:
    """Listen on the configured address for as long as the block lasts; gives the local URL.

    Raises `ConfigError` if the address is taken.
    """
    app = web.Application()
    market.attach(app)
    app.router.add_get("/health", market.health_answer)
    app.router.add_get("/metrics", market.metrics_answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0, lingering_time=1.0)
    await runner.setup()
    try:
        guard = ListenerGuard(bounded_rules(), trusted=market.config.proxies)
        try:
            server = await guard.listen(runner, host=market.config.host, port=market.config.port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {market.config.host}:{market.config.port} ({error.strerror or error}): "
                "choose another --port, or stop what uses it"
            ) from None
        try:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            market.add_public_url(url)
            yield url
        finally:
            server.close()
    finally:
        await runner.cleanup()


async def serve(config: MarketConfig, *, ready: Callable[[JoinLink], None] = lambda link: None) -> None:
    """Run a market on its own until SIGTERM or SIGINT. `ready` is told the join link once it listens."""
    if config.state_dir is None:
        raise ConfigError("a market on its own needs --state-dir for its keys")
    keys = SwarmKeys.load_or_create(config.state_dir, now=time.time(), roles=("market",))
    market = Market(config, root=keys.root_public, keys=lambda: keys.market)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(market.close)
        await market.open()
        url = await stack.enter_async_context(serving(market))
        stack.enter_context(_signals(stop))
        ready(JoinLink(config.public_urls[0] if config.public_urls else url, keys.root_public))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(market.run()), group.create_task(_renew(keys))]
            await stop.wait()
            log.info("market.stopping")
            for task in tasks:
                task.cancel()


async def _renew(keys: SwarmKeys) -> None:
    while True:
        for role in keys.renew(time.time()):
            log.info("certificate.renewed", role=role)
        await asyncio.sleep(RENEWAL_S)


class _signals:  # noqa: N801 - reads as a verb in `with`
    """Set an event at SIGTERM or SIGINT; a second one exits hard."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: object) -> None:
            if self._stop.is_set():
                raise SystemExit(128 + number)
            loop.call_soon_threadsafe(self._stop.set)

        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

"""The relay daemon: WebSockets in, the switchboard's instructions out.

Who owns what: aiohttp owns one task a connection, which waits for its end; everything else happens within the
read of a socket or a timer of that connection, so a frame crosses the relay without a task. State is in
memory only. The relay sees who talks to whom, when and how much; what they say is encrypted end to end, and
it holds no key to it.

Routes: `/relay/v1` (WebSocket), `/relay/v1/load` and `/relay/v1/health` (JSON), `/relay/v1/metrics`
(Prometheus). `attach` mounts them in any aiohttp application.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, Literal, Protocol, cast

import structlog
from aiohttp import web

from .addresses import client_address, quota_key
from .circuit import OUTCOMES, Admission, Drop, Instruction, Outcome, Peer, Send, Switchboard
from .clock import SteadyClock
from .config import RelayConfig
from .connection import Connection
from .errors import IdentityError, KvasirError, Refused, RemoteProtocolError
from .frames import HEADER, MAX_FRAME, MAX_PACKET, FrameType, decode, decode_u32, decode_u64, encode
from .identity import Certificate, PublicKey, SignedDocument, SigningKey, address_of
from .load import LoadMeter, RelayLoad
from .messages import Auth, Close, Hello, Open, Renewal, Welcome
from .meters import Meters
from .metrics import CONTENT_TYPE, metrics_text
from .probe import Finding, Probe
from .tickets import Ticket, check_auth, open_ticket, welcome_message
from .websocket import FRONT
from .wire import GOING_AWAY, NORMAL, Handler, accept

_DATA: Final = int(FrameType.DATA)
_BEFORE_DATA: Final = FRONT + HEADER.size

log = structlog.get_logger("relay")


class MarketView(Protocol):
    """What a relay needs to know of its market."""

    def keys(self) -> Iterable[PublicKey]:
        """The market operating keys whose tickets count now."""

    def reachable(self) -> bool:
        """Whether the market answers; while it does not, expired tickets count an hour longer."""


@dataclass(frozen=True, slots=True)
class FixedMarket:
    """A market in the same process: `current` gives its operating keys."""

    current: Callable[[], Iterable[PublicKey]]

    def keys(self) -> Iterable[PublicKey]:
        """See `MarketView.keys`."""
        return self.current()

    def reachable(self) -> bool:
        """Always."""
        return True


class Relay:
    """One relay. `certificate` and `key` may be replaced while it runs (`renew`)."""

    def __init__(
        self,
        config: RelayConfig,
        *,
        certificate: Certificate,
        key: SigningKey,
        market: MarketView,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.draining = False
        self._market = market
        self._clock = clock or SteadyClock()
        self._probe = Probe(lambda: self.public_key, self._clock)
        self._proxies = config.proxies
        self._rng = rng or random.SystemRandom()
        self._admission = Admission(config.rules)
        self._load = LoadMeter(
            connections=config.connections, bandwidth=config.bandwidth, processor=time.thread_time
        )
        self._board = Switchboard(config.rules, uncounted=self._probe.keys)
        self._connections: dict[int, Connection] = {}  # by peer number
        self._everyone: set[Connection] = set()  # those that have not proved themselves, too
        self._refusals: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.renew(certificate, key)

    def renew(self, certificate: Certificate, key: SigningKey) -> None:
        """Serve under a newer certificate. Raises `IdentityError` if it is not this key's, or no relay's."""
        if certificate.ed25519 != key.public or certificate.role != "relay":
            raise IdentityError("the certificate is not one of this relay's key: certify the relay again")
        self.certificate, self._key = certificate, key

    @property
    def public_key(self) -> PublicKey:
        """The relay's Ed25519 key, as tickets name it."""
        return self._key.public

    @property
    def meters(self) -> Meters:
        """Live circuits and totals."""
        peers = [peer for peer in self._board.peers if peer.key not in self._probe.keys]
        devices = sum(peer.role == "device" for peer in peers)
        return Meters(
            peers=len(peers),
            devices=devices,
            backbones=len(peers) - devices,
            circuits=tuple(self._board.live(time.monotonic())),
            circuits_opened=self._board.opened,
            outcomes=dict(self._board.outcomes),
            bytes_forwarded=self._board.bytes_forwarded,
            refusals=dict(self._refusals),
            draining=self.draining,
        )

    @property
    def load(self) -> RelayLoad:
        """How busy this relay is now. Belongs to the loop's thread, whose processor time it counts."""
        return self._load.read(
            time.monotonic(),
            bytes_forwarded=lambda: self._board.bytes_forwarded,
            connections=self._admission.total,
            peers=len(self._connections),
            circuits=len(self._board.circuits),
            draining=self.draining,
        )

    # --- mounting ---

    @property
    def routes(self) -> list[web.RouteDef]:
        """The relay's routes."""
        return [
            web.get("/relay/v1", self._handle, allow_head=False),
            web.get("/relay/v1/load", self.show_load),
            web.get("/relay/v1/health", self.health),
            web.get("/relay/v1/metrics", self.metrics),
        ]

    def attach(self, app: web.Application) -> None:
        """Mount the relay in `app`, to be drained when it shuts down."""
        app.router.add_routes(self.routes)

        async def drain(_: web.Application) -> None:
            await self.drain()

        app.on_shutdown.append(drain)

    async def show_load(self, request: web.Request) -> web.Response:
        """The load as JSON: cheap, for whoever chooses among relays."""
        return web.json_response(self.load.to_fields())

    async def metrics(self, request: web.Request) -> web.Response:
        """The meters for Prometheus."""
        return web.Response(
            body=metrics_text(self.meters, self.load).encode(), headers={"Content-Type": CONTENT_TYPE}
        )

    async def health(self, request: web.Request) -> web.Response:
        """Status 200 while a packet gets through a circuit of this relay, 503 otherwise; JSON either way.

        The circuit is made through the listener that the request came in by. Its result counts for seconds.
        """
        found = Finding(None, "the relay is going away") if self.draining else await self._try_out(request)
        meters = self.meters
        status = "draining" if self.draining else "ok" if found.rtt_s is not None else "failing"
        body = {
            "status": status,
            "reason": found.reason,
            "circuit_rtt_ms": None if found.rtt_s is None else round(found.rtt_s * 1000, 3),
            "relay": address_of(self.public_key),
            "peers": meters.peers,
            "circuits": len(meters.circuits),
            "market_reachable": self._market.reachable(),
            "certificate_expires_at": self.certificate.expires_at,
        }
        return web.json_response(body, status=200 if status == "ok" else 503)

    async def _try_out(self, request: web.Request) -> Finding:
        transport = request.transport
        name = transport.get_extra_info("sockname") if transport is not None else None
        if transport is None or not isinstance(name, tuple):
            return Finding(None, "this listener has no address to dial")
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        scheme = "https" if transport.get_extra_info("sslcontext") is not None else "http"
        return await self.check(f"{scheme}://{host}:{name[1]}")

    async def check(self, url: str) -> Finding:
        """Try this relay out through its own listener at `url`; answers are shared for a few seconds."""
        return await self._probe.check(url)

    async def drain(self) -> None:
        """Take nothing new, tell every peer when to come back, give circuits time to end, close all."""
        if self.draining:
            return
        self.draining = True
        log.info("relay.draining", peers=len(self._connections), circuits=len(self._board.circuits))
        for connection in list(self._connections.values()):
            connection.go_away("the relay is going away in order", self.config.retry_after_s)
        try:
            async with asyncio.timeout(self.config.drain_s):
                if self._board.circuits:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        for peer in self._board.peers:
            connection = self._connections[peer.number]
            self._leave(peer, "drained")
            connection.close("drained")
        for connection in list(self._everyone):
            connection.close("drained")

    # --- one connection ---

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        forwarded = request.headers.getall("X-Forwarded-For", ())
        address = client_address(request.remote or "unknown", forwarded, self._proxies)
        quota = quota_key(address)
        try:
            if self.draining:
                raise Refused("draining", "the relay is going away", retry_after_s=self.config.retry_after_s)
            self._admission.enter(quota)
        except Refused as error:
            self._refusals[error.code] += 1
            return _refusal(error)
        try:
            response, socket = await accept(request, max_bytes=MAX_FRAME, front=FRONT)
            self._greet(Connection(socket, address, self.config))
            await socket.lost
            return response
        finally:
            self._admission.leave(quota)

    def _greet(self, connection: Connection) -> None:
        """HELLO, and a deadline for AUTH."""
        nonce = secrets.token_bytes(32)
        self._everyone.add(connection)
        deadline = asyncio.get_running_loop().call_later(
            self.config.auth_timeout_s, self._failed, connection, Refused("expired", "no AUTH in time")
        )

        def ended(error: KvasirError) -> None:
            deadline.cancel()
            self._ended(None, connection)

        def first(frame: bytearray | memoryview) -> None:
            peer = self._authenticate(connection, nonce, frame)
            deadline.cancel()
            self._follow(peer, connection)

        connection.socket.attach(first, on_error=partial(self._failed, connection), on_end=ended)
        connection.write(encode(FrameType.HELLO, 0, Hello(self.certificate.document, nonce).to_bytes()))

    def _follow(self, peer: Peer, connection: Connection) -> None:
        """From here on `connection` is `peer`'s."""
        connection.socket.attach(
            cast(Handler, self._taker(peer, connection)),  # `front` has it given what it may keep
            on_error=partial(self._failed, connection),
            on_end=lambda _: self._ended(peer, connection),
            on_writable=connection.on_writable,
        )

    def _failed(self, connection: Connection, error: Exception) -> None:
        """The one boundary of a peer: whatever it set off ends its connection alone."""
        if connection.outcome is not None:
            return
        if isinstance(error, KvasirError):
            self._refusals[error.code] += 1
            retry_after_s = error.retry_after_s if isinstance(error, Refused) else None
            log.info("peer.refused", address=connection.address, code=error.code, reason=str(error))
            connection.refuse(error.code, str(error), retry_after_s, "protocol_error")
        else:
            self._refusals["internal"] += 1
            log.error("peer.crashed", address=connection.address, exc_info=error)
            connection.refuse("internal", "an internal error of the relay", None, "protocol_error")

    def _ended(self, peer: Peer | None, connection: Connection) -> None:
        """A connection is over, for whatever reason."""
        outcome: Outcome | Literal["closed"] = "peer_gone"
        if connection.outcome in OUTCOMES:
            outcome = connection.outcome  # type: ignore[assignment]  # narrowed by the test above
        elif connection.socket.status in (NORMAL, GOING_AWAY):
            outcome = "closed"
        connection.outcome = outcome
        connection.stop()
        self._everyone.discard(connection)
        if peer is not None:
            self._leave(peer, "peer_gone" if outcome == "closed" else outcome)
            self._log(peer)(
                "peer.disconnected",
                peer=address_of(peer.key),
                role=peer.role,
                address=peer.address,
                outcome=outcome,
            )

    def _authenticate(self, connection: Connection, nonce: bytes, frame: bytearray | memoryview) -> Peer:
        """AUTH in, WELCOME out. Raises `KvasirError` with the reason to refuse."""
        kind, _, payload = decode(memoryview(frame)[FRONT:])
        if kind is not FrameType.AUTH:
            raise RemoteProtocolError(f"expected AUTH, got {kind.name}")
        auth = Auth.from_bytes(payload)
        ticket = self._check_ticket(auth.ticket)
        check_auth(
            ticket,
            nonce=nonce,
            relay_key=self.public_key,
            generation=auth.generation,
            signature=auth.signature,
        )
        return self._join(connection, ticket, welcome_message(nonce, auth.signature))

    def _log(self, peer: Peer) -> Callable[..., object]:
        """Health checks come every few seconds: their peers are worth a line to a developer alone."""
        say: Callable[..., object] = log.debug if peer.key in self._probe.keys else log.info
        return say

    def _check_ticket(self, document: SignedDocument) -> Ticket:
        probe = document.signer == self._probe.signer
        if not probe and document.signer not in set(self._market.keys()):
            raise IdentityError("the ticket is not signed by this swarm's market: get a new one")
        ticket = open_ticket(
            document,
            market_key=document.signer,
            relay_key=self.public_key,
            now=self._clock(),
            grace_s=self._grace(),
        )
        if probe is not (ticket.subject in self._probe.keys):
            raise IdentityError("the ticket is a health check's, and its subject is not")
        return ticket

    def _grace(self) -> float:
        return 0.0 if self._market.reachable() else self.config.ticket_grace_s

    def _join(self, connection: Connection, ticket: Ticket, to_sign: bytes) -> Peer:
        peer, instructions = self._board.join(
            ticket.subject, ticket.role, ticket.start_generation, connection.address, time.monotonic()
        )
        self._carry_out(instructions)
        config = self.config
        if peer.role == "backbone":
            connection.bound = config.backbone_outstanding_bytes
        welcome = Welcome(
            ping_s=config.ping_s,
            window_bytes=config.window_bytes,
            max_frame=MAX_FRAME,
            peer_limit=config.rules.circuits(peer.role),
            proof=self._key.sign(to_sign),
        )
        connection.write(encode(FrameType.WELCOME, 0, welcome.to_bytes()))
        connection.ticket_expires_at = ticket.expires_at
        self._connections[peer.number] = peer.link = connection
        low, high = config.ping_jitter_s
        connection.start_pings(
            lambda: config.ping_s + self._rng.uniform(low, high), lambda: self._check_expiry(peer, connection)
        )
        self._log(peer)("peer.connected", peer=address_of(peer.key), role=peer.role, address=peer.address)
        return peer

    def _check_expiry(self, peer: Peer, connection: Connection) -> None:
        if self._clock() > connection.ticket_expires_at + self._grace():
            self._refusals["expired"] += 1
            self._leave(peer, "protocol_error")
            connection.refuse("expired", "the ticket was not renewed: get a new one", None, "protocol_error")

    def _taker(self, peer: Peer, connection: Connection) -> Callable[[bytearray], None]:
        """What takes each frame of `peer`, behind `FRONT` free bytes, for keeps.

        A DATA frame within its credit goes from here to the other side's socket at once.
        """
        board, parse = self._board, HEADER.unpack_from

        def take(frame: bytearray) -> None:
            size = len(frame) - _BEFORE_DATA
            if not 0 < size <= MAX_PACKET or frame[FRONT] != _DATA:
                self._control(peer, connection, memoryview(frame)[FRONT:])
                return
            leg = board.forward(peer, parse(frame, FRONT)[1], size)
            if leg is not None and (leg.other.credit < 0 or not leg.peer.link.forward(leg.id, frame)):
                self._carry_out(board.busy(leg, size, time.monotonic()))

        return take

    def _control(self, peer: Peer, connection: Connection, frame: memoryview) -> None:
        kind, id, payload = decode(frame)
        now = time.monotonic()
        if kind is FrameType.CREDIT:
            self._carry_out(self._board.credit(peer, id, decode_u32(payload)))
        elif kind is FrameType.OPEN:
            self._open(peer, id, Open.from_bytes(payload), now)
        elif kind is FrameType.CLOSE:
            self._carry_out(self._board.close(peer, id, Close.from_bytes(payload), now))
        elif kind is FrameType.PING:
            decode_u64(payload)
            connection.write(encode(FrameType.PONG, 0, payload))
        elif kind is FrameType.PONG:
            connection.pong(decode_u64(payload))
        elif kind is FrameType.TICKET:
            self._renew_ticket(peer, connection, Renewal.from_bytes(payload).ticket)
        else:
            raise RemoteProtocolError(f"a {peer.role} does not send {kind.name}")

    def _open(self, peer: Peer, id: int, wanted: Open, now: float) -> None:
        if self.draining:
            close = Close("draining", "the relay is going away", "refused")
            self._carry_out([Send(peer, encode(FrameType.CLOSE, id, close.to_bytes()))])
            return
        self._carry_out(self._board.open(peer, id, wanted.to, now))

    def _renew_ticket(self, peer: Peer, connection: Connection, document: SignedDocument) -> None:
        ticket = self._check_ticket(document)
        if (ticket.subject, ticket.role, ticket.start_generation) != (peer.key, peer.role, peer.generation):
            raise IdentityError("the new ticket is not for this peer")
        connection.ticket_expires_at = max(connection.ticket_expires_at, ticket.expires_at)

    # --- instructions ---

    def _leave(self, peer: Peer, outcome: Outcome) -> None:
        self._carry_out(self._board.leave(peer, outcome, time.monotonic()))
        self._connections.pop(peer.number, None)
        peer.link = None

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                connection = self._connections.get(instruction.peer.number)
                if connection is not None:
                    connection.write(instruction.frame)
            elif isinstance(instruction, Drop):
                dropped = self._connections.pop(instruction.peer.number, None)
                if dropped is not None:
                    dropped.refuse(instruction.code, instruction.message, None, "duplicate")
            else:
                log.info("circuit.closed", **asdict(instruction.record))
        if not self._board.circuits:
            self._idle.set()


def _refusal(error: Refused) -> web.Response:
    """A refusal before the WebSocket exists."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    body = {"error": {"code": error.code, "message": error.message, "retry_after_s": error.retry_after_s}}
    return web.json_response(body, status=429 if error.code == "quota" else 503, headers=headers)

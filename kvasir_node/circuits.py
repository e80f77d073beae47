"""The relays a node keeps a connection to, and the sessions that backbones open over them or directly.

Knows tickets, circuits and who may shake hands. What is said inside a session is `serving`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import aiohttp
import structlog

from market.messages import RelayInfo
from relay.channel import Channel
from relay.errors import KvasirError, Refused, RemoteProtocolError, Unreachable
from relay.identity import PublicKey, SerialBook, SignedDocument, address_of
from relay.secure import SecureSession
from relay.session import GenerationBook
from relay.tickets import read_ticket
from relay.transport import RelayClient

from .config import NodeConfig
from .joining import Membership
from .status import NodeStatus, SessionStatus

log = structlog.get_logger("node")

TICKET_LEFT_S: Final = 30.0
"""A ticket with less than this left is replaced before it is used."""

MOVE_S: Final = 60.0
"""How long a relay that is not wanted any more is kept for the sessions through it."""

RETRY_S: Final = 60.0
"""When a relay that refused this node for good is asked again."""

Serve = Callable[[SecureSession], Awaitable[None]]
"""Serves one session until it ends; whatever it raises ends that session alone."""


class TicketBook:
    """The newest ticket for each relay, from heartbeats or asked for."""

    def __init__(self) -> None:
        self._tickets: dict[PublicKey, SignedDocument] = {}

    def add(self, documents: Iterable[SignedDocument]) -> None:
        """Keep tickets from a heartbeat's answer; unreadable ones are left out."""
        for document in documents:
            try:
                self._tickets[read_ticket(document).relay] = document
            except RemoteProtocolError as error:
                log.warning("ticket.rejected", reason=str(error))

    def usable(self, relay: PublicKey, *, now: float) -> SignedDocument | None:
        """A ticket for `relay` that has time left at `now` (Unix seconds)."""
        document = self._tickets.get(relay)
        if document is None or read_ticket(document).expires_at - now < TICKET_LEFT_S:
            return None
        return document

    def any(self, relay: PublicKey) -> SignedDocument | None:
        """A ticket for `relay`, expired or not: relays honour old ones while the market is silent."""
        return self._tickets.get(relay)


class Circuits:
    """Connections to every wanted relay, and the sessions on them. `run` owns all tasks."""

    def __init__(
        self,
        member: Callable[[], Membership],
        *,
        generation: int,
        serve: Serve,
        status: NodeStatus,
        http: aiohttp.ClientSession,
        config: NodeConfig,
    ) -> None:
        self._member = member
        self._generation = generation
        self._serve = serve
        self._status = status
        self._http = http
        self._config = config
        self._wanted: dict[str, RelayInfo] = {}
        self._changed = asyncio.Event()
        self._clients: dict[str, RelayClient] = {}
        self._keys: dict[str, PublicKey] = {}
        self._leaving: dict[str, float] = {}  # relays that are kept for their sessions, and how long at most
        self._sessions: dict[int, SecureSession] = {}
        self._via: dict[int, str] = {}  # the relay of each session that goes through one
        self._numbers = itertools.count()
        self._generations = GenerationBook()
        self._serials = SerialBook()
        self.tickets = TicketBook()
        self.on_change: Callable[[], None] = lambda: None
        """Runs whenever a relay is connected, says that it will go away, or is gone."""

    @property
    def called(self) -> bool:
        """Whether any backbone has a session with this node."""
        return bool(self._sessions)

    def want(self, relays: Iterable[RelayInfo]) -> None:
        """Keep connections to these relays, and to others only until the sessions there have moved."""
        wanted = {relay.url: relay for relay in relays}
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    def connected(self, url: str) -> bool:
        """Whether the relay at `url` has taken this node in."""
        client = self._clients.get(url)
        return client is not None and client.connected

    def leaving(self, url: str) -> bool:
        """Whether the relay at `url` has said that it will go away."""
        client = self._clients.get(url)
        return client is not None and client.leaving

    def round_trip(self, url: str) -> float | None:
        """The round trip to the relay at `url` in seconds, measured on the connection."""
        client = self._clients.get(url)
        return None if client is None else client.rtt_s

    async def run(self) -> None:
        """Keep the wanted connections until cancelled.

        Raises `Refused` (duplicate) if another daemon runs with this device's key.
        """
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self._something()
                now = time.monotonic()
                for url in list(running):
                    if running[url].done() or self._may_go(url, now):
                        self._leaving.pop(url, None)
                        self._keys.pop(url, None)
                        running.pop(url).cancel()
                for url, relay in self._wanted.items():
                    self._leaving.pop(url, None)
                    if url not in running:
                        self._keys[url] = relay.key
                        running[url] = group.create_task(self._stay(relay))

    async def _something(self) -> None:
        """Wait until something may have changed, or a relay has been kept long enough."""
        until = min(self._leaving.values(), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                await self._changed.wait()
        self._changed.clear()

    def _may_go(self, url: str, now: float) -> bool:
        """Whether the connection to a relay is of no use any more."""
        if url in self._wanted:
            return False
        moved = self._keys.get(url) in {relay.key for relay in self._wanted.values()}
        if moved or url not in self._via.values() or not self._wanted:
            return True  # also where the relay itself has moved: it takes one connection of a device
        return now >= self._leaving.setdefault(url, now + MOVE_S)

    async def close(self, code: str, message: str) -> None:
        """End every session, telling the backbones why."""
        await asyncio.gather(
            *(session.close(code, message) for session in list(self._sessions.values())),
            return_exceptions=True,
        )

    async def _stay(self, relay: RelayInfo) -> None:
        """Be at one relay until cancelled; one that will not have this node is asked again after a while."""
        while True:
            await self._connect(relay)
            await asyncio.sleep(RETRY_S)

    async def _connect(self, relay: RelayInfo) -> None:
        member = self._member()
        client = RelayClient(
            relay.url,
            member.keys.signing,
            role="device",
            root=member.root,
            ticket=lambda: self._ticket(relay.key),
            start_generation=self._generation,
            on_circuit=lambda channel: self.take(channel, relay.url),
            on_change=lambda: self.on_change(),
            http=self._http,
        )
        self._status.relays[relay.url] = self._clients[relay.url] = client
        try:
            await client.run()
        except Refused as error:
            if error.code == "duplicate":
                raise
            self._status.notify(f"the relay {relay.url} will not have this node: {error}")
            log.error("relay.refused", url=relay.url, code=error.code, reason=str(error))
        except KvasirError as error:
            self._status.notify(f"the relay {relay.url} cannot be used: {error}")
            log.error("relay.failed", url=relay.url, code=error.code, reason=str(error))
        finally:
            if self._clients.get(relay.url) is client:
                self._status.relays.pop(relay.url, None)
                del self._clients[relay.url]
            self.on_change()

    async def _ticket(self, relay: PublicKey) -> SignedDocument:
        ticket = self.tickets.usable(relay, now=time.time())
        if ticket is not None:
            return ticket
        try:
            fresh = await self._member().market.ticket(relay, start_generation=self._generation)
        except Unreachable:
            old = self.tickets.any(relay)
            if old is None:
                raise
            return old
        self.tickets.add((fresh,))
        return fresh

    async def take(self, channel: Channel, relay: str = "") -> None:
        """One incoming circuit through `relay`, or direct link, to its end: the boundary for this peer."""
        if len(self._sessions) >= self._config.max_sessions:
            await channel.close("quota", f"this node has {len(self._sessions)} sessions already")
            return
        member = self._member()
        try:
            session = await SecureSession.accept(
                channel,
                key=member.keys.exchange,
                root=member.root,
                grant_hash=member.grant.hash,
                generations=self._generations,
                serials=self._serials,
                timeout=self._config.handshake_s,
            )
        except KvasirError as error:
            log.warning(
                "session.refused",
                peer=address_of(channel.peer),
                path=channel.path,
                code=error.code,
                reason=str(error),
            )
            return
        await self._serve_session(session, relay)

    async def _serve_session(self, session: SecureSession, relay: str) -> None:
        backbone = session.certificate.id.hex()
        older = [s for s in self._sessions.values() if s.certificate.id == session.certificate.id]
        number = next(self._numbers)
        self._sessions[number] = session
        if relay:
            self._via[number] = relay
        self._status.sessions[number] = SessionStatus(backbone, session, time.time(), relay)
        log.info(
            "session.opened",
            backbone=backbone,
            path=session.path,
            relay=relay or None,
            generation=session.generation,
        )
        reason = ""
        try:
            async with asyncio.TaskGroup() as tasks:  # a link that broke may take its time to close
                for other in older:
                    tasks.create_task(other.close("closed", "a newer session took over"))
                await self._serve(session)
        except* (KvasirError, OSError) as group:
            reason = str(_first(group))
        finally:
            self._sessions.pop(number, None)
            self._status.sessions.pop(number, None)
            if self._via.pop(number, None) is not None and self._leaving:
                self._changed.set()
            await session.close()
            log.info(
                "session.closed",
                backbone=backbone,
                outcome=session.outcome or "closed",
                reason=reason,
                bytes_sent=session.bytes_sent,
                bytes_received=session.bytes_received,
            )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""Dialling: one authenticated connection to a relay, and the circuits it carries.

Theory of operation. `RelayClient.run` keeps one WebSocket to one relay and reads it; each circuit is a
`RelayChannel` with an inbox that the reader fills and never waits for, because the credit window bounds it.
A backbone opens circuits; a device is given each incoming one in a task of its own. When the connection is
lost every channel ends and the client dials again, with full jitter.

`SecureSession` (from `secure.py`) runs over a channel. Knows nothing of what packets mean.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import structlog

from .carrier import Link, RelayChannel
from .channel import Channel
from .config import TransportConfig
from .errors import ConfigError, IdentityError, KvasirError, Refused, RemoteProtocolError, Unreachable
from .frames import HEADER, MAX_FRAME, FrameType, decode, decode_u32, decode_u64, encode
from .identity import PublicKey, SignedDocument, SigningKey, address_of, open_certificate, verify
from .messages import Auth, Close, GoAway, Hello, Incoming, Open, RefusedMessage, Renewal, Welcome
from .secure import SecureSession
from .tickets import PeerRole, auth_message, read_ticket, welcome_message
from .wire import WebSocket, dial

__all__ = [
    "Channel",
    "RelayChannel",
    "RelayClient",
    "SecureSession",
    "TransportConfig",
    "reconnect_delay",
    "relay_endpoint",
]

SPREAD_ATTEMPT: Final = 4
"""What the first try after a relay vanished counts as: the pause after it is up to 0.5 * 2^4 seconds."""

RELAY_PATH: Final = "/relay/v1"
_FATAL: Final = frozenset({"duplicate", "version", "wrong_swarm"})
_DATA: Final = int(FrameType.DATA)
_EMPTY: Final = HEADER.size

log = structlog.get_logger("relay")


def relay_endpoint(url: str) -> str:
    """The WebSocket address of the relay at `url`, which may be http(s) or ws(s), with or without its path.

    Raises `ConfigError`.
    """
    parts = urlsplit(url)
    scheme = {"http": "http", "ws": "http", "https": "https", "wss": "https"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise ConfigError(f"{url!r} is not a relay's address: it looks like http://HOST:PORT")
    path = parts.path.rstrip("/")
    return urlunsplit(
        (scheme, parts.netloc, path if path.endswith(RELAY_PATH) else path + RELAY_PATH, "", "")
    )


def reconnect_delay(
    attempt: int, *, vanished: bool, retry_after_s: float | None, config: TransportConfig, rng: random.Random
) -> float:
    """Seconds before dial number `attempt` (from 0) since the last connection: full jitter.

    `vanished`: a connected relay went away without a word, so thousands may dial at once.
    """
    if retry_after_s is not None:
        return retry_after_s + rng.uniform(0.0, config.vanished_spread_s)
    if attempt == 0:
        return rng.uniform(0.0, config.vanished_spread_s) if vanished else 0.0
    return rng.uniform(0.0, min(config.max_backoff_s, 0.5 * 2.0 ** min(attempt, 16)))


class RelayClient:
    """One authenticated connection to one relay, kept up for as long as `run` runs.

    `ticket` fetches a ticket for this relay from the market; it may raise any `KvasirError`, and is asked
    again. `on_circuit` (devices) serves one incoming channel and may raise; it runs in a task of its own.
    `root` is the pinned swarm root that must have certified the relay. `on_change` runs whenever the relay
    is connected, says that it will go away, or is gone.
    """

    def __init__(
        self,
        url: str,
        key: SigningKey,
        *,
        role: PeerRole,
        root: PublicKey,
        ticket: Callable[[], Awaitable[SignedDocument]],
        start_generation: int,
        on_circuit: Callable[[Channel], Awaitable[None]] | None = None,
        on_change: Callable[[], None] | None = None,
        config: TransportConfig | None = None,
        http: aiohttp.ClientSession,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.url = relay_endpoint(url)
        self.relay_key: PublicKey | None = None
        self.rtt_s: float | None = None
        self._key, self._role, self._root = key, role, root
        self._ticket, self._start_generation = ticket, start_generation
        self._on_circuit = on_circuit
        self._on_change = on_change or (lambda: None)
        self._config = config or TransportConfig()
        self._http, self._clock = http, clock
        self._rng = rng or random.SystemRandom()
        self._link: Link | None = None
        self._up = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._serving = 0
        self._last_error: KvasirError | None = None

    @property
    def connected(self) -> bool:
        """Whether the relay has welcomed this client and the connection stands."""
        return self._link is not None

    @property
    def leaving(self) -> bool:
        """Whether the relay has said that it will go away; it opens no more circuits."""
        return self._link is not None and self._link.goaway is not None

    @property
    def circuits(self) -> int:
        """How many circuits are open on this connection."""
        return len(self._link.channels) if self._link else 0

    async def wait_connected(self, timeout: float) -> None:
        """Return once connected. Raises `Unreachable` after `timeout` seconds, with the last reason."""
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
        except TimeoutError:
            why = f": {self._last_error}" if self._last_error else ""
            raise Unreachable(f"no connection to the relay {self.url} within {timeout:g} s{why}") from None

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises `Refused` if dialling again cannot help: "duplicate" (another daemon runs with this key),
        "version" or "wrong_swarm".
        """
        fatal: Refused | IdentityError | None = None
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            fatal = await self._stay_connected()
        if fatal is not None:
            raise fatal

    async def open(self, device: PublicKey, *, timeout: float) -> Channel:
        """A circuit to `device` (backbones only).

        Raises `Unreachable` (not connected, no such device here, no answer within `timeout` seconds) or
        `Refused` (quota and the like).
        """
        link = self._link
        if link is None or link.goaway is not None:
            raise Unreachable(f"the relay {self.url} is not connected")
        id = link.take_id()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.opening[id] = answer
        channel = RelayChannel(link, id, device)
        link.channels[id] = channel
        try:
            async with asyncio.timeout(timeout):
                link.write(encode(FrameType.OPEN, id, Open(device).to_bytes()))
                await answer
        except TimeoutError:
            await channel.close("unreachable", "the circuit was not opened in time")
            raise Unreachable(f"the relay did not open a circuit within {timeout:g} s") from None
        except asyncio.CancelledError:
            await channel.close("unreachable", "the circuit was given up")
            raise
        except KvasirError:
            link.forget(id)
            raise
        finally:
            link.opening.pop(id, None)
        return channel

    # --- the connection ---

    async def _stay_connected(self) -> Refused | IdentityError | None:
        attempt, vanished, retry_after = 0, False, None
        while True:
            delay = reconnect_delay(
                attempt, vanished=vanished, retry_after_s=retry_after, config=self._config, rng=self._rng
            )
            if delay:
                await asyncio.sleep(delay)
            # Whole crowds come back after a relay vanished: those that fail then spread as wide again.
            attempt = max(attempt + 1, SPREAD_ATTEMPT if vanished else 0)
            vanished, retry_after = False, None
            try:
                link = await self._dial()
            except KvasirError as error:
                self._note(error, attempt)
                if error.code in _FATAL and isinstance(error, Refused | IdentityError):
                    return error
                retry_after = getattr(error, "retry_after_s", None)
                continue
            attempt, vanished = 0, True
            try:
                await self._serve(link)
            except KvasirError as error:
                self._note(error, 0)
                if error.code in _FATAL and isinstance(error, Refused):
                    return error
                retry_after = getattr(error, "retry_after_s", None)
                if isinstance(error, Refused):  # it did say a word
                    attempt, vanished = 1, False
            if link.goaway is not None:
                retry_after = link.goaway.retry_after_s

    def _note(self, error: KvasirError, attempt: int) -> None:
        self._last_error = error
        log.warning("relay.unreachable", relay=self.url, code=error.code, reason=str(error), attempt=attempt)

    async def _dial(self) -> Link:
        """Connect and prove who we are. Raises `KvasirError`."""
        timeout = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(timeout):
                ticket = await self._ticket()
                socket = await dial(self._http, self.url, max_bytes=MAX_FRAME)
                try:
                    return await self._authenticate(socket, ticket)
                except BaseException:
                    socket.close()
                    raise
        except TimeoutError:
            raise Unreachable(f"the relay {self.url} did not answer within {timeout:g} s") from None

    async def _authenticate(self, socket: WebSocket, ticket: SignedDocument) -> Link:
        hello = Hello.from_bytes(await _expect(socket, FrameType.HELLO))
        now = self._clock()
        relay = open_certificate(hello.certificate, swarm=self._root, now=now, role="relay")
        if read_ticket(ticket).relay != relay.ed25519:
            raise IdentityError(f"the relay at {self.url} is {address_of(relay.ed25519)}, not the ticket's")
        signature = self._key.sign(auth_message(hello.nonce, relay.ed25519, ticket))
        auth = Auth(ticket, self._start_generation, signature)
        socket.write(encode(FrameType.AUTH, 0, auth.to_bytes()))
        welcome = Welcome.from_bytes(await _expect(socket, FrameType.WELCOME))
        verify(relay.ed25519, welcome.proof, welcome_message(hello.nonce, signature))
        return Link(socket, welcome, relay.ed25519, ticket, self._config)

    async def _serve(self, link: Link) -> None:
        """Follow the connection to its end. Raises `KvasirError` with the reason if there was one."""
        self._link, self.relay_key = link, link.key
        self._up.set()
        log.info("relay.connected", relay=self.url, role=self._role)
        self._on_change()
        assert self._tasks is not None
        keeper = self._tasks.create_task(self._keep(link))
        reason: KvasirError = Unreachable("the connection to the relay was lost")
        try:
            await self._follow(link)
        except KvasirError as error:
            reason = error
            raise
        except asyncio.CancelledError:
            reason = Unreachable("this side is stopping")
            raise
        finally:
            self._link = None
            self._up.clear()
            self.rtt_s = None
            link.lost(reason if isinstance(reason, Unreachable) else Unreachable(str(reason)))
            keeper.cancel()
            link.socket.close()
            log.info("relay.disconnected", relay=self.url, reason=str(reason), code=reason.code)
            self._on_change()

    async def _follow(self, link: Link) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def failed(error: Exception) -> None:
            if not ended.done():
                ended.set_exception(error)

        def over(error: KvasirError) -> None:
            if not ended.done():
                if link.socket.status is None:
                    ended.set_exception(error)
                else:
                    ended.set_result(None)

        link.socket.attach(self._taker(link), on_error=failed, on_end=over)
        await ended

    def _taker(self, link: Link) -> Callable[[bytearray | memoryview], None]:
        """What takes each frame of the relay."""
        parse = HEADER.unpack_from

        def take(frame: bytearray | memoryview) -> None:
            if len(frame) > _EMPTY and frame[0] == _DATA:
                channel = link.channels.get(parse(frame)[1])
                if channel is not None and not channel.arrived(memoryview(frame)[_EMPTY:]):
                    raise RemoteProtocolError("the relay sent more than the circuit's window")
            else:
                self._control(link, frame)

        return take

    def _control(self, link: Link, frame: bytearray | memoryview) -> None:
        kind, id, payload = decode(frame)
        if kind is FrameType.CREDIT:
            if id in link.channels:
                link.channels[id].credited(decode_u32(payload))
        elif kind is FrameType.PING:
            link.write(encode(FrameType.PONG, 0, payload))
        elif kind is FrameType.PONG:
            if decode_u64(payload) == link.ping_id:
                link.pong.set()
        elif kind is FrameType.OPENED:
            waiting = link.opening.get(id)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        elif kind is FrameType.INCOMING:
            self._incoming(link, id, Incoming.from_bytes(payload))
        elif kind is FrameType.CLOSE:
            self._closed(link, id, Close.from_bytes(payload))
        elif kind is FrameType.BUSY:
            self._closed(link, id, Close("busy", "the circuit's window or the peer's bound is full", "busy"))
        elif kind is FrameType.GOAWAY:
            link.goaway = GoAway.from_bytes(payload)
            log.info("relay.draining", relay=self.url, reason=link.goaway.reason)
            self._on_change()
        elif kind is FrameType.REFUSED:
            refused = RefusedMessage.from_bytes(payload)
            raise Refused(refused.code, refused.message, retry_after_s=refused.retry_after_s)
        else:
            raise RemoteProtocolError(f"a relay does not send {kind.name}")

    def _incoming(self, link: Link, id: int, incoming: Incoming) -> None:
        channel = RelayChannel(link, id, incoming.source)
        if id in link.channels:
            raise RemoteProtocolError(f"circuit {id} is open already")
        if self._on_circuit is None or self._tasks is None:
            channel.end("forbidden", "this peer takes no circuits")
        elif self._serving >= self._config.max_circuits:
            channel.end("quota", "this peer serves all the circuits it can")
        else:
            link.channels[id] = channel
            self._serving += 1
            self._tasks.create_task(self._serve_circuit(channel, self._on_circuit))

    async def _serve_circuit(
        self, channel: RelayChannel, serve: Callable[[Channel], Awaitable[None]]
    ) -> None:
        """The one boundary of a circuit: whatever its handler raises ends this circuit alone."""
        code, message = "closed", ""
        try:
            await serve(channel)
        except (KvasirError, OSError) as error:
            code = error.code if isinstance(error, KvasirError) else "internal"
            message = str(error)
            event = "circuit.ended" if isinstance(error, Unreachable) else "circuit.failed"
            log.info(event, relay=self.url, peer=address_of(channel.peer), code=code, reason=message)
        except Exception:
            code, message = "internal", "an internal error"
            log.exception("circuit.crashed", relay=self.url, peer=address_of(channel.peer))
        finally:
            self._serving -= 1
            await channel.close(code, message)

    def _closed(self, link: Link, id: int, close: Close) -> None:
        text = close.message or f"the circuit ended ({close.outcome})"
        code = None if close.code == "closed" else close.code
        waiting = link.opening.get(id)
        if waiting is not None and not waiting.done():
            unreachable = close.code in ("unreachable", "draining", "duplicate")
            waiting.set_exception(Unreachable(text, code=code) if unreachable else Refused(close.code, text))
        channel = link.channels.pop(id, None)
        if channel is not None:
            channel.ended(Unreachable(text, code=code))

    async def _keep(self, link: Link) -> None:
        """Ping, and renew the ticket before it expires; end the connection when the relay is silent."""
        pause = self._config.ping_s or link.welcome.ping_s
        renew_at = time.monotonic() + self._until_renewal(link.ticket)
        while True:
            if not await self._ping(link):
                log.warning("relay.silent", relay=self.url)
                link.socket.abort(Unreachable("the relay answers no pings"))
                return
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + await self._renew(link)
            await asyncio.sleep(min(pause, max(0.05, renew_at - time.monotonic())))

    async def _ping(self, link: Link) -> bool:
        link.ping_id += 1
        link.pong.clear()
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._config.pong_timeout_s):
                link.write(encode(FrameType.PING, 0, link.ping_id.to_bytes(8, "big")))
                await link.pong.wait()
        except (TimeoutError, Unreachable):
            return False
        self.rtt_s = time.monotonic() - started
        return True

    async def _renew(self, link: Link) -> float:
        """Send a new ticket; the seconds until the next one is due."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                ticket = await self._ticket()
                link.write(encode(FrameType.TICKET, 0, Renewal(ticket).to_bytes()))
        except (TimeoutError, KvasirError) as error:
            log.warning("ticket.unavailable", relay=self.url, reason=str(error))
            return 5.0
        return self._until_renewal(ticket)

    def _until_renewal(self, ticket: SignedDocument) -> float:
        """Half of what is left of a ticket, within bounds that a wrong clock cannot stretch. Seconds."""
        return min(60.0, max(10.0, (read_ticket(ticket).expires_at - self._clock()) / 2))


async def _expect(socket: WebSocket, wanted: FrameType) -> memoryview:
    """The payload of the next frame, which must be `wanted`. Raises the relay's refusal, or what is wrong."""
    kind, _, payload = decode(await socket.receive())
    if kind is FrameType.REFUSED:
        refused = RefusedMessage.from_bytes(payload)
        raise Refused(refused.code, refused.message, retry_after_s=refused.retry_after_s)
    if kind is not wanted:
        raise RemoteProtocolError(f"expected {wanted.name} from the relay, got {kind.name}")
    return payload

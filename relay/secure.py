"""A secure session over a channel: the asyncio shell of `session.py`.

Who owns what: whoever made the session reads from it in one task, may send from any number of tasks, and
closes it. Knows nothing of what messages mean.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, NoReturn

from .channel import Channel, Packet, Path
from .circuit import Outcome
from .errors import KvasirError, Unreachable
from .frames import MAX_PACKET, MIN_COST
from .identity import Certificate, ExchangeKey, ExchangePublic, PublicKey, SerialBook
from .noise import TAG_BYTES
from .session import GenerationBook, Initiator, Message, RekeyLimits, Responder, SessionCore

REKEY_BYTES: Final = 1 + TAG_BYTES
"""Size of the packet that announces a new key."""

_WHOLE: Final = (bytes, bytearray, memoryview)

CLOSE_TIMEOUT_S: Final = 2.0
"""How long `close` waits for room to say so."""


class SecureSession:
    """An end-to-end encrypted, ordered stream of messages with one peer.

    `certificate` is the backbone's, `generation` this handshake's; `bytes_sent` and `bytes_received` count
    packets as they are on the link. `outcome` is None until the session ends, then one of
    `circuit.OUTCOMES`.
    """

    def __init__(self, channel: Channel, core: SessionCore) -> None:
        self.channel = channel
        self.bytes_sent = 0
        self.bytes_received = 0
        self.outcome: Outcome | None = None
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._ready: deque[tuple[bytes, int]] = deque()  # messages, and what their packets cost the window
        self._cost = 0  # of packets that have made no message yet
        self._waiter: asyncio.Future[None] | None = None
        self._end: Unreachable | None = None
        self._handler: Callable[[bytes], None] | None = None
        self._fault: Exception | None = None  # what the handler raised
        self._held = False
        self._handing_on = False
        channel.attach(self._take, self._lost)

    # --- making one ---

    @classmethod
    async def connect(
        cls,
        channel: Channel,
        *,
        certificate: Certificate,
        key: ExchangeKey,
        device_key: ExchangePublic,
        root: PublicKey,
        grant_hash: bytes,
        generation: int,
        timeout: float,
        limits: RekeyLimits | None = None,
    ) -> SecureSession:
        """The backbone's side: shake hands and confirm. `key` belongs to `certificate`.

        Raises `Refused` (the device's own no), `Unreachable`, `IdentityError` or `RemoteProtocolError`; the
        channel is closed then.
        """
        initiator = Initiator(
            certificate=certificate,
            key=key,
            device_key=device_key,
            root=root,
            grant_hash=grant_hash,
            generation=generation,
            ephemeral=ExchangeKey.generate(),
        )
        async with _handshake(channel, timeout):
            await channel.send(initiator.offer())
            core = initiator.receive_answer(await channel.receive(), time.monotonic(), limits)
            session = cls(channel, core)
            await session.send(b"")
            return session

    @classmethod
    async def accept(
        cls,
        channel: Channel,
        *,
        key: ExchangeKey,
        root: PublicKey,
        grant_hash: bytes,
        generations: GenerationBook,
        serials: SerialBook,
        now: Callable[[], float] = time.time,
        timeout: float,
        limits: RekeyLimits | None = None,
    ) -> SecureSession:
        """The device's side: check the offer, answer, and wait for the first packet that decrypts.

        `now` gives Unix seconds. Raises as `connect` does; an unacceptable offer is answered with why. The
        caller keeps its older session until this returns.
        """
        responder = Responder(
            key=key,
            root=root,
            grant_hash=grant_hash,
            generations=generations,
            serials=serials,
            ephemeral=ExchangeKey.generate(),
        )
        async with _handshake(channel, timeout):
            offer = await channel.receive()
            try:
                answer, core = responder.receive_offer(
                    offer, unix_now=now(), now=time.monotonic(), limits=limits
                )
            except KvasirError as error:
                await channel.send(responder.refusal(error))
                raise
            await channel.send(answer)
            session = cls(channel, core)
            await session._confirm()
            generations.complete(core.certificate.id, core.generation)
            return session

    # --- what it is ---

    @property
    def certificate(self) -> Certificate:
        """The backbone's certificate: the peer's on a device, one's own on a backbone."""
        return self._core.certificate

    @property
    def generation(self) -> int:
        """This handshake's generation."""
        return self._core.generation

    @property
    def binding(self) -> bytes:
        """The 32-byte handshake hash: equal on both sides of this session and nowhere else."""
        return self._core.binding

    @property
    def path(self) -> Path:
        """How packets travel."""
        return self.channel.path

    @property
    def needs_handshake(self) -> bool:
        """Whether the session is an hour old, so that a new one should take over."""
        return self._core.needs_handshake(time.monotonic())

    def bound_messages(self, small: int, allowance: Callable[[], int]) -> None:
        """From now on no message of the peer may be larger than `small`, or what `allowance` gives, in bytes.

        `allowance` is asked while a message over `small` comes in; going over ends the session.
        """
        self._core.bound_messages(small, allowance)

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._end is not None

    # --- using it ---

    async def send(self, message: Message) -> None:
        """Send one message (bytes, or parts sent as if joined), whole and in order; callers wait their turn.

        Returns once it is on the link. Cancelled before, it may be given up: the peer then never sees it.
        Raises `Unreachable` if the session ended or the peer does not read.
        """
        if self.try_send(message):
            return
        async with self._sending:
            if self._end is not None:
                raise self._end
            try:
                await self._put(self._core.records(message))
            except Unreachable as error:
                if error.code != "busy":  # a peer that does not read may read again
                    self._lost(error)
                raise

    def try_send(self, message: Message) -> bool:
        """Send one message at once; False, and nothing sent, where only `send` can: it may have to wait."""
        if self._end is not None or self._sending.locked():
            return False
        channel = self.channel
        size = (len(message) if isinstance(message, _WHOLE) else sum(map(len, message))) + REKEY_BYTES
        if size > MAX_PACKET or not channel.room(size):
            return False
        packet = self._core.pack(message, time.monotonic(), channel.headroom)
        if packet is None:
            return False
        self.bytes_sent += size
        channel.put(packet)
        return True

    def listen(self, handler: Callable[[bytes], None]) -> None:
        """From now on `handler` is given each message as it arrives, those that wait first; no `receive`.

        Once it has raised, it is given nothing more, and `ended` raises the same.
        """
        self._handler = handler
        self._hand_on()

    def hold(self) -> None:
        """Give the handler nothing until `read_on`: messages wait, within the bound of the channel."""
        self._held = True

    def read_on(self) -> None:
        """The end of `hold`."""
        self._held = False
        self._hand_on()

    async def ended(self) -> NoReturn:
        """Wait for the end of a session that somebody listens to.

        Raises what the handler raised, or `Unreachable`, saying why the session ended.
        """
        while (why := self._fault or self._end) is None:
            await self._wait()
        raise why

    def _hand_on(self) -> None:
        """Give the handler what waits."""
        if self._handing_on or self._handler is None:
            return
        self._handing_on = True
        try:
            while self._ready and not self._held:
                message, cost = self._ready.popleft()
                self.channel.consumed(cost)
                self._handler(message)
            if not self._held:
                self._free()
        except Exception as fault:  # its owner's to judge: `ended` raises it
            self._fault, self._held = fault, True
            self._wake()
        finally:
            self._handing_on = False

    async def receive(self) -> bytes:
        """The next message, never empty. Raises `Unreachable` when the session ended, saying why."""
        ready = self._ready
        while not ready:
            if self._end is not None:
                raise self._end
            if self._cost:
                self._free()
            assert self._waiter is None, "a session has one reader"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, cost = ready.popleft()
        self.channel.consumed(cost)
        return message

    async def close(self, code: str = "closed", message: str = "") -> None:
        """Say goodbye if there is room within two seconds, and end the session and its channel."""
        if self._end is None:
            self._finish(
                "drained" if code == "draining" else "closed", message or "closed by this side", code
            )
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S), self._sending:
                    await self._put(iter((self._core.close_record(code, message),)))
            except (TimeoutError, KvasirError):
                pass  # the channel's own close says the same, in clear
        await self.channel.close(code, message)

    async def _put(self, records: Iterator[bytes]) -> None:
        core, channel = self._core, self.channel
        for record in records:
            if core.rekey_due(time.monotonic()):
                await channel.reserve(REKEY_BYTES)
                self.bytes_sent += REKEY_BYTES
                channel.put(core.seal_rekey(time.monotonic(), channel.headroom))
            size = len(record) + TAG_BYTES
            await channel.reserve(size)
            self.bytes_sent += size
            channel.put(core.seal(record, channel.headroom))

    def _take(self, packet: Packet) -> None:
        """The channel has read a packet. Raises `KvasirError` if that ends the session."""
        if self._end is not None:
            return
        core, size = self._core, len(packet)
        self.bytes_received += size
        self._cost += size if size > MIN_COST else MIN_COST
        confirmed = core.confirmed
        try:
            message = core.receive(packet, time.monotonic())
        except KvasirError as error:
            self._finish("protocol_error", f"the session ended: {error}", error.code)
            raise
        if message is not None:
            self._ready.append((message, self._cost))
            self._cost = 0
            if self._handler is not None:
                self._hand_on()
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        elif core.peer_close is not None:
            code, text = core.peer_close
            self._finish(
                "drained" if code == "draining" else "closed", text or "the peer closed the session", code
            )
            self.channel.end(code, text)
        elif not self._ready and (self._waiter is not None if self._handler is None else not self._held):
            self._free()
        if not confirmed:
            self._wake()

    def _free(self) -> None:
        """Somebody waits for a message, of which parts are here: it may need more than the window."""
        if self._cost:
            self.channel.consumed(self._cost)
            self._cost = 0

    def _lost(self, error: Unreachable) -> None:
        self._finish("peer_gone", str(error), error.code)

    async def _wait(self) -> None:
        """Return once something has arrived."""
        assert self._waiter is None, "a session has one reader"
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _confirm(self) -> None:
        while not self._core.confirmed:
            if self._end is not None:
                raise self._end
            await self._wait()

    def _finish(self, outcome: Outcome, message: str, code: str) -> None:
        if self._end is None:
            self.outcome = outcome
            self._end = Unreachable(message, code=None if code == "closed" else code)
            self._wake()


@asynccontextmanager
async def _handshake(channel: Channel, timeout: float) -> AsyncIterator[None]:
    """A handshake's deadline; the channel is closed if it fails in any way."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        await channel.close("unreachable", "the handshake took too long")
        raise Unreachable(f"no session within {timeout:g} s: the peer did not answer") from None
    except KvasirError as error:
        await channel.close(error.code, "the handshake failed")
        raise
    except asyncio.CancelledError:
        await channel.close("unreachable", "the handshake was given up")
        raise

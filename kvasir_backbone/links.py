"""One device's session, kept up: calls out, replies in, receipts and notices beside them.

A link dials, announces its references, and then runs a reader and a writer until the session ends; calls
in flight fail at once when it does, so that they can be made elsewhere. A session is replaced by a new
handshake when it is an hour old, when it goes through a relay and a direct way is found, and when a direct
link breaks: the device may still be at its relay. The calls in flight are then sent again on the new one
(each is paid once, whoever answers: a call id ends once), and the old one is closed once the new is in use.

Knows sessions and call ids. Knows no windows, plans or credit: what is announced and sent is its owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from kvasir_node.calls import (
    MAX_MESSAGE_BYTES,
    MAX_SMALL_BYTES,
    Buffers,
    Cancel,
    Draining,
    Notice,
    ReceiptAck,
    ReceiptMessage,
    Reference,
    References,
    Refusal,
    Reply,
    decode,
    encode,
)
from relay.errors import KvasirError, RemoteProtocolError, Unreachable
from relay.identity import PublicKey, address_of
from relay.secure import SecureSession

from .dispatch import CallEnd

_log = structlog.get_logger("backbone")

MAX_QUEUED: Final = 512
"""Messages waiting for one device; a call beyond that is refused here as overloaded."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 16.0
"""Pauses before dialling again: full jitter, doubling from the first to the longest."""

AFTER_DRAIN: Final = 5
"""A device that went away in order is dialled as after so many failures, unless it starts anew (`hurry`)."""

AGE_CHECK_S: Final = 15.0
"""How often a session's age is looked at."""

FIRST_LOOK_S: Final = 0.5
"""When a direct way is looked for after a session came up through a relay."""

LOOK_AGAIN_S: Final = 5.0
LONGEST_LOOK_S: Final = 300.0
"""Pauses before it is looked for again: half to full, doubling from the first to the longest."""

STEADY_S: Final = 60.0
"""A direct session that lasted so long was a good one: the pauses start anew after it."""

RETURN_S: Final = 2.0
"""How long the device may take to be back on another path after its link, or its relay, broke."""

SETTLE_S: Final = 1.0
"""How long a session that its device closed is looked at while a handshake is under way: it may be why."""


@dataclass(slots=True)
class _Pending:
    """A call in flight: its message, kept so that it can be sent again on another path; its reply's size."""

    message: Buffers
    done: Callable[[CallEnd], None]
    answer_bytes: int
    cancelled: bool = False


class DeviceLink:
    """The session with one device. All methods belong to the loop's thread.

    `dial` makes a session (raising `KvasirError`); `references` gives what to announce on it; `on_up` runs
    after the announcement of every new session, `on_down` after its end; `on_ack` takes the device's
    countersignatures, `on_draining` its reason for going away. `improve` makes a session on a better way in
    the place of one that goes through a relay, or says that there is none; `detached` says whether that relay
    is gone, so that the device may be reached through another.
    """

    def __init__(
        self,
        device: PublicKey,
        *,
        dial: Callable[[], Awaitable[SecureSession]],
        references: Callable[[], Iterable[Reference]],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_ack: Callable[[bytes], None],
        on_draining: Callable[[str], None],
        improve: Callable[[SecureSession], Awaitable[SecureSession | None]] | None = None,
        detached: Callable[[], bool] = lambda: False,
        rng: random.Random | None = None,
    ) -> None:
        self.device = device
        self.session: SecureSession | None = None
        self.draining = False
        self.last_error = ""
        self.up = asyncio.Event()
        """Set while a session is up."""
        self._dial = dial
        self._improve = improve
        self._detached = detached
        self._references = references
        self._on_up, self._on_down = on_up, on_down
        self._on_ack, self._on_draining = on_ack, on_draining
        self._rng = rng or random.SystemRandom()
        self._pending: dict[int, _Pending] = {}
        self._outbox: asyncio.Queue[Buffers] = asyncio.Queue(MAX_QUEUED)
        self._writing = False  # a message that had to wait is not on the link yet
        self._announced: dict[int, Reference] = {}
        self._hurry = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._look = asyncio.Event()  # a direct way may be there now
        self._look_at = 0.0
        self._looks = 0
        self._settled = asyncio.Event()  # cleared while another session is being made
        self._settled.set()

    @property
    def may_go_direct(self) -> bool:
        """Whether it is time to look for a direct way."""
        return time.monotonic() >= self._look_at

    def readdressed(self) -> None:
        """The device's addresses have changed: look for a direct way now."""
        self._looks, self._look_at = 0, 0.0
        self._look.set()

    @property
    def path(self) -> str:
        """How the session travels: "relay", "direct", or "none"."""
        return "none" if self.session is None else self.session.path

    # --- sending -------------------------------------------------------------------------------------

    def submit(
        self,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        answer_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Send a call; `done` is called exactly once with its end. `answer_bytes` bounds its reply."""
        if self.session is None:
            done(CallEnd(call_id, time.monotonic(), message=f"no session: {self.last_error or 'not yet'}"))
            return
        if self._outbox.empty() and not self._writing and self.session.try_send(message):
            self._pending[call_id] = _Pending(message, done, answer_bytes)
            self._idle.clear()
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            text = f"{MAX_QUEUED} messages wait for this device already"
            done(CallEnd(call_id, time.monotonic(), code="overloaded", message=text))
            return
        self._pending[call_id] = _Pending(message, done, answer_bytes)
        self._idle.clear()

    def cancel(self, call_id: int) -> None:
        """Tell the device that nobody waits for this call. It still ends once: with a reply, or refused."""
        pending = self._pending.get(call_id)
        if pending is not None and not pending.cancelled:
            pending.cancelled = True
            if self.session is not None:
                self._post(encode(Cancel(call_id)))

    async def call(self, call_id: int, message: Buffers, *, timeout: float) -> CallEnd:
        """Send a call and wait for its end. Raises `Unreachable` after `timeout` seconds."""
        answer: asyncio.Future[CallEnd] = asyncio.get_running_loop().create_future()

        def done(end: CallEnd) -> None:
            if not answer.done():
                answer.set_result(end)

        self.submit(call_id, message, done)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise Unreachable(f"no reply within {timeout:g} s") from None
        finally:
            self._take(call_id)

    def _allowance(self) -> int:
        """The largest message that the device has a reason to send now, in bytes."""
        return max((call.answer_bytes for call in self._pending.values()), default=0)

    async def wait_idle(self, timeout: float) -> bool:
        """Whether within `timeout` seconds no call is in flight."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _take(self, call_id: int) -> _Pending | None:
        pending = self._pending.pop(call_id, None)
        if not self._pending:
            self._idle.set()
        return pending

    def announce(self) -> None:
        """Tell the device which references have changed since the last announcement."""
        if self.session is None:
            return
        wanted = {reference.ref: reference for reference in self._references()}
        changed = [ref for number, ref in wanted.items() if self._announced.get(number) != ref]
        gone = [
            Reference(old.ref, old.lease, None, old.plan)
            for number, old in self._announced.items()
            if number not in wanted
        ]
        if (changed or gone) and self._post(encode(References((*changed, *gone)))):
            self._announced = wanted

    def announce_again(self) -> None:
        """Tell the device all references anew: it seems to know others."""
        self._announced = {}
        self.announce()

    def send_receipt(self, receipt: bytes) -> None:
        """Send a receipt for countersignature, if a session is up and has room."""
        if self.session is not None:
            self._post(encode(ReceiptMessage(receipt)))

    def send_notice(self, code: str, message: str) -> None:
        """Tell the device's owner something, if a session is up and has room."""
        if self.session is not None:
            self._post(encode(Notice(code, message)))

    def _post(self, message: Buffers) -> bool:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    # --- life ----------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Something changed at the device: dial now instead of after the pause."""
        self._hurry.set()

    async def run(self) -> None:
        """Keep a session up until cancelled. Then the session is closed in order."""
        attempt = 0
        session: SecureSession | None = None
        older: SecureSession | None = None
        try:
            while True:
                if session is None:
                    session = await self._try_dial(attempt)
                    attempt += 1
                    if session is None:
                        continue
                following = await self._serve(session, older)
                older, session = session, following
                attempt = AFTER_DRAIN if self.draining else 0
        finally:
            self._fail_pending("the backbone closed the session", "draining")
            if session is not None and not session.closed:
                await self._close(session)

    async def _close(self, session: SecureSession) -> None:
        self.session = None
        self.up.clear()
        await session.close("draining", "the backbone needs this device no more")

    async def _try_dial(self, attempt: int) -> SecureSession | None:
        if attempt:
            longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 10))
            self._hurry.clear()
            try:
                async with asyncio.timeout(self._rng.uniform(0.0, longest)):
                    await self._hurry.wait()
            except TimeoutError:
                pass
        try:
            return await self._dial()
        except (KvasirError, OSError) as error:
            self.last_error = str(error)
            level = _log.warning if attempt in (0, 5) else _log.debug
            level(
                "session.failed", device=address_of(self.device), reason=self.last_error, attempt=attempt + 1
            )
            return None

    async def _serve(self, session: SecureSession, older: SecureSession | None) -> SecureSession | None:
        """Use a session to its end; returns its successor where one takes over. Closes the `older` one."""
        self._open(session)
        successor: SecureSession | None = None
        reason, opened = "the session ended", time.monotonic()
        try:
            try:
                successor = await self._exchange(session, older)
                reason = "a newer session took over"
            except* (KvasirError, OSError) as group:
                reason = str(_first(group))
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # Python 3.11: a group with errors swallows it
                raise asyncio.CancelledError
            if session.path == "direct" and time.monotonic() - opened >= STEADY_S:
                self._looks = 0
            if successor is None and self._broke(session):
                successor = await self._return(reason)
        finally:
            if successor is None:
                self._lost(reason)
        if successor is None and not session.closed:
            await session.close("closed", reason)
        return successor

    def _broke(self, session: SecureSession) -> bool:
        """Whether a link failed under its session, or its relay went, and not the device."""
        if session.path == "direct":
            return session.outcome in ("peer_gone", "protocol_error")
        return self._detached()

    async def _return(self, reason: str) -> SecureSession | None:
        """The link broke: a session with the device on another path, or None."""
        self._look_later()
        try:
            async with asyncio.timeout(RETURN_S):
                successor = await self._dial()
        except (KvasirError, OSError, TimeoutError) as error:
            _log.info("path.lost", device=address_of(self.device), reason=f"{reason}; {error}")
            return None
        _log.info("path.returned", device=address_of(self.device), path=successor.path, reason=reason)
        return successor

    def _look_later(self) -> None:
        """Look for a direct way after a pause, which grows each time."""
        longest = min(LONGEST_LOOK_S, LOOK_AGAIN_S * 2.0 ** min(self._looks, 10))
        self._looks += 1
        self._look_at = time.monotonic() + self._rng.uniform(longest / 2, longest)

    def _open(self, session: SecureSession) -> None:
        session.bound_messages(MAX_SMALL_BYTES, self._allowance)
        for call_id, pending in list(self._pending.items()):
            if pending.cancelled:  # why send it again
                self._end(CallEnd(call_id, time.monotonic(), code="expired", message="cancelled"))
        again = list(self._pending.values())
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self.session, self.draining, self._announced = session, False, {}
        self.announce()
        for pending in again:
            self._post(pending.message)
        self.up.set()
        _log.info(
            "session.opened",
            device=address_of(self.device),
            path=session.path,
            generation=session.generation,
            resent=len(again),
        )
        self._on_up()

    def _lost(self, reason: str) -> None:
        session, self.session = self.session, None
        self.up.clear()
        self.last_error = reason
        self._fail_pending(reason, "unreachable")
        if session is not None:
            _log.info(
                "session.closed",
                device=address_of(self.device),
                outcome=session.outcome or "closed",
                reason=reason,
                bytes_sent=session.bytes_sent,
                bytes_received=session.bytes_received,
            )
        self._on_down()

    def _fail_pending(self, reason: str, code: str) -> None:
        pending, self._pending = self._pending, {}
        self._idle.set()
        now = time.monotonic()
        for call_id, call in pending.items():
            call.done(CallEnd(call_id, now, code=code, message=reason))

    async def _exchange(self, session: SecureSession, older: SecureSession | None) -> SecureSession | None:
        """Read, write and look for a reason to move, until one of them ends."""
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(self._unless_moving(session, self._read(session))),
                tasks.create_task(self._unless_moving(session, self._write(session))),
            ]
            if older is not None and not older.closed:
                working.append(tasks.create_task(older.close("closed", "a newer session took over")))
            successor = await self._outlive(session)
            for task in working:
                task.cancel()
        return successor

    async def _unless_moving(self, session: SecureSession, work: Awaitable[None]) -> None:
        """Do `work`; if the device closed the session while another is being made, see to that one first."""
        try:
            await work
        except KvasirError:
            if session.outcome == "closed" and not self._settled.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SETTLE_S):
                        await self._settled.wait()
                        await asyncio.sleep(0)  # it may be ours now, and this task cancelled
            raise

    async def _outlive(self, session: SecureSession) -> SecureSession:
        """Wait until another session should take over, and make it."""
        if self._look_at <= time.monotonic():
            self._look_at = time.monotonic() + FIRST_LOOK_S
        aged_at = time.monotonic() + AGE_CHECK_S
        while True:
            looks = self._improve is not None and session.path == "relay"
            pause = (min(aged_at, self._look_at) if looks else aged_at) - time.monotonic()
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause)):
                    await self._look.wait()
            successor = None
            if time.monotonic() >= aged_at and session.needs_handshake:
                successor = await self._renew()
            elif looks and self.may_go_direct:
                successor = await self._go_direct(session)
            if time.monotonic() >= aged_at:
                aged_at = time.monotonic() + AGE_CHECK_S
            if successor is not None:
                return successor

    async def _renew(self) -> SecureSession | None:
        self._settled.clear()
        try:
            return await self._dial()
        except (KvasirError, OSError) as error:
            _log.warning("session.not_renewed", device=address_of(self.device), reason=str(error))
            return None
        finally:
            self._settled.set()

    async def _go_direct(self, session: SecureSession) -> SecureSession | None:
        assert self._improve is not None
        self._settled.clear()
        try:
            return await self._improve(session)
        except (KvasirError, OSError) as error:
            _log.debug("path.kept", device=address_of(self.device), reason=str(error))
            return None
        finally:
            self._look_later()
            self._settled.set()

    async def _write(self, session: SecureSession) -> None:
        while True:
            message = await self._outbox.get()
            self._writing = True
            try:
                await session.send(message)
            finally:
                self._writing = False

    async def _read(self, session: SecureSession) -> None:
        session.listen(self._took)
        try:
            await session.ended()
        finally:
            session.hold()  # another session may have taken over

    def _took(self, data: bytes) -> None:
        """One message of the session, as it arrives."""
        message = decode(data)
        match message:
            case Reply():
                self._end(CallEnd(message.call, time.monotonic(), reply=message))
            case Refusal():
                end = CallEnd(message.call, time.monotonic(), code=message.code, message=message.message)
                self._end(end)
            case ReceiptAck(ack):
                self._on_ack(ack)
            case Draining(reason):
                if not self.draining:
                    self.draining = True
                    self._on_draining(reason)
            case _:
                raise RemoteProtocolError(f"a device does not send {type(message).__name__}")

    def _end(self, end: CallEnd) -> None:
        pending = self._take(end.call)
        if pending is not None:
            pending.done(end)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""A device's link: calls and their ends, references, receipts, loss, reconnection, renewal."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvasir_backbone import links
from kvasir_backbone.dispatch import CallEnd
from kvasir_backbone.links import DeviceLink
from kvasir_node.calls import (
    MAX_SMALL_BYTES,
    Call,
    Cancel,
    Draining,
    Group,
    Message,
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
from relay.errors import Unreachable
from tests.support.rosters import device
from tests.support.sessions import MemorySession, session_pair
from tests.support.waiting import until

LEASE, PLAN = bytes(16), bytes(32)


class Session(MemorySession):
    """The backbone's end, with what a link reads of a `SecureSession`."""

    generation = 1
    outcome = None
    bytes_sent = bytes_received = 0
    needs_handshake = False

    def bound_messages(self, small: int, allowance: Callable[[], int]) -> None:
        self.small, self.allowance = small, allowance

    @property
    def closed(self) -> bool:
        return self._ended.is_set()


class Bench:
    """A link and the device at its other end."""

    def __init__(self) -> None:
        self.references = [Reference(0, LEASE, 1, PLAN)]
        self.sessions: list[Session] = []
        self.ends: list[CallEnd] = []
        self.acks: list[bytes] = []
        self.events: list[str] = []
        self.refuse = 0
        self.link = DeviceLink(
            device("a"),
            dial=self.dial,  # type: ignore[arg-type]
            references=lambda: self.references,
            on_up=lambda: self.events.append("up"),
            on_down=lambda: self.events.append("down"),
            on_ack=self.acks.append,
            on_draining=lambda reason: self.events.append(reason),
            rng=random.Random(1),
        )

    async def dial(self) -> Session:
        if self.refuse:
            self.refuse -= 1
            raise Unreachable("not there")
        ours, theirs = session_pair()
        session = Session(16)
        session.__dict__.update(ours.__dict__)
        theirs.peer = session
        self.sessions.append(session)
        return session

    @property
    def device(self) -> MemorySession:
        """The device's end of the newest session."""
        return self.sessions[-1].peer

    async def read(self) -> Message:
        return decode(await self.device.receive())

    async def say(self, message: Message) -> None:
        await self.device.send(encode(message))

    def submit(self, call_id: int) -> None:
        self.link.submit(call_id, encode(make_call(call_id)), self.ends.append)


def make_call(call_id: int) -> Call:
    return Call(call_id, 0, 1, 1000, (Group(0, (1,), (3,)),), bytes(16))


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    made = Bench()
    for name, value in settings.items():
        setattr(made, name, value)
    task = asyncio.create_task(made.link.run())
    try:
        await until(lambda: made.link.session is not None, what="a session")
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_references_come_first_then_calls_and_their_replies() -> None:
    async with bench() as made:
        made.submit(7)
        assert await made.read() == References((Reference(0, LEASE, 1, PLAN),))
        call = await made.read()
        assert isinstance(call, Call)
        assert call.id == 7
        await made.say(Reply(7, 1, 10, 20, bytes(16)))
        await until(lambda: bool(made.ends), what="the reply")
        assert made.ends[0].reply is not None
        assert await made.link.wait_idle(1.0)


async def test_a_refusal_ends_the_call_with_its_code_and_text() -> None:
    async with bench() as made:
        made.submit(7)
        await made.say(Refusal(7, "overloaded", "the queue is full", 50))
        await until(lambda: bool(made.ends), what="the refusal")
        assert (made.ends[0].code, made.ends[0].message) == ("overloaded", "the queue is full")


async def test_changed_references_are_announced_and_gone_ones_taken_back() -> None:
    async with bench() as made:
        await made.read()
        made.references = [Reference(0, LEASE, 2, PLAN), Reference(1, bytes(15) + b"\1", 1, PLAN)]
        made.link.announce()
        message = await made.read()
        assert message == References(tuple(made.references))
        made.references = made.references[1:]
        made.link.announce()
        assert await made.read() == References((Reference(0, LEASE, None, PLAN),))
        made.link.announce()  # nothing new: nothing said
        made.link.send_notice("quarantined", "because")
        assert await made.read() == Notice("quarantined", "because")


async def test_a_lost_session_fails_its_calls_at_once_and_a_new_one_announces_anew() -> None:
    async with bench() as made:
        made.submit(7)
        await made.device.close()
        await until(lambda: len(made.ends) == 1, what="the failure")
        assert made.ends[0].code == "unreachable"
        await until(lambda: len(made.sessions) == 2 and made.link.session is not None, what="a new session")
        assert isinstance(await made.read(), References)
        assert made.events == ["up", "down", "up"]


async def test_without_a_session_a_call_fails_at_once() -> None:
    made = Bench()
    made.submit(7)
    assert made.ends[0].code == "unreachable"


async def test_a_device_may_send_large_messages_only_as_its_outstanding_calls_allow() -> None:
    async with bench() as made:
        await made.read()
        session = made.sessions[-1]
        assert session.small == MAX_SMALL_BYTES
        assert session.allowance() == 0
        made.link.submit(7, encode(make_call(7)), made.ends.append, 5_000_000)
        made.link.submit(8, encode(make_call(8)), made.ends.append, 2_000_000)
        assert session.allowance() == 5_000_000
        await made.say(Reply(7, 1, 0, 0, bytes(16)))
        await until(lambda: bool(made.ends), what="the reply")
        assert session.allowance() == 2_000_000


async def test_all_references_are_announced_again_to_a_device_that_seems_to_know_others() -> None:
    async with bench() as made:
        first = await made.read()
        made.link.announce()
        made.link.announce_again()
        assert await made.read() == first


async def test_a_cancelled_call_is_told_to_the_device_once_and_still_ends_once() -> None:
    async with bench() as made:
        made.submit(7)
        made.link.cancel(7)
        made.link.cancel(7)
        made.link.cancel(8)  # not in flight
        await made.read()
        assert isinstance(await made.read(), Call)
        assert await made.read() == Cancel(7)
        await made.say(Refusal(7, "expired", "cancelled"))
        await until(lambda: len(made.ends) == 1)
        assert (made.ends[0].call, made.ends[0].code) == (7, "expired")
        made.submit(9)
        assert isinstance(await made.read(), Call)  # and no second CANCEL before it


async def test_more_messages_than_the_bound_are_refused_here() -> None:
    async with bench() as made:
        for number in range(links.MAX_QUEUED + 2000):
            made.submit(number)
        refused = [end for end in made.ends if end.code == "overloaded"]
        assert refused
        on_the_link = 1024  # what a session in memory takes
        assert len(made.link._pending) <= links.MAX_QUEUED + on_the_link + 1


async def test_dialling_goes_on_and_a_hint_makes_it_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "FIRST_PAUSE_S", 1e6)
    monkeypatch.setattr(links, "LONGEST_PAUSE_S", 1e6)
    made = Bench()
    made.refuse = 1
    task = asyncio.create_task(made.link.run())
    await until(lambda: made.link.last_error == "not there", what="a refusal")

    async def hurried() -> bool:
        made.link.hurry()
        return made.link.session is not None

    await until(hurried, what="a session")
    task.cancel()
    await asyncio.wait([task])


async def test_an_old_session_is_replaced_and_its_calls_are_sent_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "AGE_CHECK_S", 0.01)
    async with bench() as made:
        made.submit(7)
        await made.read()
        assert isinstance(await made.read(), Call)
        made.sessions[0].needs_handshake = True
        await until(lambda: len(made.sessions) == 2, what="a new handshake")
        await until(lambda: made.link.session is made.sessions[1], what="the new session")
        assert isinstance(await made.read(), References)
        again = await made.read()
        assert isinstance(again, Call)
        assert again.id == 7
        assert made.ends == []
        await made.say(Reply(7, 1, 0, 0, bytes(16)))
        await until(lambda: len(made.ends) == 1, what="the reply")
        assert made.ends[0].reply is not None
        assert "down" not in made.events


async def test_receipts_go_out_and_acknowledgements_and_drains_come_in() -> None:
    async with bench() as made:
        await made.read()
        made.link.send_receipt(b"receipt")
        assert await made.read() == ReceiptMessage(b"receipt")
        await made.say(ReceiptAck(b"ack"))
        await made.say(Draining("the owner stopped the node"))
        await until(lambda: made.link.draining, what="the drain")
        assert made.acks == [b"ack"]
        assert made.events[-1] == "the owner stopped the node"


async def test_a_link_that_ends_closes_its_session_in_order() -> None:
    async with bench() as made:
        await made.read()
    assert made.sessions[-1].closed_with == ("draining", "the backbone needs this device no more")
    with pytest.raises(Unreachable):
        await made.device.receive()


@pytest.mark.parametrize(
    "message", [make_call(1), Notice("internal", "for your log")], ids=["call", "notice"]
)
async def test_a_device_that_sends_what_only_backbones_send_is_closed(message: Call | Notice) -> None:
    async with bench() as made:
        await made.say(message)
        await until(lambda: len(made.sessions) == 2, what="a new session after the broken one")
        await made.link.up.wait()

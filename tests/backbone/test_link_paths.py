"""A device's link moves between paths: to a direct one when it is found, back when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvasir_backbone import links
from kvasir_backbone.links import DeviceLink
from kvasir_node.calls import Call, References, Reply, encode
from relay.errors import Unreachable
from tests.backbone.test_links import Bench, Session
from tests.support.rosters import device
from tests.support.waiting import until


class Ways(Bench):
    """A bench whose device is at a relay, and may be reached directly."""

    def __init__(self) -> None:
        super().__init__()
        self.path = "relay"
        self.reachable = asyncio.Event()
        self.looked = 0
        self.moving = asyncio.Event()
        self.may_move = asyncio.Event()
        self.may_move.set()
        self.link = DeviceLink(
            device("a"),
            dial=self.dial,  # type: ignore[arg-type]
            improve=self.improve,  # type: ignore[arg-type]
            references=lambda: self.references,
            on_up=lambda: self.events.append("up"),
            on_down=lambda: self.events.append("down"),
            on_ack=self.acks.append,
            on_draining=self.events.append,
        )

    async def dial(self) -> Session:
        session = await super().dial()
        session.path = self.path
        return session

    async def improve(self, session: Session) -> Session | None:
        self.looked += 1
        if not self.reachable.is_set():
            return None
        better = await super().dial()
        better.path = "direct"
        self.moving.set()
        await self.may_move.wait()
        return better

    async def breaks(self, outcome: str) -> None:
        """The session in use ends, with an outcome of `relay.circuit`."""
        session = self.sessions[-1]
        session.outcome = outcome  # type: ignore[assignment]
        await session.peer.close()


@asynccontextmanager
async def ways(monkeypatch: pytest.MonkeyPatch, *, path: str = "relay") -> AsyncIterator[Ways]:
    monkeypatch.setattr(links, "FIRST_LOOK_S", 0.02)
    made = Ways()
    made.path = path
    task = asyncio.create_task(made.link.run())
    try:
        await until(lambda: made.link.session is not None, what="a session")
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def answer_again(made: Ways, call_id: int) -> None:
    """The newest session gets its references, the call anew, and answers it."""
    assert isinstance(await made.read(), References)
    again = await made.read()
    assert isinstance(again, Call)
    assert again.id == call_id
    assert made.ends == []
    await made.say(Reply(call_id, 1, 0, 0, bytes(16)))
    await until(lambda: len(made.ends) == 1, what="the reply")
    assert made.ends[0].reply is not None


async def test_a_direct_way_is_taken_and_the_call_in_flight_moves_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ways(monkeypatch) as made:
        made.submit(7)
        made.reachable.set()
        await until(lambda: made.link.path == "direct", what="the direct path")
        await answer_again(made, 7)
        assert "down" not in made.events
        await until(lambda: made.sessions[0].closed, what="the end of the older session")


async def test_a_device_that_closes_the_older_session_first_loses_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ways(monkeypatch) as made:
        made.submit(7)
        made.may_move.clear()
        made.reachable.set()
        await until(made.moving.is_set, what="the handshake")
        made.sessions[0].outcome = "closed"  # type: ignore[assignment]
        await made.sessions[0].peer.close()
        await until(made.sessions[0]._queue.empty, what="the link's notice of it")
        made.may_move.set()
        await until(lambda: made.link.path == "direct", what="the direct path")
        await answer_again(made, 7)
        assert "down" not in made.events


@pytest.mark.parametrize("outcome", ["peer_gone", "protocol_error"])
async def test_a_direct_link_that_breaks_is_replaced_and_its_call_sent_again(
    monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    async with ways(monkeypatch, path="direct") as made:
        made.submit(7)
        made.path = "relay"
        await made.breaks(outcome)
        await until(lambda: made.link.path == "relay", what="the relay")
        await answer_again(made, 7)
        assert "down" not in made.events
        assert not made.link.may_go_direct  # what broke gets a pause


async def test_a_device_that_is_gone_fails_its_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ways(monkeypatch, path="direct") as made:
        made.submit(7)
        made.refuse = 1
        await made.breaks("peer_gone")
        await until(lambda: bool(made.ends), what="the end of the call")
        assert made.ends[0].code == "unreachable"
        assert made.events[:2] == ["up", "down"]


async def test_a_device_that_ends_its_session_in_order_is_not_sought_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ways(monkeypatch, path="direct") as made:
        made.submit(7)
        await made.breaks("closed")
        await until(lambda: bool(made.ends), what="the end of the call")
        assert made.ends[0].code == "unreachable"


async def test_without_a_direct_way_the_pauses_grow_and_new_addresses_end_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ways(monkeypatch) as made:
        await until(lambda: made.looked == 1, what="a look")
        assert not made.link.may_go_direct
        assert made.link.path == "relay"
        made.reachable.set()
        made.link.readdressed()
        await until(lambda: made.link.path == "direct", timeout=2, what="the direct path")
        assert made.looked == 2


async def test_a_look_that_fails_leaves_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ways(monkeypatch) as made:

        async def fail(session: Session) -> Session:
            made.looked += 1
            raise Unreachable("nobody there")

        made.link._improve = fail  # type: ignore[assignment]
        made.link.readdressed()
        await until(lambda: made.looked >= 1, what="a look")
        made.submit(7)
        assert isinstance(await made.read(), References)
        assert encode(await made.read())
        assert len(made.sessions) == 1

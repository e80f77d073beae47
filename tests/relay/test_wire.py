from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import Unreachable
from relay.websocket import CLOSE, FRONT, PING, MessageReader
from relay.wire import CORK_BYTES, CORK_PIECES, WebSocket

SIZES = [0, 1, 125, 126, 6_000, 65_535, 65_536, 65_540]


class Recorder(asyncio.Transport):
    """Records each write; `messages` and `control` are what the far side makes of them."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.messages: list[bytes] = []
        self.control: list[int] = []
        self.gone = False
        self._reader = MessageReader(
            lambda message: self.messages.append(bytes(message)),
            lambda opcode, _: self.control.append(opcode),
            masked=masked,
            max_bytes=1 << 20,
        )

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))
        self._reader.feed(bytes(data))

    def writelines(self, parts: object) -> None:
        self.write(b"".join(parts))  # type: ignore[arg-type]

    def is_closing(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.gone = True

    abort = close


def made(*, client: bool) -> tuple[WebSocket, Recorder]:
    transport = Recorder(masked=client)
    return WebSocket(transport, client=client, max_bytes=1 << 20, release=lambda _: None), transport


async def a_turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("size", SIZES)
async def test_a_message_of_any_size_arrives(client: bool, size: int) -> None:
    socket, transport = made(client=client)
    body = bytes(number % 251 for number in range(size))
    for _ in range(2):  # the first at once, the second at the end of the turn
        socket.put(bytearray(FRONT) + body)
    await a_turn()
    assert transport.messages == [body, body]


@pytest.mark.parametrize("client", [True, False])
async def test_the_first_message_goes_at_once_and_the_rest_of_a_turn_together(client: bool) -> None:
    socket, transport = made(client=client)
    for number in range(5):
        socket.write(b"%d" % number)
    assert transport.messages == [b"0"]
    await a_turn()
    assert transport.messages == [b"0", b"1", b"2", b"3", b"4"]
    assert len(transport.writes) == 2
    socket.write(b"the next turn's first")
    assert len(transport.messages) == 6


async def test_what_waits_within_a_turn_is_bounded() -> None:
    socket, transport = made(client=False)
    for _ in range(20):
        socket.put(bytearray(FRONT + 60_000))
        assert socket.corked < CORK_BYTES
    await a_turn()
    transport.writes.clear()
    for _ in range(3 * CORK_PIECES):
        socket.write(b"x")
    assert len(transport.writes) == 3
    await a_turn()
    assert transport.messages[20:] == [b"x"] * 3 * CORK_PIECES


async def test_what_waits_goes_before_a_ping_and_a_close_and_nothing_after_an_abort() -> None:
    socket, transport = made(client=True)
    socket.write(b"one")
    socket.write(b"two")
    socket.ping()
    assert (transport.messages, transport.control) == ([b"one", b"two"], [PING])
    socket.write(b"three")
    socket.close()
    assert (transport.messages[2:], transport.control[1:]) == ([b"three"], [CLOSE])
    if socket._closing is not None:
        socket._closing.cancel()
    cut, transport = made(client=True)
    cut.write(b"one")
    cut.write(b"two")
    cut.abort()
    await a_turn()
    assert transport.messages == [b"one"]
    with pytest.raises(Unreachable):
        cut.write(b"three")


@given(st.lists(st.tuples(st.sampled_from([0, 5, 200, 40_000]), st.booleans()), max_size=30))
async def test_messages_stay_in_order_whatever_is_read_between(steps: list[tuple[int, bool]]) -> None:
    socket, transport = made(client=False)
    sent = []
    for number, (size, read) in enumerate(steps):
        sent.append(number.to_bytes(4, "big") + bytes(size))
        socket.write(sent[-1])
        if read:
            socket.buffer_updated(0)
    await a_turn()
    assert transport.messages == sent

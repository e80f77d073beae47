from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from relay.circuit import Outcome
from relay.config import RelayConfig
from relay.connection import CONTROL_SLACK, Connection
from relay.frames import HEADER, FrameType, decode, encode
from relay.messages import Close
from relay.websocket import FRONT, MessageReader
from relay.wire import WRITE_HIGH, WebSocket


class SlowTransport(asyncio.Transport):
    """Takes only what a test lets it take; `written` are the frames that got out."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[bytes] = []
        self.written: list[bytes] = []
        self.protocol: WebSocket
        self.gone = False
        self._size = 0
        self._reader = MessageReader(
            lambda payload: self.written.append(bytes(payload)),
            lambda *_: None,
            masked=False,
            max_bytes=1 << 20,
        )

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.waiting.append(bytes(data))
        self._size += len(data)
        if self.get_write_buffer_size() > WRITE_HIGH and not self.protocol.paused:
            self.protocol.pause_writing()

    def writelines(self, parts: object) -> None:
        self.write(b"".join(parts))  # type: ignore[arg-type, call-overload]

    def get_write_buffer_size(self) -> int:
        return self._size

    def take(self) -> None:
        """A turn of the loop ends and the link takes all that waits; then there is room."""
        self.protocol.flush()
        for data in self.waiting:
            self._reader.feed(data)
        self.waiting.clear()
        self._size = 0
        if self.protocol.paused:
            self.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True
        self.protocol.connection_lost(None)

    close = abort


def connected(config: RelayConfig | None = None) -> tuple[Connection, SlowTransport]:
    transport = SlowTransport()
    socket = WebSocket(transport, client=False, max_bytes=70_000, release=lambda _: None)
    transport.protocol = socket
    connection = Connection(socket, "192.0.2.1", config or RelayConfig())
    socket.attach(lambda _: None, on_writable=connection.on_writable)
    return connection, transport


def data(circuit: int, size: int) -> bytearray:
    return bytearray(FRONT) + encode(FrameType.DATA, circuit, bytes(size))


def circuits(transport: SlowTransport) -> list[int]:
    return [HEADER.unpack_from(frame)[1] for frame in transport.written]


async def test_a_light_circuit_waits_for_what_the_link_has_and_one_turn_of_the_others() -> None:
    connection, transport = connected()
    for circuit in (2, 4, 6):
        for _ in range(16):
            assert connection.forward(circuit, data(circuit, 60_000))
    assert connection.forward(8, data(8, 100))
    while connection.outstanding:
        transport.take()
    order = circuits(transport)
    assert len(order) == 49
    behind = order.index(8) * 60_000
    assert behind <= WRITE_HIGH + 60_000 + 3 * 2 * 60_000  # of the 2.9 MB that wait
    connection.stop()


async def test_a_link_that_keeps_up_has_no_queue() -> None:
    connection, transport = connected()
    for number in range(50):
        assert connection.forward(2, data(2, 50_000))
        if number % 3 == 2:
            transport.take()
    transport.take()
    assert circuits(transport) == [2] * 50
    connection.stop()


async def test_close_stays_behind_the_data_of_its_circuit_and_pings_do_not() -> None:
    connection, transport = connected()
    for circuit in (2, 4):
        for _ in range(8):
            assert connection.forward(circuit, data(circuit, 60_000))
    connection.write(encode(FrameType.CLOSE, 2, Close("closed", "", "closed").to_bytes()))
    connection.write(encode(FrameType.PING, 0, bytes(8)))
    while connection.outstanding:
        transport.take()
    kinds = [(decode(frame)[0].name, decode(frame)[1]) for frame in transport.written]
    own = [kind for kind, circuit in kinds if circuit == 2]
    assert own == ["DATA"] * 8 + ["CLOSE"]
    assert kinds.index(("PING", 0)) < 6
    connection.stop()


async def test_what_waits_is_bounded_and_nothing_over_it_is_written() -> None:
    connection, transport = connected(RelayConfig(device_outstanding_bytes=1 << 20))
    sent = 0
    while connection.forward(2, data(2, 60_000)):
        sent += 1
    assert 16 <= sent <= 18
    assert connection.outstanding <= (1 << 20) + 100
    while connection.outstanding:
        transport.take()
    assert circuits(transport) == [2] * sent
    connection.stop()


async def test_control_frames_that_nobody_reads_end_the_connection() -> None:
    connection, transport = connected()
    pong = encode(FrameType.PONG, 0, bytes(8))
    for _ in range((connection.bound + CONTROL_SLACK) // len(pong) + 2):
        connection.write(pong)
    assert connection.outcome == "timeout"
    assert transport.gone


@pytest.mark.parametrize(
    "end", [lambda c: c.close("drained"), lambda c: c.refuse("expired", "too late", None, "protocol_error")]
)
async def test_what_waits_is_written_before_an_orderly_end(end: Callable[[Connection], Outcome]) -> None:
    connection, transport = connected()
    for _ in range(8):
        connection.forward(2, data(2, 60_000))
    transport.close = transport.take  # type: ignore[method-assign]
    end(connection)
    assert [circuit for circuit in circuits(transport) if circuit] == [2] * 8
    if connection.socket._closing is not None:
        connection.socket._closing.cancel()

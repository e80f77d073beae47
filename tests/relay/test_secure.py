from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from relay.errors import IdentityError, KvasirError, Refused, Unreachable
from relay.identity import ExchangeKey, pack, unpack
from relay.secure import SecureSession
from relay.session import MAX_BODY, RekeyLimits
from tests.support.fake_link import FakeChannel, channel_pair
from tests.support.relays import Device, Swarm
from tests.support.waiting import until

SWARM = Swarm()


@asynccontextmanager
async def sessions(
    *, window: int = 1 << 20, limits: RekeyLimits | None = None, device: Device | None = None
) -> AsyncIterator[tuple[SecureSession, SecureSession, FakeChannel, FakeChannel]]:
    """Both sides of a session over a memory link, and the link's ends."""
    device = device or Device()
    left, right = channel_pair(SWARM.backbone.key.public, device.key.public, window=window)
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(SWARM.connect(left, device, limits=limits))
        accepting = tasks.create_task(SWARM.accept(right, device, limits=limits))
    yield connecting.result(), accepting.result(), left, right


async def test_messages_pass_both_ways_in_order() -> None:
    async with sessions() as (backbone, device, left, right):
        for message in (b"one", b"two", bytes(3 * MAX_BODY)):
            await backbone.send(message)
            await device.send([message[:1], memoryview(message)[1:]])
        for message in (b"one", b"two", bytes(3 * MAX_BODY)):
            assert await device.receive() == message
            assert await backbone.receive() == message
        assert backbone.binding == device.binding
        assert backbone.bytes_sent == sum(map(len, left.sent[1:]))
        assert device.bytes_sent == sum(map(len, right.sent[1:]))
        assert device.bytes_received == backbone.bytes_sent


async def test_the_device_is_ready_only_after_the_first_packet_decrypts() -> None:
    device = Device()
    left, right = channel_pair()
    arrived: list[bytes] = []

    def hold(packet: bytes) -> list[bytes]:
        arrived.append(packet)
        return [packet] if len(arrived) == 1 else []  # the offer passes, the confirmation does not

    left.tamper = hold
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        accepting = tasks.create_task(SWARM.accept(right, device))
        session = await SWARM.connect(left, device)
        await until(lambda: len(arrived) == 2)
        assert not accepting.done()
        device.generations.check(SWARM.backbone.certificate.id, 1)  # nothing is completed yet
        right._arrived(arrived[1])
        assert (await accepting).generation == session.generation
    with pytest.raises(Refused):
        device.generations.check(SWARM.backbone.certificate.id, 1)


async def test_a_recorded_offer_starts_nothing() -> None:
    device = Device()
    async with sessions(device=device) as (_, _, left, _):
        offer = left.sent[0]
    attacker, end = channel_pair()
    await attacker.send(offer)
    with pytest.raises(Refused, match="generation"):
        await SWARM.accept(end, device)
    fresh_start = Device(device.key, device.exchange)
    attacker, end = channel_pair()
    await attacker.send(offer)
    with pytest.raises(Unreachable, match="no session"):
        await SWARM.accept(end, fresh_start, timeout=0.05)


async def _both(
    device: Device, *, tamper: Callable[[bytes], list[bytes]] | None = None, grant_hash: bytes | None = None
) -> tuple[KvasirError | SecureSession, KvasirError | SecureSession]:
    left, right = channel_pair()
    left.tamper = tamper
    async with asyncio.timeout(10.0):
        results = await asyncio.gather(
            SWARM.connect(left, device, grant_hash=grant_hash, timeout=1.0),
            SWARM.accept(right, device, timeout=1.0),
            return_exceptions=True,
        )
    for result in results:
        assert isinstance(result, KvasirError | SecureSession), result
    return results  # type: ignore[return-value]


async def test_a_refused_offer_is_answered_with_why() -> None:
    ours, theirs = await _both(Device(), grant_hash=b"x" * 32)
    assert isinstance(ours, Refused)
    assert ours.code == "bad_signature"
    assert "grant" in str(ours)
    assert isinstance(theirs, IdentityError)


async def test_a_peer_of_another_version_is_told_both() -> None:
    def other_version(packet: bytes) -> list[bytes]:
        return [pack(unpack(packet) | {"v": 2})]

    ours, theirs = await _both(Device(), tamper=other_version)
    assert isinstance(ours, Refused)
    assert ours.code == "version"
    assert "1" in str(ours)
    assert "2" in str(ours)
    assert isinstance(theirs, Refused)


async def test_somebody_in_between_with_other_keys_gets_nothing() -> None:
    device = Device()
    impostor = Device(device.key, ExchangeKey.generate())
    left, right = channel_pair()
    async with asyncio.timeout(10.0):
        ours, theirs = await asyncio.gather(
            SWARM.connect(left, device, timeout=1.0),
            SWARM.accept(right, impostor, timeout=1.0),
            return_exceptions=True,
        )
    assert isinstance(ours, Refused)
    assert isinstance(theirs, KvasirError)


def _flip(packet: bytes) -> list[bytes]:
    return [packet[:-1] + bytes([packet[-1] ^ 1])]


def _replay(packet: bytes) -> list[bytes]:
    return [packet, packet]


def _truncate(packet: bytes) -> list[bytes]:
    return [packet[: len(packet) // 2]]


@pytest.mark.parametrize("tamper", [_flip, _replay, _truncate])
async def test_damage_on_the_way_ends_the_session(tamper: Callable[[bytes], list[bytes]]) -> None:
    async with sessions() as (backbone, device, left, _):
        left.tamper = tamper
        await backbone.send(b"hello")
        with pytest.raises(Unreachable, match="session ended"):  # noqa: PT012 - a replay comes after its original
            while await device.receive() == b"hello":
                continue
        assert device.outcome == "protocol_error"
        with pytest.raises(Unreachable):
            await backbone.receive()
        assert backbone.outcome == "peer_gone"


async def test_reordering_on_the_way_ends_the_session() -> None:
    async with sessions() as (backbone, device, left, _):
        held: list[bytes] = []

        def swap(packet: bytes) -> list[bytes]:
            held.append(packet)
            return [held.pop(1), held.pop(0)] if len(held) == 2 else []

        left.tamper = swap
        await backbone.send(b"first")
        await backbone.send(b"second")
        with pytest.raises(Unreachable, match="reordered"):
            await device.receive()
        assert device.outcome == "protocol_error"


async def test_a_link_that_ends_without_a_word_is_no_goodbye() -> None:
    async with sessions() as (backbone, device, left, _):
        await backbone.send(b"last words")
        left.cut()
        assert await device.receive() == b"last words"
        with pytest.raises(Unreachable, match="cut"):
            await device.receive()
        assert device.outcome == "peer_gone"
        with pytest.raises(Unreachable):
            await backbone.send(b"too late")


@pytest.mark.parametrize(("code", "outcome"), [("closed", "closed"), ("draining", "drained")])
async def test_goodbyes_are_told_apart(code: str, outcome: str) -> None:
    async with sessions() as (backbone, device, _, _):
        await device.close(code, "back in a minute")
        with pytest.raises(Unreachable, match="back in a minute"):
            await backbone.receive()
        assert backbone.outcome == device.outcome == outcome
        assert backbone.closed
        await backbone.close()
        await device.close()


async def test_concurrent_senders_do_not_mix_their_messages() -> None:
    async with sessions(window=200_000) as (backbone, device, _, _):
        messages = [bytes([i]) * (MAX_BODY + 1000 * i) for i in range(12)]
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            for message in messages:
                tasks.create_task(backbone.send(message))
            received = [await device.receive() for _ in messages]
        assert sorted(received) == sorted(messages)


async def test_a_slow_receiver_holds_the_sender_back() -> None:
    async with sessions(window=150_000) as (backbone, device, left, _):
        message = bytes(60_000)
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            for _ in range(10):
                await backbone.send(message)
                sent += 1

        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all())
            await until(lambda: sent == 2)
            for received in range(10):
                assert sent <= received + 3
                assert await device.receive() == message
        assert len(left.sent) == 2 + 10


async def test_a_cancelled_send_leaves_the_session_whole() -> None:
    async with sessions(window=150_000) as (backbone, device, _, _):
        big = bytes(10 * MAX_BODY)
        sending = asyncio.create_task(backbone.send(big))
        await until(lambda: backbone.bytes_sent > 2 * MAX_BODY)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert sending.cancelled()
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(backbone.send(b"still here"))
            assert await device.receive() == b"still here"
        assert backbone.outcome is None


async def test_a_peer_that_never_reads_is_reported_and_may_read_again() -> None:
    async with sessions(window=150_000) as (backbone, device, left, _):
        left._timeout = 0.05
        with pytest.raises(Unreachable, match="not read") as caught:  # noqa: PT012 - the window decides which
            for _ in range(4):
                await backbone.send(bytes(60_000))
        assert caught.value.code == "busy"
        assert await device.receive() == bytes(60_000)
        assert await device.receive() == bytes(60_000)
        await backbone.send(b"again")
        assert await device.receive() == b"again"


async def test_keys_change_under_way() -> None:
    async with sessions(limits=RekeyLimits(records=4)) as (backbone, device, left, _):
        for i in range(30):
            await backbone.send(b"%d" % i)
            await device.send(b"%d" % i)
            assert await device.receive() == b"%d" % i
            assert await backbone.receive() == b"%d" % i
        assert len(left.sent) > 30 + 2 + 5


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with sessions() as (backbone, device, _, _):
        waiting = asyncio.create_task(device.receive())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
        await backbone.send(b"not lost")
        assert await device.receive() == b"not lost"

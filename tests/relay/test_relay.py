"""A real relay in this process, real clients, real sockets."""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import WSMsgType

from relay.config import RelayConfig
from relay.connection import Connection
from relay.errors import ConfigError, IdentityError, KvasirError, Refused, Unreachable
from relay.frames import MAX_FRAME, FrameType, decode, encode, encode_u32, encode_u64
from relay.identity import PublicKey, SignedDocument, SigningKey
from relay.messages import Auth, Close, GoAway, Hello, Incoming, Open, RefusedMessage, Renewal, Welcome
from relay.tickets import auth_message
from relay.transport import Channel, TransportConfig, reconnect_delay, relay_endpoint
from tests.support.peers import RawPeer, echoing, session_with, welcomed
from tests.support.relays import Device, RelayRig, Swarm, running_relay
from tests.support.waiting import until

# --- what it is for ---


async def test_messages_pass_through_and_are_metered() -> None:
    async with running_relay() as rig:
        session = await session_with(rig, Device())
        await session.send(b"the handshake is through")
        await session.receive()
        (before,) = rig.relay.meters.circuits
        sent, received = session.bytes_sent, session.bytes_received
        for size in (1, 100, 48 * 1024, 65_518, 65_519, 3_000_000):
            message = secrets.token_bytes(size)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.send(message))
                assert await session.receive() == message
        assert session.path == "relay"
        (after,) = rig.relay.meters.circuits
        assert after.bytes_to_device - before.bytes_to_device == session.bytes_sent - sent
        assert after.bytes_to_backbone - before.bytes_to_backbone == session.bytes_received - received
        assert after.outcome == "open"
        await session.close()
        await until(lambda: rig.relay.meters.outcomes == {"closed": 1})
        meters = rig.relay.meters
        assert meters.circuits == ()
        assert meters.bytes_forwarded > 2 * 3_000_000


async def test_the_relay_sees_no_plaintext(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    forward, write = Connection.forward, Connection.write

    def forward_seen(self: Connection, id: int, frame: bytes) -> bool:
        seen.append(frame)
        return forward(self, id, frame)

    def write_seen(self: Connection, frame: bytes) -> None:
        seen.append(frame)
        write(self, frame)

    monkeypatch.setattr(Connection, "forward", forward_seen)
    monkeypatch.setattr(Connection, "write", write_seen)
    canary = b"the canary sings in clear"
    async with running_relay() as rig:
        session = await session_with(rig, Device())
        for _ in range(3):
            await session.send(canary * 100)
            assert await session.receive() == canary * 100
    captured = b"".join(seen)
    assert len(captured) > 6 * 100 * len(canary)
    assert canary not in captured
    assert canary[:12] not in captured


async def test_a_slow_receiver_is_waited_for_and_others_are_not_delayed() -> None:
    async with running_relay() as rig:
        frozen, lively = Device(), Device()
        opened = asyncio.Event()

        async def freeze(channel: Channel) -> None:
            await rig.swarm.accept(channel, frozen)
            opened.set()
            await asyncio.Event().wait()

        await rig.start(rig.client(frozen.key, "device", serve=freeze))
        await rig.start(rig.client(lively.key, "device", serve=echoing(rig, lively)))
        config = TransportConfig(send_timeout_s=0.2)
        backbone = rig.client(rig.swarm.backbone.key, "backbone", config=config)
        await rig.start(backbone)
        to_frozen = await rig.swarm.connect(await backbone.open(frozen.key.public, timeout=5.0), frozen)
        to_lively = await rig.swarm.connect(await backbone.open(lively.key.public, timeout=5.0), lively)
        await opened.wait()
        with pytest.raises(Unreachable, match="not read"):
            await to_frozen.send(bytes(4 << 20))
        assert 0.9 * (1 << 20) < to_frozen.bytes_sent <= 1 << 20
        await to_lively.send(b"are you there?")
        assert await to_lively.receive() == b"are you there?"
        assert rig.relay.meters.outcomes == {}


async def test_one_device_serves_several_circuits_at_once() -> None:
    async with running_relay() as rig:
        device = Device()
        await rig.start(rig.client(device.key, "device", serve=echoing(rig, device)))
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)
        sessions = [
            await rig.swarm.connect(await backbone.open(device.key.public, timeout=5.0), device, generation=i)
            for i in range(1, 6)
        ]
        for i, session in enumerate(sessions):
            await session.send(b"%d" % i)
        for i, session in enumerate(sessions):
            assert await session.receive() == b"%d" % i
        assert backbone.circuits == 5
        assert len(rig.relay.meters.circuits) == 5


async def test_a_client_measures_the_round_trip() -> None:
    async with running_relay() as rig:
        client = rig.client(Device().key, "device")
        await rig.start(client)
        await until(lambda: client.rtt_s is not None)
        assert client.relay_key == rig.relay.public_key
        assert client.connected


async def test_a_device_not_connected_is_unreachable() -> None:
    async with running_relay() as rig:
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)
        with pytest.raises(Unreachable, match="not connected here"):
            await backbone.open(Device().key.public, timeout=5.0)
        assert backbone.circuits == 0


async def test_a_device_that_takes_no_circuits_says_so() -> None:
    async with running_relay() as rig:
        device = Device()
        await rig.start(rig.client(device.key, "device"))
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)
        channel = await backbone.open(device.key.public, timeout=5.0)
        with pytest.raises(Unreachable, match="takes no circuits"):
            await channel.receive()


async def test_a_handler_that_crashes_ends_its_circuit_alone() -> None:
    async with running_relay() as rig:
        device = Device()

        async def serve(channel: Channel) -> None:
            packet = await channel.receive()
            if packet == b"crash":
                raise ZeroDivisionError
            await channel.send(packet)

        await rig.start(rig.client(device.key, "device", serve=serve))
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)
        first = await backbone.open(device.key.public, timeout=5.0)
        await first.send(b"crash")
        with pytest.raises(Unreachable, match="internal error"):
            await first.receive()
        second = await backbone.open(device.key.public, timeout=5.0)
        await second.send(b"fine")
        assert await second.receive() == b"fine"


# --- who may come in ---


async def test_the_relay_proves_itself_too() -> None:
    async with running_relay() as rig:
        peer = await RawPeer.dial(rig)
        hello = Hello.from_bytes((await peer.skip_to(FrameType.HELLO))[1])
        key = SigningKey.generate()
        ticket = rig.swarm.ticket(key.public, "device")
        signature = key.sign(auth_message(hello.nonce, rig.relay.public_key, ticket))
        await peer.send(FrameType.AUTH, 0, Auth(ticket, 1, signature).to_bytes())
        welcome = Welcome.from_bytes((await peer.skip_to(FrameType.WELCOME))[1])
        from relay.identity import verify
        from relay.tickets import welcome_message

        verify(rig.relay.public_key, welcome.proof, welcome_message(hello.nonce, signature))
        assert welcome.window_bytes == rig.relay.config.window_bytes


async def _refused(rig: RelayRig, ticket: SignedDocument, key: SigningKey, generation: int = 1) -> str:
    peer = await RawPeer.dial(rig)
    await peer.authenticate(rig, key, "device", ticket=ticket, generation=generation)
    return (await peer.refusal()).code


async def test_tickets_are_checked() -> None:
    async with running_relay() as rig:
        key, thief = SigningKey.generate(), SigningKey.generate()
        ticket = rig.swarm.ticket
        good = ticket(key.public, "device")
        assert await _refused(rig, good, thief) == "bad_signature"  # a copied ticket
        assert await _refused(rig, good, key, generation=2) == "bad_signature"
        stranger = ticket(key.public, "device", key=SigningKey.generate())
        assert await _refused(rig, stranger, key) == "bad_signature"
        elsewhere = ticket(key.public, "device", relay=SigningKey.generate().public)
        assert await _refused(rig, elsewhere, key) == "bad_signature"
        expired = ticket(key.public, "device", now=rig.clock() - 300)
        assert await _refused(rig, expired, key) == "expired"
        assert rig.relay.meters.refusals == {"bad_signature": 4, "expired": 1}
        assert rig.relay.meters.peers == 0


async def test_while_the_market_is_away_expired_tickets_count_an_hour_longer() -> None:
    async with running_relay() as rig:
        rig.market.up = False
        key = SigningKey.generate()
        peer = await RawPeer.dial(rig)
        ticket = rig.swarm.ticket(key.public, "device", now=rig.clock() - 3000)
        await peer.authenticate(rig, key, "device", ticket=ticket)
        await peer.skip_to(FrameType.WELCOME)
        late = rig.swarm.ticket(key.public, "device", now=rig.clock() - 3600 - 200)
        assert await _refused(rig, late, key) == "expired"


async def test_a_nonce_serves_once() -> None:
    async with running_relay() as rig:
        key = SigningKey.generate()
        first, second = await RawPeer.dial(rig), await RawPeer.dial(rig)
        nonces = [Hello.from_bytes((await p.skip_to(FrameType.HELLO))[1]).nonce for p in (first, second)]
        assert nonces[0] != nonces[1]
        ticket = rig.swarm.ticket(key.public, "device")
        overheard = key.sign(auth_message(nonces[0], rig.relay.public_key, ticket))
        await second.send(FrameType.AUTH, 0, Auth(ticket, 1, overheard).to_bytes())
        assert (await second.refusal()).code == "bad_signature"


async def test_an_expired_ticket_ends_a_connection_unless_it_is_renewed() -> None:
    config = RelayConfig(ping_s=0.1, ping_jitter_s=(0.0, 0.0), pong_timeout_s=1.0, drain_s=0.1)
    async with running_relay(config) as rig:
        lazy, dutiful = SigningKey.generate(), SigningKey.generate()

        async def answer_pings(peer: RawPeer) -> RefusedMessage:
            while True:
                kind, _, payload = await peer.next()
                if kind is FrameType.REFUSED:
                    return RefusedMessage.from_bytes(payload)
                if kind is FrameType.PING:
                    await peer.send(FrameType.PONG, 0, payload)

        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            peers = [await welcomed(rig, key, "device") for key in (lazy, dutiful)]
            answers = [tasks.create_task(answer_pings(peer)) for peer in peers]
            newer = rig.swarm.ticket(dutiful.public, "device", now=rig.clock() + 50)
            await peers[1].send(FrameType.TICKET, 0, Renewal(newer).to_bytes())
            await until(lambda: rig.relay.meters.peers == 2)
            rig.clock.offset = 125.0
            assert (await answers[0]).code == "expired"
            assert rig.relay.meters.peers == 1
            answers[1].cancel()


async def test_somebody_elses_ticket_is_no_renewal() -> None:
    async with running_relay() as rig:
        peer = await welcomed(rig, SigningKey.generate(), "device")
        other = rig.swarm.ticket(SigningKey.generate().public, "device")
        await peer.send(FrameType.TICKET, 0, Renewal(other).to_bytes())
        assert (await peer.refusal()).code == "bad_signature"


async def test_a_client_refuses_a_relay_of_another_swarm_for_good() -> None:
    async with running_relay() as rig:
        client = rig.client(SigningKey.generate(), "device")
        client._root = Swarm().root
        with pytest.raises(IdentityError) as caught:
            await asyncio.wait_for(client.run(), 5.0)
        assert caught.value.code == "wrong_swarm"


async def test_a_client_refuses_a_relay_that_its_ticket_does_not_name() -> None:
    async with running_relay() as rig:
        key = SigningKey.generate()

        async def ticket() -> SignedDocument:
            return rig.swarm.ticket(key.public, "device", relay=SigningKey.generate().public)

        client = rig.client(key, "device", ticket=ticket)
        rig.tasks.create_task(client.run())
        with pytest.raises(Unreachable, match="not the ticket's"):
            await client.wait_connected(0.3)


async def test_tickets_may_come_late() -> None:
    async with running_relay() as rig:
        key = SigningKey.generate()
        asked = 0

        async def ticket() -> SignedDocument:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise Unreachable("the market does not answer")
            return rig.swarm.ticket(key.public, "device")

        await rig.start(rig.client(key, "device", ticket=ticket))
        assert asked == 3


# --- duplicates ---


async def test_the_newer_of_two_equal_connections_wins_and_the_loser_is_told() -> None:
    async with running_relay() as rig:
        key = SigningKey.generate()
        first = await welcomed(rig, key, "device")
        second = await welcomed(rig, key, "device")
        assert (await first.refusal()).code == "duplicate"
        await second.send(FrameType.PING, 0, encode_u64(1))
        assert await second.skip_to(FrameType.PONG)
        assert rig.relay.meters.peers == 1


async def test_a_later_start_wins_and_an_earlier_one_is_refused() -> None:
    async with running_relay() as rig:
        key = SigningKey.generate()
        old = rig.client(key, "device", generation=1)
        running = asyncio.create_task(old.run())
        await old.wait_connected(5.0)
        newer = rig.client(key, "device", generation=2)
        await rig.start(newer)
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(running, 5.0)
        assert caught.value.code == "duplicate"
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(rig.client(key, "device", generation=1).run(), 5.0)
        assert caught.value.code == "duplicate"
        assert newer.connected


async def test_one_key_may_be_a_device_and_a_backbone() -> None:
    async with running_relay() as rig:
        key = SigningKey.generate()
        await welcomed(rig, key, "device")
        await welcomed(rig, key, "backbone")
        assert (rig.relay.meters.devices, rig.relay.meters.backbones) == (1, 1)


# --- peers that break the rules ---


Breach = Callable[[RawPeer], Awaitable[None]]


def _raw(data: bytes) -> Breach:
    async def send(peer: RawPeer) -> None:
        await peer.socket.send_bytes(data)

    return send


async def _text(peer: RawPeer) -> None:
    await peer.socket.send_str("hello")


BREACHES: dict[str, Breach] = {
    "text": _text,
    "empty": _raw(b""),
    "partial": _raw(b"\x08\0\0"),
    "unknown type": _raw(encode(99, 0, b"")),
    "a relay's own frame": _raw(encode(FrameType.WELCOME, 0, b"")),
    "an unknown circuit": _raw(encode(FrameType.DATA, 5, b"x")),
    "data without payload": _raw(encode(FrameType.DATA, 1)),
    "data on circuit 0": _raw(encode(FrameType.DATA, 0, b"x")),
    "a packet too long": _raw(encode(FrameType.DATA, 1, bytes(65_536))),
    "an even circuit": _raw(encode(FrameType.OPEN, 2, Open(PublicKey(bytes(32))).to_bytes())),
    "junk in OPEN": _raw(encode(FrameType.OPEN, 1, b"\xc1")),
    "credit from nowhere": _raw(encode(FrameType.CREDIT, 7, encode_u32(5))),
    "a short ping": _raw(encode(FrameType.PING, 0, b"1234")),
    "a second AUTH": _raw(encode(FrameType.AUTH, 0, b"")),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_a_breach_ends_the_connection_with_its_reason(breach: str) -> None:
    async with running_relay() as rig:
        peer = await welcomed(rig, SigningKey.generate(), "backbone")
        await BREACHES[breach](peer)
        assert (await peer.refusal()).code == "bad_request"
        await until(lambda: rig.relay.meters.peers == 0)


async def test_a_frame_over_the_cap_ends_the_connection() -> None:
    async with running_relay() as rig:
        peer = await welcomed(rig, SigningKey.generate(), "backbone")
        await peer.socket.send_bytes(bytes(MAX_FRAME + 1))
        message = await peer.socket.receive(timeout=5.0)
        assert message.type is not WSMsgType.BINARY or decode(message.data)[0] is FrameType.REFUSED
        await until(lambda: rig.relay.meters.peers == 0)


@pytest.mark.parametrize(
    "data", [b"", encode(FrameType.DATA, 1, b"x"), encode(FrameType.AUTH, 0, b"junk"), b"\xff"]
)
async def test_nothing_goes_before_auth(data: bytes) -> None:
    async with running_relay() as rig:
        peer = await RawPeer.dial(rig)
        await peer.socket.send_bytes(data)
        assert (await peer.refusal()).code == "bad_request"


async def test_who_does_not_prove_himself_in_time_is_sent_away() -> None:
    async with running_relay(RelayConfig(auth_timeout_s=0.05)) as rig:
        peer = await RawPeer.dial(rig)
        assert (await peer.refusal()).code == "expired"


async def test_a_device_opens_no_circuits() -> None:
    async with running_relay() as rig:
        peer = await welcomed(rig, SigningKey.generate(), "device")
        await peer.send(FrameType.OPEN, 1, Open(SigningKey.generate().public).to_bytes())
        assert (await peer.refusal()).code == "forbidden"


async def test_a_relay_that_falls_silent_is_left_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open TCP: the connection stands, and nothing comes through it any more."""
    write, mute = Connection.write, True

    def without_pongs(self: Connection, frame: bytes) -> None:
        if not mute or frame[0] != FrameType.PONG:
            write(self, frame)

    monkeypatch.setattr(Connection, "write", without_pongs)
    async with running_relay() as rig:
        device = Device()
        client = rig.client(
            device.key,
            "device",
            config=TransportConfig(ping_s=0.05, pong_timeout_s=0.5, vanished_spread_s=0.0),
        )
        await rig.start(client)
        await until(lambda: not client.connected)
        assert "answers no pings" in str(client._last_error)
        mute = False
        await until(lambda: client.connected and client.rtt_s is not None)


async def test_a_peer_that_answers_no_ping_is_gone() -> None:
    config = RelayConfig(ping_s=1.0, ping_jitter_s=(0.0, 0.01), pong_timeout_s=0.5)
    async with running_relay(config) as rig:
        device = Device()
        silent = await welcomed(rig, device.key, "device")
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)
        channel = await backbone.open(device.key.public, timeout=5.0)
        await silent.skip_to(FrameType.PING)
        with pytest.raises(Unreachable, match="timeout"):
            await channel.receive()
        assert rig.relay.meters.outcomes == {"timeout": 1}


async def test_a_sender_over_its_window_hears_busy_and_loses_the_circuit() -> None:
    async with running_relay(RelayConfig(window_bytes=140_000)) as rig:
        device, backbone = SigningKey.generate(), SigningKey.generate()
        receiver = await welcomed(rig, device, "device")
        sender = await welcomed(rig, backbone, "backbone")
        await sender.send(FrameType.OPEN, 1, Open(device.public).to_bytes())
        await sender.skip_to(FrameType.OPENED)
        id, payload = await receiver.skip_to(FrameType.INCOMING)
        assert Incoming.from_bytes(payload) == Incoming(backbone.public, "backbone")
        for _ in range(3):
            await sender.send(FrameType.DATA, 1, bytes(60_000))
        assert (await sender.skip_to(FrameType.BUSY)) == (1, struct.pack(">I", 60_000))
        assert Close.from_bytes((await sender.skip_to(FrameType.CLOSE))[1]).outcome == "busy"
        for _ in range(2):
            assert await receiver.skip_to(FrameType.DATA) == (id, bytes(60_000))
        assert Close.from_bytes((await receiver.skip_to(FrameType.CLOSE))[1]).code == "busy"
        (line,) = [rig.relay.meters.outcomes]
        assert line == {"busy": 1}
        await sender.send(FrameType.DATA, 1, b"late")
        await sender.send(FrameType.PING, 0, encode_u64(1))
        await sender.skip_to(FrameType.PONG)


async def test_a_peer_whose_link_takes_nothing_is_bounded_then_cut_off() -> None:
    config = RelayConfig(
        window_bytes=1 << 20, device_outstanding_bytes=1 << 20, write_timeout_s=0.3, drain_s=0.1
    )
    async with running_relay(config) as rig:
        device = Device()
        stuck = await welcomed(rig, device.key, "device")
        backbone = rig.client(rig.swarm.backbone.key, "backbone")
        await rig.start(backbone)
        channels = [await backbone.open(device.key.public, timeout=5.0) for _ in range(20)]
        transport = stuck.socket._writer.transport
        transport.pause_reading()
        with pytest.raises(Unreachable) as caught:  # noqa: PT012 - buffers of the system decide which
            for _ in range(15):
                for channel in channels:
                    await channel.send(bytes(60_000))
        assert caught.value.code in ("busy", "unreachable")
        await until(lambda: rig.relay.meters.devices == 0)
        assert set(rig.relay.meters.outcomes) <= {"busy", "timeout"}


async def test_connections_of_one_address_are_limited() -> None:
    async with running_relay(RelayConfig(address_connections=2)) as rig:
        for _ in range(2):
            await RawPeer.dial(rig)
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await RawPeer.dial(rig)
        assert caught.value.status == 429
        client = rig.client(SigningKey.generate(), "device")
        with pytest.raises(Refused) as refused:
            await client._dial()
        assert refused.value.code == "quota"
        assert refused.value.retry_after_s == 30.0


async def test_random_frames_never_crash_a_relay() -> None:
    rng = random.Random(7)
    async with running_relay() as rig:
        for _ in range(60):
            peer = await welcomed(rig, SigningKey.generate(), "backbone")
            for _ in range(5):
                kind, id = rng.choice(list(FrameType)), rng.choice([0, 1, 2, 3])
                await peer.socket.send_bytes(encode(kind, id, rng.randbytes(rng.randrange(60))))
            await peer.socket.close()
        await until(lambda: rig.relay.meters.peers == 0)
        assert "internal" not in rig.relay.meters.refusals
        session = await session_with(rig, Device())
        await session.send(b"alive")
        assert await session.receive() == b"alive"


# --- coming and going ---


async def test_a_draining_relay_says_when_to_come_back() -> None:
    async with running_relay(RelayConfig(drain_s=5.0, retry_after_s=1.5)) as rig:
        device = Device()
        session = await session_with(rig, device)
        idle = await welcomed(rig, SigningKey.generate(), "device")
        draining = asyncio.create_task(rig.relay.drain())
        assert GoAway.from_bytes((await idle.skip_to(FrameType.GOAWAY))[1]).retry_after_s == 1.5
        await session.send(b"finish this first")
        assert await session.receive() == b"finish this first"
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await RawPeer.dial(rig)
        assert caught.value.status == 503
        assert (await rig.http.get(rig.url + "/relay/v1/health")).status == 503
        await session.close()
        await asyncio.wait_for(draining, 5.0)
        assert rig.relay.meters.peers == 0
        assert rig.relay.meters.outcomes == {"closed": 1}


async def test_circuits_that_do_not_finish_are_drained() -> None:
    async with running_relay(RelayConfig(drain_s=0.05)) as rig:
        session = await session_with(rig, Device())
        await rig.relay.drain()
        with pytest.raises(Unreachable):
            await session.receive()
        assert rig.relay.meters.outcomes == {"drained": 1}


async def test_clients_come_back_after_a_restart() -> None:
    swarm, device = Swarm(), Device()
    async with running_relay(swarm=swarm) as first:
        port = int(first.url.rsplit(":", 1)[1])
        async with aiohttp.ClientSession() as http:
            first.http = http
            clients = [
                first.client(device.key, "device", serve=echoing(first, device)),
                first.client(swarm.backbone.key, "backbone"),
            ]
            tasks = [asyncio.create_task(client.run()) for client in clients]
            for client in clients:
                await client.wait_connected(5.0)
            first.relay.config = RelayConfig(drain_s=0.05, retry_after_s=0.01)
            await first.relay.drain()
            await until(lambda: not any(client.connected for client in clients))
            with pytest.raises(Unreachable):
                await clients[1].open(device.key.public, timeout=1.0)
            first.relay.draining = False  # as a new process on the same port would answer
            for client in clients:
                await client.wait_connected(5.0)
            channel = await clients[1].open(device.key.public, timeout=5.0)
            session = await swarm.connect(channel, device, generation=2)
            await session.send(b"back")
            assert await session.receive() == b"back"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert port


async def test_losing_the_relay_ends_sessions_with_a_reason() -> None:
    async with running_relay() as rig:
        session = await session_with(rig, Device())
        for connection in list(rig.relay._connections.values()):
            connection.abort("timeout")
        with pytest.raises(Unreachable, match="lost"):
            await session.receive()
        assert session.outcome == "peer_gone"


async def test_health_and_a_renewed_certificate() -> None:
    async with running_relay() as rig:
        response = await rig.http.get(rig.url + "/relay/v1/health")
        body = await response.json()
        assert (response.status, body["status"], body["peers"]) == (200, "ok", 0)
        other = rig.swarm.certify("relay")
        with pytest.raises(IdentityError):
            rig.relay.renew(other.certificate, rig.swarm.relay.key)
        with pytest.raises(IdentityError):
            rig.relay.renew(rig.swarm.backbone.certificate, rig.swarm.backbone.key)
        rig.relay.renew(other.certificate, other.key)
        peer = await RawPeer.dial(rig)
        hello = Hello.from_bytes((await peer.skip_to(FrameType.HELLO))[1])
        assert hello.certificate == other.certificate.document


async def test_what_is_no_relay_is_called_by_its_name() -> None:
    async with running_relay() as rig:
        client = rig.client(SigningKey.generate(), "device")
        client.url = rig.url + "/elsewhere"
        with pytest.raises(Unreachable, match="404"):
            await client._dial()
        client.url = "http://127.0.0.1:1/relay/v1"
        with pytest.raises(Unreachable, match="cannot reach"):
            await client._dial()


# --- rules without sockets ---


def test_reconnecting_spreads_out() -> None:
    config = TransportConfig()
    rng = random.Random(1)

    def delays(**facts: object) -> list[float]:
        return [reconnect_delay(config=config, rng=rng, **facts) for _ in range(500)]  # type: ignore[arg-type]

    at_start = delays(attempt=0, vanished=False, retry_after_s=None)
    assert set(at_start) == {0.0}
    vanished = delays(attempt=0, vanished=True, retry_after_s=None)
    assert 0 <= min(vanished) < 1 < 7 < max(vanished) <= 8
    later = delays(attempt=9, vanished=True, retry_after_s=None)
    assert min(later) < 2 < 14 < max(later) <= 16
    told = delays(attempt=0, vanished=True, retry_after_s=3.0)
    assert 3 <= min(told) < 4 < 10 < max(told) <= 11
    assert max(delays(attempt=1, vanished=False, retry_after_s=None)) <= 1.0


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://host:8420", "http://host:8420/relay/v1"),
        ("https://host/prefix/", "https://host/prefix/relay/v1"),
        ("ws://host:1/relay/v1", "http://host:1/relay/v1"),
        ("wss://host", "https://host/relay/v1"),
    ],
)
def test_endpoints(url: str, endpoint: str) -> None:
    assert relay_endpoint(url) == endpoint


@pytest.mark.parametrize("url", ["", "host:1", "ftp://host", "http://"])
def test_no_endpoint(url: str) -> None:
    with pytest.raises(ConfigError):
        relay_endpoint(url)


@pytest.mark.parametrize(
    "changes",
    [
        {"port": -1},
        {"ping_s": 0},
        {"ping_jitter_s": (3.0, 1.0)},
        {"window_bytes": 100},
        {"drain_s": -1},
        {"device_outstanding_bytes": 5},
    ],
)
def test_settings_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(KvasirError):
        RelayConfig(**changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        TransportConfig(send_timeout_s=0)

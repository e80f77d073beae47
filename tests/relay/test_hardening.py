"""What a relay withstands: floods, silence, strangers in front of it, jumping clocks; and that it knows."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from relay.clock import SteadyClock
from relay.config import RelayConfig
from relay.frames import FrameType, encode
from relay.identity import SigningKey
from relay.messages import Open
from relay.server import FixedMarket, Relay
from relay.transport import RelayClient
from tests.support.peers import RawPeer, session_with, welcomed
from tests.support.relays import Device, Swarm, running_relay
from tests.support.waiting import until


async def _health(rig_url: str) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as http, http.get(rig_url + "/relay/v1/health") as response:
        return response.status, await response.json()


async def test_health_sends_a_packet_through_a_circuit_and_counts_it_nowhere() -> None:
    async with running_relay() as rig:
        status, body = await _health(rig.url)
        assert (status, body["status"]) == (200, "ok")
        assert isinstance(body["circuit_rtt_ms"], float)
        again = (await _health(rig.url))[1]
        assert again["circuit_rtt_ms"] == body["circuit_rtt_ms"]  # shared for a few seconds
        meters = rig.relay.meters
        assert (meters.peers, meters.circuits_opened, meters.bytes_forwarded, meters.outcomes) == (
            0,
            0,
            0,
            {},
        )


async def test_health_says_no_when_circuits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that listens and welcomes peers but forwards nothing is not healthy."""
    async with running_relay() as rig:
        monkeypatch.setattr(rig.relay._board, "forward", lambda *_: None)
        monkeypatch.setattr("relay.probe.TIMEOUT_S", 0.5)
        status, body = await _health(rig.url)
        assert (status, body["status"]) == (503, "failing")
        assert "circuit" in str(body["reason"])


async def test_a_health_checks_ticket_is_worth_nothing_to_others() -> None:
    async with running_relay() as rig:
        probe = rig.relay._probe
        stranger = SigningKey.generate()
        forged = rig.swarm.ticket(stranger.public, "device", key=probe._market)
        peer = await RawPeer.dial(rig)
        await peer.authenticate(rig, stranger, "device", ticket=forged)
        assert (await peer.refusal()).code == "bad_signature"


async def test_forwarded_addresses_count_only_behind_a_trusted_proxy() -> None:
    headers = {"X-Forwarded-For": "198.51.100.7"}
    for trusted, expected in (((), "127.0.0.1"), (("127.0.0.0/8",), "198.51.100.7")):
        async with running_relay(RelayConfig(trusted_proxies=trusted)) as rig:
            socket = await rig.http.ws_connect(rig.url + "/relay/v1", headers=headers)
            await socket.receive(timeout=5.0)
            assert [connection.address for connection in rig.relay._everyone] == [expected]
            await socket.close()


async def test_quotas_count_clients_behind_one_proxy_apart() -> None:
    config = RelayConfig(trusted_proxies=("127.0.0.1",), address_connections=1)
    async with running_relay(config) as rig:
        url, headers = rig.url + "/relay/v1", "X-Forwarded-For"
        first = await rig.http.ws_connect(url, headers={headers: "192.0.2.1"})
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await rig.http.ws_connect(url, headers={headers: "192.0.2.1"})
        assert caught.value.status == 429
        second = await rig.http.ws_connect(url, headers={headers: "192.0.2.2"})
        await asyncio.gather(first.close(), second.close())


async def test_a_clock_that_jumps_drops_nobody() -> None:
    wall = [time.time()]
    clock = SteadyClock(wall=lambda: wall[0], settle_s=60.0)
    config = RelayConfig(ping_s=0.05, ping_jitter_s=(0.0, 0.01), pong_timeout_s=2.0, drain_s=0.1)
    async with running_relay(config) as rig:
        rig.relay._clock = clock
        session = await session_with(rig, Device())
        for jump in (7200.0, -14400.0):
            wall[0] += jump
            rtts = {connection.rtt_s for connection in rig.relay._everyone}
            await until(lambda rtts=rtts: not rtts & {c.rtt_s for c in rig.relay._everyone})
            await session.send(b"still here")
            assert await session.receive() == b"still here"
        assert rig.relay.meters.refusals == {}


async def test_a_flood_of_pings_by_a_peer_that_reads_nothing_is_bounded() -> None:
    config = RelayConfig(write_timeout_s=0.5, drain_s=0.1)
    async with running_relay(config) as rig:
        flood = await welcomed(rig, SigningKey.generate(), "device")
        transport = flood.socket._writer.transport
        transport.pause_reading()
        ping = encode(FrameType.PING, 0, bytes(8))
        pings = (bytes((0x82, 0x80 | len(ping), 0, 0, 0, 0)) + ping) * 5_000
        (connection,) = rig.relay._everyone
        most = 0
        async with asyncio.timeout(30.0):
            while connection.outcome is None:
                transport.write(pings)
                read = connection.socket.bytes_read
                await until(
                    lambda read=read: connection.socket.bytes_read != read or connection.outcome is not None
                )
                most = max(most, connection.outstanding)
        assert connection.outcome == "timeout"
        assert most < connection.bound + (2 << 20)
        await until(lambda: rig.relay.meters.peers == 0)


async def test_frames_arrive_whole_from_a_stream_of_single_bytes() -> None:
    """The worst a network may do to a stream: one byte in each read."""
    async with running_relay() as rig:
        device = Device()
        session = await session_with(rig, device)
        before = set(rig.relay._everyone)
        peer = await welcomed(rig, SigningKey.generate(), "backbone")
        (connection,) = set(rig.relay._everyone) - before
        transport = peer.socket._writer.transport
        frame = encode(FrameType.OPEN, 1, Open(device.key.public).to_bytes())
        for byte in bytes((0x82, 0x80 | len(frame), 0, 0, 0, 0)) + frame:
            read = connection.socket.bytes_read
            transport.write(bytes((byte,)))
            await until(lambda read=read: connection.socket.bytes_read == read + 1)
        await peer.skip_to(FrameType.OPENED)
        await session.send(b"and others are served meanwhile")
        assert await session.receive() == b"and others are served meanwhile"


async def test_a_reverse_proxy_with_a_path_in_front() -> None:
    swarm = Swarm()
    relay = Relay(
        RelayConfig(),
        certificate=swarm.relay.certificate,
        key=swarm.relay.key,
        market=FixedMarket(lambda: [swarm.market.key.public]),
    )
    app, inner = web.Application(), web.Application()
    relay.attach(inner)
    app.add_subapp("/swarm", inner)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        device = Device()
        client = RelayClient(
            f"http://127.0.0.1:{runner.addresses[0][1]}/swarm",
            device.key,
            role="device",
            root=swarm.root,
            ticket=swarm.ticketing(device.key.public, "device"),
            start_generation=1,
            http=http,
        )
        task = asyncio.create_task(client.run())
        await client.wait_connected(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await runner.cleanup()

"""A session moves from relay to relay: as its device likes it, before a relay goes, and after one is gone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from relay.channel import Channel
from relay.config import RelayConfig
from relay.identity import PublicKey
from relay.paths import PathConfig, Paths
from relay.secure import SecureSession
from relay.transport import RelayClient
from tests.support.peers import echoing
from tests.support.relays import Device, RelayRig, Swarm, running_relay
from tests.support.waiting import until

QUICK = PathConfig(head_start_s=0.0, direct_timeout_s=0.5, relay_timeout_s=1.0)


@dataclass
class Two:
    """Two relays with one device and one backbone at both."""

    rigs: tuple[RelayRig, RelayRig]
    clients: tuple[RelayClient, RelayClient]
    paths: Paths
    liked: list[PublicKey]
    changes: list[str]

    @property
    def keys(self) -> tuple[PublicKey, PublicKey]:
        first, second = (rig.relay.public_key for rig in self.rigs)
        return first, second


@asynccontextmanager
async def two_relays() -> AsyncIterator[Two]:
    device, swarm = Device(), Swarm()
    other = copy.copy(swarm)
    other.relay = swarm.certify("relay", id=b"the other one---")
    generation = itertools.count(1)
    config = RelayConfig(drain_s=5.0)
    async with running_relay(config, swarm) as one, running_relay(config, other) as two:
        clients = []
        changes: list[str] = []
        for rig in (one, two):
            await rig.start(rig.client(device.key, "device", serve=echoing(rig, device)))
            client = rig.client(swarm.backbone.key, "backbone")
            client._on_change = lambda url=rig.url: changes.append(url)  # type: ignore[misc]
            await rig.start(client)
            clients.append(client)
        first, second = clients

        async def handshake(channel: Channel) -> SecureSession:
            return await swarm.connect(channel, device, generation=next(generation), timeout=2.0)

        liked: list[PublicKey] = []
        paths = Paths(
            device.key.public,
            addresses=tuple,
            relays=lambda: (first, second),
            handshake=handshake,
            http=one.http,
            config=QUICK,
            preferred=lambda: liked,
        )
        yield Two((one, two), (first, second), paths, liked, changes)


async def _works(session: SecureSession) -> None:
    await session.send(b"hello")
    assert await session.receive() == b"hello"


async def test_the_device_says_through_which_relay_it_wants_to_be_called() -> None:
    async with two_relays() as two:
        for number in (1, 0):
            two.liked[:] = [two.keys[number]]
            session = await two.paths.connect()
            assert two.paths.relay is two.clients[number]
            assert not two.paths.misplaced
            await _works(session)
            await session.close()


async def test_a_session_follows_its_device_and_the_old_one_serves_until_then() -> None:
    async with two_relays() as two:
        two.liked[:] = [two.keys[0], two.keys[1]]
        first = await two.paths.connect()
        assert await two.paths.improve(first) is None
        two.liked[:] = [two.keys[1], two.keys[0]]
        assert two.paths.misplaced
        second = await two.paths.improve(first)
        assert second is not None
        assert two.paths.relay is two.clients[1]
        assert not two.paths.misplaced
        await _works(first)  # until its owner lets it go
        await _works(second)
        await first.close()
        await second.close()


async def test_a_session_leaves_a_draining_relay_before_it_is_gone() -> None:
    async with two_relays() as two:
        two.liked[:] = [two.keys[0]]
        first = await two.paths.connect()
        draining = two.rigs[0].tasks.create_task(two.rigs[0].relay.drain())
        await until(lambda: two.clients[0].leaving)
        assert two.changes[-1] == two.rigs[0].url
        assert two.paths.misplaced
        assert two.paths.detached
        second = await two.paths.improve(first)
        assert second is not None
        assert two.paths.relay is two.clients[1]
        await _works(second)
        await first.close()
        await draining
        await _works(second)
        await second.close()


async def test_a_relay_that_is_gone_is_followed_by_the_other() -> None:
    async with two_relays() as two:
        two.liked[:] = [two.keys[0], two.keys[1]]
        first = await two.paths.connect()
        for connection in list(two.rigs[0].relay._everyone):
            connection.abort("timeout")
        await until(lambda: first.closed)
        assert two.paths.detached
        second = await two.paths.connect()
        assert two.paths.relay is two.clients[1]
        await _works(second)
        await second.close()


async def test_a_device_that_is_not_where_it_says_is_found_at_another_relay() -> None:
    async with two_relays() as two:
        two.liked[:] = [PublicKey(bytes(31) + b"\x01"), two.keys[0]]
        first = await two.paths.connect()
        assert two.paths.relay is two.clients[0]
        assert await two.paths.improve(first) is None
        await _works(first)
        await first.close()

"""Peers of a test's relay: one that says whatever a test wants, and a backbone with a device that echoes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import WSMsgType

from relay.channel import Channel
from relay.frames import FrameType, decode, encode
from relay.identity import SignedDocument, SigningKey
from relay.messages import Auth, Hello, RefusedMessage
from relay.secure import SecureSession
from relay.tickets import PeerRole, auth_message
from tests.support.relays import Device, RelayRig


class RawPeer:
    """A client that says whatever a test wants."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    @classmethod
    async def dial(cls, rig: RelayRig) -> RawPeer:
        return cls(await rig.dial())

    async def next(self) -> tuple[FrameType, int, bytes]:
        message = await self.socket.receive(timeout=5.0)
        assert message.type is WSMsgType.BINARY, message
        kind, id, payload = decode(message.data)
        return kind, id, bytes(payload)

    async def skip_to(self, wanted: FrameType) -> tuple[int, bytes]:
        while True:
            kind, id, payload = await self.next()
            if kind is wanted:
                return id, payload

    async def send(self, kind: int, id: int = 0, payload: bytes = b"") -> None:
        await self.socket.send_bytes(encode(kind, id, payload))

    async def authenticate(
        self,
        rig: RelayRig,
        key: SigningKey,
        role: PeerRole,
        *,
        ticket: SignedDocument | None = None,
        generation: int = 1,
    ) -> None:
        hello = Hello.from_bytes((await self.skip_to(FrameType.HELLO))[1])
        ticket = ticket or rig.swarm.ticket(key.public, role, generation=generation)
        signature = key.sign(auth_message(hello.nonce, rig.relay.public_key, ticket))
        await self.send(FrameType.AUTH, 0, Auth(ticket, generation, signature).to_bytes())

    async def refusal(self) -> RefusedMessage:
        refused = RefusedMessage.from_bytes((await self.skip_to(FrameType.REFUSED))[1])
        closing = await self.socket.receive(timeout=5.0)
        assert closing.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING)
        return refused


async def welcomed(rig: RelayRig, key: SigningKey, role: PeerRole, generation: int = 1) -> RawPeer:
    peer = await RawPeer.dial(rig)
    await peer.authenticate(rig, key, role, generation=generation)
    await peer.skip_to(FrameType.WELCOME)
    return peer


def echoing(rig: RelayRig, device: Device) -> Callable[[Channel], Awaitable[None]]:
    async def serve(channel: Channel) -> None:
        session = await rig.swarm.accept(channel, device)
        while True:
            await session.send(await session.receive())

    return serve


async def session_with(rig: RelayRig, device: Device, *, generation: int = 1) -> SecureSession:
    """A session of the swarm's backbone with `device`, which echoes, through the relay."""
    await rig.start(rig.client(device.key, "device", serve=echoing(rig, device)))
    backbone = rig.client(rig.swarm.backbone.key, "backbone")
    await rig.start(backbone)
    channel = await backbone.open(device.key.public, timeout=5.0)
    return await rig.swarm.connect(channel, device, generation=generation)

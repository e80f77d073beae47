"""Whether a relay works, tried out: a packet to itself and back through a real circuit.

The probe dials the relay's own listener as a device and as a backbone, with keys that this process alone
knows and tickets that it signs itself; the relay honours those for its probe's keys only. Answers are shared
for a few seconds, so health checks cost little however many ask.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import aiohttp

from .errors import KvasirError, Refused, RemoteProtocolError, Unreachable
from .frames import MAX_FRAME, FrameType, decode, encode
from .identity import PublicKey, SigningKey
from .messages import Auth, Hello, Open, RefusedMessage
from .tickets import PeerRole, auth_message, issue_ticket
from .wire import WebSocket, dial

SHARED_S: Final = 5.0
"""How long an answer counts."""

TIMEOUT_S: Final = 5.0
"""A circuit that takes longer is broken."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: the circuit's round trip in seconds, or why there was none."""

    rtt_s: float | None
    reason: str = ""


class Probe:
    """Tries the relay out. `signer` and `keys` are what the relay must honour for it.

    `relay` gives the relay's Ed25519 key, `clock` its Unix time.
    """

    def __init__(self, relay: Callable[[], PublicKey], clock: Callable[[], float]) -> None:
        self._relay, self._clock = relay, clock
        self._market = SigningKey.generate()
        self._device, self._backbone = SigningKey.generate(), SigningKey.generate()
        self.signer: PublicKey = self._market.public
        self.keys = frozenset((self._device.public, self._backbone.public))
        self._lock = asyncio.Lock()
        self._found: Finding | None = None
        self._at = 0.0

    async def check(self, url: str) -> Finding:
        """Try the relay at `url`, its own listener (http or https), or repeat what was found a moment ago."""
        async with self._lock:
            if self._found is None or time.monotonic() - self._at >= SHARED_S:
                self._found = await self._try(url)
                self._at = time.monotonic()
            return self._found

    async def _try(self, url: str) -> Finding:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connector = aiohttp.TCPConnector(ssl=False)  # it is this process that answers
                async with aiohttp.ClientSession(connector=connector) as http, AsyncExitStack() as stack:
                    device = await self._join(url, http, self._device, "device", stack)
                    backbone = await self._join(url, http, self._backbone, "backbone", stack)
                    return Finding(await self._round_trip(device, backbone))
        except TimeoutError:
            return Finding(None, f"no answer through a circuit within {TIMEOUT_S:g} s")
        except KvasirError as error:
            return Finding(None, str(error))

    async def _join(
        self, url: str, http: aiohttp.ClientSession, key: SigningKey, role: PeerRole, stack: AsyncExitStack
    ) -> WebSocket:
        socket = await dial(http, url + "/relay/v1", max_bytes=MAX_FRAME)
        stack.callback(socket.close)
        hello = Hello.from_bytes(await _next(socket, FrameType.HELLO))
        ticket = issue_ticket(
            self._market,
            subject=key.public,
            role=role,
            relay=self._relay(),
            start_generation=0,
            now=self._clock(),
        )
        signature = key.sign(auth_message(hello.nonce, self._relay(), ticket))
        socket.write(encode(FrameType.AUTH, 0, Auth(ticket, 0, signature).to_bytes()))
        await _next(socket, FrameType.WELCOME)
        return socket

    async def _round_trip(self, device: WebSocket, backbone: WebSocket) -> float:
        """Open a circuit, send a packet to the device and back; the seconds that the packet took."""
        backbone.write(encode(FrameType.OPEN, 1, Open(self._device.public).to_bytes()))
        await _next(backbone, FrameType.OPENED)
        await _next(device, FrameType.INCOMING)
        sent, started = secrets.token_bytes(64), time.perf_counter()
        backbone.write(encode(FrameType.DATA, 1, sent))
        device.write(encode(FrameType.DATA, 2, await _next(device, FrameType.DATA)))
        if await _next(backbone, FrameType.DATA) != sent:
            raise Unreachable("what came back through the circuit is not what was sent")
        return time.perf_counter() - started


async def _next(socket: WebSocket, wanted: FrameType) -> memoryview:
    """The payload of the next frame, which must be `wanted`."""
    kind, _, payload = decode(await socket.receive())
    if kind is FrameType.REFUSED:
        refused = RefusedMessage.from_bytes(payload)
        raise Refused(refused.code, refused.message)
    if kind is not wanted:
        raise RemoteProtocolError(f"expected {wanted.name}, got {kind.name}")
    return payload

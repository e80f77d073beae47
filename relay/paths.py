"""Which way to a device: straight to it where it can be reached, through a relay otherwise.

`connect` tries the direct addresses at once and gives them a head start; what answers first is shaken hands
with, so nobody needs to be trusted about addresses: a stranger fails at the first message. `improve` is for a
session that goes through a relay: it looks for a direct way, or for the relay that the device likes best,
and brings up the session there. A device keeps the older session until the newer one's first packet has
decrypted, so calls in flight are only ever in doubt, never lost: their owner sends them again on the new
session, and pays for one reply.

Handshakes of one device run one after the other (a newer generation ends an older session). Knows nothing of
what sessions carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import structlog

from .channel import Channel
from .direct import connect_direct
from .errors import ConfigError, KvasirError, Unreachable
from .identity import PublicKey, address_of
from .secure import SecureSession
from .transport import RelayClient

MAX_ADDRESSES: Final = 8
"""Direct addresses tried at once; a device that names more is heard about its first."""

log = structlog.get_logger("relay")


@dataclass(frozen=True, slots=True)
class PathConfig:
    """Times in seconds."""

    head_start_s: float = 0.25  # how long relays wait for a direct link to come up
    direct_timeout_s: float = 2.0  # dialling one direct address
    relay_timeout_s: float = 5.0  # opening one circuit
    improve_every_s: float = 15.0  # how often a relayed session's owner should look for a direct way

    def __post_init__(self) -> None:
        if (
            min(self.direct_timeout_s, self.relay_timeout_s, self.improve_every_s) <= 0
            or self.head_start_s < 0
        ):
            raise ConfigError("the times of a path must be above zero")


class Paths:
    """The ways to one device.

    `addresses` gives the URLs where it says it listens (best first), `relays` the relays it may be at,
    `preferred` the keys of those it says it is at (best first), and `handshake` makes the session on a
    channel (it raises `KvasirError`, and has closed the channel then).
    `dial` makes a direct link in the place of `connect_direct`, for callers that bound and count them.
    """

    def __init__(
        self,
        device: PublicKey,
        *,
        addresses: Callable[[], Iterable[str]],
        relays: Callable[[], Iterable[RelayClient]],
        handshake: Callable[[Channel], Awaitable[SecureSession]],
        http: aiohttp.ClientSession,
        config: PathConfig | None = None,
        dial: Callable[[PublicKey, str], Awaitable[Channel]] | None = None,
        preferred: Callable[[], Sequence[PublicKey]] = tuple,
    ) -> None:
        self.device = device
        self.config = config or PathConfig()
        self._addresses, self._relays = addresses, relays
        self._handshake, self._http, self._dialler = handshake, http, dial
        self._preferred = preferred
        self._last: SecureSession | None = None  # what was brought up last
        self._via: RelayClient | None = None  # the relay it goes through

    @property
    def relay(self) -> RelayClient | None:
        """The relay that the session brought up last goes through, or None for a direct one."""
        return self._via

    async def connect(self) -> SecureSession:
        """A session by the best way there is. Raises `Unreachable` (or what the device refused with)."""
        cut = self._last is not None and self._last.path == "direct" and self._last.outcome == "peer_gone"
        dials = self._dial_direct()
        try:  # a direct link that was just lost gets no head start: a call may be waiting
            self._last = await self._connect(dials, 0.0 if cut else self.config.head_start_s)
            return self._last
        finally:
            await _give_up(dials)

    async def _connect(self, dials: list[asyncio.Task[Channel]], head_start_s: float) -> SecureSession:
        session, error = await self._shake_first(dials, head_start_s)
        if session is not None:
            return session
        try:
            return await self._through_a_relay()
        except KvasirError as relay_error:
            error = error or relay_error
        session, direct_error = await self._shake_first(dials, self.config.direct_timeout_s)
        if session is not None:
            return session
        raise direct_error or error

    async def improve(self, session: SecureSession) -> SecureSession | None:
        """A session on a better way than a relayed one's, or None; `session` goes on until it is replaced.

        The device ends the older session by itself once the new one is up.
        """
        if session.path == "direct" or session.closed:
            return None
        before = self._via
        dials = self._dial_direct()
        try:
            better, _ = await self._shake_first(dials, self.config.direct_timeout_s)
            if better is None and session is self._last:
                better = await self._through_a_better_relay()
        finally:
            await _give_up(dials)
        if better is not None:
            self._last = better
            log.info(
                "path.changed",
                device=address_of(self.device),
                path=better.path,
                relay=None if self._via is None else self._via.url,
                before=None if before is None else before.url,
            )
        return better

    @property
    def detached(self) -> bool:
        """Whether the relay of the session brought up last is gone, or goes away."""
        return self._via is not None and (self._via.leaving or not self._via.connected)

    @property
    def misplaced(self) -> bool:
        """Whether the session goes through a relay that goes away, or is not the device's first choice."""
        return self._via is not None and bool(self._better_relays())

    def _better_relays(self) -> list[RelayClient]:
        """Relays to move to, best first: all of the others where the present one goes away."""
        via, ways = self._via, self._ways()
        if via is None:
            return []
        if self.detached:
            return [client for client in ways if client is not via]
        liked = self._preferred()
        present = liked.index(via.relay_key) if via.relay_key in liked else len(liked)
        return [client for client in ways if client.relay_key in liked[:present]]

    async def _through_a_better_relay(self) -> SecureSession | None:
        for client in self._better_relays():
            try:
                return await self._open(client)
            except KvasirError as failed:
                log.debug("path.failed", relay=client.url, device=address_of(self.device), reason=str(failed))
        return None

    def _dial_direct(self) -> list[asyncio.Task[Channel]]:
        urls = list(dict.fromkeys(self._addresses()))[:MAX_ADDRESSES]
        return [asyncio.create_task(self._dial(url)) for url in urls]

    async def _dial(self, url: str) -> Channel:
        if self._dialler is not None:
            return await self._dialler(self.device, url)
        return await connect_direct(url, self.device, http=self._http, timeout=self.config.direct_timeout_s)

    async def _shake_first(
        self, dials: list[asyncio.Task[Channel]], timeout: float
    ) -> tuple[SecureSession | None, KvasirError | None]:
        """The session on the first direct link that comes up in time and shakes hands; or the last error."""
        error: KvasirError | None = None
        deadline = asyncio.get_running_loop().time() + timeout
        while dials:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait(dials, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for dial in done:
                dials.remove(dial)
                try:
                    session = await self._handshake(dial.result())
                    self._via = None
                    return session, None
                except KvasirError as failed:
                    error = failed
        return None, error

    async def _through_a_relay(self) -> SecureSession:
        error: KvasirError = Unreachable("the device is at no relay that is connected")
        for client in self._ways():
            try:
                return await self._open(client)
            except KvasirError as failed:
                log.debug("path.failed", relay=client.url, device=address_of(self.device), reason=str(failed))
                error = failed
        raise error

    async def _open(self, client: RelayClient) -> SecureSession:
        """A session through one relay. Raises `KvasirError`."""
        channel = await client.open(self.device, timeout=self.config.relay_timeout_s)
        session = await self._handshake(channel)
        self._via = client
        return session

    def _ways(self) -> list[RelayClient]:
        """Relays that can be tried: those that the device says it is at, in its order, then the nearest."""
        liked = {key: place for place, key in enumerate(self._preferred())}
        ready = [client for client in self._relays() if client.connected and not client.leaving]

        def order(client: RelayClient) -> tuple[float, float]:
            key = client.relay_key
            place = liked.get(key, len(liked)) if key is not None else len(liked)
            return place, client.rtt_s if client.rtt_s is not None else 1e9

        return sorted(ready, key=order)


async def _give_up(dials: list[asyncio.Task[Channel]]) -> None:
    """End what is still dialling, and links that nobody uses."""
    for dial in dials:
        dial.cancel()
    for channel in await asyncio.gather(*dials, return_exceptions=True):
        if not isinstance(channel, BaseException):
            channel.end("closed", "another way was faster")
    dials.clear()

"""How far a relay is and how busy it says it is, asked over HTTP without a ticket.

What comes back is not signed: it says where to try, and the connection proves whose relay it is.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Final

import aiohttp

from .errors import KvasirError, RemoteProtocolError, Unreachable
from .load import RelayLoad
from .transport import relay_endpoint

TIMEOUT_S: Final = 3.0
"""A relay that has not answered by then is taken for gone."""


MAX_ANSWER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a relay found: its round trip in seconds, and its load."""

    rtt_s: float
    load: RelayLoad


async def look_at(url: str, *, http: aiohttp.ClientSession, timeout: float = TIMEOUT_S) -> Look:
    """Measure the relay at `url`. Raises `KvasirError` if it does not answer within `timeout` seconds."""
    target = relay_endpoint(url) + "/load"
    try:
        async with asyncio.timeout(timeout):
            await _ask(target, http)  # opens the connection
            started = time.perf_counter()
            load = await _ask(target, http)
            return Look(time.perf_counter() - started, load)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unreachable(f"the relay {url} does not answer: {error or type(error).__name__}") from None


async def _ask(target: str, http: aiohttp.ClientSession) -> RelayLoad:
    async with http.get(target, allow_redirects=False) as response:
        if response.status != 200:
            raise Unreachable(f"{target} answered with status {response.status}")
        data = await response.content.read(MAX_ANSWER_BYTES)
    try:
        return RelayLoad.from_fields(json.loads(data))
    except (ValueError, RecursionError):
        raise RemoteProtocolError(f"{target} answered with something else than a load") from None


async def looks(
    urls: dict[bytes, str], *, http: aiohttp.ClientSession, timeout: float = TIMEOUT_S
) -> dict[bytes, Look | None]:
    """Look at several relays at once, by any key; None for one that does not answer."""

    async def one(url: str) -> Look | None:
        try:
            return await look_at(url, http=http, timeout=timeout)
        except KvasirError:
            return None

    found = await asyncio.gather(*(one(url) for url in urls.values()))
    return dict(zip(urls, found, strict=True))

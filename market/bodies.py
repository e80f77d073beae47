"""How many bytes of request bodies a server holds at once, and how long it waits for one.

A body is counted while it comes and until its request is answered. What is verified before it is read may
use the whole budget; what anybody can send has a part of it, and each address a part of that, so that
strangers cannot keep the swarm's own out. Knows streams of bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from relay.errors import Refused, RemoteProtocolError

BASE_S: Final = 20.0
SLOWEST_RATE: Final = 200_000
"""A body of n bytes must be there within `BASE_S` + n / `SLOWEST_RATE` seconds."""

OPEN_PART: Final = 4
"""What anybody can send may use one part in so many of the budget, and one address as little of that."""

RETRY_S: Final = 2.0


class BodyBudget:
    """Bounds on the bodies of one server, in bytes: `total`, of which unverified ones have a part."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        """Bytes of all bodies in memory."""
        self.open_held = 0
        """Bytes of those whose author was not verified before they were read."""
        self._by_address: Counter[str] = Counter()

    def hold(self, address: str, *, verified: bool) -> Hold:
        """The share of one request from `address`; nothing is held yet. Release it when it is answered."""
        return Hold(self, address, verified)

    def _take(self, address: str, size: int, verified: bool) -> None:
        open_total = self.total // OPEN_PART
        full = self.held + size > self.total
        if not verified:
            full = full or self.open_held + size > open_total
            full = full or self._by_address[address] + size > open_total // OPEN_PART
        if full:
            raise Refused("overloaded", "too many large requests at once: ask again", retry_after_s=RETRY_S)
        self.held += size
        if not verified:
            self.open_held += size
            self._by_address[address] += size

    def _give(self, address: str, size: int, verified: bool) -> None:
        self.held -= size
        if verified:
            return
        self.open_held -= size
        self._by_address[address] -= size
        if not self._by_address[address]:
            del self._by_address[address]


class Hold:
    """One request's bytes in a `BodyBudget`."""

    def __init__(self, budget: BodyBudget, address: str, verified: bool) -> None:
        self._budget, self._address, self._verified = budget, address, verified
        self._size = 0

    def take(self, size: int) -> None:
        """Hold so many bytes more. Raises `Refused` (overloaded) and holds none of them."""
        self._budget._take(self._address, size, self._verified)
        self._size += size

    def release(self) -> None:
        """Hold nothing any more. Again changes nothing."""
        size, self._size = self._size, 0
        self._budget._give(self._address, size, self._verified)

    async def read(self, chunks: AsyncIterator[bytes], declared: int | None, limit: int) -> bytes:
        """The body: `declared` bytes if its length was said, `limit` at most, within a deadline.

        A verified body's declared length is held before the first byte is read; everything else is held as
        it comes. Raises `Refused` (overloaded) or `RemoteProtocolError`.
        """
        if declared is not None and declared > limit:
            raise RemoteProtocolError(f"a body of {declared} bytes is over the bound of {limit}")
        held = declared or 0 if self._verified else 0
        self.take(held)
        allowed_s = BASE_S + (limit if declared is None else declared) / SLOWEST_RATE
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(allowed_s):
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise RemoteProtocolError(f"the body is over the bound of {limit} bytes")
                    if size > held:
                        self.take(size - held)
                        held = size
                    parts.append(chunk)
        except TimeoutError:
            raise RemoteProtocolError(f"the body did not come within {allowed_s:.0f} s") from None
        return b"".join(parts)

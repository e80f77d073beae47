"""Clients of the API that note when each token came: for benchmarks that load a swarm."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Stream:
    """One streamed completion. `times` are when events with tokens came, monotonic seconds, and `counts` how
    many each brought (drafted ones come together); `status` 0: no answer.
    """

    asked_at: float
    status: int = 0
    retry_after: str | None = None
    numerics: str = ""
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""
    ended_at: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether the text came whole."""
        return self.status == 200 and not self.error

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked_at

    @property
    def token_times(self) -> list[float]:
        """When each token came."""
        return [at for at, count in zip(self.times, self.counts, strict=True) for _ in range(count)]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first event."""
        return (len(self.token_ids) - self.counts[0]) / (self.times[-1] - self.times[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def worst_stall_s(self) -> float:
        """The longest silence: before the first token or between two."""
        return max([self.first_s, *self.gaps]) if self.times else math.inf


def session(*, total_s: float = 180, silent_s: float = 60) -> aiohttp.ClientSession:
    """A client session without a bound of its own on connections; each wait has a deadline.

    A request may take `total_s`, and be silent for `silent_s`.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=20, sock_read=silent_s),
    )


async def stream(
    http: aiohttp.ClientSession, url: str, model: str, prompt: str | list[int], tokens: int
) -> Stream:
    """Ask for a greedy completion of exactly `tokens` tokens, streamed; whatever happens is in the result.

    `prompt` is a text, or token ids.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    found = Stream(time.monotonic())
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            found.status = response.status
            found.numerics = response.headers.get("X-Kvasir-Numerics", "")
            found.retry_after = response.headers.get("Retry-After")
            if response.status != 200:
                found.error = (await response.text())[:300]
                return found
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(json.loads(line[6:]), found)
        if not found.error and len(found.token_ids) != tokens:
            found.error = f"{len(found.token_ids)} tokens where {tokens} were asked for"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        found.error = f"{type(error).__name__}: {error}"
    finally:
        found.ended_at = time.monotonic()
    return found


def _take(event: dict[str, Any], found: Stream) -> None:
    if "error" in event:
        found.error = str(event["error"])[:300]
        return
    for choice in event["choices"]:
        if choice["token_ids"]:
            found.times.append(time.monotonic())
            found.counts.append(len(choice["token_ids"]))
            found.token_ids += choice["token_ids"]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed (nearest rank); nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan

"""How busy a relay is: one share between 0 and 1, and the figures behind it.

A relay says it of itself, to whoever asks (`GET /relay/v1/load`) and to the market with each heartbeat. The
share is that of whatever is scarcest: places for connections, the processor that its loop runs on, or the
bandwidth that its operator gave it. Pure; counters and clocks are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from .errors import RemoteProtocolError

SAMPLE_S: Final = 2.0
"""Rates are means over at least so long; whoever asks sooner gets the last ones."""

OVERLOADED: Final = 0.9
"""From this share on a relay should get nobody who has a choice."""


@dataclass(frozen=True, slots=True)
class RelayLoad:
    """What a relay carries now. `share` is 0 for an idle relay, 1 for one that can take no more."""

    share: float
    peers: int
    circuits: int
    bytes_per_s: float
    draining: bool = False

    def to_fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "share": round(self.share, 4),
            "peers": self.peers,
            "circuits": self.circuits,
            "bytes_per_s": round(self.bytes_per_s, 1),
            "draining": self.draining,
        }

    @classmethod
    def from_fields(cls, fields: object) -> RelayLoad:
        """What `to_fields` made, unknown fields left out. Raises `RemoteProtocolError`."""
        if not isinstance(fields, dict):
            raise RemoteProtocolError("a relay's load is an object")
        numbers = [fields.get(name) for name in ("share", "peers", "circuits", "bytes_per_s")]
        sound = all(type(number) in (int, float) and 0 <= number < 1 << 53 for number in numbers)  # type: ignore[operator]
        if not sound or not isinstance(fields.get("draining", False), bool):
            raise RemoteProtocolError("a relay's load has a field that is missing or out of range")
        share, peers, circuits, rate = numbers
        draining = fields.get("draining", False)
        return cls(min(1.0, float(share)), int(peers), int(circuits), float(rate), draining)  # type: ignore[arg-type]


class LoadMeter:
    """Rates out of counters that only rise.

    `connections` is the most there may be, `bandwidth` what the operator gives in bytes a second, both
    directions together (0: no bound); `processor` gives the seconds of processor time used so far.
    """

    def __init__(self, *, connections: int, bandwidth: float, processor: Callable[[], float]) -> None:
        self._connections = connections
        self._bandwidth = bandwidth
        self._processor = processor
        self._at: float | None = None
        self._bytes, self._busy_s = 0, 0.0
        self._bytes_per_s = self._busy = 0.0

    def due(self, now: float) -> bool:
        """Whether `read` will take a new sample at `now` (a steady clock, seconds)."""
        return self._at is None or now - self._at >= SAMPLE_S

    def read(
        self,
        now: float,
        *,
        bytes_forwarded: Callable[[], int],
        connections: int,
        peers: int,
        circuits: int,
        draining: bool,
    ) -> RelayLoad:
        """The load at `now`. `bytes_forwarded` is asked only where a new sample is due."""
        if self.due(now):
            total, busy_s = bytes_forwarded(), self._processor()
            if self._at is not None:
                passed = now - self._at
                self._bytes_per_s = max(0, total - self._bytes) / passed
                self._busy = max(0.0, busy_s - self._busy_s) / passed
            self._at, self._bytes, self._busy_s = now, total, busy_s
        share = max(connections / self._connections, self._busy)
        if self._bandwidth:
            share = max(share, self._bytes_per_s / self._bandwidth)
        return RelayLoad(min(1.0, share), peers, circuits, self._bytes_per_s, draining)

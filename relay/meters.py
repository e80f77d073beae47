"""What a relay has done and is doing, as its operator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .circuit import CircuitRecord


@dataclass(frozen=True, slots=True)
class Meters:
    """Live circuits, and totals since the start.

    `outcomes` counts ended circuits by `circuit.OUTCOMES`, `refusals` connections by `errors.CODES`;
    `bytes_forwarded` are DATA payload bytes of both directions.
    """

    peers: int
    devices: int
    backbones: int
    circuits: tuple[CircuitRecord, ...]
    circuits_opened: int
    outcomes: Mapping[str, int]
    bytes_forwarded: int
    refusals: Mapping[str, int]
    draining: bool

"""Who writes next on a link that many circuits share: deficit round robin, without I/O.

While a link takes everything at once nothing waits here. Once it does not, each circuit has a queue of its
own and a turn in every round, so a heavy circuit delays a light one by its share of the link, not by its
whole window. Source: Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin" (1995).
"""

from __future__ import annotations

from collections import deque

QUANTUM = 1 << 16
"""Bytes that a circuit may write in one turn."""


class FairQueue:
    """Frames that wait for one link, by circuit; within a circuit in order."""

    __slots__ = ("_left", "_order", "_quantum", "_waiting", "bytes")

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._waiting: dict[int, deque[bytearray]] = {}
        self._order: deque[int] = deque()  # circuits in the order of their turns
        self._left: dict[int, int] = {}  # what each may still write in this turn; below zero: owed
        self.bytes = 0

    def __len__(self) -> int:
        """How many circuits wait."""
        return len(self._waiting)

    def __contains__(self, circuit: int) -> bool:
        """Whether frames of `circuit` wait."""
        return circuit in self._waiting

    def put(self, circuit: int, frame: bytearray) -> None:
        """Let `frame` wait for the turn of `circuit`."""
        frames = self._waiting.get(circuit)
        if frames is None:
            frames = self._waiting[circuit] = deque()
            self._order.append(circuit)
            self._left[circuit] = self._quantum
        frames.append(frame)
        self.bytes += len(frame)

    def take(self) -> bytearray:
        """The frame whose turn it is. There must be one."""
        order, left = self._order, self._left
        while left[order[0]] <= 0:
            left[order[0]] += self._quantum
            order.rotate(-1)
        circuit = order[0]
        frames = self._waiting[circuit]
        frame = frames.popleft()
        left[circuit] -= len(frame)
        self.bytes -= len(frame)
        if not frames:
            del self._waiting[circuit], left[circuit]
            order.popleft()
        return frame

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        self._order.clear()
        self._left.clear()
        self.bytes = 0

"""The life of a dispatch whose replies are partial sums: a reply is taken whole or not at all.

In a `weighted` swarm one row of a reply is the sum over all the experts of a call, whatever leases they lie
under. It can therefore not be taken for some of the call's parts. The rule that counts no output twice and
leaves none out: a reply is taken if and only if every part of its call is still pending. An attempt of which
some part was taken from another call is *spent*: its reply can only teach and be compared. What only spent
attempts cover is placed again at once.

Pure, as `flight.py`, whose rules hold otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from .flight import RETRY_S, Flight, Instruction, _Attempt


class WholeFlight(Flight):
    """See the module docstring. After every accepted reply `stranded` must be asked for instructions."""

    def got_reply(self, call_id: int, now: float) -> tuple[int, ...]:
        """A good reply came: take all of its parts, or none. Returns the indices of those taken."""
        attempt = self._attempts.get(call_id)
        if attempt is not None and self._spent(attempt):
            self._end(call_id, now, answered=True)
            return ()
        return super().got_reply(call_id, now)

    def stranded(self, now: float) -> list[Instruction]:
        """Place again what no reply that may still be taken would bring."""
        spent = [attempt for attempt in self._attempts.values() if self._spent(attempt)]
        awaited = self._awaited()
        left = [
            index
            for index in range(len(self.parts))
            if self._pending(index) and index not in awaited and index not in self._retry_at
        ]
        for attempt in spent:  # its device has failed nothing: it may be asked for the rest
            for index in self._parts_of(attempt):
                self._tried[index].discard(attempt.call.device)
        self.redispatched += len(left)
        return self._place(left, now, hedge=False)

    def _awaited(self) -> set[int]:
        """Parts that an attempt will bring unless it fails."""
        return {
            index
            for attempt in self._attempts.values()
            if not self._spent(attempt)
            for index in self._parts_of(attempt)
        }

    def _spent(self, attempt: _Attempt) -> bool:
        return not all(self._pending(index) for index in self._parts_of(attempt))

    def _place_again(self, attempt: _Attempt, now: float) -> list[Instruction]:
        awaited = self._awaited()
        orphans = [i for i in self._parts_of(attempt) if self._pending(i) and i not in awaited]
        orphans = [index for index in orphans if index not in self._retry_at]
        self.redispatched += len(orphans)
        return self._place(orphans, now, hedge=False)

    def _wait_or_fail(self, indices: Iterable[int], now: float) -> None:
        awaited = self._awaited()
        for index in indices:
            if index in awaited:
                continue
            if self._roster.of(self.parts[index].window):
                self._retry_at[index] = now + RETRY_S
            else:
                self.failed[index] = self._no_bytes(index)

    def _hedge(self, attempt: _Attempt, now: float) -> list[Instruction]:
        return [] if self._spent(attempt) else super()._hedge(attempt, now)

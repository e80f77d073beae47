"""Drafting: guessing a request's next tokens from its own text, and whether guessing pays.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): where the last tokens of a text occurred before, what
followed them then is the draft. The model computes all drafted positions in one step; a drafted token stands
if and only if it is the token that the sampler picks there, so drafts change how fast a text comes and never
what it says.

A draft costs rows: computing, upload, and the bytes of further experts (five positions touch up to 40). It
saves whole steps, each of which pays a round trip a layer. So the controller learns two things as it goes:
what a step costs by the number of different experts that its rows touch, and how often each request's drafts
stand. Rows are added, the likeliest first, while a row's chance of standing is worth more than its cost. A
request whose drafts did not pay is tried again now and then, ever more rarely.

Knows tokens, rows and seconds. Knows no model, no sampler and no threads; pure bookkeeping.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

GRAMS: Final = (8, 4, 2)
"""Lengths of the ends of a text that are looked up in it, the longest first."""
MAX_DRAFT: Final = 16
"""Most tokens of one draft."""
MAX_INDEXED: Final = 8192
"""Most positions of a prompt that are looked up; of a longer one, the last."""
PROBE_EVERY: Final = 32
"""A request that drafts nothing tries again after so many steps; twice as many after each time in vain."""
MAX_PROBE_EVERY: Final = 1024
PROBE_ROWS: Final = 2
MARGIN: Final = 1.1
"""How much more a drafted row must be worth than it costs."""


class Lookup:
    """One text, and where each of its short sequences occurred last.

    `extend` costs as much as it has tokens, `propose` as much as it returns. Sequences are kept as hashes,
    some 400 bytes a position; two that collide make a wrong draft and no more.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in GRAMS)
        self.extend(tokens[-MAX_INDEXED:])

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        for token in tokens:
            # What ends here gets its entry now that something follows it.
            for size, after in zip(GRAMS, self._after, strict=True):
                if len(self._tokens) >= size:
                    after[hash(tuple(self._tokens[-size:]))] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, most: int = MAX_DRAFT) -> tuple[tuple[int, ...], int]:
        """Up to `most` tokens that may come next, and which of `GRAMS` matched (its place; -1: none did).

        Where the match overlaps the end of the text, the draft goes on with itself: a text that repeats
        itself is drafted as a whole.
        """
        for number, (size, after) in enumerate(zip(GRAMS, self._after, strict=True)):
            place = after.get(hash(tuple(self._tokens[-size:]))) if len(self._tokens) >= size else None
            if place is not None:
                draft = self._tokens[place : place + most]
                period = len(self._tokens) - place
                while len(draft) < most:
                    draft.append(draft[len(draft) - period])
                return tuple(draft), number
        return (), -1


@dataclass(slots=True)
class Acceptance:
    """How often drafted tokens stood lately."""

    stood: float = 0.0
    fell: float = 0.0

    @property
    def rate(self) -> float:
        """The chance that a drafted token stands where all before it stood; one half before any try."""
        return (self.stood + 1.0) / (self.stood + self.fell + 2.0)

    def observe(self, drafted: int, accepted: int) -> None:
        """One draft of `drafted` tokens, of which the first `accepted` stood."""
        self.stood = 0.9 * self.stood + accepted
        self.fell = 0.9 * self.fell + (accepted < drafted)


class Speculation:
    """One request's drafts: its text, the draft at hand and how earlier ones did.

    The prompt is read at the first `extend`: a request that waits costs nothing.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt: Sequence[int] = tuple(prompt[-MAX_INDEXED:])
        self._lookup: Lookup | None = None
        self._rates = tuple(Acceptance() for _ in (*GRAMS, None))
        self._match = -1
        self.draft: tuple[int, ...] = ()
        self.waits = 0
        self.patience = PROBE_EVERY

    @property
    def rate(self) -> float:
        """The chance that the next drafted token stands."""
        return self._rates[self._match].rate

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these; a new draft follows."""
        if self._lookup is None:
            self._lookup, self._prompt = Lookup(self._prompt), ()
        self._lookup.extend(tokens)
        self.draft, self._match = self._lookup.propose()

    def learn(self, drafted: int, accepted: int) -> None:
        """How the draft at hand did: call it before `extend`."""
        self._rates[self._match].observe(drafted, accepted)
        if accepted:
            self.patience = PROBE_EVERY
        elif drafted:
            self.patience = min(2 * self.patience, MAX_PROBE_EVERY)


@dataclass(slots=True)
class StepCost:
    """Seconds of a step by its rows: a line over the different experts that the rows touch a layer.

    `experts` a layer and `top_k` of them a row. Fitted by least squares in which older steps fade; until
    steps of several sizes were seen, experts are taken for a quarter of a step.
    """

    experts: int
    top_k: int
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def touched(self, rows: int) -> float:
        """Different experts that `rows` rows touch in one layer, were they drawn at random."""
        return self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** rows)

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        x = self.touched(rows)
        keep = 0.97
        self._weight = keep * self._weight + 1.0
        step = 1.0 / self._weight
        dx, dy = x - self._x, seconds - self._y
        self._x += step * dx
        self._y += step * dy
        self._xx = keep * self._xx + dx * (x - self._x)
        self._xy = keep * self._xy + dx * (seconds - self._y)

    def seconds(self, rows: int) -> float:
        """What a step of that many rows should take; 0 before any was seen."""
        if not self._weight:
            return 0.0
        guess = 0.25 * self._y / self._x
        belief = float(self.top_k**2)  # as much as one step that differed by one row
        slope = max(0.0, (self._xy + belief * guess) / (self._xx + belief))
        return max(0.1 * self._y, self._y + slope * (self.touched(rows) - self._x))


@dataclass(slots=True)
class Drafting:
    """Decides how many drafted rows each request of a step carries, by what steps cost and drafts gained."""

    cost: StepCost
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)

    def begin(self, prompt: Sequence[int]) -> Speculation:
        """The drafts of a new request."""
        return Speculation(prompt)

    def choose(
        self, offers: Mapping[int, tuple[Speculation, int]], requests: int, rows: int
    ) -> dict[int, int]:
        """Drafted rows for each request that has `offers`: its speculation, and how many rows it may have.

        The step has `rows` rows so far and gives one token to each of `requests`.
        """
        chosen: dict[int, int] = {}
        tokens = float(max(1, requests))
        # The best next row of every request; rows of one request come in order, each less likely to stand.
        heap = [(-speculation.rate, request) for request, (speculation, most) in offers.items() if most > 0]
        heapq.heapify(heap)
        now = self.cost.seconds(rows)
        while heap:
            chance, request = -heap[0][0], heap[0][1]
            more = self.cost.seconds(rows + 1)
            if chance * now <= MARGIN * tokens * (more - now):
                break
            chosen[request] = chosen.get(request, 0) + 1
            tokens, rows, now = tokens + chance, rows + 1, more
            speculation, most = offers[request]
            if chosen[request] < most:
                heapq.heapreplace(heap, (-chance * speculation.rate, request))
            else:
                heapq.heappop(heap)
        self._probe(offers, chosen)
        return chosen

    def learn(self, speculation: Speculation, drafted: int, accepted: int) -> None:
        """How a request's draft did."""
        if drafted:
            self.drafted += drafted
            self.accepted += accepted
            speculation.learn(drafted, accepted)

    @staticmethod
    def _probe(offers: Mapping[int, tuple[Speculation, int]], chosen: dict[int, int]) -> None:
        """A request that was left out often enough is tried again, so that the figures stay true."""
        for request, (speculation, most) in offers.items():
            speculation.waits = 0 if request in chosen else speculation.waits + 1
            if speculation.waits >= speculation.patience and most > 0:
                chosen[request] = min(PROBE_ROWS, most)
                speculation.waits = 0

"""What the next step computes: requests, KV blocks, chunks. Pure bookkeeping, never imports torch.

A request's positions are computed in segments whose bounds depend on the request alone: its prompt in
chunks that start at multiples of `chunk_rows`, its own tokens one by one. So neither other requests nor a
preemption change the shapes in which it is computed, and with them its last bits.

The KV cache is counted in blocks of `block_tokens` positions. Where it runs out, the youngest request
gives its blocks back and is computed again later (preemption by recompute): its prompt in the same chunks,
its own tokens in segments marked `rowwise`, whose attention runs row by row as it did the first time.

Steps may overlap: requests of a step are in flight until `advance` or `finish` says that it has been
computed, and until then no other step takes them or their blocks. A segment of one new token may carry
drafted ones behind it (`rowwise` as well); what of them was wrong is computed anew.

Knows counts. Knows no tokens, no model and no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relay.errors import ConfigError, Refused


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The bounds of a scheduler."""

    total_blocks: int
    """KV blocks that exist."""
    block_tokens: int = 32
    """Positions a block holds."""
    state_blocks: int = 0
    """Blocks that a running request takes beside those of its positions: a state of constant size."""
    chunk_rows: int = 128
    """Rows of a full prefill chunk; chunks start at multiples of it."""
    rowwise_rows: int = 128
    """Rows of a segment that computes a request's own tokens again."""
    step_rows: int = 512
    """Rows of a step over which no further prefill segment is added."""
    max_running: int = 64
    """Requests with KV blocks at one time."""
    max_waiting: int = 256
    """Requests waiting for blocks; one more is refused."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "chunk_rows", "rowwise_rows", "step_rows", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.state_blocks < 0:
            raise ConfigError("state_blocks must not be negative")
        if self.total_blocks < 1 + self.state_blocks:
            raise ConfigError("the KV cache holds not even one block of one request: give more --kv-bytes")


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive positions of one request that a step computes.

    Positions `start` up to `start + rows`; `step` is the request's own step number; `capacity` positions
    have room in its KV blocks. `rowwise`: attention row by row. `replayed`: how many of its first rows were
    computed before and reuse their recorded routing. `samples`: the last row's logits choose a new token.
    `drafts`: how many of its last rows are drafted tokens; then each of them and the row before samples.
    """

    request: int
    step: int
    start: int
    rows: int
    capacity: int
    rowwise: bool
    replayed: int
    samples: bool
    drafts: int = 0

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.rows

    @property
    def decodes(self) -> bool:
        """Whether it computes one new token of the request's own, and drafts of more."""
        return self.rowwise and self.samples and not self.replayed and self.rows == 1 + self.drafts


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its segments, and the requests whose KV memory must be released before it."""

    segments: tuple[Segment, ...]
    preempted: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of all segments."""
        return sum(segment.rows for segment in self.segments)


DraftRule = Callable[[Sequence[int], int], Mapping[int, int]]
"""Of these requests, which compute one new token each, and a step of so many rows: how many drafted rows
each should carry (none where it is not named)."""


@dataclass(slots=True, eq=False)
class _Request:
    id: int
    prompt: int
    length: int
    computed: int = 0
    recorded: int = 0
    blocks: int = 0
    steps: int = 0
    preemptions: int = 0
    paused: bool = False
    running: bool = False
    in_flight: bool = False


@dataclass(slots=True)
class Scheduler:
    """Decides every step. `add`, `schedule`, `advance`, `append`, `finish`, from one thread at a time."""

    config: SchedulerConfig
    free_blocks: int = field(init=False)
    _requests: dict[int, _Request] = field(init=False, default_factory=dict)
    _waiting: deque[_Request] = field(init=False, default_factory=deque)
    _running: list[_Request] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.free_blocks = self.config.total_blocks

    @property
    def waiting(self) -> int:
        """Requests without KV blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with KV blocks."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Running requests that are not paused, those in flight among them."""
        return sum(not state.paused for state in self._running)

    @property
    def idle(self) -> int:
        """Running requests that are neither paused nor in flight."""
        return sum(not (state.paused or state.in_flight) for state in self._running)

    def in_flight(self, request: int) -> bool:
        """Whether a step computes that request now."""
        state = self._requests.get(request)
        return state is not None and state.in_flight

    def capacity(self) -> int:
        """The longest request, prompt and completion together, that fits the KV cache by itself."""
        return (self.config.total_blocks - self.config.state_blocks) * self.config.block_tokens

    def check(self, prompt: int, max_tokens: int) -> None:
        """Raise `ConfigError` for a request that can never fit, `Refused` when too many wait already."""
        if prompt < 1 or max_tokens < 1:
            raise ConfigError("a request needs at least one prompt token and room for one more")
        if prompt + max_tokens > self.capacity():
            raise ConfigError(
                f"{prompt} prompt tokens and up to {max_tokens} new ones do not fit the KV cache, which "
                f"holds {self.capacity()} positions: ask for fewer, or start with more --kv-bytes"
            )
        if len(self._waiting) >= self.config.max_waiting:
            raise Refused(
                "overloaded",
                f"{len(self._waiting)} requests are waiting already; try again",
                retry_after_s=1.0,
            )

    def add(self, request: int, prompt: int) -> None:
        """Take in a request with `prompt` tokens, which `check` has passed."""
        assert request not in self._requests
        state = _Request(request, prompt, prompt)
        self._requests[request] = state
        self._waiting.append(state)

    def finish(self, request: int) -> None:
        """Forget a request, wherever it is, and free its blocks. Unknown ones are ignored.

        One in flight may be finished only by who computes it: its memory is in use until then.
        """
        state = self._requests.pop(request, None)
        if state is None:
            return
        self._free(state)
        (self._running if state.running else self._waiting).remove(state)

    def pause(self, request: int, paused: bool) -> None:
        """Leave a request out of coming steps (its client does not read), or take it in again."""
        if request in self._requests:
            self._requests[request].paused = paused

    def advance(self, segments: Iterable[Segment], rejected: Mapping[int, int] | None = None) -> None:
        """These segments have been computed and are in flight no more.

        `rejected`: request -> how many of its drafted rows were wrong, and do not count as computed.
        """
        for segment in segments:
            state = self._requests.get(segment.request)
            if state is not None:
                state.in_flight = False
                state.computed = segment.end - (rejected or {}).get(segment.request, 0)
                state.recorded = max(state.recorded, state.computed)

    def append(self, request: int, tokens: int = 1) -> None:
        """The request has so many more tokens."""
        self._requests[request].length += tokens

    def preemptions(self, request: int) -> int:
        """How often a request lost its blocks."""
        return self._requests[request].preemptions

    def schedule(self, share: int | None = None, drafts: DraftRule | None = None) -> Step:
        """The next step; empty when nothing can run. Admits, preempts and allocates blocks.

        At most `share` of the running requests are taken (None: all that are not in flight); requests that
        waited come on top, as long as the step has room. `drafts` says who carries drafted rows.
        """
        segments: list[Segment] = []
        preempted: list[int] = []
        idle = [state for state in self._running if not (state.in_flight or state.paused)]
        # First everyone's next own token, oldest first; then prompts while there is room in the step.
        for state in [state for state in idle if state.computed >= state.prompt]:
            if share is None or len(segments) < share:
                self._place(state, segments, preempted)
        rows = sum(segment.rows for segment in segments)
        for state in [state for state in idle if state.computed < state.prompt]:
            if rows < self.config.step_rows and (share is None or len(segments) < share):
                self._place(state, segments, preempted)
                rows = sum(segment.rows for segment in segments)
        admitting = not preempted
        while admitting and sum(segment.rows for segment in segments) < self.config.step_rows:
            admitted = self._admit()
            if admitted is not None:
                self._place(admitted, segments, preempted)
            elif segments or not self._yield_idle(preempted):
                break
        if drafts is not None:
            self._draft(segments, drafts)
        for segment in segments:
            self._requests[segment.request].in_flight = True
        return Step(tuple(segments), tuple(preempted))

    def _place(self, state: _Request, segments: list[Segment], preempted: list[int]) -> None:
        """Add the request's next segment to the step, preempting younger ones for its blocks if need be.

        Where the one that would have to give its blocks is in flight, the request waits for a later step.
        """
        if state.paused or not state.running or state.computed >= state.length:
            return
        end, rowwise = self._next_end(state)
        while (need := self._blocks(end) - state.blocks) > self.free_blocks:
            victim = self._victim()
            if victim.in_flight:
                return
            preempted.append(victim.id)
            segments[:] = [segment for segment in segments if segment.request != victim.id]
            self._preempt(victim)
            if victim is state:
                return
        state.blocks += max(need, 0)
        self.free_blocks -= max(need, 0)
        segments.append(
            Segment(
                request=state.id,
                step=state.steps,
                start=state.computed,
                rows=end - state.computed,
                capacity=self._capacity(state),
                rowwise=rowwise,
                replayed=max(0, min(state.recorded, end) - state.computed),
                samples=end == state.length,
            )
        )
        state.steps += 1

    def _draft(self, segments: list[Segment], drafts: DraftRule) -> None:
        """Put drafted rows behind single new tokens, in blocks that nobody else will want soon."""
        single = {segment.request: place for place, segment in enumerate(segments) if segment.decodes}
        if not single:
            return
        rows = sum(segment.rows for segment in segments)
        for request, wished in drafts(tuple(single), rows).items():
            state, place = self._requests[request], single[request]
            segment = segments[place]
            end = segment.end + min(wished, max(0, self.config.step_rows - rows))
            spare = max(0, self.free_blocks - len(self._running))
            more = min(max(0, self._blocks(end) - state.blocks), spare)
            state.blocks += more
            self.free_blocks -= more
            capacity = self._capacity(state)
            extra = min(end, capacity) - segment.end
            rows += extra
            segments[place] = replace(segment, rows=1 + extra, drafts=extra, capacity=capacity)

    def _capacity(self, state: _Request) -> int:
        """Positions that the request's blocks have room for."""
        return (state.blocks - self.config.state_blocks) * self.config.block_tokens

    def _next_end(self, state: _Request) -> tuple[int, bool]:
        """Where the next segment ends, and whether it is rowwise."""
        if state.computed < state.prompt:
            chunk = self.config.chunk_rows
            return min((state.computed // chunk + 1) * chunk, state.prompt), False
        return min(state.computed + self.config.rowwise_rows, state.length), True

    def _admit(self) -> _Request | None:
        """The first request that waits, if it fits beside one more block for everyone running."""
        state = next((state for state in self._waiting if not state.paused), None)
        if state is None or len(self._running) >= self.config.max_running:
            return None
        if self._running and self._blocks(state.length + 1) + len(self._running) > self.free_blocks:
            return None
        self._waiting.remove(state)
        self._running.append(state)
        state.running = True
        return state

    def _yield_idle(self, preempted: list[int]) -> bool:
        """Where nothing else can run: take the blocks of a request that nobody reads, if another waits."""
        idle = [state for state in self._running if state.paused and not state.in_flight]
        if not idle or all(state.paused for state in self._waiting):
            return False
        preempted.append(idle[-1].id)
        self._preempt(idle[-1])
        return True

    def _victim(self) -> _Request:
        """Who gives its blocks back: the youngest that its client does not read, else the youngest."""
        holders = [state for state in self._running if state.blocks]
        unread = (state for state in reversed(holders) if state.paused and not state.in_flight)
        return next(unread, holders[-1])

    def _preempt(self, state: _Request) -> None:
        self._free(state)
        state.computed = 0
        state.preemptions += 1
        self._running.remove(state)
        state.running = False
        self._waiting.appendleft(state)

    def _free(self, state: _Request) -> None:
        self.free_blocks += state.blocks
        state.blocks = 0

    def _blocks(self, positions: int) -> int:
        """Blocks of a request with that many positions."""
        return self.config.state_blocks - (-positions // self.config.block_tokens)

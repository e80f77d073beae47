"""Forward passes side by side, one a request, whose dispatches go out together, layer by layer.

Where requests cannot share one pass (latent attention, sinks, sliding windows, linear attention) each has a
pass and a thread of its own. Without more, every pass would pay a round trip a layer. So the passes of a step
meet at each layer: the rows of all that have come there go out in one dispatch, one message a worker, and
each pass goes on with its own share of the outputs.

Who is waited for. All passes visit the same layers in ascending order. A layer's rows go out as soon as no
running pass can still bring more, which is when each has asked for that layer or a later one; a pass that
ends, however it ends, is waited for no longer. A straggler is waited for at most `patience_s`; it then goes
after the others, which wait for it again at the next layer, and so join up. Whoever completes a layer's rows
serves all of them in its own thread, so nothing is handed over but the outputs.

Knows threads and the seam. Knows no model and no owners.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from relay.errors import ConfigError

from .seam import Dispatcher, DispatchFailed, RowKey, combine_of

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MAX_PASSES: Final = 64
"""Passes that run at one time, each in a thread; a step of more requests runs them in waves."""
PATIENCE_S: Final = 0.25
"""How long a layer's rows wait for a pass that is behind. A step ends with its slowest pass, so waiting costs
a step little, and this bounds it where a pass is stuck."""
GRACE_S: Final = 5.0
"""How long after its deadline a pass gives up on the thread that serves its rows."""


@dataclass(slots=True, eq=False)
class _Ask:
    """One pass's rows at one layer. `due` is set once there is an outcome, or a group to serve."""

    layer: int
    rows: Tensor
    ids: Tensor
    weights: Tensor | None
    keys: Sequence[RowKey]
    deadline: float
    taken: bool = False
    group: list[_Ask] | None = None
    outcome: Tensor | Exception | None = None
    due: threading.Event = field(default_factory=threading.Event)

    def settle(self, outcome: Tensor | Exception) -> None:
        """This is what became of it."""
        self.outcome = outcome
        self.due.set()


class Gathering:
    """The dispatches of some passes that run at the same time. `join` makes each pass's own dispatcher.

    All passes must be joined before the first one dispatches, each used by one thread. `clock` gives
    monotonic seconds.
    """

    def __init__(
        self,
        inner: Dispatcher,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self.combine = combine_of(inner)
        """What combines below the seam, where the dispatcher does."""
        self._patience_s = patience_s
        self.clock = clock
        self._lock = threading.Lock()
        self._passes: set[Pass] = set()
        self._waiting: dict[int, list[_Ask]] = {}

    def join(self) -> Pass:
        """One more pass, which must be left at its end: use it as a context manager."""
        member = Pass(self)
        with self._lock:
            self._passes.add(member)
        return member

    def leave(self, member: Pass) -> None:
        """The pass has ended; nobody waits for it any more."""
        with self._lock:
            self._passes.discard(member)
            groups = self._complete()
        self._appoint(groups)

    def ask(self, member: Pass, ask: _Ask) -> Tensor:
        """Have `ask` served, together with whatever comes in time. Raises as `Dispatcher.dispatch` does."""
        with self._lock:
            member.layer = ask.layer
            self._waiting.setdefault(ask.layer, []).append(ask)
            groups = self._complete()
        mine = next((group for group in groups if ask in group), None)
        self._appoint([group for group in groups if group is not mine])
        if mine is None and not ask.due.wait(min(self._patience_s, ask.deadline - self.clock())):
            with self._lock:
                mine = None if ask.taken else self._take(ask.layer)
        if mine is None and not ask.due.wait(max(0.0, ask.deadline + GRACE_S - self.clock())):
            raise _timed_out(ask)
        mine = mine or ask.group
        if mine is not None:
            self._serve(mine)
        if isinstance(ask.outcome, Exception):
            raise ask.outcome
        assert ask.outcome is not None
        return ask.outcome

    def _complete(self) -> list[list[_Ask]]:
        """Take the rows of every layer that no pass can still bring more to; the lock is held."""
        behind = min((member.layer for member in self._passes), default=None)
        return [self._take(layer) for layer in sorted(self._waiting) if behind is None or layer <= behind]

    def _take(self, layer: int) -> list[_Ask]:
        group = self._waiting.pop(layer)
        for ask in group:
            ask.taken = True
        return group

    @staticmethod
    def _appoint(groups: Sequence[list[_Ask]]) -> None:
        """Have each group served by the first of its own threads."""
        for group in groups:
            group[0].group = group
            group[0].due.set()

    def _serve(self, group: list[_Ask]) -> None:
        """Dispatch for all of them and settle each."""
        try:
            while group:
                group = self._dispatch(group)
        except Exception as fault:  # a fault of the dispatcher itself: all of them hear of it
            for ask in group:
                ask.settle(fault)

    def _dispatch(self, group: list[_Ask]) -> list[_Ask]:
        """One dispatch; those that must be dispatched again because others' rows spoilt it."""
        import torch

        left = min(ask.deadline for ask in group) - self.clock()
        if left <= 0:
            for ask in group:
                ask.settle(_timed_out(ask))
            return []
        sizes = [len(ask.keys) for ask in group]
        layer = group[0].layer
        rows = torch.cat([ask.rows for ask in group])
        ids = torch.cat([ask.ids for ask in group])
        weights = [ask.weights for ask in group if ask.weights is not None]
        keys = [key for ask in group for key in ask.keys]
        try:
            if weights:
                assert self.combine is not None
                outputs = self.combine(layer, rows, ids, torch.cat(weights), keys, left)
            else:
                outputs = self._inner.dispatch(layer, rows, ids, keys, left)
        except DispatchFailed as failure:
            return _settle_failed(group, failure)
        for ask, share in zip(group, torch.split(outputs, sizes), strict=True):
            ask.settle(share)
        return []


class Pass:
    """One pass of a gathering, and its `Dispatcher`. Leaves the gathering when the context ends."""

    def __init__(self, gathering: Gathering) -> None:
        self.layer = -1
        """The last layer that it asked for."""
        self._gathering = gathering
        if gathering.combine is not None:
            self.combine = self._combine

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *_: object) -> None:
        self._gathering.leave(self)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`. Layers must come in ascending order; one may be asked for again."""
        return self._ask(layer, rows, ids, None, keys, deadline_s)

    def _combine(
        self,
        layer: int,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:
        """See `Combiner.combine`."""
        return self._ask(layer, rows, ids, weights, keys, deadline_s)

    def _ask(
        self,
        layer: int,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:
        assert layer >= self.layer, "a pass went back to an earlier layer"
        deadline = self._gathering.clock() + deadline_s
        return self._gathering.ask(self, _Ask(layer, rows, ids, weights, keys, deadline))


class SideBySide:
    """Runs passes in threads of its own, at most `most` at a time. The threads are kept between steps."""

    def __init__(self, most: int = MAX_PASSES) -> None:
        if most < 1:
            raise ConfigError("at least one pass must be able to run")
        self._most = most

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._most, thread_name_prefix="kvasir-pass")

    def run(self, dispatcher: Dispatcher, passes: Sequence[Callable[[Dispatcher], T]]) -> list[T | Exception]:
        """What each pass returned or raised, in order. Passes get a dispatcher to give their rows to."""
        results: list[T | Exception] = []
        for wave in _waves(passes, self._most):
            if len(wave) == 1:
                results.append(_attempt(wave[0], dispatcher))
                continue
            gathering = Gathering(dispatcher)
            members = [gathering.join() for _ in wave]
            started = [self._start(one, member) for one, member in zip(wave, members, strict=True)]
            results += [future if isinstance(future, Exception) else future.result() for future in started]
        return results

    def _start(self, one: Callable[[Dispatcher], T], member: Pass) -> Future[T | Exception] | Exception:
        """Run the pass in a thread; where the system has no more threads, that is the end of it."""
        try:
            return self._threads.submit(_run_member, one, member)
        except RuntimeError as fault:
            with member:
                return fault


def _waves(passes: Sequence[T], most: int) -> list[Sequence[T]]:
    """Cut into waves of at most `most`, of about the same size."""
    count = -(-len(passes) // most)
    bounds = [len(passes) * number // count for number in range(count + 1)] if count else [0]
    return [passes[start:end] for start, end in itertools.pairwise(bounds)]


def _run_member(one: Callable[[Dispatcher], T], member: Pass) -> T | Exception:
    with member:
        return _attempt(one, member)


def _attempt(one: Callable[[Dispatcher], T], dispatcher: Dispatcher) -> T | Exception:
    """The boundary of one pass: what it raises concerns its own request."""
    try:
        return one(dispatcher)
    except Exception as fault:
        return fault


def _settle_failed(group: Sequence[_Ask], failure: DispatchFailed) -> list[_Ask]:
    """Give those whose rows failed their failure, and the others their outputs where there are any.

    Returns the others where there are none.
    """
    again: list[_Ask] = []
    start = 0
    for ask in group:
        end = start + len(ask.keys)
        bad = [row - start for row in failure.rows if start <= row < end]
        share = None if failure.outputs is None else failure.outputs[start:end]
        if bad:
            ask.settle(DispatchFailed(str(failure), rows=bad, window=failure.window, outputs=share))
        elif share is not None:
            ask.settle(share)
        else:
            again.append(ask)
        start = end
    return again


def _timed_out(ask: _Ask) -> DispatchFailed:
    message = f"layer {ask.layer} was not computed in time: other requests' rows took too long; try again"
    return DispatchFailed(message, rows=range(len(ask.keys)))

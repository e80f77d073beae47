"""The seam between an engine and the swarm: one narrow call.

Everything above it (attention, routing, combine, sampling) is the engine's; everything below it (owners,
calls, hedges, failover, fallback) is the swarm's, so a second engine can be attached without touching
either. The engine has already chosen the experts when it calls; nothing below the seam may choose one.

Knows the call and its failure. Knows no model, no market and no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relay.errors import Unreachable

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_DEADLINE_S = 30.0
"""How long one dispatch of one layer may take, fallback included, before its requests fail."""


@dataclass(frozen=True, slots=True)
class RowKey:
    """Whose row it is. With layer and expert it names one unit of credit, paid exactly once.

    `request` is the engine's number of the request and never comes again in one process, `step` the
    request's own step (a prefill chunk or one decoded token, counted from 0, never reused even where a
    position is recomputed), `position` the token's position in the request, `metered` whether its demand
    is paid for (False for proving traffic and for API keys bound to a node's own wallet).
    """

    request: int
    step: int
    position: int
    metered: bool


class Dispatcher(Protocol):
    """Runs routed experts somewhere: on the swarm, or here from the checkpoint."""

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """Run for each row the experts chosen for it.

        `layer` is the model's own layer number; `rows` [n, width] in the backbone's compute dtype, n >= 1,
        no padding rows; `ids` [n, k] int64, global expert ids, no repetition within a row; `keys` n of
        them; `deadline_s` seconds from now. Returns [n, k, width] in `rows.dtype`, read only (it may lie in
        a reply's bytes): `out[i, j]` is expert `ids[i, j]` applied to `rows[i]`, without the router's weight.
        Blocks; called from a step thread, never from the event loop. Raises `DispatchFailed`, naming exactly
        the rows that failed.
        """
        ...


class Combiner(Dispatcher, Protocol):
    """A dispatcher of a `weighted` swarm: the sum over a row's experts is made below the seam as well.

    A dispatcher offers `combine` or it does not; an engine asks `combine_of`, and combines by itself without.
    Ids are chosen above the seam in either form.
    """

    def combine(
        self,
        layer: int,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:
        """As `dispatch`, with the router's `weights` [n, k] of the chosen experts, of any float dtype.

        Returns [n, width] in `rows.dtype`: `out[i]` is the sum over j of expert `ids[i, j]` applied to
        `rows[i]`, times `weights[i, j]`. The `outputs` of a `DispatchFailed` are [n, width] too.
        """
        ...


Combine = Callable[[int, "Tensor", "Tensor", "Tensor", Sequence[RowKey], float], "Tensor"]


def combine_of(dispatcher: Dispatcher) -> Combine | None:
    """The dispatcher's `combine` (see `Combiner`), or None where outputs come back one by one."""
    found: Combine | None = getattr(dispatcher, "combine", None)
    return found


class DispatchFailed(Unreachable):
    """Some rows of one dispatch could not be computed in time; the requests of those rows fail, no others.

    `rows` are indices into the dispatched rows, never empty; `window` the name of a window without an
    owner or "" where several or none are to blame; the message says what the operator can do. `outputs`
    may hold the result, [n, k, width] or of `combine` [n, width], in which only the failed rows are
    undefined: with it the engine goes on for the other requests at once, without it it repeats the
    dispatch for them alone.
    """

    def __init__(
        self, message: str, *, rows: Iterable[int], window: str = "", outputs: Tensor | None = None
    ) -> None:
        super().__init__(message)
        self.rows = frozenset(rows)
        assert self.rows, "a dispatch fails for some row"
        self.window = window
        self.outputs = outputs

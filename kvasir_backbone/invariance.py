"""Whether a request's bits depend on its company on this machine: proven at start, not believed.

A matrix product may sum in another order for other numbers of rows; most libraries do for very few. So a
packed pass never has fewer than a least number of rows. Here the loaded model computes one request alone and
in companies of several sizes, prompt and own tokens, with experts whose answers show every change of routing,
and its logits must be equal bit for bit. Where they are not, more rows are tried.

Knows the packed model. Knows no requests of users, no swarm and no threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from .scheduler import Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from .model import BackboneModel, Work
    from .routing import RoutingLog
    from .seam import RowKey

LEAST_ROWS: Final = (4, 8, 16, 32)
"""Rows of the smallest pass that are tried, in this order."""
COMPANIES: Final = ((1, 0), (2, 0), (3, 0), (4, 0), (11, 0), (40, 0), (1, 128), (7, 61))
"""Who computes beside the tested request: so many other requests, and a prompt chunk of so many rows."""
TRIED: Final = ((0, 0), (3, 0), (1, 37))
"""The same for `try_passes`."""
PROMPT: Final = 5
"""Rows of the tested prompt."""

NO_ROUTING: Final[Mapping[int, RoutingLog]] = {}


class Answering:
    """A `Dispatcher` whose experts scale their rows, each by a factor of its own."""

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        return rows.unsqueeze(1) * (0.5 + (ids % 13).to(rows.dtype) / 16).unsqueeze(-1)


def prove(model: BackboneModel) -> str | None:
    """Make the model's passes as large as needed; None, or why no size is enough.

    To be called before anyone computes with the model. Models of one pass a request have no company.
    """
    if not model.packed:
        return None
    inner, model.dispatcher = model.dispatcher, Answering()
    before, fault = model.least_rows, ""
    try:
        for model.least_rows in (before, *(rows for rows in LEAST_ROWS if rows > before)):
            found = _difference(model)
            if found is None:
                return None
            fault = fault or found
    finally:
        model.dispatcher = inner
    model.least_rows = before
    return fault


@dataclass(slots=True)
class Tried:
    """What passes of several sizes gave: their logits, and every request's routing, company by company."""

    logits: list[NDArray[np.float32]] = field(default_factory=list)
    routing: list[dict[int, RoutingLog]] = field(default_factory=list)


def try_passes(model: BackboneModel, like: Tried | None = None) -> Tried:
    """Run passes of several sizes with experts that answer for themselves; with the routing of `like`.

    One of them asks for no logits, as a chunk within a prompt does.
    """
    inner, model.dispatcher = model.dispatcher, Answering()
    tried = Tried()
    try:
        for place, (others, chunk) in enumerate(TRIED):
            routing = {} if like is None else like.routing[place]
            tried.routing.append({})
            tried.logits += _logits(model, others, chunk, routing, tried.routing[-1])
        model.forward([_work(model, 1, 0, PROMPT, samples=False)])
    finally:
        model.forget(-1)
        model.dispatcher = inner
    return tried


def _difference(model: BackboneModel) -> str | None:
    """The first company that changes the tested request's logits, in words."""
    alone = _logits(model, 0, 0)
    for others, chunk in COMPANIES:
        for what, expected, made in zip(
            ("prompt", "token"), alone, _logits(model, others, chunk), strict=True
        ):
            if not np.array_equal(expected, made):
                gap = float(np.abs(expected - made).max())
                company = f"{others} other requests" + (f" and a prompt of {chunk} rows" if chunk else "")
                return f"the logits of a {what} move by {gap:.1e} beside {company}"
    return None


def _work(
    model: BackboneModel, number: int, start: int, rows: int, *, own: bool = False, replayed: bool = False,
    samples: bool = True,
) -> Work:  # fmt: skip
    from .model import Work

    tokens = [(7 * number + 3 * place) % model.vocabulary for place in range(start, start + rows)]
    segment = Segment(
        -number, 0, start, rows, start + rows, rowwise=own, replayed=rows if replayed else 0, samples=samples
    )
    return Work(segment, tokens, metered=False)


def _logits(
    model: BackboneModel, others: int, chunk: int, routing: Mapping[int, RoutingLog] = NO_ROUTING,
    decided: dict[int, RoutingLog] | None = None,
) -> list[NDArray[np.float32]]:  # fmt: skip
    """The tested request's logits after its prompt and after one token of its own.

    With `routing` of an earlier call, if given; this call's is put into `decided`.
    """

    def work(number: int, start: int, rows: int, own: bool) -> Work:
        return _work(model, number, start, rows, own=own, replayed=bool(routing))

    company = range(2, 2 + others)
    steps = [
        [work(1, 0, PROMPT, False), *(work(number, 0, 1, False) for number in company)],
        [*(work(number, 1, 1, True) for number in company), work(1, PROMPT, 1, True)],
    ]
    if chunk:
        steps[0].append(work(2 + others, 0, chunk, False))
        steps[1].insert(0, work(3 + others, 0, chunk, False))
    for request, log in routing.items():
        model.redo(request, log)
    try:
        return [model.forward(step).logits[-1].copy() for step in steps]
    finally:
        for number in range(1, 4 + others):
            made = model.forget(-number)
            if decided is not None and made is not None:
                decided[-number] = made

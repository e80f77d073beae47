"""Experts run by the C core where rows lie: read from the bytes of calls, written into the bytes of answers.

One call of the core runs all experts of a small call, or of several calls that wait for the same ones. No
row is copied between socket and core, and the bits are those of each expert run alone.

Knows rows' addresses, calls and windows. Knows no queue, no sessions and no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from relay.errors import Refused

from .calls import Call, Data
from .holdings import Holding
from .kernels import ROW_KINDS
from .tensors import bytes_to_floats, partial_sums, rows_to_bytes

SMALL_IDS: Final = 64
"""A call of so many ids or fewer runs in one piece; of larger ones, one expert at a time or so many ids."""


class Placed:
    """The rows of one call in memory, and the memory that takes its outputs.

    `row` and `output` give addresses; both buffers live as long as this does. Outputs are of the wire dtype,
    or fp32 where the call has weights. `kinds` is what the C core calls the two dtypes.
    """

    __slots__ = ("_call", "_data", "_outputs", "_width", "kinds", "output", "output_step", "row", "row_step")

    def __init__(self, call: Call, holding: Holding) -> None:
        plan, direct = holding.experts.plan, holding.experts.direct
        assert direct is not None
        wire = ROW_KINDS[torch.float32] if call.weights is not None else direct.kind
        self.kinds = (direct.kind, wire)
        self.row_step = plan.row_bytes
        self.output_step = 4 * plan.width if call.weights is not None else plan.row_bytes
        self._width = plan.width
        self._call = call
        self._data, self.row = _readable(call.rows)
        self._outputs = np.empty(call.id_count * self.output_step, dtype=np.uint8)
        self.output = _address(self._outputs)

    def answer(self, wire: torch.dtype) -> memoryview:
        """The reply's rows, once all outputs are in place; with weights one partial sum a row."""
        call = self._call
        if call.weights is None:
            return self._outputs.data
        rows = [row for group in call.groups for row, n in enumerate(group.counts) for _ in range(n)]
        with torch.inference_mode():
            outputs = torch.from_numpy(self._outputs).view(torch.float32).view(-1, self._width)
            sums = partial_sums(outputs, bytes_to_floats(call.weights, call.id_count), rows, call.row_count)
            return rows_to_bytes(sums.to(wire))


def _readable(rows: Data) -> tuple[object, int]:
    """The rows as memory that the core may read, and its address: copied only where it is not aligned."""
    data = np.frombuffer(rows, dtype=np.uint8)
    if _address(data) % 4:
        data = data.copy()
    return data, _address(data)


def _address(data: np.ndarray[Any, Any]) -> int:
    return int(data.__array_interface__["data"][0])


def runs_whole(call: Call, holdings: Sequence[Holding]) -> bool:
    """Whether the C core runs all of this call, and it is small."""
    for holding in holdings:
        if holding.experts.direct is None:
            return False
    return call.id_count <= SMALL_IDS


def run_whole(call: Call, holdings: Sequence[Holding]) -> memoryview:
    """The reply's rows of a call that `runs_whole`. Raises `Refused`: an expert not held or asked twice."""
    placed = Placed(call, holdings[0])
    if call.row_count == len(holdings) == 1:
        _run_row(call, holdings[0], placed)
        return placed.answer(holdings[0].experts.wire_dtype)
    wanted: dict[int, tuple[list[int], list[int]]] = {}
    output = placed.output
    for holding, group in zip(holdings, call.groups, strict=True):
        direct = holding.experts.direct
        assert direct is not None
        at = 0
        for row, count in enumerate(group.counts):
            source = placed.row + row * placed.row_step
            for expert in group.ids[at : at + count]:
                address = direct.addresses.get((call.layer, expert))
                if address is None:
                    raise not_held(holding, call.layer, expert)
                rows, outputs = wanted.setdefault(address, ([], []))
                if rows and rows[-1] == source:
                    raise asked_twice(row, expert)
                rows.append(source)
                outputs.append(output)
                output += placed.output_step
            at += count
    experts = holdings[0].experts
    assert experts.direct is not None
    experts.direct.kernel.run_rows(
        tuple(wanted),
        tuple(len(rows) for rows, _ in wanted.values()),
        [row for rows, _ in wanted.values() for row in rows],
        [place for _, outputs in wanted.values() for place in outputs],
        placed.kinds,
        max(h.experts.direct.scratch for h in holdings if h.experts.direct is not None),
    )
    return placed.answer(experts.wire_dtype)


def _run_row(call: Call, holding: Holding, placed: Placed) -> None:
    """One row and one lease, as most calls have: outputs in the order of the ids."""
    direct, ids = holding.experts.direct, call.groups[0].ids
    assert direct is not None
    addresses, layer, count = direct.addresses, call.layer, len(ids)
    try:
        experts = [addresses[layer, expert] for expert in ids]
    except KeyError as error:
        raise not_held(holding, *error.args[0]) from None
    if len(set(ids)) < count:
        raise asked_twice(0, next(expert for expert in ids if ids.count(expert) > 1))
    places = range(placed.output, placed.output + count * placed.output_step, placed.output_step)
    direct.kernel.run_rows(experts, [1] * count, [placed.row] * count, places, placed.kinds, direct.scratch)


def not_held(holding: Holding, layer: int, expert: int) -> Refused:
    """The refusal of an expert that is not in the window of its lease."""
    return Refused("not_mine", f"layer {layer}, expert {expert} is not in {holding.experts.window}")


def asked_twice(row: int, expert: int) -> Refused:
    """The refusal of a row that names one expert twice."""
    return Refused("bad_request", f"row {row} asks for expert {expert} twice")

"""Which experts ran for which rows: what a backbone decided against what its workers executed.

Rows are told apart by a 64-bit digest of their content, so nothing that either side says of itself is
believed: a row counts as executed by expert e where that row's bytes were fed to e at a worker, be it
through torch or by their address through the C core.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir_node.kernels import ROW_KINDS
from kvasir_node.tensors import WIRE_TORCH

_SPREAD = 0x1E3779B97F4A7C15
"""An odd multiplier that spreads an expert's number over 64 bits; products wrap around."""


@functools.cache
def _multipliers(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(-(2**62), 2**62, (width,), generator=generator) * 2 + 1


def digests(rows: Tensor) -> Tensor:
    """int64 [n]: a digest of each row's fp32 bits. `rows` [n, width] of any float dtype."""
    bits = rows.detach().float().contiguous().view(torch.int32).to(torch.int64)
    return (bits * _multipliers(rows.shape[-1])).sum(-1)


@dataclass(slots=True)
class ExecutionLog:
    """What workers executed, by layer: digests of rows, and the expert that each was fed to."""

    batches: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def note(self, layer: int, rows: Tensor, experts: Tensor) -> None:
        """Rows with these digests [n] were fed to these experts [n]. Called from any thread."""
        self.batches.setdefault(layer, []).append((rows, experts))

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """Digests [m] and experts [m] of everything noted for a layer, which is then forgotten."""
        batches = self.batches.pop(layer, [])
        if not batches:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return torch.cat([rows for rows, _ in batches]), torch.cat([experts for _, experts in batches])


class RecordedExperts:
    """A window's experts that note every row they are run on; everything else passes through.

    With `batch` they run at most so many rows at once, and not by address.
    """

    def __init__(self, experts: Any, log: ExecutionLog, batch: int | None = None) -> None:
        self._experts, self._log, self._batch = experts, log, batch
        self.direct: Any = None
        if experts.direct is not None and batch is None:
            kernel = RecordedKernel(experts, log)
            self.direct = dataclasses.replace(experts.direct, kernel=kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        """See `WindowExperts.run`."""
        self._log.note(layer, digests(rows), torch.full((len(rows),), expert))
        run = self._experts.run
        if self._batch is None or len(rows) <= self._batch:
            outputs: Tensor = run(layer, expert, rows)
            return outputs
        return torch.cat([run(layer, expert, part.contiguous()) for part in rows.split(self._batch)])

    def run_many(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """See `WindowExperts.run_many`."""
        return [self.run(layer, expert, part) for expert, part in zip(experts, rows, strict=True)]


class RecordedKernel:
    """The C core of a window's experts, whose rows are read by address and noted before it runs."""

    _known: dict[int, tuple[int, int]] = {}  # noqa: RUF012 - addresses are the process's
    """Address of an expert -> (layer, expert); a call may run several windows of one device."""

    def __init__(self, experts: Any, log: ExecutionLog) -> None:
        self._kernel = experts.direct.kernel
        self._log = log
        self._width = experts.plan.width
        self._known.update({address: key for key, address in experts.direct.addresses.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run_rows(
        self,
        experts: Sequence[int],
        sizes: Sequence[int],
        rows: Sequence[int],
        outputs: Sequence[int],
        kinds: tuple[int, int],
        scratch: int,
    ) -> None:
        """See `CpuKernel.run_rows`."""
        keys = [self._known[address] for address in experts]
        numbers = torch.tensor([expert for _, expert in keys]).repeat_interleave(torch.tensor(sizes))
        found, places = np.unique(np.array(rows, dtype=np.uint64), return_inverse=True)
        made = digests(self._read(found.tolist(), kinds[0]))[torch.from_numpy(places)]
        self._log.note(keys[0][0], made, numbers)
        self._kernel.run_rows(experts, sizes, rows, outputs, kinds, scratch)

    def _read(self, addresses: Sequence[int], kind: int) -> Tensor:
        dtype = next(dtype for dtype in WIRE_TORCH.values() if ROW_KINDS.get(dtype) == kind)
        size = self._width * dtype.itemsize
        data = bytearray(b"".join(ctypes.string_at(address, size) for address in addresses))
        return torch.frombuffer(data, dtype=dtype).view(len(addresses), self._width)


def mismatches(rows: Tensor, ids: Tensor, executed: tuple[Tensor, Tensor]) -> int:
    """How many `rows` [n, width] were run by other experts than their `ids` [n, k] say.

    `executed` is what `ExecutionLog.take` gave: once or several times each pair. A row that was executed
    and never decided counts as well.
    """
    wanted = digests(rows).unsqueeze(1) + ids * _SPREAD
    decided = wanted.flatten().unique()
    done, owners = executed
    pairs = done + owners * _SPREAD
    ran = pairs.unique()
    if torch.equal(decided, ran):
        return 0
    wrong = set(digests(rows)[~torch.isin(wanted, ran).all(1)].tolist())
    wrong |= set(done[~torch.isin(pairs, decided)].tolist())
    return len(wrong)

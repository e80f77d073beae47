"""Which experts ran for which rows: what a backbone decided against what its workers executed.

Rows are told apart by a 64-bit digest of their content, so nothing that either side says of itself is
believed: a row counts as executed by expert e where that row's bytes were fed to e at a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SPREAD = 0x1E3779B97F4A7C15
"""An odd multiplier that spreads an expert's number over 64 bits; products wrap around."""


def digests(rows: Tensor) -> Tensor:
    """int64 [n]: a digest of each row's fp32 bits. `rows` [n, width] of any float dtype."""
    bits = rows.detach().float().contiguous().view(torch.int32).to(torch.int64)
    generator = torch.Generator().manual_seed(rows.shape[-1])
    multipliers = torch.randint(-(2**62), 2**62, (rows.shape[-1],), generator=generator) * 2 + 1
    return (bits * multipliers).sum(-1)


@dataclass(slots=True)
class ExecutionLog:
    """What workers executed, by layer: digests of the rows and the expert of each batch."""

    batches: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)

    def note(self, layer: int, expert: int, rows: Tensor) -> None:
        """These rows were fed to that expert."""
        self.batches.setdefault(layer, []).append((expert, rows))

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """Digests [m] and experts [m] of everything noted for a layer, which is then forgotten."""
        batches = self.batches.pop(layer, [])
        if not batches:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        experts = torch.cat([torch.full((len(rows),), expert) for expert, rows in batches])
        return digests(torch.cat([rows.float() for _, rows in batches])), experts


class RecordedExperts:
    """A window's experts that note every row they are run on; everything else passes through."""

    def __init__(self, experts: Any, log: ExecutionLog, batch: int | None = None) -> None:
        self._experts, self._log, self._batch = experts, log, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        """See `WindowExperts.run`; in batches of at most `batch` rows."""
        self._log.note(layer, expert, rows)
        run = self._experts.run
        if self._batch is None or len(rows) <= self._batch:
            outputs: Tensor = run(layer, expert, rows)
            return outputs
        return torch.cat([run(layer, expert, part.contiguous()) for part in rows.split(self._batch)])

    def run_many(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """See `WindowExperts.run_many`."""
        return [self.run(layer, expert, part) for expert, part in zip(experts, rows, strict=True)]


def mismatches(rows: Tensor, ids: Tensor, executed: tuple[Tensor, Tensor]) -> int:
    """How many `rows` [n, width] were run by other experts than their `ids` [n, k] say.

    `executed` is what `ExecutionLog.take` gave: once or several times each pair. A row that was executed
    and never decided counts as well.
    """
    wanted = digests(rows)
    decided = (wanted.unsqueeze(1) + ids * _SPREAD).flatten().unique()
    done, owners = executed
    ran = (done + owners * _SPREAD).unique()
    if torch.equal(decided, ran):
        return 0
    missing = ~torch.isin(wanted.unsqueeze(1) + ids * _SPREAD, ran)
    wrong = set(wanted[missing.any(1)].tolist())
    wrong |= set(done[~torch.isin(done + owners * _SPREAD, decided)].tolist())
    return len(wrong)

"""Dispatchers for tests: they watch what crosses the seam, or break it on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvasir_backbone.seam import Dispatcher, DispatchFailed, RowKey


@dataclass
class Recording:
    """Passes everything on and keeps (layer, keys, ids) of every call."""

    inner: Dispatcher
    calls: list[tuple[int, tuple[RowKey, ...], Tensor]] = field(default_factory=list)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        assert rows.shape[0] == ids.shape[0] == len(keys) >= 1
        self.calls.append((layer, tuple(keys), ids.clone()))
        return self.inner.dispatch(layer, rows, ids, keys, deadline_s)


@dataclass
class Failing:
    """Fails the rows that `fails(layer, key)` names, with or without outputs for the others."""

    inner: Dispatcher
    fails: Callable[[int, RowKey], bool]
    with_outputs: bool = False
    failures: int = 0

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        bad = [row for row, key in enumerate(keys) if self.fails(layer, key)]
        if not bad:
            return self.inner.dispatch(layer, rows, ids, keys, deadline_s)
        self.failures += 1
        outputs = None
        if self.with_outputs:
            outputs = self.inner.dispatch(layer, rows, ids, keys, deadline_s)
            outputs[bad] = float("nan")
        window = "L01-01/E000-003"
        raise DispatchFailed(f"no owner of {window}", rows=bad, window=window, outputs=outputs)


@dataclass
class Held:
    """Blocks every call until `gate` is set; `entered` says that one is waiting."""

    inner: Dispatcher
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        self.entered.set()
        assert self.gate.wait(30), "the test never opened the gate"
        return self.inner.dispatch(layer, rows, ids, keys, deadline_s)

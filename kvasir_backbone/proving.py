"""A proving call: real expert calls through the real path, whose outputs are compared with our own.

A replica counts only after this. The same call closes a breaker again: health is never a ping.

Knows links, plans and references. Carries out nothing: what a proof means is its caller's business.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from torch import Tensor

from kvasir_node.calls import Call, Group, encode
from kvasir_node.tensors import WIRE_TORCH, bytes_to_rows, rows_to_bytes
from market.plans import Plan
from relay.errors import CODES, Refused, RemoteProtocolError, Unreachable

from .audit import NormBand, Proof, judge_proof, make_proofs
from .auditing import References
from .directory import Holding
from .dispatch import CallEnd
from .links import DeviceLink
from .pace import Pace

PROVING_TIMEOUT_S: Final = 20.0
"""A proving call without a reply after this long has failed."""


class Prover:
    """Proves replicas of one plan. `threads` runs torch off the loop; `next_call` gives call ids."""

    def __init__(
        self,
        plan: Plan,
        references: References,
        band: NormBand,
        *,
        threads: Executor,
        next_call: Callable[[], int],
        rng: random.Random | None = None,
    ) -> None:
        self._plan = plan
        self._references = references
        self._band = band
        self._threads = threads
        self._next_call = next_call
        self._rng = rng or random.SystemRandom()

    async def prove(self, link: DeviceLink, holding: Holding, pace: Pace) -> float:
        """Call random experts of every layer of the window; the largest d of their outputs.

        Teaches `pace`. Raises `Unreachable` without a reply, `Refused` with the device's own no.
        """
        loop = asyncio.get_running_loop()
        window = holding.assignment.window
        dtype = WIRE_TORCH[self._plan.wire_dtype]
        proofs = await loop.run_in_executor(self._threads, make_proofs, self._plan, window, dtype, self._rng)
        worst = 0.0
        for proof in proofs:
            end, elapsed_s = await self._call(link, holding.ref, proof)
            outputs = await loop.run_in_executor(self._threads, self._read, proof, end)
            if outputs is None:
                return float("inf")
            pace.observe(len(proof.rows) * len(proof.ids), elapsed_s)
            d = await loop.run_in_executor(
                self._threads, self._judge, proof, outputs, holding.assignment.precision
            )
            worst = max(worst, d)
        return worst

    async def _call(self, link: DeviceLink, ref: int, proof: Proof) -> tuple[CallEnd, float]:
        count = len(proof.rows)
        group = Group(ref, (len(proof.ids),) * count, proof.ids * count)
        call = Call(
            self._next_call(),
            proof.layer,
            count,
            int(1000 * PROVING_TIMEOUT_S),
            (group,),
            rows_to_bytes(proof.rows),
        )
        started = time.monotonic()
        end = await link.call(call.id, encode(call), timeout=PROVING_TIMEOUT_S)
        if end.reply is None:
            if end.code == "unreachable" or end.code not in CODES:
                raise Unreachable(end.message)
            raise Refused(end.code, end.message)
        return end, end.at - started

    def _read(self, proof: Proof, end: CallEnd) -> Tensor | None:
        """The reply's outputs, or None where their number or size is wrong."""
        assert end.reply is not None
        count = len(proof.rows) * len(proof.ids)
        try:
            return bytes_to_rows(end.reply.rows, count, proof.rows.shape[1], self._plan.wire_dtype)
        except RemoteProtocolError:
            return None

    def _judge(self, proof: Proof, outputs: Tensor, precision: str) -> float:
        return judge_proof(proof, outputs, precision, self._references.run, self._band)

"""What audits found, told to the market: violations with their evidence, and quarantines, in that order.

The market keeps them on record, for the owner and the operator, and carries a quarantine out for all
backbones. While it is away they wait here, within a bound: quarantines are never dropped, the oldest
violations are.

Knows samples, evidence and the market. Knows no links and no claims.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import structlog
from torch import Tensor

from kvasir_node.tensors import rows_to_bytes
from market.client import MarketClient
from market.evidence import Evidence, digest, sign_evidence, told
from market.messages import QuarantineAnswer
from market.plans import PlanId
from market.wire import BackboneId, Hash, LeaseId
from relay.errors import KvasirError, Refused
from relay.identity import Certificate, PublicKey, SigningKey, address_of

from .audit import Reference, Sample, expected_output, limit_of
from .roster import Replica

_log = structlog.get_logger("backbone")

MAX_WAITING: Final = 64
"""Violations that wait for the market; the oldest is dropped for a new one."""

AGAIN_S: Final = 0.5
LONGEST_S: Final = 16.0
"""Pauses while the market does not answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One audited output that was off by `d`; `at` in Unix seconds."""

    id: bytes
    replica: Replica
    sample: Sample
    d: float
    at: float

    @property
    def reason(self) -> str:
        """For people: what was found."""
        limit = limit_of(self.replica.numerics, self.replica.precision)
        what = "a partial sum" if self.sample.weights is not None else f"expert {self.sample.expert}"
        return f"{what} of layer {self.sample.layer} was off: d = {self.d:.3g}, limit {limit:g}"


@dataclass(frozen=True, slots=True)
class _Quarantine:
    """A verdict on its way to the market."""

    id: bytes
    wallet: PublicKey
    reason: str


def make_evidence(
    finding: Finding, expected: Tensor | None, *, plan: PlanId, wire_dtype: str, certificate: Certificate
) -> Evidence:
    """The evidence for a finding; `expected` [width] is what was computed here, where there are bytes."""
    replica, sample = finding.replica, finding.sample
    row, output = _bytes(sample.row), _bytes(sample.output)
    ours = b"" if expected is None else _bytes(expected)
    weights = b"" if sample.weights is None else _bytes(sample.weights.float())
    return Evidence(
        swarm=certificate.swarm,
        backbone=BackboneId(certificate.id),
        wallet=replica.wallet,
        device=replica.device,
        lease=LeaseId(replica.lease),
        epoch=replica.epoch,
        plan=plan,
        window=replica.window,
        precision=replica.precision,
        numerics=replica.numerics[:512],
        wire_dtype=wire_dtype,
        call=sample.call,
        layer=sample.layer,
        expert=sample.expert,
        d=told(finding.d),
        limit=limit_of(replica.numerics, replica.precision),
        at=finding.at,
        row_digest=Hash(digest(row)),
        output_digest=Hash(digest(output)),
        row=row,
        output=output,
        expected=ours,
        ids=sample.ids if sample.weights is not None else (),
        precisions=sample.precisions if sample.weights is not None else (),
        weights=weights,
    )


def _bytes(tensor: Tensor) -> bytes:
    return bytes(rows_to_bytes(tensor.detach().contiguous().unsqueeze(0)))


class Reporter:
    """See the module docstring. Everything but `run`'s work in `threads` is on the loop.

    `signer` gives the backbone's certificate and key, `reference` runs experts here (blocking), `told` hears
    what the market made of a quarantine.
    """

    def __init__(
        self,
        *,
        market: MarketClient,
        plan: PlanId,
        wire_dtype: str,
        signer: Callable[[], tuple[Certificate, SigningKey]],
        reference: Reference,
        threads: Executor,
        told: Callable[[PublicKey, QuarantineAnswer], None],
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._market = market
        self._plan = plan
        self._wire_dtype = wire_dtype
        self._signer = signer
        self._reference = reference
        self._threads = threads
        self._told = told
        self._rng = rng or random.SystemRandom()
        self._clock = clock
        self._waiting: OrderedDict[bytes, Finding | _Quarantine] = OrderedDict()
        self._some = asyncio.Event()
        self.dropped = 0
        """Violations that were never told, because too many waited."""

    @property
    def waiting(self) -> int:
        """Reports that the market has not taken yet."""
        return len(self._waiting)

    def violation(self, replica: Replica, sample: Sample, d: float) -> None:
        """An audited output was off."""
        finding = Finding(secrets.token_bytes(16), replica, sample, d, self._clock())
        findings = [key for key, item in self._waiting.items() if isinstance(item, Finding)]
        if len(findings) >= MAX_WAITING:
            del self._waiting[findings[0]]
            self.dropped += 1
        self._waiting[finding.id] = finding
        self._some.set()

    def quarantine(self, wallet: PublicKey, reason: str) -> None:
        """A wallet was found out; asked again for one that waits, nothing changes."""
        if any(isinstance(item, _Quarantine) and item.wallet == wallet for item in self._waiting.values()):
            return
        verdict = _Quarantine(secrets.token_bytes(16), wallet, reason)
        self._waiting[verdict.id] = verdict
        self._some.set()

    async def run(self) -> None:
        """Tell the market, until cancelled."""
        pause = AGAIN_S
        while True:
            await self._some.wait()
            if not self._waiting:
                self._some.clear()
                continue
            key, item = next(iter(self._waiting.items()))
            try:
                await self._tell(item)
                pause = AGAIN_S
            except Refused as error:
                _log.error("report.refused", code=error.code, reason=str(error), **_facts(item))
            except KvasirError as error:
                _log.warning("market.unreachable", reason=str(error), code=error.code)
                await asyncio.sleep(self._rng.uniform(0.5 * pause, pause))
                pause = min(LONGEST_S, 2 * pause)
                continue
            self._waiting.pop(key, None)

    async def _tell(self, item: Finding | _Quarantine) -> None:
        if isinstance(item, Finding):
            evidence = await asyncio.get_running_loop().run_in_executor(self._threads, self._evidence, item)
            document = sign_evidence(evidence, self._signer()[1])
            await self._market.report_violation(item.id, document, reason=item.reason)
            return
        answer = await self._market.quarantine(item.id, item.wallet, reason=item.reason)
        self._told(item.wallet, answer)

    def _evidence(self, finding: Finding) -> Evidence:
        """Blocking: computes the output anew."""
        sample = finding.sample
        try:
            expected = expected_output(sample, finding.replica.precision, self._reference)
        except KvasirError:  # other wallets' replicas said it, not the checkpoint
            expected = None
        certificate, _ = self._signer()
        return make_evidence(
            finding, expected, plan=self._plan, wire_dtype=self._wire_dtype, certificate=certificate
        )


def _facts(item: Finding | _Quarantine) -> dict[str, object]:
    wallet = item.replica.wallet if isinstance(item, Finding) else item.wallet
    kind = "violation" if isinstance(item, Finding) else "quarantine"
    return {"wallet": address_of(wallet), "kind": kind}

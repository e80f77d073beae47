"""Recomputes sampled outputs in the background, and keeps what that says of each wallet.

`References` runs any expert from the checkpoint at any precision; `SampledAuditor` is the dispatcher's
auditor: it draws, queues within a bound, recomputes in one thread and reports verdicts.

Knows threads, trust and the checkpoint's experts. Knows no market: a verdict is carried out by its owner.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import structlog
from torch import Tensor

from relay.errors import KvasirError
from relay.identity import PublicKey, address_of

from .audit import NormBand, Sample, Trust, judge_sample, limit_of
from .local_experts import LocalExperts
from .roster import Replica

_log = structlog.get_logger("backbone")

MAX_QUEUED: Final = 32
"""Samples waiting to be recomputed; further ones are dropped, and counted."""

Verdict = Callable[[Replica, str, float], None]
"""(replica, why its wallet goes to quarantine, d); called in the audit thread or a step thread."""


class References:
    """Runs experts here at any precision, each precision's experts cached on their own.

    `make` gives the local experts at a precision. Safe to use from several threads.
    """

    def __init__(self, make: Callable[[str], LocalExperts]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[str, LocalExperts] = {}
        self._numerics = ""

    def at(self, precision: str) -> LocalExperts:
        """The local experts at that precision, made at the first call."""
        with self._lock:
            found = self._made.get(precision)
            if found is None:
                found = self._made[precision] = self._make(precision)
            return found

    def run(self, layer: int, expert: int, rows: Tensor, precision: str = "stored") -> Tensor:
        """`rows` [n, width] -> outputs [n, width] in the rows' dtype. Raises `KvasirError` without bytes."""
        return self.at(precision).run(layer, expert, rows)

    @property
    def numerics(self) -> str:
        """The numerics class of the fallback, which runs experts as stored."""
        if not self._numerics:
            self._numerics = self.at("stored").numerics
        return self._numerics


@dataclass(frozen=True, slots=True)
class AuditStats:
    """Counters since the start. `cpu_s` is the audit thread's CPU time in seconds."""

    audited: int = 0
    violations: int = 0
    dropped: int = 0
    rejected: int = 0
    cpu_s: float = 0.0


class SampledAuditor:
    """See the module docstring. `offer` and `rejected` may be called from any thread."""

    def __init__(
        self,
        references: References,
        band: NormBand,
        *,
        on_verdict: Verdict,
        rng: random.Random | None = None,
    ) -> None:
        self._references = references
        self._band = band
        self._on_verdict = on_verdict
        self._rng = rng or random.SystemRandom()
        self._lock = threading.Lock()
        self._trust: dict[PublicKey, Trust] = {}
        self._queued = 0
        self._stats = AuditStats()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")

    @property
    def stats(self) -> AuditStats:
        """A copy of the counters."""
        with self._lock:
            return self._stats

    def trust(self) -> Mapping[PublicKey, Trust]:
        """What is known of each wallet (a snapshot of references; read only)."""
        with self._lock:
            return dict(self._trust)

    def begin_again(self, wallet: PublicKey) -> None:
        """After a quarantine the wallet's first calls are all audited again."""
        with self._lock:
            self._trust[wallet] = Trust()

    def forget(self, kept: Collection[PublicKey]) -> None:
        """Forget the wallets that are not `kept`, but none with a violation that may still count."""
        with self._lock:
            for wallet in self._trust.keys() - set(kept):
                if not self._trust[wallet].strikes:
                    del self._trust[wallet]

    def close(self) -> None:
        """End the thread; samples that wait are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def offer(self, replica: Replica, draw: Callable[[random.Random], tuple[Replica, Sample]]) -> None:
        """A valid call of the wallet of `replica`: audited or not, by chance."""
        with self._lock:
            wanted = self._trust.setdefault(replica.wallet, Trust()).wants_audit(self._rng)
            if not wanted:
                return
            if self._queued >= MAX_QUEUED:
                self._stats = replace(self._stats, dropped=self._stats.dropped + 1)
                return
            self._queued += 1
            replica, sample = draw(self._rng)
        self._thread.submit(self._judge, replica, sample)

    def rejected(self, replica: Replica, d: float) -> None:
        """A reply was rejected before it was used: one of its outputs was off by `d`."""
        with self._lock:
            self._stats = replace(self._stats, rejected=self._stats.rejected + 1)
            trust = self._trust.setdefault(replica.wallet, Trust())
            reason = trust.verdict(d, limit_of(replica.numerics, replica.precision))
        if reason is not None:
            self._on_verdict(replica, reason, d)

    def _judge(self, replica: Replica, sample: Sample) -> None:
        """In the audit thread: the boundary for one sample. A bug here must not end all audits silently."""
        try:
            self._recompute(replica, sample)
        except KvasirError as error:
            _log.warning("audit.skipped", layer=sample.layer, expert=sample.expert, reason=str(error))
        except Exception as fault:
            _log.exception("audit.crashed", layer=sample.layer, expert=sample.expert, reason=str(fault))
        finally:
            with self._lock:
                self._queued -= 1

    def _recompute(self, replica: Replica, sample: Sample) -> None:
        started = time.thread_time()
        limit = limit_of(replica.numerics, replica.precision)
        d = judge_sample(sample, replica.precision, self._references.run, self._band)
        with self._lock:
            reason = self._trust.setdefault(replica.wallet, Trust()).verdict(d, limit)
            self._stats = replace(
                self._stats,
                audited=self._stats.audited + 1,
                violations=self._stats.violations + (d > limit),
                cpu_s=self._stats.cpu_s + time.thread_time() - started,
            )
        log = _log.warning if d > limit else _log.debug
        log(
            "output.audited",
            outcome="violation" if d > limit else "passed",
            device=address_of(replica.device),
            wallet=address_of(replica.wallet),
            layer=sample.layer,
            expert=sample.expert,
            d=d,
            limit=limit,
        )
        if reason is not None:
            self._on_verdict(replica, reason, d)

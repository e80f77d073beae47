"""Recomputes sampled outputs in the background, and keeps what that says of each wallet.

`References` runs any expert from the checkpoint at any precision; `SampledAuditor` is the dispatcher's
auditor: it draws, as often as its budget allows, queues within a bound, recomputes in one thread and
reports verdicts. Lost races come here too: the loser's outputs are compared with the accepted ones, and
where they disagree both are recomputed. Where there are no bytes to recompute from, an arbiter asks other
wallets' replicas; a disagreement that nobody can settle yet waits for a while.

Knows threads, trust and the checkpoint's experts. Knows no market: a verdict is carried out by its owner.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import structlog
from torch import Tensor

from relay.errors import KvasirError, Refused
from relay.identity import PublicKey, address_of

from .arbitration import Arbiter, Ruling, Word
from .audit import NormBand, Sample, Trust, judge_sample, limit_of
from .budget import AuditBudget, Spending
from .comparing import Rival, disagreements
from .local_experts import LocalExperts
from .roster import Replica

_log = structlog.get_logger("backbone")

MAX_QUEUED: Final = 32
"""Samples waiting to be recomputed; further ones are dropped, and counted."""

CPU_EVERY: Final = 64
"""The process's CPU time is read at every so many calls: all threads of it are asked for theirs."""

LEAST_COMPARED: Final = 1 / 16
"""This share of lost races is compared whatever it costs."""

MAX_WAITING: Final = 64
WAITING_S: Final = 900.0
TRY_AGAIN_S: Final = 15.0
"""So many disagreements that nobody can settle wait for a third wallet, so long, tried so often (seconds)."""

Verdict = Callable[[Replica, str, float], None]
"""(replica, why its wallet goes to quarantine, d); called in the audit thread or a step thread."""

Violation = Callable[[Replica, Sample, float], None]
"""(replica, the output that was off, d); called before the verdict that it may lead to, as that is."""


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
    """Counters since the start. Times are CPU seconds: the audit thread's, and the whole process's.

    `audited` outputs were recomputed or judged by arbitration, `violations` of them were off; `dropped`
    samples found the queue full; `rejected` replies were refused before use. `compared` lost races were
    looked at, and in `disagreed` of them the two replies differed. `arbitrated` matters were settled by
    other wallets' replicas; `skipped` audits could not be made by anyone.
    """

    audited: int = 0
    violations: int = 0
    dropped: int = 0
    rejected: int = 0
    compared: int = 0
    disagreed: int = 0
    arbitrated: int = 0
    skipped: int = 0
    cpu_s: float = 0.0
    process_cpu_s: float = 0.0


@dataclass(slots=True)
class _Dispute:
    """Words that contradict each other, and when to ask around again, and for the last time (monotonic)."""

    sample: Sample
    words: tuple[Word, ...]
    again: float
    until: float


class SampledAuditor:
    """See the module docstring. `offer`, `compare` and `rejected` may be called from any thread.

    `cpu` gives the process's CPU seconds, `clock` monotonic ones. `arbiter` may be set later.
    """

    def __init__(
        self,
        references: References,
        band: NormBand,
        *,
        on_verdict: Verdict,
        on_violation: Violation = lambda replica, sample, d: None,
        rng: random.Random | None = None,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arbiter: Arbiter | None = None
        self._cpu, self._clock = cpu, clock
        self._started_cpu = cpu()
        self._budget = AuditBudget(self._started_cpu)
        self._offered, self._seen_cpu = 0, self._started_cpu
        self._waiting: deque[_Dispute] = deque(maxlen=MAX_WAITING)  # the audit thread's
        self._closed = False
        self._references = references
        self._band = band
        self._on_verdict = on_verdict
        self._on_violation = on_violation
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
            return replace(self._stats, process_cpu_s=self._cpu() - self._started_cpu)

    @property
    def spending(self) -> Spending:
        """The rate at which audits were really drawn lately, and their share of the CPU."""
        with self._lock:
            return self._budget.spending()

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
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def offer(self, replica: Replica, draw: Callable[[random.Random], tuple[Replica, Sample]]) -> None:
        """A valid call of the wallet of `replica`: audited or not, by chance."""
        with self._lock:
            self._offered += 1
            if self._offered % CPU_EVERY == 1:
                self._seen_cpu = self._cpu()
            self._budget.call(self._seen_cpu)
            trust = self._trust.get(replica.wallet)
            if trust is None:
                trust = self._trust[replica.wallet] = Trust()
            if not trust.wants_audit(self._rng, self._budget.afford) or not self._has_room():
                return
            self._budget.drawn()
            replica, sample = draw(self._rng)
        self._queue(self._judge, replica, sample)

    def curious(self) -> bool:
        """Whether to compare one more lost race: where the budget allows, else by chance."""
        with self._lock:
            return self._budget.allows_comparison or self._rng.random() < LEAST_COMPARED

    def compare(self, rivals: Sequence[Rival], outputs: Tensor) -> None:
        """Outputs [rivals, width] of a lost race, nobody else's memory, beside the accepted ones."""
        with self._lock:
            if not self._has_room():
                return
        self._queue(self._guard, rivals[0].sample, lambda: self._compare(rivals, outputs), 0)

    def _queue(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self._thread.submit(work, *arguments)
        except RuntimeError:  # closed since it was found open: nobody is waiting for this
            with self._lock:
                self._queued -= 1

    def _has_room(self) -> bool:
        """Whether one more fits the queue, and is counted in it; the lock is held."""
        if self._queued >= MAX_QUEUED or self._closed:
            self._stats = replace(self._stats, dropped=self._stats.dropped + 1)
            return False
        self._queued += 1
        return True

    def rejected(self, replica: Replica, d: float, sample: Sample | None = None) -> None:
        """A reply was rejected before it was used: one of its outputs (`sample`) was off by `d`."""
        if sample is not None:
            self._on_violation(replica, sample, d)
        with self._lock:
            self._stats = replace(self._stats, rejected=self._stats.rejected + 1)
            trust = self._trust.setdefault(replica.wallet, Trust())
            reason = trust.verdict(d, limit_of(replica.numerics, replica.precision))
        if reason is not None:
            self._on_verdict(replica, reason, d)

    def _judge(self, replica: Replica, sample: Sample) -> None:
        """In the audit thread: one sample, recomputed here or, without bytes, settled by others."""

        def work() -> None:
            try:
                self._recompute(replica, sample)
            except KvasirError as error:
                if self.arbiter is None:
                    raise
                self._arbitrate(sample, (Word(replica, sample.output),), why=str(error))

        self._guard(sample, work)

    def _guard(self, sample: Sample, work: Callable[[], None], audits: int = 1) -> None:
        """The boundary for one piece of work. A bug in it must not end all audits silently."""
        started = time.thread_time()
        try:
            work()
            self._settle_waiting()
        except KvasirError as error:
            self._skip(sample, str(error))
        except Exception as fault:
            _log.exception("audit.crashed", layer=sample.layer, expert=sample.expert, reason=str(fault))
        finally:
            cpu_s = time.thread_time() - started
            with self._lock:
                self._queued -= 1
                self._budget.spent(cpu_s, audits=audits)
                self._stats = replace(self._stats, cpu_s=self._stats.cpu_s + cpu_s)

    def _skip(self, sample: Sample, reason: str) -> None:
        with self._lock:
            self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
        _log.warning("audit.skipped", layer=sample.layer, expert=sample.expert, reason=reason)

    def _recompute(self, replica: Replica, sample: Sample) -> None:
        limit = limit_of(replica.numerics, replica.precision)
        d = judge_sample(sample, replica.precision, self._references.run, self._band)
        self._found(replica, sample, d, limit)

    def _found(self, replica: Replica, sample: Sample, d: float, limit: float) -> None:
        """One output of a replica was off by `d`: what that means for its wallet."""
        with self._lock:
            reason = self._trust.setdefault(replica.wallet, Trust()).verdict(d, limit)
            self._stats = replace(
                self._stats,
                audited=self._stats.audited + 1,
                violations=self._stats.violations + (d > limit),
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
        if d > limit:
            self._on_violation(replica, sample, d)
        if reason is not None:
            self._on_verdict(replica, reason, d)

    # --- lost races and other wallets' words -----------------------------------------------------------

    def _compare(self, rivals: Sequence[Rival], outputs: Tensor) -> None:
        """Look at a lost race; where the two disagree the worst output of them is looked into."""
        found = disagreements(rivals, outputs)
        with self._lock:
            self._stats = replace(
                self._stats,
                compared=self._stats.compared + 1,
                disagreed=self._stats.disagreed + bool(found),
            )
        if not found:
            return
        worst = max(found, key=lambda each: each.d)
        rival, sample = worst.rival, worst.rival.sample
        theirs = replace(sample, output=worst.output, precisions=rival.precisions, call=rival.call)
        _log.warning(
            "replies.disagreed",
            layer=sample.layer,
            expert=sample.expert,
            d=worst.d,
            winner=address_of(rival.winner.device),
            loser=address_of(rival.loser.device),
        )
        try:
            self._recompute(rival.winner, sample)
            self._recompute(rival.loser, theirs)
        except KvasirError as error:
            words = (Word(rival.winner, sample.output), Word(rival.loser, worst.output))
            self._arbitrate(sample, words, why=str(error))

    def _arbitrate(self, sample: Sample, words: tuple[Word, ...], *, why: str) -> None:
        """Have other wallets' replicas say what an output is; `why` it cannot be recomputed here."""
        if self.arbiter is None:
            raise Refused("not_found", why)
        now = self._clock()
        ruling, words = self.arbiter.settle(sample, words)
        if ruling.outcome != "open":
            self._rule(sample, ruling)
        elif len(words) == 2:
            self._waiting.append(_Dispute(sample, words, now + TRY_AGAIN_S, now + WAITING_S))
        else:
            self._skip(sample, f"{why}; and no other wallet's replica could be asked")

    def _rule(self, sample: Sample, ruling: Ruling) -> None:
        with self._lock:
            self._stats = replace(self._stats, arbitrated=self._stats.arbitrated + 1)
        for finding in ruling.findings:
            theirs = replace(sample, output=finding.output)
            self._found(finding.replica, theirs, finding.d, finding.limit)

    def _settle_waiting(self) -> None:
        """Ask around again about the oldest disagreement that waits, if it is time."""
        now = self._clock()
        if self.arbiter is None or not self._waiting or now < self._waiting[0].again or self._closed:
            return
        dispute = self._waiting.popleft()
        ruling, words = self.arbiter.settle(dispute.sample, dispute.words)
        if ruling.outcome != "open":
            self._rule(dispute.sample, ruling)
        elif len(words) == 2 and now < dispute.until:
            dispute.again = now + TRY_AGAIN_S
            self._waiting.append(dispute)
        else:
            self._skip(dispute.sample, "two replicas disagree, and no third wallet's settles it")

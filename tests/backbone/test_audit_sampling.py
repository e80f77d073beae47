"""The background auditor: what it samples, what it finds, and what it does not wait for."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvasir_backbone import auditing
from kvasir_backbone.arbitration import Ruling, Word, rule
from kvasir_backbone.audit import MAX_QUARANTINES, QUARANTINE_S, NormBand, Sample, quarantine_s
from kvasir_backbone.auditing import References, SampledAuditor
from kvasir_backbone.budget import AuditBudget
from kvasir_backbone.comparing import Rival
from kvasir_backbone.roster import Replica, WindowMap
from relay.errors import ConfigError
from tests.support.rosters import device, flat_plan, replica

WINDOWS = WindowMap(flat_plan(width=16))
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


class Local:
    """Stands where `LocalExperts` stands: one expert, at a precision."""

    numerics = "n"

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.gate = threading.Event()
        self.gate.set()
        self.gone = False

    def run(self, layer: int, expert: int, rows: Tensor) -> Tensor:
        self.gate.wait(10)
        if self.gone:
            raise ConfigError("the bytes are gone")
        scale = {"stored": 1.0, "int8": 0.5}[self.precision]
        return torch.nn.functional.linear(rows, scale * WEIGHT)


class Bench:
    def __init__(self) -> None:
        self.made: dict[str, Local] = {}
        self.verdicts: list[tuple[Replica, str, float]] = []
        self.now = 0.0
        self.auditor = SampledAuditor(
            References(self.make),  # type: ignore[arg-type]
            NormBand(),
            on_verdict=lambda *verdict: self.verdicts.append(verdict),
            rng=random.Random(1),
            clock=lambda: self.now,
        )

    def drain(self) -> None:
        """Wait until every sample taken so far is judged."""
        self.auditor._thread.submit(lambda: None).result(timeout=10)

    def settle(self) -> None:
        """The same, and the end of the auditor."""
        self.drain()
        self.auditor.close()

    def make(self, precision: str) -> Local:
        return self.made.setdefault(precision, Local(precision))

    def offer(self, *, name: str = "a", precision: str = "stored", error: float = 0.0) -> None:
        asked = replica(WINDOWS, 0, name, precision=precision)

        def draw(rng: random.Random) -> tuple[Replica, Sample]:
            row = torch.randn(16)
            scale = {"stored": 1.0, "int8": 0.5}[precision]
            return asked, Sample(0, 1, row, torch.nn.functional.linear(row, scale * WEIGHT) * (1 + error))

        self.auditor.offer(asked, draw)


def test_honest_outputs_at_the_replicas_own_precision_pass() -> None:
    bench = Bench()
    for _ in range(10):
        bench.offer()
        bench.offer(name="b", precision="int8")
    bench.settle()
    assert bench.auditor.stats.audited == 20
    assert bench.auditor.stats.violations == 0
    assert bench.auditor.stats.cpu_s > 0
    assert set(bench.made) == {"stored", "int8"}
    assert bench.verdicts == []


def test_a_gross_lie_is_a_verdict_at_once_and_counts_against_its_wallet_alone() -> None:
    bench = Bench()
    bench.offer(name="honest")
    bench.offer(name="liar", error=1.0)
    bench.settle()
    ((found, reason, d),) = bench.verdicts
    assert found.device == device("liar")
    assert d > 0.05
    assert "wrong" in reason
    trust = bench.auditor.trust()
    assert trust[device("wallet of honest")].worst_d < 1e-10
    assert trust[device("wallet of liar")].worst_d == d


def test_small_lies_take_three() -> None:
    bench = Bench()
    for _ in range(3):
        bench.offer(error=0.01)
    bench.settle()
    assert len(bench.verdicts) == 1
    assert bench.auditor.stats.violations == 3


def test_more_samples_than_the_bound_are_dropped_and_counted_not_waited_for() -> None:
    bench = Bench()
    bench.make("stored").gate.clear()
    for number in range(auditing.MAX_QUEUED + 5):
        bench.offer(name=f"d{number}")
    assert bench.auditor.stats.dropped == 5
    bench.made["stored"].gate.set()
    bench.auditor.close()


def test_bytes_that_are_gone_skip_the_audit_and_blame_nobody() -> None:
    bench = Bench()
    bench.make("stored").gone = True
    bench.offer(error=1.0)
    bench.settle()
    assert bench.verdicts == []
    assert bench.auditor.stats.audited == 0


def test_a_bug_in_an_audit_costs_that_audit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_: object) -> float:
        raise RuntimeError("a bug")

    monkeypatch.setattr(auditing, "MAX_QUEUED", 3)
    with monkeypatch.context() as patch:
        patch.setattr(auditing, "judge_sample", broken)
        for number in range(2 * auditing.MAX_QUEUED):
            bench.offer(name=f"d{number}")
            bench.auditor._thread.submit(lambda: None).result(timeout=10)
    bench.offer()
    bench.settle()
    assert (bench.auditor.stats.audited, bench.auditor.stats.dropped) == (1, 0)


def test_a_rejected_reply_is_judged_like_an_audited_one() -> None:
    bench = Bench()
    bench.auditor.rejected(replica(WINDOWS, 0, "a"), 1.0)
    assert len(bench.verdicts) == 1
    bench.auditor.begin_again(device("wallet of a"))
    assert bench.auditor.trust()[device("wallet of a")].valid_calls == 0


def test_quarantines_double_and_the_one_after_the_third_does_not_end() -> None:
    assert [quarantine_s(number) for number in (1, 2, 3)] == [
        QUARANTINE_S, 2 * QUARANTINE_S, 4 * QUARANTINE_S,
    ]  # fmt: skip
    assert quarantine_s(MAX_QUARANTINES + 1) == pytest.approx(float("inf"))


def test_a_wallet_that_left_is_forgotten_unless_a_violation_of_its_may_still_count() -> None:
    bench = Bench()
    left, kept, suspect = (replica(WINDOWS, 0, name) for name in ("left", "kept", "suspect"))
    for each, d in ((left, 0.0), (kept, 0.0), (suspect, 0.01)):
        bench.auditor.rejected(each, d)
    bench.auditor.forget({kept.wallet})
    assert set(bench.auditor.trust()) == {kept.wallet, suspect.wallet}
    bench.settle()


def rival(winner: str, loser: str, *, wrong: str = "") -> tuple[Rival, Tensor]:
    """A lost race about one output; `wrong` names who gave a wrong one."""
    row = torch.randn(16)
    right = torch.nn.functional.linear(row, WEIGHT)
    said = {name: right.roll(1) if name == wrong else right for name in (winner, loser)}
    sample = Sample(0, 1, row, said[winner], ids=(1,))
    between = Rival(0, replica(WINDOWS, 0, loser), replica(WINDOWS, 0, winner), sample)
    return between, said[loser].unsqueeze(0)


def test_the_loser_of_a_race_is_compared_and_agreement_costs_no_recompute() -> None:
    bench = Bench()
    between, output = rival("winner", "loser")
    bench.auditor.compare((between,), output)
    bench.settle()
    stats = bench.auditor.stats
    assert (stats.compared, stats.disagreed, stats.audited) == (1, 0, 0)
    assert bench.made == {}


@pytest.mark.parametrize("wrong", ["winner", "loser"])
def test_a_disagreement_is_recomputed_and_the_liar_found_whichever_won(wrong: str) -> None:
    bench = Bench()
    between, output = rival("winner", "loser", wrong=wrong)
    bench.auditor.compare((between,), output)
    bench.settle()
    stats = bench.auditor.stats
    assert (stats.compared, stats.disagreed, stats.audited, stats.violations) == (1, 1, 2, 1)
    ((found, _, _),) = bench.verdicts
    assert found.device == device(wrong)


class Asked:
    """Stands where `Arbiter` stands: knows the right output once `third` says so."""

    def __init__(self) -> None:
        self.third: Tensor | None = None
        self.times = 0

    def settle(self, sample: Sample, words: Sequence[Word]) -> tuple[Ruling, tuple[Word, ...]]:
        self.times += 1
        known = tuple(words)
        if self.third is not None:
            known += (Word(replica(WINDOWS, 0, "third"), self.third),)
        return rule(known), known


def test_without_bytes_other_wallets_say_what_is_right() -> None:
    bench = Bench()
    bench.make("stored").gone = True
    bench.auditor.arbiter = asked = Asked()  # type: ignore[assignment]
    between, output = rival("winner", "loser", wrong="loser")
    asked.third = between.sample.output
    bench.auditor.compare((between,), output)
    bench.settle()
    stats = bench.auditor.stats
    assert (stats.arbitrated, stats.audited, stats.violations, stats.skipped) == (1, 3, 1, 0)
    ((found, _, d),) = bench.verdicts
    assert found.device == device("loser")
    assert d > 0.05


def test_without_bytes_and_without_anybody_to_ask_an_audit_is_skipped_and_counted() -> None:
    bench = Bench()
    bench.make("stored").gone = True
    bench.auditor.arbiter = asked = Asked()  # type: ignore[assignment]
    bench.offer(error=1.0)
    bench.settle()
    assert asked.times == 1
    assert (bench.auditor.stats.audited, bench.auditor.stats.skipped) == (0, 1)
    assert bench.verdicts == []


def test_a_disagreement_waits_for_a_third_wallet_and_not_for_ever() -> None:
    bench = Bench()
    bench.make("stored").gone = True
    bench.auditor.arbiter = asked = Asked()  # type: ignore[assignment]
    between, output = rival("winner", "loser", wrong="winner")
    bench.auditor.compare((between,), output)
    bench.auditor.compare((between,), output)
    bench.drain()
    assert bench.verdicts == []
    bench.now = auditing.TRY_AGAIN_S + 1
    asked.third = output[0]
    bench.auditor.compare(*agreeing())  # whatever comes next has the oldest looked at
    bench.drain()
    assert [found.device for found, _, _ in bench.verdicts] == [device("winner")]
    asked.third = None
    bench.now = auditing.WAITING_S + 1
    bench.auditor.compare(*agreeing())
    bench.settle()
    assert (bench.auditor.stats.arbitrated, bench.auditor.stats.skipped) == (1, 1)


def agreeing() -> tuple[tuple[Rival, ...], Tensor]:
    between, output = rival("x", "y")
    return (between,), output


def test_what_audits_take_is_told_and_lowers_how_often_they_are_drawn() -> None:
    bench = Bench()
    cpu = 0.0
    bench.auditor._cpu = lambda: cpu
    bench.auditor._started_cpu = 0.0
    bench.auditor._budget = AuditBudget(share=0.0)  # nothing can be paid for
    for number in range(3000):
        cpu = 0.01 * number
        bench.offer()
        if number < 20:
            bench.drain()
    bench.settle()
    stats = bench.auditor.stats
    assert stats.process_cpu_s == cpu
    assert stats.cpu_s > 0
    assert 10 <= stats.audited + stats.dropped < 40  # at 2 % some 70
    assert bench.auditor.spending.cpu_share > 0
    assert bench.auditor.spending.rate < 0.02

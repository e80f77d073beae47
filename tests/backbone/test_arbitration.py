"""Who is outvoted when replicas contradict each other, and who is asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvasir_backbone.arbitration import MAX_ASKED, Arbiter, Word, rule
from kvasir_backbone.audit import GROSS, Sample
from kvasir_backbone.dispatch import CallEnd
from kvasir_backbone.roster import Roster
from kvasir_node.calls import Call
from relay.identity import PublicKey
from tests.backbone.test_dispatch import PLAN, ROWS, WINDOWS, Workers, expert
from tests.support.rosters import device, replica, roster

IDS = (1, 3)
RIGHT = expert(0, 3, ROWS[:1])[0]
WRONG = RIGHT.roll(1)


def word(name: str, output: Tensor) -> Word:
    return Word(replica(WINDOWS, 0, name), output)


def names(found: tuple[object, ...]) -> set[PublicKey]:
    return {finding.replica.device for finding in found}  # type: ignore[attr-defined]


def test_one_word_says_nothing_and_neither_do_two_that_contradict_each_other() -> None:
    assert rule([word("a", RIGHT)]).outcome == "open"
    assert rule([word("a", RIGHT), word("b", WRONG)]).outcome == "open"


def test_two_that_agree_are_right() -> None:
    ruling = rule([word("a", RIGHT), word("b", RIGHT + 1e-6)])
    assert ruling.outcome == "agreed"
    assert names(ruling.findings) == {device("a"), device("b")}
    assert all(finding.d <= finding.limit for finding in ruling.findings)


@pytest.mark.parametrize("liar", ["a", "b", "c"])
def test_one_against_two_is_outvoted_wherever_it_stands(liar: str) -> None:
    ruling = rule([word(name, WRONG if name == liar else RIGHT) for name in ("a", "b", "c")])
    assert ruling.outcome == "outvoted"
    wrong = [finding for finding in ruling.findings if finding.d > finding.limit]
    assert names(tuple(wrong)) == {device(liar)}
    assert wrong[0].d > GROSS
    assert torch.equal(wrong[0].output, WRONG)
    assert len(ruling.findings) == 3


def test_three_that_all_differ_settle_nothing() -> None:
    words = [word("a", RIGHT), word("b", WRONG), word("c", RIGHT.roll(2))]
    assert rule(words).outcome == "open"
    assert rule(words).findings == ()


def test_a_wallet_has_one_word() -> None:
    with pytest.raises(AssertionError):
        rule([word("a", RIGHT), word("a", RIGHT)])


class Bench:
    """An arbiter over workers that hold window 0 (layer 0, experts 0 to 3) and, some of them, window 1."""

    def __init__(self, *held: str, more: tuple[str, ...] = ()) -> None:
        self.workers = Workers(roster(WINDOWS, {0: list(held), 1: list(more)}))
        calls = iter(range(100, 200))
        self.arbiter = Arbiter(PLAN, self.workers, next_call=calls.__next__, rng=random.Random(4), ask_s=0.2)

    def lies(self, name: str, behaviour: Callable[[Call, Tensor], Tensor | CallEnd | None]) -> None:
        self.workers.behaviours[device(name)] = behaviour

    def asked(self) -> list[PublicKey]:
        self.workers.join()
        return [to for to, _, _ in self.workers.calls]


SAMPLE = Sample(0, 3, ROWS[0], RIGHT, ids=IDS)


def test_one_other_wallet_is_asked_an_ordinary_call_and_its_agreement_settles_the_matter() -> None:
    bench = Bench("a", "b", "c")
    ruling, words = bench.arbiter.settle(SAMPLE, [word("a", RIGHT)])
    assert ruling.outcome == "agreed"
    assert len(words) == 2
    ((to, call, _),) = bench.workers.calls
    assert to != device("a")
    assert (call.row_count, call.groups[0].ids, call.weights) == (1, IDS, None)
    assert bytes(call.rows) == ROWS[0].numpy().tobytes()
    assert 29_000 <= call.deadline_ms <= 30_000


def test_where_the_first_contradicts_a_third_wallet_decides() -> None:
    bench = Bench("a", "b", "c")
    sample = replace(SAMPLE, output=WRONG)
    ruling, _ = bench.arbiter.settle(sample, [word("a", WRONG)])
    assert ruling.outcome == "outvoted"
    assert names(tuple(f for f in ruling.findings if f.d > f.limit)) == {device("a")}
    assert set(bench.asked()) == {device("b"), device("c")}


def test_a_third_wallet_settles_what_two_said() -> None:
    bench = Bench("a", "b", "c")
    ruling, _ = bench.arbiter.settle(SAMPLE, [word("a", RIGHT), word("b", WRONG)])
    assert names(tuple(f for f in ruling.findings if f.d > f.limit)) == {device("b")}
    assert bench.asked() == [device("c")]


def test_without_another_wallet_the_matter_stays_open_and_nobody_is_asked() -> None:
    bench = Bench("a")
    assert bench.arbiter.settle(SAMPLE, [word("a", WRONG)])[0].outcome == "open"
    same = bench.workers.view.of(0)[0]
    twin = replace(replica(WINDOWS, 0, "twin"), wallet=same.wallet)
    away = replica(WINDOWS, 0, "away", connected=False)
    bench.workers.view = Roster(WINDOWS, {0: (same, twin, away)})
    assert bench.arbiter.settle(SAMPLE, [word("a", WRONG)])[0].outcome == "open"
    assert bench.asked() == []


@pytest.mark.parametrize("answer", ["refusal", "silence", "short", "not finite"])
def test_who_gives_no_usable_answer_has_no_word_and_the_next_is_asked(answer: str) -> None:
    bench = Bench("a", "b", "c", "d", "e")

    def useless(call: Call, outputs: Tensor) -> Tensor | CallEnd | None:
        match answer:
            case "refusal":
                return CallEnd(0, 0.0, code="overloaded", message="no")
            case "silence":
                return None
            case "short":
                return outputs[:1]
        return outputs * float("nan")

    for name in ("b", "c", "d", "e"):
        bench.lies(name, useless)
    assert bench.arbiter.settle(SAMPLE, [word("a", RIGHT)])[0].outcome == "open"
    assert len(bench.asked()) == MAX_ASKED


def test_a_partial_sum_over_two_windows_is_asked_of_a_device_that_holds_both() -> None:
    bench = Bench("a", "b", "c", more=("a", "c"))
    ids, weights = (1, 3, 6), torch.tensor([0.5, 0.25, 2.0])
    output = sum(weights[i] * expert(0, ids[i], ROWS[:1])[0] for i in range(3))
    assert isinstance(output, Tensor)
    sample = Sample(0, 1, ROWS[0], output, ids, weights, ("stored",) * 3)
    ruling, _ = bench.arbiter.settle(sample, [word("a", output)])
    assert ruling.outcome == "agreed"
    assert bench.asked() == [device("c")]
    ((_, call, _),) = bench.workers.calls
    assert [group.ids for group in call.groups] == [(1, 3), (6,)]

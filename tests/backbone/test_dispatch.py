"""The dispatcher's shell over workers in threads: equality, loss, lies, lateness, credit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvasir_backbone.audit import NormBand, Sample
from kvasir_backbone.comparing import Rival, disagreements
from kvasir_backbone.credit import CreditBook, Totals
from kvasir_backbone.dispatch import CallEnd, OwnerBook, SwarmDispatcher
from kvasir_backbone.pace import MIN_FAILOVER_S
from kvasir_backbone.roster import Replica, Roster, WindowMap
from kvasir_backbone.seam import DispatchFailed, RowKey
from kvasir_node.calls import MAX_MESSAGE_BYTES, Buffers, Call, Reply, call_bytes, decode, encode, reply_bytes
from kvasir_node.tensors import bytes_to_floats, bytes_to_rows, partial_sums, rows_to_bytes
from relay.errors import ConfigError
from relay.identity import PublicKey
from tests.support.rosters import device, flat_plan, roster

PLAN = flat_plan(width=16)
WINDOWS = WindowMap(PLAN)
WEIGHTS = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(11))


def expert(layer: int, number: int, rows: Tensor) -> Tensor:
    """Made-up experts that are alike everywhere; padded, so that a row does not depend on its companions."""
    padded = torch.zeros(max(4, len(rows)), 16)
    padded[: len(rows)] = rows
    return torch.nn.functional.linear(padded, WEIGHTS[layer, number])[: len(rows)]


class Local:
    """The checkpoint's experts; counts what it is asked for."""

    def __init__(self, *, missing: bool = False) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.missing = missing

    def run(self, layer: int, expert_: int, rows: Tensor, precision: str = "stored") -> Tensor:
        if self.missing:
            raise ConfigError("the checkpoint's file is gone")
        self.asked.append((layer, expert_, len(rows)))
        return expert(layer, expert_, rows)


Behaviour = Callable[[Call, Tensor], "Tensor | CallEnd | None"]
"""What a worker does with a call and its honest outputs: outputs, a failure, or silence (None)."""


class Workers:
    """Devices in threads that answer real CALL messages with real REPLY messages."""

    def __init__(self, view: Roster) -> None:
        self.view = view
        self.behaviours: dict[PublicKey, Behaviour] = {}
        self.calls: list[tuple[PublicKey, Call, int]] = []
        self.trips: list[PublicKey] = []
        self.stale_leases: list[bytes] = []
        self.cancelled: list[tuple[PublicKey, int]] = []
        self.threads: list[threading.Thread] = []

    def roster(self) -> Roster:
        return self.view

    def cancel(self, to: PublicKey, call_id: int) -> None:
        self.cancelled.append((to, call_id))

    def tripped(self, tripped: PublicKey, reason: str) -> None:
        self.trips.append(tripped)

    def stale(self, replicas: Sequence[Replica], reason: str) -> None:
        self.stale_leases += [replica.lease for replica in replicas]

    def submit(
        self,
        to: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        *,
        answer_bytes: int,
    ) -> None:
        raw = b"".join(message)
        call = decode(raw)
        assert isinstance(call, Call)
        assert answer_bytes == reply_bytes(call.output_count, PLAN.row_bytes)
        thread = threading.Thread(target=self._work, args=(to, raw, done))
        self.threads.append(thread)
        thread.start()

    def _work(self, to: PublicKey, raw: bytes, done: Callable[[CallEnd], None]) -> None:
        call = decode(raw)
        assert isinstance(call, Call)
        self.calls.append((to, call, len(raw)))
        outputs: Tensor | CallEnd | None = self.summed(call, serve(call))
        if to in self.behaviours:
            assert isinstance(outputs, Tensor)
            outputs = self.behaviours[to](call, outputs)
        if isinstance(outputs, Tensor):
            weighted = call.weights is not None
            reply = Reply(call.id, len(outputs), 1, 1, rows_to_bytes(outputs.contiguous()), weighted=weighted)
            decoded = decode(b"".join(encode(reply)))
            assert isinstance(decoded, Reply)
            done(CallEnd(call.id, time.monotonic(), reply=decoded))
        elif outputs is not None:
            done(replace(outputs, call=call.id))

    @staticmethod
    def summed(call: Call, outputs: Tensor) -> Tensor:
        """What a node makes of the outputs of a call with weights."""
        if call.weights is None:
            return outputs
        rows = [row for group in call.groups for row, count in enumerate(group.counts) for _ in range(count)]
        return partial_sums(outputs, bytes_to_floats(call.weights, call.id_count), rows, call.row_count)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


def serve(call: Call) -> Tensor:
    rows = bytes_to_rows(call.rows, call.row_count, 16, "float32")
    outputs = []
    for group in call.groups:
        ids = iter(group.ids)
        for row, count in enumerate(group.counts):
            outputs += [expert(call.layer, next(ids), rows[row : row + 1])[0] for _ in range(count)]
    return torch.stack(outputs)


class Auditor:
    """Draws one sample of every call, and keeps it."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.rejections: list[float] = []
        self.compared: list[tuple[Sequence[Rival], Tensor]] = []

    def offer(self, replica: Replica, draw: Callable[[random.Random], tuple[Replica, Sample]]) -> None:
        drawn, sample = draw(random.Random(len(self.samples)))
        assert drawn.device == replica.device
        assert drawn.window.contains(sample.layer, sample.expert)
        assert sample.expert in sample.ids
        self.samples.append(sample)

    def curious(self) -> bool:
        return True

    def compare(self, rivals: Sequence[Rival], outputs: Tensor) -> None:
        self.compared.append((rivals, outputs))

    def rejected(self, replica: Replica, d: float, sample: Sample) -> None:
        assert sample.call
        self.rejections.append(d)


class Setup:
    """A dispatcher over workers that hold the windows as `held` says."""

    def __init__(
        self,
        held: dict[int, list[str]],
        *,
        fallback: bool = True,
        missing: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        min_failover_s: float = MIN_FAILOVER_S,
        made: type[SwarmDispatcher] = SwarmDispatcher,
    ) -> None:
        self.workers = Workers(roster(WINDOWS, held))
        self.owners = OwnerBook()
        self.book = CreditBook()
        for name in sorted({name for names in held.values() for name in names}):
            owner = self.owners.ensure(device(name))
            for _ in range(20):
                owner.pace.observe(8, 0.02)
            self.book.open(device(name), Totals(device(f"wallet of {name}")))
        self.local = Local(missing=missing)
        self.band = NormBand()
        self.auditor = Auditor()
        self.dispatcher = made(
            replace(PLAN, weighted=made is not SwarmDispatcher),
            self.workers,
            owners=self.owners,
            book=self.book,
            band=self.band,
            reference=self.local,
            fallback=fallback,
            max_message_bytes=max_message_bytes,
            min_failover_s=min_failover_s,
            auditor=self.auditor,
            rng=random.Random(0),
        )

    def run(self, rows: Tensor, ids: list[list[int]], *, layer: int = 0, metered: bool = True) -> Tensor:
        keys = [RowKey(1, 0, position, metered) for position in range(len(rows))]
        try:
            return self.dispatcher.dispatch(layer, rows, torch.tensor(ids), keys, 5.0)
        finally:
            self.workers.join()


def expected(rows: Tensor, ids: list[list[int]], layer: int = 0) -> Tensor:
    return torch.stack(
        [
            torch.stack([expert(layer, number, rows[i : i + 1])[0] for number in chosen])
            for i, chosen in enumerate(ids)
        ]
    )


ROWS = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
IDS = [[0, 5], [1, 2], [6, 7], [3, 4], [7, 0]]
BOTH = {0: ["a"], 1: ["b"]}


def test_outputs_come_back_in_the_order_of_the_request() -> None:
    setup = Setup(BOTH)
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert len(setup.workers.calls) == 2
    assert setup.local.asked == []
    assert setup.dispatcher.stats.fallback_rows == 0


def test_one_worker_with_all_windows_gets_one_message_with_unique_rows() -> None:
    setup = Setup({0: ["a"], 1: ["a"]})
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    ((_, call, size),) = setup.workers.calls
    assert call.row_count == 5
    assert size == call_bytes(5, [5, 5], PLAN.row_bytes)


def test_a_decode_call_of_a_wide_bf16_model_is_no_larger_than_promised() -> None:
    """Hidden 3072 in bf16, one token, top-8, one worker."""
    assert call_bytes(1, [8], 3072 * 2) <= 6144 + 16 + 64


def test_a_window_without_owner_is_computed_here_and_counted() -> None:
    setup = Setup({0: ["a"]})
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert {number for _, number, _ in setup.local.asked} == {4, 5, 6, 7}
    assert setup.dispatcher.stats.fallback_rows == 4  # rows 0, 2, 3 and 4
    assert setup.dispatcher.stats.fallback_windows == {"L00-00/E004-007": 4}


@pytest.mark.parametrize("code", ["unreachable", "overloaded", "stale_epoch", "not_mine", "draining"])
def test_a_failed_call_is_made_again_at_the_other_replica(code: str) -> None:
    setup = Setup({0: ["a", "b"], 1: ["a", "b"]})
    fail = CallEnd(0, 0.0, code=code, message="no")
    setup.workers.behaviours[device("a")] = lambda call, outputs: fail
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert setup.local.asked == []
    failed = device("a") in {to for to, _, _ in setup.workers.calls}
    assert (device("a") in setup.workers.trips) == (failed and code == "unreachable")
    refs = {group.ref for to, call, _ in setup.workers.calls if to == device("a") for group in call.groups}
    leases = {each.lease for ref in refs for each in setup.workers.view.of(ref) if each.device == device("a")}
    assert set(setup.workers.stale_leases) == (leases if code in ("stale_epoch", "not_mine") else set())
    assert setup.book.totals(device("a")) == (0, 0)


def test_a_silent_worker_is_given_up_its_breaker_opens_and_its_late_reply_earns_nothing() -> None:
    setup = Setup({0: ["a"], 1: ["b"]})
    release = threading.Event()

    def slow(call: Call, outputs: Tensor) -> Tensor:
        release.wait(10)
        return outputs

    setup.workers.behaviours[device("a")] = slow
    keys = [RowKey(1, 0, position, True) for position in range(5)]
    started = time.monotonic()
    outputs = setup.dispatcher.dispatch(0, ROWS, torch.tensor(IDS), keys, 5.0)
    assert time.monotonic() - started < 3.0
    assert torch.equal(outputs, expected(ROWS, IDS))
    assert setup.workers.trips == [device("a")]
    assert {to for to, _ in setup.workers.cancelled} == {device("a")}  # nobody waits for it any more
    assert setup.owners.owners[device("a")].breaker.is_open
    before = setup.owners.owners[device("a")].pace.calls
    release.set()
    setup.workers.join()
    assert setup.book.totals(device("a")) == (0, 0)
    assert setup.dispatcher.stats.late == 0  # given up, not left over: it is forgotten
    assert setup.owners.owners[device("a")].pace.calls == before


def test_the_slow_side_of_a_hedge_teaches_its_pace_and_earns_nothing() -> None:
    setup = Setup({0: ["a", "b"]})
    release = threading.Event()

    def slow(call: Call, outputs: Tensor) -> Tensor:
        release.wait(10)
        return outputs

    setup.dispatcher._hedges.calls = 1000  # budget for hedges
    for _ in range(20):
        setup.owners.owners[device("b")].pace.observe(8, 5.0)  # so that "a" is asked first
    setup.workers.behaviours[device("a")] = slow
    rows, ids = ROWS[:1], [[0, 1]]
    outputs = setup.dispatcher.dispatch(0, rows, torch.tensor(ids), [RowKey(1, 0, 0, True)], 5.0)
    assert torch.equal(outputs, expected(rows, ids))
    assert [to for to, _, _ in setup.workers.calls] == [device("a"), device("b")]
    assert setup.dispatcher.stats.hedges == 1
    assert setup.workers.cancelled == []  # it is to be compared
    release.set()
    setup.workers.join()
    assert setup.dispatcher.stats.late == 1
    assert setup.book.totals(device("a")) == (0, 0)
    assert setup.book.totals(device("b"))[1] == 1
    ((rivals, said),) = setup.auditor.compared  # and is a check of the other, which costs nothing
    assert {(rival.loser.device, rival.winner.device) for rival in rivals} == {(device("a"), device("b"))}
    assert [rival.sample.expert for rival in rivals] == ids[0]
    assert disagreements(rivals, said) == []
    assert len(disagreements(rivals, said.roll(1, 0))) == 2


def test_the_loser_of_a_race_that_checks_nothing_is_cancelled_and_still_teaches_its_pace() -> None:
    setup = Setup({0: ["a", "b"]})
    one = device("one wallet")
    replicas = tuple(replace(each, wallet=one) for each in setup.workers.view.of(0))
    setup.workers.view = Roster(WINDOWS, {0: replicas}, setup.workers.view.honoured)
    setup.book.open(device("b"), Totals(one))
    cancelled = threading.Event()

    def slow(call: Call, outputs: Tensor) -> CallEnd:
        assert cancelled.wait(10)
        return CallEnd(call.id, time.monotonic(), code="expired", message="cancelled")

    setup.dispatcher._hedges.calls = 1000
    for _ in range(20):
        setup.owners.owners[device("b")].pace.observe(8, 5.0)
    setup.workers.behaviours[device("a")] = slow
    before = setup.owners.owners[device("a")].pace.calls
    setup.dispatcher.dispatch(0, ROWS[:1], torch.tensor([[0, 1]]), [RowKey(1, 0, 0, True)], 5.0)
    assert [to for to, _ in setup.workers.cancelled] == [device("a")]
    cancelled.set()
    setup.workers.join()
    assert setup.owners.owners[device("a")].pace.calls == before + 1
    assert setup.dispatcher.stats.late == 0


def test_the_late_reply_of_a_lost_race_under_a_lease_that_ended_is_no_check() -> None:
    setup = Setup({0: ["a", "b"]})
    release = threading.Event()

    def slow(call: Call, outputs: Tensor) -> Tensor:
        release.wait(10)
        return outputs

    setup.dispatcher._hedges.calls = 1000
    for _ in range(20):
        setup.owners.owners[device("b")].pace.observe(8, 5.0)
    setup.workers.behaviours[device("a")] = slow
    setup.dispatcher.dispatch(0, ROWS[:1], torch.tensor([[0, 1]]), [RowKey(1, 0, 0, True)], 5.0)
    setup.workers.view = Roster(WINDOWS, setup.workers.view.replicas, frozenset())
    release.set()
    setup.workers.join()
    assert setup.dispatcher.stats.late == 1
    assert setup.auditor.compared == []


def test_replicas_of_one_wallet_are_no_check_of_each_other() -> None:
    setup = Setup({0: ["a", "b"]})
    held = setup.workers.view.of(0)
    same = tuple(replace(each, wallet=device("one wallet")) for each in held)
    setup.workers.view = Roster(WINDOWS, {0: same}, setup.workers.view.honoured)
    setup.dispatcher._hedges.calls = 1000
    both = threading.Barrier(2)  # neither answers before the hedge is out

    def together(call: Call, outputs: Tensor) -> Tensor:
        both.wait(10)
        return outputs

    for name in ("a", "b"):
        setup.workers.behaviours[device(name)] = together
    setup.dispatcher.dispatch(0, ROWS[:1], torch.tensor([[0, 1]]), [RowKey(1, 0, 0, True)], 5.0)
    setup.workers.join()
    assert setup.dispatcher.stats.hedges == 1
    assert setup.auditor.compared == []


@pytest.mark.parametrize("lie", ["short", "not finite", "shape"])
def test_a_malformed_reply_is_refused_and_the_work_done_elsewhere(lie: str) -> None:
    setup = Setup({0: ["a"], 1: ["a"]})

    def cheat(call: Call, outputs: Tensor) -> Tensor:
        if lie == "short":
            return outputs[:-1]
        if lie == "shape":
            return outputs[:, :8]
        outputs[0, 0] = float("nan")
        return outputs

    setup.workers.behaviours[device("a")] = cheat
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert setup.book.totals(device("a")) == (0, 0)
    assert setup.dispatcher.stats.outcomes["rejected"] == 1
    assert setup.workers.trips == [device("a")]
    assert setup.auditor.rejections == ([float("inf")] if lie == "not finite" else [])


def test_outputs_far_out_of_the_norm_band_are_recomputed_before_they_are_used() -> None:
    setup = Setup({0: ["a"], 1: ["a"]})
    setup.band.learn(0, ROWS, expert(0, 0, ROWS))
    setup.workers.behaviours[device("a")] = lambda call, outputs: torch.zeros_like(outputs)
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert len(setup.auditor.rejections) == 1
    assert setup.auditor.rejections[0] > 0.5


def test_outputs_out_of_the_band_that_are_right_are_taken_and_widen_it() -> None:
    setup = Setup({0: ["a"], 1: ["a"]})
    setup.band.learn(0, ROWS, 1e-6 * expert(0, 0, ROWS))  # a band that no honest output fits
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert setup.auditor.rejections == []
    assert setup.book.totals(device("a"))[1] == 1


def test_a_model_whose_own_experts_are_not_finite_is_not_the_workers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = WEIGHTS.clone()
    broken[0, 0] = float("inf")
    monkeypatch.setattr("tests.backbone.test_dispatch.WEIGHTS", broken)
    setup = Setup({0: ["a"], 1: ["a"]})
    outputs = setup.run(ROWS[:1], [[0, 5]])
    assert not bool(torch.isfinite(outputs[0, 0]).all())
    assert torch.equal(outputs[0, 1], expected(ROWS[:1], [[0, 5]])[0, 1])
    assert setup.auditor.rejections == []


def test_a_reply_under_a_lease_that_moved_on_is_refused() -> None:
    setup = Setup({0: ["a"], 1: ["a"]})

    def revoke(call: Call, outputs: Tensor) -> Tensor:
        setup.workers.view = Roster(WINDOWS, {}, frozenset())
        return outputs

    setup.workers.behaviours[device("a")] = revoke
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert setup.dispatcher.stats.outcomes["stale_epoch"] == 1
    assert setup.book.totals(device("a")) == (0, 0)
    assert setup.dispatcher.stats.fallback_rows == 5


def test_a_dispatch_over_the_bound_of_a_message_is_cut_and_pays_what_it_would_pay_whole() -> None:
    bound = reply_bytes(4, PLAN.row_bytes)  # four outputs: two rows of a step
    setup = Setup({0: ["a"], 1: ["a"]}, max_message_bytes=max(bound, call_bytes(2, [2, 2], PLAN.row_bytes)))
    assert torch.equal(setup.run(ROWS, IDS), expected(ROWS, IDS))
    assert sorted(call.row_count for _, call, _ in setup.workers.calls) == [1, 2, 2]
    assert setup.workers.trips == []
    assert setup.local.asked == []
    served = sum(
        (call.row_count + call.id_count) * PLAN.row_bytes + 2 * call.id_count
        for _, call, _ in setup.workers.calls
    )
    assert setup.book.totals(device("a")) == (served, 3)
    assert served == (5 + 10) * PLAN.row_bytes + 2 * 10, "no row was sent twice"


def test_carried_bytes_are_those_of_the_dispatch() -> None:
    setup = Setup({0: ["a"], 1: ["a"]})
    setup.run(ROWS, IDS)
    assert setup.book.totals(device("a")) == ((5 + 10) * PLAN.row_bytes + 2 * 10, 1)
    setup.run(ROWS, IDS, metered=False)
    assert setup.book.totals(device("a"))[1] == 1


def test_every_call_is_offered_to_the_auditor_with_the_right_expert_row_and_output() -> None:
    setup = Setup({0: ["a"], 1: ["a"], 2: ["a"], 3: ["b"]})
    for layer in (0, 1):
        for _ in range(20):
            setup.run(ROWS, IDS, layer=layer)
    assert len(setup.auditor.samples) == 20 + 40  # one for each call
    for sample in setup.auditor.samples:
        assert torch.equal(expert(sample.layer, sample.expert, sample.row.unsqueeze(0))[0], sample.output)
    assert len({sample.expert for sample in setup.auditor.samples[:20]}) > 4  # of any part of a call


def test_rows_without_owner_and_bytes_fail_alone_and_the_others_come_back() -> None:
    setup = Setup({0: ["a"]}, fallback=False)
    with pytest.raises(DispatchFailed) as failure:
        setup.run(ROWS, IDS)
    assert failure.value.rows == {0, 2, 3, 4}
    assert failure.value.window == "L00-00/E004-007"
    assert "L00-00/E004-007" in str(failure.value)
    assert failure.value.outputs is not None
    assert torch.equal(failure.value.outputs[1], expected(ROWS, IDS)[1])


def test_bytes_that_are_gone_fail_the_rows_and_say_why() -> None:
    setup = Setup({0: ["a"]}, missing=True)
    with pytest.raises(DispatchFailed, match="the checkpoint's file is gone"):
        setup.run(ROWS, IDS)


def test_demand_counts_the_rows_routed_to_each_window_since_it_was_last_taken() -> None:
    setup = Setup(BOTH)
    setup.run(ROWS, IDS)
    assert setup.dispatcher.take_demand() == {"L00-00/E000-003": 4, "L00-00/E004-007": 4}
    assert setup.dispatcher.take_demand() == {}


def test_dispatches_from_two_step_threads_do_not_disturb_each_other() -> None:
    # On a busy machine a worker's thread may take long: what the fallback computes would pay nobody.
    setup = Setup({0: ["a", "b"], 1: ["a", "b"], 2: ["a"], 3: ["b"]}, min_failover_s=4.0)
    results: dict[int, list[Tensor]] = {0: [], 1: []}

    def step(layer: int) -> None:
        keys = [RowKey(layer, 0, position, True) for position in range(5)]
        for _ in range(20):
            results[layer].append(setup.dispatcher.dispatch(layer, ROWS, torch.tensor(IDS), keys, 5.0))

    threads = [threading.Thread(target=step, args=(layer,)) for layer in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    setup.workers.join()
    for layer, outputs in results.items():
        assert len(outputs) == 20
        assert all(torch.equal(each, expected(ROWS, IDS, layer)) for each in outputs)
    total = sum(size for size, _ in setup.book.all_totals().values())
    calls = sum(count for _, count in setup.book.all_totals().values())
    assert calls == setup.dispatcher.stats.outcomes["completed"]
    assert total >= 40 * (5 + 10) * PLAN.row_bytes


def test_counts_of_a_device_that_is_gone_are_dropped() -> None:
    setup = Setup({0: ["a"], 1: ["a"]})
    setup.run(ROWS, IDS)
    assert setup.dispatcher.stats.device_calls[device("a")] > 0
    setup.dispatcher.forget(device("a"))
    assert device("a") not in setup.dispatcher.stats.device_calls

"""Passes side by side: one trip a layer for all of them, each with the text it has alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.coalescing import Gathering, SideBySide
from kvasir_backbone.engine import EngineConfig
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel, passes_at_once
from kvasir_backbone.seam import Dispatcher, DispatchFailed, RowKey, combine_of
from relay.errors import ConfigError
from tests.support.dispatchers import Failing, Recording
from tests.support.generating import generate
from tests.support.tiny_models import save_tiny

LAYERS = 4


@dataclass
class Doubling:
    """Gives each row, doubled, for each expert; notes each trip's layer and requests."""

    trips: list[tuple[int, frozenset[int]]] = field(default_factory=list)

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `Dispatcher.dispatch`."""
        assert len(rows) == len(ids) == len(keys)
        assert deadline_s > 0
        self.trips.append((layer, frozenset(key.request for key in keys)))
        return (rows * 2).unsqueeze(1).expand(-1, ids.shape[1], -1).clone()


@dataclass
class Summing(Doubling):
    """Combines as well: each row times the sum of its weights."""

    def combine(
        self,
        layer: int,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:
        """See `Combiner.combine`."""
        self.trips.append((layer, frozenset(key.request for key in keys)))
        return rows * weights.sum(1, keepdim=True)


def _ask(dispatcher: Dispatcher, request: int, layer: int, rows: int = 1, deadline_s: float = 20.0) -> None:
    """Dispatch rows that only this request has, and check that the outputs are theirs."""
    mine = torch.full((rows, 3), float(request * 100 + layer))
    keys = [RowKey(request, 0, row, True) for row in range(rows)]
    out = dispatcher.dispatch(layer, mine, torch.zeros(rows, 2, dtype=torch.int64), keys, deadline_s)
    assert torch.equal(out, (mine * 2).unsqueeze(1).expand(-1, 2, -1))


def _walk(request: int, layers: int = LAYERS) -> Callable[[Dispatcher], int]:
    def walk(dispatcher: Dispatcher) -> int:
        for layer in range(layers):
            _ask(dispatcher, request, layer, rows=1 + request % 3)
        return request

    return walk


def test_passes_share_one_trip_a_layer() -> None:
    inner = Doubling()
    assert SideBySide().run(inner, [_walk(n) for n in range(8)]) == list(range(8))
    assert inner.trips == [(layer, frozenset(range(8))) for layer in range(LAYERS)]


def test_a_pass_that_ends_early_or_fails_is_not_waited_for() -> None:
    def broken(dispatcher: Dispatcher) -> int:
        _ask(dispatcher, 9, 0)
        raise ValueError("a fault of ours")

    inner = Doubling()
    results = SideBySide().run(inner, [_walk(0), _walk(1, layers=1), broken])
    assert results[:2] == [0, 1]
    assert isinstance(results[2], ValueError)
    assert inner.trips[0] == (0, frozenset({0, 1, 9}))
    assert inner.trips[1:] == [(layer, frozenset({0})) for layer in range(1, LAYERS)]


def test_more_passes_than_threads_run_in_waves() -> None:
    inner = Doubling()
    assert SideBySide(3).run(inner, [_walk(n) for n in range(7)]) == list(range(7))
    assert [len(requests) for layer, requests in inner.trips if layer == 0] == [2, 2, 3]
    assert len(inner.trips) == 3 * LAYERS
    assert SideBySide().run(inner, []) == []
    with pytest.raises(ConfigError):
        SideBySide(0)


def test_a_straggler_holds_nobody_up_for_long_and_joins_again() -> None:
    went, inner = threading.Event(), Doubling()
    gathering = Gathering(inner, patience_s=0.05)
    members = [gathering.join() for _ in range(3)]

    def early(request: int) -> None:
        with members[request] as member:
            _ask(member, request, 0)
            went.set()
            _ask(member, request, 1)

    threads = [threading.Thread(target=early, args=(request,)) for request in (0, 1)]
    for thread in threads:
        thread.start()
    with members[2] as late:
        assert went.wait(20), "the others waited for a straggler"
        _ask(late, 2, 0)
        _ask(late, 2, 1)
    for thread in threads:
        thread.join(20)
    requests = Counter(request for _, requests in inner.trips for request in requests)
    assert requests == {0: 2, 1: 2, 2: 2}
    assert (0, frozenset({2})) in inner.trips


@pytest.mark.parametrize("with_outputs", [True, False])
def test_a_failed_dispatch_touches_only_the_requests_whose_rows_failed(with_outputs: bool) -> None:
    inner = Doubling()
    failing = Failing(inner, lambda layer, key: layer == 1 and key.request in (3, 5), with_outputs)
    results = SideBySide().run(failing, [_walk(n) for n in range(6)])
    assert [result for result in results if isinstance(result, int)] == [0, 1, 2, 4]
    for request in (3, 5):
        failure = results[request]
        assert isinstance(failure, DispatchFailed)
        assert failure.rows == frozenset(range(1 + request % 3))
        assert failure.window == "L01-01/E000-003"
    assert [requests for layer, requests in inner.trips if layer > 1] == [frozenset({0, 1, 2, 4})] * 2


def test_passes_share_the_trips_of_a_weighted_swarm_too() -> None:
    def walk(request: int) -> Callable[[Dispatcher], Tensor]:
        def go(dispatcher: Dispatcher) -> Tensor:
            combine = combine_of(dispatcher)
            assert combine is not None
            rows, weights = torch.ones(2, 3), torch.full((2, 4), float(request))
            keys = [RowKey(request, 0, row, True) for row in range(2)]
            return combine(0, rows, torch.zeros(2, 4, dtype=torch.int64), weights, keys, 20.0)

        return go

    inner = Summing()
    results = SideBySide().run(inner, [walk(n) for n in range(3)])
    assert inner.trips == [(0, frozenset(range(3)))]
    for request, result in enumerate(results):
        assert isinstance(result, Tensor)
        assert torch.equal(result, torch.full((2, 3), 4.0 * request))


def test_a_fault_of_the_dispatcher_ends_all_passes_and_hangs_none() -> None:
    class Broken(Doubling):
        def dispatch(self, layer: int, *arguments: object) -> Tensor:
            raise RuntimeError("out of memory")

    results = SideBySide().run(Broken(), [_walk(n) for n in range(4)])
    assert [str(result) for result in results] == ["out of memory"] * 4


def test_rows_whose_time_is_up_fail_by_name() -> None:
    gathering = Gathering(Doubling(), patience_s=20.0)
    with (
        gathering.join() as waiting,
        gathering.join(),
        pytest.raises(DispatchFailed, match="not computed in time"),
    ):
        _ask(waiting, 1, 0, rows=2, deadline_s=0.01)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_next"])
async def test_requests_of_one_step_share_trips_and_keep_their_texts(tmp_path: Path, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 70, 11, 1, 30, 9, 64, 2)
    ]
    with Checkpoint.open(save_tiny(tmp_path, name)) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")
        local = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 24)
        trips = Recording(local)
        model = BackboneModel.load(checkpoint, dtype="float32", dispatcher=trips)
        assert not model.packed
        config = EngineConfig(chunk_rows=32)
        alone, lone_trips = [], 0
        for prompt in prompts:
            trips.calls.clear()
            alone += await generate(model, [prompt], 8, config)
            lone_trips = max(lone_trips, len(trips.calls))
        trips.calls.clear()
        assert await generate(model, prompts, 8, config) == alone
        # Eight requests: what the longest needs by itself, and a few more while requests still arrive.
        assert len(trips.calls) <= lone_trips + 4 * len(model.moe_layers)
        assert max(len({key.request for key in keys}) for _, keys, _ in trips.calls) == len(prompts)


def test_models_whose_rotary_frequencies_move_run_one_pass_at_a_time() -> None:
    class Text:
        rope_parameters: object = None

    text = Text()
    assert passes_at_once(text) > 1
    text.rope_parameters = {"rope_type": "yarn"}
    assert passes_at_once(text) > 1
    text.rope_parameters = {
        "full_attention": {"rope_type": "dynamic"},
        "sliding_attention": {"rope_type": "default"},
    }
    assert passes_at_once(text) == 1

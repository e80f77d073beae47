"""The hook: what crosses the seam, how outputs are combined, and whom a failure touches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvasir_backbone.routing import NothingLeft, Routed, RoutingLog, StepRouting, experts_forward
from kvasir_backbone.seam import RowKey
from kvasir_node import kernels
from kvasir_node.residual import residual
from tests.support.dispatchers import Failing, Recording


class Scaling:
    """Expert e multiplies its row by e + 1."""

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        return rows.unsqueeze(1) * (ids.unsqueeze(-1) + 1).to(rows.dtype)


def _keys(*requests: int) -> list[RowKey]:
    return [RowKey(request, 0, place, True) for place, request in enumerate(requests)]


def _inputs(rows: int, k: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 8, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(6, generator=generator)[:k] for _ in range(rows)])
    weights = torch.rand(rows, k, generator=generator).to(dtype)
    return hidden, ids, weights


def test_outputs_are_combined_with_the_routers_weights_in_fp32() -> None:
    hidden, ids, weights = _inputs(5, dtype=torch.bfloat16)
    out = StepRouting(Scaling(), _keys(1, 1, 2, 2, 3)).run(0, hidden, ids, weights)
    outputs = (hidden.unsqueeze(1) * (ids.unsqueeze(-1) + 1).to(torch.bfloat16)).float()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (outputs * weights.float().unsqueeze(-1)).sum(1).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_c_core_combines_alike(dtype: torch.dtype) -> None:
    kernel = kernels.load()
    if kernel is None:
        pytest.skip("no C compiler on the path")
    hidden, ids, weights = _inputs(6, k=3, dtype=dtype)
    keys = _keys(1, 1, 2, 2, 3)
    out = StepRouting(Scaling(), keys, kernel=kernel).run(0, hidden, ids, weights)
    exact = (Scaling().dispatch(0, hidden, ids, [], 0.0).double() * weights.double().unsqueeze(-1)).sum(1)
    assert out.dtype == dtype
    assert float(residual(out[:5], exact[:5]).max()) <= (1e-12 if dtype == torch.float32 else 1e-5)
    assert not out[5].any()
    for place in range(5):  # a row's bits are those that it has alone
        row = slice(place, place + 1)
        alone = StepRouting(Scaling(), keys[row], kernel=kernel).run(0, hidden[row], ids[row], weights[row])
        assert torch.equal(alone, out[row])
    failing = Failing(Scaling(), lambda layer, key: key.position == 2, True)
    some = StepRouting(failing, keys, kernel=kernel).run(0, hidden, ids, weights)
    assert torch.equal(some[[0, 1, 4]], out[[0, 1, 4]])
    assert not some[2:4].any()


def test_padding_never_crosses_the_seam() -> None:
    hidden, ids, weights = _inputs(6)
    recorder = Recording(Scaling())
    step = StepRouting(recorder, _keys(1, 2))
    out = step.run(4, hidden, ids, weights)
    assert [(layer, len(keys)) for layer, keys, _ in recorder.calls] == [(4, 2)]
    assert torch.equal(out[2:], torch.zeros(4, 8))
    assert step.recorded().ids.shape == (2, 1, 2)


@pytest.mark.parametrize("with_outputs", [True, False])
def test_a_failed_row_takes_its_request_and_no_other(with_outputs: bool) -> None:
    hidden, ids, weights = _inputs(5)
    keys = _keys(1, 1, 2, 2, 3)
    recorder = Recording(Scaling())
    failing = Failing(recorder, lambda layer, key: layer == 1 and key.position == 2, with_outputs)
    step = StepRouting(failing, keys)
    good = StepRouting(Scaling(), keys).run(0, hidden, ids, weights)
    assert torch.equal(step.run(0, hidden, ids, weights), good)
    out = step.run(1, hidden, ids, weights)
    assert sorted(step.failures) == [2, 3]
    assert {failure.window for failure in step.failures.values()} == {"L01-01/E000-003"}
    assert torch.equal(out[[0, 1, 4]], good[[0, 1, 4]])
    assert torch.equal(out[2:4], torch.zeros(2, 8))
    step.run(2, hidden, ids, weights)
    assert [key.request for key in recorder.calls[-1][1]] == [1, 1, 3], "failed rows are not sent again"
    assert failing.failures == 1


def test_when_all_have_failed_the_pass_ends() -> None:
    hidden, ids, weights = _inputs(2)
    step = StepRouting(Failing(Scaling(), lambda layer, key: True), _keys(1, 2))
    with pytest.raises(NothingLeft):
        step.run(0, hidden, ids, weights)
    assert sorted(step.failures) == [0, 1]


def test_replayed_rows_reuse_their_recorded_decisions() -> None:
    hidden, ids, weights = _inputs(4)
    first = StepRouting(Scaling(), _keys(1, 1, 1, 1))
    for layer in (0, 1):
        first.run(layer, hidden, (ids + layer) % 6, weights)
    log = RoutingLog()
    for row in range(4):
        log.append(first.recorded().slice(row, row + 1))
    recorder = Recording(Scaling())
    again = StepRouting(recorder, _keys(2, 1, 1, 2), replay=[(1, log.rows(1, 3))])
    other = (ids + 3) % 6
    for layer in (0, 1):
        again.run(layer, hidden, other, weights * 0)
        sent = recorder.calls[layer][2]
        assert torch.equal(sent[1:3], (ids[1:3] + layer) % 6)
        assert torch.equal(sent[[0, 3]], other[[0, 3]])
    assert torch.equal(again.recorded().weights[1:3], log.rows(1, 3).weights)


def test_a_long_log_is_joined_and_keeps_every_position() -> None:
    log = RoutingLog()
    for place in range(200):
        ids = torch.full((1, 3, 2), place, dtype=torch.int32)
        log.append(Routed(ids, ids.float()))
    part = log.rows(60, 140)
    assert part.ids[:, 0, 0].tolist() == list(range(60, 140))
    assert part.weights[:, 2, 1].tolist() == [float(place) for place in range(60, 140)]


def test_experts_never_run_outside_a_step() -> None:
    hidden, ids, weights = _inputs(1)
    with pytest.raises(AssertionError, match="outside"):
        experts_forward(object(), hidden, ids, weights)

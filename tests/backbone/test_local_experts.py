"""Experts from the checkpoint: right, the same in any company, bounded, honest about damage."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.seam import DispatchFailed
from kvasir_node.experts import WindowExperts, choose_execution
from kvasir_node.residual import residual
from market.plans import ByteRange, Plan
from relay.errors import ConfigError
from tests.support.dispatchers import RowKey


def _ids(rows: int, k: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(256, generator=generator)[:k] for _ in range(rows)])


def _rows(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 192, generator=torch.Generator().manual_seed(seed))


def _keys(count: int) -> list[RowKey]:
    return [RowKey(1, 0, place, True) for place in range(count)]


@pytest.fixture
def local(bundled: Checkpoint, bundled_plan: Plan) -> LocalExperts:
    return LocalExperts(bundled.read, bundled_plan)


def test_outputs_are_those_of_stocks_experts(local: LocalExperts, bundled_stock: Any) -> None:
    rows, ids = _rows(9), _ids(9)
    for layer in range(4):
        out = local.dispatch(layer, rows, ids, _keys(9), 1.0)
        assert out.shape == (9, 8, 192)
        stock = bundled_stock.model.layers[layer].mlp.experts
        for place in range(8):
            with torch.no_grad():
                expected = stock(rows, ids[:, place : place + 1], torch.ones(9, 1))
            assert float(residual(out[:, place], expected).max()) < 1e-12


def test_a_row_comes_out_the_same_in_any_company(local: LocalExperts) -> None:
    rows, ids = _rows(40), _ids(40)
    whole = local.dispatch(2, rows, ids, _keys(40), 1.0)
    for start, stop in ((0, 1), (7, 9), (13, 16), (30, 40)):
        part = local.dispatch(2, rows[start:stop], ids[start:stop], _keys(stop - start), 1.0)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("precision", ["stored", "int8"])
def test_outputs_are_bit_for_bit_those_of_a_node(
    bundled: Checkpoint, bundled_plan: Plan, precision: str
) -> None:
    execution = choose_execution(bundled_plan, precision)
    local = LocalExperts(bundled.read, bundled_plan, precision=precision, execution=execution)
    window = bundled_plan.windows[2]
    node = WindowExperts.load(bundled_plan, window, precision, bundled.read, execution=execution)
    for expert in range(window.expert_start, window.expert_end, 17):
        assert torch.equal(local.run(1, expert, _rows(3)), node.run(1, expert, _rows(3)))
    assert local.numerics == node.numerics


def test_rows_keep_their_dtype(local: LocalExperts) -> None:
    out = local.dispatch(0, _rows(2).bfloat16(), _ids(2), _keys(2), 1.0)
    assert out.dtype == torch.bfloat16


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(bundled: Checkpoint, bundled_plan: Plan) -> None:
    size = bundled_plan.layers[0].expert_bytes
    local = LocalExperts(bundled.read, bundled_plan, cache_bytes=3 * size)
    for expert in (1, 2, 3, 1, 4):
        local.run(0, expert, _rows(1))
    assert (local.loads, local.kept_bytes) == (4, 3 * size)
    local.run(0, 1, _rows(1))
    assert local.loads == 4, "1 was used after 2"
    local.run(0, 2, _rows(1))
    assert (local.loads, local.kept_bytes) == (5, 3 * size)


def test_nothing_is_kept_in_a_cache_of_nothing(bundled: Checkpoint, bundled_plan: Plan) -> None:
    local = LocalExperts(bundled.read, bundled_plan, cache_bytes=0)
    first, again = (local.run(0, 9, _rows(2)) for _ in range(2))
    assert torch.equal(first, again)
    assert (local.loads, local.kept_bytes) == (2, 0)
    with pytest.raises(ConfigError):
        LocalExperts(bundled.read, bundled_plan, cache_bytes=-1)


def test_several_threads_may_call(local: LocalExperts) -> None:
    rows, ids = _rows(16), _ids(16)
    expected = local.dispatch(3, rows, ids, _keys(16), 1.0)
    results: list[bool] = []

    def run() -> None:
        results.append(torch.equal(local.dispatch(3, rows, ids, _keys(16), 1.0), expected))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 4


def test_an_expert_that_is_not_there_is_our_own_bug(local: LocalExperts) -> None:
    with pytest.raises(KeyError):
        local.run(0, 256, _rows(1))
    with pytest.raises(KeyError):
        local.run(9, 0, _rows(1))


def test_damaged_bytes_fail_only_their_rows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_model_path(), folder)
    with Checkpoint.open(folder) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=8 << 20, wire_dtype="float32")
        where = next(plan.layers[1].sources()).locate(77)
        _overwrite(folder / plan.files[where.file].name, where, b"\xff\x7f" * (where.nbytes // 2))
        local = LocalExperts(checkpoint.read, plan)
        ids = torch.tensor([[1, 2], [77, 3], [4, 77], [5, 6]])
        with pytest.raises(DispatchFailed, match="damaged") as failure:
            local.dispatch(1, _rows(4), ids, _keys(4), 1.0)
        assert failure.value.rows == {1, 2}
        assert failure.value.outputs is not None
        good = local.dispatch(1, _rows(4)[[0, 3]], ids[[0, 3]], _keys(2), 1.0)
        assert torch.equal(failure.value.outputs[[0, 3]], good)


def _overwrite(file: Path, where: ByteRange, data: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(where.start)
        handle.write(data)

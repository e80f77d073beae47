"""Windows of experts: loading, precision, batch invariance, the choice of kernel, the numerics class."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from kvasir_node import ffn
from kvasir_node.execution import synthetic_expert, synthetic_rows
from kvasir_node.experts import (
    TORCH,
    Execution,
    ExpertTensors,
    Ffn,
    WindowExperts,
    check_batch_invariance,
    check_layer,
    choose_execution,
    load_expert,
    numerics_class,
    quantisation_error,
    run_expert,
)
from kvasir_node.residual import residual
from market.plans import GateFormula, Plan, Source, TensorRecipe
from market.windows import Window
from relay.errors import ConfigError, Refused
from tests.support.experts import (
    SWIGLU,
    Memory,
    layer_recipe,
    make_plan,
    roles,
    swiglu,
    tiny_plan,
    weights,
)

PRECISIONS = ("stored", "bf16", "int8", "int4")


def load(plan: Plan, read: Any, precision: str = "stored", **more: Any) -> WindowExperts:
    return WindowExperts.load(plan, plan.windows[0], precision, read, **more)


# --- what an expert computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 5, 300])
def test_an_expert_is_the_textbook_formula(dtype: torch.dtype, count: int) -> None:
    plan, read, tensors = tiny_plan(dtype=dtype)
    experts = load(plan, read)
    rows = torch.randn(count, plan.width)
    for layer, expert in ((0, 0), (1, 7)):
        got = experts.run(layer, expert, rows)
        assert got.dtype == torch.float32
        assert float(residual(got, swiglu(rows, tensors[layer], expert)).max()) < 1e-12


def test_a_result_is_rounded_once_to_the_rows_dtype() -> None:
    plan, read, _ = tiny_plan()
    experts = load(plan, read)
    rows = torch.randn(5, plan.width).bfloat16()
    assert torch.equal(experts.run(0, 3, rows), experts.run(0, 3, rows.float()).bfloat16())


def test_run_expert_is_what_a_window_runs() -> None:
    plan, read, _ = tiny_plan(dtype=torch.bfloat16)
    experts = load(plan, read)
    rows = torch.randn(3, plan.width)
    tensors = load_expert(plan.layers[1], 5, read)
    assert torch.equal(run_expert(tensors, SWIGLU, rows), experts.run(1, 5, rows))


def test_no_rows_are_no_rows() -> None:
    plan, read, _ = tiny_plan()
    assert load(plan, read).run(0, 0, torch.empty(0, plan.width)).shape == (0, plan.width)


def test_only_what_the_window_holds_runs() -> None:
    windows = (Window(0, 2, 0, 4), Window(0, 2, 4, 8))
    plan, read, tensors = tiny_plan(windows=windows)
    experts = WindowExperts.load(plan, windows[1], "stored", read)
    rows = torch.randn(2, plan.width)
    assert float(residual(experts.run(1, 4, rows), swiglu(rows, tensors[1], 4)).max()) < 1e-12
    assert experts.holds(0, 7)
    assert not experts.holds(0, 3)
    with pytest.raises(KeyError):
        experts.run(0, 3, rows)


# --- batch invariance ------------------------------------------------------------------------------------

SHAPES = [(192, 32), (64, 17), (100, 50), (33, 7), (512, 96)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("width", "inner"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_row_does_not_depend_on_its_companions(
    width: int, inner: int, activation: str, precision: str
) -> None:
    memory = Memory()
    formula = GateFormula("swiglu", activation)
    recipe = layer_recipe(memory, weights(roles(width, inner), 1, dtype=torch.bfloat16), formula=formula)
    plan = make_plan(memory, [recipe], width=width)
    execution = choose_execution(plan, precision)
    assert execution == Execution(), "torch itself should need no blocks of 4 on this machine"
    experts = load(plan, memory.read, precision, execution=execution)
    rows = torch.randn(40, width)
    whole = experts.run(0, 0, rows)
    for size in (1, 2, 3, 4, 5, 9, 16, 40):
        for start in range(0, 40 - size + 1, 7):
            assert torch.equal(experts.run(0, 0, rows[start : start + size]), whole[start : start + size])


def test_the_check_sees_products_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding, BLAS gives one row other bits: the check must notice."""
    plan, _, _ = tiny_plan(width=192, inner=64)
    monkeypatch.setattr(ffn, "MIN_ROWS", 1)
    probe = synthetic_expert(plan.layers[0], "stored")
    assert not check_batch_invariance(Execution().bind(*probe), plan.width)


def test_the_check_sees_the_last_elements_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the margin, torch computes the last few activations with other instructions."""
    plan, _, _ = tiny_plan(width=64, inner=17)
    monkeypatch.setattr(ffn, "MARGIN", 0)
    probe = synthetic_expert(plan.layers[0], "stored")
    assert not check_batch_invariance(Execution().bind(*probe), plan.width)


def test_torch_that_is_not_invariant_runs_in_blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, read, tensors = tiny_plan()
    honest = ffn._ffn

    def variant(tensors: ExpertTensors, formula: GateFormula, rows: Tensor) -> Tensor:
        return honest(tensors, formula, rows) * (1.0 + 1e-6 * (rows.shape[0] - 4))

    monkeypatch.setattr(ffn, "_ffn", variant)
    with structlog.testing.capture_logs() as logs:
        execution = choose_execution(plan, "stored")
    assert execution == Execution(exact_rows=True)
    assert [entry["event"] for entry in logs] == ["batch.variant"]
    rows = torch.randn(9, plan.width)
    got = load(plan, read, execution=execution).run(0, 1, rows)
    assert float(residual(got, swiglu(rows, tensors[0], 1)).max()) < 1e-12


def test_a_machine_that_is_never_invariant_has_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, _ = tiny_plan()
    noise = iter(range(1, 10_000))
    honest = ffn._ffn
    monkeypatch.setattr(ffn, "_ffn", lambda *args: honest(*args) * (1.0 + 1e-6 * next(noise)))
    execution = choose_execution(plan, "stored")
    assert not execution.invariant
    assert numerics_class(plan, "stored", execution) != numerics_class(plan, "stored", execution)


# --- kernels ---------------------------------------------------------------------------------------------


class ScaledKernel:
    """A kernel that is wrong by a factor, or right."""

    family = "test-kernel"
    activations = "none"

    def __init__(self, factor: float = 1.0, *, batch: float = 0.0, covers: bool = True) -> None:
        self.factor = factor
        self.batch = batch
        self.covers = covers
        self.runs = 0

    def bind(self, tensors: ExpertTensors, formula: GateFormula) -> Ffn | None:
        if not self.covers:
            return None
        honest = TORCH.bind(tensors, formula)

        def run(rows: Tensor) -> Tensor:
            self.runs += 1
            return honest(rows) * (self.factor + self.batch * rows.shape[0])

        return run


def test_a_kernel_that_agrees_with_torch_is_used_and_named() -> None:
    plan, read, _ = tiny_plan()
    kernel = ScaledKernel()
    execution = choose_execution(plan, "stored", kernel)
    assert execution.kernel is kernel
    experts = load(plan, read, execution=execution)
    kernel.runs = 0
    experts.run(0, 0, torch.randn(1, plan.width))
    assert kernel.runs == 1
    assert "/test-kernel/" in experts.numerics


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (ScaledKernel(1.001), "from torch, over 1e-09"),
        (ScaledKernel(float("nan")), "from torch"),
        (ScaledKernel(batch=1e-9), "outputs depend on the batch"),
    ],
)
def test_a_kernel_that_does_not_is_refused_with_a_log_line(kernel: ScaledKernel, reason: str) -> None:
    plan, read, _ = tiny_plan()
    if kernel.batch:
        kernel.batch = 1e-6  # within tolerance, but not invariant
    with structlog.testing.capture_logs() as logs:
        execution = choose_execution(plan, "stored", kernel)
    assert execution.kernel is None
    assert [entry["event"] for entry in logs] == ["kernel.refused"]
    assert reason in logs[0]["reason"]
    kernel.runs = 0
    load(plan, read, execution=execution).run(0, 0, torch.randn(1, plan.width))
    assert kernel.runs == 0


def test_quantised_activations_have_their_own_limit() -> None:
    plan, _, _ = tiny_plan()
    kernel = ScaledKernel(1.001)  # d = 5e-7
    kernel.activations = "int8"
    assert choose_execution(plan, "stored", kernel).kernel is kernel
    assert "/int8/" in numerics_class(plan, "stored", choose_execution(plan, "stored", kernel))


def test_a_form_that_a_kernel_does_not_cover_runs_on_torch() -> None:
    plan, read, tensors = tiny_plan()
    execution = choose_execution(plan, "stored", ScaledKernel(covers=False))
    rows = torch.randn(2, plan.width)
    got = load(plan, read, execution=execution).run(0, 2, rows)
    assert float(residual(got, swiglu(rows, tensors[0], 2)).max()) < 1e-12


# --- precision -------------------------------------------------------------------------------------------


def test_kept_bytes_are_what_the_plan_foretells() -> None:
    plan, read, _ = tiny_plan(width=256, inner=128, dtype=torch.bfloat16)
    for precision in PRECISIONS:
        assert load(plan, read, precision).kept_bytes == plan.kept_bytes(plan.windows[0], precision)


@pytest.mark.parametrize(("precision", "limit"), [("bf16", 1e-5), ("int8", 2e-4), ("int4", 2e-2)])
def test_precisions_err_within_the_promise(precision: str, limit: float) -> None:
    memory = Memory()
    recipe = layer_recipe(memory, weights(roles(512, 256), 2, dtype=torch.bfloat16))
    rows = torch.randn(16, 512)
    d = quantisation_error(load_expert(recipe, 1, memory.read), SWIGLU, precision, rows)
    assert d <= limit
    assert (d == 0.0) == (precision == "bf16")  # the checkpoint is bf16


def test_a_precision_that_the_plan_does_not_allow_is_refused() -> None:
    plan, read, _ = tiny_plan()
    strict = dataclasses.replace(plan, precisions=("stored", "int8"))
    with pytest.raises(Refused, match="allows the precisions stored, int8, not int4"):
        load(strict, read, "int4")


def test_the_hash_is_the_same_for_the_same_weights_and_only_for_them() -> None:
    plan, read, _ = tiny_plan()
    hashes = {precision: load(plan, read, precision).quantised_hash for precision in PRECISIONS}
    assert len(set(hashes.values())) == len(PRECISIONS)
    assert load(plan, read, "int8").quantised_hash == hashes["int8"]
    other, read_other, _ = tiny_plan(experts=9)
    assert load(other, read_other, "int8").quantised_hash != hashes["int8"]


def test_progress_counts_experts() -> None:
    plan, read, _ = tiny_plan(experts=3)
    seen: list[tuple[int, int]] = []
    load(plan, read, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 6) for n in range(1, 7)]


# --- plans that cannot be carried out ----------------------------------------------------------------------


def change_layer(**changes: Any) -> tuple[Plan, Any]:
    plan, read, _ = tiny_plan()
    return dataclasses.replace(
        plan, layers=(dataclasses.replace(plan.layers[0], **changes), plan.layers[1])
    ), read


def vector(role: str, size: int) -> TensorRecipe:
    return TensorRecipe(role, (size,), (Source(0, "F32", (size,)),))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"formula": GateFormula("mystery", "silu")}, "layer 0: gate formula 'mystery'"),
        ({"formula": GateFormula("no_gate", "silu")}, "'no_gate' and its tensors disagree"),
        ({"formula": dataclasses.replace(SWIGLU, norm_eps=1e-6)}, "come together"),
    ],
)
def test_a_layer_that_cannot_run_is_refused_before_anything_is_read(
    changes: dict[str, Any], reason: str
) -> None:
    plan, _ = change_layer(**changes)

    def read(span: object) -> bytes:
        raise AssertionError("nothing may be read")

    with pytest.raises(ConfigError, match=reason):
        load(plan, read)


def test_shapes_that_do_not_fit_each_other_are_refused() -> None:
    plan, _, _ = tiny_plan()
    recipe = plan.layers[0]
    with pytest.raises(ConfigError, match="up_bias has shape"):
        check_layer(plan, dataclasses.replace(recipe, tensors=(*recipe.tensors, vector("up_bias", 5))))
    wider = dataclasses.replace(plan, width=32)
    with pytest.raises(ConfigError, match="gate has shape"):
        check_layer(wider, recipe)
    bare = tuple(tensor for tensor in recipe.tensors if tensor.role != "gate")
    ungated = dataclasses.replace(recipe, formula=GateFormula("no_gate", "relu2"))
    check_layer(plan, dataclasses.replace(ungated, tensors=bare))
    with pytest.raises(ConfigError, match="a gate that is not there"):
        check_layer(plan, dataclasses.replace(ungated, tensors=(*bare, vector("gate_bias", 16))))


# --- numerics class ----------------------------------------------------------------------------------------


def test_a_class_names_everything_that_decides_the_last_bits() -> None:
    plan, read, _ = tiny_plan()
    experts = load(plan, read, "int8")
    version, quantiser, activations, wire, accumulation, family, probe = experts.numerics.split("/")
    assert (version, quantiser, activations, wire) == ("1", "int8g128", "none", "float32")
    assert accumulation == "fp32b524288"
    assert family == f"torch-{torch.__version__.partition('+')[0]}"
    assert len(probe) == 12
    classes = {numerics_class(plan, precision) for precision in PRECISIONS}
    classes.add(numerics_class(dataclasses.replace(plan, wire_dtype="bfloat16"), "stored"))
    assert len(classes) == 5
    assert numerics_class(plan, "int8") == experts.numerics


def test_a_machine_that_computes_other_bits_is_in_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, _ = tiny_plan()
    before = numerics_class(plan, "stored")
    honest = ffn._ffn
    monkeypatch.setattr(ffn, "_ffn", lambda *args: torch.nextafter(honest(*args), torch.tensor(9.0)))
    after = numerics_class(plan, "stored")
    assert before.rpartition("/")[0] == after.rpartition("/")[0]
    assert before != after


def test_made_up_rows_are_equal_on_every_machine() -> None:
    rows = synthetic_rows(3, 4)
    assert rows.abs().max() <= 1.0
    assert len(set(rows.flatten().tolist())) == 12
    assert torch.equal(rows, synthetic_rows(3, 4))

"""Experts through a torch device, alone and in groups. Here the device is "cpu": the same code, no GPU."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
import structlog
import torch
from torch import Tensor

from kvasir_node import accelerator
from kvasir_node.accelerator import (
    LIMIT,
    DeviceKernel,
    choose_accelerated,
    device_memory,
    find_device,
    make_groups,
)
from kvasir_node.calls import Call, Group, Reference, References, Reply, decode, encode
from kvasir_node.execution import numerics_class
from kvasir_node.experts import WindowExperts
from kvasir_node.ffn import Execution, Ffn, GroupKernel
from kvasir_node.loading import memory_free
from kvasir_node.residual import residual
from kvasir_node.serving import ExpertServer
from kvasir_node.tensors import bytes_to_rows, rows_to_bytes
from market.plans import GateFormula, Plan
from relay.errors import ConfigError
from tests.support.experts import (
    PLAN_ID,
    Memory,
    layer_recipe,
    make_plan,
    roles,
    tiny_plan,
    weights,
)
from tests.support.sessions import session_pair

CPU = torch.device("cpu")
LEASE = b"lease-0123456789"
PRECISIONS = ("stored", "bf16", "int8", "int4")


def rows_of(count: int, width: int, seed: int = 3) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def accelerated(plan: Plan, precision: str = "stored") -> Execution:
    execution = choose_accelerated(plan, precision, CPU)
    assert execution is not None
    return execution


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_agrees_with_the_cpu(precision: str, dtype: torch.dtype) -> None:
    plan, read, _ = tiny_plan(width=96, inner=40, dtype=dtype)
    window = plan.windows[0]
    there = WindowExperts.load(plan, window, precision, read, execution=accelerated(plan, precision))
    here = WindowExperts.load(plan, window, precision, read)
    assert there.quantised_hash == here.quantised_hash
    assert there.grouped
    assert not here.grouped
    counts = (1, 2, 3, 40, 5, 1, 200, 0)
    batches = [rows_of(count, 96, seed) for seed, count in enumerate(counts)]
    for layer in range(2):
        outputs = there.run_many(layer, range(8), batches)
        for expert, (rows, out) in enumerate(zip(batches, outputs, strict=True)):
            wanted = here.run(layer, expert, rows)
            assert out.shape == wanted.shape
            assert bool((residual(out, wanted) <= LIMIT).all())
            assert bool((residual(there.run(layer, expert, rows), wanted) <= LIMIT).all())


@pytest.mark.parametrize(
    ("formula", "gate"),
    [
        (GateFormula("no_gate", "relu2"), False),
        (GateFormula("gpt_oss", "silu", limit=7.0, alpha=1.702), True),
        (GateFormula("swiglu", "gelu_tanh", norm_eps=1e-6), True),
    ],
)
def test_every_form_of_an_expert(formula: GateFormula, gate: bool) -> None:
    """Biases, no gate, and a norm after the expert."""
    memory = Memory()
    tensors = weights(roles(48, 24, gate=gate), 4)
    tensors |= weights({"up_bias": (24,), "down_bias": (48,)}, 4, seed=5)
    if formula.norm_eps is not None:
        tensors |= {"norm": torch.rand(4, 48) + 0.5}
    plan = make_plan(memory, [layer_recipe(memory, tensors, formula=formula)], width=48)
    there = WindowExperts.load(plan, plan.windows[0], "stored", memory.read, execution=accelerated(plan))
    here = WindowExperts.load(plan, plan.windows[0], "stored", memory.read)
    batches = [rows_of(count, 48, count) for count in (1, 7, 2, 30)]
    for out, (expert, rows) in zip(there.run_many(0, range(4), batches), enumerate(batches), strict=True):
        assert bool((residual(out, here.run(0, expert, rows)) <= LIMIT).all())


def test_wire_dtypes_are_rounded_once() -> None:
    plan, read, _ = tiny_plan(wire_dtype="bfloat16")
    there = WindowExperts.load(plan, plan.windows[0], "stored", read, execution=accelerated(plan))
    rows = rows_of(5, 24).to(torch.bfloat16)
    (out,) = there.run_many(0, [3], [rows])
    wide = there.run(0, 3, rows.float())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.to(torch.bfloat16))


def test_groups_bound_padding_and_memory() -> None:
    counts = [1, 1, 0, 400, 2, 350, 9, 1]
    groups = make_groups(counts, 100)
    assert sorted(itertools.chain(*groups)) == [0, 1, 3, 4, 5, 6, 7]  # an expert without rows does not run
    for group in groups:
        sizes = [counts[index] for index in group]
        assert max(sizes) <= 2 * min(sizes) + 8
    assert [len(group) for group in make_groups([1] * 10, 4)] == [4, 4, 2]
    assert make_groups([], 4) == []


def test_a_groups_weights_are_widened_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, read, _ = tiny_plan(width=64, inner=32)
    experts = WindowExperts.load(plan, plan.windows[0], "int8", read, execution=accelerated(plan, "int8"))
    seen: list[int] = []
    honest = accelerator._widened

    def watched(matrices: list[object], device: torch.device) -> Tensor:
        wide = honest(matrices, device)  # type: ignore[arg-type]
        seen.append(wide.nbytes)
        return wide

    monkeypatch.setattr(accelerator, "_widened", watched)
    monkeypatch.setattr(accelerator, "WIDENED_BYTES", 3 * 64 * 32 * 4)
    experts.run_many(0, range(8), [rows_of(2, 64)] * 8)
    assert max(seen) == 3 * 64 * 32 * 4


def test_its_numerics_are_its_own() -> None:
    """A GPU's last bits depend on the batch: never in one class with anything else, not even its like."""
    plan, _, _ = tiny_plan()
    one, other = accelerated(plan), accelerated(plan)
    assert "/cpu-grouped-torch-" in numerics_class(plan, "stored", one)
    assert numerics_class(plan, "stored", one) == numerics_class(plan, "stored", one)
    assert numerics_class(plan, "stored", one) != numerics_class(plan, "stored", other)
    assert isinstance(one.kernel, GroupKernel)


class Wrong(DeviceKernel):
    """A device whose products are a little off."""

    def run_group(self, experts: Sequence[Ffn], rows: Sequence[Tensor]) -> list[Tensor]:
        return [out * (1 + 1e-3) for out in super().run_group(experts, rows)]


class Broken(DeviceKernel):
    """A device that cannot do it."""

    def run_group(self, experts: Sequence[Ffn], rows: Sequence[Tensor]) -> list[Tensor]:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


@pytest.mark.parametrize(("kind", "reason"), [(Wrong, "over 1e-09"), (Broken, "no kernel image")])
def test_a_device_that_is_wrong_or_broken_is_not_used(
    monkeypatch: pytest.MonkeyPatch, kind: type[DeviceKernel], reason: str
) -> None:
    plan, _, _ = tiny_plan()
    monkeypatch.setattr(accelerator, "DeviceKernel", kind)
    with structlog.testing.capture_logs() as logs:
        assert choose_accelerated(plan, "stored", CPU) is None
    (line,) = logs
    assert (line["event"], line["instead"]) == ("accelerator.refused", "cpu")
    assert reason in line["reason"]


def test_devices_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") is None
    for name in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=f"--device {name}"):
            find_device(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == torch.device("cuda")
    assert find_device("mps") == torch.device("mps")


def test_memory_is_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert device_memory(torch.device("cuda")) == (123, 456)
    assert memory_free(torch.device("cuda")) == 123
    assert device_memory(CPU) is None
    assert memory_free(CPU) > 10**6
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 400)
    assert memory_free(torch.device("mps")) == 600  # shared with the processor: the smaller of both


async def test_a_call_runs_its_experts_in_one_group() -> None:
    """From the session to the reply: all experts of a layer that a call names run together."""
    plan, read, _ = tiny_plan()
    there = WindowExperts.load(plan, plan.windows[0], "stored", read, execution=accelerated(plan))
    here = WindowExperts.load(plan, plan.windows[0], "stored", read)
    groups: list[int] = []
    honest = there.run_many

    def watched(layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        groups.append(len(experts))
        return honest(layer, experts, rows)

    there.run_many = watched  # type: ignore[method-assign]
    backbone, device = session_pair()
    rows = rows_of(6, 24)
    ids = [[0, 3, 5], [1, 3], [7], [2, 4, 6, 0], [3], [5, 1]]
    async with ExpertServer() as server, asyncio.timeout(20):
        server.hold(LEASE, 1, PLAN_ID, there)
        serving = asyncio.create_task(server.handle_session(device))
        await backbone.send(b"".join(encode(References((Reference(0, LEASE, 1, PLAN_ID),)))))
        for number in range(20):
            group = Group(0, tuple(map(len, ids)), tuple(itertools.chain(*ids)))
            await backbone.send(b"".join(encode(Call(number, 1, 6, 10_000, (group,), rows_to_bytes(rows)))))
        for _ in range(20):
            reply = decode(await backbone.receive())
            assert isinstance(reply, Reply), reply
            outputs = bytes_to_rows(reply.rows, reply.outputs, 24, "float32")
            wanted = [
                here.run(1, expert, rows[row : row + 1]) for row, own in enumerate(ids) for expert in own
            ]
            assert bool((residual(outputs, torch.cat(wanted)) <= LIMIT).all())
        await backbone.close()
        await serving
    assert groups
    assert max(groups) == 8, "eight different experts in one group"
    assert server.served.calls == 20

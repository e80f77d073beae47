"""Small plans whose bytes lie in memory, for tests of experts, serving and whatever calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from market.plans import (
    ByteRange,
    GateFormula,
    LayerRecipe,
    Plan,
    PlanFile,
    PlanId,
    Source,
    TensorRecipe,
)
from market.windows import Window

SWIGLU = GateFormula("swiglu", "silu")
PLAN_ID = PlanId(b"\x11" * 32)

SAFETENSORS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class Memory:
    """One file in memory: put tensors in, get sources out, read ranges."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, tensor: Tensor, *, dtype: str | None = None) -> Source:
        """Store [experts, ...] and describe one expert's share."""
        start = len(self.data)
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        self.data += raw
        return Source(
            file=0,
            dtype=dtype or SAFETENSORS[tensor.dtype],
            shape=tuple(tensor.shape[1:]),
            start=start,
            stride=len(raw) // tensor.shape[0],
        )

    def read(self, span: ByteRange) -> memoryview:
        """The bytes of a range, not copied."""
        return memoryview(bytes(self.data[span.start : span.end]))


def roles(width: int, inner: int, *, gate: bool = True) -> dict[str, tuple[int, ...]]:
    """The matrices of an expert: role -> shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }
    return shapes if gate else {role: shape for role, shape in shapes.items() if role != "gate"}


def weights(
    shapes: Mapping[str, tuple[int, ...]], experts: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors [experts, *shape] with a sensible scale."""
    generator = torch.Generator().manual_seed(seed)
    return {
        role: (torch.randn(experts, *shape, generator=generator) / shape[-1] ** 0.5).to(dtype)
        for role, shape in shapes.items()
    }


def layer_recipe(
    memory: Memory, tensors: Mapping[str, Tensor], *, layer: int = 0, formula: GateFormula = SWIGLU
) -> LayerRecipe:
    """A layer with one fused source a role, stored in the orientation in which it is used."""
    recipes = tuple(
        TensorRecipe(role, tuple(tensor.shape[1:]), (memory.put(tensor),)) for role, tensor in tensors.items()
    )
    experts = next(iter(tensors.values())).shape[0]
    return LayerRecipe(layer, experts, min(8, experts), formula, recipes)


def make_plan(
    memory: Memory,
    layers: Sequence[LayerRecipe],
    *,
    width: int,
    wire_dtype: str = "float32",
    weighted: bool = False,
    windows: Sequence[Window] | None = None,
) -> Plan:
    """A plan of those layers, one window over everything unless given."""
    whole = Window(layers[0].layer, layers[-1].layer + 1, 0, layers[0].experts)
    return Plan(
        model="tiny",
        revision="test",
        source="local",
        architecture="test",
        files=(PlanFile("model.safetensors", len(memory.data)),),
        width=width,
        wire_dtype=wire_dtype,
        precisions=("stored", "bf16", "int8", "int4"),
        weighted=weighted,
        windows=tuple(windows or (whole,)),
        layers=tuple(layers),
    )


def tiny_plan(
    *,
    width: int = 24,
    inner: int = 16,
    experts: int = 8,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    wire_dtype: str = "float32",
    weighted: bool = False,
    windows: Sequence[Window] | None = None,
) -> tuple[Plan, Callable[[ByteRange], memoryview], dict[int, dict[str, Tensor]]]:
    """A swiglu plan, how to read it, and its weights by layer and role."""
    memory = Memory()
    tensors = {
        number: weights(roles(width, inner), experts, seed=number, dtype=dtype) for number in range(layers)
    }
    recipes = [layer_recipe(memory, tensors[number], layer=number) for number in range(layers)]
    plan = make_plan(memory, recipes, width=width, wire_dtype=wire_dtype, weighted=weighted, windows=windows)
    return plan, memory.read, tensors


def swiglu(rows: Tensor, tensors: Mapping[str, Tensor], expert: int) -> Tensor:
    """The textbook expert in fp64, for comparison."""
    x = rows.double()
    gate, up, down = (tensors[role][expert].double() for role in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

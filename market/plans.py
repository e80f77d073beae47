"""The signed plan of one model: its windows, and for every expert tensor a closed recipe.

A recipe says which bytes of which safetensors file become which tensor of which expert, by a closed list
of steps that a node carries out on torch alone. The plan's id is the SHA-256 of its canonical body, so it
does not depend on who signed it.

Knows formats and their checks. Knows no torch and no transformers; executes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NewType

from relay.errors import RemoteProtocolError
from relay.identity import SignedDocument, SigningKey, open_document, require, sign_document

from .windows import Window

PlanId = NewType("PlanId", bytes)
"""SHA-256 of the plan's canonical body, 32 bytes."""

WIRE_DTYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtype -> bytes an element."""

STORED_DTYPES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
}  # fmt: skip
"""safetensors dtype -> bytes an element."""

PRECISIONS: Final = ("stored", "bf16", "int8", "int4")

ROLES: Final = (
    "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "norm",
)  # fmt: skip
"""Canonical tensors of one expert, all in `torch.nn.functional.linear` orientation [out, in]:
gate [I, W], up [I, W], down [W, I], gate_bias [I], up_bias [I], down_bias [W], norm [W]
(I: expert width, W: row width). A formula without a gate has no "gate"."""

OPS: Final = (
    "transpose",          # swap the two dimensions
    "rows",               # [start, stop, step]: x[start:stop:step] along dimension 0
    "dequant_fp8_block",  # [block_rows, block_columns]: source 1 holds one scale a block
    "dequant_mxfp4",      # sources: blocks (U8, two values a byte), scales (U8, E8M0), groups of 32
    "dequant_int4_packed",  # [group, symmetric]: compressed-tensors pack-quantized: packed (I32), scales[, zeros]
    "add",                # [constant]: x + constant (norms stored as weight - 1)
)  # fmt: skip
"""The closed list of recipe steps: (name, arguments...). A node refuses any other."""

MAX_CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Weights are hashed and verified in chunks of at most 4 MiB."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One safetensors file of the model: its name relative to the model's root, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where one stored tensor of every expert of a layer lies.

    `file` is an index into the plan's files; `dtype` a key of `STORED_DTYPES`; `shape` the shape of one
    expert's share. Either expert e starts at `start + e * stride` (a fused tensor), or `offsets[e]` gives
    its first byte and `files[e]` its file (one tensor an expert; `files` empty: all in `file`).
    """

    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stride: int = 0
    offsets: tuple[int, ...] = ()
    files: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's share."""
        size = STORED_DTYPES[self.dtype]
        for dimension in self.shape:
            size *= dimension
        return size

    def locate(self, expert: int) -> ByteRange:
        """The bytes of `expert`'s share."""
        if self.offsets:
            start = self.offsets[expert]
            file = self.files[expert] if self.files else self.file
        else:
            start, file = self.start + expert * self.stride, self.file
        return ByteRange(file, start, start + self.nbytes)


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes `start` up to `end` (half-open) of the plan's file number `file`."""

    file: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """How one canonical tensor (`role`) of an expert is made: its sources, then `ops` in order.

    `shape` is that of the result. Each op is a tuple (name, arguments...) with a name from `OPS`; it
    transforms the first source's tensor, dequantisers read the other sources too.
    """

    role: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    ops: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class GateFormula:
    """What happens between the first and the second linear map of an expert.

    `name` is one of the closed list that `kvasir_node.experts` executes, `activation` one of its
    activation names; `limit` and `alpha` are constants where the formula has them; `norm_eps` is set
    where a norm follows each expert.
    """

    name: str
    activation: str
    limit: float | None = None
    alpha: float | None = None
    norm_eps: float | None = None


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One MoE layer: how many routed experts, how many of them a row, the formula and the tensors."""

    layer: int
    experts: int
    top_k: int
    formula: GateFormula
    tensors: tuple[TensorRecipe, ...]

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert."""
        return sum(source.nbytes for source in self.sources())

    def sources(self) -> Iterator[Source]:
        """Every distinct source, in order (a fused gate_up serves two roles from the same bytes)."""
        seen: set[Source] = set()
        for tensor in self.tensors:
            for source in tensor.sources:
                if source not in seen:
                    seen.add(source)
                    yield source


@dataclass(frozen=True, slots=True)
class Plan:
    """One model revision cut into windows. See the module docstring.

    `width` is the row width in elements, `wire_dtype` a key of `WIRE_DTYPES` (the backbone's compute
    dtype), `precisions` the allowed ones of `PRECISIONS`, `weighted` whether calls carry combine weights.
    `model` is a name for people, `revision` pins the exact bytes, `source` is "local" or a hub repository.
    """

    model: str
    revision: str
    source: str
    architecture: str
    files: tuple[PlanFile, ...]
    width: int
    wire_dtype: str
    precisions: tuple[str, ...]
    weighted: bool
    windows: tuple[Window, ...]
    layers: tuple[LayerRecipe, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return self.width * WIRE_DTYPES[self.wire_dtype]

    def layer(self, number: int) -> LayerRecipe:
        """The recipe of that layer. Raises `KeyError`."""
        for recipe in self.layers:
            if recipe.layer == number:
                return recipe
        raise KeyError(number)

    def window_layers(self, window: Window) -> tuple[LayerRecipe, ...]:
        """The MoE layers inside `window`."""
        return tuple(r for r in self.layers if window.layer_start <= r.layer < window.layer_end)

    def kept_bytes(self, window: Window, precision: str = "stored") -> int:
        """Bytes a node keeps in memory for `window` at `precision`.

        int8 keeps one byte a weight and one 4-byte scale a group of 128 inputs, int4 half a byte and one
        2-byte scale and one 2-byte minimum a group of 32 (kvasir_node.experts defines them bit for bit).
        """
        count = window.expert_end - window.expert_start
        total = 0
        for recipe in self.window_layers(window):
            per_expert = 0
            for tensor in recipe.tensors:
                elements = 1
                for dimension in tensor.shape:
                    elements *= dimension
                if precision == "stored":
                    continue
                if len(tensor.shape) != 2:
                    per_expert += 4 * elements
                elif precision == "bf16":
                    per_expert += 2 * elements
                elif precision == "int8":
                    per_expert += elements + 4 * tensor.shape[0] * -(-tensor.shape[1] // 128)
                elif precision == "int4":
                    per_expert += -(-elements // 2) + 4 * tensor.shape[0] * -(-tensor.shape[1] // 32)
                else:
                    raise KeyError(precision)
            if precision == "stored":
                per_expert = sum(source.nbytes for source in recipe.sources())
            total += count * per_expert
        return total

    def window_ranges(self, window: Window) -> tuple[ByteRange, ...]:
        """The window's bytes as sorted, disjoint, maximal ranges of the plan's files.

        Deterministic: market, backbone and node derive the same ranges from the same plan.
        """
        spans = sorted(
            source.locate(expert)
            for recipe in self.window_layers(window)
            for source in recipe.sources()
            for expert in range(window.expert_start, window.expert_end)
        )
        merged: list[ByteRange] = []
        for span in spans:
            if merged and merged[-1].file == span.file and span.start <= merged[-1].end:
                last = merged[-1]
                merged[-1] = ByteRange(last.file, last.start, max(last.end, span.end))
            else:
                merged.append(span)
        return tuple(merged)

    def window_chunks(self, window: Window) -> tuple[ByteRange, ...]:
        """`window_ranges` cut into chunks of at most `MAX_CHUNK_BYTES`, each hashed on its own."""
        return tuple(
            ByteRange(r.file, start, min(start + MAX_CHUNK_BYTES, r.end))
            for r in self.window_ranges(window)
            for start in range(r.start, r.end, MAX_CHUNK_BYTES)
        )


def sign_plan(plan: Plan, key: SigningKey) -> SignedDocument:
    """Sign a plan with a backbone's operating key."""
    return sign_document("plan", plan_fields(plan), key)


def open_plan(document: SignedDocument, signer: bytes) -> Plan:
    """Verify and parse a plan. Raises as `open_document` does, and `RemoteProtocolError` for bad fields."""
    return parse_plan(open_document(document, "plan", signer))


def plan_id(document: SignedDocument) -> PlanId:
    """The id of a signed plan."""
    return PlanId(document.digest)


def plan_fields(plan: Plan) -> dict[str, object]:
    """The canonical fields of a plan."""
    return {
        "model": plan.model,
        "revision": plan.revision,
        "source": plan.source,
        "architecture": plan.architecture,
        "files": [[file.name, file.size] for file in plan.files],
        "width": plan.width,
        "wire_dtype": plan.wire_dtype,
        "precisions": list(plan.precisions),
        "weighted": plan.weighted,
        "windows": [window.name for window in plan.windows],
        "layers": [
            {
                "layer": recipe.layer,
                "experts": recipe.experts,
                "top_k": recipe.top_k,
                "formula": {
                    "name": recipe.formula.name,
                    "activation": recipe.formula.activation,
                    "limit": recipe.formula.limit,
                    "alpha": recipe.formula.alpha,
                    "norm_eps": recipe.formula.norm_eps,
                },
                "tensors": [
                    {
                        "role": tensor.role,
                        "shape": list(tensor.shape),
                        "sources": [
                            {
                                "file": source.file,
                                "dtype": source.dtype,
                                "shape": list(source.shape),
                                "start": source.start,
                                "stride": source.stride,
                                "offsets": list(source.offsets),
                                "files": list(source.files),
                            }
                            for source in tensor.sources
                        ],
                        "ops": [list(op) for op in tensor.ops],
                    }
                    for tensor in recipe.tensors
                ],
            }
            for recipe in plan.layers
        ],
    }

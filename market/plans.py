"""The signed plan of one model: its windows, and for every expert tensor a closed recipe.

A recipe says which bytes of which safetensors file become which tensor of which expert, by a closed list
of steps that a node carries out on torch alone. The plan's id is the SHA-256 of its canonical body, so it
does not depend on who signed it.

Knows formats and their checks. Knows no torch and no transformers; executes nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NewType

from relay.errors import ConfigError, RemoteProtocolError
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
    "dequant_int4_packed",  # [group, symmetric]: compressed-tensors pack-quantized: packed, scales[, zeros]
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

        int8 keeps one byte a weight and one 4-byte scale a group of 128 inputs, int4 16 bytes, a
        2-byte scale and a 2-byte minimum a group of 32 (kvasir_node.numerics defines them bit for bit).
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
                    per_expert += 20 * tensor.shape[0] * -(-tensor.shape[1] // 32)
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


# --- reading plans that others made --------------------------------------------------------------------

MAX_FILES: Final = 10_000
MAX_LAYERS: Final = 4_096
MAX_EXPERTS: Final = 65_535
MAX_WINDOWS: Final = 100_000
MAX_WIDTH: Final = 1 << 20
MAX_FILE_BYTES: Final = 1 << 50
MAX_SOURCES: Final = 4
MAX_OPS: Final = 8
MAX_CHUNKS: Final = 1 << 20
MAX_RANGES: Final = 1 << 24
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*", re.ASCII)
_WORD: Final = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)


def _positive(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_WIDTH


def _not_negative(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_WIDTH


def _finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _boolean(value: object) -> bool:
    return type(value) is bool


OP_ARGUMENTS: Final[Mapping[str, tuple[Callable[[object], bool], ...]]] = {
    "transpose": (),
    "rows": (_not_negative, _positive, _positive),
    "dequant_fp8_block": (_positive, _positive),
    "dequant_mxfp4": (),
    "dequant_int4_packed": (_positive, _boolean),
    "add": (_finite,),
}
"""What the arguments of each step of `OPS` must be."""


def parse_plan(fields: Mapping[str, Any]) -> Plan:
    """Build a plan from the fields of its document, trusting none of them.

    Raises `RemoteProtocolError` unless every name is in its closed list, every size within its bound,
    every byte range inside its file, every window inside the layers and in no other window, and nothing
    appears twice.
    """
    files = _parse_files(_list(fields, "files", MAX_FILES))
    width = _integer(fields, "width", 1, MAX_WIDTH)
    layers = tuple(
        _parse_layer(_map(item, "layer"), files, width) for item in _list(fields, "layers", MAX_LAYERS)
    )
    numbers = [layer.layer for layer in layers]
    if numbers != sorted(set(numbers)):
        raise RemoteProtocolError("the plan's layers are not in rising order")
    if sum(layer.experts * sum(1 for _ in layer.sources()) for layer in layers) > MAX_RANGES:
        raise RemoteProtocolError(f"the plan names more than {MAX_RANGES} expert tensors")
    precisions = tuple(_list(fields, "precisions", len(PRECISIONS)))
    known = [precision for precision in PRECISIONS if precision in precisions]
    if not precisions or len(known) != len(precisions):
        raise RemoteProtocolError(f"the plan's precisions are not distinct ones of {', '.join(PRECISIONS)}")
    return Plan(
        model=_text(fields, "model"),
        revision=_text(fields, "revision"),
        source=_text(fields, "source"),
        architecture=_text(fields, "architecture"),
        files=files,
        width=width,
        wire_dtype=_choice(fields, "wire_dtype", WIRE_DTYPES),
        precisions=precisions,
        weighted=require(fields, "weighted", bool),
        windows=_parse_windows(_list(fields, "windows", MAX_WINDOWS), layers),
        layers=layers,
    )


def _parse_files(items: list[Any]) -> tuple[PlanFile, ...]:
    files = []
    for item in items:
        match item:
            case [str(name), int(size)] if 0 < size <= MAX_FILE_BYTES and len(name) <= 512:
                if not _FILE_NAME.fullmatch(name) or any(part.strip(".") == "" for part in name.split("/")):
                    raise RemoteProtocolError(f"the plan's file name {name!r} leaves the model's folder")
                files.append(PlanFile(name, size))
            case _:
                raise RemoteProtocolError("a file of the plan is not a name and a size")
    if len({file.name for file in files}) != len(files):
        raise RemoteProtocolError("the plan names a file twice")
    return tuple(files)


def _parse_windows(names: list[Any], layers: tuple[LayerRecipe, ...]) -> tuple[Window, ...]:
    windows = []
    for name in names:
        if not isinstance(name, str):
            raise RemoteProtocolError("a window's name is not a string")
        try:
            windows.append(Window.parse(name))
        except ConfigError as error:
            raise RemoteProtocolError(str(error)) from None
    taken: dict[int, list[tuple[int, int]]] = {layer.layer: [] for layer in layers}
    experts = {layer.layer: layer.experts for layer in layers}
    for window in windows:
        inside = [n for n in experts if window.layer_start <= n < window.layer_end]
        if not inside or any(window.expert_end > experts[n] for n in inside):
            raise RemoteProtocolError(f"window {window.name} is not inside the plan's layers")
        for number in inside:
            taken[number].append((window.expert_start, window.expert_end))
    for spans in taken.values():
        spans.sort()
        if any(start < end for (_, end), (start, _) in itertools.pairwise(spans)):
            raise RemoteProtocolError("two windows of the plan overlap")
    return tuple(windows)


def _parse_layer(fields: Mapping[str, Any], files: tuple[PlanFile, ...], width: int) -> LayerRecipe:
    experts = _integer(fields, "experts", 1, MAX_EXPERTS)
    tensors = tuple(
        _parse_tensor(_map(item, "tensor"), files, experts) for item in _list(fields, "tensors", len(ROLES))
    )
    _check_roles(tensors, width)
    return LayerRecipe(
        layer=_integer(fields, "layer", 0, MAX_EXPERTS),
        experts=experts,
        top_k=_integer(fields, "top_k", 1, experts),
        formula=_parse_formula(_map(fields.get("formula"), "formula")),
        tensors=tensors,
    )


def _check_roles(tensors: tuple[TensorRecipe, ...], width: int) -> None:
    """An expert is a gate (perhaps), an up and a down of matching shapes, with their biases and a norm."""
    shapes = {tensor.role: tensor.shape for tensor in tensors}
    if len(shapes) != len(tensors) or not {"up", "down"} <= shapes.keys() or len(shapes["up"]) != 2:
        raise RemoteProtocolError("an expert needs each tensor once, and an up and a down at least")
    inner = shapes["up"][0]
    expected = {
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
        "gate_bias": (inner,),
        "up_bias": (inner,),
        "down_bias": (width,),
        "norm": (width,),
    }
    for role, shape in shapes.items():
        if shape != expected[role]:
            raise RemoteProtocolError(f"the {role} of an expert has shape {shape}, expected {expected[role]}")


def _parse_formula(fields: Mapping[str, Any]) -> GateFormula:
    name, activation = (require(fields, field, str) for field in ("name", "activation"))
    if not (_WORD.fullmatch(name) and _WORD.fullmatch(activation)):
        raise RemoteProtocolError("the gate formula's name and activation are single words")
    limit, alpha, norm_eps = (_constant(fields, field) for field in ("limit", "alpha", "norm_eps"))
    return GateFormula(name, activation, limit, alpha, norm_eps)


def _constant(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and not _finite(value):
        raise RemoteProtocolError(f"the gate formula's {name} is not a finite number")
    return None if value is None else float(value)


def _parse_tensor(fields: Mapping[str, Any], files: tuple[PlanFile, ...], experts: int) -> TensorRecipe:
    sources = tuple(
        _parse_source(_map(item, "source"), files, experts) for item in _list(fields, "sources", MAX_SOURCES)
    )
    if not sources:
        raise RemoteProtocolError("a tensor of the plan has no source")
    return TensorRecipe(
        role=_choice(fields, "role", ROLES),
        shape=_shape(fields, minimum=1, maximum=2),
        sources=sources,
        ops=tuple(_parse_op(op) for op in _list(fields, "ops", MAX_OPS)),
    )


def _parse_op(op: object) -> tuple[Any, ...]:
    if not isinstance(op, list) or not op or not isinstance(op[0], str) or op[0] not in OP_ARGUMENTS:
        raise RemoteProtocolError(
            f"unknown recipe step {op!r:.80}: update this side (pip install --upgrade kvasir)"
        )
    name, *arguments = op
    checks = OP_ARGUMENTS[name]
    if len(checks) != len(arguments) or not all(
        check(value) for check, value in zip(checks, arguments, strict=True)
    ):
        raise RemoteProtocolError(f"recipe step {name!r} cannot have arguments {arguments!r:.80}")
    return tuple(op)


def _parse_source(fields: Mapping[str, Any], files: tuple[PlanFile, ...], experts: int) -> Source:
    source = Source(
        file=_integer(fields, "file", 0, len(files) - 1),
        dtype=_choice(fields, "dtype", STORED_DTYPES),
        shape=_shape(fields, minimum=0, maximum=4),
        start=_integer(fields, "start", 0, MAX_FILE_BYTES),
        stride=_integer(fields, "stride", 0, MAX_FILE_BYTES),
        offsets=_integers(fields, "offsets", experts, MAX_FILE_BYTES),
        files=_integers(fields, "files", experts, len(files) - 1),
    )
    if source.offsets and (source.start or source.stride):
        raise RemoteProtocolError("a source has both a stride and offsets")
    if source.files and not source.offsets:
        raise RemoteProtocolError("a source has a file an expert, and no offsets")
    if 0 < source.stride < source.nbytes:
        raise RemoteProtocolError("the experts of a source overlap")
    ends = (source.locate(expert) for expert in (range(experts) if source.offsets else (experts - 1,)))
    if any(span.end > files[span.file].size for span in ends):
        raise RemoteProtocolError("a source of the plan lies outside its file")
    return source


def _list(fields: Mapping[str, Any], name: str, maximum: int) -> list[Any]:
    value: list[Any] = require(fields, name, list)
    if len(value) > maximum:
        raise RemoteProtocolError(f"field {name!r} has {len(value)} items, at most {maximum} are allowed")
    return value


def _map(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"a {what} of the plan is not a map")
    return value


def _integer(fields: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int:
    value: int = require(fields, name, int)
    if not minimum <= value <= maximum:
        raise RemoteProtocolError(f"field {name!r} is {value}, not within {minimum} to {maximum}")
    return value


def _integers(fields: Mapping[str, Any], name: str, count: int, maximum: int) -> tuple[int, ...]:
    values = _list(fields, name, count)
    if values and (len(values) != count or not all(type(v) is int and 0 <= v <= maximum for v in values)):
        raise RemoteProtocolError(f"field {name!r} is not {count} integers within 0 to {maximum}")
    return tuple(values)


def _shape(fields: Mapping[str, Any], *, minimum: int, maximum: int) -> tuple[int, ...]:
    values = _list(fields, "shape", maximum)
    if len(values) < minimum or not all(_positive(value) for value in values):
        raise RemoteProtocolError(f"{values!r:.80} is not the shape of an expert's tensor")
    return tuple(values)


def _choice(fields: Mapping[str, Any], name: str, allowed: Mapping[str, int] | tuple[str, ...]) -> str:
    value: str = require(fields, name, str)
    if value not in allowed:
        raise RemoteProtocolError(f"{value!r:.80} is not a {name} that this version knows")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value: str = require(fields, name, str)
    if len(value) > 512 or not value.isprintable():
        raise RemoteProtocolError(f"field {name!r} is not a line of at most 512 printable characters")
    return value


# --- the hashes of a window ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowHashes:
    """SHA-256 (32 bytes) of every chunk of `Plan.window_chunks(window)`, in that order.

    A signed document of its own, made at the window's first claim: a plan takes seconds, its hashes minutes.
    """

    plan: PlanId
    window: Window
    chunks: tuple[bytes, ...]

    def check(self, plan: Plan) -> None:
        """Raise `RemoteProtocolError` unless there is one hash for each chunk of the window."""
        expected = len(plan.window_chunks(self.window))
        if self.window not in plan.windows or len(self.chunks) != expected:
            raise RemoteProtocolError(
                f"the hashes of {self.window.name} do not fit: {len(self.chunks)} for {expected} chunks"
            )


def sign_hashes(hashes: WindowHashes, key: SigningKey) -> SignedDocument:
    """Sign a window's hashes with a backbone's operating key, as kind "hashes"."""
    fields = {"plan": hashes.plan, "window": hashes.window.name, "chunks": list(hashes.chunks)}
    return sign_document("hashes", fields, key)


def open_hashes(document: SignedDocument, signer: bytes) -> WindowHashes:
    """Verify and parse a window's hashes. Raises as `open_plan` does."""
    fields = open_document(document, "hashes", signer)
    chunks = _list(fields, "chunks", MAX_CHUNKS)
    if not all(isinstance(chunk, bytes) and len(chunk) == 32 for chunk in chunks):
        raise RemoteProtocolError("a chunk's hash is not 32 bytes")
    try:
        window = Window.parse(require(fields, "window", str))
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None
    return WindowHashes(PlanId(require(fields, "plan", bytes, size=32)), window, tuple(chunks))

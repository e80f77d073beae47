"""A recipe executed: the stored bytes of one expert become its tensors, on torch alone.

The steps are the closed list of `market.plans.OPS`; anything else, a shape that does not come out as the
plan says, or a value that is not finite is refused by name. Structural steps (transpose, rows) are applied
at load and keep the stored dtype. A recipe that dequantises is kept in its stored form, small, and widened
when the expert runs.

Sources: fp8 blocks as DeepSeek-V3 stores them (weight times `weight_scale_inv`, one scale a block);
mxfp4 as the OCP Microscaling Formats specification 1.0 defines it (E2M1 values, E8M0 scales, groups of 32);
int4 as compressed-tensors "pack-quantized" stores it (eight values an int32, low bits first, offset 8, the
product rounded to the scales' dtype as that library does).

Knows bytes, recipes and torch. Knows no files, networks, formulas or precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from market.plans import OPS, ROLES, ByteRange, LayerRecipe, Source, TensorRecipe
from relay.errors import ConfigError

from .numerics import DenseMatrix, Matrix
from .tensors import from_buffer

Read = Callable[[ByteRange], bytes | bytearray | memoryview]
"""Reads bytes of the plan's files. The tensors may share the buffer's memory and keep it alive."""

TORCH_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
"""safetensors dtype -> torch dtype. E8M0 is kept as its exponent byte."""

_E2M1: Final = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
_DEQUANTISERS: Final = frozenset(name for name in OPS if name.startswith("dequant_"))
_VECTOR_ROLES: Final = frozenset(role for role in ROLES if role.endswith("_bias") or role == "norm")
_FLOATS: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class RecipeError(ConfigError):
    """A recipe that this version cannot carry out, or that its bytes do not fit. Names layer and role."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One recipe with the bytes it needs, not dequantised yet."""

    recipe: TensorRecipe
    sources: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """One expert's tensors, in one of two states.

    `matrices` has gate [I, W], up [I, W], down [W, I] in whatever representation they are kept, `vectors`
    the biases and the norm in fp32. `packed` is not empty while some matrices are in a quantised checkpoint
    form: `materialise` widens those.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]
    packed: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory; a tensor that serves two roles counts once."""
        kept = {
            (t.untyped_storage().data_ptr(), t.storage_offset(), t.nbytes)
            for stored in self.packed.values()
            for t in stored.sources
        }
        return (
            sum(matrix.nbytes for matrix in self.matrices.values())
            + sum(vector.nbytes for vector in self.vectors.values())
            + sum(size for _, _, size in kept)
        )


def check_recipe(recipe: LayerRecipe) -> None:
    """Refuse roles, steps and sources that this version does not know.

    Raises `RecipeError` naming layer, role and what is wrong; run before anything is downloaded.
    """
    roles = [tensor.role for tensor in recipe.tensors]
    if len(set(roles)) != len(roles) or not {"up", "down"} <= set(roles):
        raise RecipeError(f"layer {recipe.layer}: an expert needs up and down once each, not {roles}")
    for tensor in recipe.tensors:
        where = f"layer {recipe.layer}, {tensor.role!r}"
        if tensor.role not in ROLES:
            raise RecipeError(f"{where}: unknown role; update kvasir")
        if len(tensor.shape) != (1 if tensor.role in _VECTOR_ROLES else 2):
            raise RecipeError(f"{where}: shape {tensor.shape} has the wrong number of dimensions")
        if not tensor.sources or any(source.dtype not in TORCH_DTYPES for source in tensor.sources):
            raise RecipeError(f"{where}: no sources, or of an unknown dtype")
        for position, op in enumerate(tensor.ops):
            _check_op(op, position, len(tensor.sources), where)


def load_expert(recipe: LayerRecipe, expert: int, read: Read) -> ExpertTensors:
    """Carry out `recipe` for one expert, in the stored precision.

    Dense matrices keep their stored dtype and share `read`'s memory where a recipe only slices; quantised
    ones stay packed. Raises `RecipeError`; what `read` raises passes through.
    """
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Tensor] = {}
    packed: dict[str, StoredTensor] = {}
    loaded: dict[Source, Tensor] = {}
    for tensor in recipe.tensors:
        where = f"layer {recipe.layer}, expert {expert}, {tensor.role!r}"
        for source in tensor.sources:
            if source not in loaded:
                loaded[source] = _load_source(source, expert, read, where)
        stored = StoredTensor(tensor, tuple(loaded[source] for source in tensor.sources))
        if tensor.role in _VECTOR_ROLES:
            vectors[tensor.role] = _finite(_execute(stored, where, {}).float().contiguous(), where)
        elif any(op[0] in _DEQUANTISERS for op in tensor.ops):
            packed[tensor.role] = stored
        else:
            matrices[tensor.role] = DenseMatrix(_finite(_execute(stored, where, {}).contiguous(), where))
    tensors = ExpertTensors(matrices, vectors, packed)
    if packed:  # dequantise once now, so that a wrong recipe or a damaged file shows at load
        for role, matrix in materialise(tensors).matrices.items():
            if role in packed:
                where = f"layer {recipe.layer}, expert {expert}, {role!r}"
                _finite(next(matrix.parts()), where)
    return tensors


def materialise(tensors: ExpertTensors) -> ExpertTensors:
    """The same expert with every packed matrix widened to dense; itself if none is packed.

    Roles that share their first steps (a fused, quantised gate_up) share the work. Raises `RecipeError`.
    """
    if not tensors.packed:
        return tensors
    matrices = dict(tensors.matrices)
    memo: dict[Any, Tensor] = {}
    for role, stored in tensors.packed.items():
        matrices[role] = DenseMatrix(_execute(stored, repr(role), memo).contiguous())
    return ExpertTensors(matrices, tensors.vectors, {})


# --- steps -------------------------------------------------------------------------------------------


def _check_op(op: tuple[Any, ...], position: int, sources: int, where: str) -> None:
    match op:
        case ("transpose",):
            return
        case ("rows", int(start), int(stop), int(step)) if 0 <= start < stop and step >= 1:
            return
        case ("add", int() | float()):
            return
        case ("dequant_fp8_block", int(rows), int(columns)) if rows >= 1 and columns >= 1:
            needed = {2}
        case ("dequant_mxfp4",):
            needed = {2}
        case ("dequant_int4_packed", int(group), bool(symmetric)) if group >= 1:
            needed = {2} if symmetric else {3}
        case _:
            raise RecipeError(f"{where}: step {op!r} is not one this version carries out; update kvasir")
    if sources not in needed:
        raise RecipeError(f"{where}: step {op[0]} with {sources} sources")
    if position != 0:
        raise RecipeError(f"{where}: step {op[0]} must come first")


def _load_source(source: Source, expert: int, read: Read, where: str) -> Tensor:
    try:
        span = source.locate(expert)
    except IndexError:
        raise RecipeError(f"{where}: the plan has no offset for this expert") from None
    data = memoryview(read(span)).cast("B")
    if len(data) != span.nbytes:
        raise RecipeError(f"{where}: read {len(data)} bytes where the plan says {span.nbytes}")
    if not span.nbytes:
        raise RecipeError(f"{where}: an empty tensor")
    return from_buffer(data, TORCH_DTYPES[source.dtype]).view(source.shape)


def _execute(stored: StoredTensor, where: str, memo: dict[Any, Tensor]) -> Tensor:
    """Run the steps in order; `memo` holds what an equal prefix of steps on equal sources gave."""
    recipe = stored.recipe
    value = stored.sources[0]
    for index, op in enumerate(recipe.ops):
        key = (recipe.sources, recipe.ops[: index + 1])
        if key not in memo:
            try:
                memo[key] = _step(op, value, stored.sources)
            except (RuntimeError, IndexError, ValueError) as error:
                raise RecipeError(f"{where}: step {op!r} does not fit the stored shapes: {error}") from None
        value = memo[key]
    if value.dtype not in _FLOATS:
        raise RecipeError(f"{where}: {value.dtype} weights need a dequantising step")
    if tuple(value.shape) != tuple(recipe.shape):
        raise RecipeError(f"{where}: came out as {tuple(value.shape)}, the plan says {recipe.shape}")
    return value


def _step(op: tuple[Any, ...], value: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    match op:
        case ("transpose",):
            return value.t()
        case ("rows", start, stop, step):
            if stop > value.shape[0]:
                raise IndexError(f"it reaches past {value.shape[0]} rows")
            return value[start:stop:step]
        case ("add", constant):
            return value.float().add(float(constant))
        case ("dequant_fp8_block", rows, columns):
            return _dequant_fp8_block(value, sources[1], rows, columns)
        case ("dequant_mxfp4",):
            return _dequant_mxfp4(value, sources[1])
        case ("dequant_int4_packed", group, True):
            return _dequant_int4(value, sources[1], None, group)
        case ("dequant_int4_packed", group, False):
            return _dequant_int4(value, sources[1], sources[2], group)
    raise RecipeError(f"step {op!r} is not one this version carries out; update kvasir")


def _exponents(scales: Tensor) -> Tensor:
    """E8M0 bytes as fp32 powers of two; other scales widened to fp32."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.to(torch.float32) - 127.0)
    return scales.to(torch.float32)


def _dequant_fp8_block(values: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """[out, in] fp8 times one scale a block [rows, columns], the last ones may be smaller; fp32."""
    height, width = values.shape
    grid = _exponents(scales).reshape(-(-height // rows), -(-width // columns))
    spread = grid.repeat_interleave(columns, dim=1)[:, :width]
    out = values.to(torch.float32)
    for block in range(grid.shape[0]):
        out[block * rows : (block + 1) * rows].mul_(spread[block])
    return out


def _dequant_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [out, groups, 16] or [out, in / 2], low bits first, times 2^(scale - 127); fp32 [out, in]."""
    packed = blocks.view(torch.uint8).reshape(blocks.shape[0], -1)
    table = _E2M1.to(packed.device)
    low = table[(packed & 0xF).long()]
    high = table[(packed >> 4).long()]
    values = torch.stack((low, high), dim=-1).view(blocks.shape[0], -1, 32)
    exponents = scales.view(torch.uint8).reshape(blocks.shape[0], -1).to(torch.int32) - 127
    return torch.ldexp(values, exponents.unsqueeze(-1)).view(blocks.shape[0], -1)


def _unpack_int32(packed: Tensor, width: int) -> Tensor:
    """int32 [rows, words] -> [rows, width] values 0 to 15, eight a word, low bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = (packed.unsqueeze(-1) >> shifts) & 0xF
    return values.view(packed.shape[0], -1)[:, :width]


def _dequant_int4(packed: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Tensor:
    """compressed-tensors pack-quantized: packed [out, in / 8], scales [out, groups]; in the scales' dtype.

    `zeros` [out / 8, groups] is packed along the rows; without it the zero is 8.
    """
    rows, groups = scales.shape
    width = groups * group
    if width > packed.shape[1] * 8:
        raise IndexError(f"{groups} groups of {group} inputs are more than {packed.shape[1]} words hold")
    values = (_unpack_int32(packed, width) - 8).to(scales.dtype).view(rows, groups, group)
    if zeros is not None:
        offsets = _unpack_int32(zeros.t().contiguous(), rows).t() - 8
        values = values - offsets.to(scales.dtype).unsqueeze(-1)
    return (values * scales.unsqueeze(-1)).view(rows, width)


def _finite(tensor: Tensor, where: str) -> Tensor:
    # NaN passes on to both extremes; far faster than looking at each element.
    if tensor.numel() and not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor)):
        raise RecipeError(f"{where}: the weights hold NaN or infinity: the checkpoint is damaged")
    return tensor

"""The C core as a kernel: checked at start, bound to experts, run on rows.

All instruction sets give the same bits, so the family is one name, "c1"; the self-check holds each process
to it by a digest of what it computes for made-up matrices. Rows are used as they are, in fp32, beside fp32
and bf16 weights, and as int16 in blocks of 128 beside int8 and int4 ones, whose products are then sums of
exact integers (`csrc/kvasir.h`): d of about 1e-9 against fp32 rows.

Knows experts' tensors and formulas. Knows no plans and no windows.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog
import torch
from torch import Tensor

from market.plans import GateFormula

from ..ffn import MARGIN, Ffn
from ..formulas import apply_formula, has_gate
from ..numerics import DenseMatrix, Int4Matrix, Int8Matrix, Matrix
from ..recipes import ExpertTensors
from .build import BUILD_TIMEOUT_S, BuildError, build, cache_folder, find_compiler, usable
from .dense import DenseProduct, RowNorm, combine, rope
from .native import ExpertHeader, Isa, Library
from .packing import ROW_KINDS, PackedMatrix

log = structlog.get_logger("node")

FAMILY: Final = "c1"
"""The reduction order's name in a numerics class; another order is another name."""

ACTIVATIONS: Final = {"stored": "none", "bf16": "none", "int8": "int16", "int4": "int16"}
"""Precision -> how rows are quantised before a product."""

GROUP_ROWS: Final = 64
"""Rows of one expert that the C core takes at once (csrc/kvasir.h, ROWS)."""

SELF_CHECK: Final = "37e8e35d867176452ca715bfd140cb4c0e49b0f2641f12fde18b45aeb9ad7f50"
"""SHA-256 of what `_digest` computes: the same bits on every machine, instruction set and compiler."""


class CpuKernel:
    """Experts on this CPU through the C core; a `kvasir_node.ffn.Kernel`. Made by `load` or `open_kernel`.

    `isa` is the instruction set in use and `threads` how many split a product's outputs; neither changes a
    bit of the results. Rows and results are fp32, contiguous.
    """

    family = FAMILY

    def __init__(self, library: Library, isa: Isa, precision: str = "stored", *, threads: int = 1) -> None:
        self.activations = ACTIVATIONS[precision]
        self.precision = precision
        self.isa = isa
        self.threads = threads
        self.library = library
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads - 1, "kernel") if threads > 1 else None

    def pack(self, matrix: Matrix) -> PackedMatrix | None:
        """`matrix` in the order in which it is read here; None where it is of no kind that this covers."""
        return PackedMatrix.pack(self.library, matrix)

    def linear(self, rows: Tensor, matrix: PackedMatrix) -> Tensor:
        """rows [n, in] @ matrix.T as fp32 [n, out]. A row's result does not depend on the others."""
        out = torch.empty(rows.shape[0], matrix.shape[0], dtype=torch.float32)
        self._linear(rows, matrix, out)
        return out

    def ffn(self, rows: Tensor, gate: PackedMatrix, up: PackedMatrix, down: PackedMatrix) -> Tensor:
        """down @ (silu(gate @ x) * (up @ x)) for rows [n, W] as fp32 [n, W]."""
        if self.threads == 1:
            return FusedFfn(self, gate, up, down)(rows)
        hidden, other = self.linear(rows, gate), self.linear(rows, up)
        self.library.silu_mul(self.isa.number, hidden.data_ptr(), other.data_ptr(), hidden.numel())
        return self.linear(hidden, down)

    def bind(self, tensors: ExpertTensors, formula: GateFormula) -> Ffn | None:
        """A function that runs this expert, or None for a form not covered: see `kvasir_node.ffn.Kernel`.

        Covered are all formulas, with biases or without, over fp32, bf16, int8 and int4 matrices; not a
        norm after the expert, fp16, or a checkpoint's own quantised form. Keeps a packed copy of the
        matrices and none of `tensors` but its vectors.
        """
        if tensors.packed or formula.norm_eps is not None:
            return None
        matrices: dict[str, PackedMatrix] = {}
        for role, matrix in tensors.matrices.items():
            packed = self.pack(matrix)
            if packed is None:
                return None
            matrices[role] = packed
        plain = formula.name == "swiglu" and formula.activation == "silu" and not tensors.vectors
        if plain and self.threads == 1:
            return FusedFfn(self, matrices["gate"], matrices["up"], matrices["down"])
        if plain:
            return lambda rows: self.ffn(rows, matrices["gate"], matrices["up"], matrices["down"])
        return self._composed(matrices, dict(tensors.vectors), formula)

    def _composed(
        self, matrices: dict[str, PackedMatrix], vectors: dict[str, Tensor], formula: GateFormula
    ) -> Ffn:
        """Products here, the formula in torch: in buffers with a margin, as `kvasir_node.ffn` explains."""

        def product(rows: Tensor, role: str) -> Tensor:
            count, height = rows.shape[0], matrices[role].shape[0]
            flat = torch.zeros(count * height + MARGIN, dtype=torch.float32)
            out = flat[: count * height].view(count, height)
            self._linear(rows, matrices[role], out)
            bias = vectors.get(f"{role}_bias")
            if bias is not None:
                out.add_(bias)
            return flat

        def run(rows: Tensor) -> Tensor:
            up = product(rows, "up")
            gate = product(rows, "gate") if has_gate(formula) else None
            inner = matrices["up"].shape[0]
            hidden = apply_formula(formula, gate, up)[: rows.shape[0] * inner].view(rows.shape[0], inner)
            width = matrices["down"].shape[0]
            return product(hidden, "down")[: rows.shape[0] * width].view(rows.shape[0], width)

        return run

    def _linear(self, rows: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """`out` [n, out], contiguous, = rows @ matrix.T; the panels split among the threads."""
        _check_rows(rows, matrix.shape[1])
        size = self.library.linear_scratch(ctypes.addressof(matrix.header), rows.shape[0])

        def some(first: int, last: int) -> None:
            self.library.linear(
                self.isa.number, ctypes.addressof(matrix.header), rows.data_ptr(), matrix.shape[1],
                rows.shape[0], out.data_ptr(), matrix.shape[0], first, last, self.scratch(size),
            )  # fmt: skip

        panels, threads = matrix.panels, self.threads
        cuts = [panels * part // threads for part in range(threads + 1)]
        if self._pool is None:
            return some(0, panels)
        others = [self._pool.submit(some, *cut) for cut in itertools.pairwise(cuts[1:])]
        some(cuts[0], cuts[1])
        for other in others:
            other.result()

    def address(self, ffn: Ffn) -> int | None:
        """Where the C core finds an expert that was bound here, or None if it does not run as a whole."""
        return ffn.address if isinstance(ffn, FusedFfn) and ffn.library is self.library else None

    def group_scratch(self, experts: Sequence[int]) -> int:
        """The scratch that `run_rows` needs for any of these experts, in bytes."""
        pointers = array("Q", experts)
        return int(self.library.group_scratch(pointers.buffer_info()[0], len(pointers), GROUP_ROWS))

    def run_rows(
        self,
        experts: Sequence[int],
        sizes: Sequence[int],
        rows: Sequence[int],
        outputs: Sequence[int],
        kinds: tuple[int, int],
        scratch: int,
    ) -> None:
        """Some experts, each on rows of its own, in one call of the C core: the bits are those of `bind`'s.

        `experts` are addresses (`address`), `sizes` how many rows each has; `rows` and `outputs` the
        addresses of every row, expert after expert, and of where its output goes; `kinds` the kinds of rows
        and outputs (`ROW_KINDS`), `scratch` the bytes that `group_scratch` says. All must stay alive.
        """
        pointers, counts = array("Q", experts), array("i", sizes)
        sources, targets = array("Q", rows), array("Q", outputs)
        assert len(sources) == len(targets) == sum(counts)
        self.library.group(
            self.isa.number, pointers.buffer_info()[0], counts.buffer_info()[0], len(pointers),
            sources.buffer_info()[0], targets.buffer_info()[0], *kinds, self.scratch(scratch),
        )  # fmt: skip

    def all_within(
        self,
        rows: Tensor,
        outputs: Tensor,
        low: float,
        high: float,
        *,
        each: int = 0,
        row_of: Sequence[int] = (),
    ) -> bool:
        """Whether all outputs [m, W] are finite and `low` to `high` times as long as their rows [n, W].

        Both contiguous and of one dtype of `ROW_KINDS`. Output o belongs to row o // `each`, or to
        `row_of[o]` where `each` is 0. Sizes as root of the sum of squares, in fp32.
        """
        count, width = outputs.shape
        owners = None if each else array("i", row_of)
        outside = self.library.outside(
            self.isa.number, ROW_KINDS[rows.dtype], rows.data_ptr(),
            None if owners is None else owners.buffer_info()[0], each or 1,
            outputs.data_ptr(), count, width, low, high,
        )  # fmt: skip
        return not outside

    def scratch(self, size: int) -> int:
        """The address of `size` bytes that this thread reuses."""
        kept: Tensor | None = getattr(self._local, "bytes", None)
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):
                kept = torch.empty(size, dtype=torch.uint8)
            self._local.bytes = kept
        return kept.data_ptr()


class FusedFfn:
    """One expert's whole gated FFN in one call of the C core, on one thread."""

    def __init__(self, kernel: CpuKernel, gate: PackedMatrix, up: PackedMatrix, down: PackedMatrix) -> None:
        assert gate.shape == up.shape == down.shape[::-1], "gate and up [I, W], down [W, I]"
        self._kernel = kernel
        self._matrices = (gate, up, down)  # their memory is read by address
        self._header = ExpertHeader(gate.header, up.header, down.header)
        self.address = ctypes.addressof(self._header)
        self.library = kernel.library
        self._width = down.shape[0]

    def __call__(self, rows: Tensor) -> Tensor:
        """fp32 rows [n, W], contiguous -> fp32 rows [n, W]."""
        _check_rows(rows, self._width)
        count, library = rows.shape[0], self.library
        out = torch.empty(count, self._width, dtype=torch.float32)
        scratch = self._kernel.scratch(library.ffn_scratch(self.address, count))
        library.ffn(self._kernel.isa.number, self.address, rows.data_ptr(), count, out.data_ptr(), scratch)
        return out


def _check_rows(rows: Tensor, width: int) -> None:
    """The C core reads by address: rows other than contiguous fp32 [n, width] are the caller's fault."""
    if rows.dim() != 2 or rows.shape[1] != width or rows.dtype != torch.float32 or not rows.is_contiguous():
        raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, wanted contiguous fp32 [n, {width}]")


@functools.cache
def load(precision: str = "stored") -> CpuKernel | None:
    """The kernel of this process for a precision, built if it has to be, or None with one log line.

    Blocks for some seconds at a machine's first call: run it off the loop. The answer is kept.
    """
    global _loaded
    found = _shared()
    kernel = None if found is None else CpuKernel(found[0], found[1], precision)
    _loaded = kernel or _loaded
    return kernel


_loaded: CpuKernel | None = None


def loaded() -> CpuKernel | None:
    """A kernel of this process if `load` has found one before; never blocks."""
    return _loaded


@functools.cache
def _shared() -> tuple[Library, Isa] | None:
    kernel = open_kernel()
    return None if kernel is None else (kernel.library, kernel.isa)


def open_kernel(
    precision: str = "stored",
    *,
    folder: Path | None = None,
    compiler: str | None = None,
    isa: str | None = None,
    threads: int = 1,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> CpuKernel | None:
    """Build, load and check the C core; None, with one log line, where that does not work.

    `folder` is where libraries are kept (None: the user's cache folder), `compiler` the C compiler's path
    (None: the first on the path), `isa` an instruction set by name (None: the fastest that passes the
    self-check).
    """
    started = time.perf_counter()
    try:
        library = _open_library(folder, compiler, timeout_s)
        kernel = _checked(library, precision, isa, threads)
    except (BuildError, OSError) as error:
        log.info("kernel.absent", reason=str(error), instead="torch")
        return None
    log.info(
        "kernel.loaded", family=FAMILY, isa=kernel.isa.name, seconds=round(time.perf_counter() - started, 2)
    )
    return kernel


def _open_library(folder: Path | None, compiler: str | None, timeout_s: float) -> Library:
    """The library from `folder`. None: from the user's cache folder; without a usable one, built anew."""
    found = compiler or find_compiler()
    if found is None:
        raise BuildError("no C compiler (cc, gcc or clang) on the path")
    if folder is None:
        folder = cache_folder()
        if folder is None or not usable(folder):
            with tempfile.TemporaryDirectory(prefix="kvasir-kernels-", ignore_cleanup_errors=True) as name:
                return Library(build(Path(name), found, timeout_s=timeout_s))
    return Library(build(folder, found, timeout_s=timeout_s))


def _checked(library: Library, precision: str, isa: str | None, threads: int) -> CpuKernel:
    """A kernel on the fastest instruction set (or the one named) that passes the self-check."""
    tried = []
    for candidate in library.isas(slow=isa is not None):
        if isa not in (None, candidate.name):
            continue
        kernel = CpuKernel(library, candidate, precision, threads=threads)
        if _digest(kernel) == SELF_CHECK and _groups_agree(kernel):
            return kernel
        tried.append(candidate.name)
    if tried:
        raise BuildError(f"the self-check failed on {', '.join(tried)}")
    raise BuildError(
        f"this CPU does not run {isa or 'any instruction set of the library with fused multiply-add'}"
    )


# --- the self-check ------------------------------------------------------------------------------------


def _digest(kernel: CpuKernel) -> str:
    """SHA-256 of outputs for made-up matrices of every kind: all tile sizes, short blocks, padded panels."""
    digest = hashlib.sha256()
    for out, width in ((40, 203), (7, 33)):
        for kind in _CHECK_KINDS.values():
            gate, up = (kernel.pack(kind(out, width, seed)) for seed in (1, 2))
            down = kernel.pack(kind(width, out, 3))
            assert gate is not None
            assert up is not None
            assert down is not None
            rows = _noise((15, width), 4)
            for result in (kernel.linear(rows, gate), kernel.ffn(rows, gate, up, down)):
                digest.update(result.numpy().tobytes())
        for dtype in ROW_KINDS:
            for result in _dense_results(kernel, dtype, out, width):
                digest.update(result.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _dense_results(kernel: CpuKernel, dtype: torch.dtype, out: int, width: int) -> Iterator[Tensor]:
    """A product without and with a bias, a norm, a weighted sum, and a turn."""
    rows, weight = _noise((15, width), 4).to(dtype), _noise((out, width), 7).to(dtype)
    yield DenseProduct(kernel, weight)(rows)
    yield DenseProduct(kernel, weight, weight[:, 0])(rows)
    yield DenseProduct(kernel, weight / 3.0)(rows)
    yield RowNorm(kernel, weight[0], 1e-6)(rows)
    summed = torch.empty(5, width, dtype=dtype)
    combine(kernel, rows.view(5, 3, width), _noise((5, 3), 8), summed)
    yield summed
    turned = width // 4 * 2
    cosine, sine = (part.contiguous() for part in rows[:10, :turned].split(5))
    yield rope(kernel, rows.view(5, 3, width), cosine, sine)


def _groups_agree(kernel: CpuKernel) -> bool:
    """Whether experts run together, rows and outputs in bf16, give the bits of each alone."""
    packed = [kernel.pack(DenseMatrix(_noise(shape, 5))) for shape in ((24, 40), (24, 40), (40, 24))]
    gate, up, down = (matrix for matrix in packed if matrix is not None)
    ffn = FusedFfn(CpuKernel(kernel.library, kernel.isa), gate, up, down)
    rows = _noise((70, 40), 6).to(torch.bfloat16)
    outputs = torch.zeros(72, 40, dtype=torch.bfloat16)
    kind, places = ROW_KINDS[torch.bfloat16], [*range(70), 3, 69]
    kernel.run_rows(
        [ffn.address, ffn.address], [70, 2], [rows.data_ptr() + 80 * place for place in places],
        [outputs.data_ptr() + 80 * place for place in range(72)], (kind, kind),
        kernel.group_scratch([ffn.address]),
    )  # fmt: skip
    return torch.equal(outputs, ffn(rows.float()).to(torch.bfloat16)[places])


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32 multiples of 1/64 in [-2, 2), by integer arithmetic alone."""
    return (_integers(shape, seed, 256) - 128).to(torch.float32) / 64.0


def _integers(shape: tuple[int, ...], seed: int, below: int) -> Tensor:
    """int64 in [0, below)."""
    state = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) * 2654435761 + seed * 40503
    for _ in range(2):
        state = ((state ^ (state >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return (state >> 7).remainder(below).view(shape)


def _check_int8(out: int, width: int, seed: int) -> Matrix:
    scale = _noise((out, -(-width // 128)), seed + 20).abs() / 64.0
    return Int8Matrix((_integers((out, width), seed, 255) - 127).to(torch.int8), scale)


def _check_int4(out: int, width: int, seed: int) -> Matrix:
    groups = -(-width // 32)
    values = _integers((out, groups * 16), seed, 256).to(torch.uint8)
    scale = (_noise((out, groups), seed + 20).abs() / 16.0).to(torch.bfloat16)
    return Int4Matrix(values, scale, _noise((out, groups), seed + 40).to(torch.bfloat16), width)


_CHECK_KINDS: Final[dict[str, Callable[[int, int, int], Matrix]]] = {
    "fp32": lambda out, width, seed: DenseMatrix(_noise((out, width), seed)),
    "bf16": lambda out, width, seed: DenseMatrix(_noise((out, width), seed).to(torch.bfloat16)),
    "int8": _check_int8,
    "int4": _check_int4,
}

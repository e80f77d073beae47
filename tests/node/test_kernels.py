"""The C core: right, the same bits whatever the batch, instruction set or threads; absent without harm."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir_node.execution import check_batch_invariance, choose_execution, numerics_class
from kvasir_node.experts import WindowExperts
from kvasir_node.ffn import TORCH
from kvasir_node.kernels import ROW_KINDS, CpuKernel, PackedMatrix, load, open_kernel
from kvasir_node.kernels.build import build, cache_folder, find_compiler, usable
from kvasir_node.kernels.cpu import _digest
from kvasir_node.kernels.dense import DenseProduct, RowNorm, combine, rope
from kvasir_node.kernels.native import Library
from kvasir_node.kernels.operators import operators
from kvasir_node.numerics import DenseMatrix, Matrix, quantise_int4, quantise_int8, to_fp32
from kvasir_node.precision import quantise
from kvasir_node.recipes import ExpertTensors
from kvasir_node.residual import residual
from market.plans import GateFormula

from ..support.experts import SWIGLU, tiny_plan

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")

KINDS = ("fp32", "bf16", "int8", "int4")
PRECISIONS = {"fp32": "stored", "bf16": "bf16", "int8": "int8", "int4": "int4"}
SHAPES = ((1, 1), (33, 31), (40, 203), (64, 256), (96, 129), (130, 640))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library in it, copied from the user's: other tests build it there anyway."""
    compiler, users = find_compiler(), cache_folder()
    assert compiler is not None
    folder = tmp_path_factory.mktemp("kernels") / "cache"
    if users is None or not usable(users):
        return build(folder, compiler).parent
    folder.mkdir(mode=0o700)
    made = build(users, compiler)
    for path in users.glob(f"{made.stem}*"):  # with its digest
        shutil.copy2(path, folder)
    return folder


@pytest.fixture(scope="module")
def library(built: Path) -> Library:
    compiler = find_compiler()
    assert compiler is not None
    return Library(build(built, compiler))


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A copy of it, to do with as one likes."""
    return shutil.copytree(built, tmp_path / "cache")


@pytest.fixture(scope="module")
def kernels(library: Library) -> list[CpuKernel]:
    """One on every instruction set of this machine, and one on two threads."""
    found = [CpuKernel(library, isa) for isa in library.isas(slow=True)]
    return [*found, CpuKernel(library, library.isas(slow=True)[0], threads=2)]


def matrix_of(kind: str, weights: Tensor) -> Matrix:
    if kind == "int8":
        return quantise_int8(weights)
    if kind == "int4":
        return quantise_int4(weights)
    return DenseMatrix(weights if kind == "fp32" else weights.to(torch.bfloat16))


def packed(kernel: CpuKernel, matrix: Matrix) -> PackedMatrix:
    found = kernel.pack(matrix)
    assert found is not None
    return found


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_undone_bit_for_bit(kernels: list[CpuKernel], kind: str, shape: tuple[int, int]) -> None:
    matrix = matrix_of(kind, noise(*shape))
    there = packed(kernels[0], matrix)
    assert there.shape == shape
    for before, after in zip(matrix.parts(), there.parts(), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    for start, stop in ((0, shape[0]), (shape[0] // 2, shape[0]), (shape[0] // 3, shape[0] // 2 + 1)):
        got, wanted = torch.empty(2, stop - start, shape[1]).unbind()
        there.fill(start, stop, got)
        matrix.fill(start, stop, wanted)
        assert torch.equal(got, wanted)
    assert kernels[0].pack(there) is there


@pytest.mark.parametrize(
    ("kind", "limit"), [("fp32", 1e-12), ("bf16", 1e-12), ("int8", 1e-9), ("int4", 1e-9)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_agree_with_exact_ones_of_the_same_weights(
    kernels: list[CpuKernel], kind: str, limit: float, shape: tuple[int, int]
) -> None:
    matrix = matrix_of(kind, noise(*shape))
    rows = noise(9, shape[1], seed=1)
    exact = rows.double() @ to_fp32(matrix).double().T
    got = kernels[0].linear(rows, packed(kernels[0], matrix))
    assert float(residual(got.flatten()[None], exact.float().flatten()[None]).max()) <= limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_on_neither_batch_nor_instruction_set_nor_threads(
    kernels: list[CpuKernel], kind: str, shape: tuple[int, int]
) -> None:
    matrix = matrix_of(kind, noise(*shape))
    rows = noise(70, shape[1], seed=1)
    whole = kernels[0].linear(rows, packed(kernels[0], matrix))
    for kernel in kernels:
        there = packed(kernel, matrix)
        assert torch.equal(kernel.linear(rows, there), whole), kernel.isa
        for start, count in ((0, 1), (5, 1), (69, 1), (3, 2), (66, 3), (1, 4), (8, 15), (6, 64)):
            part = kernel.linear(rows[start : start + count].contiguous(), there)
            assert torch.equal(part, whole[start : start + count]), (kernel.isa, start, count)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 70),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 1000),
)
def test_any_shape_gives_the_same_bits_everywhere(
    kernels: list[CpuKernel], kind: str, out: int, width: int, count: int, seed: int
) -> None:
    matrix = matrix_of(kind, noise(out, width, seed=seed) * 10.0 ** (seed % 7 - 3))
    rows = noise(count, width, seed=seed + 1) * 10.0 ** (seed % 5 - 2)
    results = [kernel.linear(rows, packed(kernel, matrix)) for kernel in kernels]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_ffn_is_its_parts(kernels: list[CpuKernel], kind: str) -> None:
    gate, up, down = (
        matrix_of(kind, noise(*shape, seed=shape[0])) for shape in ((72, 200), (72, 200), (200, 72))
    )
    rows = noise(70, 200)
    first = kernels[0]
    whole = first.ffn(rows, *(packed(first, matrix) for matrix in (gate, up, down)))
    hidden = torch.nn.functional.silu(first.linear(rows, packed(first, gate)))
    hidden = hidden * first.linear(rows, packed(first, up))
    parts = first.linear(hidden, packed(first, down))
    # Another exp and, beside quantised weights, another rounding of a value or two of `hidden`.
    assert float(residual(whole, parts).max()) < 1e-9
    for kernel in kernels:
        matrices = [packed(kernel, matrix) for matrix in (gate, up, down)]
        assert torch.equal(kernel.ffn(rows, *matrices), whole), kernel.isa
        for index in (0, 33, 69):
            assert torch.equal(kernel.ffn(rows[index : index + 1], *matrices), whole[index : index + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_run_together_where_rows_lie_have_the_bits_of_each_alone(
    kernels: list[CpuKernel], kind: str
) -> None:
    for kernel in kernels[:-1]:  # the last one splits products among threads
        experts = []
        for seed in range(3):
            shapes = ((72, 200), (72, 200), (200, 72))
            tensors = {
                role: matrix_of(kind, noise(*shape, seed=seed + number))
                for number, (role, shape) in enumerate(zip(("gate", "up", "down"), shapes, strict=True))
            }
            ffn = kernel.bind(ExpertTensors(tensors, {}, {}), SWIGLU)
            assert ffn is not None
            experts.append(ffn)
        addresses = [address for ffn in experts if (address := kernel.address(ffn)) is not None]
        sizes, places = [1, 70, 3], [2, *range(70), 5, 5, 9]
        for dtype in (torch.float32, torch.bfloat16):
            rows, outputs = noise(70, 200).to(dtype), torch.zeros(74, 200, dtype=dtype)
            step, code = rows.element_size() * 200, ROW_KINDS[dtype]
            kernel.run_rows(
                addresses,
                sizes,
                [rows.data_ptr() + step * place for place in places],
                [outputs.data_ptr() + step * place for place in range(74)],
                (code, code),
                kernel.group_scratch(addresses),
            )
            start = 0
            for ffn, size in zip(experts, sizes, strict=True):
                some = places[start : start + size]
                alone = ffn(rows[some].float()).to(dtype)
                assert torch.equal(outputs[start : start + size], alone), kernel.isa
                start += size


def test_what_another_way_of_running_bound_has_no_address(kernels: list[CpuKernel]) -> None:
    assert kernels[0].address(lambda rows: rows) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_out_of_bounds_or_not_finite_are_seen(kernels: list[CpuKernel], dtype: torch.dtype) -> None:
    rows = noise(3, 203).to(dtype)
    sizes = rows.float().norm(dim=-1)
    outputs = (rows[[0, 0, 1, 1, 2, 2]] * 2).contiguous()
    for kernel in kernels:
        assert kernel.all_within(rows, outputs, 1.9, 2.1, each=2)
        assert kernel.all_within(rows, outputs[[4, 0]].contiguous(), 1.9, 2.1, row_of=[2, 0])
        assert not kernel.all_within(rows, outputs, 2.1, 3.0, each=2)
        assert not kernel.all_within(rows, outputs, 0.1, 1.9, each=2)
        for wrong in (float("nan"), float("inf"), -float("inf"), float(sizes.max()) * 100):
            broken = outputs.clone()
            broken[3, 201] = wrong
            assert not kernel.all_within(rows, broken, 0.0, 2.1, each=2)


def test_silu_at_the_ends_of_its_range(kernels: list[CpuKernel]) -> None:
    gate = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-38, 3e38, float("nan")])])
    wanted = torch.nn.functional.silu(gate.double())
    for kernel in kernels:
        got = gate.clone()
        ones = torch.ones_like(gate)
        kernel.library.silu_mul(kernel.isa.number, got.data_ptr(), ones.data_ptr(), got.numel())
        assert torch.isnan(got[-1])
        assert torch.allclose(got[:-1].double(), wanted[:-1], rtol=5e-7, atol=1e-35)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(
    kernels: list[CpuKernel], kind: str, value: float
) -> None:
    matrix = matrix_of(kind, noise(40, 203))
    rows = noise(5, 203)
    for kernel in kernels:
        there = packed(kernel, matrix)
        clean = kernel.linear(rows, there)
        spoilt = rows.clone()
        spoilt[2, 150] = value
        got = kernel.linear(spoilt, there)
        assert not torch.isfinite(got[2]).any()
        keep = [0, 1, 3, 4]
        assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_tiny_and_outlying_values(kernels: list[CpuKernel], kind: str) -> None:
    matrix = matrix_of(kind, noise(40, 256))
    rows = torch.zeros(3, 256)
    rows[1] = 1e-37
    rows[2] = noise(256)
    rows[2, 7] = 3000.0
    for kernel in kernels:
        got = kernel.linear(rows, packed(kernel, matrix))
        assert not got[0].any()
        assert float(got[1].abs().max()) < 1e-33
        exact = rows[2:].double() @ to_fp32(matrix).double().T
        assert float(residual(got[2:], exact.float()).max()) < 1e-8


def test_wrong_rows_are_refused_before_anything_is_read(kernels: list[CpuKernel]) -> None:
    there = packed(kernels[0], DenseMatrix(noise(8, 16)))
    for rows in (noise(2, 15), noise(16), noise(2, 16).double(), noise(16, 2).T):
        with pytest.raises(ValueError, match="wanted contiguous fp32"):
            kernels[0].linear(rows, there)
        with pytest.raises(ValueError, match="wanted contiguous fp32"):
            kernels[0].ffn(rows, there, there, packed(kernels[0], DenseMatrix(noise(16, 8))))


def test_no_rows_give_no_rows(kernels: list[CpuKernel]) -> None:
    for kernel in kernels:
        assert kernel.linear(torch.empty(0, 16), packed(kernel, DenseMatrix(noise(8, 16)))).shape == (0, 8)


def test_threads_may_share_a_kernel(kernels: list[CpuKernel]) -> None:
    kernel = kernels[0]
    there = packed(kernel, quantise_int8(noise(64, 512)))
    rows = [noise(n, 512, seed=n) for n in range(1, 9)]
    wanted = [kernel.linear(some, there) for some in rows]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(kernel.linear(rows[index], there), wanted[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert not wrong


# --- in its place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["stored", "bf16", "int8", "int4"])
def test_it_is_chosen_named_and_serves_a_window(library: Library, precision: str) -> None:
    kernel = CpuKernel(library, library.isas()[0], precision)
    plan, read, _ = tiny_plan()
    execution = choose_execution(plan, precision, kernel)
    assert execution.kernel is kernel
    name = numerics_class(plan, precision, execution)
    assert f"/{kernel.activations}/" in name
    assert "/c1/" in name
    for other in library.isas(slow=True):
        same = choose_execution(plan, precision, CpuKernel(library, other, precision))
        assert numerics_class(plan, precision, same) == name, "one class on every instruction set"
    rows = noise(6, plan.width)
    got = WindowExperts.load(plan, plan.windows[0], precision, read, execution=execution).run(0, 1, rows)
    plain = WindowExperts.load(plan, plan.windows[0], precision, read).run(0, 1, rows)
    assert float(residual(got, plain).max()) < 1e-8


@pytest.mark.parametrize(
    ("formula", "biases"),
    list(
        itertools.product(
            (
                SWIGLU,
                GateFormula("swiglu", "gelu_tanh"),
                GateFormula("gpt_oss", "silu", limit=7.0, alpha=1.702),
                GateFormula("no_gate", "relu2"),
            ),
            (False, True),
        )
    ),
)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_other_formulas_and_biases(
    library: Library, formula: GateFormula, biases: bool, precision: str
) -> None:
    kernel = CpuKernel(library, library.isas()[0], precision)
    shapes = {"gate": (48, 96), "up": (48, 96), "down": (96, 48)}
    if formula.name == "no_gate":
        del shapes["gate"]
    weights: dict[str, Matrix] = {
        role: DenseMatrix(noise(*shape, seed=len(role)) / 8) for role, shape in shapes.items()
    }
    vectors = {f"{role}_bias": noise(shape[0]) for role, shape in shapes.items()} if biases else {}
    tensors = quantise(ExpertTensors(weights, vectors, {}), precision)
    ffn = kernel.bind(tensors, formula)
    assert ffn is not None
    rows = noise(12, 96)
    assert float(residual(ffn(rows), TORCH.bind(tensors, formula)(rows)).max()) < 1e-8
    assert check_batch_invariance(ffn, 96)


def test_forms_that_it_does_not_cover_are_left_to_torch(kernels: list[CpuKernel]) -> None:
    half: dict[str, Matrix] = {
        role: DenseMatrix(noise(*shape).to(torch.float16))
        for role, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8)))
    }
    assert kernels[0].bind(ExpertTensors(half, {}, {}), SWIGLU) is None
    whole = {role: DenseMatrix(to_fp32(matrix)) for role, matrix in half.items()}
    normed = ExpertTensors(whole, {"norm": torch.ones(16)}, {})
    assert kernels[0].bind(normed, GateFormula("swiglu", "silu", norm_eps=1e-6)) is None
    assert kernels[0].bind(ExpertTensors(whole, {}, {}), SWIGLU) is not None


# --- built, found, absent ----------------------------------------------------------------------------


@pytest.fixture
def logs() -> Iterator[list[dict[str, object]]]:
    with structlog.testing.capture_logs() as entries:
        yield entries  # type: ignore[misc]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def hasty(tmp_path: Path) -> str | None:
    """The C compiler without its optimiser: the same library of slower code, in a fifth of the time."""
    compiler = find_compiler()
    if compiler is None or sys.platform == "win32":  # needs a shell script
        return compiler
    return script(tmp_path / "cc", f'exec {shlex.quote(compiler)} "$@" -O0')


def test_it_is_built_once_and_found_again(
    tmp_path: Path, logs: list[dict[str, object]], hasty: str | None
) -> None:
    folder = tmp_path / "cache"
    first = open_kernel(folder=folder, compiler=hasty)
    assert first is not None
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(written) == 2, "the library and its digest"
    assert open_kernel(folder=folder, compiler=hasty) is not None
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert [entry["event"] for entry in logs] == ["kernel.loaded"] * 2
    assert logs[0]["isa"] == first.isa.name


@pytest.mark.skipif(sys.platform == "win32", reason="a library in use cannot be replaced there")
def test_a_damaged_library_is_built_anew(tmp_path: Path, hasty: str) -> None:
    made = build(tmp_path / "cache", hasty)
    whole = made.read_bytes()
    made.chmod(0o700)
    for damaged in (whole[:1000], whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]):
        made.unlink()
        made.write_bytes(damaged)
        assert open_kernel(folder=made.parent, compiler=hasty) is not None
        assert made.read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script as a compiler")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'kernels.c:1: no such luck' >&2; exit 1", "no such luck"),
        ("exit 3", "exit 3"),
        ('while [ "$1" != -o ]; do [ $# = 0 ] && exit 0; shift; done; echo junk > "$2"', ""),
        ("exec sleep 60", "took longer than 1 s"),
    ],
)
def test_a_compiler_that_does_not_work_leaves_torch(
    tmp_path: Path, logs: list[dict[str, object]], text: str, reason: str
) -> None:
    compiler = script(tmp_path / "cc", text)
    assert open_kernel(folder=tmp_path / "cache", compiler=compiler, timeout_s=1.0) is None
    assert [(entry["event"], entry["instead"]) for entry in logs] == [("kernel.absent", "torch")]
    assert reason in str(logs[0]["reason"])
    assert not list((tmp_path / "cache").glob(".building-*")), "nothing half built is left"


def test_no_compiler_leaves_torch(
    tmp_path: Path, logs: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_kernel(folder=tmp_path / "cache") is None
    assert "no C compiler" in str(logs[0]["reason"])


def test_an_instruction_set_that_is_not_here_leaves_torch(cache: Path, logs: list[dict[str, object]]) -> None:
    assert open_kernel(folder=cache, isa="altivec") is None
    assert "altivec" in str(logs[0]["reason"])


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_what_others_could_have_written_is_not_run(cache: Path, logs: list[dict[str, object]]) -> None:
    (made,) = (path for path in cache.iterdir() if path.suffix != ".sha256")
    assert stat.S_IMODE(made.stat().st_mode) == 0o500
    assert open_kernel(folder=cache) is not None
    for path in (cache, made):
        before = path.stat().st_mode
        path.chmod(0o722)
        assert open_kernel(folder=cache) is None
        assert "not this user's alone" in str(logs[-1]["reason"])
        path.chmod(before)
    assert open_kernel(folder=cache) is not None


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX permissions")
def test_without_a_usable_cache_folder_it_is_built_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: str | None
) -> None:
    tmp_path.chmod(0o500)
    home = (
        tmp_path if os.geteuid() else Path("/proc")
    )  # permissions do not bind root, but nothing is made there
    monkeypatch.setenv("HOME", str(home))
    assert open_kernel(compiler=hasty) is not None
    assert not (home / ".cache").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="HOME")
def test_a_home_that_is_no_folder_is_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: str | None
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "kvasir" / "kernels" or sys.platform == "darwin"
    assert open_kernel(compiler=hasty) is not None


# --- what a model computes beside its experts ---


def dense_shape(
    kernel: CpuKernel, dtype: torch.dtype, shape: tuple[int, int], stored: torch.dtype | None = None
) -> tuple[DenseProduct, Tensor]:
    weight, bias = noise(*shape).to(stored or dtype).to(dtype), noise(shape[0]).to(dtype)
    rows = noise(70, shape[1], seed=1).to(dtype)
    product = DenseProduct(kernel, weight, bias)
    exact = (rows.double() @ weight.double().T + bias.double()).to(dtype)
    assert float(residual(product(rows), exact).max()) <= (1e-12 if dtype == torch.float32 else 1e-5)
    return product, rows


@pytest.mark.parametrize("dtype", ROW_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_models_own_products_are_the_same_bits_everywhere(
    kernels: list[CpuKernel], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    product, rows = dense_shape(kernels[0], dtype, shape)
    whole = product(rows)
    for count in (0, 1, 2, 5, 9, 64):
        assert torch.equal(product(rows[:count]), whole[:count])
        assert torch.equal(product(rows[70 - count :]), whole[70 - count :])
    for kernel in kernels[1:]:
        assert torch.equal(dense_shape(kernel, dtype, shape)[0](rows), whole)


@pytest.mark.parametrize("dtype", ROW_KINDS)
@pytest.mark.parametrize("width", [1, 31, 64, 203])
def test_norms_and_sums_agree_with_torchs_everywhere(
    kernels: list[CpuKernel], dtype: torch.dtype, width: int
) -> None:
    limit = 1e-12 if dtype == torch.float32 else 3e-5
    rows, weight, weights = noise(12, width).to(dtype), noise(width).to(dtype), noise(4, 3)
    norm = torch.rms_norm(rows.double(), (width,), weight.double(), 1e-6)
    summed = (rows.view(4, 3, width).double() * weights.double().unsqueeze(-1)).sum(1)
    found = []
    for kernel in kernels:
        out = torch.empty(4, width, dtype=dtype)
        combine(kernel, rows.view(4, 3, width), weights, out)
        found.append((RowNorm(kernel, weight, 1e-6)(rows), out))
        assert float(residual(found[-1][0], norm).max()) <= limit
        assert float(residual(out, summed).max()) <= limit
        assert torch.equal(RowNorm(kernel, weight, 1e-6)(rows[3:4]), found[-1][0][3:4])
    for made in found[1:]:
        assert all(map(torch.equal, made, found[0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_weights_of_a_bf16_checkpoint_take_half_the_memory(
    kernels: list[CpuKernel], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    product, rows = dense_shape(kernels[0], torch.float32, shape, stored=torch.bfloat16)
    monkeypatch.setattr("kvasir_node.kernels.dense._is_bf16", lambda weight: False)
    wide, _ = dense_shape(kernels[0], torch.float32, shape, stored=torch.bfloat16)
    assert (product.matrix.kind, wide.matrix.kind) == ("bf16", "fp32")
    assert torch.equal(product(rows), wide(rows))
    assert torch.equal(product.weight(), wide.weight())
    assert product.weight().dtype == torch.float32


@pytest.mark.parametrize("dtype", ROW_KINDS)
@pytest.mark.parametrize("turned", [4, 6, 10])
def test_turns_are_transformers_own_bits(kernels: list[CpuKernel], dtype: torch.dtype, turned: int) -> None:
    heads, cosine, sine = (
        noise(5, 3, 10).to(dtype),
        noise(5, turned).to(dtype),
        noise(5, turned, seed=1).to(dtype),
    )
    first, second = heads[..., :turned].chunk(2, -1)
    swapped = torch.cat((-second, first), -1)
    part = heads[..., :turned] * cosine.unsqueeze(1) + swapped * sine.unsqueeze(1)
    expected = torch.cat((part, heads[..., turned:]), -1)
    for kernel in kernels:
        assert torch.equal(rope(kernel, heads, cosine, sine), expected)
    found = operators()
    assert found is not None
    query = heads.transpose(0, 1).unsqueeze(0)  # [1, heads, rows, width]
    key, isa = query[:, :1].contiguous(), found.kernel.isa.number
    with found.real_rows(5, 4):
        made = torch.ops.kvasir.rope(query, key, cosine[None], sine[None], isa)
    for one, wanted in zip(made, (expected, expected[:, :1]), strict=True):
        assert torch.equal(one[0, :, :4], wanted[:4].transpose(0, 1))
        assert not one[0, :, 4:].any()
    made = torch.ops.kvasir.rope(query, key, cosine[None, :2], sine[None, :2], isa)
    assert all(one.isnan().all() for one in made), "positions of other rows"


def test_rows_that_do_not_fit_a_product_are_refused(kernels: list[CpuKernel]) -> None:
    product = DenseProduct(kernels[0], noise(8, 6))
    for rows in (noise(2, 5), noise(2, 6).double(), noise(6, 2).T):
        with pytest.raises(ValueError, match="wanted contiguous"):
            product(rows)
    with pytest.raises(ValueError, match="fp32 or bf16"):
        DenseProduct(kernels[0], noise(8, 6).half())
    with pytest.raises(ValueError, match="fp32 or bf16"):
        RowNorm(kernels[0], noise(8).half(), 1e-6)


@pytest.mark.parametrize("dtype", ROW_KINDS)
def test_operators_take_rows_of_any_shape_and_leave_padding_out(dtype: torch.dtype) -> None:
    found = operators()
    assert found is not None
    product = DenseProduct(found.kernel, noise(9, 6).to(dtype))
    norm = RowNorm(found.kernel, noise(6).to(dtype), 1e-6)
    rows = noise(4, 3, 6).to(dtype)
    for one, operator in ((product, torch.ops.kvasir.linear), (norm, torch.ops.kvasir.norm)):
        whole = one(rows.view(12, 6))
        made = operator(rows, one.address)
        assert made.dtype == dtype
        assert torch.equal(made, whole.view(4, 3, -1))
        assert torch.equal(operator(rows.transpose(0, 1), one.address), made.transpose(0, 1))
        assert torch.equal(operator(rows[:0], one.address), made[:0])
        with found.real_rows(12, 5):
            some = operator(rows, one.address).view(12, -1)
            assert torch.equal(operator(rows[:3], one.address), made[:3])
        assert torch.equal(some[:5], whole[:5])
        assert not some[5:].any()
        assert operator(rows[..., :5].contiguous(), one.address).isnan().all()
        assert operator(rows.double(), one.address).isnan().all()


def test_threads_have_padding_of_their_own() -> None:
    found = operators()
    assert found is not None
    product = DenseProduct(found.kernel, noise(9, 6))
    rows, elsewhere = noise(12, 6), []
    with found.real_rows(12, 1):
        thread = threading.Thread(
            target=lambda: elsewhere.append(torch.ops.kvasir.linear(rows, product.address))
        )
        thread.start()
        thread.join(10.0)
    assert torch.equal(elsewhere[0], product(rows))


def test_a_kernel_with_other_bits_is_not_used(
    cache: Path, logs: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_node.kernels.cpu.SELF_CHECK", "0" * 64)
    assert open_kernel(folder=cache) is None
    assert "self-check" in str(logs[0]["reason"])


def test_the_self_check_sees_another_order_of_summation(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = CpuKernel(library, library.isas()[0])
    honest = _digest(kernel)
    exact = CpuKernel.linear

    def other(self: CpuKernel, rows: Tensor, matrix: PackedMatrix) -> Tensor:
        half = rows.shape[1] // 2
        left, right = rows.clone(), rows.clone()
        left[:, half:], right[:, :half] = 0, 0
        return exact(self, left, matrix) + exact(self, right, matrix)

    monkeypatch.setattr(CpuKernel, "linear", other)
    assert _digest(kernel) != honest


def test_one_kernel_a_precision_is_kept() -> None:
    kernel = load("int8")
    assert kernel is not None
    assert load("int8") is kernel
    assert kernel.activations == "int16"

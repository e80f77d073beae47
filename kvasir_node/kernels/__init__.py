"""Expert products on a plain CPU near the speed of its memory: a small C core, built at first use.

`load(precision)` gives a kernel for `kvasir_node.execution.choose_execution`, or None where there is no C
compiler, the build fails or the self-check does; torch then does the work, slower.

Why C and not a library. A decode step reads every weight of the chosen experts once, so its limit is read
bandwidth, and a node also promises that a row's bits do not depend on the rows beside it. What there is:
torch's own products (oneDNN, MKL; `_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`) reach 80 % of read
bandwidth in fp32, half in bf16 and less in int8 and int4, change their order of summation with the number of
rows, and have other groups and scales than our quantisers. numba has no bf16 on a CPU and no way to name the
integer dot-product instructions, and brings LLVM; ggml and fbgemm have formats of their own and promise
nothing about bits. The reduction order wanted here is simple, so it is written once (`csrc/kvasir.h`), in
vectors of whatever length the machine has, and every instruction set gives the same bits.

    build.py    C sources -> a shared library in the user's cache folder
    native.py   the library's functions, typed
    packing.py  a matrix in the order in which the C core reads it
    dense.py    what a model computes beside its experts: products, norms, weighted sums
    cpu.py      the kernel: checked, bound to experts
    attention.py  attention of a step's rows, each over its own request's keys and values
    operators.py  products and norms as operators of torch, for recorded graphs

Knows matrices, formulas and this machine's compiler. Knows no plans, windows or requests.
"""

from __future__ import annotations

from .cpu import CpuKernel, load, loaded, open_kernel
from .packing import ROW_KINDS, PackedMatrix

__all__ = ["ROW_KINDS", "CpuKernel", "PackedMatrix", "load", "loaded", "open_kernel"]

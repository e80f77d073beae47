"""Products and norms of the C core as operators of torch, for graphs that run without the interpreter.

`kvasir::linear` and `kvasir::norm` take rows and the address of a `DenseProduct` or `RowNorm`; `kvasir::rope`
turns queries and keys [1, heads, rows, width] by cosines and sines [1, rows, at most width]. They are
registered through torch's stable C interface (torch/csrc/stable), so a recorded graph calls the C core
directly: no interpreter lock, no Python a product.

Knows torch's C interface. Knows no models.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog
import torch

from .cpu import CpuKernel, load

NAMESPACE: Final = "kvasir"
_FILES: Final = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
_FUNCTIONS: Final = (
    "aoti_torch_empty_strided", "aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes",
    "aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_delete_tensor_object",
    "aoti_torch_call_dispatcher",
)  # fmt: skip
"""What `kv_torch` holds, in its order."""

log = structlog.get_logger("node")


class TorchFunctions(ctypes.Structure):
    """`kv_torch`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("float32", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("cpu", ctypes.c_int32),
    )


class Operators:
    """The operators, registered in this process. Made by `operators`."""

    def __init__(self, kernel: CpuKernel, *keep: Any) -> None:
        self.kernel = kernel
        self._keep = keep
        self._pass = kernel.library.pass_rows

    @contextmanager
    def real_rows(self, rows: int, real: int) -> Iterator[None]:
        """While active, operators that this thread gives exactly `rows` rows compute the first `real`.

        The others come out as zeros: they are padding.
        """
        self._pass(rows, real)
        try:
            yield
        finally:
            self._pass(0, 0)


@functools.cache
def operators() -> Operators | None:
    """The operators of this process, or None, with one log line, where the C core or torch has none.

    Blocks like `cpu.load`.
    """
    kernel = load()
    if kernel is None:
        return None
    try:
        return _register(kernel)
    except (OSError, AttributeError, RuntimeError) as error:
        log.info("kernel.absent", reason=f"torch's C interface: {error}", instead="torch")
        return None


def _register(kernel: CpuKernel) -> Operators:
    name = _FILES.get(sys.platform, "libtorch_cpu.so")
    native = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    addresses = [ctypes.cast(getattr(native, function), ctypes.c_void_p).value for function in _FUNCTIONS]
    functions = TorchFunctions(
        *addresses,
        native.aoti_torch_dtype_float32(),
        native.aoti_torch_dtype_bfloat16(),
        native.aoti_torch_device_type_cpu(),
    )
    kernel.library.torch_bind(ctypes.addressof(functions))
    library: Any = torch.library.Library  # untyped
    library = library(NAMESPACE, "FRAGMENT")
    library.define("linear(Tensor rows, int product) -> Tensor")
    library.define("norm(Tensor rows, int norm) -> Tensor")
    library.define("rope(Tensor query, Tensor key, Tensor cos, Tensor sin, int isa) -> (Tensor, Tensor)")
    rows = "Tensor query, Tensor key, Tensor value"
    library.define(f"attention({rows}, int layer, float scaling) -> Tensor")
    handle = ctypes.c_void_p()
    arguments = (NAMESPACE.encode(), b"CompositeExplicitAutograd", __name__.encode(), ctypes.c_uint32(0))
    _succeed(native.aoti_torch_library_init_impl(*arguments, ctypes.byref(handle)))
    for operator, address in kernel.library.operators().items():
        _succeed(native.aoti_torch_library_impl(handle, operator.encode(), ctypes.c_void_p(address)))
    return Operators(kernel, library, native)


def _succeed(status: int) -> None:
    if status:
        raise RuntimeError("an operator could not be registered")

"""The C core's functions with types. Calls release the interpreter's lock.

Knows ctypes and memory addresses. Tensors must be contiguous, of the dtype said and alive during the call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PANEL: Final = 32
"""Outputs a panel (csrc/kvasir.h)."""

KINDS: Final = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
"""Kind of packed matrix -> its number in the C core."""

ISA_TEXT: Final = {
    "portable": "plain C",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "vnni": "AVX-512 VNNI",
    "neon": "NEON",
}


class MatrixHeader(ctypes.Structure):
    """`kv_matrix`."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("in_", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


class ExpertHeader(ctypes.Structure):
    """`kv_expert`."""

    _fields_ = (("gate", MatrixHeader), ("up", MatrixHeader), ("down", MatrixHeader))


_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: Final = {
    "kv_isa_count": (_INT, ()),
    "kv_isa_name": (ctypes.c_char_p, (_INT,)),
    "kv_isa_supported": (_INT, (_INT,)),
    "kv_portable_is_fast": (_INT, ()),
    "kv_packed_bytes": (_LONG, (_INT, _INT, _INT)),
    "kv_repack": (None, (*(_INT,) * 3, *(_POINTER,) * 4, *(_INT,) * 3)),
    "kv_linear_scratch": (_LONG, (_POINTER, _INT)),
    "kv_linear": (
        None,
        (_INT, _POINTER, _POINTER, _LONG, _INT, _POINTER, _LONG, _INT, _INT, _POINTER),
    ),
    "kv_silu_mul": (None, (_INT, _POINTER, _POINTER, _LONG)),
    "kv_ffn_scratch": (_LONG, (_POINTER, _INT)),
    "kv_ffn": (None, (_INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER)),
    "kv_group_scratch": (_LONG, (_POINTER, _INT, _INT)),
    "kv_group": (None, (_INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER)),
    "kv_outside": (
        _INT,
        (_INT, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _LONG, ctypes.c_float, ctypes.c_float),
    ),
    "kv_attend_scratch": (_LONG, (_POINTER,)),
    "kv_attend": (None, (_INT, _POINTER, _POINTER, _INT, _INT, *(_POINTER,) * 5)),
    "kv_attend_step": (None, (_INT, _POINTER, _INT, _INT, _LONG, _POINTER, _LONG)),
    "kv_dense_run": (_INT, (_POINTER, _POINTER, _LONG, _POINTER)),
    "kv_norm_run": (None, (_POINTER, _POINTER, _LONG, _POINTER)),
    "kv_combine": (None, (_INT, _INT, _POINTER, _POINTER, _LONG, _INT, _LONG, _POINTER)),
    "kv_rope": (None, (_INT, _INT, _POINTER, *(_LONG,) * 3, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER)),
    "kv_torch_bind": (None, (_POINTER,)),
    "kv_pass": (None, (_LONG, _LONG)),
}


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set of the library: its number and name."""

    number: int
    name: str


class Library:
    """The shared library at `path`. Raises `OSError` if it cannot be loaded or is not ours."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        try:
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype = result
                function.argtypes = arguments
        except AttributeError as error:
            raise OSError(f"not a kernel library: {error}") from None
        self.packed_bytes = loaded.kv_packed_bytes
        self.repack = loaded.kv_repack
        self.linear_scratch = loaded.kv_linear_scratch
        self.linear = loaded.kv_linear
        self.silu_mul = loaded.kv_silu_mul
        self.ffn_scratch = loaded.kv_ffn_scratch
        self.ffn = loaded.kv_ffn
        self.group_scratch = loaded.kv_group_scratch
        self.group = loaded.kv_group
        self.outside = loaded.kv_outside
        self.attend_scratch = loaded.kv_attend_scratch
        self.attend = loaded.kv_attend
        self.attend_step = loaded.kv_attend_step
        self.dense_run = loaded.kv_dense_run
        self.norm_run = loaded.kv_norm_run
        self.combine = loaded.kv_combine
        self.rope = loaded.kv_rope
        self.torch_bind = loaded.kv_torch_bind
        self.pass_rows = loaded.kv_pass
        self._loaded = loaded

    def operators(self) -> dict[str, int | None]:
        """Operators of torch by name: addresses of their functions (csrc/operators.h)."""
        names = ("linear", "norm", "rope", "attention")
        functions = {name: getattr(self._loaded, f"kv_op_{name}") for name in names}
        return {name: ctypes.cast(found, ctypes.c_void_p).value for name, found in functions.items()}

    def isas(self, *, slow: bool = False) -> tuple[Isa, ...]:
        """The instruction sets that this machine runs, fastest first.

        Plain C is left out where its fused multiply-add would be done in software, unless `slow`.
        """
        found = [
            Isa(number, self._loaded.kv_isa_name(number).decode())
            for number in range(self._loaded.kv_isa_count())
            if self._loaded.kv_isa_supported(number)
        ]
        if not slow and not self._loaded.kv_portable_is_fast():
            found = [isa for isa in found if isa.name != "portable"]
        return tuple(reversed(found))

"""A model's own products and norms through the C core, in the place of torch's.

torch pads and packs a matrix anew for every few rows, and sums in another order for other numbers of rows. The
C core reads each matrix once, packed when it is loaded, and a row's bits never depend on its company; so a
pass of one row costs one row. A packed matrix's plain form is freed (its parameter is left with its shape and
no memory, full of NaN) unless something else reads it, as an embedding does; `restore` brings it back bit for
bit. Matrices are packed one by one: memory never holds a second copy of the model.

What is replaced is found by watching a pass: every `torch.nn.functional.linear` whose weight is a parameter in
fp32 or bf16. Each product and norm is compared with torch's on rows of its own before it is used.

Knows torch's modules and the C core. Knows no requests and no experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode

from kvasir_node.kernels.dense import DENSE_KINDS, DenseProduct, RowNorm
from kvasir_node.kernels.operators import Operators

LIMITS: Final = {torch.float32: 1e-10, torch.bfloat16: 1e-4}
"""Largest distance (see `distance`) of one product or norm from torch's: fp32 sums in another order, bf16 once
more rounding."""
PASS_LIMITS: Final = {torch.float32: 1e-10, torch.bfloat16: 1e-2}
"""The same for the logits of whole passes, over whose layers roundings add up."""
_TRIED_ROWS: Final = 5

_SHAPE_ONLY: Final = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_quantized", "layout"})
"""Attributes that a parameter without memory still has."""


class Found(TorchFunctionMode):
    """While active, notes which parameters this thread's passes multiply by, and which they read otherwise.

    `biases` is parameter -> the bias that goes with it, `plain` the ids of parameters whose memory is read.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.biases: dict[Parameter, Parameter | None] = {}
        self.plain: set[int] = set()
        self._own = {id(parameter) for parameter in model.parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note, and go on as ever."""
        kwargs = kwargs or {}
        if func is functional.linear:
            rows, weight, bias = _linear_arguments(*args, **kwargs)
            if self._fits(rows, weight, bias) and self.biases.get(weight, bias) is bias:
                self.biases[weight] = bias
                return func(*args, **kwargs)
        if getattr(getattr(func, "__self__", None), "__name__", "") not in _SHAPE_ONLY:
            self.plain.update(id(each) for each in (*args, *kwargs.values()) if id(each) in self._own)
        return func(*args, **kwargs)

    def _fits(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return (
            type(weight) is Parameter
            and id(weight) in self._own
            and weight.dim() == 2
            and rows.dtype == weight.dtype
            and weight.dtype in DENSE_KINDS
            and (bias is None or (id(bias) in self._own and bias.dtype == weight.dtype))
        )


class Products:
    """The products and norms of one model that run in the C core, from `pack` until `restore`."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._packed: dict[Parameter, DenseProduct] = {}
        self._freed: set[Parameter] = set()
        self._modules: dict[Any, RowNorm] = {}

    @property
    def count(self) -> int:
        """How many matrices are packed."""
        return len(self._packed)

    @property
    def norms(self) -> int:
        """How many norms."""
        return len(self._modules)

    def pack(self, found: Found, norms: Sequence[Any]) -> None:
        """Take over what `found` has seen, and these modules (`traced.find_norms`); see `LIMITS`."""
        kernel = self.operators.kernel
        for weight, bias in found.biases.items():
            product = DenseProduct(kernel, weight.detach(), None if bias is None else bias.detach())
            theirs = functools.partial(functional.linear, weight=weight, bias=bias)
            if not _agrees(product, theirs, weight.shape[1]):
                continue
            self._packed[weight] = product
            if id(weight) not in found.plain:
                self._freed.add(weight)
                weight.data = torch.full((1, 1), torch.nan, dtype=weight.dtype).expand(weight.shape)
        for module in norms:
            weight = module.weight
            if type(weight) is Parameter and weight.dim() == 1 and weight.dtype in DENSE_KINDS:
                norm = RowNorm(kernel, weight.detach(), module.variance_epsilon)
                if _agrees(norm, module, weight.shape[0]):
                    self._modules[module] = norm
        for module, norm in self._modules.items():
            module.forward = _norm_forward(norm)

    def restore(self) -> None:
        """Give all of it back to torch, with the parameters as they were."""
        for module in self._modules:
            del module.forward
        self._modules.clear()
        while self._packed:
            weight, product = self._packed.popitem()
            if weight in self._freed:
                (weight.data,) = product.matrix.parts()
        self._freed.clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, the model's own code on this thread multiplies here."""
        with _Replaced(self._packed):
            yield


class _Replaced(TorchFunctionMode):
    def __init__(self, packed: dict[Parameter, DenseProduct]) -> None:
        super().__init__()
        self._packed = packed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            rows, weight, _ = _linear_arguments(*args, **kwargs)
            product = self._packed.get(weight)
            if product is not None:
                return torch.ops.kvasir.linear(rows, product.address)
        return func(*args, **kwargs)


def distance(made: Tensor, expected: Tensor) -> float:
    """|made - expected|^2 / |expected|^2 in fp64; infinite where `made` is not finite."""
    a, b = made.to(torch.float64), expected.to(torch.float64)
    gap = float((a - b).square().sum() / b.square().sum().clamp(min=1e-300))
    return gap if gap == gap else float("inf")  # noqa: PLR0124 - NaN


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002 - torch's
    return input, weight, bias


def _norm_forward(norm: RowNorm) -> Callable[[Tensor], Tensor]:
    def forward(rows: Tensor) -> Tensor:
        made: Tensor = torch.ops.kvasir.norm(rows, norm.address)
        return made

    return forward


def _agrees(ours: DenseProduct | RowNorm, theirs: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether both give the same for rows of noise, within `LIMITS`."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(_TRIED_ROWS, width, generator=generator).to(ours.dtype)
    return distance(ours(rows), theirs(rows)) <= LIMITS[ours.dtype]

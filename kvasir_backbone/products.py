"""A model's own products and norms through the C core, in the place of torch's.

torch pads and packs a matrix anew for every few rows, and sums in another order for other numbers of rows.
The C core reads each matrix once, packed when it is loaded, and a row's bits never depend on its company; so
a pass of one row costs one row. The plain form of a packed linear layer is freed (its parameter is left with
its shape and no memory, full of NaN) unless something else reads it, as an embedding does; `restore` brings
it back bit for bit. A router keeps its own. Matrices are packed one by one: memory never holds a second copy
of the model.

What is replaced is found by watching a pass: every `torch.nn.functional.linear` whose weight is a parameter
in fp32 or bf16, or one that is read in fp32. Each product and norm is compared with torch's on rows of its
own before it is used.

Knows torch's modules and the C core. Knows no requests and no experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode

from kvasir_node.kernels import ROW_KINDS
from kvasir_node.kernels.dense import DenseProduct, RowNorm
from kvasir_node.kernels.operators import Operators

LIMITS: Final = {torch.float32: 1e-10, torch.bfloat16: 1e-4}
"""Largest distance (see `distance`) of one product or norm from torch's: fp32 sums in another order, bf16
roundings of such sums."""
PASS_LIMITS: Final = {torch.float32: 1e-10, torch.bfloat16: 1e-2}
"""The same for the logits of whole passes, over whose layers roundings add up."""
_TRIED_ROWS: Final = 5

_SHAPE_ONLY: Final = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "is_quantized", "layout"}
)
"""Attributes that a parameter without memory still has."""


_WIDENING: Final = frozenset({Tensor.type, Tensor.to, Tensor.float})
"""How routers read their weights in fp32."""

_PRODUCTS: Final = frozenset(
    {
        functional.linear, functional.bilinear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
        torch.einsum, torch.mv, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm,
    }
)  # fmt: skip
"""Functions whose sums depend on how many rows there are."""


class _Watching(TorchFunctionMode):
    """Follows parameters of a model that are read in fp32 on the way to a product."""

    def __init__(self, own: Collection[Parameter]) -> None:
        super().__init__()
        self._own = own
        self._widened: dict[int, tuple[Tensor, Parameter]] = {}

    def parameter_of(self, weight: Tensor) -> Parameter | None:
        """The model's parameter that this is, as it is or in fp32."""
        if type(weight) is Parameter:
            return weight if weight in self._own else None
        return self._widened.get(id(weight), (None, None))[1]

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What torch makes of it."""
        made = func(*args, **kwargs)
        if func in _WIDENING and type(args[0]) is Parameter and args[0] in self._own and made is not args[0]:
            self._widened[id(made)] = (made, args[0])  # kept: its number must not be another's meanwhile
        return made


class Found(_Watching):
    """While active, notes which parameters this thread's passes multiply by, and what else they do.

    `biases` is (parameter, dtype of the product) -> the bias that goes with it, `plain` are the parameters
    whose memory is read otherwise or may be: all but those of linear layers. So a router can be looked at as
    it is. `others` are the names of products that are not by a parameter.
    """

    def __init__(self, model: Any) -> None:
        super().__init__({parameter: None for parameter in model.parameters() if parameter.dim() <= 2})
        self.biases: dict[tuple[Parameter, torch.dtype], Parameter | None] = {}
        linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
        self.plain: set[Parameter] = {parameter for parameter in self._own if parameter not in linear}
        self.others: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Note, and go on as ever."""
        kwargs = kwargs or {}
        if func is functional.linear and self._note(*_linear_arguments(*args, **kwargs)):
            return func(*args, **kwargs)
        if func in _PRODUCTS:
            self.others.add(func.__name__)
        if getattr(getattr(func, "__self__", None), "__name__", "") not in _SHAPE_ONLY:
            self.plain.update(
                each for each in (*args, *kwargs.values()) if type(each) is Parameter and each in self._own
            )
        return self.call(func, args, kwargs)

    def _note(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Note a product; whether it is one that can be taken over."""
        parameter = self.parameter_of(weight)
        if parameter is None or weight.dim() != 2 or weight.dtype not in ROW_KINDS:
            return False
        if rows.dtype != weight.dtype or not (
            bias is None or (type(bias) is Parameter and bias in self._own)
        ):
            return False
        return self.biases.setdefault((parameter, weight.dtype), bias) is bias


class Products:
    """The products and norms of one model that run in the C core, from `pack` until `restore`."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._packed: dict[tuple[Parameter, torch.dtype], DenseProduct] = {}
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

    def pack(self, found: Found, norms: Sequence[Any]) -> bool:
        """Take over what `found` has seen, and these modules (`traced.find_norms`).

        False if some product does not agree with torch's (see `LIMITS`): `restore` then.
        """
        kernel = self.operators.kernel
        for (weight, dtype), bias in found.biases.items():
            plain = weight.detach().to(dtype)
            product = DenseProduct(kernel, plain, None if bias is None else bias.detach())
            if not _agrees(
                product, functools.partial(functional.linear, weight=plain, bias=bias), plain.shape[1]
            ):
                return False
            self._packed[weight, dtype] = product
            if dtype == weight.dtype and weight not in found.plain:
                self._freed.add(weight)
                weight.data = torch.full((1, 1), torch.nan, dtype=dtype).expand(weight.shape)
        for module in norms:
            weight = module.weight
            if type(weight) is Parameter and weight.dim() == 1 and weight.dtype in ROW_KINDS:
                norm = RowNorm(kernel, weight.detach(), module.variance_epsilon)
                if _agrees(norm, module, weight.shape[0]):
                    self._modules[module] = norm
        for module, norm in self._modules.items():
            module.forward = _norm_forward(norm)
        return True

    def plain(self, weight: Parameter) -> Tensor:
        """A parameter's values, bit for bit as they were; a copy where its own memory is freed."""
        return self._packed[weight, weight.dtype].weight() if weight in self._freed else weight.detach()

    def restore(self) -> None:
        """Give all of it back to torch, with the parameters as they were."""
        for module in self._modules:
            del module.forward
        self._modules.clear()
        while self._packed:
            (weight, dtype), product = self._packed.popitem()
            if weight in self._freed and dtype == weight.dtype:
                weight.data = product.weight()
        self._freed.clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, the model's own code on this thread multiplies here."""
        with _Replaced(self._packed):
            yield


class _Replaced(_Watching):
    def __init__(self, packed: Mapping[tuple[Parameter, torch.dtype], DenseProduct]) -> None:
        super().__init__({weight: None for weight, _ in packed})
        self._packed = packed

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            rows, weight, _ = _linear_arguments(*args, **kwargs)
            parameter = self.parameter_of(weight)
            product = None if parameter is None else self._packed.get((parameter, weight.dtype))
            if product is not None:
                return torch.ops.kvasir.linear(rows, product.address)
        return self.call(func, args, kwargs)


def distance(made: Tensor, expected: Tensor) -> float:
    """|made - expected|^2 / |expected|^2 in fp64; infinite where `made` is not finite."""
    a, b = made.to(torch.float64), expected.to(torch.float64)
    gap = float((a - b).square().sum() / b.square().sum().clamp(min=1e-300))
    return gap if gap == gap else float("inf")


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
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

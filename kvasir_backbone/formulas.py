"""Which of the closed list of gate formulas an experts module computes, found by trying.

The module's own `_apply_gate` (or activation) is run on wide random values and compared with every formula
of `kvasir_node.formulas` under the constants that the module carries. No architecture is assumed to be
SwiGLU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from market.plans import GateFormula
from relay.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_TOLERANCE = 1e-5
"""Largest difference, relative to the size of the values, of the same formula written in another way."""


def find_formula(architecture: str, module: Any) -> GateFormula:
    """The formula of one experts module. Raises `ConfigError` naming the architecture where none agrees."""
    import torch

    from kvasir_node.formulas import apply_formula, check_formula

    generator = torch.Generator().manual_seed(20)
    gate, up = (torch.randn(32, 64, generator=generator) * 6 for _ in range(2))
    expected = _own(architecture, module, gate, up)
    for formula in _candidates(module):
        try:
            check_formula(formula)
        except ConfigError:
            continue
        value = apply_formula(formula, gate if module.has_gate else None, up)
        if bool(((value - expected).abs() <= _TOLERANCE * (1 + expected.abs())).all()):
            return formula
    raise ConfigError(
        f"{architecture} cannot be served: none of the known gate formulas computes what "
        f"{type(module).__name__} does between its two linear maps"
    )


def _own(architecture: str, module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """What the module itself makes of `gate` and `up`."""
    import torch

    if not module.has_gate:
        joined, function = up, module.act_fn
    elif module.is_concatenated:
        joined, function = torch.cat((gate, up), dim=-1), module._apply_gate
    else:
        joined, function = torch.stack((gate, up), dim=-1).flatten(-2), module._apply_gate
    try:
        with torch.no_grad():
            value: Tensor = function(joined)
    except (RuntimeError, NotImplementedError) as error:  # an activation with learned parameters, on meta
        raise ConfigError(
            f"{architecture} cannot be served: its activation needs weights ({error})"
        ) from None
    if value.is_meta:
        raise ConfigError(f"{architecture} cannot be served: its activation has learned parameters")
    return value


def _candidates(module: Any) -> Iterator[GateFormula]:
    """Every formula under every constant that the module carries, the plain ones first."""
    from kvasir_node.formulas import ACTIVATIONS, FORMULAS

    eps = _norm_eps(module) if module.has_post_expert_norm else None
    constants = [None, *sorted(_constants(module))]
    names = [name for name in FORMULAS if (name == "no_gate") != module.has_gate]
    for name, activation in itertools.product(names, ACTIVATIONS):
        for limit, alpha in itertools.product(constants, constants):
            yield GateFormula(name, activation, limit, alpha, eps)


def _constants(module: Any) -> set[float]:
    """Positive numbers among the attributes of the module and of the modules in it (its activation)."""
    found: set[float] = set()
    for owner in (*module.modules(), getattr(module, "act_fn", None)):
        for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
            if (isinstance(value, float) and value > 0) or (isinstance(value, int) and 0 < value <= 64):
                found.add(float(value))
    return {value for value in found if not isinstance(value, bool)}


def _norm_eps(module: Any) -> float:
    norm = module.post_expert_norm
    for name in ("eps", "variance_epsilon"):
        if isinstance(getattr(norm, name, None), float):
            return float(getattr(norm, name))
    raise ConfigError(f"{type(module).__name__}: its norm after each expert has no eps; it cannot be served")

"""The gate formulas and activations of MoE experts, by name, on fp32 tensors.

Between its first and its second linear map an expert combines gate and up, or only activates up:

    swiglu            act(gate) * up                                        most models
    swiglu_clamped    act(min(gate, limit)) * clamp(up, -limit, limit)      deepseek_v4, glm5_next, hy_v4
    gpt_oss           (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)
                                                            gpt_oss, minimax_m3_vl, openai_privacy_filter
    swiglu_softcapped softcap(gate, limit) * sigmoid(gate) * softcap(up, alpha),
                      softcap(x, c) = c * tanh(x / c)                       inkling2
    no_gate           act(up)                                               nemotron_h

Source: the `_apply_gate` methods and `ACT2FN` of transformers 5.23. Where a norm follows each expert
(muse_spark) the output y becomes z / sqrt(mean(z^2) + eps) with z = norm * y.

Knows element-wise mathematics. Knows no weights and no plans' files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from market.plans import GateFormula
from relay.errors import ConfigError

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_10": lambda x: functional.gelu(x).clamp(-10, 10),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": lambda x: x,
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0)))),
    "sqrtsoftplus": lambda x: functional.softplus(x).sqrt(),
}
"""The closed list of activations: name -> function of an fp32 tensor, element by element."""

TRANSFORMERS_ACTIVATIONS: Final = {
    **{name: name for name in ACTIVATIONS if name != "gelu_tanh"},
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
"""`ACT2FN` name of transformers -> our activation. What is missing has learned parameters (prelu, xielu)."""


def _swiglu(gate: Tensor, up: Tensor, act: Activation, formula: GateFormula) -> Tensor:
    return act(gate) * up


def _swiglu_clamped(gate: Tensor, up: Tensor, act: Activation, formula: GateFormula) -> Tensor:
    limit = _constant(formula.limit)
    return act(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _gpt_oss(gate: Tensor, up: Tensor, act: Activation, formula: GateFormula) -> Tensor:
    limit, alpha = _constant(formula.limit), _constant(formula.alpha)
    clamped = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1.0) * (clamped * torch.sigmoid(clamped * alpha))


def _swiglu_softcapped(gate: Tensor, up: Tensor, act: Activation, formula: GateFormula) -> Tensor:
    limit, alpha = _constant(formula.limit), _constant(formula.alpha)
    return torch.tanh(gate / limit) * limit * torch.sigmoid(gate) * (torch.tanh(up / alpha) * alpha)


def _constant(value: float | None) -> float:
    assert value is not None, "check_formula has seen to it"
    return value


_GATED: Final[dict[str, Callable[[Tensor, Tensor, Activation, GateFormula], Tensor]]] = {
    "swiglu": _swiglu,
    "swiglu_clamped": _swiglu_clamped,
    "gpt_oss": _gpt_oss,
    "swiglu_softcapped": _swiglu_softcapped,
}
_CONSTANTS: Final = {
    "swiglu_clamped": (True, False),
    "gpt_oss": (True, True),
    "swiglu_softcapped": (True, True),
}

FORMULAS: Final = (*_GATED, "no_gate")
"""The closed list of formula names. `gpt_oss` and `swiglu_softcapped` have the activation "silu" built in."""


def check_formula(formula: GateFormula) -> None:
    """Refuse a formula that this version cannot carry out. Raises `ConfigError` naming it."""
    if formula.name not in FORMULAS:
        raise ConfigError(f"gate formula {formula.name!r} is not one this version knows; update kvasir")
    if formula.activation not in ACTIVATIONS:
        raise ConfigError(f"activation {formula.activation!r} is not one this version knows; update kvasir")
    if formula.name in ("gpt_oss", "swiglu_softcapped") and formula.activation != "silu":
        raise ConfigError(f"gate formula {formula.name!r} has silu built in, not {formula.activation!r}")
    wanted = _CONSTANTS.get(formula.name, (False, False))
    for name, value, needed in zip(("limit", "alpha"), (formula.limit, formula.alpha), wanted, strict=True):
        if (value is not None) != needed:
            raise ConfigError(f"gate formula {formula.name!r} {'needs' if needed else 'has no'} {name}")
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"gate formula {formula.name!r}: {name} {value} is not a positive number")
    eps = formula.norm_eps
    if eps is not None and not (math.isfinite(eps) and eps >= 0):
        raise ConfigError(f"norm_eps {eps} is not a number of 0 or more")


def has_gate(formula: GateFormula) -> bool:
    """Whether the formula takes a gate beside up."""
    return formula.name != "no_gate"


def apply_formula(formula: GateFormula, gate: Tensor | None, up: Tensor) -> Tensor:
    """The expert's hidden values from fp32 `gate` and `up` of one shape, element by element.

    `gate` is None exactly where the formula has none. The formula must have passed `check_formula`.
    """
    act = ACTIVATIONS[formula.activation]
    if gate is None:
        return act(up)
    return _GATED[formula.name](gate, up, act, formula)


def apply_norm(formula: GateFormula, norm: Tensor, rows: Tensor) -> Tensor:
    """The norm after an expert: fp32 rows [n, W] scaled by `norm` [W], then divided by their RMS."""
    assert formula.norm_eps is not None
    scaled = rows * norm
    return scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + formula.norm_eps)

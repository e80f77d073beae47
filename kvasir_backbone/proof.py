"""A recipe proven: the weights that transformers makes, bit for bit, and the output that its module gives.

Knows a recipe, a conversion and an experts module. Makes no recipes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from market.plans import LayerRecipe
from relay.errors import ConfigError

from .conversion import Conversion, Feed

if TYPE_CHECKING:
    from torch import Tensor

PROOF_LIMIT: Final = 1e-10
"""Largest d between a recipe's output and the module's own, both in fp32."""


def prove(
    conversion: Conversion, module: Any, feeds: tuple[Feed, ...], recipe: LayerRecipe, expert: int
) -> None:
    """Prove a recipe on one expert: the weights are those of transformers, the output the module's own.

    Raises `ConfigError` naming layer and expert where it fails.
    """
    import torch

    from kvasir_node.experts import run_expert
    from kvasir_node.recipes import load_expert
    from kvasir_node.residual import residual

    runtime = {feed.parameter: conversion.runtime(feed, expert).float() for feed in feeds}
    loaded = load_expert(recipe, expert, conversion.read)
    made = _dense(loaded)
    for parameter, tensor in runtime.items():
        for role, part in roles_of(module, parameter, tensor):
            if not torch.equal(made[role], part):
                raise ConfigError(
                    f"layer {recipe.layer}: the recipe of expert {expert} makes another {role} than "
                    f"transformers does; {type(module).__name__} cannot be served"
                )
    generator = torch.Generator().manual_seed(recipe.layer)
    rows = torch.randn(4, made["up"].shape[1], generator=generator)
    with torch.no_grad():
        expected = module_output(module, runtime, rows)
    worst = float(residual(run_expert(loaded, recipe.formula, rows), expected).max())
    if not worst <= PROOF_LIMIT:
        raise ConfigError(
            f"layer {recipe.layer}: formula {recipe.formula.name!r} on expert {expert} differs from "
            f"{type(module).__name__} by d = {worst:.1e}; it cannot be served"
        )


def module_output(module: Any, runtime: dict[str, Tensor], rows: Tensor) -> Tensor:
    """What a transformers experts module computes for `rows` [n, width] with one expert's runtime tensors.

    The order of `transformers.integrations.moe.batched_mm_experts_forward`, with the module's own
    `_apply_gate` and norm; fp32 in and out.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        weight = runtime[name]
        y = x @ (weight if module.is_transposed else weight.t())
        return y + runtime[name + "_bias"] if module.has_bias else y

    if module.has_gate:
        hidden = module._apply_gate(linear(rows, "gate_up_proj"))
    else:
        hidden = module.act_fn(linear(rows, "up_proj"))
    out = linear(hidden, "down_proj")
    if module.has_post_expert_norm:
        import torch

        weight = {"weight": runtime["post_expert_norm.weight"]}
        out = torch.func.functional_call(module.post_expert_norm, weight, (out,))
    result: Tensor = out
    return result


def _dense(loaded: Any) -> dict[str, Tensor]:
    """Every role of a loaded expert in fp32."""
    from kvasir_node.numerics import to_fp32
    from kvasir_node.recipes import materialise

    expert = materialise(loaded)
    return {role: to_fp32(matrix) for role, matrix in expert.matrices.items()} | dict(expert.vectors)


def roles_of(module: Any, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A runtime tensor of one expert as its roles, in `torch.nn.functional.linear` orientation."""
    if parameter == "post_expert_norm.weight":
        yield "norm", tensor
        return
    base, _, bias = parameter.partition("_proj")
    suffix = bias  # "" or "_bias"
    if module.is_transposed and tensor.dim() == 2:
        tensor = tensor.t()
    if base != "gate_up":
        yield base + suffix, tensor
        return
    half = tensor.shape[0] // 2
    if module.is_concatenated:
        yield "gate" + suffix, tensor[:half]
        yield "up" + suffix, tensor[half:]
    else:
        yield "gate" + suffix, tensor[::2]
        yield "up" + suffix, tensor[1::2]

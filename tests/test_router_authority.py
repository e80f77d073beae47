"""No code path of a node chooses an expert: by what its source may call, by what a call and a plan can carry,
and by what is executed."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.calls import Call, Group, Reply
from kvasir_node.recipes import check_recipe
from market.plans import ROLES, TensorRecipe
from relay.errors import ConfigError
from tests.support.experts import tiny_plan

ROOT = Path(__file__).resolve().parent.parent

CHOOSING = frozenset(
    {
        "topk", "kthvalue", "argmax", "argmin", "argsort", "nanargmax", "multinomial", "softmax",
        "log_softmax",        "gumbel_softmax", "Sampler", "StepRouting", "TopKRouter", "experts_forward",
    }
)  # fmt: skip
"""What a router or a sampler is made of, in torch, numpy, transformers and this project."""


def chooses(source: str) -> set[str]:
    """The names in `source` that could choose: attributes, plain names and imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {name.name.rpartition(".")[2] for name in node.names}
    return found & CHOOSING


def test_the_check_finds_a_router() -> None:
    assert chooses("import torch\nids = torch.topk(rows @ weight.T, 8)[1]") == {"topk"}
    assert chooses("from torch import argmax as pick") == {"argmax"}


@pytest.mark.parametrize("package", ["relay", "market", "kvasir_node"])
def test_no_module_below_the_backbone_has_what_a_router_is_made_of(package: str) -> None:
    sources = sorted((ROOT / package).rglob("*.py"))
    assert len(sources) > 20
    found = {str(path.relative_to(ROOT)): chooses(path.read_text(encoding="utf-8")) for path in sources}
    assert {path: names for path, names in found.items() if names} == {}


def test_nothing_of_a_decision_but_the_ids_can_cross_the_wire() -> None:
    """A new field of a call is a new thing that a worker learns: think before adding one here."""
    assert {field.name for field in dataclasses.fields(Call)} == {
        "id", "layer", "row_count", "deadline_ms", "groups", "rows", "weights",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(Group)} == {"ref", "counts", "ids"}
    assert {field.name for field in dataclasses.fields(Reply)} == {
        "call", "outputs", "service_us", "queue_us", "rows", "weighted",
    }  # fmt: skip


def test_a_plan_has_no_place_for_a_routers_weights() -> None:
    matrices = {"gate", "up", "down"}  # "gate" is the expert's own, not the model's router
    assert set(ROLES) == matrices | {f"{role}_bias" for role in matrices} | {"norm"}
    plan, _, _ = tiny_plan()
    recipe = plan.layers[0]
    source = recipe.tensors[0].sources
    for role in ("router", "router_bias", "e_score_correction_bias", "embedding", "lm_head"):
        with pytest.raises(ConfigError, match="unknown role"):
            check_recipe(replace(recipe, tensors=(*recipe.tensors, TensorRecipe(role, (4, 4), source))))

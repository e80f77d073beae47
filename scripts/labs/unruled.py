"""A swarm without router authority, for comparison: every owner decides for itself.

The owner of a window gets the hidden row and routes it with its own router, whose weights it keeps at its
own precision; of the experts it would choose it runs those that it holds, and weighs them itself. Where
owners disagree, experts run that the others did not choose, and chosen ones are absent. The product has no
such code: nodes are never given router weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvasir_backbone.model import BackboneModel
from kvasir_backbone.packed import KvMemory, PackedCache
from kvasir_backbone.routing import StepRouting
from kvasir_node.numerics import quantise_int4, quantise_int8, to_fp32
from kvasir_node.tensors import WIRE_TORCH
from relay.errors import ConfigError

from .inprocess import InProcessSwarm, NodeSpec


def router_of(model: Any, layer: int) -> Any:
    """The router module beside the experts module of that layer. Raises `ConfigError`."""
    for name, module in model.named_modules():
        if getattr(module, "kvasir_layer", None) != layer:
            continue
        block = model.get_submodule(name.rpartition(".")[0])
        for child in ("gate", "router"):
            if hasattr(block, child):
                return getattr(block, child)
    raise ConfigError(f"layer {layer}: no router beside its experts that the laboratory knows")


def own_router(router: Any, spec: NodeSpec) -> Any:
    """A copy of a router as a node of that kind would keep it: its matrices at the node's precision."""
    mine = copy.deepcopy(router)
    with torch.no_grad():
        for parameter in mine.parameters():
            if parameter.dim() == 2 and spec.precision in ("int8", "int4"):
                quantise = quantise_int8 if spec.precision == "int8" else quantise_int4
                parameter.copy_(to_fp32(quantise(parameter.float().contiguous())))
    return mine.to(WIRE_TORCH[spec.router_dtype])


class OwnRouters:
    """The routers of all owners, and how many of their decisions came out otherwise.

    A decision is one (row, layer). `differing` counts those whose executed experts are not the ones that the
    backbone's router chooses for that very row; `absent` and `extra` count experts.
    """

    def __init__(self, model: BackboneModel, swarm: InProcessSwarm) -> None:
        self.swarm = swarm
        self.decisions = self.differing = self.absent = self.extra = 0
        made: dict[tuple[int, NodeSpec], Any] = {}
        self.owners: dict[int, list[tuple[Any, Any, int]]] = {}
        for layer, owners in swarm.layers.items():
            router = router_of(model.model, layer)
            for node, window, ref in owners:
                key = (layer, node.spec)
                if key not in made:
                    made[key] = own_router(router, node.spec)
                self.owners.setdefault(layer, []).append((made[key], window, ref))

    def run(self, layer: int, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What all owners together make of `rows` [n, width]: the combined outputs fp32 [n, width], and
        which experts ran, [n, experts] bool. `ids` [n, k] is what the backbone's router chose."""
        with self.swarm.lock:
            return self._run(layer, rows.to(WIRE_TORCH[self.swarm.plan.wire_dtype]), ids)

    def _run(self, layer: int, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        experts = max(window.expert_end for _, window, _ in self.owners[layer])
        out = torch.zeros(len(rows), rows.shape[1])
        ran = torch.zeros(len(rows), experts, dtype=torch.bool)
        chosen: dict[int, tuple[Tensor, Tensor]] = {}
        for router, window, ref in self.owners[layer]:
            if id(router) not in chosen:
                with torch.inference_mode():
                    _, weights, own = router(rows.to(next(router.parameters()).dtype))
                chosen[id(router)] = own, weights
            own, weights = chosen[id(router)]
            self._run_owned(layer, rows, own, weights, (window, ref), out, ran)
        decided = torch.zeros_like(ran).scatter_(1, ids, True)
        self.decisions += len(rows)
        self.differing += int((ran != decided).any(1).sum())
        self.absent += int((decided & ~ran).sum())
        self.extra += int((ran & ~decided).sum())
        return out, ran

    def _run_owned(
        self, layer: int, rows: Tensor, own: Tensor, weights: Tensor, owned: tuple[Any, int], out: Tensor,
        ran: Tensor,
    ) -> None:  # fmt: skip
        window, ref = owned
        holding = self.swarm.owner_of[window].holdings[ref]
        mine = (own >= window.expert_start) & (own < window.expert_end)
        places = mine.nonzero()
        experts = own[mine]
        ran[places[:, 0], experts] = True
        order = torch.argsort(experts, stable=True)
        found, sizes = torch.unique_consecutive(experts[order], return_counts=True)
        for expert, pairs in zip(found.tolist(), torch.split(order, sizes.tolist()), strict=True):
            at, slot = places[pairs, 0], places[pairs, 1]
            outputs = holding.experts.run(layer, expert, rows[at]).float()
            out.index_add_(0, at, outputs * weights[at, slot].float().unsqueeze(-1))
        self.swarm.log.batches.clear()


@dataclass(slots=True)
class UnruledStep(StepRouting):
    """The routing of one forward pass without authority; what the backbone's router says is only compared."""

    routers: OwnRouters | None = None

    def run(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `StepRouting.run`."""
        assert self.routers is not None
        count = len(self.keys)
        ids, weights = ids[:count].to(torch.int64), weights[:count]
        self._ids.append(ids)
        self._weights.append(weights)
        made, _ = self.routers.run(layer, rows[:count], ids)
        out = torch.zeros_like(rows)
        out[:count] = made.to(rows.dtype)
        return out


class UnruledModel(BackboneModel):
    """A backbone whose experts are chosen by their owners; shares everything with the model it is made of."""

    routers: OwnRouters

    @classmethod
    def of(cls, model: BackboneModel, routers: OwnRouters) -> UnruledModel:
        """The same weights, and requests of its own."""
        unruled = copy.copy(model)
        unruled.__class__ = cls
        assert isinstance(unruled, UnruledModel)
        unruled.routers = routers
        unruled.dispatcher = routers.swarm
        unruled.memory = KvMemory(model.memory.attention)
        unruled._cache = PackedCache()
        unruled._caches, unruled._logs = {}, {}
        return unruled

    def _routing(self, *arguments: Any) -> StepRouting:
        step = super()._routing(*arguments)
        return UnruledStep(
            step.dispatcher, step.keys, deadline_s=step.deadline_s, replay=step.replay, routers=self.routers
        )

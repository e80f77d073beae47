"""The packed pass as one recorded graph, so that a step does not run a model's Python code layer by layer.

transformers' forward pass costs more in Python than in arithmetic where a step has few rows. Recorded once,
the same operations run from C++ in the same order on the same tensors: the same bits. What depends on the
step stays ours: attention and experts are operators that call back, once a layer each. Products, norms and
rotary embeddings are the C core's where it is here (`products.py`). While the graph runs the interpreter lock
is free for the other step thread and the event loop.

A recording may have caught a number that it should not have (the rows of its example, say). So it is used
only where it gives what the model's own code gives with the same products, bit for bit, for passes of several
sizes; else that code runs.

Knows torch's tracer and the packed form. Knows no requests and no swarm.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypedDict

import torch
from torch import Tensor

from kvasir_node.kernels.operators import operators

from . import packed, routing


class Shorter(TypedDict, total=False):
    """What a recording may put one operation in the place of: see `record`."""

    norms: Sequence[Any]
    turns: Turns


EXAMPLE_ROWS: Final = 7
"""Rows of the example that is recorded; a number that no model has among its sizes."""

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
"""tokens [1, rows], positions [1, rows], rows wanted [n] -> logits [1, n, vocabulary]."""

_ROPE: Final = "apply_rotary_pos_emb"
_operators: Any = None
_register_lock = threading.Lock()
_fault = threading.local()


def record(forward: Pass, norms: Sequence[Any] = (), turns: Turns | None = None) -> Pass | None:
    """The pass as a graph, or None where the model's code cannot be recorded.

    Parameters of the model must not require gradients. The graph shares their memory. `norms` are modules
    (see `find_norms`) that become one operation each, and so does what `turns` finds; whether that keeps
    their bits is to be seen.
    """
    _register()
    tokens = torch.zeros(1, EXAMPLE_ROWS, dtype=torch.long)
    positions = torch.arange(EXAMPLE_ROWS).unsqueeze(0)
    wanted = torch.arange(EXAMPLE_ROWS - 2)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _recording(), _fused(norms), turns or nullcontext():
            warnings.simplefilter("ignore")  # that the tracer is old, and each number that it keeps
            trace: Any = torch.jit.trace
            graph = trace(forward, (tokens, positions, wanted), check_trace=False)
            _shorten(graph.graph)
    except Exception:  # whatever a model's code does that a tracer cannot follow: the model itself still runs
        return None

    def run(tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        _fault.raised = None
        try:
            made: Tensor = graph(tokens, positions, wanted)
        except Exception:
            if _fault.raised is not None:  # the graph turns what a callback raised into text
                raise _fault.raised from None
            raise
        if _fault.raised is not None:
            raise _fault.raised
        return made

    return run


def _shorten(graph: Any) -> None:
    """Let sizes be plain numbers: the tracer makes a tensor of each and a number of that again."""
    for node in list(graph.nodes()):
        if node.kind() == "aten::Int" and node.input().node().kind() == "prim::NumToTensor":
            node.output().replaceAllUsesWith(node.input().node().input())
    passes: Any = torch._C
    passes._jit_pass_dce(graph)
    passes._jit_pass_cse(graph)


def find_norms(model: Any) -> list[Any]:
    """Modules that norm rows by their root mean square, with one weight for each element."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and getattr(module, "weight", None) is not None
    ]


@contextmanager
def _fused(norms: Sequence[Any]) -> Iterator[None]:
    """While active, these modules run as one operation each."""

    def fused(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda rows: torch.rms_norm(rows, module.weight.shape, module.weight, module.variance_epsilon)

    for module in norms:
        module.forward = fused(module)
    try:
        yield
    finally:
        for module in norms:
            del module.forward


class Turns:
    """Rotary embeddings of a model's code as one operation of the C core a layer, in what records meanwhile.

    `isa` is the number of the instruction set. transformers' models call a function of their own module for
    it; it is put back in the end, and other threads' calls of it go through.
    """

    def __init__(self, model: Any, isa: int) -> None:
        names = {type(module).__module__ for module in model.modules()}
        spaces = [vars(sys.modules[name]) for name in names if name in sys.modules]
        self._isa = isa
        self._originals = [(space, space[_ROPE]) for space in spaces if callable(space.get(_ROPE))]

    def __enter__(self) -> None:
        for space, original in self._originals:
            space[_ROPE] = self._turning(original)

    def __exit__(self, *_: object) -> None:
        for space, original in self._originals:
            space[_ROPE] = original

    def _turning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
            usual = not more and not named and (query.dim(), key.dim(), cos.dim(), sin.dim()) == (4, 4, 3, 3)
            if usual and getattr(packed.active, "record", None) is not None:
                return torch.ops.kvasir.rope(query, key, cos, sin, self._isa)
            return original(query, key, cos, sin, *more, **named)

        return turn


@contextmanager
def _recording() -> Iterator[None]:
    """While active, attention and experts of this thread's passes are recorded as operators."""
    packed.active.record = _record_attention
    routing.active.record = _record_experts
    try:
        yield
    finally:
        packed.active.record = routing.active.record = None


def _record_attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    operator: Any = torch.ops.kvasir.attend if operators() is None else torch.ops.kvasir.attention
    made: Tensor = operator(query, key, value, layer, scaling)
    return made


def _record_experts(layer: int, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    made: Tensor = torch.ops.kvasir.experts(rows, ids, weights, layer)
    return made


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    if getattr(packed.active, "batch", None) is None:  # only the shape counts while it is recorded
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    return _kept(packed.attend, layer, query, key, value, scaling)


def _experts(rows: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
    step = getattr(routing.active, "step", None)
    if step is None:
        return torch.zeros_like(rows)
    return _kept(step.run, layer, rows, ids, weights)


def _kept(call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call; what it raises is kept for `record`'s caller."""
    try:
        return call(*arguments)
    except BaseException as fault:
        _fault.raised = fault
        raise


def _register() -> None:
    """Define the operators, once in a process."""
    global _operators
    with _register_lock:
        if _operators is not None:
            return
        library: Any = torch.library.Library  # untyped
        library = library("kvasir", "DEF")
        library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float scaling) -> Tensor")
        library.define("experts(Tensor rows, Tensor ids, Tensor weights, int layer) -> Tensor")
        library.impl("attend", _attend, "CompositeExplicitAutograd")
        library.impl("experts", _experts, "CompositeExplicitAutograd")
        _operators = library

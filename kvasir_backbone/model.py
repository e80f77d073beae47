"""The model without its experts, in memory and ready to run one step.

Loads everything but the routed experts, which are never allocated, and runs it for the segments that the
scheduler decided on: all of them in one packed forward pass where the architecture fits that form, else one
pass a request with transformers' own cache, side by side, their dispatches gathered layer by layer.

Knows transformers. Knows no scheduling, no sampling and no owners.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as transformers_logging

from kvasir_node.kernels.attention import load_attention
from kvasir_node.kernels.operators import operators
from relay.errors import ConfigError, KvasirError

from . import packed, routing, traced
from .checkpoint import Checkpoint
from .coalescing import MAX_PASSES, SideBySide
from .footprint import Zeros, held_bytes, measure
from .invariance import try_passes
from .packed import MIN_ROWS, KvMemory, PackedBatch, PackedCache, padded_rows
from .products import PASS_LIMITS, Found, Products, distance
from .routing import NothingLeft, Routed, RoutingLog, StepRouting
from .scheduler import Segment
from .seam import DEFAULT_DEADLINE_S, Dispatcher, DispatchFailed, RowKey
from .skeleton import find_experts

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Compute dtypes by name; the same names are the plan's wire dtypes."""

PACKED_TYPES: Final = frozenset(
    {
        "aria_text", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared",
        "hunyuan_v1_moe", "hy_v3", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
        "solar_open",
    }
)  # fmt: skip
"""Model types whose attention fits the packed form; each is compared with stock `generate` by a test."""

CHUNKED_TYPES: Final = PACKED_TYPES | {
    "afmoe", "axk1", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "exaone_moe",
    "flint", "gemma4_text", "glm4_moe_lite", "gpt_oss", "granitemoe_swa", "inkling_text", "inkling2_text",
    "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax_m3_vl_text",
    "qwen3_5_moe_text", "qwen3_next",
}  # fmt: skip
"""Model types whose prompts may be computed in chunks; each is compared with stock by a test. The others
compute a prompt in one piece: transformers' state-space layers lose their state between chunks, and a sparse
attention's indexer (deepseek_v32 and its like) chooses other positions."""

_NO_KV: Final = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})
"""Kinds of layers that keep nothing for each position."""

_FIXED_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on a row's own position only."""

_load_lock = threading.Lock()
_log = structlog.get_logger("backbone")


@dataclass(frozen=True, slots=True)
class Work:
    """One segment with its tokens (one a row), and whether its request's demand is paid for."""

    segment: Segment
    tokens: Sequence[int]
    metered: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: fp32 logits [sampled rows, vocabulary] of each request that samples, the requests
    that failed, and for how many seconds the pass waited for experts without computing."""

    logits: Mapping[int, NDArray[np.float32]]
    failures: Mapping[int, KvasirError]
    waited_s: float = 0.0


class BackboneModel:
    """A loaded backbone. Where it is `packed`, several threads may call `forward` at once, each for requests
    of its own; else one.

    `packed` says whether requests share a forward pass, `packed_fault` why not; `chunked` whether a prompt
    may be computed in several pieces. `dispatcher` runs the experts and may be replaced between steps.
    `kv_token_bytes` are the bytes of keys and values of one position (an upper bound where transformers keeps
    them itself), `state_bytes` what a request keeps beside, whatever its length. `routed` are the experts of
    a layer and how many of them a row gets. A pass never has fewer than `least_rows` rows; `varies`
    says how a row's bits depend on its company in spite of that (see `invariance`).
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, dtype: str, dispatcher: Dispatcher | None) -> None:
        text = model.config.get_text_config()
        self.model = model
        self.path: Path = checkpoint.path
        self.config = model.config
        self.dtype = dtype
        self.dispatcher = dispatcher
        self.deadline_s = DEFAULT_DEADLINE_S
        experts = find_experts(model)
        self.moe_layers = tuple(experts)
        for layer, (_, module) in experts.items():
            module.kvasir_layer = layer
        self.packed_fault = packed_fault(text)
        self.packed = self.packed_fault is None
        self.routed = _routed(text, [module for _, module in experts.values()])
        self.chunked = text.model_type in CHUNKED_TYPES
        self.vocabulary = int(text.vocab_size)
        self.context_length = int(getattr(text, "max_position_embeddings", 0) or 2**20)
        self.kv_token_bytes = kv_token_bytes(text, DTYPES[dtype].itemsize)
        self.eos_ids = _eos_ids(model)
        self.least_rows = MIN_ROWS
        self.varies: str | None = None
        self.memory = KvMemory(load_attention() if self.packed else None)
        self._cache = PackedCache()
        self._graph: traced.Pass | None = None
        self._products: Products | None = None
        self._modules = tuple(model.modules())
        self._caches: dict[int, Any] = {}
        self._passes = SideBySide(passes_at_once(text))
        self._logs: dict[int, RoutingLog] = {}
        self.state_bytes = 0
        if not self.packed:
            footprint = measure(self._kept_after, self.kv_token_bytes)
            self.kv_token_bytes, self.state_bytes = footprint.token_bytes, footprint.state_bytes

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint | str | Path,
        *,
        dtype: str = "auto",
        dispatcher: Dispatcher | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load the backbone of a checkpoint in `dtype` ("auto": as it is stored).

        Routed experts are neither allocated nor read. `more` goes to transformers. Raises `ConfigError`.
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(checkpoint)
        name = resolve_dtype(checkpoint.config, dtype)
        auto: Any = AutoModelForCausalLM
        classes = {type(module) for _, module in checkpoint.skeleton.experts.values()}
        routing.register()
        packed.register()
        text = checkpoint.config.get_text_config()
        kwargs: dict[str, Any] = {"experts_implementation": routing.IMPLEMENTATION, **(more or {})}
        if packed_fault(text) is None:
            kwargs["attn_implementation"] = packed.ATTENTION
        checkpoint.warm_dense()
        folder = checkpoint.dense_path
        with _load_lock, _without_experts(classes), _quiet():
            try:
                model = auto.from_pretrained(
                    folder,
                    config=checkpoint.config,
                    dtype=DTYPES[name],
                    local_files_only=True,
                    **kwargs,
                )
            except ImportError as error:
                raise ConfigError(f"loading this checkpoint needs one more package: {error}") from None
        loaded = cls(model.eval().requires_grad_(False), checkpoint, name, dispatcher)
        loaded.record()
        return loaded

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded at first use. Raises `ConfigError` where there is none."""
        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{self.path} has no tokenizer that transformers can read: {error}") from None

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and other state that requests hold now."""
        return self.memory.nbytes + sum(held_bytes(cache) for cache in list(self._caches.values()))

    def forward(self, works: Sequence[Work]) -> StepResult:
        """Compute these segments; each request comes once."""
        assert self.dispatcher is not None, "the model has no dispatcher"
        if self.packed:
            return self._forward_packed(works)
        passes = [functools.partial(self._forward_alone, work) for work in works]
        logits: dict[int, NDArray[np.float32]] = {}
        failures: dict[int, KvasirError] = {}
        for work, result in zip(works, self._passes.run(self.dispatcher, passes), strict=True):
            if isinstance(result, Exception):
                failures[work.segment.request] = pass_failed(result)
            else:
                logits.update(result.logits)
                failures.update(result.failures)
        return StepResult(logits, failures)

    def release(self, request: int) -> None:
        """Free a request's keys and values; its recorded routing stays."""
        self.memory.release(request)
        self._caches.pop(request, None)

    def trim(self, request: int, positions: int) -> None:
        """Forget the recorded routing of a request beyond its first `positions` (rejected drafts)."""
        if request in self._logs:
            self._logs[request].trim(positions)

    def forget(self, request: int) -> RoutingLog | None:
        """Free everything of a request; returns its recorded routing."""
        self.release(request)
        return self._logs.pop(request, None)

    def redo(self, request: int, routing: RoutingLog) -> None:
        """Take this for the recorded routing of a request that is not known yet."""
        self._logs[request] = routing

    def _forward_packed(self, works: Sequence[Work]) -> StepResult:
        batch = PackedBatch([work.segment for work in works], self.memory)
        total = padded_rows(batch.rows, self.least_rows)
        tokens = [token for work in works for token in work.tokens]
        positions = [p for work in works for p in range(work.segment.start, work.segment.end)]
        padding = [0] * (total - batch.rows)
        sampling = [
            range(place + work.segment.rows - 1 - work.segment.drafts, place + work.segment.rows)
            if work.segment.samples
            else range(0)
            for work, place in zip(works, batch.places, strict=True)
        ]
        step = self._routing(works, batch.places, self.dispatcher)
        with packed.packed(batch), self._real_rows(total, batch.rows):
            logits = self._run(
                step,
                torch.tensor([tokens + padding]),
                torch.tensor([positions + padding]),
                None,
                list(itertools.chain.from_iterable(sampling)),
                spare=total - 1,
            )
        failures = self._failures(step)
        if logits is None:
            return StepResult({}, failures, step.waited_s)
        self._record(step, works, batch.places, failures)
        made: dict[int, NDArray[np.float32]] = {}
        first = 0
        for work, rows in zip(works, sampling, strict=True):
            if rows and work.segment.request not in failures:
                made[work.segment.request] = logits[first : first + len(rows)]
            first += len(rows)
        return StepResult(made, failures, step.waited_s)

    def _forward_alone(self, work: Work, dispatcher: Dispatcher) -> StepResult:
        """One request's own pass; passes of several requests run at the same time."""
        segment = work.segment
        if segment.request not in self._caches:
            self._caches[segment.request] = DynamicCache(config=self.config.get_text_config(decoder=True))
        step = self._routing([work], [0], dispatcher)
        logits = self._run(
            step,
            torch.tensor([list(work.tokens)]),
            torch.arange(segment.start, segment.end).unsqueeze(0),
            self._caches[segment.request],
            [segment.rows - 1] if segment.samples else [],
            spare=segment.rows - 1,
        )
        failures = self._failures(step)
        if logits is None or failures:
            return StepResult({}, failures)
        self._record(step, [work], [0], failures)
        return StepResult({segment.request: logits} if segment.samples else {}, {})

    def _kept_after(self, rows: int) -> int:
        """Bytes that a text of that many rows keeps, by a pass of its own with experts that answer zeros."""
        probe = Segment(-1, 0, 0, rows, rows, rowwise=False, replayed=0, samples=False)
        self._forward_alone(Work(probe, [0] * rows), Zeros())
        kept = held_bytes(self._caches[probe.request])
        self.forget(probe.request)
        return kept

    def _run(
        self,
        step: StepRouting,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        wanted: list[int],
        *,
        spare: int,
    ) -> NDArray[np.float32] | None:
        """One forward pass: fp32 logits [rows wanted, vocabulary], or None where every request failed.

        Without `cache` it is a packed one. Where products are torch's the output layer runs with as much
        padding as the rest, made of row `spare`.
        """
        rows = wanted
        if self._products is None:
            total = padded_rows(len(wanted), self.least_rows)
            rows = wanted + [spare] * (total - len(wanted)) if wanted else [spare]
        chosen = torch.tensor(rows, dtype=torch.long)
        try:
            with routing.routing(step), torch.inference_mode():
                if cache is not None:
                    made = self._pass(tokens, positions, chosen, cache)
                elif self._graph is not None and not self._watched():
                    made = self._graph(tokens, positions, chosen)
                else:
                    made = self._packed_pass(tokens, positions, chosen)
        except NothingLeft:
            return None
        logits: NDArray[np.float32] = made[0, : len(wanted)].float().numpy()
        return logits

    def _pass(self, tokens: Tensor, positions: Tensor, wanted: Tensor, cache: Any) -> Tensor:
        """transformers' own forward pass: logits [1, rows wanted, vocabulary]."""
        made: Tensor = self.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=wanted,
        ).logits
        return made

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of `model` by its name, with the values it was loaded with, one after the other.

        Those that are packed for the C core have none of their own any more.
        """
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach() if self._products is None else self._products.plain(parameter)

    def own_code(self) -> contextlib.AbstractContextManager[None]:
        """While active, this thread may run `model` itself: its matrices may be the C core's."""
        return contextlib.nullcontext() if self._products is None else self._products.active()

    def _packed_pass(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        with self.own_code():
            return self._pass(tokens, positions, wanted, self._cache)

    def _real_rows(self, total: int, real: int) -> contextlib.AbstractContextManager[None]:
        """While active, this thread's products leave the padding out of a pass of `total` rows."""
        if self._products is None:
            return contextlib.nullcontext()
        return self._products.operators.real_rows(total, real)

    def _watched(self) -> bool:
        """Whether someone listens to the model's modules, which a recorded graph does not run."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)

    def record(self) -> bool:
        """Run packed passes from a recorded graph, where it gives the same bits; whether it does."""
        self._graph = None
        if not self.packed:
            return False
        if self._products is None:
            self._take_over()
        expected = try_passes(self).logits
        if self._products is None:
            shorter: traced.Shorter = {"norms": traced.find_norms(self.model)}
        else:
            shorter = {"turns": traced.Turns(self.model, self._products.operators.kernel.isa.number)}
        for options in (shorter, traced.Shorter()):
            with _load_lock:
                self._graph = traced.record(self._packed_pass, **options)
            try:
                if self._graph is not None and all(map(np.array_equal, expected, try_passes(self).logits)):
                    return True
            except Exception:  # a graph that cannot compute another pass than the recorded one
                continue
        self._graph = None
        return False

    def _take_over(self) -> None:
        """Run products and norms in the C core from here on, where whole passes show torch's results."""
        found = operators()
        if found is None or DTYPES[self.dtype] not in PASS_LIMITS:
            return
        with Found(self.model) as seen:
            expected = try_passes(self)
        self._products = Products(found)
        gap, limit, reason = float("inf"), PASS_LIMITS[DTYPES[self.dtype]], "a product or the logits differ"
        try:
            if self._products.pack(seen, traced.find_norms(self.model)):
                made = try_passes(self, like=expected).logits
                gap = max(map(distance, map(torch.tensor, made), map(torch.tensor, expected.logits)))
        except Exception as fault:  # whatever a model's code does with what is packed: torch still runs it
            reason = str(fault)
        if gap <= limit:
            self.least_rows = MIN_ROWS if seen.others else 1
            _log.info("products.packed", matrices=self._products.count, norms=self._products.norms, d=gap)
            return
        _log.warning("products.rejected", d=gap, limit=limit, reason=reason, instead="torch")
        self._products.restore()
        self._products = None

    def _routing(
        self, works: Sequence[Work], places: Sequence[int], dispatcher: Dispatcher | None
    ) -> StepRouting:
        assert dispatcher is not None
        keys = [
            RowKey(work.segment.request, work.segment.step, position, work.metered)
            for work in works
            for position in range(work.segment.start, work.segment.end)
        ]
        replay: list[tuple[int, Routed]] = []
        for work, place in zip(works, places, strict=True):
            segment = work.segment
            if segment.replayed:
                log = self._logs[segment.request]
                replay.append((place, log.rows(segment.start, segment.start + segment.replayed)))
        kernel = None if self._products is None else self._products.operators.kernel
        return StepRouting(dispatcher, keys, deadline_s=self.deadline_s, replay=replay, kernel=kernel)

    def _record(
        self, step: StepRouting, works: Sequence[Work], places: Sequence[int], failures: Mapping[int, object]
    ) -> None:
        decided = step.recorded()
        for work, place in zip(works, places, strict=True):
            segment = work.segment
            if segment.request not in failures and segment.replayed < segment.rows:
                log = self._logs.setdefault(segment.request, RoutingLog())
                log.append(decided.slice(place + segment.replayed, place + segment.rows))

    @staticmethod
    def _failures(step: StepRouting) -> dict[int, DispatchFailed]:
        return {step.keys[row].request: failure for row, failure in step.failures.items()}


def resolve_dtype(config: Any, dtype: str) -> str:
    """The name of the compute dtype: `dtype` itself, or the checkpoint's own for "auto".

    Raises `ConfigError` for one that is neither.
    """
    if dtype == "auto":
        stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        dtype = str(stored or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"cannot compute in {dtype!r}: choose one of {', '.join(DTYPES)}")
    return dtype


def packed_fault(text: Any) -> str | None:
    """Why a model of this text configuration does not fit the packed form; None where it does."""
    if text.model_type not in PACKED_TYPES:
        return f"the attention of {text.model_type} is not one that requests can share a pass of"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    if getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True):
        return "its attention has a sliding window"
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _FIXED_ROPE:
        return f"its rotary embedding ({rope['rope_type']}) depends on the length of the whole text"
    return None


def passes_at_once(text: Any) -> int:
    """How many requests' passes may run at the same time.

    One, where a rotary embedding depends on the length of the text: transformers keeps the frequencies for
    the text at hand in the model, which all passes share.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    moving = any(re.search("dynamic|longrope", str(kind.get("rope_type"))) for kind in kinds)
    return 1 if moving else MAX_PASSES


def pass_failed(fault: Exception) -> KvasirError:
    """What ends a request whose pass raised `fault`; one of our own bugs is logged."""
    if isinstance(fault, KvasirError):
        return fault
    # As text: a renderer that prints locals would print what people wrote.
    trace = "".join(traceback.format_exception(fault))
    _log.error("step.failed", requests=1, reason=str(fault), trace=trace)
    return KvasirError(f"the model could not compute this step: {fault}")


def kv_token_bytes(text: Any, item_bytes: int) -> int:
    """Bytes of the keys and values of one position over all layers that keep any, at `item_bytes` each."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = list(getattr(text, "per_layer_config", None) or [text] * len(kinds))
    elements = sum(
        _kv_elements(layer) for layer, kind in zip(layers, kinds, strict=True) if kind not in _NO_KV
    )
    return max(1, elements * item_bytes)


def _kv_elements(layer: Any) -> int:
    """Elements of the key and value of one position in one attention layer of this configuration."""
    if getattr(layer, "kv_lora_rank", None):  # latent attention: the latent and its rotary part are kept
        indexer = getattr(layer, "index_head_dim", None) or 0
        return int(layer.kv_lora_rank + layer.qk_rope_head_dim + indexer)
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return int(2 * heads * head_dim)


def _routed(text: Any, modules: Sequence[Any]) -> tuple[int, int]:
    """Experts of the largest MoE layer, and how many of them a row gets (8 where the name is not known)."""
    experts = max((int(getattr(module, "num_experts", 0)) for module in modules), default=0) or 64
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
    chosen = next((value for name in names if (value := getattr(text, name, None))), 8)
    top_k = max(chosen) if isinstance(chosen, (list, tuple)) else int(chosen)
    return experts, max(1, min(top_k, experts))


def _eos_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, from the generation configuration or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, (list, tuple)) else [value])
    return frozenset()


@contextlib.contextmanager
def _without_experts(classes: set[type]) -> Iterator[None]:
    """While active, modules of these classes are built without parameters, which are then never read."""
    originals: dict[Any, Any] = {cls: cls.__init__ for cls in classes}  # type: ignore[misc]

    def bare(original: Any) -> Any:
        @functools.wraps(original)
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            with torch.device("meta"):
                original(self, *args, **kwargs)
            self._is_hf_initialized = True  # nothing is left to initialise
            for name in list(self._parameters):
                del self._parameters[name]

        return build

    try:
        for cls, original in originals.items():
            cls.__init__ = bare(original)
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting every expert's tensors as unexpected, and from drawing bars."""
    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

"""The model without its experts: what is loaded, what runs how often, and whether it equals stock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.engine import EngineConfig
from kvasir_backbone.equality import compare_greedy, find_routers, load_stock, stock_greedy
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import (
    CHUNKED_TYPES,
    PACKED_TYPES,
    BackboneModel,
    Work,
    kv_token_bytes,
    packed_fault,
    resolve_dtype,
)
from kvasir_backbone.scheduler import Segment
from relay.errors import ConfigError
from tests.support.architectures import ARCHITECTURES
from tests.support.dispatchers import Recording
from tests.support.generating import generate
from tests.support.tiny_models import CONFIGS, save_fp8, save_int4, save_mxfp4, save_tiny

TOKENS = 12
ALONE = sorted(set(CONFIGS) - PACKED_TYPES)


def _prompts(vocabulary: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (size,), generator=generator).tolist() for size in (5, 70, 11, 1)]


@contextmanager
def _loaded(folder: Path) -> Iterator[BackboneModel]:
    with Checkpoint.open(folder) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=1 << 20, wire_dtype="float32")
        local = LocalExperts(checkpoint.read, plan, cache_bytes=1 << 24)
        yield BackboneModel.load(checkpoint, dtype="float32", dispatcher=local)


async def _equals_stock(folder: Path, *, packed: bool) -> None:
    """Several prompts at once, one of them over three chunks, greedy in fp32, token for token."""
    with _loaded(folder) as model:
        assert model.packed == packed
        assert model.chunked == (model.config.model_type in CHUNKED_TYPES)
        stock = load_stock(folder)
        texts = await generate(model, _prompts(), TOKENS, EngineConfig(chunk_rows=32))
        for prompt, ours in zip(_prompts(), texts, strict=True):
            theirs = stock_greedy(stock, prompt, TOKENS, ignore_eos=True)
            comparison = compare_greedy(stock, prompt, ours, theirs)
            assert comparison.matches, comparison.reason
        tight = EngineConfig(chunk_rows=32, kv_bytes=model.kv_token_bytes * 32 * 5 + 2 * model.state_bytes)
        assert await generate(model, _prompts(), TOKENS, tight) == texts
        assert model.kv_bytes == 0


def test_every_architecture_of_a_list_is_tested() -> None:
    assert {entry.model_type for entry in ARCHITECTURES} | set(CONFIGS) >= CHUNKED_TYPES > PACKED_TYPES


@pytest.mark.parametrize("name", sorted(PACKED_TYPES & set(CONFIGS)))
async def test_packed_architectures_equal_stock(tmp_path: Path, name: str) -> None:
    await _equals_stock(save_tiny(tmp_path, name), packed=True)


@pytest.mark.parametrize("name", ALONE)
async def test_other_architectures_equal_stock_one_request_a_pass(tmp_path: Path, name: str) -> None:
    await _equals_stock(save_tiny(tmp_path, name), packed=False)


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4, save_int4])
async def test_quantised_checkpoints_equal_stock(tmp_path: Path, save: Any) -> None:
    with _loaded(save(tmp_path)) as model:
        stock = load_stock(tmp_path)
        for prompt, ours in zip(_prompts(), await generate(model, _prompts(), TOKENS), strict=True):
            theirs = stock_greedy(stock, prompt, TOKENS, ignore_eos=True)
            assert compare_greedy(stock, prompt, ours, theirs).matches


def test_routed_experts_are_never_allocated(bundled_model: BackboneModel, bundled_stock: Any) -> None:
    ours = {name: tuple(p.shape) for name, p in bundled_model.model.named_parameters()}
    theirs = {name: tuple(p.shape) for name, p in bundled_stock.named_parameters()}
    assert {name: shape for name, shape in theirs.items() if ".experts." not in name} == ours
    assert sum(".experts." in name for name in theirs) == 8
    assert not any(p.is_meta for p in bundled_model.model.parameters())


def test_loading_leaves_the_architecture_as_it_was(bundled_model: BackboneModel, bundled_stock: Any) -> None:
    assert bundled_stock.model.layers[0].mlp.experts.gate_up_proj.shape == (256, 64, 192)


async def test_each_router_runs_once_for_each_token_and_layer(bundled_model: BackboneModel) -> None:
    rows: Counter[int] = Counter()
    calls: Counter[int] = Counter()

    def count(layer: int) -> Any:
        def hook(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
            rows[layer] += inputs[0].reshape(-1, 192).shape[0]
            calls[layer] += 1

        return hook

    routers = find_routers(bundled_model.model)
    handles = [router.register_forward_hook(count(layer)) for layer, router in enumerate(routers)]
    recorder = Recording(bundled_model.dispatcher)  # type: ignore[arg-type]
    inner, bundled_model.dispatcher = bundled_model.dispatcher, recorder
    try:
        prompts = [list(range(10, 210)), [5], [7, 8, 9]]
        texts = await generate(bundled_model, prompts, 6)
    finally:
        bundled_model.dispatcher = inner
        for handle in handles:
            handle.remove()
    decided = Counter((key.request, key.position, layer) for layer, keys, _ in recorder.calls for key in keys)
    # Every position of every request is decided once a layer; the last token is never fed back.
    expected = sum(len(prompt) + len(text) - 1 for prompt, text in zip(prompts, texts, strict=True))
    assert len(decided) == expected * 4
    assert set(decided.values()) == {1}
    assert len(set(calls.values())) == 1
    assert len(routers) == len(rows) == 4
    # What a router sees beyond that is padding: one to three rows a pass, and it never left the process.
    assert {rows[layer] - expected for layer in range(4)} <= set(range(calls[0], 3 * calls[0] + 1))


async def test_credit_keys_name_each_unit_once_even_when_computed_again(bundled_model: BackboneModel) -> None:
    recorder = Recording(bundled_model.dispatcher)  # type: ignore[arg-type]
    inner, bundled_model.dispatcher = bundled_model.dispatcher, recorder
    try:
        tight = EngineConfig(kv_bytes=bundled_model.kv_token_bytes * 32 * 3)
        prompts = [list(range(10, 30)), list(range(60, 80)), [3, 4]]
        await generate(bundled_model, prompts, 20, tight, metered=False)
    finally:
        bundled_model.dispatcher = inner
    units = Counter((key, layer) for layer, keys, _ in recorder.calls for key in keys)
    assert set(units.values()) == {1}
    assert not any(key.metered for key, _ in units)
    again = Counter((key.request, key.position, layer) for key, layer in units)
    assert max(again.values()) > 1, "nothing was preempted: this test needs it"


async def test_a_row_does_not_depend_on_its_company(bundled_model: BackboneModel) -> None:
    def logits(company: int) -> torch.Tensor:
        works = [_work(1, [11, 12, 13])] + [_work(2 + i, [20 + i]) for i in range(company)]
        made = bundled_model.forward(works).logits[1]
        for number in range(1, company + 2):
            bundled_model.forget(number)
        return torch.from_numpy(made)

    alone = logits(0)
    for company in (1, 2, 3, 7, 40):
        assert torch.equal(logits(company), alone)


def test_logits_are_close_to_stock(bundled_model: BackboneModel, bundled_stock: Any) -> None:
    tokens = list(range(40, 90))
    made = bundled_model.forward([_work(1, tokens)]).logits[1]
    bundled_model.forget(1)
    with torch.no_grad():
        stock = bundled_stock(input_ids=torch.tensor([tokens])).logits[0, -1]
    assert float((torch.from_numpy(made) - stock).abs().max()) < 1e-4


def _work(request: int, tokens: list[int]) -> Work:
    rows = len(tokens)
    return Work(Segment(request, 0, 0, rows, 64, False, 0, True), tokens)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "minimax_m2"])
def test_kv_bytes_of_a_position_are_what_is_allocated(tmp_path: Path, name: str) -> None:
    with _loaded(save_tiny(tmp_path, name)) as model:
        model.forward([_work(1, [4, 5, 6])])
        assert model.kv_bytes == model.kv_token_bytes * 64
        model.release(1)
        assert model.kv_bytes == 0


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_kv_bytes_of_a_position_bound_what_transformers_keeps(tmp_path: Path, name: str) -> None:
    with _loaded(save_tiny(tmp_path, name)) as model:
        model.forward([_work(1, list(range(3, 43)))])
        assert 0 < model.kv_bytes <= model.kv_token_bytes * 40


def test_what_does_not_fit_the_packed_form_says_why(tmp_path: Path) -> None:
    def fault(name: str, **overrides: Any) -> str | None:
        folder = save_tiny(tmp_path / f"{name}{len(overrides)}", name, **overrides)
        with Checkpoint.open(folder) as checkpoint:
            return packed_fault(checkpoint.skeleton.text_config)

    assert fault("mixtral") is None
    assert "sliding window" in str(fault("mixtral", sliding_window=16))
    assert "gpt_oss" in str(fault("gpt_oss"))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic" in str(fault("qwen3_moe", rope_parameters=rope))


def test_the_compute_dtype(bundled: Checkpoint) -> None:
    assert resolve_dtype(bundled.config, "auto") == "bfloat16"
    assert resolve_dtype(bundled.config, "float32") == "float32"
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype(bundled.config, "int8")
    assert kv_token_bytes(bundled.config, 2) == 4 * 2 * 2 * 32 * 2


async def test_bf16_writes_the_same_text_whatever_runs_beside(bundled: Checkpoint) -> None:
    plan = bundled.make_plan(window_bytes=8 << 20, wire_dtype="bfloat16")
    model = BackboneModel.load(bundled, dispatcher=LocalExperts(bundled.read, plan))
    prompts = [list(range(10, 60)), [5, 6], [7, 8, 9]]
    together = await generate(model, prompts, 12)
    assert together == [(await generate(model, [prompt], 12))[0] for prompt in prompts]


def test_special_things_of_the_bundled_model(bundled_model: BackboneModel) -> None:
    assert bundled_model.packed
    assert bundled_model.eos_ids == {0}
    assert bundled_model.context_length == 2048
    assert bundled_model.vocabulary == 2048
    text = "In the beginning"
    assert bundled_model.tokenizer.decode(bundled_model.tokenizer(text).input_ids) == text


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with _loaded(save_tiny(tmp_path, "mixtral")) as model, pytest.raises(ConfigError, match="tokenizer"):
        _ = model.tokenizer

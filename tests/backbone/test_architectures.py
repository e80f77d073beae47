"""The matrix: every architecture planned, served by two nodes, and compared with stock transformers in fp32.

A swarm's logits are those of stock at every place of a text, within 1e-4; its greedy text is stock's, token
for token or to a near-tie that is shown (`kvasir_backbone.equality`).
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.engine import EngineConfig
from kvasir_backbone.equality import LOGIT_GAP, compare_greedy, load_stock, stock_greedy
from kvasir_backbone.model import BackboneModel, Work
from kvasir_backbone.scheduler import Segment
from market.plans import Plan
from tests.support.architectures import ARCHITECTURES, QUANTISED, Architecture
from tests.support.generating import generate
from tests.support.two_nodes import two_nodes

TOKENS = 6
PROMPTS = ([7, 301, 44, 190, 12], list(range(100, 137)))
"""The second is longer than a chunk and than every sliding window of the matrix."""


@pytest.mark.parametrize("entry", [*ARCHITECTURES, *QUANTISED], ids=lambda entry: entry.name)
def test_two_nodes_give_what_stock_gives(tmp_path: Path, entry: Architecture) -> None:
    asyncio.run(_two_nodes_give_what_stock_gives(tmp_path, entry))  # on one loop: it is long enough


async def _two_nodes_give_what_stock_gives(folder: Path, entry: Architecture) -> None:
    entry.checkpoint(folder)
    stock = load_stock(folder)
    with Checkpoint.open(folder) as checkpoint:
        plan = _plan(checkpoint)
        _is_as_the_entry_says(plan, entry)
        async with two_nodes(checkpoint, plan) as nodes:
            model = BackboneModel.load(checkpoint, dtype="float32", dispatcher=nodes.dispatcher)
            assert (model.packed, model.chunked) == (entry.packed, entry.chunked)
            await _same_logits(model, stock)
            await _same_text(model, stock)
            served = [server.served for server in nodes.servers]
    assert all(each.calls > 0 for each in served)
    assert sum(each.rows for each in served) > 0
    assert nodes.dispatcher.stats.fallback_rows == 0


def _plan(checkpoint: Checkpoint) -> Plan:
    """A plan whose layers are cut in two or more, so that both nodes work for each."""
    layer = min(recipe.expert_bytes * recipe.experts for recipe in checkpoint.recipes(random.Random(3)))
    return checkpoint.make_plan(window_bytes=max(1, layer // 2), wire_dtype="float32")


def _is_as_the_entry_says(plan: Plan, entry: Architecture) -> None:
    recipe = plan.layers[0]
    ops = {op[0] for tensor in recipe.tensors for op in tensor.ops}
    roles = {tensor.role for tensor in recipe.tensors}
    assert ("fused" in entry.stored) == all(source.stride > 0 for source in recipe.sources())
    assert ("transposed" in entry.stored) == ("transpose" in ops)
    assert ("interleaved" in entry.stored) == any(
        op[0] == "rows" and op[3] == 2 for tensor in recipe.tensors for op in tensor.ops
    )
    assert ("biases" in entry.stored) == ("down_bias" in roles)
    for word in ("fp8", "mxfp4", "int4"):
        assert (word in entry.stored) == any(word in op for op in ops)
    assert ("no gate" in entry.gate) == ("gate" not in roles)
    assert plan.width == (32 if "narrower" in entry.note else 64)


async def _same_logits(model: BackboneModel, stock: Any) -> None:
    """A prompt, then token after token, against stock that computes the same pieces with its own cache."""
    start, cache = 0, None
    for step, tokens in enumerate((PROMPTS[1], [9], [250], [31])):
        with torch.no_grad():
            expected = stock(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache = expected.past_key_values
        segment = Segment(1, step, start, len(tokens), 64, rowwise=False, replayed=0, samples=True)
        result = await asyncio.to_thread(model.forward, [Work(segment, tokens)])
        assert not result.failures, result.failures
        difference = (torch.from_numpy(result.logits[1]) - expected.logits[0, -1].float()).abs().max()
        assert float(difference) <= LOGIT_GAP
        start = segment.end
        positions = segment.capacity if model.packed else start
        assert 0 < model.kv_bytes <= model.state_bytes + positions * model.kv_token_bytes
    model.forget(1)


async def _same_text(model: BackboneModel, stock: Any) -> None:
    texts = await generate(model, PROMPTS, TOKENS, EngineConfig(chunk_rows=32))
    for prompt, ours in zip(PROMPTS, texts, strict=True):
        theirs = stock_greedy(stock, prompt, TOKENS, ignore_eos=True)
        comparison = compare_greedy(stock, prompt, ours, theirs)
        assert comparison.matches, comparison.reason

"""The dense part over two processes: the same text, half the memory, and an end that is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from kvasir_backbone.bundled import bundled_model_path
from kvasir_backbone.checkpoint import Checkpoint
from kvasir_backbone.engine import Engine
from kvasir_backbone.equality import compare_greedy, load_stock
from kvasir_backbone.local_experts import LocalExperts
from kvasir_backbone.model import BackboneModel
from kvasir_backbone.tensor_parallel import (
    LeadingModel,
    Ranks,
    distribution,
    held_bytes,
    tensor_parallel_fault,
)
from relay.errors import ConfigError, KvasirError
from tests.support.dispatchers import Failing
from tests.support.generating import collect, generate
from tests.support.tiny_models import save_tiny


def test_what_cannot_be_divided_is_refused_with_the_reason(tmp_path: Path) -> None:
    def fault(name: str, ranks: int) -> str | None:
        folder = tmp_path / name
        with Checkpoint.open(folder if folder.exists() else save_tiny(folder, name)) as checkpoint:
            return tensor_parallel_fault(checkpoint.config, ranks)

    assert fault("glm4_moe", 2) is None
    assert "4 attention heads cannot be divided among 3" in str(fault("glm4_moe", 3))
    assert "2 key-value heads cannot be divided among 4" in str(fault("glm4_moe", 4))
    assert "one pass each" in str(fault("deepseek_v3", 2))
    with (
        Checkpoint.open(tmp_path / "glm4_moe") as checkpoint,
        pytest.raises(ConfigError, match="--tensor-parallel 4"),
    ):
        distribution(checkpoint.config, 4)


@contextmanager
def _two(folder: Path) -> Iterator[tuple[LeadingModel, Ranks, LocalExperts]]:
    """A model over this process and one more."""
    with Checkpoint.open(folder) as checkpoint, closing(Ranks(folder, "float32", 2)) as ranks:
        plan = checkpoint.make_plan(window_bytes=8 << 20, wire_dtype="float32")
        local = LocalExperts(checkpoint.read, plan)
        more = distribution(checkpoint.config, 2)
        ranks.start()
        model = LeadingModel.load(checkpoint, dtype="float32", dispatcher=local, more=more).lead(ranks)
        ranks.ready()
        yield model, ranks, local


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["bundled", "glm4_moe"])
async def test_two_processes_write_the_text_of_one(tmp_path: Path, name: str) -> None:
    folder = bundled_model_path() if name == "bundled" else save_tiny(tmp_path, name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (size,), generator=generator).tolist() for size in (9, 40, 1)]
    with Checkpoint.open(folder) as checkpoint:
        plan = checkpoint.make_plan(window_bytes=8 << 20, wire_dtype="float32")
        one = BackboneModel.load(checkpoint, dtype="float32", dispatcher=LocalExperts(checkpoint.read, plan))
        alone = await generate(one, prompts, 6)
    stock = load_stock(folder)
    with _two(folder) as (model, ranks, local):
        sharded, whole = held_bytes(model.model)
        everything = sum(held_bytes(one.model))
        assert sharded == pytest.approx((everything - whole) / 2)
        assert model.kv_token_bytes == one.kv_token_bytes // 2
        texts = await generate(model, prompts, 6)
        for prompt, ours, theirs in zip(prompts, texts, alone, strict=True):
            comparison = compare_greedy(stock, prompt, ours, theirs)
            assert comparison.matches, comparison.reason
        assert model.kv_bytes == 0

        if name == "bundled":
            return
        # A failed dispatch fails its request on all ranks, and nothing else.
        model.dispatcher = Failing(local, lambda layer, key: layer == 2 and key.position == 40)
        async with Engine(model) as engine:
            results = await asyncio.gather(
                *(collect(engine, prompt, 6) for prompt in prompts), return_exceptions=True
            )
        assert isinstance(results[1], KvasirError)
        assert [results[0], results[2]] == [texts[0], texts[2]]
        model.dispatcher = local
        assert await generate(model, prompts[:1], 6) == texts[:1]

        # A rank that is gone ends all computing, with a word.
        ranks._processes[0].kill()
        ranks._processes[0].wait(10)
        with pytest.raises(KvasirError, match="ended with status"):
            await generate(model, prompts[:1], 2)
        assert "restart" in ranks.fault()

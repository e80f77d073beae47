"""Memory: a backbone that never allocates its experts, against stock transformers loading the whole model.

A checkpoint of about 1.5 GB, 95 % of it experts, is made in a temporary folder. Then, each in a process of
its own: a bare import of torch and transformers; stock transformers loading the model; and a backbone, which
opens the checkpoint, makes its plan (proving one random expert a layer), loads the dense part and writes
text. The backbone's experts are computed by another process, as a swarm would, through the same seam.

Run as a module with a role (`python -m benches.memory backbone FOLDER`) it is that process.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Report
from .checkpoint import Shape, shape_argument
from .process import MB, forget_cached, in_child, peak_rss_mb, storage_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir_backbone.model import BackboneModel
    from kvasir_backbone.seam import RowKey

KV_BYTES = 64 * 1024 * 1024
WINDOW_BYTES = 100 * MB
PROMPT_TOKENS = 256
TOKENS = 32
ALLOWANCE_MB = 400.0
READ_SHARE = 0.12


def run(work_dir: Path | None) -> Report:
    """Measure, and compare with the promised figures."""
    with tempfile.TemporaryDirectory(prefix="kvasir-memory-", dir=work_dir) as name:
        folder = Path(name) / "random-moe"
        sizes = in_child("checkpoint", str(folder), shape_argument(Shape()))
        imports = in_child("memory", "imports")
        forget_cached(folder)
        backbone = in_child("memory", "backbone", str(folder))
        full = in_child("memory", "full", str(folder))
    read = backbone["read_bytes"]
    report = Report(
        {
            "checkpoint_mb": round(sizes["total_bytes"] / MB, 1),
            "expert_share": round(sizes["expert_bytes"] / sizes["total_bytes"], 4),
            "backbone_peak_rss_mb": round(backbone["peak_rss_mb"], 1),
            "full_peak_rss_mb": round(full["peak_rss_mb"], 1),
            "dense_mb": round(backbone["dense_bytes"] / MB, 1),
            "import_rss_mb": round(imports["peak_rss_mb"], 1),
            "bytes_read_share": None if read is None else round(read / sizes["total_bytes"], 4),
            "tokens": backbone["tokens"],
        }
    )
    bound = backbone["dense_bytes"] / MB + ALLOWANCE_MB + imports["peak_rss_mb"]
    report.promise(
        f"the backbone stays within dense + {ALLOWANCE_MB:.0f} MB + imports = {bound:.0f} MB",
        backbone["peak_rss_mb"] <= bound,
    )
    if read is not None:
        share = read / sizes["total_bytes"]
        report.promise(f"it reads at most {READ_SHARE:.0%} of the file bytes", 0 < share <= READ_SHARE)
    return report


# --- the processes ------------------------------------------------------------------------------------


def imports() -> dict[str, Any]:
    """What importing the two libraries takes."""
    import torch  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401 - the submodules that any load imports

    assert transformers.__version__
    return {"peak_rss_mb": peak_rss_mb()}


def full(folder: str) -> dict[str, Any]:
    """Stock transformers: load all of it, run it once."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3, 4]]))
    return {"peak_rss_mb": peak_rss_mb()}


class RemoteExperts:
    """A dispatcher over a pipe to another process: rows and ids go there, outputs come back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def dispatch(
        self, layer: int, rows: Tensor, ids: Tensor, keys: Sequence[RowKey], deadline_s: float
    ) -> Tensor:
        """See `kvasir_backbone.seam.Dispatcher`."""
        import torch

        assert rows.dtype == torch.bfloat16, "the checkpoint is bf16, and so is what is sent"
        self._connection.send((layer, rows.view(torch.int16).numpy(), ids.numpy()))
        if not self._connection.poll(deadline_s):
            raise TimeoutError("the experts' process did not answer")
        return torch.from_numpy(self._connection.recv()).view(torch.bfloat16)


def worker(folder: str, address: str) -> None:
    """The experts' process: answers until the pipe closes."""
    import torch

    from kvasir_backbone.checkpoint import Checkpoint
    from kvasir_backbone.local_experts import LocalExperts

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(folder)
    plan = checkpoint.make_plan(window_bytes=WINDOW_BYTES, wire_dtype="bfloat16")
    experts = LocalExperts(checkpoint.read, plan)
    with Client(address) as connection:
        while True:
            try:
                layer, rows, ids = connection.recv()
            except EOFError:
                return
            bf16 = torch.from_numpy(rows).view(torch.bfloat16)
            out = experts.dispatch(layer, bf16, torch.from_numpy(ids), (), 60.0)
            connection.send(out.view(torch.int16).numpy())


def backbone(folder: str) -> dict[str, Any]:
    """Open, plan, load the dense part, write text with experts elsewhere."""
    import torch

    from kvasir_backbone.checkpoint import Checkpoint
    from kvasir_backbone.model import BackboneModel

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(folder)
    checkpoint.make_plan(window_bytes=WINDOW_BYTES, wire_dtype="bfloat16")
    model = BackboneModel.load(checkpoint)
    dense = sum(parameter.nbytes for parameter in model.model.parameters())
    with Listener() as listener:
        command = [sys.executable, "-m", "benches.memory", "worker", folder, str(listener.address)]
        child = subprocess.Popen(command)
        with listener.accept() as connection:
            model.dispatcher = RemoteExperts(connection)
            tokens = asyncio.run(_write(model))
            read_bytes = storage_bytes()  # before the wait, which adds the child's own to it
        child.wait(60)
    return {
        "peak_rss_mb": peak_rss_mb(),
        "read_bytes": read_bytes,
        "dense_bytes": dense,
        "tokens": tokens,
    }


async def _write(model: BackboneModel) -> int:
    """Run one request to its end; the number of its tokens."""
    from kvasir_backbone.engine import Engine, EngineConfig, GenerationRequest

    request = GenerationRequest(
        prompt_ids=list(range(1, PROMPT_TOKENS + 1)), max_tokens=TOKENS, temperature=0.0, ignore_eos=True
    )
    async with Engine(model, EngineConfig(kv_bytes=KV_BYTES)) as engine:
        return len([token async for token in engine.submit(request)])


ROLES: dict[str, Callable[..., object]] = {
    "imports": imports, "full": full, "backbone": backbone, "worker": worker
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](*sys.argv[2:])), flush=True)

"""Memory: a backbone that never allocates its experts, against stock transformers loading the whole model.

A checkpoint of about 1.5 GB, 95 % of it experts, is made in a temporary folder. Then, each in a process of
its own: a bare import of torch and transformers; stock transformers loading the model; and a backbone, which
opens the checkpoint, makes its plan (proving one random expert a layer), loads the dense part and writes
text. The backbone's experts are computed by another process, as a swarm would, through the same seam.

Run as a module with a role (`python -m benches.memory backbone FOLDER`) it is that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Report
from .checkpoint import Shape, shape_argument
from .process import MB, forget_cached, in_child, peak_rss_mb, storage_bytes

if TYPE_CHECKING:
    from torch import Tensor

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
    """Stock transformers: load all of it, write a token."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3, 4]]))
    return {"peak_rss_mb": peak_rss_mb()}

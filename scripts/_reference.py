"""What stock transformers writes for the same prompt, in a process of its own.

    python scripts/_reference.py MODEL < {"prompt": [ids], "tokens": [ids], "max_tokens": n}

prints one JSON object: `matches` (true, false, or null where the model does not fit in memory) and `reason`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FP32_BYTES_A_STORED_BYTE = 2  # a bf16 checkpoint doubles; quantised ones grow more, and then loading says so


def main(folder: Path) -> dict[str, Any]:
    """Compare the tokens on standard input with stock's."""
    import psutil
    import torch

    from kvasir_backbone.equality import compare_greedy, load_stock, stock_greedy

    asked = json.load(sys.stdin)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if stored * FP32_BYTES_A_STORED_BYTE > psutil.virtual_memory().available:
        return {"matches": None, "reason": "the whole model does not fit in this machine's memory"}
    torch.set_num_threads(1)
    model = load_stock(folder)
    stock = stock_greedy(model, asked["prompt"], asked["max_tokens"])
    found = compare_greedy(model, asked["prompt"], asked["tokens"], stock)
    return {"matches": found.matches, "reason": found.reason}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)

"""The published test vectors, which are not part of this repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def load_vectors(name: str) -> dict[str, Any]:
    """The parsed file `name` of the folder that KVASIR_TEST_VECTORS names; skips where it is not set."""
    folder = os.environ.get("KVASIR_TEST_VECTORS")
    if not folder:
        pytest.skip("KVASIR_TEST_VECTORS does not name a folder of test vectors")
    vectors: dict[str, Any] = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    return vectors

"""The packages import in one order only, and heavy libraries stay where they belong (design section 2)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("relay", "market", "kvasir_node", "kvasir_backbone")
HEAVY = {"torch": {"kvasir_node", "kvasir_backbone"}, "transformers": {"kvasir_backbone"}}

BLOCK_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "numpy", "safetensors"):
            raise ImportError(f"{name} must not be needed here")

sys.meta_path.insert(0, Block())
"""


def imported(source: str, package: str) -> Iterator[str]:
    """The top-level names of all that a module of `package` imports, inside functions and type checks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package if node.level else (node.module or "").split(".")[0]


def modules() -> list[Path]:
    return sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def test_all_four_packages_are_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in modules()} == set(ORDER)
    assert len(modules()) > 20


def test_a_wrong_import_would_be_found() -> None:
    source = "def f():\n    from kvasir_backbone.seam import RowKey\n    import torch.nn as nn\n"
    assert set(imported(source, "market")) == {"kvasir_backbone", "torch"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_those_before_it(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    names = set(imported(path.read_text(encoding="utf-8"), package))
    later = set(ORDER[ORDER.index(package) + 1 :])
    assert not names & later, f"{package} comes before {sorted(names & later)}"
    assert "tests" not in names
    for library, allowed in HEAVY.items():
        assert library not in names or package in allowed, f"{library} does not belong in {package}"


@pytest.mark.parametrize("package", ["relay", "market"])
def test_the_light_daemons_start_without_torch(package: str) -> None:
    """Every module imports, and the command prints its help, where torch cannot be imported at all."""
    code = f"""{BLOCK_TORCH}
import importlib, pkgutil
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if ".versions" not in module.name and not module.name.endswith(".env"):  # Alembic runs those itself
        importlib.import_module(module.name)
from {package}.cli import main
sys.exit(main(["--help"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()

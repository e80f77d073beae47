"""Nothing needs what only POSIX has: every module, and a node at work, with all of that taken away."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.bare_platform import ABSENT_MODULES, ABSENT_NAMES, ABSENT_SIGNALS, OURS

ROOT = Path(__file__).parents[2]
BARE = os.environ.get("KVASIR_BARE") == "1"

CORE = (
    "tests/node/test_platforms.py::test_every_module_imports",
    "tests/node/test_daemon.py::test_a_node_joins_loads_serves_earns_and_leaves",
    "tests/node/test_cache.py",
    "tests/node/test_limits.py",
    "tests/relay/test_keyfiles.py::test_a_secret_comes_back_as_it_was",
    "tests/relay/test_keyfiles.py::test_it_never_overwrites",
    "tests/relay/test_links.py",
    "tests/market/test_lifecycle.py",
)
"""What runs on the bare platform: files and locks, keys, the store, relay, market and node together."""


@pytest.mark.skipif(not BARE, reason="optional: runs inside the test below")
def test_every_module_imports() -> None:
    assert sys.platform == "win32"
    for package in OURS:
        module = import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            if ".migrations." not in found.name:  # Alembic runs those
                import_module(found.name)


@pytest.mark.skipif(sys.platform == "win32", reason="optional: this is what it imitates")
@pytest.mark.timeout(400)
def test_the_core_works_without_what_only_posix_has() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.support.bare_platform", "-p",
            "no:cacheprovider", "--timeout", "300", *CORE,
        ],
        cwd=ROOT,
        env={**os.environ, "KVASIR_BARE": "1", "CI": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_posix_only_names_are_never_used_unguarded() -> None:
    """A function that uses one also asks for it (`hasattr`), for the platform, or catches its absence."""
    faults = []
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            text = ast.unparse(tree)
            for node in ast.walk(tree):
                if _is_posix_only(node) and not _is_guarded(node, text):
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not faults


def _is_posix_only(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "add_signal_handler":
        return True
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        names = {"os": ABSENT_NAMES, "signal": ABSENT_SIGNALS}.get(node.value.id, ())
        return node.attr in names
    if isinstance(node, ast.Import):
        return any(alias.name in ABSENT_MODULES for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module in ABSENT_MODULES


def _is_guarded(node: ast.AST, text: str) -> bool:
    """Whether its module asks first. Coarse on purpose: the run above decides."""
    if isinstance(node, ast.Attribute) and node.attr == "add_signal_handler":
        return "NotImplementedError" in text
    if isinstance(node, ast.Attribute):
        return f"'{node.attr}')" in text or "sys.platform" in text or "os.name" in text
    return "sys.platform" in text or "os.name" in text or "except ImportError" in text


def test_the_guard_sees_what_it_should() -> None:
    bad = ast.parse("import os\nimport fcntl\nos.getuid()\nsignal.SIGKILL\nloop.add_signal_handler(2, f)")
    assert (
        sum(_is_posix_only(node) and not _is_guarded(node, ast.unparse(bad)) for node in ast.walk(bad)) == 4
    )
    good = ast.parse("import os\nif hasattr(os, 'getuid'):\n    os.getuid()")
    assert all(_is_guarded(node, ast.unparse(good)) for node in ast.walk(good) if _is_posix_only(node))

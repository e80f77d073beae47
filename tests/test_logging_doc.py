"""The list of log events in docs/logging.md is closed: it is exactly what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = {"Relay": "relay", "Market": "market", "Node": "kvasir_node", "Backbone": "kvasir_backbone"}
EVENT = re.compile(r"[a-z]+\.[a-z]+(_[a-z]+)*")


def documented(title: str) -> set[str]:
    """The events of one component's table."""
    text = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (table,) = (part for part in section if part.startswith(f"{title}\n"))
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def logged(package: str) -> set[str]:
    """Every event name that a module of the package hands to a logger, in whatever way it is written."""
    found: set[str] = set()
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_log(node)]
        variables = {node.args[0].id for node in calls if isinstance(node.args[0], ast.Name)}
        names = [node.args[0] for node in calls]
        names += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and any(getattr(t, "id", None) in variables for t in node.targets)
        ]
        for name in names:
            found |= {text for text in _strings(name) if EVENT.fullmatch(text)}
    return found


def _is_log(call: ast.Call) -> bool:
    """A call of a logger's method, of a function that logs, or of a method kept in a variable `level`."""
    called = ast.unparse(call.func).lower()
    return bool(call.args) and ("log" in called or called == "level")


def _strings(node: ast.expr) -> set[str]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


@pytest.mark.parametrize(("title", "package"), COMPONENTS.items())
def test_the_list_is_what_the_code_logs(title: str, package: str) -> None:
    events, listed = logged(package), documented(title)
    assert len(events) > 5
    assert not events - listed, f"add to the table of {title} in docs/logging.md"
    assert not listed - events, f"remove from the table of {title}: nothing logs it"

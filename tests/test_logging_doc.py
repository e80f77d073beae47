"""The list of log events in docs/logging.md is closed: it is exactly what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = {"Relay": "relay", "Market": "market", "Node": "kvasir_node", "Backbone": "kvasir_backbone"}
LEVELS = {"debug", "info", "warning", "error", "exception"}
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
    if not call.args:
        return False
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in LEVELS and "log" in ast.unparse(call.func.value).lower()
    return isinstance(call.func, ast.Name) and call.func.id in ("_log", "log", "level")


def _strings(node: ast.expr) -> set[str]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def test_the_list_is_what_the_code_logs() -> None:
    for title, package in COMPONENTS.items():
        events = logged(package)
        assert events == documented(title), (
            f"in {package}: left what is logged, right what docs/logging.md has"
        )
        assert events

"""The scripts' own parts: how the demo cuts a model, and that no child process outlives its owner."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvasir_backbone.bundled import bundled_model_path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(autouse=True)
def scripts_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name, module in sys.modules.items() if _is_script(module)]:
        del sys.modules[name]


def _is_script(module: object) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(str(SCRIPTS))


def test_the_bundled_model_is_measured_by_its_headers() -> None:
    from _sizing import expert_count, is_quantised, layer_bytes

    folder = bundled_model_path()
    assert layer_bytes(folder) == dict.fromkeys(range(4), 256 * 3 * 192 * 32 * 2)
    assert expert_count(folder) == 256
    assert not is_quantised(folder)


@pytest.mark.parametrize("nodes", range(1, 9))
@pytest.mark.parametrize(("layers", "experts"), [(4, 256), (48, 128), (1, 64), (61, 256)])
def test_no_node_of_a_demo_can_go_empty(nodes: int, layers: int, experts: int) -> None:
    from _sizing import choose_cut

    size = 1_000_000
    cut = choose_cut(dict.fromkeys(range(layers), size * experts), experts, nodes)
    held = [(w.layer_end - w.layer_start) * (w.expert_end - w.expert_start) * size for w in cut.windows]
    assert sum(held) == layers * experts * size
    assert nodes * cut.budget >= sum(held) + nodes * min(held), "room for all, and a spare window each"
    if nodes > 1:
        most = cut.budget // min(held)
        assert (nodes - 1) * (cut.budget // max(held)) < len(cut.windows)
        assert most >= 1


def test_too_many_nodes_are_refused() -> None:
    from _sizing import choose_cut

    with pytest.raises(ValueError, match="too many"):
        choose_cut({0: 800}, 8, 16)


def started(children: Any, name: str, code: str) -> int:
    """Start a Python child that prints one line and then waits for ever; its process id."""
    children.start(name, [sys.executable, "-c", f"{code}\nprint('up', flush=True)\nthreading.Event().wait()"])
    children.wait_for("its first line", lambda: children.tail(name).strip() or None, timeout=10)
    return int(max(process.pid for process in psutil.Process().children()))


def test_children_end_with_their_owner(tmp_path: Path) -> None:
    from _processes import Children

    pids = []

    def fail_in_between() -> None:
        with Children(tmp_path, grace_s=5) as children:
            pids.extend(started(children, name, "import threading") for name in ("first", "second"))
            assert all(psutil.pid_exists(pid) for pid in pids)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_in_between()
    assert len(set(pids)) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_child_that_will_not_stop_is_ended(tmp_path: Path) -> None:
    from _processes import Children

    stubborn = "import signal, threading\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with Children(tmp_path, grace_s=0.2) as children:
        pid = started(children, "stubborn", stubborn)
    assert not psutil.pid_exists(pid)


def test_a_child_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    from _processes import Children, Failed

    with Children(tmp_path) as children:
        children.start("short", [sys.executable, "-c", "raise SystemExit('the port is in use')"])
        with pytest.raises(Failed, match=r"(?s)short ended with status 1.*the port is in use"):
            children.wait_for("what never comes", lambda: None, timeout=20)


def test_a_wait_that_fails_says_for_what(tmp_path: Path) -> None:
    from _processes import Children, Failed

    with Children(tmp_path) as children, pytest.raises(Failed, match="the moon: not within 0 s"):
        children.wait_for("the moon", lambda: None, timeout=0.0)


def test_a_missing_model_is_said_in_words(tmp_path: Path) -> None:
    done = run_demo("--once", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "is not the folder of a Hugging Face checkpoint" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_bad_arguments_are_said_in_words() -> None:
    for arguments in (("--nodes", "0"), ("--max-tokens", "0"), ("--nodes", "many")):
        done = run_demo(*arguments)
        assert done.returncode == 2
        assert "usage" in done.stderr


@pytest.mark.timeout(400)
def test_the_demo_writes_what_stock_transformers_writes() -> None:
    """The whole product as a newcomer starts it: five processes, and the facts that they promise."""
    done = run_demo("--once", "--json", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["matches_local"] is True
    assert (facts["coverage"], facts["fallback_rows"], facts["tokens"]) == (1.0, 0, 24)
    assert facts["ledger_balanced"] is True
    assert facts["text"]
    assert facts["first_token_s"] > 0
    assert facts["tokens_per_s"] > 0
    assert len({node["wallet"] for node in facts["nodes"]}) == 3
    for node in facts["nodes"]:
        assert node["windows"]
        assert node["calls"] > 0
        assert node["credit"] * 1_000_000 == pytest.approx(node["carried_bytes"])
        assert node["path"] in ("relay", "direct")


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


def test_failures_run_once_more_and_only_what_passes_then_is_called_unsteady(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import test as script

    (tmp_path / "test_sample.py").write_text(
        "from pathlib import Path\n"
        "def test_good(): pass\n"
        "def test_unsteady():\n"
        "    seen = Path(__file__).with_name('seen')\n"
        "    again = seen.exists()\n"
        "    seen.write_text('')\n"
        "    assert again\n"
        "def test_bad(): assert False\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "LAST_FAILED", tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed")
    check = script.Check("tests", ("pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)))
    passed, _, unsteady = script.run_tests(check)
    assert not passed
    assert unsteady == ["test_sample.py::test_unsteady"]
    (tmp_path / "test_sample.py").write_text("def test_good(): pass\n")
    assert script.run_tests(check)[::2] == (True, [])

"""The `kvasir-backbone` command: arguments, tables, and what it says when something is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvasir_backbone import cli
from relay.identity import parse_address
from tests.support.swarms import RunningSwarm, running_swarm


def test_a_bad_model_path_is_said_in_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.logs, "configure", lambda **_: None)
    monkeypatch.setattr(cli, "_on_signals", lambda stop: None)
    assert cli.main(["up", str(tmp_path / "nothing"), "--state-dir", str(tmp_path), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvasir-backbone: ")
    assert "does not exist" in error
    assert len(error.splitlines()) == 1


def test_sizes_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["up", "--kv-bytes", "lots"])
    assert exit_.value.code == 2
    assert "'lots' is not a size" in capsys.readouterr().err


def test_a_move_after_no_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--move-after", "soon", "--state-dir", str(tmp_path)]) == 2
    assert "--move-after is a number of seconds from 0, or never" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "gaps", "nodes", "credits", "trust", "disputes", "drain"])
def test_without_a_running_backbone_the_commands_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main([command, "--state-dir", str(tmp_path)]) == 1
    assert "no backbone runs with the state directory" in capsys.readouterr().err


def test_a_daemon_that_was_killed_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvasir_backbone.addresses import open_door

    open_door(tmp_path, "http://127.0.0.1:9")
    assert cli.main(["status", "--state-dir", str(tmp_path)]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_the_state_directory_follows_each_systems_habit() -> None:
    home = Path.home()
    assert cli.default_state_dir({}, "linux") == home / ".local/share/kvasir/backbone"
    assert cli.default_state_dir({"XDG_DATA_HOME": "/x"}, "linux") == Path("/x/kvasir/backbone")
    assert cli.default_state_dir({}, "darwin").is_relative_to(home / "Library")
    assert cli.default_state_dir({"LOCALAPPDATA": "/l"}, "win32") == Path("/l/kvasir/backbone")
    assert cli.default_state_dir({"KVASIR_BACKBONE_STATE": "/s"}) == Path("/s")


def test_gaps_lists_the_last_moves() -> None:
    move = {"leaves": "L00-01/E000-255", "takes": "L02-03/E000-255", "age_s": 300.0}
    moves = [{**move, "state": "declined", "reason": "[red]no room"}] * 12
    answer = {"windows": [], "coverage": 1.0, "fallback": "disk", "moves": moves}
    _, summary, head, *lines = cli._gaps_table(answer)
    assert (summary, head) == ("coverage 100%", "moves of the last hour:")
    assert lines == [r"5 min ago: L00-01/E000-255 to L02-03/E000-255, declined: \[red]no room"] * 10
    assert len(cli._gaps_table({**answer, "moves": []})) == 2


async def _command(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    code = await asyncio.to_thread(cli.main, [*arguments, "--state-dir", str(folder / "backbone")])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


async def test_the_operators_commands_show_a_running_swarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with structlog.testing.capture_logs():  # they would go to standard output
        await _show_everything(tmp_path, capsys)


async def _show_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_swarm(tmp_path, nodes=1) as swarm:
        await swarm.covered()
        await swarm.text("In the beginning", 8)
        (node,) = json.loads(await _command(tmp_path, capsys, "nodes", "--json"))["nodes"]
        shown = await _command(tmp_path, capsys, "nodes")
        assert node["wallet"] in shown
        assert node["device"][:8] in shown
        assert "relay" in shown
        gaps: dict[str, Any] = json.loads(await _command(tmp_path, capsys, "gaps", "--json"))
        shown = await _command(tmp_path, capsys, "gaps")
        for row in gaps["windows"]:
            assert row["window"] in shown
            assert row["connected"] == 1
            assert "1 of 2 replicas" in row["reason"]
        assert "coverage 100%" in shown
        assert "the ledger is balanced" in await _command(tmp_path, capsys, "credits")
        shown = await _command(tmp_path, capsys, "status")
        assert "serving" in shown
        assert swarm.backbone.join in shown
        assert json.loads(await _command(tmp_path, capsys, "status", "--json"))["coverage"] == 1.0
        shown = await _command(tmp_path, capsys, "drain", node["device"][:8])
        assert "ended" in shown
        rows = json.loads(await _command(tmp_path, capsys, "gaps", "--json"))["windows"]
        assert all(row["connected"] == 0 for row in rows)
        await _decide(tmp_path, capsys, swarm, node["wallet"])
        await _command(tmp_path, capsys, "drain")
        assert swarm.backbone.stop.is_set()


async def _decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], swarm: RunningSwarm, wallet: str
) -> None:
    """A quarantine is shown, and overturned for a reason."""
    assert "nothing on record" in await _command(tmp_path, capsys, "trust")
    client = swarm.backbone.client
    assert client is not None
    await client.quarantine(bytes(range(16)), parse_address(wallet), reason="an output [0] was wrong")
    shown = await _command(tmp_path, capsys, "trust", wallet)
    assert "an output [0] was wrong" in shown
    assert "in quarantine for" in shown
    assert "nothing on record" in await _command(tmp_path, capsys, "disputes")
    for record in ("zz", "00" * 16):
        arguments = ["decide", record, "--uphold", "--reason", "x", "--state-dir", str(tmp_path / "backbone")]
        assert await asyncio.to_thread(cli.main, arguments) == 1
    record = bytes(range(16)).hex()
    shown = await _command(tmp_path, capsys, "decide", record, "--overturn", "--reason", "a test")
    assert f"quarantine {record}" in shown
    assert "is overturned" in shown
    (row,) = json.loads(await _command(tmp_path, capsys, "trust", "--json"))["records"]
    assert (row["decision"], row["decision_reason"]) == ("overturned", "a test")

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from relay import logs, loop


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers and isinstance(handler, logging.StreamHandler):
            stream = handler.stream
            if stream is not sys.stderr:
                stream.close()
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    logs.configure(json=True, file=path)
    structlog.get_logger("relay").info("circuit.closed", outcome="closed", bytes_to_device=5, id=b"\x01\xff")
    structlog.get_logger("relay").debug("not.shown")
    logging.getLogger("aiohttp.server").error("bad request from %s", "10.0.0.1")
    first, second = _lines(path)
    assert first["event"] == "circuit.closed"
    assert (first["component"], first["level"], first["outcome"]) == ("relay", "info", "closed")
    assert first["id"] == "01ff"
    assert "timestamp" in first
    assert second["event"] == "bad request from 10.0.0.1"
    assert second["component"] == "aiohttp.server"


def test_json_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    structlog.get_logger("relay").warning("relay.unreachable", reason="no route")
    assert json.loads(capsys.readouterr().err)["reason"] == "no route"


def test_pretty_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=False, level="debug")
    structlog.get_logger("relay").debug("claim.granted", window="L00-01/E000-127")
    assert "claim.granted" in capsys.readouterr().err


def test_exceptions_are_written_out(tmp_path: Path) -> None:
    path = tmp_path / "relay.log"
    logs.configure(json=True, file=path)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("relay").exception("peer.crashed")
    (line,) = _lines(path)
    assert "ValueError: broken" in str(line["exception"])


def test_no_traceback_shows_what_variables_held(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        logs.configure(json=as_json)
        try:
            prompt = "a " + "secret"
            raise ValueError(f"broken after {len(prompt)} characters")
        except ValueError:
            structlog.get_logger("relay").exception("peer.crashed")
        shown = capsys.readouterr().err
        assert "broken after 8 characters" in shown
        assert "a secret" not in shown


def test_an_unknown_level_is_no_level() -> None:
    with pytest.raises(KeyError):
        logs.configure(level="loud")


async def _name() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_the_loop_is_uvloop_only_where_wanted() -> None:
    assert loop.run(_name(), use_uvloop=False).startswith("asyncio")


def test_without_uvloop_the_default_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop.loop_factory() is None
    assert loop.run(_name()).startswith("asyncio")


def test_uvloop_where_it_is_installed() -> None:
    pytest.importorskip("uvloop", reason="optional: uvloop does not exist here")
    assert loop.run(_name()).startswith("uvloop")

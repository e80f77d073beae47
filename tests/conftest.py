"""What all tests share: which event loops async tests run on, one torch thread, and skips that count in CI.

pytest                  async tests on the default loop
pytest --loop uvloop    on uvloop
pytest --loop both      on each; uvloop is left out where it does not exist
pytest --loop mixed     on each in the tests of sessions, relays and swarms, on one of the two, by the test's
                        name, in all others (what scripts/test.py does). Among the others are tests marked
                        `any_loop`: what they test runs in processes that choose their loops themselves, or
                        is no matter of sockets, and the same daemons run on each loop in other tests.
pytest --no-uvloop      as if uvloop were not installed, child processes too
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping

# Before anything imports torch: two spinning OpenMP pools on few cores are far slower than one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support import stacks

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
ON_EACH_LOOP = frozenset({"relay", "swarm"})
"""Folders whose tests depend on how an event loop treats sockets."""

LONGEST = (
    "swarm/test_in_process.py", "swarm/test_direct.py", "node/test_cli.py", "relay/test_soak.py",
    "backbone/test_model.py", "backbone/test_architectures.py", "swarm/test_lan.py", "swarm/test_cheaters.py",
    "swarm/test_relays.py", "swarm/test_hub.py", "swarm/test_moving.py", "swarm/test_tls.py",
    "swarm/test_processes.py", "test_scripts.py", "test_train_tiny.py", "swarm/test_arbitration.py",
    "swarm/test_weighted.py", "swarm/test_privacy.py", "swarm/test_local_layers.py", "node/test_daemon.py",
    "backbone/test_engine.py", "backbone/test_tensor_parallel.py", "market/test_leases.py",
    "market/test_credit.py", "market/test_trust.py", "backbone/test_cli.py",
)  # fmt: skip
"""Files that take longest, which processes side by side take up first; any other takes less."""

OPTIONAL = "optional: "
"""A skip whose reason begins so is allowed in CI; any other skip fails there."""

stacks.install()

# A busy machine is no finding: no time limit for one example.
settings.register_profile("kvasir", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvasir")


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("default", "uvloop", "both", "mixed")
    parser.addoption("--loop", choices=choices, default="default", help="event loop of the async tests")
    parser.addoption("--no-uvloop", action="store_true", help="as if uvloop were not installed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "any_loop: --loop mixed runs it on one loop, wherever it lies")
    if config.getoption("--no-uvloop"):
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # importing it fails from now on
        os.environ["KVASIR_LOOP"] = "default"
    if config.getoption("--loop") == "uvloop" and not _has_uvloop():
        raise pytest.UsageError("--loop uvloop: uvloop is not installed here; leave the option out")


def pytest_report_header(config: pytest.Config) -> str:
    loops = f"{config.getoption('--loop')} of {', '.join(_loops(config))}"
    return f"event loops: {loops}; skips {'fail (CI)' if IN_CI else 'are reported'}"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops = _loops(config)
    on_each = item.path.parent.name in ON_EACH_LOOP and item.get_closest_marker("any_loop") is None
    if config.getoption("--loop") != "mixed" or on_each:
        return loops
    number = zlib.crc32(item.nodeid.encode()) % len(loops)  # the same one in every run and process
    return dict([list(loops.items())[number]])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one of several processes: the longest files first, so that none of them runs alone at the end."""
    if hasattr(config, "workerinput"):
        places = {config.rootpath / "tests" / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def _has_uvloop() -> bool:
    return importlib.util.find_spec("uvloop") is not None


def _loops(config: pytest.Config) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    chosen = config.getoption("--loop")
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if chosen != "uvloop":
        loops["default"] = asyncio.new_event_loop
    if chosen != "default" and _has_uvloop():
        import uvloop

        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs inside a test sets up logging for its process: not for the tests after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers] or handlers
    root.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
    report: pytest.TestReport = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(OPTIONAL):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped in CI: {reason}"
    return report

"""A pytest plugin that takes away what only POSIX systems have, as far as one process can.

    python -m pytest -p tests.support.bare_platform ...

Our four packages then find themselves on "win32": no fcntl, no resource, no uvloop, no POSIX-only functions
of `os`, no POSIX-only signals, no signal handlers on the event loop, `msvcrt` for locks. What is not ours
has been imported before and keeps what it has. It does not make Windows: paths, processes and files that
are open behave as they do here.
"""

from __future__ import annotations

import asyncio
import builtins
import fcntl
import os
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import alembic.command
import cryptography.hazmat.primitives.ciphers.aead
import psutil
import pytest
import rich.console
import sqlalchemy.dialects.sqlite
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import moe
from transformers.quantizers.auto import AutoHfQuantizer

OURS: Final = ("relay", "market", "kvasir_node", "kvasir_backbone")
ABSENT_MODULES: Final = ("fcntl", "grp", "pwd", "pty", "resource", "syslog", "termios", "tty", "uvloop")
ABSENT_NAMES: Final = (
    "chown", "fchmod", "fchown", "fork", "forkpty", "geteuid", "getegid", "getgid", "getloadavg", "getpgid",
    "getuid", "kill", "killpg", "mkfifo", "nice", "posix_fadvise", "posix_fallocate", "pread", "pwrite",
    "sched_getaffinity", "sched_setaffinity", "setpgid", "setsid", "sysconf", "uname", "O_CLOEXEC",
    "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK",
)  # fmt: skip
ABSENT_SIGNALS: Final = ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2")

IMPORTED: Final = (
    aiohttp, alembic.command, cryptography, rich.console, sqlalchemy, torch, AttentionInterface, AutoConfig,
    AutoModelForCausalLM, AutoTokenizer, moe, AutoHfQuantizer,
)  # fmt: skip
"""Not ours: imported while the platform is still whole."""


class _Without(types.ModuleType):
    """A module as our packages see it: the real one, but for some names."""

    def __init__(self, module: types.ModuleType, names: Sequence[str]) -> None:
        super().__init__(module.__name__)
        self._module, self._names = module, frozenset(names)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(f"{name} is not in {self.__name__} everywhere")
        return getattr(self._module, name)


def _no_handlers(*_: object) -> None:
    raise NotImplementedError


def _msvcrt() -> types.ModuleType:
    """What `kvasir_node.locks` uses of it, on top of this system's own locks."""
    module = types.ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, size: int) -> None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, size)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    module.__dict__.update(LK_NBLCK=2, LK_LOCK=1, locking=locking)
    return module


def pytest_configure(config: pytest.Config) -> None:
    """Take it all away; nothing is given back: the process is for these tests alone."""
    assert not any(name.partition(".")[0] in OURS for name in sys.modules), "too late: ours are imported"
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    os.environ["KVASIR_LOOP"] = "default"
    sys.modules["msvcrt"] = _msvcrt()
    bare = {"os": _Without(os, ABSENT_NAMES), "signal": _Without(signal, ABSENT_SIGNALS)}
    honest = builtins.__import__

    def bare_import(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if importer.partition(".")[0] in OURS and level == 0:
            if name in ABSENT_MODULES:
                raise ImportError(f"{importer} imports {name}, which is not everywhere")
            if name in bare:
                return bare[name]
        return honest(name, globals, locals, fromlist or (), level)

    builtins.__import__ = bare_import
    for loop in (asyncio.SelectorEventLoop, asyncio.AbstractEventLoop):
        loop.add_signal_handler = _no_handlers  # type: ignore[method-assign,assignment]
    psutil.BELOW_NORMAL_PRIORITY_CLASS = 1
    sys.platform = "win32"

"""Child processes with an owner: started with their output in a file, and gone when their owner goes.

Cross-platform. Each child has a process group of its own, so that Ctrl-C reaches only the script, which
then stops its children in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Failed(Exception):  # noqa: N818 - what the script prints, not a fault of ours
    """Something did not work; the message says what, for a person."""


class Children:
    """Context manager of child processes: on leaving it, for whatever reason, all are stopped."""

    def __init__(self, folder: Path, *, grace_s: float = 20.0) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Children:
        def leave(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._handlers[number] = signal.signal(number, leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop_all()
        except KeyboardInterrupt:  # a second Ctrl-C: no more patience, but still nothing left behind
            for child in self._children.values():
                _end(child)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        """Start `command`, its output in `NAME.log`."""
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Windows has it
        with self.log(name).open("ab") as out:
            self._children[name] = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                creationflags=flags,
                start_new_session=os.name != "nt",
            )

    def pid(self, name: str) -> int:
        """That child's process id."""
        return self._children[name].pid

    def kill(self, name: str) -> None:
        """End that child at once, as a crash would, and forget it."""
        _end(self._children.pop(name))

    def send(self, name: str, number: int) -> None:
        """Send that child a signal."""
        self._children[name].send_signal(number)

    def log(self, name: str) -> Path:
        """Where that child's output is."""
        return self._folder / f"{name}.log"

    def check(self) -> None:
        """Raise `Failed`, with the end of its log, if a child has ended by itself."""
        for name, child in self._children.items():
            status = child.poll()
            if status is not None:
                raise Failed(f"{name} ended with status {status}:\n{self.tail(name)}")

    def ended(self) -> list[str]:
        """Those that ended by themselves since this was asked last."""
        names = [name for name, child in self._children.items() if child.poll() is not None]
        for name in names:
            del self._children[name]
        return names

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines of a child's log."""
        text = self.log(name).read_text(encoding="utf-8", errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])

    def wait_for(self, what: str, probe: Callable[[], T | None], *, timeout: float, pause: float = 0.1) -> T:
        """The first value of `probe()` that is not None. Raises `Failed` naming `what` after `timeout` s."""
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            value = probe()
            if value is not None:
                return value
            if time.monotonic() > deadline:
                names = ", ".join(f"{name}.log" for name in self._children)
                raise Failed(f"{what}: not within {timeout:.0f} s. See {names} in {self._folder}")
            time.sleep(pause)

    def stop_all(self) -> None:
        """Ask all to stop, and end those that do not within the grace time.

        The first one started is what the others depend on; it is stopped when they are gone.
        """
        children = list(self._children.values())
        self._stop(children[1:])
        self._stop(children[:1])
        self._children.clear()

    def _stop(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        living = [child for child in children if child.poll() is None]
        for child in living:
            _ask_to_stop(child)
        deadline = time.monotonic() + self._grace_s
        for child in living:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(child)


def _ask_to_stop(child: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        child.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        child.terminate()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(10)

"""How the machine is at this moment: the time of day, its power, whether its network connection is metered.

    battery    psutil, on Linux, macOS and Windows
    metered    Linux: NetworkManager's own word over D-Bus (`busctl`). Windows: the connection's cost
               (PowerShell). macOS has no way to ask: never metered there

Whatever cannot be found out counts as mains power and an unmetered link. Knows the operating system's
tools; decides nothing. `look` blocks for as long as those tools take: call it off the loop.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from .limits import Surroundings

TOOL_S: Final = 10.0
"""A tool that takes longer is not waited for."""

_NETWORK_MANAGER: Final = (
    "busctl",
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)
_POWERSHELL: Final = (
    "powershell",
    "-NoProfile",
    "-NonInteractive",
    "-Command",
    "[void][Windows.Networking.Connectivity.NetworkInformation,Windows,ContentType=WindowsRuntime];"
    "[Windows.Networking.Connectivity.NetworkInformation]::GetInternetConnectionProfile()"
    ".GetConnectionCost().NetworkCostType",
)

Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns what it printed. Raises `OSError` or `subprocess.SubprocessError`."""


def look(*, watch_link: bool = True, now: float | None = None) -> Surroundings:
    """The machine as it is now; without `watch_link` the connection is not asked about."""
    local = time.localtime(now)
    return Surroundings(
        minute=local.tm_hour * 60 + local.tm_min, battery=on_battery(), metered=watch_link and metered_link()
    )


def on_battery() -> bool:
    """Whether the machine runs on its battery; False where there is none."""
    sensors = getattr(psutil, "sensors_battery", None)
    if sensors is None:
        return False
    with contextlib.suppress(OSError, NotImplementedError, RuntimeError):
        battery = sensors()
        return battery is not None and battery.power_plugged is False
    return False


def metered_link(*, platform: str = sys.platform, ask: Ask | None = None) -> bool:
    """Whether the system says that the network connection in use costs by what it carries."""
    ask = ask or _run
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if platform.startswith("linux"):
            return ask(_NETWORK_MANAGER).split() in (["u", "1"], ["u", "3"])  # yes, or guessed to be
        if platform == "win32":
            return ask(_POWERSHELL).strip() in ("Fixed", "Variable")
    return False


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, timeout=TOOL_S, check=True, stdin=subprocess.DEVNULL, text=True
    )
    return done.stdout

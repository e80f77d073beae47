"""Where each system wants a program's state to lie. The environment is an argument; creates nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def state_folder(name: str, environment: Mapping[str, str], platform: str = sys.platform) -> Path:
    """The state folder of the daemon `name` ("node", "backbone") where none is named.

    `KVASIR_<NAME>_STATE` names it outright; else LOCALAPPDATA, Application Support or XDG_DATA_HOME.
    """
    named = environment.get(f"KVASIR_{name.upper()}_STATE")
    if named is not None:
        return Path(named)
    if platform == "win32":
        base = Path(environment.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "kvasir" / name

"""The operator's door: which URLs a daemon is reached by, and the file that lets its commands in.

`operator.json` in the state directory (mode 0600) has the daemon's URL, a token and its process id. Who can
read it may ask and command the daemon. Knows files and addresses; nothing of what is asked.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from relay.errors import ConfigError, Unreachable
from relay.keyfiles import read_secret, write_secret

OPERATOR_FILE: Final = "operator.json"
_ANY: Final = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class Door:
    """Where a running backbone answers its operator, and the token that opens."""

    url: str
    token: str
    pid: int


def open_door(state_dir: Path, url: str) -> Door:
    """Write the operator's file anew, with a fresh token."""
    door = Door(url, secrets.token_urlsafe(32), os.getpid())
    path = state_dir / OPERATOR_FILE
    path.unlink(missing_ok=True)
    content = {"v": 1, "url": door.url, "token": door.token, "pid": door.pid}
    write_secret(path, json.dumps(content).encode("ascii"))
    return door


def close_door(state_dir: Path) -> None:
    """Remove the operator's file."""
    (state_dir / OPERATOR_FILE).unlink(missing_ok=True)


def find_door(state_dir: Path) -> Door:
    """The door of the daemon that runs with that state directory.

    Raises `Unreachable` if there is none, `ConfigError` or `IdentityError` for a file not to be trusted.
    """
    try:
        fields = json.loads(read_secret(state_dir / OPERATOR_FILE))
        return Door(str(fields["url"]), str(fields["token"]), int(fields["pid"]))
    except FileNotFoundError:
        raise Unreachable(
            f"no backbone runs with the state directory {state_dir}: start one with `kvasir-backbone up`, "
            "or name its directory with --state-dir"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{state_dir / OPERATOR_FILE} is damaged: restart the backbone") from None


def local_urls(host: str, port: int) -> tuple[str, ...]:
    """The http URLs that a listener on `host` is reached by from this machine and its networks.

    For a wildcard address: loopback and every IPv4 address that an interface has now.
    """
    if host not in _ANY:
        name = f"[{host}]" if ":" in host else host
        urls = [f"http://{name.lower()}:{port}"]
        if host == "127.0.0.1":
            urls.append(f"http://localhost:{port}")
        return tuple(urls)
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith(("127.", "169.254."))
    ]
    names = [*sorted(set(found)), "127.0.0.1", "localhost"]
    return tuple(f"http://{name}:{port}" for name in names)

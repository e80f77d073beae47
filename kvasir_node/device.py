"""What this machine is and what it may use: memory, disk, processors, its network.

Knows the operating system. Knows nothing of windows and models; what the node can execute is said by
`experts` and `formulas`.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from relay.errors import ConfigError

from .config import NodeConfig, format_size
from .surroundings import on_battery

_CGROUP_FILES: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Device:
    """This machine, measured once at the start. Sizes in bytes.

    `memory_free` is what can be used without swapping, inside the container's limit if there is one.
    """

    system: str
    machine: str
    processors: int
    memory_total: int
    memory_free: int
    disk_free: int
    on_battery: bool
    accelerator: str = ""
    """The GPU that experts run on, by name; empty: the CPU."""
    accelerator_total: int = 0
    accelerator_free: int = 0

    @property
    def expert_memory(self) -> tuple[int, int]:
        """(free, total) of the memory that experts are kept in."""
        if self.accelerator_total:
            return self.accelerator_free, self.accelerator_total
        return self.memory_free, self.memory_total

    def facts(self) -> dict[str, Any]:
        """The fields, for a log line or the status."""
        return asdict(self)

    def describe(self) -> str:
        """One line for a person."""
        power = ", on battery" if self.on_battery else ""
        if self.accelerator:
            free, total = format_size(self.accelerator_free), format_size(self.accelerator_total)
            power += f", {self.accelerator}" + (
                f" with {free} of {total} free" if self.accelerator_total else ""
            )
        return (
            f"{self.system} on {self.machine}, {self.processors} processors, "
            f"{format_size(self.memory_free)} of {format_size(self.memory_total)} memory free, "
            f"{format_size(self.disk_free)} disk free{power}"
        )


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the node will use of the machine, in bytes."""

    budget: int
    cache: int

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"up to {format_size(self.budget)} memory for experts, {format_size(self.cache)} disk for weights"
        )


def measure(
    folder: Path,
    *,
    cgroups: Iterable[tuple[str, str]] = _CGROUP_FILES,
    accelerator: tuple[str, tuple[int, int] | None] | None = None,
) -> Device:
    """Look at this machine; `folder` is on the disk that will hold the cache.

    `accelerator` is the name of the GPU in use and its (free, total) memory in bytes, if it has its own.
    """
    memory = psutil.virtual_memory()
    limit, left = cgroup_memory(cgroups)
    return Device(
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine() or "unknown",
        processors=usable_processors(),
        memory_total=min(memory.total, limit),
        memory_free=min(memory.available, left),
        disk_free=shutil.disk_usage(_existing(folder)).free,
        on_battery=on_battery(),
        accelerator=accelerator[0] if accelerator else "",
        accelerator_free=accelerator[1][0] if accelerator and accelerator[1] else 0,
        accelerator_total=accelerator[1][1] if accelerator and accelerator[1] else 0,
    )


def allow(config: NodeConfig, device: Device, *, cached_bytes: int = 0) -> Allowance:
    """What `config` allows on `device`; `cached_bytes` are in the cache already.

    Raises `ConfigError` if the budget is more than the machine has, or no disk is left for the cache.
    """
    free, total = device.expert_memory
    if config.budget_bytes is not None and config.budget_bytes > total:
        raise ConfigError(
            f"--budget {format_size(config.budget_bytes)} is more than this machine's "
            f"{format_size(total)}: give at most {format_size(total // 2)} or so"
        )
    room = device.disk_free + cached_bytes - config.reserve_bytes
    cache = room if config.cache_bytes is None else config.cache_bytes
    if room <= 0:
        raise ConfigError(
            f"the disk of {config.cache_folder} has {format_size(device.disk_free)} free, and "
            f"{format_size(config.reserve_bytes)} are kept in reserve: free some disk or name another "
            "with --cache-dir"
        )
    return Allowance(budget=config.budget_bytes or free // 2, cache=cache)


def cgroup_memory(files: Iterable[tuple[str, str]] = _CGROUP_FILES) -> tuple[int, int]:
    """(limit, left) of the container this process runs in, in bytes; very large numbers if there is none."""
    for limit_file, used_file in files:
        with contextlib.suppress(OSError, ValueError):
            text = Path(limit_file).read_text("ascii").strip()
            if text == "max":
                continue
            limit, used = int(text), int(Path(used_file).read_text("ascii"))
            if limit < _UNLIMITED:
                return limit, max(0, limit - used)
    return _UNLIMITED, _UNLIMITED


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lower_priority(nice: int) -> None:
    """Let the owner's programs go first. Does nothing where the system does not allow it."""
    if nice <= 0:
        return
    with contextlib.suppress(OSError, psutil.Error):
        if sys.platform == "win32":
            psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        else:
            os.nice(max(0, nice - os.nice(0)))


def network_of(host: str, port: int, *, salt: bytes) -> str:
    """A name for the network this device is in, so that replicas can be spread over networks.

    A hash of `salt` (the swarm's root) and the /24 or /48 of the address used towards `host`; no packet
    is sent. "unknown" if there is no route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except OSError:
        return "unknown"
    network = ipaddress.ip_network(f"{own}/{24 if own.version == 4 else 48}", strict=False)
    return hashlib.sha256(salt + str(network).encode("ascii")).hexdigest()[:16]


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    return folder

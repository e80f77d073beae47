"""`kvasir-node doctor`: what a node needs of its machine, tried one after another, each with how to mend it.

Looks and tries; makes no keys and pins nothing. A running node is left alone: nothing here signs in, connects
as this device or takes its locks.

Knows what a node needs and what its owner can do about it. How things are measured is `device`'s and
`measuring`'s; the swarm is asked by `doctor_swarm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from relay.errors import ConfigError, IdentityError, Unreachable

from .accelerator import describe_device, device_memory, find_device
from .config import NodeConfig, format_size
from .control import ask_daemon
from .device import Device, measure
from .measuring import cpu_features, kernel_name, measure_disk, measure_memory
from .state import NodeState

Outcome = Literal["ok", "warn", "fail"]

SLOW_DISK: Final = 20e6
"""Bytes a second below which the owner is told that loading will be slow."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what was found, and what to do about it where it is not well."""

    name: str
    outcome: Outcome
    found: str
    mend: str = ""

    def fields(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tools:
    """What is measured and asked of this machine: replaced in tests."""

    clock: Callable[[], float] = time.time
    measure: Callable[..., Device] = measure
    disk_speed: Callable[[Path], tuple[float | None, float | None]] = measure_disk
    memory_speed: Callable[[], float] = measure_memory
    kernel: Callable[[], str] = kernel_name
    find_device: Callable[[str], torch.device | None] = find_device


async def examine_machine(config: NodeConfig, *, passphrase: bytes | None, tools: Tools) -> list[Check]:
    """What needs no swarm. Never raises: whatever goes wrong in a check is what it found."""
    state = NodeState(config.state_dir)
    device = await asyncio.to_thread(measure_device, config, tools)
    return [
        await asyncio.to_thread(check_daemon, config.state_dir),
        await asyncio.to_thread(check_state, state),
        await asyncio.to_thread(check_wallet, config, state, passphrase),
        await asyncio.to_thread(check_kernel, config, tools),
        await asyncio.to_thread(check_disk, config, device, tools),
        await asyncio.to_thread(check_memory, config, device, tools),
    ]


def no_swarm() -> Check:
    """What is said in place of the swarm's checks where none is known."""
    mend = "give the join link that the operator has: kvasir-node doctor 'http://HOST:PORT#SWARM'"
    return Check("market", "fail", "no swarm is known to the state folder", mend)


def exit_status(checks: Sequence[Check]) -> int:
    """0 if nothing failed (warnings are allowed), else 1."""
    return 1 if any(check.outcome == "fail" for check in checks) else 0


def describe_checks(checks: Sequence[Check]) -> list[str]:
    """The checks as lines for a person."""
    lines = []
    for check in checks:
        lines.append(f"{check.outcome:<4}  {check.name:<8}  {check.found}")
        if check.mend:
            lines.append(f"      {'':<8}  -> {check.mend}")
    return lines


# --- this machine ------------------------------------------------------------------------------------


def check_daemon(folder: Path) -> Check:
    """Whether a node runs with this state folder."""
    try:
        snapshot = ask_daemon(folder, "GET", "/status")
    except Unreachable as error:
        if "no node runs" in str(error):
            return Check("daemon", "ok", "no node runs with this state folder now")
        return Check("daemon", "warn", str(error), "end that process, then start the node again")
    except OSError as error:
        mend = "see the check of the state folder"
        return Check("daemon", "warn", f"not looked for: {error.strerror or error}", mend)
    except ConfigError as error:
        return Check("daemon", "fail", str(error), "stop the node, remove control.json, and start it again")
    reach = "reachable" if snapshot.get("reachable") else "not reachable"
    return Check("daemon", "ok", f"a node runs: {snapshot.get('phase')}, {reach}")


def check_state(state: NodeState) -> Check:
    """The state folder: writable, its key files safe."""
    mend = f"make {state.folder} a folder of yours that you may write to, or name another with --state-dir"
    try:
        state.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=state.folder):
            pass
        if (state.folder / "device.key").exists():
            state.device_keys()
        state.roots()
    except OSError as error:
        return Check("state", "fail", f"{state.folder}: {error.strerror or error}", mend)
    except (IdentityError, ConfigError) as error:
        return Check("state", "fail", str(error), "do what it says, or name another folder with --state-dir")
    return Check("state", "ok", f"{state.folder} can be written, and its keys are this user's alone")


def check_wallet(config: NodeConfig, state: NodeState, passphrase: bytes | None) -> Check:
    """The wallet's file."""
    path = config.wallet_file
    if not path.exists():
        if config.wallet is None:
            return Check("wallet", "ok", f"none yet: {path} is made when the node joins")
        mend = "name the file you have with --wallet, or make one: kvasir-node wallet --create"
        return Check("wallet", "fail", f"there is no wallet at {path}", mend)
    try:
        key = state.wallet(path, create=False, passphrase=passphrase)
    except (ConfigError, IdentityError) as error:
        mend = "do what it says; a passphrase may be in KVASIR_WALLET_PASSPHRASE"
        return Check("wallet", "fail", str(error), mend)
    except OSError as error:
        return Check("wallet", "fail", f"{path}: {error.strerror or error}", "make the file readable to you")
    return Check("wallet", "ok", f"{key.address}, kept in {path}")


def check_kernel(config: NodeConfig, tools: Tools) -> Check:
    """What runs experts here."""
    try:
        accelerator = tools.find_device(config.device)
    except ConfigError as error:
        return Check("kernel", "fail", str(error), "leave --device out, or mend the driver")
    if accelerator is not None:
        return Check("kernel", "ok", f"{describe_device(accelerator)}, checked against the CPU for each plan")
    name = tools.kernel()
    found = f"experts run on {name}; CPU with {cpu_features()}"
    if name.startswith("torch"):
        mend = "install a C compiler (gcc or clang; on Debian: apt install gcc), and start the node again"
        return Check("kernel", "warn", found, mend)
    return Check("kernel", "ok", found)


def check_disk(config: NodeConfig, device: Device, tools: Tools) -> Check:
    """Room and speed of the cache's disk."""
    folder = config.cache_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = sum(path.stat().st_size for path in folder.glob("*/*.bin"))
        room = min(
            config.cache_bytes or device.disk_free + used, device.disk_free + used - config.reserve_bytes
        )
    except OSError as error:
        mend = "name a folder that you may write to with --cache-dir"
        return Check("disk", "fail", f"{folder}: {error.strerror or error}", mend)
    if room <= 0:
        found = (
            f"the disk of {folder} has {format_size(device.disk_free)} free, and "
            f"{format_size(config.reserve_bytes)} are kept in reserve"
        )
        return Check("disk", "fail", found, "free some disk, or name another one with --cache-dir")
    write, read = tools.disk_speed(folder)
    if write is None or read is None:
        mend = "name a folder that you may write to with --cache-dir"
        return Check("disk", "fail", f"nothing can be written to {folder}", mend)
    found = (
        f"{format_size(room)} for weights in {folder}, writes {format_size(write)}/s, "
        f"reads {format_size(read)}/s"
    )
    if write < SLOW_DISK:
        return Check("disk", "warn", found, "loading will be slow: name a faster disk with --cache-dir")
    return Check("disk", "ok", found)


def check_memory(config: NodeConfig, device: Device, tools: Tools) -> Check:
    """Memory free now, against the budget."""
    free, total = device.expert_memory
    budget = config.budget_bytes or free // 2
    found = (
        f"{format_size(free)} of {format_size(total)} free, {format_size(budget)} for experts; one thread "
        f"reads {format_size(tools.memory_speed())}/s"
    )
    if budget > free:
        mend = "close something, or give a smaller --budget"
        return Check("memory", "fail", f"{found}. The budget is more than what is free", mend)
    return Check("memory", "ok", found)


def measure_device(config: NodeConfig, tools: Tools) -> Device:
    """This machine, and the accelerator that the configuration names, if it is here."""
    accelerator = None
    with contextlib.suppress(ConfigError):
        found = tools.find_device(config.device)
        if found is not None:
            accelerator = (describe_device(found), device_memory(found))
    return tools.measure(config.cache_folder, accelerator=accelerator)

"""How fast this machine is, by trying it: memory, disk, the link to the swarm, and what its CPU can do.

Each measurement is short and bounded. Knows no windows, plans or limits. All but `measure_link` block: call
them off the loop.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from relay.errors import KvasirError

from . import kernels
from .config import format_size
from .kernels.native import ISA_TEXT

MEMORY_BYTES: Final = 128 << 20
"""Read by one thread, several times: more than most caches hold."""

MEMORY_PASSES: Final = 5
DISK_BLOCK: Final = 4 << 20
DISK_BYTES: Final = 64 << 20
"""Written to the disk at most, and read again."""

DISK_S: Final = 0.5
"""Writing stops after this long."""

FIRST_PROBE: Final = 16 << 10
LARGEST_PROBE: Final = 1_000_000
PROBE_S: Final = 0.5
"""A link probe carries about what the link takes in this time, `LARGEST_PROBE` bytes at most."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured. Rates in bytes a second, `rtt_s` in seconds; None: it could not be measured."""

    memory_read: float
    disk_write: float | None
    disk_read: float | None
    features: str
    kernel: str
    upload: float | None = None
    download: float | None = None
    rtt_s: float | None = None

    def facts(self) -> dict[str, Any]:
        """The fields with their units in the names, rounded, for a log line or the status."""
        rates = ("memory_read", "disk_write", "disk_read", "upload", "download")
        fields = asdict(self)
        facts: dict[str, Any] = {
            f"{name}_bytes_s": None if fields[name] is None else round(fields[name]) for name in rates
        }
        rtt = None if self.rtt_s is None else round(self.rtt_s, 4)
        return {**facts, "rtt_s": rtt, "cpu_features": self.features, "kernel": self.kernel}

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"memory reads {_rate(self.memory_read)}, disk writes {_rate(self.disk_write)} and reads "
            f"{_rate(self.disk_read)}, CPU with {self.features}, experts run on {self.kernel}"
        )

    def describe_link(self) -> str:
        """One line for a person."""
        if self.upload is None or self.download is None or self.rtt_s is None:
            return "not measured"
        return f"{_rate(self.download)} down, {_rate(self.upload)} up, {1000 * self.rtt_s:.1f} ms round trip"


def _rate(rate: float | None) -> str:
    return "not measured" if rate is None else f"{format_size(rate)}/s"


def measure_machine(folder: Path, *, kernel: Callable[[], str] | None = None) -> Speed:
    """Measure memory, the disk of `folder` (which must exist) and the CPU. Takes about a second.

    The first call on a machine may build the kernel, some seconds more.
    """
    write, read = measure_disk(folder)
    return Speed(measure_memory(), write, read, cpu_features(), (kernel or kernel_name)())


def measure_memory(size: int = MEMORY_BYTES) -> float:
    """Bytes a second that one thread reads: the best of several sums over `size` bytes."""
    data = torch.ones(size // 4)
    best = float("inf")
    for _ in range(MEMORY_PASSES):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


def measure_disk(
    folder: Path, *, size: int = DISK_BYTES, seconds: float = DISK_S
) -> tuple[float | None, float | None]:
    """(write, read) bytes a second of a file in `folder`, written through; None where it is not possible.

    Reading asks the system to forget the file first, where it can be asked; else it is the system's memory
    that was read.
    """
    block = os.urandom(DISK_BLOCK)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".speed-") as file:
            started, written = time.perf_counter(), 0
            while written < size and (not written or time.perf_counter() - started < seconds):
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write = written / (time.perf_counter() - started)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, written, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(DISK_BLOCK):
                pass
            return write, written / (time.perf_counter() - started)
    except OSError:
        return None, None


def cpu_features() -> str:
    """The vector instructions of this CPU that matter here, in words."""
    with contextlib.suppress(OSError):
        if sys.platform.startswith("linux"):
            flags = _flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
            known = [text for flag, text in _FEATURES.items() if flag in flags]
            if known:
                return ", ".join(known)
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "NEON"
    return "no vector instructions that torch knows" if capability == "DEFAULT" else capability


_FEATURES: Final = {
    "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX-512", "avx512_vnni": "VNNI",
    "avx_vnni": "AVX-VNNI", "amx_int8": "AMX", "asimd": "NEON", "asimddp": "dot products", "i8mm": "I8MM",
    "sve": "SVE",
}  # fmt: skip


def _flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def kernel_name() -> str:
    """What will run experts on the CPU: our own kernel and its instruction set, or torch."""
    kernel = kernels.load()
    if kernel is None:
        return "torch (no C compiler here; installing one makes it faster)"
    return f"the compiled kernel ({ISA_TEXT.get(kernel.isa.name, kernel.isa.name)})"


# --- the link ----------------------------------------------------------------------------------------


class LinkProbe(Protocol):
    """Carries padding to the swarm and back: `market.client.MarketClient.probe_link`."""

    def __call__(self, *, send_bytes: int, receive_bytes: int) -> Awaitable[float]:
        """Seconds that the exchange took."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """Rates in bytes a second, `rtt_s` in seconds."""

    upload: float
    download: float
    rtt_s: float


async def measure_link(probe: LinkProbe) -> Link | None:
    """Carry bytes to the market at the join link and back; None where that does not work.

    A few small exchanges give the round trip, then each direction carries about half a second's worth, 1 MB
    at most. Takes some two seconds on a slow link.
    """
    try:
        await probe(send_bytes=0, receive_bytes=0)  # the connection itself is not measured
        trip = min([await probe(send_bytes=0, receive_bytes=0) for _ in range(3)])
        upload = await _direction(lambda size: probe(send_bytes=size, receive_bytes=0), trip)
        download = await _direction(lambda size: probe(send_bytes=0, receive_bytes=size), trip)
    except KvasirError:
        return None
    return Link(upload, download, trip)


async def _direction(carry: Callable[[int], Awaitable[float]], trip: float) -> float:
    size, rate = FIRST_PROBE, 0.0
    while True:
        seconds = max(await carry(size) - trip, 1e-4)
        rate = size / seconds
        if seconds >= PROBE_S / 2 or size >= LARGEST_PROBE:
            return rate
        size = min(LARGEST_PROBE, max(4 * size, int(rate * PROBE_S)))

"""The C core, compiled by this machine's own compiler into a cache folder.

One library a (sources, flags, compiler, machine), written beside its final name and moved there at once, so
that processes may build at the same time and a killed one leaves nothing that counts; its SHA-256 lies beside
it, and one that does not match is built anew. The folder must be this user's alone: what is in it is run.

Knows compilers, files and folders. Knows nothing of what the code computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).resolve().parent / "csrc"

COMPILERS: Final = ("clang",) if sys.platform == "win32" else ("cc", "gcc", "clang")
"""Looked for on the path, in this order. Not GCC on Windows: it misaligns wide vectors on the stack there
(GCC bug 54412)."""

FLAGS: Final = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",  # a fused multiply-add only where the source says so: part of the reduction order
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-tree-pre",  # GCC: it would keep the tiles' accumulators in memory
    "-fvisibility=hidden",
    "-shared",
)

BUILD_TIMEOUT_S: Final = 120.0
"""A build takes some 3 s; longer than this and it is given up."""


class BuildError(Exception):
    """The library cannot be had here; the message says why."""


def cache_folder() -> Path | None:
    """Where built libraries are kept: the user's cache folder of this platform; None without a home."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "kvasir" / "kernels"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "kvasir" / "kernels"
    return home / ".cache" / "kvasir" / "kernels"


def find_compiler() -> str | None:
    """The path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def usable(folder: Path) -> bool:
    """Whether libraries can be kept in `folder`: it is there or can be made, ours alone, and writable."""
    try:
        _make_private(folder)
        descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
        os.close(descriptor)
        os.unlink(name)
    except (OSError, BuildError):
        return False
    return True


def build(folder: Path, compiler: str, *, timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """The path of the built library, built now if `folder` lacks it whole. Blocks for some seconds.

    Raises `BuildError`: no such compiler, the build fails or takes longer than `timeout_s`, the folder
    cannot be written or others may write to it.
    """
    try:
        _make_private(folder)
        target = folder / f"kvasir-{_key(compiler, timeout_s)}{_suffix()}"
        if not _whole(target):
            _compile(compiler, target, timeout_s)
        _check_owned(target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took longer than {timeout_s:.0f} s") from None
    except OSError as error:
        raise BuildError(f"{error.strerror or error}: {error.filename or folder}") from None
    return target


def _key(compiler: str, timeout_s: float) -> str:
    """A digest of everything that decides the library's bytes."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
    )
    digest = hashlib.sha256()
    for part in (*FLAGS, compiler, platform.system(), platform.machine()):
        digest.update(part.encode() + b"\0")
    digest.update(version.stdout)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _compile(compiler: str, target: Path, timeout_s: float) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".building-", suffix=target.suffix, dir=target.parent)
    os.close(descriptor)
    made = Path(name)
    command = [compiler, *FLAGS, *_platform_flags(), str(SOURCES / "kernels.c"), "-o", str(made), "-lm"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise BuildError(f"{compiler} failed: {said[0][:200] if said else f'exit {done.returncode}'}")
        if sys.platform != "win32":  # a read-only file cannot be removed there
            made.chmod(0o500)
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        with contextlib.suppress(PermissionError):  # Windows: another process has just built and loaded it
            made.replace(target)
            _seal(target).write_text(digest, encoding="ascii")
    finally:
        made.unlink(missing_ok=True)


def _seal(library: Path) -> Path:
    """The file with the library's SHA-256: loading one cut short would crash the process."""
    return library.with_suffix(".sha256")


def _whole(library: Path) -> bool:
    """Whether the library is there as it was built."""
    try:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        return _seal(library).read_text(encoding="ascii") == digest
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _platform_flags() -> tuple[str, ...]:
    return () if sys.platform == "win32" else ("-fPIC",)


def _suffix() -> str:
    return {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owned(folder)


def _check_owned(path: Path) -> None:
    """Refuse what others could have written: it would run as this user. (Windows guards a profile itself.)"""
    if not hasattr(os, "getuid"):
        return
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path} is not this user's alone: chmod go-w it, or remove it")
    if stat.S_ISLNK(status.st_mode):
        raise BuildError(f"{path} is a symbolic link: remove it")

"""Files that hold secrets: written once, readable by their owner alone, refused otherwise.

A secret is stored as it is, or encrypted under a passphrase: Argon2id (RFC 9106) makes the key,
ChaCha20-Poly1305 (RFC 8439) seals the secret, and the header with all parameters is authenticated.
Knows nothing of what the secrets are.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from .errors import IdentityError, version_refusal

MAX_SECRET_BYTES: Final = 1 << 20
"""Bound on a secret file's size."""

MAGIC: Final = b"kvasir secret\n"
"""Starts an encrypted secret file; a plain one starts with its secret."""

VERSION: Final = 1
_HEADER: Final = struct.Struct(">BIII16s12s")  # version, memory KiB, passes, lanes, salt, nonce
_MEMORY_KIB: Final = 64 * 1024
_PASSES: Final = 3
_LANES: Final = 4
_MAX_MEMORY_KIB: Final = 1 << 20
_MAX_PASSES: Final = 64
_MAX_LANES: Final = 64


def write_secret(path: str | Path, data: bytes, *, passphrase: bytes | None = None) -> None:
    """Create `path` with `data`, mode 0600, synced to the disk with its folder; never overwrites.

    The file appears complete or not at all. Raises `IdentityError` if it exists already, and `OSError`.
    """
    target = Path(path)
    if len(data) > MAX_SECRET_BYTES - 1024:
        raise IdentityError(f"a secret of {len(data)} bytes is too long for a key file")
    content = data if passphrase is None else _encrypt(data, passphrase)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    _create(staging, content)
    try:
        _publish(staging, target, content)
    finally:
        staging.unlink(missing_ok=True)
    _sync_folder(target.parent)


def read_secret(path: str | Path, *, passphrase: bytes | None = None) -> bytes:
    """The secret in `path`.

    Raises `FileNotFoundError`, and `IdentityError` for a symbolic link, a file of somebody else, one that
    others may read or write, an encrypted one without the right `passphrase`, or a damaged one.
    """
    source = Path(path)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if source.is_symlink():
        raise IdentityError(f"{source} is a symbolic link: name the key file itself")
    try:
        descriptor = os.open(source, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise IdentityError(f"{source} is a symbolic link: name the key file itself") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        _check(source, os.fstat(file.fileno()))
        content = file.read(MAX_SECRET_BYTES + 1)
    if len(content) > MAX_SECRET_BYTES:
        raise IdentityError(f"{source} is over {MAX_SECRET_BYTES} bytes: not a key file")
    if content.startswith(MAGIC):
        return _decrypt(source, content, passphrase)
    return content


def load_or_create(path: str | Path, make: Callable[[], bytes], *, passphrase: bytes | None = None) -> bytes:
    """The secret in `path`, or a new one from `make`, stored there first. Raises as `read_secret` does.

    Two processes that start at once end with the same secret.
    """
    try:
        return read_secret(path, passphrase=passphrase)
    except FileNotFoundError:
        pass
    try:
        write_secret(path, make(), passphrase=passphrase)
    except IdentityError:
        if not Path(path).exists():
            raise
    return read_secret(path, passphrase=passphrase)


def _create(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(staging: Path, target: Path, content: bytes) -> None:
    """Give the finished file its name, without ever replacing another."""
    exists = f"{target} exists already: move it away first if you want a new key"
    try:
        os.link(staging, target)
        return
    except FileExistsError:
        raise IdentityError(exists) from None
    except (OSError, NotImplementedError):
        pass  # a file system without hard links
    try:
        _create(target, content)
    except FileExistsError:
        raise IdentityError(exists) from None


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise IdentityError(f"{path} is not a regular file")
    if not hasattr(os, "geteuid"):  # Windows: a user's profile is guarded by the system
        return
    if found.st_uid != os.geteuid():
        raise IdentityError(f"{path} belongs to another user: copy it to a file of your own")
    if found.st_mode & 0o077:
        raise IdentityError(f"{path} may be used by others: chmod 600 {path}")


def _derive(passphrase: bytes, salt: bytes, memory_kib: int, passes: int, lanes: int) -> ChaCha20Poly1305:
    kdf = Argon2id(salt=salt, length=32, iterations=passes, lanes=lanes, memory_cost=memory_kib)
    return ChaCha20Poly1305(kdf.derive(passphrase))


def _encrypt(data: bytes, passphrase: bytes) -> bytes:
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    header = MAGIC + _HEADER.pack(VERSION, _MEMORY_KIB, _PASSES, _LANES, salt, nonce)
    return header + _derive(passphrase, salt, _MEMORY_KIB, _PASSES, _LANES).encrypt(nonce, data, header)


def _decrypt(path: Path, content: bytes, passphrase: bytes | None) -> bytes:
    length = len(MAGIC) + _HEADER.size
    if len(content) < length + 16:
        raise IdentityError(f"{path} is damaged: restore it from a copy")
    version, memory_kib, passes, lanes, salt, nonce = _HEADER.unpack_from(content, len(MAGIC))
    if version != VERSION:
        raise version_refusal(VERSION, version)
    bounded = 8 * lanes <= memory_kib <= _MAX_MEMORY_KIB and passes <= _MAX_PASSES and lanes <= _MAX_LANES
    if not bounded or passes < 1 or lanes < 1:
        raise IdentityError(f"{path} is damaged: its key derivation parameters are out of bounds")
    if passphrase is None:
        raise IdentityError(f"{path} is encrypted: give its passphrase")
    try:
        sealed = _derive(passphrase, salt, memory_kib, passes, lanes)
        return sealed.decrypt(nonce, content[length:], content[:length])
    except InvalidTag:
        raise IdentityError(f"{path} does not open with this passphrase, or is damaged") from None

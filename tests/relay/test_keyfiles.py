from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relay.errors import IdentityError, Refused
from relay.keyfiles import MAGIC, load_or_create, read_secret, write_secret

posix = pytest.mark.skipif(os.name != "posix", reason="optional: POSIX file modes")


def test_a_secret_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "device.key"
    write_secret(path, b"\x00\x01secret")
    assert read_secret(path) == b"\x00\x01secret"
    assert sorted(p.name for p in path.parent.iterdir()) == ["device.key"]


@posix
def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    previous = os.umask(0)
    try:
        write_secret(path, b"secret")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    write_secret(path, b"first")
    with pytest.raises(IdentityError, match="exists already"):
        write_secret(path, b"second")
    assert read_secret(path) == b"first"


def test_without_hard_links_it_never_overwrites_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("this file system has no hard links")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "device.key"
    write_secret(path, b"first")
    with pytest.raises(IdentityError, match="exists already"):
        write_secret(path, b"second")
    assert read_secret(path) == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["device.key"]


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "device.key"
    write_secret(path, b"secret")
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"chmod 600 {path}"):
        read_secret(path)


@posix
def test_symbolic_links_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "real.key"
    write_secret(target, b"secret")
    link = tmp_path / "device.key"
    link.symlink_to(target)
    with pytest.raises(IdentityError, match="symbolic link"):
        read_secret(link)
    dangling = tmp_path / "dangling.key"
    dangling.symlink_to(tmp_path / "nothing")
    with pytest.raises(IdentityError):
        load_or_create(dangling, lambda: b"new")
    assert not (tmp_path / "nothing").exists()


@posix
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "device.key"
    write_secret(path, b"secret")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(IdentityError, match="another user"):
        read_secret(path)


@posix
def test_only_regular_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.key"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(IdentityError, match="regular file"):
        read_secret(fifo)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    path.write_bytes(b"x" * ((1 << 20) + 1))
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="not a key file"):
        read_secret(path)


def test_a_missing_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    with pytest.raises(FileNotFoundError):
        read_secret(path)
    assert load_or_create(path, lambda: b"one") == b"one"
    assert load_or_create(path, lambda: b"two") == b"one"


def test_starts_at_once_end_with_the_same_secret(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: load_or_create(path, lambda: b"%d" % i), range(24)))
    assert len(set(found)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["device.key"]


def test_encrypted_under_a_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "wallet.key"
    write_secret(path, b"wallet secret", passphrase=b"correct horse")
    content = path.read_bytes()
    assert content.startswith(MAGIC)
    assert b"wallet secret" not in content
    assert read_secret(path, passphrase=b"correct horse") == b"wallet secret"
    with pytest.raises(IdentityError, match="give its passphrase"):
        read_secret(path)
    with pytest.raises(IdentityError, match="does not open"):
        read_secret(path, passphrase=b"wrong")


def _rewrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def test_a_damaged_encrypted_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wallet.key"
    write_secret(path, b"wallet secret", passphrase=b"pw")
    content = path.read_bytes()
    _rewrite(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(IdentityError, match="does not open"):
        read_secret(path, passphrase=b"pw")
    _rewrite(path, content[:30])
    with pytest.raises(IdentityError, match="damaged"):
        read_secret(path, passphrase=b"pw")
    _rewrite(path, MAGIC + b"\x02" + content[len(MAGIC) + 1 :])
    with pytest.raises(Refused, match="version 2"):
        read_secret(path, passphrase=b"pw")
    greedy = MAGIC + b"\x01" + b"\xff\xff\xff\xff" + content[len(MAGIC) + 5 :]
    _rewrite(path, greedy)
    with pytest.raises(IdentityError, match="out of bounds"):
        read_secret(path, passphrase=b"pw")

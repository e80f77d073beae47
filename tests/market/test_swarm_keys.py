"""The swarm's own keys: made once, renewed by themselves, refused when unsafe or of another swarm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from market.cli import main
from market.swarm import RENEW_BEFORE_S, CertificateRequest, SwarmKeys, certify, request_of, store_certificate
from relay.errors import ConfigError, IdentityError, RemoteProtocolError
from relay.identity import SigningKey

NOW = 1_700_000_000.0
DAY = 86_400


def test_a_swarm_is_made_once_and_loaded_afterwards(tmp_path: Path) -> None:
    first = SwarmKeys.load_or_create(tmp_path, now=NOW)
    again = SwarmKeys.load_or_create(tmp_path, now=NOW + DAY)
    assert first.root_public == again.root_public
    for role in ("market", "backbone", "relay"):
        assert first.key(role).certificate == again.key(role).certificate  # type: ignore[arg-type]
        assert first.key(role).certificate.serial == 1  # type: ignore[arg-type]
    ids = {first.market.id, first.backbone.id, first.relay.id}
    assert len(ids) == 3


def test_half_way_through_its_life_a_certificate_is_renewed_with_the_next_serial(tmp_path: Path) -> None:
    keys = SwarmKeys.load_or_create(tmp_path, now=NOW)
    before = keys.market
    assert keys.renew(NOW + DAY) == ()
    assert set(keys.renew(NOW + RENEW_BEFORE_S + 1)) == {"market", "backbone", "relay"}
    assert keys.market.certificate.serial == 2
    assert keys.market.id == before.id
    assert keys.market.signing.public == before.signing.public
    loaded = SwarmKeys.load_or_create(tmp_path, now=NOW + RENEW_BEFORE_S + 2)
    assert loaded.market.certificate == keys.market.certificate


def test_after_a_long_sleep_the_serial_still_rises(tmp_path: Path) -> None:
    SwarmKeys.load_or_create(tmp_path, now=NOW)
    assert SwarmKeys.load_or_create(tmp_path, now=NOW + 100 * DAY).relay.certificate.serial == 2


def test_a_swarm_whose_root_is_elsewhere_says_how_to_be_certified(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    root = SwarmKeys.load_or_create(home, now=NOW)
    (away / "swarm").mkdir(parents=True)
    (away / "swarm" / "root.pub").write_text((home / "swarm" / "root.pub").read_text())
    with pytest.raises(ConfigError, match="swarm certify") as refused:
        SwarmKeys.load_or_create(away, now=NOW, roles=("market",))
    word = str(refused.value).partition("certify ")[2].partition(" ")[0]
    from market.requests import decode_bytes

    assert root.root is not None
    request = CertificateRequest.from_bytes(decode_bytes(word, "it"))
    store_certificate(away / "swarm", certify(root.root, request, serial=7, now=NOW))
    keys = SwarmKeys.load_or_create(away, now=NOW, roles=("market",))
    assert keys.root is None
    assert keys.market.certificate.serial == 7
    assert keys.renew(NOW + 20 * DAY) == ()
    with pytest.raises(ConfigError, match="no key for a relay"):
        _ = keys.relay


def test_a_certificate_of_another_swarm_is_refused(tmp_path: Path) -> None:
    keys = SwarmKeys.load_or_create(tmp_path, now=NOW)
    stranger = certify(SigningKey.generate(), request_of(keys.market), serial=1, now=NOW)
    store_certificate(tmp_path / "swarm", stranger)
    with pytest.raises(IdentityError) as refused:
        SwarmKeys.load_or_create(tmp_path, now=NOW)
    assert refused.value.code == "wrong_swarm"


def test_a_damaged_key_file_or_another_root_is_refused(tmp_path: Path) -> None:
    SwarmKeys.load_or_create(tmp_path, now=NOW)
    (tmp_path / "swarm" / "root.pub").write_text(SigningKey.generate().address)
    with pytest.raises(IdentityError, match="not of one swarm"):
        SwarmKeys.load_or_create(tmp_path, now=NOW)
    other = tmp_path / "other"
    SwarmKeys.load_or_create(other, now=NOW)
    path = other / "swarm" / "market.key"
    path.unlink()
    path.write_bytes(b"nonsense")
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="not a market's key file"):
        SwarmKeys.load_or_create(other, now=NOW)


@pytest.mark.skipif(os.name != "posix", reason="optional: POSIX modes")
def test_a_root_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    SwarmKeys.load_or_create(tmp_path, now=NOW)
    (tmp_path / "swarm" / "root.key").chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        SwarmKeys.load_or_create(tmp_path, now=NOW)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x81\xa1v\x01"])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        CertificateRequest.from_bytes(data)


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_makes_shows_and_certifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, away = str(tmp_path / "home"), str(tmp_path / "away")
    assert main(["swarm", "init", "--state-dir", home]) == 0
    assert "root key     here" in capsys.readouterr().out
    assert main(["swarm", "init", "--state-dir", home]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["swarm", "show", "--state-dir", away]) == 2
    assert "swarm init" in capsys.readouterr().err
    assert main(["swarm", "request", "--role", "relay", "--state-dir", away]) == 0
    word = capsys.readouterr().out.strip()
    out = tmp_path / "relay.cert"
    assert main(["swarm", "certify", word, "--state-dir", home, "--out", str(out)]) == 0
    assert "certified the relay" in capsys.readouterr().out
    assert out.stat().st_size > 100
    assert main(["swarm", "certify", word, "--state-dir", away, "--out", str(out)]) == 2
    assert "kept elsewhere" in capsys.readouterr().err
    assert main(["swarm", "certify", "x", "--state-dir", home, "--out", str(out)]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--public-url", "ftp://x"],
        ["--database", "mysql://x/y"],
        ["--database", "nonsense"],
        ["--database", "sqlite://"],
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_refused_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["run", "--state-dir", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err.startswith("kvasir-market: ")

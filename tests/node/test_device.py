"""What the machine is, what the owner allows, and what is kept between two starts."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from kvasir_node.config import NodeConfig, format_size, parse_size
from kvasir_node.device import allow, cgroup_memory, lower_priority, measure, network_of
from kvasir_node.loading import MemoryShort, check_memory
from kvasir_node.state import NodeState
from market.wallet import Challenge, open_grant, sign_challenge
from relay.errors import ConfigError, IdentityError
from relay.identity import SigningKey
from relay.links import JoinLink

LINK = JoinLink("http://127.0.0.1:1", None)


def config(folder: Path, **changes: object) -> NodeConfig:
    return NodeConfig(join=LINK, state_dir=folder, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 10**6), ("4GB", 4 * 10**9), ("4G", 4 * 10**9), ("1.5 mb", 1_500_000), ("2KiB", 2048),
        ("1TiB", 2**40), ("17b", 17),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1GB", "1PB", "1e9", "4 GB or so", "99999999999TB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_size(size) for size in (0, 999, 1500, 312_000, 4 * 10**9, 2 * 10**12)] == [
        "0 B", "999 B", "1.5 kB", "312 kB", "4.0 GB", "2.0 TB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        {"precision": "int2"}, {"budget_bytes": 0}, {"cache_bytes": -1}, {"reserve_bytes": -1},
        {"threads": 0}, {"nice": 20}, {"heartbeat_s": 0.0}, {"drain_s": -1.0}, {"max_sessions": 0},
        {"name": "a\nb"},
        {"mirrors": ("ftp://x",)},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config(tmp_path, **bad)


def test_this_machine_is_measured(tmp_path: Path) -> None:
    device = measure(tmp_path / "not" / "yet" / "there")
    assert 0 < device.memory_free <= device.memory_total
    assert device.processors >= 1
    assert device.disk_free > 0
    assert "memory free" in device.describe()
    assert device.facts()["processors"] == device.processors


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    used.write_text("300\n")
    limit.write_text("1000\n")
    files = [(str(tmp_path / "absent"), str(used)), (str(limit), str(used))]
    assert cgroup_memory(files) == (1000, 700)
    assert measure(tmp_path, cgroups=files).memory_free == 700
    limit.write_text("max\n")
    assert cgroup_memory(files)[0] > 2**50


def test_the_allowance_follows_the_settings(tmp_path: Path) -> None:
    device = measure(tmp_path)
    allowance = allow(config(tmp_path, reserve_bytes=0), device)
    assert allowance.budget == device.memory_free // 2
    assert allowance.cache == device.disk_free
    assert allow(config(tmp_path, reserve_bytes=10, cache_bytes=77), device).cache == 77
    assert allow(config(tmp_path, reserve_bytes=0, budget_bytes=5), device, cached_bytes=9).budget == 5
    with pytest.raises(ConfigError, match="more than this machine"):
        allow(config(tmp_path, budget_bytes=device.memory_total + 1), device)
    with pytest.raises(ConfigError, match="kept in reserve"):
        allow(config(tmp_path, reserve_bytes=1 << 60), device)


def test_memory_is_checked_before_a_download() -> None:
    check_memory(10, free=lambda: 10)
    with pytest.raises(MemoryShort, match="smaller --budget"):
        check_memory(11, free=lambda: 10)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX priorities")
def test_priority_is_lowered_once() -> None:
    before = os.nice(0)
    lower_priority(before)
    assert os.nice(0) == before


def test_devices_of_one_network_share_a_name() -> None:
    one = network_of("127.0.0.1", 80, salt=b"s")
    assert one == network_of("127.0.0.5", 81, salt=b"s")
    assert one != network_of("127.0.0.1", 80, salt=b"t")
    assert network_of("host.invalid", 80, salt=b"s") == "unknown"
    assert socket.gethostname() not in one


# --- the state folder --------------------------------------------------------------------------------


def test_keys_are_made_once_and_guarded(tmp_path: Path) -> None:
    state = NodeState(tmp_path)
    keys = state.device_keys()
    assert state.device_keys().signing.public == keys.signing.public
    assert state.device_keys().exchange.public == keys.exchange.public
    path = tmp_path / "device.key"
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        with pytest.raises(IdentityError, match="chmod 600"):
            state.device_keys()
        path.chmod(0o600)
    path.write_bytes(b"junk")
    with pytest.raises(IdentityError, match="not a device key file"):
        state.device_keys()


def test_a_wallet_is_made_only_where_allowed(tmp_path: Path) -> None:
    state = NodeState(tmp_path)
    with pytest.raises(ConfigError, match="--wallet"):
        state.wallet(tmp_path / "w.json", create=False)
    made = state.wallet(tmp_path / "w.json", create=True)
    assert state.wallet(tmp_path / "w.json", create=False).public == made.public


def test_a_swarm_is_pinned_at_first_contact_and_never_changes_silently(tmp_path: Path) -> None:
    state = NodeState(tmp_path)
    first, second = SigningKey.generate().public, SigningKey.generate().public
    assert state.pin("http://a:1", None) is None
    assert state.pin("http://a:1", first) == first
    assert NodeState(tmp_path).pin("http://a:1", None) == first
    assert state.pin("http://b:1", second) == second
    with pytest.raises(IdentityError, match="was pinned to swarm"):
        state.pin("http://a:1", second)
    assert set(state.roots()) == {"http://a:1", "http://b:1"}
    (tmp_path / "swarms.json").write_text("[]")
    with pytest.raises(ConfigError, match="damaged"):
        state.roots()


def test_start_generations_rise_even_when_the_state_is_lost(tmp_path: Path) -> None:
    state = NodeState(tmp_path)
    assert [state.next_generation(now=100.5), state.next_generation(now=100.9)] == [100, 101]
    (tmp_path / "generation").write_text("junk")
    assert state.next_generation(now=200.0) == 200


def test_grants_are_kept_while_they_hold(tmp_path: Path) -> None:
    state = NodeState(tmp_path)
    keys, wallet, root = state.device_keys(), SigningKey.generate(), SigningKey.generate().public
    text = Challenge(
        "http://a:1",
        wallet.public,
        keys.signing.public,
        keys.exchange.public,
        root,
        "serve",
        "a" * 32,
        1000,
        2000,
    ).text
    grant = open_grant(text, sign_challenge(text, wallet), root=root, now=1500)
    assert state.grant(root, keys.signing.public, now=1500) is None
    state.store_grant(grant)
    assert state.grant(root, keys.signing.public, now=1500) == grant
    assert state.grant(root, keys.signing.public, now=2001) is None
    assert state.grant(root, SigningKey.generate().public, now=1500) is None

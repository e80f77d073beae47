from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.addresses import client_address, parse_networks, quota_key
from relay.errors import ConfigError

PROXIES = parse_networks(["10.0.0.0/8", "fd00::/8", "127.0.0.1"])


@pytest.mark.parametrize(
    ("remote", "forwarded", "client"),
    [
        ("203.0.113.5", [], "203.0.113.5"),
        ("203.0.113.5", ["198.51.100.1"], "203.0.113.5"),  # not a proxy: what it says counts for nothing
        ("10.1.2.3", ["198.51.100.1"], "198.51.100.1"),
        ("10.1.2.3", ["6.6.6.6, 198.51.100.1"], "198.51.100.1"),  # the client wrote the first itself
        ("10.1.2.3", ["6.6.6.6", "198.51.100.1, 10.9.9.9"], "198.51.100.1"),
        ("10.1.2.3", [], "10.1.2.3"),
        ("10.1.2.3", ["nonsense"], "10.1.2.3"),
        ("10.1.2.3", ["1.2.3.4, nonsense, 10.0.0.9"], "10.0.0.9"),
        ("10.1.2.3", ["198.51.100.1:4711"], "198.51.100.1"),
        ("127.0.0.1", ["[2001:db8::7]:443"], "2001:db8::7"),
        ("::ffff:10.0.0.1", ["2001:db8::7"], "2001:db8::7"),
        ("unknown", ["198.51.100.1"], "unknown"),
    ],
)
def test_who_the_client_is(remote: str, forwarded: list[str], client: str) -> None:
    assert client_address(remote, forwarded, PROXIES) == client


@given(st.lists(st.text(max_size=40), max_size=4))
def test_without_trusted_proxies_the_header_is_nothing(forwarded: list[str]) -> None:
    assert client_address("203.0.113.5", forwarded, ()) == "203.0.113.5"
    client_address("10.0.0.1", forwarded, PROXIES)


def test_ipv6_counts_by_its_network() -> None:
    assert quota_key("2001:db8:1:2:3::4") == quota_key("2001:db8:1:2:ffff::1") == "2001:db8:1:2::/64"
    assert quota_key("2001:db8:1:3::1") != quota_key("2001:db8:1:2::1")
    assert quota_key("::ffff:192.0.2.1") == quota_key("192.0.2.1") == "192.0.2.1"
    assert quota_key("fe80::1%eth0") == "fe80::/64"
    assert quota_key("unknown") == "unknown"


def test_networks_are_checked() -> None:
    with pytest.raises(ConfigError, match="address or network"):
        parse_networks(["10.0.0.0/99"])

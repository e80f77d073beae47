"""Announced addresses are what a stranger says: which of them may be dialled, and how often."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.reaching import (
    DEVICE_FAILURES,
    FAILURES,
    MAX_TARGETS,
    WINDOW_S,
    DialBook,
    Reach,
    check_address,
    choose_targets,
)
from relay.errors import Refused
from tests.support.rosters import device

OWN = frozenset(map(ip_address, ("127.0.0.1", "::1", "192.168.1.5", "fd00::5")))
NETWORKS = (ip_network("192.168.1.0/24"), ip_network("fd00::/64"))
HERE = Reach(OWN, NETWORKS)
ALONE = Reach(OWN, NETWORKS, local=True)


@pytest.mark.parametrize(
    ("url", "dialled", "near"),
    [
        ("http://192.168.1.7:8500", "http://192.168.1.7:8500", True),
        ("http://8.8.8.8:8500/", "http://8.8.8.8:8500", False),
        ("http://[fd00::7]:8500", "http://[fd00::7]:8500", True),
        ("http://[2606:4700::1111]:8500", "http://[2606:4700::1111]:8500", False),
        ("http://[::ffff:192.168.1.7]:8500", "http://192.168.1.7:8500", True),
    ],
)
def test_what_is_dialled(url: str, dialled: str, near: bool) -> None:
    target = check_address(url, HERE)
    assert (target.url, target.near) == (dialled, near)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8500",
        "http://[::1]:8500",
        "http://[::ffff:127.0.0.1]:8500",
        "http://192.168.1.5:8500",  # this machine's own address
        "http://169.254.169.254:8500",  # where clouds keep credentials
        "http://[fe80::1]:8500",
        "http://[fe80::1%25eth0]:8500",
        "http://10.0.0.7:8500",  # a private network that this machine is not part of
        "http://100.64.0.7:8500",
        "http://0.0.0.0:8500",
        "http://[::]:8500",
        "http://224.0.0.251:8500",
        "http://255.255.255.255:8500",
        "http://[64:ff9b::7f00:1]:8500",  # NAT64 of 127.0.0.1
        "http://[2002:7f00:1::]:8500",  # 6to4 of 127.0.0.1
        "http://8.8.8.8:80",
        "http://8.8.8.8:22",
        "http://8.8.8.8:6667",
        "http://8.8.8.8",
        "http://8.8.8.8:99999",
        "https://8.8.8.8:8500",
        "ftp://8.8.8.8:8500",
        "http://intranet:8500",
        "http://2130706433:8500",
        "http://0x7f.1:8500",
        "http://8.8.8.8:8500/admin?x=1",
        "http://user:pass@8.8.8.8:8500",
        "http://8.8.8.8:8500#here",
        "",
        "http://",
        "http://[8.8.8.8:8500",
    ],
)
def test_what_is_not_dialled(url: str) -> None:
    with pytest.raises(Refused) as refused:
        check_address(url, HERE)
    assert refused.value.code == "forbidden"


def test_loopback_is_dialled_only_where_every_device_is_on_this_machine() -> None:
    assert check_address("http://127.0.0.1:8500", ALONE).near
    assert check_address("http://192.168.1.5:8500", ALONE).near
    for url in ("http://169.254.169.254:8500", "http://127.0.0.1:80", "http://10.0.0.7:8500"):
        with pytest.raises(Refused):
            check_address(url, ALONE)


def test_near_addresses_come_first_each_once_and_only_a_few() -> None:
    urls = ["http://8.8.8.8:8500", "http://10.0.0.1:8500", *(["http://192.168.1.7:8500"] * 3)]
    urls += [f"http://9.9.9.{number}:8500" for number in range(20)]
    targets, refused = choose_targets(urls, HERE)
    assert [target.url for target in targets[:2]] == ["http://192.168.1.7:8500", "http://8.8.8.8:8500"]
    assert len(targets) == MAX_TARGETS
    assert [error.code for error in refused] == ["forbidden"]


@given(st.text(max_size=60) | st.builds("http://{}:{}".format, st.ip_addresses(), st.integers(0, 70000)))
def test_any_text_is_an_address_or_refused(url: str) -> None:
    try:
        target = check_address(url, HERE)
    except Refused:
        return
    assert target.near or target.address.is_global
    assert not target.address.is_loopback
    assert check_address(target.url, HERE) == target


def test_failures_at_an_address_close_it_for_a_while_whoever_names_it_and_at_whatever_port() -> None:
    book = DialBook()
    for number in range(FAILURES):
        target = check_address(f"http://8.8.8.8:{8500 + number}", HERE)
        who = device("abcdefghijklmnop"[number])
        assert book.allows(who, target, 0.0)
        book.failed(who, target, 0.0)
    other = check_address("http://8.8.4.4:8500", HERE)
    assert not book.allows(device("z"), check_address("http://8.8.8.8:9999", HERE), 1.0)
    assert book.allows(device("z"), other, 1.0)
    assert book.allows(device("z"), check_address("http://8.8.8.8:9999", HERE), WINDOW_S + 1)


def test_a_device_that_names_many_dead_addresses_is_left_alone() -> None:
    book = DialBook()
    for number in range(DEVICE_FAILURES):
        book.failed(device("a"), check_address(f"http://9.9.9.{number}:8500", HERE), 0.0)
    fresh = check_address("http://8.8.8.8:8500", HERE)
    assert not book.allows(device("a"), fresh, 1.0)
    assert book.allows(device("b"), fresh, 1.0)


def test_a_session_at_an_address_clears_it() -> None:
    book = DialBook()
    target = check_address("http://8.8.8.8:8500", HERE)
    for number in range(FAILURES):
        book.failed(device("abcdefghijklmnop"[number]), target, 0.0)
    book.succeeded(target)
    assert book.allows(device("z"), target, 0.0)

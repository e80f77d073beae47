"""Which of a device's announced addresses are dialled, in which order, and how often.

Addresses are what a device says of itself, through the market: untrusted. A device must not be able to make
the backbone scan ports or talk to services of its own network. So only literal IP addresses with an ordinary
port are dialled; private ones only where this machine is part of that network; loopback and this machine's
own addresses only where every device is on this machine; link-local, multicast and tunnelled ones never. What
is sent is one fixed WebSocket request and, to whoever accepts it, a Noise message that says nothing secret.
Failures are counted by address and altogether, and bounded.

Pure. Knows no sockets; `Reach` says what this machine is, and `now` is any steady clock in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from relay.addresses import Network, quota_key
from relay.errors import Refused
from relay.identity import PublicKey, address_of

Address = IPv4Address | IPv6Address

MAX_TARGETS: Final = 4
"""Addresses of one device that are tried in one go."""

LOWEST_PORT: Final = 1024
BAD_PORTS: Final = frozenset(
    {1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6679, 6697, 10080, *range(6665, 6670)}
)
"""Ports from 1024 on that browsers block, by the Fetch standard ("port blocking")."""

TUNNELS: Final = tuple(map(ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""NAT64, 6to4 and Teredo: IPv6 addresses that lead to an IPv4 address of the sender's choice."""

FAILURES: Final = 10
"""Failed dials to one address (of any devices and ports) within `WINDOW_S`; then it is left alone."""

DEVICE_FAILURES: Final = 30
"""Failed dials for one device within `WINDOW_S`, whatever addresses it names."""

ALL_FAILURES: Final = 300
"""Failed dials altogether within `WINDOW_S`."""

WINDOW_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Reach:
    """What this machine is: its own addresses, the networks it is part of.

    `local`: every device is on this machine, because the backbone listens on loopback alone.
    """

    own: frozenset[Address]
    networks: tuple[Network, ...]
    local: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """An address that may be dialled. `near`: on a network that this machine is part of."""

    url: str
    address: Address
    near: bool


def check_address(url: str, reach: Reach) -> Target:
    """The target behind an announced `url`. Raises `Refused` (forbidden), saying why it is not dialled."""
    try:
        parts = urlsplit(url)
        port = parts.port
        address = ip_address(parts.hostname or "")
    except ValueError:
        raise _no(url, "it is not http://ADDRESS:PORT with a literal IP address") from None
    if parts.scheme != "http" or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise _no(url, "it is not http://ADDRESS:PORT with a literal IP address")
    if "@" in parts.netloc or "%" in parts.netloc:
        raise _no(url, "it has a user name or a zone")
    if port is None or port < LOWEST_PORT or port in BAD_PORTS:
        raise _no(url, f"a device's port is {LOWEST_PORT} or above, and none of a known service")
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    name = f"[{address}]" if address.version == 6 else str(address)
    return Target(f"http://{name}:{port}", address, _near(url, address, reach))


def _near(url: str, address: Address, reach: Reach) -> bool:
    """Whether the address is in this machine's own networks. Raises `Refused` for one not to be dialled."""
    if address.is_loopback or address in reach.own:
        if not reach.local:
            raise _no(url, "it leads back to this machine")
        return True
    if address.is_unspecified or address.is_multicast or address.is_link_local or address.is_reserved:
        raise _no(url, "it is a link-local, multicast or reserved address")
    if any(address in network for network in TUNNELS):
        raise _no(url, "it leads through a tunnel")
    near = any(address in network for network in reach.networks)
    if not near and not address.is_global:
        raise _no(url, "it is a private address of a network that this machine is not part of")
    return near


def _no(url: str, why: str) -> Refused:
    return Refused("forbidden", f"{url[:80]!r} is not dialled: {why}")


def choose_targets(urls: Iterable[str], reach: Reach) -> tuple[list[Target], list[Refused]]:
    """The addresses to dial, nearest first and each once, and why the others are not."""
    targets: dict[str, Target] = {}
    refused: list[Refused] = []
    for url in urls:
        try:
            target = check_address(url, reach)
        except Refused as error:
            refused.append(error)
            continue
        targets.setdefault(target.url, target)
    ordered = sorted(targets.values(), key=lambda target: not target.near)
    return ordered[:MAX_TARGETS], refused


class DialBook:
    """Counts failed dials, so that nobody makes this machine knock at an address again and again."""

    def __init__(self) -> None:
        self._failures: dict[str, deque[float]] = {}
        self._all: deque[float] = deque()

    def allows(self, device: PublicKey, target: Target, now: float) -> bool:
        """Whether `target` may be dialled now on behalf of `device`."""
        self._forget(now)
        return (
            len(self._failures.get(_place(target), ())) < FAILURES
            and len(self._failures.get(address_of(device), ())) < DEVICE_FAILURES
            and len(self._all) < ALL_FAILURES
        )

    def failed(self, device: PublicKey, target: Target, now: float) -> None:
        """Note a dial that did not end in a session."""
        for key in (_place(target), address_of(device)):
            self._failures.setdefault(key, deque()).append(now)
        self._all.append(now)
        self._forget(now)

    def succeeded(self, target: Target) -> None:
        """A device of this swarm answers there: what failed at that address before counts no more."""
        self._failures.pop(_place(target), None)

    def _forget(self, now: float) -> None:
        while self._all and now - self._all[0] > WINDOW_S:
            self._all.popleft()
        for key, times in list(self._failures.items()):
            while times and now - times[0] > WINDOW_S:
                times.popleft()
            if not times:
                del self._failures[key]


def _place(target: Target) -> str:
    """What dials to an address count as; no device's base58 address looks like it."""
    return f"at {quota_key(str(target.address))}"

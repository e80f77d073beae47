"""Whose connection it is, for quotas: the peer's address, behind trusted reverse proxies or not.

Pure. A forwarded address counts only where the proxies that added it are configured; anybody may write the
header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from .errors import ConfigError

Network = IPv4Network | IPv6Network

IPV6_PREFIX = 64
"""An IPv6 subscriber has at least so large a network; its addresses count as one."""


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks such as 10.0.0.0/8. Raises `ConfigError`."""
    networks = []
    for text in texts:
        try:
            networks.append(ip_network(text, strict=False))
        except ValueError:
            raise ConfigError(f"{text!r} is no address or network: it looks like 10.0.0.0/8") from None
    return tuple(networks)


def client_address(remote: str, forwarded_for: Sequence[str], trusted: Sequence[Network]) -> str:
    """The address of the client: `remote`, or what trusted proxies say.

    `forwarded_for` are the values of the X-Forwarded-For headers, in order. Read from its end, the first
    address that is not a trusted proxy is the client; what stands before it anybody may have written.
    """
    if not _is_trusted(remote, trusted):
        return remote
    hops = [hop.strip() for value in forwarded_for for hop in value.split(",")]
    address = remote
    for hop in reversed(hops):
        found = _parse(hop)
        if found is None:
            return address
        address = str(found)
        if not _is_trusted(address, trusted):
            return address
    return address


def quota_key(address: str) -> str:
    """What an address counts as: itself, or its /64 if it is IPv6."""
    found = _parse(address)
    if isinstance(found, IPv6Address):
        return str(ip_network((found, IPV6_PREFIX), strict=False))
    return str(found or address)


def _is_trusted(address: str, trusted: Sequence[Network]) -> bool:
    if not trusted:
        return False
    found = _parse(address)
    return found is not None and any(found in network for network in trusted)


def _parse(text: str) -> IPv4Address | IPv6Address | None:
    """An address as proxies write it: also in brackets, also with a port. IPv4 in IPv6 counts as IPv4."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found

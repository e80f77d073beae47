"""A port of the home router, opened by UPnP where the owner wants it (`--upnp`): backbones can dial in.

The router is found by SSDP and asked over SOAP (UPnP Internet Gateway Device, version 1 or 2), for a lease of
an hour that is renewed and given back at the end. Answers come from whoever is on the LAN: only the machine
that answered is asked, nothing long is read, and an address that is not public is of no use to anybody.

Knows the router. Whether a mapping is of use shows only when a backbone dials in.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
import structlog

from relay.errors import KvasirError, RemoteProtocolError, Unreachable

if TYPE_CHECKING:
    from async_upnp_client.client import UpnpService

log = structlog.get_logger("node")

LEASE_S: Final = 3600
RENEW_S: Final = LEASE_S / 2
"""What the router is asked for, and after how long again."""

SEARCH_S: Final = 3
"""How long routers may take to answer a search."""

ASK_S: Final = 5.0
"""How long a router may take for one request."""

REMOVE_S: Final = 3.0
"""How long giving the port back may take, at the end."""

AGAIN_S: Final = 600.0
"""Mean pause before a router is looked for again, where none would open a port."""

MAX_ANSWER_BYTES: Final = 256 * 1024
MAX_ROUTERS: Final = 4
TRIES: Final = 5
"""Ports tried where the one wanted is another machine's."""

GATEWAYS: Final = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{n}" for n in (1, 2))
SERVICES: Final = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)

CONFLICT: Final = 718
ONLY_PERMANENT: Final = 725
"""Error codes of AddPortMapping: another machine has that port; the router knows no leases."""


def available() -> bool:
    """Whether `async-upnp-client` is installed."""
    return importlib.util.find_spec("async_upnp_client") is not None


class PortMapper:
    """Keeps one TCP port of the router open for `port` of this machine, while `run` runs.

    `url` is where backbones may dial then, or None. `target` is where the search goes: to all routers of the
    LAN by multicast, or (tests) to one address.
    """

    def __init__(self, *, port: int, rng: Random, target: tuple[str, int] | None = None) -> None:
        self.url: str | None = None
        self._port = port
        self._rng = rng
        self._target = target
        self._external: int | None = None

    async def run(self) -> None:
        """Open the port and keep it open until cancelled; then give it back."""
        while True:
            router: Router | None = None
            try:
                router = await find_router(self._target)
                while True:
                    await self._open(router)
                    await asyncio.sleep(RENEW_S)
            except KvasirError as error:
                log.warning("port.unmapped", reason=str(error))
            finally:
                self.url = None
                if router is not None and self._external is not None:
                    await _politely(router, self._external)
                    self._external = None
            await asyncio.sleep(AGAIN_S * self._rng.uniform(0.5, 1.5))

    async def _open(self, router: Router) -> None:
        """Open the port, or keep it open. Raises `KvasirError`."""
        address = await router.external_address()
        if not ip_address(address).is_global:
            raise Unreachable(
                f"the router's own address {address} is not public (another router, or the provider's NAT, "
                "is before it): nobody outside could dial in"
            )
        wanted = self._external or self._port
        for attempt in range(TRIES):
            try:
                await router.open(wanted, self._port)
                break
            except PortTaken:
                if attempt == TRIES - 1:
                    raise
                wanted = self._rng.randrange(20_000, 60_000)
        url = f"http://{address}:{wanted}"
        if url != self.url:
            log.info("port.mapped", url=url, router=router.host)
        self.url, self._external = url, wanted


class PortTaken(KvasirError):  # noqa: N818 - says what to do
    """Another machine has that port of the router."""

    code = "conflict"


class Router:
    """One gateway's port mapping service; `host` is its address on the LAN, `local` this machine's."""

    def __init__(self, service: UpnpService, host: str, local: str) -> None:
        self.host, self._local = host, local
        self._service = service

    async def external_address(self) -> str:
        """The router's address outside. Raises `KvasirError`."""
        answer = await self._call("GetExternalIPAddress")
        text = str(answer.get("NewExternalIPAddress") or "")
        try:
            return str(ip_address(text))
        except ValueError:
            why = f"the router {self.host} is not connected: it gives {text[:40]!r} as its address"
            raise Unreachable(why) from None

    async def open(self, external: int, internal: int) -> None:
        """Map a port for `LEASE_S`, or for good where the router knows no leases.

        Raises `PortTaken`, or another `KvasirError`.
        """
        try:
            await self._map(external, internal, LEASE_S)
        except _OnlyPermanent:
            await self._map(external, internal, 0)

    async def _map(self, external: int, internal: int, lease_s: int) -> None:
        await self._call(
            "AddPortMapping",
            NewRemoteHost="",
            NewExternalPort=external,
            NewProtocol="TCP",
            NewInternalPort=internal,
            NewInternalClient=self._local,
            NewEnabled=True,
            NewPortMappingDescription="kvasir-node",
            NewLeaseDuration=lease_s,
        )

    async def close(self, external: int) -> None:
        """Give a port back. Raises `KvasirError`."""
        await self._call("DeletePortMapping", NewRemoteHost="", NewExternalPort=external, NewProtocol="TCP")

    async def _call(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        from async_upnp_client.exceptions import UpnpActionError, UpnpError

        try:
            async with asyncio.timeout(ASK_S):
                found: Mapping[str, Any] = await self._service.action(name).async_call(**arguments)
                return found
        except UpnpActionError as error:
            code = error.error_code
            if code == CONFLICT:
                port = arguments.get("NewExternalPort")
                raise PortTaken(f"port {port} of the router is another machine's") from None
            if code == ONLY_PERMANENT and arguments.get("NewLeaseDuration"):
                raise _OnlyPermanent("the router maps ports for good only") from None
            raise Unreachable(f"the router {self.host} refuses {name} (error {code})") from None
        except (UpnpError, TimeoutError, KeyError, ValueError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"the router {self.host} does not answer {name}: {reason}") from None


class _OnlyPermanent(KvasirError):  # noqa: N818 - handled where it is raised
    code = "bad_request"


async def find_router(target: tuple[str, int] | None = None) -> Router:
    """The first gateway of the LAN that maps ports. Raises `Unreachable`, saying what was found."""
    found = await _search(target)
    if not found:
        raise Unreachable("no router answers a UPnP search: turn UPnP on there, or forward the port by hand")
    reasons = []
    for location, host in found.items():
        try:
            return await _router(location, host)
        except KvasirError as error:
            reasons.append(str(error))
    raise Unreachable("; ".join(reasons))


async def _search(target: tuple[str, int] | None) -> dict[str, str]:
    """Description URL -> address, of gateways that answer for themselves, `MAX_ROUTERS` at most."""
    from async_upnp_client.search import async_search

    found: dict[str, str] = {}

    async def heard(headers: Mapping[str, Any]) -> None:
        location, host = str(headers.get("location") or ""), str(headers.get("_host") or "")
        parts = urlsplit(location)
        own = parts.scheme == "http" and parts.hostname == host
        if own and headers.get("st") in GATEWAYS and len(found) < MAX_ROUTERS:
            found[location] = host

    searches = (
        async_search(heard, timeout=SEARCH_S, search_target=gateway, target=target) for gateway in GATEWAYS
    )
    try:
        async with asyncio.timeout(2 * SEARCH_S):
            await asyncio.gather(*searches)
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"this network carries no UPnP search: {error}") from None
    return found


async def _router(location: str, host: str) -> Router:
    from async_upnp_client.client_factory import UpnpFactory
    from async_upnp_client.exceptions import UpnpError

    factory = UpnpFactory(_requester(host), non_strict=True)  # routers' descriptions are rarely without fault
    try:
        async with asyncio.timeout(4 * ASK_S):
            device = await factory.async_create_device(location)
    except (UpnpError, TimeoutError, ValueError, OSError) as error:
        raise Unreachable(f"the router {host} cannot be asked: {error or type(error).__name__}") from None
    services = {service.service_type: service for service in device.all_services}
    for kind in SERVICES:
        service = services.get(kind)
        if service is not None and service.has_action("AddPortMapping"):
            return Router(service, host, _towards(host))
    raise Unreachable(f"the router {host} maps no ports")


def _requester(host: str) -> Any:
    """HTTP for the library: to `host` alone, within `ASK_S`, and answers within a bound."""
    from async_upnp_client.client import UpnpRequester
    from async_upnp_client.const import HttpRequest, HttpResponse
    from async_upnp_client.exceptions import UpnpConnectionError

    class Bounded(UpnpRequester):
        async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
            if urlsplit(http_request.url).hostname != host:
                raise RemoteProtocolError(f"the router {host} names another machine's address")
            timeout = aiohttp.ClientTimeout(total=ASK_S)
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout) as http,
                    http.request(
                        http_request.method,
                        http_request.url,
                        headers=http_request.headers,
                        data=http_request.body,
                        allow_redirects=False,
                    ) as response,
                ):
                    body = await response.content.read(MAX_ANSWER_BYTES + 1)
                    while len(body) <= MAX_ANSWER_BYTES and not response.content.at_eof():
                        body += await response.content.read(MAX_ANSWER_BYTES + 1 - len(body))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise UpnpConnectionError(str(error) or type(error).__name__) from error
            if len(body) > MAX_ANSWER_BYTES:
                raise RemoteProtocolError(f"the router {host} answers without end")
            return HttpResponse(response.status, dict(response.headers), body.decode("utf-8", "replace"))

    return Bounded()


def _towards(host: str) -> str:
    """This machine's address on the network of `host`. Raises `Unreachable`."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1900))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unreachable(f"there is no way to the router {host}: {error}") from None


async def _politely(router: Router, external: int) -> None:
    """Give a port back, within `REMOVE_S`; a lease ends by itself anyway."""
    with contextlib.suppress(KvasirError, TimeoutError):
        async with asyncio.timeout(REMOVE_S):
            await router.close(external)
            log.info("port.returned", port=external, router=router.host)

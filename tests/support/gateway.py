"""A home router as UPnP sees it: SSDP search, descriptions, SOAP, a table of port mappings.

Source: UPnP Device Architecture 1.1 (sections 1.3, 2, 3) and WANIPConnection:1 (sections 2.4.16 to 2.4.18).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from xml.etree import ElementTree

from aiohttp import web

GATEWAY = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"

_DEVICE = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{GATEWAY}</deviceType><friendlyName>a router</friendlyName>
<manufacturer>nobody</manufacturer><modelName>one</modelName><UDN>uuid:1</UDN>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType>
<friendlyName>wan</friendlyName><manufacturer>nobody</manufacturer><modelName>one</modelName><UDN>uuid:2</UDN>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType>
<friendlyName>connection</friendlyName><manufacturer>nobody</manufacturer><modelName>one</modelName>
<UDN>uuid:3</UDN><serviceList><service><serviceType>{SERVICE}</serviceType>
<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId><SCPDURL>/service.xml</SCPDURL>
<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL></service></serviceList></device></deviceList>
</device></deviceList></device></root>"""

_VARIABLES = {
    "ExternalIPAddress": "string",
    "RemoteHost": "string",
    "ExternalPort": "ui2",
    "PortMappingProtocol": "string",
    "InternalPort": "ui2",
    "InternalClient": "string",
    "PortMappingEnabled": "boolean",
    "PortMappingDescription": "string",
    "PortMappingLeaseDuration": "ui4",
}
_TARGET = ["RemoteHost", "ExternalPort", "PortMappingProtocol"]
_ACTIONS = {
    "GetExternalIPAddress": [("out", "ExternalIPAddress", "ExternalIPAddress")],
    "AddPortMapping": [
        *(("in", name.replace("PortMappingProtocol", "Protocol"), name) for name in _TARGET),
        ("in", "InternalPort", "InternalPort"),
        ("in", "InternalClient", "InternalClient"),
        ("in", "Enabled", "PortMappingEnabled"),
        ("in", "PortMappingDescription", "PortMappingDescription"),
        ("in", "LeaseDuration", "PortMappingLeaseDuration"),
    ],
    "DeletePortMapping": [("in", name.replace("PortMappingProtocol", "Protocol"), name) for name in _TARGET],
}


def _service() -> str:
    actions = "".join(
        f"<action><name>{name}</name><argumentList>"
        + "".join(
            f"<argument><name>New{argument}</name><direction>{way}</direction>"
            f"<relatedStateVariable>{variable}</relatedStateVariable></argument>"
            for way, argument, variable in arguments
        )
        + "</argumentList></action>"
        for name, arguments in _ACTIONS.items()
    )
    variables = "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{kind}</dataType></stateVariable>'
        for name, kind in _VARIABLES.items()
    )
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0">'
        "<specVersion><major>1</major><minor>0</minor></specVersion>"
        f"<actionList>{actions}</actionList><serviceStateTable>{variables}</serviceStateTable></scpd>"
    )


@dataclass
class Gateway:
    """One router; `mapped` is its table: external port -> (client, internal port, lease in seconds)."""

    external: str = "8.8.8.8"
    taken: frozenset[int] = frozenset()
    permanent_only: bool = False
    search: tuple[str, int] = ("127.0.0.1", 0)
    mapped: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    padding: int = 0
    location: str = ""

    async def control(self, request: web.Request) -> web.Response:
        root = ElementTree.fromstring(await request.text())
        body = root.find("{http://schemas.xmlsoap.org/soap/envelope/}Body")
        assert body is not None
        action = body[0]
        name = action.tag.partition("}")[2]
        assert request.headers["SOAPAction"] == f'"{SERVICE}#{name}"'
        given = {child.tag: child.text or "" for child in action}
        self.calls.append(name)
        if name == "GetExternalIPAddress":
            return _answer(name, f"<NewExternalIPAddress>{self.external}</NewExternalIPAddress>")
        port = int(given["NewExternalPort"])
        assert (given["NewRemoteHost"], given["NewProtocol"]) == ("", "TCP")
        if name == "DeletePortMapping":
            return _answer(name) if self.mapped.pop(port, None) else _fault(714, "NoSuchEntryInArray")
        lease_s = int(given["NewLeaseDuration"])
        if port in self.taken:
            return _fault(718, "ConflictInMappingEntry")
        if self.permanent_only and lease_s:
            return _fault(725, "OnlyPermanentLeasesSupported")
        self.mapped[port] = given["NewInternalClient"], int(given["NewInternalPort"]), lease_s
        return _answer(name)

    async def device(self, request: web.Request) -> web.Response:
        return web.Response(text=_DEVICE + " " * self.padding, content_type="text/xml")

    async def service(self, request: web.Request) -> web.Response:
        return web.Response(text=_service(), content_type="text/xml")


def _answer(name: str, content: str = "") -> web.Response:
    inner = f'<u:{name}Response xmlns:u="{SERVICE}">{content}</u:{name}Response>'
    return web.Response(text=_envelope(inner), content_type="text/xml")


def _fault(code: int, text: str) -> web.Response:
    inner = (
        "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
        f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
        f"<errorDescription>{text}</errorDescription></UPnPError></detail></s:Fault>"
    )
    return web.Response(text=_envelope(inner), content_type="text/xml", status=500)


def _envelope(inner: str) -> str:
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        f's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{inner}</s:Body></s:Envelope>'
    )


class _Searched(asyncio.DatagramProtocol):
    """Answers SSDP searches for a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        text = data.decode("ascii")
        found = re.search(r"^ST: *(\S+)", text, re.MULTILINE | re.IGNORECASE)
        if not text.startswith("M-SEARCH * HTTP/1.1") or found is None or found[1] != GATEWAY:
            return
        lines = (
            "HTTP/1.1 200 OK", "CACHE-CONTROL: max-age=120", "EXT:", f"LOCATION: {self._gateway.location}",
            "SERVER: test/1 UPnP/1.1 router/1", f"ST: {GATEWAY}", f"USN: uuid:1::{GATEWAY}", "", "",
        )  # fmt: skip
        self._transport.sendto("\r\n".join(lines).encode("ascii"), sender)


@asynccontextmanager
async def running_gateway(gateway: Gateway) -> AsyncIterator[Gateway]:
    """The router on loopback, for as long as the block lasts; `gateway.search` is where it is found."""
    app = web.Application()
    app.router.add_get("/device.xml", gateway.device)
    app.router.add_get("/service.xml", gateway.service)
    app.router.add_post("/control", gateway.control)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.location = gateway.location or f"http://127.0.0.1:{runner.addresses[0][1]}/device.xml"
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _Searched(gateway), local_addr=("127.0.0.1", 0)
    )
    gateway.search = transport.get_extra_info("sockname")[:2]
    try:
        yield gateway
    finally:
        transport.close()
        await runner.cleanup()

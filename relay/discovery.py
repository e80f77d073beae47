"""Devices on the same LAN, by multicast DNS (RFC 6762 and 6763), where `zeroconf` is installed.

A device says "I am KEY, my sessions are at this port"; a backbone listens and learns addresses. Nothing here
is trusted: an address is only where to try, and the session proves who answers.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ipaddress
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final

import structlog

from .errors import ConfigError, KvasirError, Unreachable
from .identity import PublicKey, address_of, parse_address

SERVICE: Final = "_kvasir._tcp.local."
MAX_DEVICES: Final = 4096
"""Devices remembered; a LAN that claims more is not believed."""

MAX_ASKED: Final = 64
"""Devices asked for the rest of their announcement at once."""

ASK_MS: Final = 3000

log = structlog.get_logger("relay")


def available() -> bool:
    """Whether `zeroconf` is installed."""
    return importlib.util.find_spec("zeroconf") is not None


class Announcer:
    """An asynchronous context in which this device is announced on the LAN.

    `addresses` are the IP addresses it listens on. Raises `ConfigError` without `zeroconf`, `Unreachable` on
    entering if the LAN's other devices object.
    """

    def __init__(self, key: PublicKey, port: int, addresses: Iterable[str]) -> None:
        zeroconf = _zeroconf()
        name = address_of(key)
        self._zeroconf: Any = None
        self._info = zeroconf.ServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            addresses=[ipaddress.ip_address(address).packed for address in addresses],
            port=port,
            properties={"v": "1", "key": name},
            server=f"kvasir-{name[:16].lower()}.local.",
        )

    async def __aenter__(self) -> Announcer:
        module = importlib.import_module("zeroconf.asyncio")
        self._zeroconf = module.AsyncZeroconf()
        try:
            await (await self._zeroconf.async_register_service(self._info))
        except BaseException as error:
            await self._zeroconf.async_close()
            if isinstance(error, _zeroconf().Error):
                raise Unreachable(f"this device cannot be announced on the LAN: {error!r}") from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._zeroconf.async_unregister_all_services()
        await self._zeroconf.async_close()


class Finder:
    """An asynchronous context in which announcements are heard; `addresses(device)` says where one may be.

    `on_change` runs whenever a device appeared, moved or left.
    """

    def __init__(self, on_change: Callable[[PublicKey], None] | None = None) -> None:
        self._module = _zeroconf()
        self._on_change = on_change
        self._found: dict[PublicKey, tuple[str, ...]] = {}
        self._names: dict[str, PublicKey] = {}
        self._zeroconf: Any = None
        self._browser: Any = None
        self._asking: set[asyncio.Task[None]] = set()

    def addresses(self, device: PublicKey) -> tuple[str, ...]:
        """URLs at which `device` was announced."""
        return self._found.get(device, ())

    async def __aenter__(self) -> Finder:
        module = importlib.import_module("zeroconf.asyncio")
        self._zeroconf = module.AsyncZeroconf()
        self._browser = module.AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._heard])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asking in self._asking:
            asking.cancel()
        await self._browser.async_cancel()
        await self._zeroconf.async_close()

    def _heard(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change is self._module.ServiceStateChange.Removed:
            self._forget(name)
            return
        info = importlib.import_module("zeroconf.asyncio").AsyncServiceInfo(service_type, name)
        if info.load_from_cache(zeroconf):
            self._learn(name, info)
        elif len(self._asking) < MAX_ASKED:
            asking = asyncio.get_running_loop().create_task(self._ask(zeroconf, name, info))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Any, name: str, info: Any) -> None:
        """Ask for what an announcement left out."""
        if await info.async_request(zeroconf, ASK_MS):
            self._learn(name, info)

    def _learn(self, name: str, info: Any) -> None:
        try:
            device = parse_address((info.decoded_properties.get("key") or "").strip())
        except (KvasirError, ValueError):  # no address, or no text
            return
        if len(self._found) >= MAX_DEVICES and device not in self._found:
            return
        urls = tuple(_url(address, info.port) for address in info.parsed_scoped_addresses())
        if urls and self._found.get(device) != urls:
            self._found[device], self._names[name] = urls, device
            log.debug("device.discovered", device=address_of(device), addresses=urls)
            if self._on_change is not None:
                self._on_change(device)

    def _forget(self, name: str) -> None:
        device = self._names.pop(name, None)
        if device is not None and device in self._found:
            del self._found[device]
            if self._on_change is not None:
                self._on_change(device)


def _url(address: str, port: int | None) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _zeroconf() -> Any:
    try:
        return importlib.import_module("zeroconf")
    except ImportError:
        raise ConfigError("finding devices on the LAN needs zeroconf: pip install zeroconf") from None

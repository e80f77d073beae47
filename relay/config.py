"""What a relay and its clients can be told. Read from arguments in `cli.py` alone; checked here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .addresses import Network, parse_networks
from .circuit import Rules
from .errors import ConfigError
from .frames import MAX_FRAME, WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Settings of a relay. Times in seconds, sizes in bytes."""

    host: str = "0.0.0.0"  # address to listen on (standalone)
    port: int = 8421  # port to listen on; 0 takes a free one (standalone)
    market_url: str = ""  # the market whose tickets count (standalone)
    public_url: str = ""  # where peers reach it; listed at the market if given (standalone)
    state_dir: Path | None = None  # where key and certificate lie (standalone)
    ping_s: float = 15.0  # shortest pause between pings to a peer
    ping_jitter_s: tuple[float, float] = (1.0, 5.0)  # added to each pause, uniform
    pong_timeout_s: float = 5.0  # a peer that has not answered a ping by then is gone
    write_timeout_s: float = 2.0  # a peer that reads nothing for so long is gone
    head_timeout_s: float = 10.0  # from the connection to the head of its first request (standalone)
    auth_timeout_s: float = 10.0  # from the upgrade to a valid AUTH
    drain_s: float = 5.0  # how long circuits may finish when the relay goes away
    retry_after_s: float = 2.0  # when a draining relay asks to be dialled again
    ticket_grace_s: float = 3600.0  # how much longer tickets count while the market is unreachable
    market_poll_s: float = 15.0  # pause between looks at the market (standalone)
    window_bytes: int = WINDOW_BYTES  # a circuit's window in one direction
    device_outstanding_bytes: int = 8 << 20  # most bytes written to a device and not taken by its link
    backbone_outstanding_bytes: int = 64 << 20  # the same for a backbone
    device_circuits: int = 64  # most circuits of one device
    backbone_circuits: int = 20_000  # most circuits of one backbone
    address_connections: int = 1_024  # most connections from one address
    connections: int = 20_000  # most connections in all
    bandwidth: float = 0.0  # bytes a second, both directions together, that count as full; 0: no bound
    trusted_proxies: tuple[str, ...] = ()  # networks of reverse proxies whose X-Forwarded-For counts

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        for name in (
            "ping_s",
            "pong_timeout_s",
            "write_timeout_s",
            "head_timeout_s",
            "auth_timeout_s",
            "market_poll_s",
            "device_circuits",
            "backbone_circuits",
            "address_connections",
            "connections",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above zero")
        for name in ("drain_s", "retry_after_s", "ticket_grace_s", "bandwidth"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative")
        if self.public_url and not self.public_url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.public_url!r} is not a URL: it looks like https://HOST:PORT")
        parse_networks(self.trusted_proxies)
        low, high = self.ping_jitter_s
        if not 0 <= low <= high:
            raise ConfigError("ping_jitter_s is a pair of seconds, the smaller first")
        if not 2 * MAX_FRAME <= self.window_bytes <= 1 << 30:
            raise ConfigError(f"window_bytes must be between {2 * MAX_FRAME} and {1 << 30}")
        if min(self.device_outstanding_bytes, self.backbone_outstanding_bytes) < self.window_bytes:
            raise ConfigError("a peer's outstanding bytes must hold one window at least")

    @property
    def proxies(self) -> tuple[Network, ...]:
        """The networks of trusted reverse proxies."""
        return parse_networks(self.trusted_proxies)

    @property
    def rules(self) -> Rules:
        """The bounds that the switchboard keeps."""
        return Rules(
            window_bytes=self.window_bytes,
            device_circuits=self.device_circuits,
            backbone_circuits=self.backbone_circuits,
            address_connections=self.address_connections,
            connections=self.connections,
        )


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How a client behaves on its connection to a relay. All times in seconds."""

    connect_timeout_s: float = 10.0  # dialling and proving who we are
    send_timeout_s: float = 10.0  # waiting for a peer that does not read
    pong_timeout_s: float = 5.0  # waiting for the relay's answer to a ping
    ping_s: float | None = None  # pause between pings; None: as the relay asks
    max_backoff_s: float = 16.0  # the longest pause before dialling again
    vanished_spread_s: float = 8.0  # the first pause after a connected relay vanished
    max_circuits: int = 256  # incoming circuits served at once

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s",
            "send_timeout_s",
            "pong_timeout_s",
            "max_backoff_s",
            "max_circuits",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above zero")
        if self.vanished_spread_s < 0 or (self.ping_s is not None and self.ping_s <= 0):
            raise ConfigError("vanished_spread_s and ping_s must not be negative")

"""What a market can be told. Read from arguments in `cli.py` alone; checked here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from relay.addresses import Network, parse_networks
from relay.errors import ConfigError

from .claims import LeaseRules
from .escrow import EscrowRules
from .moving import MoveRules
from .scarcity import ScarcityRules
from .standing import ESCROW_CALLS, ESCROW_S
from .wallet import normalise_url


@dataclass(frozen=True, slots=True)
class MarketConfig:
    """Settings of a market. Times in seconds."""

    database: str  # SQLAlchemy URL: sqlite:////var/lib/kvasir/market.db or postgresql://user@host/name
    public_urls: tuple[
        str, ...
    ]  # every URL at which people reach this market; sign-in texts name one of them
    host: str = "0.0.0.0"  # address to listen on (standalone)
    port: int = 8422  # port to listen on; 0 takes a free one (standalone)
    state_dir: Path | None = None  # where the swarm's keys lie (standalone)
    lease_ttl_s: float = 60.0  # a lease lives so long after each heartbeat
    proving_s: float = 120.0  # a loaded window that is not proven by then is no supply
    draining_s: float = 60.0  # a draining lease ends after so long at the latest
    sweep_s: float = 1.0  # pause between looks at what is over
    target_s: float = 5.0  # pause between looks at the targets
    move_s: float = 10.0  # pause between looks at what could move to another window
    plan_silence_s: float = 3600.0  # a plan of which no backbone was heard for so long is retired
    watch_alive_s: float = 10.0  # a watch hears something at least so often
    watches: int = 256  # most watches at once
    hashes_waits: int = 256  # most requests at once that wait for hashes
    address_waits: int = 64  # most of these from one address
    hashes_wait_s: float = 10.0  # longest wait for hashes that are being made
    gaps_s: float = 1.0  # how long an answer about gaps is given again
    body_bytes: int = 384 * 1024 * 1024  # most bytes of request bodies in memory at once
    trusted_proxies: tuple[str, ...] = ()  # networks of reverse proxies whose X-Forwarded-For counts
    trusted_calls: int = 1000  # accepted calls after which a wallet may load several windows at once
    escrow_calls: int = ESCROW_CALLS  # further accepted calls after which credit in escrow is available
    escrow_s: float = ESCROW_S  # or so long after its wallet left
    release_s: float = 60.0  # pause between looks at what escrow may be released
    scarcity: ScarcityRules = field(default_factory=ScarcityRules)  # how targets are set
    moving: MoveRules = field(default_factory=MoveRules)  # when replicas move to other windows

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if any(normalise_url(url) != url for url in self.public_urls):
            raise ConfigError("public URLs are written in lower case, without a path's last slash")
        positive = (
            "lease_ttl_s",
            "proving_s",
            "draining_s",
            "sweep_s",
            "target_s",
            "move_s",
            "release_s",
            "escrow_s",
            "escrow_calls",
            "plan_silence_s",
            "watch_alive_s",
            "watches",
            "hashes_waits",
            "address_waits",
            "body_bytes",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above zero")
        if self.hashes_wait_s < 0 or self.trusted_calls < 0 or self.gaps_s < 0:
            raise ConfigError("hashes_wait_s, gaps_s and trusted_calls must not be negative")
        parse_networks(self.trusted_proxies)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """The networks of trusted reverse proxies."""
        return parse_networks(self.trusted_proxies)

    @property
    def lease_rules(self) -> LeaseRules:
        """The durations of a lease."""
        return LeaseRules(self.lease_ttl_s, self.proving_s, self.draining_s)

    @property
    def escrow_rules(self) -> EscrowRules:
        """When escrow is released."""
        return EscrowRules(self.escrow_calls, self.escrow_s)

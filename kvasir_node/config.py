"""What a node may be told: one documented line a setting, checked when it is made.

Knows no environment and no arguments (those are read in `cli`) and nothing of this machine (`device`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from market.plans import PRECISIONS
from relay.errors import ConfigError
from relay.links import JoinLink

from .limits import OwnerRules
from .sources import HUB
from .weights import FetchConfig

WEIGHTS_FROM: Final = ("auto", "backbone", "hub")
"""Where weights may come from, by name; a URL is the other choice."""

DEVICES: Final = ("auto", "cpu", "cuda", "mps")
"""What `--device` takes."""

LOWEST_PORT: Final = 1024
"""Backbones dial no port below it."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes from a text such as "4GB" (10^9), "512MiB" (2^20) or "1000000". Raises `ConfigError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write for example 4GB, 512MiB or 1000000")
    number, unit, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()]
    if not math.isfinite(size) or size >= 2**63:
        raise ConfigError(f"{text!r} is more than any machine has")
    return int(size)


def parse_endpoint(text: str) -> tuple[str, int]:
    """IP address and port of a text such as 0.0.0.0:9000 or [::]:9000. Raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    wrong = ConfigError(f"{text!r} is not ADDRESS:PORT: write for example 0.0.0.0:9000 or [::]:9000")
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError:
        raise wrong from None
    if not 0 <= number <= 65535 or (address.version == 6) != host.startswith("["):
        raise wrong
    return str(address), number


def _is_url(text: str) -> bool:
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def format_size(size: float) -> str:
    """Bytes for a person: 1.5 GB, 312 kB, 17 B (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """All settings of one node daemon."""

    join: JoinLink
    """The market's URL and, if the link has it, the swarm's root key."""
    state_dir: Path
    """Folder of this node's keys, grants, receipts, cache and log; one daemon at a time."""
    name: str = ""
    """A name for people, shown by `kvasir-node status` and in every log line; empty: none."""
    wallet: Path | None = None
    """The wallet's key file; None: `wallet.json` in the state folder, made if it is not there."""
    budget_bytes: int | None = None
    """Memory for experts, in bytes; None: half of what is free at the start."""
    precision: str = "auto"
    """"stored", "bf16", "int8" or "int4": how experts are kept; "auto": as stored, else what fits."""
    cache_dir: Path | None = None
    """Folder of the weight cache; None: `cache` in the state folder."""
    cache_bytes: int | None = None
    """Hard cap of the weight cache; None: as much as the disk has, less the reserve."""
    reserve_bytes: int = 1_000_000_000
    """Bytes of the disk that the cache leaves free."""
    weights_from: str = "auto"
    """"auto", "backbone", "hub", or the URL of a mirror: the only place that weights come from."""
    mirrors: tuple[str, ...] = ()
    """HTTP servers with the model's files, asked as well as the backbone."""
    hub: bool = True
    """Whether weights of a hub model may also come from the Hugging Face hub."""
    hub_endpoint: str = HUB
    """The hub's URL."""
    hub_token: str | None = field(default=None, repr=False)
    """A token for gated hub models."""
    device: str = "auto"
    """Where experts run: "cpu", "cuda", "mps", or "auto": the accelerator that torch finds, else the CPU."""
    threads: int = 1
    """Threads of the expert computation."""
    max_cpu: float = 1.0
    """Share of all processors' time that this process uses at most, on average: above 0, at most 1."""
    upload_limit: int | None = None
    """Bytes a second that answers to backbones take of the link, on average; None: no limit."""
    rules: OwnerRules = field(default_factory=OwnerRules)
    """When the node pauses by itself: hours of the day, battery, metered link."""
    look_s: float = 10.0
    """Seconds between two looks at the clock, the power and the link for `rules`."""
    measure: bool = True
    """Whether memory, disk and link are measured at the start, which takes a second."""
    nice: int = 5
    """Lowers this process's priority: the owner's programs go first (0: not at all, 19: most)."""
    heartbeat_s: float = 20.0
    """Seconds between two heartbeats, +-10 %."""
    drain_s: float = 20.0
    """Seconds that calls in flight get to finish when the daemon stops."""
    handshake_s: float = 10.0
    """Seconds for a backbone to finish the handshake on a new circuit."""
    direct: bool = True
    """Whether backbones may dial this node directly, where they can reach it."""
    listen: str = ""
    """HOST:PORT for direct links, HOST an IP address; empty: a free port of every interface."""
    upnp: bool = False
    """Ask the router by UPnP for a port that leads to the listener."""
    public_address: str = ""
    """HOST:PORT at which the internet reaches this node, by a forwarded port; empty: none."""
    max_sessions: int = 16
    """Sessions with backbones at once; more circuits are closed with a reason."""
    fetch: FetchConfig = field(default_factory=FetchConfig)
    """How weights are fetched."""

    def __post_init__(self) -> None:
        if self.precision not in ("auto", *PRECISIONS):
            raise ConfigError(f"--precision is auto, {', '.join(PRECISIONS)}; not {self.precision!r}")
        for name, size in (("--budget", self.budget_bytes), ("--cache-bytes", self.cache_bytes)):
            if size is not None and size <= 0:
                raise ConfigError(f"{name} must be more than nothing")
        if self.reserve_bytes < 0:
            raise ConfigError("the disk reserve cannot be negative")
        if not 1 <= self.threads <= 1024:
            raise ConfigError("--threads is from 1 to 1024")
        if self.device not in DEVICES:
            raise ConfigError(f"--device is one of {', '.join(DEVICES)}; not {self.device!r}")
        if not 0 < self.max_cpu <= 1:
            raise ConfigError("--max-cpu is a share above 0, at most 100%")
        if self.upload_limit is not None and self.upload_limit < 1000:
            raise ConfigError("--upload-limit is in bytes a second, 1kB at least")
        if self.look_s <= 0:
            raise ConfigError("the seconds between two looks at the machine must be positive")
        if not 0 <= self.nice <= 19:
            raise ConfigError("--nice is from 0 to 19")
        if min(self.heartbeat_s, self.drain_s, self.handshake_s) <= 0:
            raise ConfigError("heartbeat, drain and handshake times must be positive")
        if self.max_sessions < 1:
            raise ConfigError("a node needs one session at least")
        if not self.direct and (self.listen or self.public_address or self.upnp):
            raise ConfigError("--no-direct takes none of --listen, --public-address and --upnp")
        if self.listen:
            parse_endpoint(self.listen)
        if self.public_address and parse_endpoint(self.public_address)[1] < LOWEST_PORT:
            raise ConfigError(f"--public-address: backbones dial no port below {LOWEST_PORT}")
        if len(self.name) > 64 or not self.name.isprintable():
            raise ConfigError("--name is at most 64 printable characters")
        if self.weights_from not in WEIGHTS_FROM and not _is_url(self.weights_from):
            raise ConfigError(
                f"--weights-from is {', '.join(WEIGHTS_FROM)} or the URL of a mirror; not "
                f"{self.weights_from!r}"
            )
        if not _is_url(self.hub_endpoint):
            raise ConfigError(f"HF_ENDPOINT {self.hub_endpoint!r} is not an http or https URL")
        for mirror in self.mirrors:
            if not _is_url(mirror):
                raise ConfigError(f"the mirror {mirror!r} is not an http or https URL")

    def describe_limits(self) -> str:
        """What the owner allows and when, for a person; empty if nothing is limited."""
        parts = []
        if self.rules.hours is not None:
            parts.append(f"serves from {self.rules.hours}")
        if self.max_cpu < 1:
            parts.append(f"at most {self.max_cpu:.0%} of the processors")
        if self.upload_limit is not None:
            parts.append(f"at most {format_size(self.upload_limit)}/s sent")
        return ", ".join(parts)

    @property
    def cache_folder(self) -> Path:
        """Where the weight cache is."""
        return self.cache_dir or self.state_dir / "cache"

    @property
    def wallet_file(self) -> Path:
        """Where the wallet's key is."""
        return self.wallet or self.state_dir / "wallet.json"

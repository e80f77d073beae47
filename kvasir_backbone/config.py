"""Settings of the backbone daemon. Read from arguments and the environment in `cli.py` only."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from relay.addresses import parse_networks
from relay.errors import ConfigError

from .admission import AdmissionConfig
from .bundled import bundled_model_path
from .hub import HubAccess, HubReference

DEFAULT_PORT: Final = 8420
DTYPES: Final = ("auto", "float32", "bfloat16")
FALLBACKS: Final = ("disk", "none")
DRAFTINGS: Final = ("auto", "off")
MAX_RUNNING: Final = 256
MAX_WAITING: Final = 256
STEP_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class BackboneConfig:
    """How `kvasir-backbone up` runs: backbone, market and relay in one process on one port."""

    model: Path = field(default_factory=bundled_model_path)
    """Folder of a Mixture-of-Experts checkpoint in the Hugging Face layout."""
    hub: HubReference | None = None
    """A model on the Hugging Face hub, served instead of a folder; read by ranges, never stored whole."""
    hub_access: HubAccess = field(default_factory=HubAccess)
    """The hub's URL and a token for private and gated models."""
    model_name: str = ""
    """The model's name in the API; empty: the folder's or the repository's name."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines join."""
    port: int = DEFAULT_PORT
    """TCP port of everything: API, market, relay, weights. 0: any free one."""
    state_dir: Path = Path("~/.kvasir/backbone")
    """Keys, ledger and receipts live here."""
    public_urls: tuple[str, ...] = ()
    """URLs that nodes may reach this port by; empty: http://HOST:PORT."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks of reverse proxies whose X-Forwarded-For counts."""
    dtype: str = "auto"
    """Compute and wire dtype; auto: what the checkpoint is stored in."""
    window_bytes: int = 256 * 1024 * 1024
    """About how many stored bytes one expert window holds."""
    kv_bytes: int | None = None
    """Bound on the attention cache in bytes; None: a quarter of the free memory."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Who is let in under load, and who is answered 429."""
    local_layers: int = 0
    """How many of the first MoE layers run here and are given to no node (see docs/security.md)."""
    max_running: int = MAX_RUNNING
    """Requests computed at one time, as far as the attention cache holds them."""
    max_waiting: int = MAX_WAITING
    """Requests that wait for that; more are answered 429."""
    tensor_parallel: int = 1
    """Processes that share the dense part of the model."""
    step_threads: int = STEP_THREADS
    """Threads that compute steps: one computes while another waits for experts."""
    drafting: str = "auto"
    """Guess coming tokens from the text so far: auto (where it pays) or off. Never changes a text."""
    fallback: str = "disk"
    """What computes experts without a live owner: the checkpoint (disk or hub), or none (503)."""
    expert_memory_bytes: int = 1024 * 1024 * 1024
    """Most bytes of experts kept in memory for fallback and audits."""
    expert_cache_bytes: int = 8 * 1000**3
    """Most bytes of a hub model's experts kept on disk, under the state folder, for fallback and audits."""
    weights_transfers: int = 32
    """Weight ranges served at once; more are answered 429."""
    failover_s: float = 0.25
    """A call to a node is never given up before this many seconds; then max(4 x its p95, this)."""
    move_after_s: float | None = 60.0
    """A replica may move to a window that has lacked owners for so many seconds; None: none ever moves."""
    demand_s: float = 5.0
    """How often the market is told which windows are asked for, in seconds."""
    drain_s: float = 20.0
    """How long open requests may take to end after SIGTERM, in seconds."""
    weighted: bool = False
    """Nodes get the combine weights and send one partial sum a row; the plan, and its id, say so."""
    relay_only: bool = False
    """Never dial nodes directly: everything goes through relays."""
    relay: bool = True
    """Whether the market lists the relay of this process."""
    use_uvloop: bool = True
    """Run on uvloop where it is installed."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a TCP port: give 0 to 65535")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.fallback not in FALLBACKS:
            raise ConfigError(f"--fallback {self.fallback!r} is not one of {', '.join(FALLBACKS)}")
        if self.drafting not in DRAFTINGS:
            raise ConfigError(f"--drafting {self.drafting!r} is not one of {', '.join(DRAFTINGS)}")
        if self.kv_bytes is not None and self.kv_bytes <= 0:
            raise ConfigError("--kv-bytes must be positive, such as 512MB")
        if self.move_after_s is not None and self.move_after_s < 0:
            raise ConfigError("--move-after must be 0 or more")
        if self.local_layers < 0:
            raise ConfigError("--local-layers must be 0 or more")
        for name in (
            "max_running",
            "max_waiting",
            "step_threads",
            "tensor_parallel",
            "window_bytes",
            "expert_memory_bytes",
            "expert_cache_bytes",
            "weights_transfers",
            "failover_s",
            "demand_s",
            "drain_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive")
        if self.tensor_parallel > 1 and self.hub is not None:
            raise ConfigError("--tensor-parallel needs the model in a folder of its own: download it first")
        parse_networks(self.trusted_proxies)
        for url in self.public_urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ConfigError(f"--public-url {url!r} is not a URL such as http://192.168.1.5:8420")
        if urlsplit(self.hub_access.endpoint).scheme not in ("http", "https"):
            raise ConfigError(f"HF_ENDPOINT {self.hub_access.endpoint!r} is not an http or https URL")
        object.__setattr__(self, "model", Path(self.model).expanduser())
        object.__setattr__(self, "state_dir", Path(self.state_dir).expanduser())

    @property
    def name(self) -> str:
        """The model's name in the API."""
        if self.hub is not None:
            return self.model_name or self.hub.repository
        return self.model_name or self.model.name or "model"

    @property
    def local(self) -> bool:
        """Whether nodes can only be on this machine: it listens on loopback and is known by nothing else."""
        hosts = [self.host, *(urlsplit(url).hostname or "" for url in self.public_urls)]
        return all(host == "localhost" or _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False

"""A claimed window into memory: hashes, bytes, tensors; each step shown, each with a deadline.

Knows the steps. Fetching is `weights`, tensors are `experts`, leases are the daemon's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from typing import Final

import aiohttp
import psutil
import structlog
import torch
from yarl import URL

from market.client import MarketClient
from market.messages import Lease, Offer
from market.plans import Plan, PlanId
from market.requests import sign_request
from market.windows import Window
from relay.errors import ConfigError, KvasirError, Refused, Unreachable
from relay.identity import SigningKey

from . import kernels
from .accelerator import choose_accelerated, device_memory
from .cache import CacheFull, WeightCache, WindowBytes
from .config import NodeConfig, format_size
from .device import cgroup_memory
from .execution import choose_execution, numerics_class
from .experts import WindowExperts
from .ffn import Execution, GroupKernel
from .fitting import check_fit
from .limits import CpuPacer
from .sources import WeightSource, backbone_source, hub_source, mirror_source
from .status import Backoff, WindowStatus
from .weights import fetch_window

log = structlog.get_logger("node")

ATTEMPTS: Final = 8
"""How often a window's fetch is started before the lease is given back."""


class MemoryShort(KvasirError):  # noqa: N818 - a state of the machine, not a failure of ours
    """The window does not fit in the memory that is free now."""

    code = "quota"


@dataclass(frozen=True, slots=True)
class Room:
    """Another window makes room for the one that is loaded: `make` lets it go, and raises where it may not.

    `first`: before anything is fetched, for the disk has no room for both; else once all bytes are here.
    """

    make: Callable[[], Awaitable[None]]
    first: bool


@dataclass(frozen=True, slots=True)
class LoadedWindow:
    """A window in memory, and its bytes in the cache (which stored tensors may share)."""

    experts: WindowExperts
    bytes: WindowBytes

    def close(self) -> None:
        """Let the memory and the cache go; call when nothing runs on the experts any more."""
        self.bytes.close()


class Loader:
    """Loads windows one after another. `compute` is the executor on which tensors are made.

    Experts run on `accelerator` where it agrees with the CPU. `pacer` keeps the owner's processor limit.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        market: MarketClient,
        key: SigningKey,
        cache: WeightCache,
        http: aiohttp.ClientSession,
        compute: Executor,
        rng: Random,
        accelerator: torch.device | None = None,
        pacer: CpuPacer | None = None,
    ) -> None:
        self._config = config
        self._market = market
        self._key = key
        self._cache = cache
        self._http = http
        self._compute = compute
        self._rng = rng
        self._accelerator = accelerator
        self._pacer = pacer
        self._plans: dict[PlanId, Plan] = {}
        self._executions: dict[tuple[PlanId, str], tuple[Execution, str]] = {}

    async def plan(self, plan_id: PlanId) -> Plan:
        """The plan of that id, from the market once."""
        if plan_id not in self._plans:
            _, self._plans[plan_id] = await self._market.plan(plan_id)
        return self._plans[plan_id]

    def trim(self) -> None:
        """A window was let go: off the loop, give its memory back to the system."""
        self._compute.submit(trim_memory)

    def keep(self, plans: Set[PlanId]) -> None:
        """Forget every plan but these: a node outlives many."""
        for plan_id in self._plans.keys() - plans:
            del self._plans[plan_id]
        for key in [key for key in self._executions if key[0] not in plans]:
            del self._executions[key]

    async def numerics(self, plan_id: PlanId, precision: str) -> str:
        """This device's numerics class for a plan, from a check on made-up experts; done once.

        Raises `ConfigError` for a plan that this version cannot carry out.
        """
        return (await self._execution(plan_id, precision))[1]

    async def execution(self, plan_id: PlanId, precision: str) -> Execution:
        """How this device runs the experts of a plan; chosen and checked once. Raises as `numerics` does."""
        return (await self._execution(plan_id, precision))[0]

    async def check(self, offer: Offer, *, budget_left: int) -> None:
        """Whether the offered window fits this machine now; looked at before it is claimed.

        Raises `WontFit` (budget, memory) or `CacheFull` (disk), saying what the owner can do.
        """
        await self._check_memory_and_budget(offer, budget_left, freed=0)
        await self._check_disk(offer)

    async def check_instead(self, offer: Offer, *, budget_left: int, old: Lease, old_kept: int) -> bool:
        """Whether the offered window fits this machine once `old`, which keeps `old_kept` bytes, is let go.

        True if the disk has room for both windows' bytes at once. Raises as `check` does.
        """
        await self._check_memory_and_budget(offer, budget_left, freed=old_kept)
        try:
            await self._check_disk(offer)
        except CacheFull:
            await self._check_disk(offer, freed=(old.plan, old.window))
            return False
        return True

    async def _check_memory_and_budget(self, offer: Offer, budget_left: int, *, freed: int) -> None:
        plan = await self.plan(offer.plan)
        execution, _ = await self._execution(offer.plan, offer.precision)
        free = self._memory_free(execution) + freed
        check_fit(plan, offer, budget_left=budget_left + freed, memory_free=free)

    async def _check_disk(self, offer: Offer, *, freed: tuple[PlanId, Window] | None = None) -> None:
        plan = await self.plan(offer.plan)
        download = sum(part.nbytes for part in plan.window_ranges(offer.window))
        check = self._cache.check_room
        await asyncio.to_thread(check, offer.plan, offer.window, download, freed=freed)

    def _memory_free(self, execution: Execution) -> int:
        return memory_free(self._accelerator if isinstance(execution.kernel, GroupKernel) else None)

    async def load(
        self, lease: Lease, shown: WindowStatus, *, loading_deadline: float, room: Room | None = None
    ) -> LoadedWindow:
        """Bring the window of `lease` into memory. `loading_deadline` is on the monotonic clock; `room` is
        the window that this one takes the place of.

        Raises `CacheFull`, `MemoryShort`, `Unreachable` (no hashes or bytes in time), `Refused` or
        `ConfigError` (a plan that cannot be carried out), and what `room.make` does.
        """
        plan = await self.plan(lease.plan)
        execution, shown.numerics = await self._execution(lease.plan, lease.precision)
        kept = plan.kept_bytes(lease.window, lease.precision)
        if room is None:
            check_memory(kept, free=lambda: self._memory_free(execution))
        shown.total_bytes = sum(part.nbytes for part in plan.window_ranges(lease.window))
        hashes = await self._hashes(lease, loading_deadline)
        if room is not None and room.first:
            await room.make()
        data = await self._fetch(plan, lease, hashes, shown)
        try:
            loop = asyncio.get_running_loop()
            if room is not None:
                if not room.first:
                    await room.make()
                await loop.run_in_executor(self._compute, trim_memory)
                check_memory(kept, free=lambda: self._memory_free(execution))
            shown.step = "making tensors"
            rest = None if self._pacer is None else self._pacer.rest

            def build() -> WindowExperts:
                window, precision = lease.window, lease.precision
                with _memory_refused():
                    return WindowExperts.load(
                        plan, window, precision, data.read, execution=execution, progress=rest
                    )

            experts = await loop.run_in_executor(self._compute, build)
            data.forget_pages()
        except BaseException:
            data.close()
            raise
        return LoadedWindow(experts, data)

    async def _execution(self, plan_id: PlanId, precision: str) -> tuple[Execution, str]:
        key = (plan_id, precision)
        if key not in self._executions:
            plan = await self.plan(plan_id)

            def check() -> tuple[Execution, str]:
                execution = None
                if self._accelerator is not None:
                    execution = choose_accelerated(plan, precision, self._accelerator)
                if execution is None:
                    execution = choose_execution(plan, precision, kernels.load(precision))
                return execution, numerics_class(plan, precision, execution)

            loop = asyncio.get_running_loop()
            self._executions[key] = await loop.run_in_executor(self._compute, check)
        return self._executions[key]

    async def _hashes(self, lease: Lease, deadline: float) -> tuple[bytes, ...]:
        """The window's chunk hashes; a backbone makes them at the window's first claim."""
        backoff = Backoff(first_s=0.2, most_s=3.0)
        while True:
            try:
                hashes = await self._market.hashes(lease.plan, lease.window)
            except (Refused, Unreachable) as error:
                if isinstance(error, Refused) and error.code not in ("not_found", "overloaded"):
                    raise
                wait = backoff.next_s(self._rng.random())
                if time.monotonic() + wait > deadline:
                    raise Unreachable(
                        f"{lease.window}: no backbone made its hashes in time: {error}"
                    ) from None
                await asyncio.sleep(wait)
            else:
                return hashes.chunks

    async def _fetch(
        self, plan: Plan, lease: Lease, hashes: tuple[bytes, ...], shown: WindowStatus
    ) -> WindowBytes:
        def progress(done: int, total: int, rate: float) -> None:
            shown.done_bytes, shown.total_bytes, shown.rate = done, total, rate

        backoff = Backoff(first_s=1.0)
        for attempt in range(1, ATTEMPTS + 1):
            shown.step = "fetching"
            try:
                return await fetch_window(
                    plan,
                    lease.plan,
                    lease.window,
                    hashes,
                    sources=await self.sources(plan, lease.plan, everything=attempt > 1),
                    cache=self._cache,
                    http=self._http,
                    progress=progress,
                    config=self._config.fetch,
                    rng=self._rng,
                )
            except Unreachable as error:
                if attempt == ATTEMPTS:
                    raise
                wait = backoff.next_s(self._rng.random())
                shown.step = f"waiting to fetch again ({error})"
                log.warning(
                    "window.stalled", window=lease.window.name, reason=str(error), retry_s=round(wait, 1)
                )
                await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def sources(
        self, plan: Plan, plan_id: PlanId, *, everything: bool = False
    ) -> tuple[WeightSource, ...]:
        """Where this plan's bytes may come from, in the order of `--weights-from`.

        "auto": mirrors and, for a hub model, the hub; the backbone at the address dialled as well, or
        after them where it would only pass the hub's bytes on. With `everything` also the market's other
        public addresses. Raises `ConfigError` where nothing of the kind asked for exists.
        """
        config, wanted = self._config, self._config.weights_from
        on_hub = plan.source != "local"
        if wanted == "hub" and not on_hub:
            raise ConfigError(
                f"--weights-from hub: {plan.model} is not on the hub, only on its backbone; leave the option "
                "out, or name a mirror"
            )
        found: list[WeightSource] = []
        if wanted == "auto":
            found += [mirror_source(base, plan) for base in config.mirrors]
        elif wanted not in ("hub", "backbone"):
            found.append(mirror_source(wanted, plan))
        if wanted == "hub" or (wanted == "auto" and on_hub and config.hub):
            found.append(hub_source(plan, endpoint=config.hub_endpoint, token=config.hub_token))
        if wanted in ("auto", "backbone"):
            bases = [self._market.url]
            if everything:
                bases += [url for url in (await self._market.swarm()).public_urls if url not in bases]
            rank = int(bool(found) and on_hub)
            found += [backbone_source(base, plan_id, self._sign, rank=rank) for base in bases]
        return tuple({source.name: source for source in found}.values())

    def _sign(self, method: str, url: URL) -> dict[str, str]:
        return sign_request(self._key, method, url.raw_path_qs, now=time.time())


def trim_memory() -> None:
    """Give memory that was let go back to the system, where the C library keeps it (glibc). Blocks."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _memory_refused() -> Iterator[None]:
    """The system's or torch's refusal of memory as `MemoryShort`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise MemoryShort(
            "the system refused the memory: close something, or give a smaller --budget"
        ) from error


def memory_free(accelerator: torch.device | None = None) -> int:
    """Bytes of memory that experts may still take: the container's or machine's, or the accelerator's."""
    own = min(psutil.virtual_memory().available, cgroup_memory()[1])
    found = None if accelerator is None else device_memory(accelerator)
    if found is None:
        return own
    return min(own, found[0]) if accelerator is not None and accelerator.type == "mps" else found[0]


def check_memory(need: int, *, free: Callable[[], int] = memory_free) -> None:
    """Raise `MemoryShort` unless `need` bytes of memory are free now."""
    available = free()
    if need > available:
        raise MemoryShort(
            f"the window needs {format_size(need)} of memory and {format_size(available)} are free: close "
            "something, or give a smaller --budget"
        )

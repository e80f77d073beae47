"""The life of a node: join, volunteer, load, serve, leave in order.

One `run`. The market is asked what is needed, windows are claimed and loaded one after another until the
budget is full, backbones call over the relays, and a heartbeat renews all leases. When the market is silent
the node serves on. On the way out: stop claiming, tell backbones, finish what is in flight, release.

Knows the order of a node's life; every step is another module's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_address
from random import Random
from typing import Any, Final

import aiohttp
import structlog
import torch
from yarl import URL

from relay.errors import KvasirError, Refused
from relay.identity import SigningKey
from relay.secure import SecureSession

from .accelerator import describe_device, device_memory, find_device
from .cache import WeightCache
from .calls import Notice
from .circuits import Circuits
from .config import NodeConfig
from .control import control_endpoint
from .device import allow, lower_priority, measure, network_of
from .intake import Intake
from .joining import Membership, join_swarm
from .limits import CpuPacer, PacedSession, UploadPacer
from .listening import Listener
from .loading import Loader
from .locks import FolderLock
from .measuring import Speed, kernel_name, measure_link, measure_machine
from .moving import Mover
from .pausing import Pausing
from .receipts import ReceiptBook
from .recomputing import Recomputer
from .relays import RelayKeeper
from .serving import ExpertServer
from .standing import Standing
from .state import NodeState
from .status import NodeStatus, Phase
from .tenancy import Tenancy, politely
from .volunteering import Offering, Volunteer

log = structlog.get_logger("node")

LAST_RECEIPT_S: Final = 1.0
"""How long the node waits for the receipts that backbones sign when it drains; later ones come next time."""

RENEW_S: Final = 3600.0
"""The grant is renewed when it has less than this left."""


async def run(
    config: NodeConfig,
    *,
    stop: asyncio.Event | None = None,
    status: NodeStatus | None = None,
    passphrase: bytes | None = None,
    rng: Random | None = None,
) -> None:
    """Be a node until `stop` is set (for ever without it), then leave in order.

    Raises `ConfigError`, `IdentityError` or `Refused` for what the owner must mend.
    """
    node = Node(config, status or NodeStatus(name=config.name), passphrase=passphrase, rng=rng or Random())
    try:
        await node.run(stop or asyncio.Event())
    except BaseExceptionGroup as group:
        raise _first(group) from None


class Node:
    """One node daemon; see `run`."""

    def __init__(
        self, config: NodeConfig, status: NodeStatus, *, passphrase: bytes | None, rng: Random
    ) -> None:
        self._config = config
        self._status = status
        self._passphrase = passphrase
        self._rng = rng
        self._state = NodeState(config.state_dir)
        self._intake: Intake
        self._budget = 0
        self._network = "unknown"
        self._generation = 0
        self._member: Membership
        self._http: aiohttp.ClientSession
        self._cache: WeightCache
        self._loader: Loader
        self._server: ExpertServer
        self._circuits: Circuits
        self._relays: RelayKeeper
        self._listener: Listener
        self._tenancy: Tenancy
        self._volunteer: Volunteer
        self._mover: Mover
        self._standing: Standing
        self._threads: ThreadPoolExecutor
        self._accelerator: torch.device | None = None
        self._pacer: CpuPacer | None = None
        self._uploads = None if config.upload_limit is None else UploadPacer(config.upload_limit)
        self._pausing = Pausing(
            config.rules,
            withdraw=self._pause_serving,
            come_back=self._go_on,
            said=self._say_paused,
            every_s=config.look_s,
        )

    # --- from start to end ---

    async def run(self, stop: asyncio.Event) -> None:
        """See the module's `run`."""
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack, stop)
            if not await _unless(stop, self._begin()):
                return
            await stack.enter_async_context(self._server)
            await stack.enter_async_context(self._listener)
            self._status.listening = self._listener.addresses
            await self._live(stop)
        self._status.base = Phase.STOPPED
        log.info("node.stopped", outcome="stopped")

    async def _open(self, stack: contextlib.AsyncExitStack, stop: asyncio.Event) -> None:
        """What needs no swarm: locks, keys, cache, the control endpoint. Blocks the loop briefly."""
        config, status = self._config, self._status
        torch.set_num_threads(config.threads)
        lower_priority(config.nice)
        stack.callback(FolderLock(config.state_dir).close)
        self._accelerator = find_device(config.device)
        device = measure(config.cache_folder, accelerator=_known(self._accelerator))
        if config.max_cpu < 1:
            self._pacer = CpuPacer(config.max_cpu, device.processors)
        self._cache = WeightCache(config.cache_folder, cap_bytes=0, reserve_bytes=config.reserve_bytes)
        stack.callback(self._cache.close)
        allowance = allow(config, device, cached_bytes=self._cache.used_bytes)
        self._cache.cap_bytes = allowance.cache
        self._budget = status.budget_bytes = allowance.budget
        status.machine, status.allowance = device.describe(), allowance.describe()
        status.limits = config.describe_limits()
        status.market.url = config.join.url
        self._generation = self._state.next_generation(now=time.time())
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="node")
        stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        await stack.enter_async_context(
            control_endpoint(
                config.state_dir,
                status=status.snapshot,
                stop=stop.set,
                pause=self._pausing.ask,
                recompute=self._recompute,
            )
        )
        self._http = await stack.enter_async_context(aiohttp.ClientSession())
        log.info("node.started", generation=self._generation, budget_bytes=self._budget, **device.facts())

    async def _begin(self) -> None:
        """Join, and make what depends on which swarm it is."""
        config, status = self._config, self._status
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(self._measure())
            await self._join()
        await self._measure_link(measuring.result())
        member = self._member
        folder = self._state.receipts_folder(member.root)
        book = await asyncio.to_thread(ReceiptBook, folder, root=member.root, device=member.keys.signing)
        intake = self._intake = Intake(book, lambda: self._member.grant.wallet, status, self._threads)
        self._server = ExpertServer(
            on_receipt=self._receipt,
            on_notice=self._noticed,
            rest_s=None if self._pacer is None else self._pacer.rest_s,
        )
        self._circuits = Circuits(
            lambda: self._member,
            generation=self._generation,
            serve=self._serve,
            status=status,
            http=self._http,
            config=config,
        )
        self._relays = RelayKeeper(
            lambda: self._member, self._circuits, http=self._http, status=status, rng=self._rng
        )
        self._listener = Listener(
            config, on_channel=self._circuits.take, key=member.keys.signing.public, local=self._local()
        )
        self._tenancy = Tenancy(
            lambda: self._member,
            lambda: self._loader,
            server=self._server,
            circuits=self._circuits,
            relays=self._relays,
            status=status,
            generation=self._generation,
            heartbeat_s=config.heartbeat_s,
            addresses=self._listener.addresses,
            rng=self._rng,
        )
        self._volunteer = Volunteer(
            self._offering,
            lambda: self._member,
            lambda: self._loader,
            tenancy=self._tenancy,
            cache=self._cache,
            pausing=self._pausing,
            status=status,
            renew_grant=self._renew_grant,
            sign_in=lambda: self._join(fresh=True),
            rng=self._rng,
        )
        self._mover = Mover(
            self._offering,
            lambda: self._member,
            lambda: self._loader,
            tenancy=self._tenancy,
            pausing=self._pausing,
            status=status,
            claiming=self._volunteer.claiming,
            rng=self._rng,
        )
        self._standing = Standing(lambda: self._member.market, status, rng=self._rng)
        status.balance, status.counters = intake.balance, self._counters

    def _offering(self) -> Offering:
        """What this device offers now."""
        return Offering(self._config.precision, self._budget, self._network, self._generation)

    def _local(self) -> bool:
        """Whether the market is on this machine, reached by loopback."""
        host = URL(self._config.join.url).host or ""
        with contextlib.suppress(ValueError):
            return ip_address(host).is_loopback
        return host == "localhost"

    async def _measure(self) -> Speed | None:
        """What this machine can do, tried out while the swarm is joined."""
        if not self._config.measure:
            return None
        accelerator, folder = self._accelerator, self._config.cache_folder
        kernel = kernel_name if accelerator is None else lambda: describe_device(accelerator)
        return await asyncio.to_thread(measure_machine, folder, kernel=kernel)

    async def _measure_link(self, speed: Speed | None) -> None:
        """The link to the swarm, by carrying bytes; then say what was found."""
        if speed is None:
            return
        link = await measure_link(self._member.market.probe_link)
        if link is not None:
            speed = replace(speed, upload=link.upload, download=link.download, rtt_s=link.rtt_s)
        status = self._status
        status.speed, status.speed_text = speed.facts(), speed.describe()
        status.link_text = speed.describe_link()
        log.info("machine.measured", **speed.facts())
        for text in (status.machine, status.speed_text, f"link: {status.link_text}", status.allowance):
            status.notify(text)

    async def _join(self, *, fresh: bool = False) -> None:
        """Into the swarm; with `fresh`, the wallet signs anew."""
        self._status.base = Phase.WALLET
        member = self._member = await join_swarm(
            self._config.join,
            state=self._state,
            keys=self._state.device_keys(),
            wallet=self._wallet,
            http=self._http,
            status=self._status,
            rng=self._rng,
            fresh=fresh,
        )
        url = URL(self._config.join.url)
        self._network = await asyncio.to_thread(network_of, url.host or "", url.port or 80, salt=member.root)
        self._loader = Loader(
            self._config,
            market=member.market,
            key=member.keys.signing,
            cache=self._cache,
            http=self._http,
            compute=self._threads,
            rng=self._rng,
            accelerator=self._accelerator,
            pacer=self._pacer,
        )
        self._status.base = Phase.VOLUNTEERING

    async def _live(self, stop: asyncio.Event) -> None:
        """Everything at once until `stop`; a failure that the owner must mend ends it too."""
        async with asyncio.TaskGroup() as group:
            claiming = group.create_task(self._volunteer.run(group))
            moving = group.create_task(self._mover.run(group))
            pausing = group.create_task(self._pausing.run())
            others = [
                group.create_task(self._circuits.run()),
                group.create_task(self._relays.run()),
                group.create_task(self._tenancy.heartbeats()),
                group.create_task(self._acknowledge()),
                group.create_task(self._standing.run()),
                group.create_task(self._listener.announce()),
                group.create_task(self._listener.map_port(self._rng)),
            ]
            await stop.wait()
            claiming.cancel()
            moving.cancel()
            pausing.cancel()
            await self._leave()
            for task in others:
                task.cancel()

    async def _leave(self) -> None:
        """Tell everybody, finish what is in flight, give the leases back; each step under a deadline."""
        leases = len(self._tenancy.held)
        log.info("node.draining", leases=leases, sessions=len(self._status.sessions))
        finished = await self._withdraw("the owner stopped the node")
        log.info("node.drained", outcome="drained" if finished else "timeout", leases=leases)

    async def _withdraw(self, reason: str) -> bool:
        """See `_leave`; False if calls were still in flight when the time was over."""
        status = self._status
        status.base = Phase.DRAINING
        status.message = "finishing what is in flight"
        await self._tenancy.drain(reason)
        self._intake.arrived.clear()
        finished = await self._server.drain(reason, timeout=self._config.drain_s)
        if self._circuits.called and self._server.served.calls:
            await politely([self._intake.arrived.wait()], LAST_RECEIPT_S)
        await self._circuits.close("draining", reason)
        await self._tenancy.release(reason)
        return finished

    # --- the owner first ---

    async def _pause_serving(self, reason: str) -> None:
        """Give everything back, as at the end, but stay; weights stay on disk, the market is not asked."""
        async with self._volunteer.claiming:
            await self._withdraw(reason)
            self._relays.leave()
        self._status.base = Phase.PAUSED
        self._say_paused(reason)
        self._status.notify(f"paused: {reason}")

    def _say_paused(self, reason: str) -> None:
        if self._status.base is Phase.PAUSED:
            self._status.message = reason

    def _go_on(self) -> None:
        """The pause is over: volunteer again. What is on disk is not fetched again."""
        self._server.resume()
        self._status.base = Phase.VOLUNTEERING
        self._status.message = ""
        self._status.notify("going on")

    async def _renew_grant(self) -> None:
        """When the grant is about to end and the wallet is here, sign in anew and start over."""
        if self._member.grant.expires_at - time.time() > RENEW_S:
            return
        try:
            available = self._wallet(False) is not None
        except KvasirError as error:
            self._status.notify(f"the wallet's grant ends within the hour and cannot be renewed: {error}")
            return
        if not available:
            self._status.notify("the wallet's grant ends within the hour: run `kvasir-node login`")
            return
        await self._circuits.close("closed", "the wallet's grant is renewed")
        await self._tenancy.release("the wallet's grant is renewed")
        await self._join(fresh=True)

    # --- what backbones send, what the owner asks ---

    async def _serve(self, session: SecureSession) -> None:
        self._intake.know(session.certificate)
        limited = session if self._uploads is None else PacedSession(session, self._uploads)
        await self._server.handle_session(limited)

    async def _receipt(self, data: bytes) -> bytes | None:
        """A receipt came: keep it; what is on record of the wallet has changed."""
        ack = await self._intake.receipt(data)
        if ack is not None:
            self._standing.credited()
        return ack

    def _noticed(self, notice: Notice) -> None:
        """A backbone has something to say; where it is a quarantine, the market knows more soon."""
        self._intake.notice(notice)
        if notice.code == "quarantined":
            self._standing.hurry()

    async def _recompute(self, record: bytes) -> Mapping[str, Any]:
        """For the owner: an audited output made again here."""
        if self._status.base in (Phase.STARTING, Phase.WALLET):
            raise Refused("not_found", "the node has not joined its swarm yet: ask again")
        again = Recomputer(lambda: self._member.market, lambda: self._loader, self._cache, self._threads)
        return await again.run(record)

    async def _acknowledge(self) -> None:
        """Hand in the last countersignatures again, in case a kill lost one on its way."""
        for ack in self._intake.book.acknowledgements():
            with contextlib.suppress(KvasirError):
                await self._member.market.acknowledge(ack)

    def _counters(self) -> dict[str, int]:
        served = self._server.served
        return {
            "calls": served.calls,
            "rows": served.rows,
            "outputs": served.outputs,
            "carried bytes": served.carried_bytes,
            "refusals": served.refusals.total(),
        }

    def _wallet(self, create: bool) -> SigningKey | None:
        """The wallet's key; None where the configuration names none, none is here and none may be made."""
        path, named = self._config.wallet_file, self._config.wallet is not None
        if not named and not create and not path.exists():
            return None
        return self._state.wallet(path, create=not named, passphrase=self._passphrase)


def _known(accelerator: torch.device | None) -> tuple[str, tuple[int, int] | None] | None:
    return None if accelerator is None else (describe_device(accelerator), device_memory(accelerator))


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Do `work` to its end, or until `stop` is set: then False."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.wait([task, stopping])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""A plan served by two nodes in this process: real expert servers behind real sessions and the dispatcher.

Each node has verified bytes of its own windows and nothing else, as after a download: half of the windows,
every second one. There is no fallback, so an output that no node made is an error. Market, relay and
proving are left out; `tests/swarm` has them.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from kvasir_backbone.audit import NormBand
from kvasir_backbone.checkpoint import Checkpoint, id_of
from kvasir_backbone.credit import CreditBook, Totals
from kvasir_backbone.dispatch import CallEnd, OwnerBook, SwarmDispatcher
from kvasir_backbone.links import DeviceLink
from kvasir_backbone.roster import Replica, Roster, WindowMap
from kvasir_node.calls import Buffers, Reference
from kvasir_node.experts import WindowExperts
from kvasir_node.serving import ExpertServer
from market.plans import ByteRange, Plan, parse_plan, plan_fields
from relay.identity import PROTOCOL_VERSION, PublicKey
from relay.secure import SecureSession
from tests.support.fake_link import channel_pair
from tests.support.relays import Device
from tests.support.relays import Swarm as Keys

EPOCH = 1


class Download:
    """The bytes of some windows, checked against their hashes; reads of anything else fail."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, numbers: range) -> None:
        self.nbytes = 0
        self._starts: dict[int, list[int]] = {}
        self._data: dict[tuple[int, int], bytes] = {}
        for window in (plan.windows[number] for number in numbers):
            hashes = checkpoint.hash_window(plan, window).chunks
            chunks = {chunk: bytes(checkpoint.read(chunk)) for chunk in plan.window_chunks(window)}
            assert [hashlib.sha256(data).digest() for data in chunks.values()] == list(hashes)
            for span in plan.window_ranges(window):
                parts = [data for chunk, data in chunks.items() if _within(chunk, span)]
                self._data[span.file, span.start] = b"".join(parts)
                bisect.insort(self._starts.setdefault(span.file, []), span.start)
                self.nbytes += span.nbytes

    def read(self, where: ByteRange) -> memoryview:
        """The bytes of one range of the plan's files."""
        starts = self._starts[where.file]
        start = starts[bisect.bisect_right(starts, where.start) - 1]
        data = memoryview(self._data[where.file, start])[where.start - start : where.end - start]
        assert len(data) == where.nbytes, f"{where} is not among the downloaded windows"
        return data


def _within(chunk: ByteRange, span: ByteRange) -> bool:
    return chunk.file == span.file and span.start <= chunk.start < span.end


class TwoNodes:
    """Two devices with a lease for every window of theirs. The dispatcher's `Lines`."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan) -> None:
        self.keys = Keys()
        self.devices = (Device(), Device())
        self.servers = (ExpertServer(), ExpertServer())
        self.plan, self.id = plan, id_of(plan)
        self.replicas: dict[int, tuple[Replica, ...]] = {}
        self.links: dict[PublicKey, DeviceLink] = {}
        self.tasks: asyncio.TaskGroup
        self.loop = asyncio.get_running_loop()
        book, owners = CreditBook(), OwnerBook()
        for device in self.devices:
            owners.ensure(device.key.public)
            book.open(device.key.public, Totals(device.key.public))
        for first, (device, server) in enumerate(zip(self.devices, self.servers, strict=True)):
            numbers = range(first, len(plan.windows), 2)
            self._load(server, device, numbers, Download(checkpoint, plan, numbers))
        honoured = frozenset((each.lease, each.epoch) for (each,) in self.replicas.values())
        self._roster = Roster(WindowMap(plan), self.replicas, honoured)
        self.dispatcher = SwarmDispatcher(
            plan, self, owners=owners, book=book, band=NormBand(), reference=None, fallback=False,
            min_failover_s=30.0,  # one process, one core: its stalls say nothing of a node
        )  # fmt: skip

    def _load(self, server: ExpertServer, device: Device, numbers: range, download: Download) -> None:
        """Carry out the recipes of a node's windows, from the plan as it arrives and its own bytes."""
        plan = parse_plan({"v": PROTOCOL_VERSION, **plan_fields(self.plan)})
        for number in numbers:
            window, lease = plan.windows[number], number.to_bytes(16, "big")
            experts = WindowExperts.load(plan, window, "stored", download.read)
            server.hold(lease, EPOCH, self.id, experts)
            key = device.key.public
            self.replicas[number] = (Replica(key, key, lease, EPOCH, number, window, experts.numerics),)

    # --- what the dispatcher asks for; from any thread

    def roster(self) -> Roster:
        return self._roster

    def submit(
        self,
        device: PublicKey,
        call_id: int,
        message: Buffers,
        done: Callable[[CallEnd], None],
        *,
        answer_bytes: int,
    ) -> None:
        self.loop.call_soon_threadsafe(self.links[device].submit, call_id, message, done, answer_bytes)

    def cancel(self, device: PublicKey, call_id: int) -> None:
        self.loop.call_soon_threadsafe(self.links[device].cancel, call_id)

    def tripped(self, device: PublicKey, reason: str) -> None:
        raise AssertionError(f"a node's breaker opened: {reason}")

    def stale(self, replicas: Sequence[Replica], reason: str) -> None:
        raise AssertionError(f"a node knows none of its leases: {reason}")

    # --- sessions

    def link(self, device: Device, server: ExpertServer) -> DeviceLink:
        """A link that dials the node over memory, handshake and encryption as on the wire."""

        async def dial() -> SecureSession:
            left, right = channel_pair(self.keys.backbone.key.public, device.key.public)

            async def serve() -> None:
                await server.handle_session(await self.keys.accept(right, device))

            self.tasks.create_task(serve())
            return await self.keys.connect(left, device)

        def references() -> list[Reference]:
            return [
                Reference(each.ref, each.lease, each.epoch, self.id)
                for (each,) in self.replicas.values()
                if each.device == device.key.public
            ]

        return DeviceLink(
            device.key.public, dial=dial, references=references, on_up=lambda: None, on_down=lambda: None,
            on_ack=lambda ack: None, on_draining=lambda reason: None,
        )  # fmt: skip


@asynccontextmanager
async def two_nodes(checkpoint: Checkpoint, plan: Plan) -> AsyncIterator[TwoNodes]:
    """Two nodes that serve `plan`, with their sessions up."""
    nodes = TwoNodes(checkpoint, plan)
    async with AsyncExitStack() as stack:
        for server in nodes.servers:
            await stack.enter_async_context(server)
        nodes.tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = []
        for device, server in zip(nodes.devices, nodes.servers, strict=True):
            link = nodes.links[device.key.public] = nodes.link(device, server)
            running.append(nodes.tasks.create_task(link.run()))
        try:
            async with asyncio.timeout(20):
                for link in nodes.links.values():
                    await link.up.wait()
            yield nodes
        finally:
            for task in running:
                task.cancel()

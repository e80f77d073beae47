"""Expert calls in, batches through the experts, outputs out.

The event loop reads and answers sessions and checks references and epochs; one compute thread runs the
experts (`kvasir_node.compute`). A call crosses from loop to thread and back once; a short one that comes
while nothing waits runs on the loop itself (`INLINE_S`), which saves the crossing. Everything is bounded:
calls and bytes that wait, answers that a slow backbone has not taken. A call that cannot be served gets a
typed refusal, and a session that ends takes its waiting calls with it.

Knows leases, sessions' messages and the queue. Knows no market, no transport, and nothing that could choose
an expert: the ids of a call are run as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self

import structlog

from market.plans import PlanId
from relay.errors import ConfigError, KvasirError, Refused, RemoteProtocolError

from .calls import (
    MAX_MESSAGE_BYTES,
    Call,
    Cancel,
    Draining,
    Notice,
    ReceiptAck,
    ReceiptMessage,
    References,
    Refusal,
    Reply,
    decode,
    reply_bytes,
)
from .compute import Compute, Job, Outcome, make_reply
from .experts import WindowExperts
from .holdings import Holding, Served
from .peers import Peer, Session
from .whole import run_whole, runs_whole

log = structlog.get_logger("node")

INLINE_S: Final = 0.004
"""A call expected to take so long or less, by what its window took before, may run on the loop: at most one a
turn of the loop, and none while any call waits. The loop's lag is promised to stay under 50 ms."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds on what may wait. `max_calls` and `max_bytes` (requests and answers) over all sessions."""

    max_calls: int = 1024
    max_bytes: int = 512 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.max_calls < 1 or self.max_bytes < 1:
            raise ConfigError("the serving limits must be positive")


class ExpertServer:
    """Holds windows by lease and serves sessions from them. Enter it before handling sessions.

    `on_receipt(receipt)` gets the bytes of each receipt and returns those of its acknowledgement, or None;
    `on_notice(notice)` gets what the backbone wants the owner to read. `rest_s()` says after each batch how
    long the compute thread is to rest.
    """

    def __init__(
        self,
        limits: ServingLimits | None = None,
        *,
        on_receipt: Callable[[bytes], Awaitable[bytes | None]] | None = None,
        on_notice: Callable[[Notice], None] | None = None,
        rest_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or ServingLimits()
        self.served = Served()
        self._on_receipt = on_receipt
        self._on_notice = on_notice
        self._clock = clock
        self._holdings: dict[bytes, Holding] = {}
        self._peers: set[Peer] = set()
        self._draining: str | None = None
        self._waiting_calls = 0
        self._waiting_bytes = 0
        self._service_s = 0.0  # moving average of one call
        self._idle = asyncio.Event()
        self._idle.set()
        self._rest_s = rest_s
        self._ran_inline = False  # in this turn of the loop
        self._rests_until = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._compute = Compute(clock, rest_s=rest_s)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._compute.start(self._loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers:
            peer.cancel()
        await asyncio.to_thread(self._compute.stop)

    # --- leases ---

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The leases in service."""
        return tuple(self._holdings.values())

    def hold(self, lease: bytes, epoch: int, plan: PlanId, experts: WindowExperts) -> Holding:
        """Serve `experts` under a lease; replaces what was held under it."""
        holding = Holding(lease, epoch, plan, experts)
        self._holdings[lease] = holding
        return holding

    def drain_lease(self, lease: bytes) -> None:
        """Answer what waits for this lease and refuse what comes."""
        if lease in self._holdings:
            self._holdings[lease].draining = True

    def drop(self, lease: bytes) -> None:
        """Forget a lease. Calls already accepted are still answered."""
        self._holdings.pop(lease, None)

    async def drain(self, reason: str, *, timeout: float) -> bool:
        """Tell every session, refuse new calls, and wait for those in flight; False if time ran out."""
        self._draining = reason
        for peer in self._peers:
            peer.put(Draining(reason))
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
                for peer in tuple(self._peers):
                    await peer.flushed.wait()
        except TimeoutError:
            return False
        return True

    def resume(self) -> None:
        """Take calls again after `drain`. Backbones learn it from the market, or by trying."""
        self._draining = None

    # --- sessions ---

    async def handle_session(self, session: Session) -> None:
        """Serve one session until it ends. Whatever its peer does wrong ends only this session."""
        peer = Peer(session)
        self._peers.add(peer)
        outcome, message = "closed", ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(peer.write())
                tasks.create_task(self._acknowledge(peer))
                await self._read(peer)
        except* (KvasirError, OSError) as group:
            error = _first(group)
            outcome = error.code if isinstance(error, KvasirError) else "unreachable"
            message = str(error)
        finally:
            peer.cancel()
            self._peers.discard(peer)
            log.info("session.served", outcome=outcome, reason=message, **peer.served.fields())
        await session.close(outcome, message)

    async def _read(self, peer: Peer) -> None:
        if self._draining is not None:
            peer.put(Draining(self._draining))
        peer.session.listen(partial(self._take, peer))
        await peer.session.ended()

    def _take(self, peer: Peer, data: bytes) -> None:
        """One message of a session, as it arrives."""
        received = self._clock()
        message = decode(data)
        match message:
            case Call():
                self._accept(peer, message, len(data), received)
            case References(refs):
                peer.learn(refs)
            case ReceiptMessage(receipt):
                peer.receipts.put_nowait(receipt)
                if peer.receipts.full():
                    peer.hold("receipts")
            case Cancel(call):
                peer.cancel_call(call)
            case Notice():
                if self._on_notice is not None:
                    self._on_notice(message)
            case _:
                raise RemoteProtocolError(f"a backbone does not send {type(message).__name__}")

    async def _acknowledge(self, peer: Peer) -> None:
        """Pass receipts on, one after another: keeping one may take a disk's time, and calls go on."""
        while True:
            receipt = await peer.receipts.get()
            peer.read_on("receipts")
            ack = await self._on_receipt(receipt) if self._on_receipt is not None else None
            if ack is not None:
                peer.put(ReceiptAck(ack))

    # --- calls ---

    def _accept(self, peer: Peer, call: Call, request_bytes: int, received: float) -> None:
        """Compute a call at once, queue it for computing, or refuse it."""
        try:
            holdings = tuple([self._resolve(peer, group.ref) for group in call.groups])
            nbytes = request_bytes + _check(call, holdings)
            if self._may_run_now(call, holdings):
                self._run_now(peer, call, holdings, received)
                return
            job = Job(peer, call, holdings, holdings[0].experts.plan.row_bytes, nbytes, received)
            self._admit(job)
        except Refused as refusal:
            self._refuse(peer, call, refusal)
            return
        self._idle.clear()
        self._waiting_calls += 1
        self._waiting_bytes += job.nbytes
        peer.jobs.add(job)
        self._compute.submit(job, self._finish)

    def _resolve(self, peer: Peer, ref: int) -> Holding:
        """The lease behind a reference. Raises `Refused`."""
        reference = peer.refs.get(ref)
        if reference is None:
            raise Refused("not_mine", f"reference {ref} was never announced in this session")
        holding = self._holdings.get(reference.lease)
        if holding is None or holding.plan != reference.plan:
            raise Refused("not_mine", f"this device holds no such lease {reference.lease.hex()}")
        if holding.epoch != reference.epoch:
            raise Refused(
                "stale_epoch", f"the lease is at epoch {holding.epoch}, the call says {reference.epoch}"
            )
        if holding.draining or self._draining is not None:
            raise Refused("draining", self._draining or "this lease is being given back")
        return holding

    def _may_run_now(self, call: Call, holdings: tuple[Holding, ...]) -> bool:
        """Whether a call may run on the loop: see `INLINE_S`."""
        if self._waiting_calls or self._ran_inline or not runs_whole(call, holdings):
            return False
        if self._rests_until and self._clock() < self._rests_until:
            return False
        slowest = holdings[0].id_s if len(holdings) == 1 else max([holding.id_s for holding in holdings])
        return 0.0 < slowest * call.id_count <= INLINE_S

    def _run_now(self, peer: Peer, call: Call, holdings: tuple[Holding, ...], received: float) -> None:
        """Run a call here and now. Raises `Refused`."""
        self._ran_inline = True
        self._loop.call_soon(self._next_turn)
        try:
            rows = run_whole(call, holdings)
        except Refused:
            raise
        except Exception as error:
            log.exception("batch.failed", layer=call.layer, jobs=1)
            raise Refused("internal", f"the experts failed to run: {error}") from error
        reply = make_reply(call, rows, received, received, self._clock())
        peer.put(reply)
        self._count(peer, call, holdings, reply)
        if self._rest_s is not None and (rest := self._rest_s()) > 0:
            self._rests_until = self._clock() + rest  # what comes meanwhile waits in the compute thread
            self._compute.rest(rest)

    def _next_turn(self) -> None:
        self._ran_inline = False

    def _admit(self, job: Job) -> None:
        if self._waiting_calls >= self.limits.max_calls or (
            self._waiting_bytes + job.nbytes > self.limits.max_bytes
        ):
            raise Refused(
                "overloaded",
                f"{self._waiting_calls} calls of {self._waiting_bytes} bytes wait here already",
                retry_after_s=max(0.001, self._waiting_calls * self._service_s),
            )

    def _refuse(self, peer: Peer, call: Call, refusal: Refused) -> None:
        retry = refusal.retry_after_s
        retry_ms = None if retry is None else min(60_000, max(1, round(1000 * retry)))
        peer.put(Refusal(call.id, refusal.code, refusal.message, retry_ms))
        for served in (self.served, peer.served):
            served.refusals[refusal.code] += 1
        log.debug("call.served", outcome=refusal.code, call=call.id, layer=call.layer, rows=call.row_count)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """A job came back from the compute thread. Runs on the loop."""
        peer, call = job.peer, job.call
        peer.jobs.discard(job)
        self._waiting_calls -= 1
        self._waiting_bytes -= job.nbytes
        if not self._waiting_calls:
            self._idle.set()
        if isinstance(outcome, Refused):
            self._refuse(peer, call, outcome)
        elif outcome is None:  # its session is gone, or its backbone needs it no more
            peer.put(Refusal(call.id, "expired", "the call was cancelled before its turn came"))
            log.debug("call.served", outcome="cancelled", call=call.id, layer=call.layer)
        else:
            peer.put(outcome)
            self._count(peer, call, job.holdings, outcome)
        job.release()

    def _count(self, peer: Peer, call: Call, holdings: tuple[Holding, ...], reply: Reply) -> None:
        ids, seconds = call.id_count, reply.service_us * 1e-6
        self._service_s += 0.1 * (seconds - self._service_s)
        carried = (call.row_count + reply.outputs) * holdings[0].experts.plan.row_bytes + 2 * ids
        for served in (self.served, peer.served):
            served.calls += 1
            served.rows += call.row_count
            served.outputs += ids
            served.carried_bytes += carried
        for holding, group in zip(holdings, call.groups, strict=True):
            holding.took(seconds / ids)
            holding.served.calls += 1
            holding.served.rows += call.row_count - group.counts.count(0)
            holding.served.outputs += len(group.ids)
        log.debug(
            "call.served",
            outcome="served",
            call=call.id,
            layer=call.layer,
            rows=call.row_count,
            ids=ids,
            carried_bytes=carried,
            service_us=reply.service_us,
            queue_us=reply.queue_us,
        )


def _check(call: Call, holdings: tuple[Holding, ...]) -> int:
    """Check a call against the plan of its leases; the bytes of its answer. Raises `Refused`."""
    plan = holdings[0].experts.plan
    if any([holding.plan != holdings[0].plan for holding in holdings]):
        raise Refused("bad_request", "one call names leases of two plans")
    if call.weights is not None and not plan.weighted:
        raise Refused("bad_request", "the call carries weights, and the plan is not of a weighted swarm")
    if len(call.rows) != call.row_count * plan.row_bytes:
        raise Refused(
            "bad_request",
            f"{call.row_count} rows of this plan are {call.row_count * plan.row_bytes} bytes, "
            f"got {len(call.rows)}",
        )
    answer = reply_bytes(call.output_count, plan.row_bytes)
    if answer > MAX_MESSAGE_BYTES:
        raise Refused("bad_request", f"the answer would have {answer} bytes; send fewer rows in a call")
    return answer


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

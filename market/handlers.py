"""What the market does for each route: one handler a route, each a piece of work on the store.

Knows no HTTP but a request's path, query and streams; who asked is verified before a handler runs (see
`market.server`). The rules are in claims, scarcity, volunteering, receipts and ledger.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import structlog
from aiohttp import web

from relay.errors import ConfigError, IdentityError, Refused, RemoteProtocolError
from relay.identity import (
    PROTOCOL_VERSION,
    PublicKey,
    SignedDocument,
    address_of,
    parse_address,
)
from relay.tickets import issue_ticket

from . import admission, banking, following, judging, leasing, moves, overview, publishing
from . import messages as m
from . import relays as relaying
from .config import MarketConfig
from .evidence import open_evidence
from .plans import PlanId, open_hashes, open_plan
from .receipts import open_receipt
from .relays import RelayBook
from .requests import Author
from .sse import KEEP_ALIVE, encode_event
from .store import Session, Store
from .swarm import OperatingKey
from .wallet import new_nonce
from .watchers import Watchers, within
from .windows import Window
from .wire import LeaseId, RecordId, padding, to_json

log = structlog.get_logger("market")

MAX_TICKETS: Final = 8
LOOK_S: Final = 1.0
"""How often who waits for hashes looks whether another process published them."""

MAX_PROBES: Final = 4
MAX_PROBE_BYTES: Final = 1_000_000
VERSION: Final = importlib.metadata.version("kvasir")


@dataclass(frozen=True, slots=True)
class Call:
    """One request as a handler sees it: verified author (None where anyone may ask) and parsed body.

    `address` is what the client's address counts as, for quotas.
    """

    request: web.Request
    author: Author | None
    body: Any
    address: str

    @property
    def signed_by(self) -> Author:
        """The author of a route that must be signed."""
        assert self.author is not None
        return self.author

    @property
    def plan(self) -> PlanId:
        """The plan in the path. Raises `RemoteProtocolError`."""
        return PlanId(_hex(self.request.match_info["plan"], 32, "plan"))

    @property
    def lease(self) -> LeaseId:
        """The lease in the path. Raises `RemoteProtocolError`."""
        return LeaseId(_hex(self.request.match_info["lease"], 16, "lease"))

    @property
    def record(self) -> RecordId:
        """The record in the path. Raises `RemoteProtocolError`."""
        return RecordId(_hex(self.request.match_info["record"], 16, "record"))


class Handlers:
    """One method a route of `market.routes.ROUTES`; each takes a `Call` and returns the route's message."""

    def __init__(
        self,
        config: MarketConfig,
        store: Store,
        *,
        root: PublicKey,
        keys: Callable[[], OperatingKey],
        relays: RelayBook,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.store = store
        self.root = root
        self.keys = keys
        self.relays = relays
        self.clock = clock
        self.watchers = Watchers()
        self.public_urls = list(config.public_urls)
        self._probes = 0
        self._sign_ins = admission.SignIns()
        self._awaiting = Watchers()
        self._waits: Counter[str] = Counter()
        self._ledger = banking.LedgerCheck()
        self._checking = asyncio.Lock()
        self._gaps: tuple[float, bytes] | None = None
        self._asking = asyncio.Lock()

    def close(self) -> None:
        """Tell everybody who waits to stop."""
        self.watchers.close()
        self._awaiting.close()

    async def check_ledger(self, *, whole: bool = False) -> str | None:
        """What is wrong with the ledger, or None: its new entries, or all of it."""
        async with self._checking:  # one after another: each sees all that the one before saw
            return await self.store.read(lambda session: self._ledger.check(session, whole=whole))

    def desk(self) -> leasing.Desk:
        """What leasing works with, now."""
        return leasing.Desk(
            root=self.root,
            key=self.keys().signing,
            lease_rules=self.config.lease_rules,
            scarcity_rules=self.config.scarcity,
            relays=tuple((url, key) for url, key, _ in self.relays.listed),
            claim_relays=self.relays.for_claims(),
            trusted_calls=self.config.trusted_calls,
            move_rules=self.config.moving,
        )

    async def _as_device(self, call: Call, work: Callable[[Session, admission.Device], Any]) -> Any:
        """Carry out a device's change: its grant checked and its nonce used up in the same transaction."""

        def once(session: Session) -> Any:
            return work(session, admission.find_device(session, call.signed_by, lock=True))

        return await self.store.write(once, author=call.signed_by)

    # --- swarm and wallet

    async def swarm(self, call: Call) -> m.SwarmListing:
        """GET /swarm."""
        return m.SwarmListing(
            v=PROTOCOL_VERSION,
            swarm=self.root,
            certificate=self.keys().certificate.document,
            relays=tuple(listing for _, _, listing in self.relays.listed),
            public_urls=tuple(self.public_urls),
            time=self.clock(),
        )

    async def health(self, call: Call) -> m.Health:
        """GET /health."""
        return await self.store.read(lambda session: overview.health(session, VERSION))

    async def challenge(self, call: Call) -> m.ChallengeOffer:
        """POST /challenges."""
        nonce, urls = new_nonce(), tuple(self.public_urls)
        self._sign_ins.enter(call.address, call.body.wallet, nonce, now=self.clock())
        try:
            return await self.store.write(
                lambda session: admission.offer_challenge(
                    session, call.body, root=self.root, public_urls=urls, nonce=nonce
                )
            )
        except BaseException:
            self._sign_ins.leave(nonce)
            raise

    async def grant(self, call: Call) -> m.GrantAnswer:
        """POST /grants. The nonce is used up, whatever comes of the rest."""

        def take(session: Session) -> tuple[str | None, float]:
            return admission.take_challenge(session, call.body.text), session.now

        stored, now = await self.store.write(take, author=call.signed_by)
        self._sign_ins.leave(admission.nonce_of(call.body.text))
        grant = admission.check_grant(stored, call.body, call.signed_by, root=self.root, now=now)
        answer = await self.store.write(lambda session: admission.store_grant(session, grant))
        log.info(
            "wallet.granted",
            wallet=address_of(grant.wallet),
            device=address_of(grant.device),
            outcome="granted",
        )
        return answer

    # --- leases

    async def volunteer(self, call: Call) -> m.VolunteerAnswer:
        """POST /volunteer."""
        desk = self.desk()
        return cast(
            m.VolunteerAnswer,
            await self._as_device(call, lambda s, d: leasing.volunteer(s, desk, d, call.body)),
        )

    async def link(self, call: Call) -> m.LinkAnswer:
        """POST /link: the store is not asked, and few are served at once, so that it costs little."""
        if self._probes >= MAX_PROBES:
            raise Refused("overloaded", "others measure their links now: ask again", retry_after_s=2.0)
        self._probes += 1
        try:
            wanted = max(0, min(call.body.answer_bytes, MAX_PROBE_BYTES))
            pad = await asyncio.to_thread(padding, wanted)
            return m.LinkAnswer(sum(map(len, call.body.pad)), pad)
        finally:
            self._probes -= 1

    async def claim(self, call: Call) -> m.LeaseGrant:
        """POST /claims."""
        desk, wanted = self.desk(), call.body
        try:
            lease = await self._as_device(call, lambda s, d: leasing.claim(s, desk, d, wanted))
        except Refused as error:
            device = address_of(call.signed_by.key)
            log.info("claim.refused", device=device, window=wanted.window.name, outcome=error.code)
            raise
        return cast(m.LeaseGrant, lease)

    async def heartbeat(self, call: Call) -> m.HeartbeatAnswer:
        """POST /heartbeat."""
        desk, beat = self.desk(), call.body

        def renew(session: Session, device: admission.Device) -> Any:
            return *leasing.heartbeat(session, desk, device, beat), moves.offer_to(session, device.key)

        statuses, notices, move = await self._as_device(call, renew)
        listed = [key for _, key in desk.relays]
        wanted = [key for key in relaying.used(beat.relays) if key in listed] or listed
        tickets = [self._ticket(call.signed_by, key, beat.start_generation) for key in wanted[:MAX_TICKETS]]
        return m.HeartbeatAnswer(statuses, tuple(tickets), notices, move)

    async def ticket(self, call: Call) -> m.TicketAnswer:
        """POST /tickets."""
        author, wanted = call.signed_by, call.body
        if wanted.relay not in [key for _, key, _ in self.relays.listed]:
            raise Refused("not_found", "that relay is not listed here", retry_after_s=5)
        if author.certificate is None:
            await self.store.read(lambda session: admission.find_device(session, author))
        return m.TicketAnswer(self._ticket(author, wanted.relay, wanted.start_generation))

    def _ticket(self, author: Author, relay: PublicKey, start_generation: int) -> SignedDocument:
        if start_generation < 0:
            raise RemoteProtocolError("a start generation is not negative")
        return issue_ticket(
            self.keys().signing,
            subject=author.key,
            role="device" if author.certificate is None else "backbone",
            relay=relay,
            start_generation=start_generation,
            now=self.clock(),
        )

    async def loaded(self, call: Call) -> m.LeaseStatus:
        """POST /leases/{lease}/loaded."""
        desk, lease = self.desk(), call.lease
        return cast(
            m.LeaseStatus,
            await self._as_device(call, lambda s, d: leasing.loaded(s, desk, d, lease, call.body)),
        )

    async def drain(self, call: Call) -> m.LeaseStatus:
        """POST /leases/{lease}/drain."""
        desk, lease = self.desk(), call.lease
        return cast(
            m.LeaseStatus,
            await self._as_device(call, lambda s, d: leasing.drain(s, desk, d, lease, call.body)),
        )

    async def release(self, call: Call) -> m.LeaseStatus:
        """POST /leases/{lease}/release."""
        lease = call.lease
        return cast(
            m.LeaseStatus, await self._as_device(call, lambda s, d: leasing.release(s, d, lease, call.body))
        )

    async def proven(self, call: Call) -> m.LeaseStatus:
        """POST /leases/{lease}/proven."""
        desk, lease = self.desk(), call.lease
        return await self.store.write(
            lambda session: leasing.prove(session, desk, lease, call.body), author=call.signed_by
        )

    async def revoke(self, call: Call) -> m.LeaseStatus:
        """POST /leases/{lease}/revoke."""
        lease = call.lease
        return await self.store.write(
            lambda session: leasing.revoke(session, lease, call.body), author=call.signed_by
        )

    # --- plans

    async def plans(self, call: Call) -> m.PlansAnswer:
        """GET /plans."""
        return await self.store.read(publishing.list_plans)

    async def plan(self, call: Call) -> m.Published:
        """GET /plans/{plan}."""
        plan = call.plan
        return await self.store.read(lambda session: publishing.get_plan(session, plan))

    async def publish_plan(self, call: Call) -> m.PlanAnswer:
        """POST /plans."""
        author, document = call.signed_by, call.body.document
        certificate = author.certificate
        assert certificate is not None
        plan = await asyncio.to_thread(open_plan, document, author.key)
        rows = await asyncio.to_thread(publishing.window_rows, plan)
        desk, rules = self.desk(), self.config.scarcity

        def work(session: Session) -> PlanId:
            published = publishing.publish_plan(session, document, plan, rows, certificate, rules)
            leasing.drain_retired(session, desk)
            return published

        plan_id = await self.store.write(work, author=author)
        log.info("plan.published", plan=plan_id.hex(), model=plan.model, windows=len(plan.windows))
        return m.PlanAnswer(plan_id)

    async def hashes(self, call: Call) -> m.Published:
        """GET /plans/{plan}/hashes: waits, within bounds, until they are made."""
        plan, window = call.plan, _window(call.request.query.get("window", ""))
        left = min(_seconds(call.request.query.get("wait", "0")), self.config.hashes_wait_s)
        found = await self._read_hashes(plan, window)
        if found is None and left > 0 and self._may_wait(call.address):
            self._waits[call.address] += 1
            try:
                found = await self._await_hashes(plan, window, left)
            finally:
                self._waits[call.address] -= 1
                self._waits += Counter()  # forget those that do not wait
        if found is None:
            raise Refused("not_found", f"the hashes of {window.name} are not made yet", retry_after_s=0.5)
        return found

    def _may_wait(self, address: str) -> bool:
        """Whether one more request may wait; one that may not is told to ask again."""
        config = self.config
        return self._waits.total() < config.hashes_waits and self._waits[address] < config.address_waits

    async def _await_hashes(self, plan: PlanId, window: Window, wait_s: float) -> m.Published | None:
        """The hashes, if they come within `wait_s`: told by this process, or looked for every second."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        with self._awaiting.watching(_hashes_key(plan, window)) as published:
            while True:
                published.clear()
                found = await self._read_hashes(plan, window)
                left = deadline - loop.time()
                if found is not None or left <= 0 or self._awaiting.closing:
                    return found
                await within(published, min(left, LOOK_S))

    async def _read_hashes(self, plan: PlanId, window: Window) -> m.Published | None:
        return await self.store.read(lambda session: publishing.get_hashes(session, plan, window))

    async def publish_hashes(self, call: Call) -> m.Done:
        """POST /hashes."""
        author, document = call.signed_by, call.body.document
        certificate = author.certificate
        assert certificate is not None
        hashes = await asyncio.to_thread(open_hashes, document, author.key)
        published = await self.store.read(lambda s: publishing.get_plan(s, hashes.plan))
        signer = published.document.signer
        plan = await asyncio.to_thread(open_plan, published.document, signer)
        hashes.check(plan)
        done = await self.store.write(
            lambda session: publishing.publish_hashes(session, document, hashes, certificate), author=author
        )
        self._awaiting.wake([_hashes_key(hashes.plan, hashes.window)])
        return done

    async def wanted_hashes(self, call: Call) -> m.WindowsAnswer:
        """GET /plans/{plan}/wanted-hashes."""
        plan = call.plan
        return await self.store.read(lambda session: publishing.wanted_hashes(session, plan))

    async def demand(self, call: Call) -> m.Done:
        """POST /plans/{plan}/demand."""
        plan, author, rates = call.plan, call.signed_by, call.body.rows_per_s
        assert author.certificate is not None
        backbone, rules = author.certificate.id, self.config.scarcity
        return await self.store.write(
            lambda session: publishing.report_demand(session, plan, backbone, rates, rules), author=author
        )

    # --- following

    async def assignments(self, call: Call) -> m.SnapshotListing:
        """GET /plans/{plan}/assignments."""
        plan, author = call.plan, call.signed_by
        await self._note_backbone(plan, author)
        return await self.store.read(lambda session: following.snapshot(session, plan))

    async def watch(self, call: Call) -> web.StreamResponse:
        """GET /plans/{plan}/watch: server-sent events until either side goes away."""
        plan, author = call.plan, call.signed_by
        since = _revision(call.request.query.get("since", ""))
        if self.watchers.count >= self.config.watches:
            raise Refused("overloaded", "too many watches", retry_after_s=5)
        await self._changes(plan, since)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(call.request)
        with self.watchers.watching(plan) as changed:
            while not self.watchers.closing:
                changed.clear()
                batch = await self._changes(plan, since)
                for change in batch:
                    await response.write(encode_event(json.dumps(to_json(change), separators=(",", ":"))))
                    since = change.revision
                if len(batch) < following.BATCH and not await within(changed, self.config.watch_alive_s):
                    await response.write(KEEP_ALIVE)
                    await self._note_backbone(plan, author)
        return response

    async def _changes(self, plan: PlanId, since: int) -> tuple[m.ChangeListing, ...]:
        return await self.store.read(lambda session: following.changes(session, plan, since))

    async def _note_backbone(self, plan: PlanId, author: Author) -> None:
        assert author.certificate is not None
        backbone = author.certificate.id
        await self.store.write(lambda session: publishing.note_backbone(session, plan, backbone))

    # --- credit

    async def post_receipt(self, call: Call) -> m.Done:
        """POST /receipts."""
        author, document = call.signed_by, call.body.document
        certificate = author.certificate
        assert certificate is not None
        receipt = open_receipt(document, certificate=certificate, root=self.root)
        return await self.store.write(
            lambda session: banking.post_receipt(session, receipt, certificate), author=author
        )

    async def receipt(self, call: Call) -> m.ReceiptAnswer:
        """GET /receipts/{device}."""
        author = call.signed_by
        assert author.certificate is not None
        backbone, device = author.certificate.id, _key(call.request.match_info["device"])
        return await self.store.read(lambda session: banking.last_receipt(session, backbone, device))

    async def acknowledge(self, call: Call) -> m.Done:
        """POST /acknowledgements."""
        author, document = call.signed_by, call.body.document
        return await self.store.write(
            lambda session: banking.acknowledge(session, document, author.key), author=author
        )

    async def own_credits(self, call: Call) -> m.CreditStatement:
        """GET /credits."""
        author = call.signed_by
        return await self.store.read(
            lambda session: banking.statement(session, admission.find_device(session, author).wallet)
        )

    async def credits(self, call: Call) -> m.CreditStatement:
        """GET /credits/{wallet}."""
        wallet = _key(call.request.match_info["wallet"])
        return await self.store.read(lambda session: banking.statement(session, wallet))

    async def credit_table(self, call: Call) -> m.CreditTable:
        """GET /credit-table."""
        whole = call.request.query.get("whole", "0")
        if whole not in ("0", "1"):
            raise RemoteProtocolError("whole is 0 or 1")
        problem = await self.check_ledger(whole=whole == "1")
        return await self.store.read(lambda session: banking.credit_table(session, balanced=problem is None))

    # --- trust

    async def report_violation(self, call: Call) -> m.Done:
        """POST /violations."""
        author, report = call.signed_by, call.body
        certificate = author.certificate
        assert certificate is not None
        evidence = open_evidence(report.evidence, certificate=certificate, root=self.root)
        return await self.store.write(
            lambda session: judging.report(session, report, evidence, certificate), author=author
        )

    async def quarantine(self, call: Call) -> m.QuarantineAnswer:
        """POST /quarantines."""
        author = call.signed_by
        certificate = author.certificate
        assert certificate is not None
        return await self.store.write(
            lambda session: judging.quarantine(session, call.body, certificate), author=author
        )

    async def own_trust(self, call: Call) -> m.TrustAnswer:
        """GET /trust."""
        author, rules = call.signed_by, self.config.escrow_rules
        return await self.store.read(
            lambda session: judging.trust(session, admission.find_device(session, author).wallet, rules)
        )

    async def trust(self, call: Call) -> m.TrustAnswer:
        """GET /trust/{wallet}."""
        wallet, rules = _key(call.request.match_info["wallet"]), self.config.escrow_rules
        return await self.store.read(lambda session: judging.trust(session, wallet, rules))

    async def records(self, call: Call) -> m.DisputesAnswer:
        """GET /records."""
        return await self.store.read(judging.latest_records)

    async def record(self, call: Call) -> m.RecordAnswer:
        """GET /records/{record}: any for a backbone, those of its own wallet for a device."""
        author, id_ = call.signed_by, call.record

        def work(session: Session) -> m.RecordAnswer:
            own = None if author.certificate is not None else admission.find_device(session, author).wallet
            return judging.record(session, id_, wallet=own)

        return await self.store.read(work)

    async def dispute(self, call: Call) -> m.TrustRecord:
        """POST /disputes."""
        return cast(m.TrustRecord, await self._as_device(call, lambda s, d: judging.dispute(s, d, call.body)))

    async def disputes(self, call: Call) -> m.DisputesAnswer:
        """GET /disputes."""
        return await self.store.read(judging.disputes)

    async def decide(self, call: Call) -> m.TrustRecord:
        """POST /records/{record}/decision."""
        id_ = call.record
        return await self.store.write(
            lambda session: judging.decide(session, id_, call.body), author=call.signed_by
        )

    # --- operator and relay

    async def gaps(self, call: Call) -> web.Response:
        """GET /gaps: found out once a second, however many ask."""
        rules, clock = self.config.scarcity, asyncio.get_running_loop().time
        async with self._asking:
            if self._gaps is None or clock() - self._gaps[0] >= self.config.gaps_s:
                answer = await self.store.read(lambda session: _json_bytes(overview.gaps(session, rules)))
                self._gaps = (clock(), answer)
            body = self._gaps[1]
        return web.Response(body=body, content_type="application/json")

    async def nodes(self, call: Call) -> m.NodesAnswer:
        """GET /nodes."""
        return await self.store.read(overview.nodes)

    async def announce_relay(self, call: Call) -> m.Done:
        """POST /relays."""
        author, announcement = call.signed_by, call.body
        certificate = author.certificate
        assert certificate is not None
        relaying.check_announcement(announcement)

        def work(session: Session) -> tuple[m.RelayListing, ...]:
            relaying.announce_relay(session, certificate, announcement)
            return tuple(relaying.announced_relays(session))

        self.relays.refresh(await self.store.write(work, author=author))
        return m.Done()


def _hashes_key(plan: bytes, window: Window) -> bytes:
    return bytes(plan) + window.name.encode("ascii")


def _json_bytes(answer: object) -> bytes:
    return json.dumps(to_json(answer), separators=(",", ":")).encode("utf-8")


def _hex(text: str, size: int, what: str) -> bytes:
    if len(text) == 2 * size and text == text.lower() and text.isascii():
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    raise RemoteProtocolError(f"the {what} in the path is not {size} bytes in lower-case hexadecimal")


def _window(name: str) -> Window:
    try:
        return Window.parse(name)
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RemoteProtocolError("wait is a number of seconds")
    return seconds


def _revision(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise RemoteProtocolError("since is a revision, a whole number")
    return int(text)


def _key(address: str) -> PublicKey:
    try:
        return parse_address(address)
    except IdentityError as error:
        raise RemoteProtocolError(str(error)) from None

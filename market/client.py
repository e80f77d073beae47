"""What node and backbone say to the market: one method a route, answers verified before they are returned.

Every method raises `Refused` where the market answered with a typed no, `Unreachable` where it did not
answer in time, `RemoteProtocolError` where the answer is malformed, and `IdentityError` where a document
does not verify. Nothing is retried here; callers know better when.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar
from urllib.parse import quote, urljoin

import aiohttp
from yarl import URL

from relay.errors import (
    ConfigError,
    IdentityError,
    Refused,
    RemoteProtocolError,
    Unreachable,
    version_refusal,
)
from relay.identity import (
    PROTOCOL_VERSION,
    Certificate,
    ExchangeKey,
    ExchangePublic,
    PublicKey,
    SignedDocument,
    SigningKey,
    address_of,
    open_certificate,
)
from relay.load import RelayLoad

from . import messages as m
from .claims import ClaimDocument, open_claim
from .evidence import Evidence, open_evidence
from .messages import ResyncNeeded
from .plans import Plan, PlanId, WindowHashes, open_hashes, open_plan, plan_id
from .requests import sign_request
from .sse import SseParser
from .wallet import (
    MAX_GRANT_LIFETIME_S,
    Challenge,
    Grant,
    check_challenge,
    normalise_url,
    open_grant,
    sign_challenge,
)
from .windows import Window
from .wire import Hash, LeaseId, MoveId, RecordId, from_json, padding, to_json

PREFIX: Final = "/market/v1"
SMALL_ANSWER: Final = 4 * 1024 * 1024
LARGE_ANSWER: Final = 128 * 1024 * 1024
OFF_LOOP_BYTES: Final = 256 * 1024
MAX_QUARANTINE_S: Final = 100 * 365 * 86_400.0
"""What a quarantine without end is told as; the market has a bound of its own."""

"""Answers above this are parsed off the event loop."""

LISTING_S: Final = 5.0
"""How old the list of relays is before a claim that names another makes it worth asking for again."""

WATCH_SILENCE_S: Final = 30.0
"""The market writes to a watch every 10 s; a silent one is dead."""

T = TypeVar("T")


class MarketClient:
    """One market, spoken to as one device, backbone or relay (`key`, with `certificate` for the latter two).

    `url` is the market's base URL, `root` the pinned swarm root (None: the first answer's is taken and kept).
    The caller owns `http`. `timeout` bounds each exchange in seconds. `clock` gives Unix seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        http: aiohttp.ClientSession,
        root: PublicKey | None = None,
        key: SigningKey | None = None,
        certificate: Certificate | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = normalise_url(url)
        self.root = root
        self.key = key
        self.certificate = certificate
        self._http = http
        self._timeout = timeout
        self._clock = clock
        self._swarm: m.SwarmInfo | None = None
        self._listed_at = 0.0

    # --- the swarm

    async def swarm(self) -> m.SwarmInfo:
        """Which swarm this is, its market's certificate and its relays, all verified against the root."""
        listing = await self._get("/swarm", m.SwarmListing, signed=False)
        if listing.v != PROTOCOL_VERSION:
            raise version_refusal(PROTOCOL_VERSION, listing.v)
        if self.root is None:
            self.root = listing.swarm
        now = self._clock()
        certificate = open_certificate(listing.certificate, swarm=self.root, now=now, role="market")
        relays = tuple(self._relay(relay, now) for relay in listing.relays)
        self._swarm = m.SwarmInfo(self.root, certificate, relays, listing.public_urls, listing.time)
        self._listed_at = time.monotonic()
        return self._swarm

    def _relay(self, listing: m.RelayListing, now: float) -> m.RelayInfo:
        assert self.root is not None
        certificate = open_certificate(listing.certificate, swarm=self.root, now=now, role="relay")
        return m.RelayInfo(
            self._absolute(listing.url),
            certificate.ed25519,
            certificate,
            listing.load,
            listing.rtt_s,
            listing.seen_by,
        )

    def _absolute(self, url: str) -> str:
        return urljoin(f"{self.url}/", url.lstrip("/") if url.startswith("/") else url)

    async def _known(self) -> m.SwarmInfo:
        return self._swarm if self._swarm is not None else await self.swarm()

    # --- device: wallet and leases

    async def login(
        self,
        wallet: SigningKey,
        device: SigningKey,
        exchange: ExchangeKey,
        *,
        scope: str = "serve",
        lifetime_s: int = MAX_GRANT_LIFETIME_S,
    ) -> Grant:
        """Prove the wallet and bind the device's keys to it: the whole exchange. Returns the grant."""
        text = await self.challenge(
            wallet.public, device.public, exchange.public, scope=scope, lifetime_s=lifetime_s
        )
        return await self.submit_grant(text, sign_challenge(text, wallet), device)

    async def challenge(
        self,
        wallet: PublicKey,
        device: PublicKey,
        exchange: ExchangePublic,
        *,
        scope: str = "serve",
        lifetime_s: int = MAX_GRANT_LIFETIME_S,
    ) -> str:
        """The exact text for the wallet to sign, checked against what was asked and the URL dialled."""
        root = (await self._known()).root
        request = m.ChallengeRequest(PROTOCOL_VERSION, self.url, wallet, device, exchange, scope, lifetime_s)
        answer = await self._post("/challenges", request, m.ChallengeOffer, signed=False)
        expected = Challenge(self.url, wallet, device, exchange, root, scope, "", 0, 0)
        check_challenge(answer.text, expected, now=self._clock(), lifetime_s=lifetime_s)
        return answer.text

    async def submit_grant(self, text: str, signature: bytes, device: SigningKey) -> Grant:
        """Hand the signed text in, from the device that it names."""
        root = (await self._known()).root
        grant = open_grant(text, signature, root=root, now=self._clock())
        request = m.GrantRequest(PROTOCOL_VERSION, text, signature)
        answer = await self._post("/grants", request, m.GrantAnswer, key=device)
        if answer.grant != grant.hash:
            raise RemoteProtocolError("the market took another grant than the one sent")
        return grant

    async def volunteer(self, abilities: m.Abilities) -> m.VolunteerAnswer:
        """Ask which windows are needed most and fit."""
        return await self._post("/volunteer", abilities, m.VolunteerAnswer)

    async def probe_link(self, *, send_bytes: int, receive_bytes: int) -> float:
        """Carry that many bytes of padding (1 MB each at most) to the market and back; seconds it took."""
        pad = await asyncio.to_thread(padding, send_bytes)
        body = json.dumps(to_json(m.LinkProbe(pad, receive_bytes)), separators=(",", ":")).encode("ascii")
        started = time.monotonic()
        answer = await self._exchange(
            "POST", "/link", body, m.LinkAnswer, self._own_key(), SMALL_ANSWER, self._timeout
        )
        elapsed = time.monotonic() - started
        if answer.received_bytes != send_bytes or sum(map(len, answer.pad)) != receive_bytes:
            raise RemoteProtocolError("the market lost padding of a link probe")
        return elapsed

    async def claim(
        self,
        offer: m.Offer,
        *,
        numerics: str,
        start_generation: int,
        network: str = "",
        move: MoveId | None = None,
    ) -> m.Lease:
        """Take an offer, or that of a `move`. Raises `Refused` (conflict) if others were faster."""
        taken = (offer.plan, offer.window, offer.precision)
        request = m.ClaimRequest(PROTOCOL_VERSION, *taken, numerics, network, start_generation, move)
        answer = await self._post("/claims", request, m.LeaseGrant)
        claim = await self._check_claim(answer.document)
        self._check_same(claim, answer.id, answer.epoch, answer.plan, answer.window)
        if self.key is not None and claim.device != self.key.public:
            raise RemoteProtocolError("the market answered with another device's claim")
        return m.Lease(
            answer.id,
            answer.plan,
            answer.window,
            answer.slot,
            answer.epoch,
            answer.state,
            answer.precision,
            answer.document,
            answer.expires_in_s,
            answer.loading_deadline_s,
            (await self._known()).relays,
        )

    async def heartbeat(self, beat: m.Heartbeat) -> m.HeartbeatAnswer:
        """Renew all leases at once; the answer has every lease's state and fresh relay tickets."""
        return await self._post("/heartbeat", beat, m.HeartbeatAnswer)

    async def ticket(self, relay: PublicKey, *, start_generation: int) -> SignedDocument:
        """A fresh ticket for one relay, for devices and backbones alike."""
        request = m.TicketRequest(relay, start_generation)
        return (await self._post("/tickets", request, m.TicketAnswer)).ticket

    async def loaded(
        self, lease: bytes, epoch: int, *, numerics: str, quantised_hash: bytes, kept_bytes: int
    ) -> m.LeaseStatus:
        """Say that the window is in memory, ready for a proving call."""
        request = m.LoadedRequest(epoch, numerics, Hash(quantised_hash), kept_bytes)
        return await self._post(f"/leases/{lease.hex()}/loaded", request, m.LeaseStatus)

    async def release(self, lease: bytes, epoch: int, *, reason: str) -> None:
        """Give a lease back at once."""
        await self._post(f"/leases/{lease.hex()}/release", m.ReasonRequest(epoch, reason), m.LeaseStatus)

    async def drain(
        self, lease: bytes, epoch: int, *, reason: str, move: MoveId | None = None
    ) -> m.LeaseStatus:
        """Ask that no new calls come; release the lease when the last is served.

        With `move`, the move that gives it up: `Refused` (conflict) where nobody else covers the window now,
        (busy) where too many moved within the last minute.
        """
        request = m.DrainRequest(epoch, reason, move)
        return await self._post(f"/leases/{lease.hex()}/drain", request, m.LeaseStatus)

    # --- plans

    async def plan(self, plan: PlanId) -> tuple[SignedDocument, Plan]:
        """A plan, its signer a certified backbone of the pinned swarm and its id the one asked for."""
        answer = await self._get(f"/plans/{plan.hex()}", m.Published, limit=LARGE_ANSWER, signed=False)
        signer = await self._backbone_key(answer)
        if plan_id(answer.document) != plan:
            raise RemoteProtocolError("the market answered with another plan than was asked for")
        return answer.document, await asyncio.to_thread(open_plan, answer.document, signer)

    async def plans(self) -> tuple[m.PlanListing, ...]:
        """All plans the market knows, newest first."""
        return (await self._get("/plans", m.PlansAnswer, signed=False)).plans

    async def hashes(self, plan: PlanId, window: Window, *, wait_s: float = 5.0) -> WindowHashes:
        """The chunk hashes of a window. The market waits up to `wait_s` for a backbone to make them, then
        raises `Refused` (not_found).
        """
        target = f"/plans/{plan.hex()}/hashes?window={quote(window.name, safe='')}&wait={wait_s:g}"
        answer = await self._get(
            target, m.Published, limit=LARGE_ANSWER, signed=False, timeout=self._timeout + wait_s
        )
        hashes = open_hashes(answer.document, await self._backbone_key(answer))
        if (hashes.plan, hashes.window) != (plan, window):
            raise RemoteProtocolError("the market answered with the hashes of another window")
        return hashes

    async def _backbone_key(self, answer: m.Published) -> PublicKey:
        root = (await self._known()).root
        certificate = open_certificate(answer.certificate, swarm=root, now=self._clock(), role="backbone")
        return certificate.ed25519

    # --- credit

    async def acknowledge(self, ack: SignedDocument) -> None:
        """Hand in the device's countersignature under a receipt."""
        await self._post("/acknowledgements", m.DocumentRequest(ack), m.Done)

    async def credits(self, address: str | None = None) -> m.CreditStatement:
        """A wallet's balance: that of the device's own wallet, or of any `address`."""
        if address is None:
            return await self._get("/credits", m.CreditStatement)
        return await self._get(f"/credits/{quote(address, safe='')}", m.CreditStatement, signed=False)

    # --- backbone

    async def publish_plan(self, document: SignedDocument) -> PlanId:
        """Publish a plan; the backbone's earlier plans are retired unless another backbone has them."""
        request = m.DocumentRequest(document)
        answer = await self._post("/plans", request, m.PlanAnswer, timeout=max(self._timeout, 60.0))
        return answer.plan

    async def publish_hashes(self, document: SignedDocument) -> None:
        """Publish a window's hashes."""
        await self._post("/hashes", m.DocumentRequest(document), m.Done)

    async def wanted_hashes(self, plan: PlanId) -> tuple[Window, ...]:
        """Windows that are claimed and whose hashes nobody has published yet."""
        answer = await self._get(f"/plans/{plan.hex()}/wanted-hashes", m.WindowsAnswer)
        return answer.windows

    async def report_demand(self, plan: PlanId, rows_per_s: Mapping[str, float]) -> None:
        """Report the rows a second that this backbone routes to each window (by name)."""
        await self._post(f"/plans/{plan.hex()}/demand", m.DemandReport(dict(rows_per_s)), m.Done)

    async def declare_proven(self, lease: bytes, epoch: int, *, d: float) -> m.LeaseStatus:
        """Say that a proving call through the real path came back right, with error measure `d`."""
        return await self._post(f"/leases/{lease.hex()}/proven", m.ProvenRequest(epoch, d), m.LeaseStatus)

    async def revoke(self, lease: bytes, epoch: int, *, reason: str, quarantine_s: float = 0.0) -> None:
        """End a lease for a reason; its wallet claims nothing for `quarantine_s` seconds from now."""
        request = m.RevokeRequest(epoch, reason, min(quarantine_s, MAX_QUARANTINE_S))
        await self._post(f"/leases/{lease.hex()}/revoke", request, m.LeaseStatus)

    # --- trust

    async def report_violation(self, record: bytes, evidence: SignedDocument, *, reason: str) -> None:
        """Put a violation on record (backbones)."""
        await self._post("/violations", m.ViolationReport(RecordId(record), reason, evidence), m.Done)

    async def quarantine(self, record: bytes, wallet: PublicKey, *, reason: str) -> m.QuarantineAnswer:
        """Put a wallet out (backbones): its escrow is void, its claims end, the market says how long."""
        request = m.QuarantineRequest(RecordId(record), wallet, reason)
        return await self._post("/quarantines", request, m.QuarantineAnswer)

    async def trust(self, wallet: PublicKey | None = None) -> m.TrustAnswer:
        """What is on record about a wallet: the device's own, or any for a backbone."""
        target = "/trust" if wallet is None else f"/trust/{address_of(wallet)}"
        return await self._get(target, m.TrustAnswer)

    async def records(self) -> tuple[m.TrustRecord, ...]:
        """The latest violations and quarantines of all wallets (backbones)."""
        return (await self._get("/records", m.DisputesAnswer)).records

    async def record(self, record: bytes) -> tuple[m.TrustRecord, Evidence | None]:
        """One record, and its evidence where the market keeps it, verified against the pinned root."""
        answer = await self._get(f"/records/{record.hex()}", m.RecordAnswer)
        if answer.evidence is None or answer.certificate is None:
            return answer.record, None
        root = (await self._known()).root
        # A certificate that ran out since still says who signed what is on record.
        certificate = open_certificate(answer.certificate, swarm=root, now=answer.record.at, role="backbone")
        return answer.record, open_evidence(answer.evidence, certificate=certificate, root=root)

    async def dispute(self, record: bytes, *, reason: str) -> m.TrustRecord:
        """Object to a record of the device's own wallet; the record that the objection stands at."""
        return await self._post("/disputes", m.DisputeRequest(RecordId(record), reason), m.TrustRecord)

    async def disputes(self) -> tuple[m.TrustRecord, ...]:
        """The disputes, open ones first (backbones)."""
        return (await self._get("/disputes", m.DisputesAnswer)).records

    async def decide(self, record: bytes, *, uphold: bool, reason: str) -> m.TrustRecord:
        """Uphold or overturn a record (backbones)."""
        request = m.DecisionRequest(uphold, reason)
        return await self._post(f"/records/{record.hex()}/decision", request, m.TrustRecord)

    async def post_receipt(self, receipt: SignedDocument) -> None:
        """Post a receipt: it earns. Posting the same one again changes nothing."""
        await self._post("/receipts", m.DocumentRequest(receipt), m.Done)

    async def receipts(self, device: PublicKey) -> SignedDocument | None:
        """The last receipt of this backbone's chain with `device`, to go on from; None for a new chain."""
        answer = await self._get(f"/receipts/{address_of(device)}", m.ReceiptAnswer)
        return answer.receipt

    async def assignments(self, plan: PlanId) -> m.Snapshot:
        """All leases of a plan that have not ended, claims and grants verified.

        One whose grant has run out is left out: it ends soon, and must not hide the others.
        """
        snapshot = await self._get(f"/plans/{plan.hex()}/assignments", m.SnapshotListing, limit=LARGE_ANSWER)
        leases = []
        for number, listing in enumerate(snapshot.leases):
            if number % 16 == 15:
                await asyncio.sleep(0)  # thousands of signatures take a while: let others run
            try:
                leases.append(await self._assignment(listing))
            except IdentityError as error:
                if error.code != "expired":
                    raise
        return m.Snapshot(snapshot.revision, tuple(leases))

    async def watch(self, plan: PlanId, since: int) -> AsyncIterator[m.Change]:
        """Changes after revision `since`, as they happen, without end.

        Raises `ResyncNeeded` at a gap, after 30 s of silence or when the stream ends: take a new snapshot.
        """
        target = f"/plans/{plan.hex()}/watch?since={since}"
        last = since
        try:
            async with self._open("GET", target, b"", self._own_key()) as response:
                if response.status != 200:
                    raise _refusal(await _read(response, SMALL_ANSWER), response.status)
                async for data in _events(response):
                    listing = from_json(m.ChangeListing, _parse(data))
                    if listing.previous != last:
                        raise ResyncNeeded(f"the watch jumped from revision {last} to {listing.revision}")
                    last = listing.revision
                    yield await self._change(listing)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ResyncNeeded(f"the watch on {self.url} broke: {error or type(error).__name__}") from None
        raise ResyncNeeded("the market closed the watch")

    async def _change(self, listing: m.ChangeListing) -> m.Change:
        assignment, ended = None, listing.ended
        if listing.assignment is not None:
            try:
                assignment = await self._assignment(listing.assignment)
            except IdentityError as error:
                if error.code != "expired":
                    raise
                ended = m.EndedListing(listing.assignment.lease, str(error))
        return m.Change(listing.revision, listing.previous, assignment, ended)

    async def _assignment(self, listing: m.AssignmentListing) -> m.Assignment:
        swarm = await self._known()
        claim = await self._check_claim(listing.document)
        self._check_same(claim, listing.lease, listing.epoch, listing.plan, listing.window)
        offered = listing.grant
        grant = open_grant(offered.text, offered.signature, root=swarm.root, now=self._clock())
        if (claim.wallet, claim.device, claim.grant) != (grant.wallet, grant.device, grant.hash):
            raise IdentityError("an assignment's claim and grant are not of one device")
        return m.Assignment(
            lease=listing.lease,
            window=listing.window,
            plan=listing.plan,
            slot=listing.slot,
            epoch=listing.epoch,
            state=listing.state,
            precision=listing.precision,
            numerics=listing.numerics,
            wallet=grant.wallet,
            device=grant.device,
            grant=grant,
            relays=await self._relays_of(claim),
            addresses=listing.addresses,
            document=listing.document,
            expires_in_s=listing.expires_in_s,
            start_generation=listing.start_generation,
            download_bytes=listing.download_bytes,
            kept_bytes=listing.kept_bytes,
            verified_bytes=listing.verified_bytes,
        )

    async def _relays_of(self, claim: ClaimDocument) -> tuple[m.RelayInfo, ...]:
        """The relays that a claim names, its device's first choice first, as far as the market lists them.

        The listing is read again, once in a while, where the claim names one that is not in it.
        """
        named = [key for _, key in claim.relays]
        known = {relay.key: relay for relay in (await self._known()).relays}
        stale = time.monotonic() - self._listed_at >= LISTING_S
        if stale and any(key not in known for key in named):
            known = {relay.key: relay for relay in (await self.swarm()).relays}
        return tuple(known[key] for key in named if key in known)

    async def _check_claim(self, document: SignedDocument) -> ClaimDocument:
        """Verify a claim; the swarm is read again first where the market's key has changed."""
        swarm = await self._known()
        if document.signer != swarm.certificate.ed25519:
            swarm = await self.swarm()
        return open_claim(document, market_key=swarm.certificate.ed25519, root=swarm.root)

    @staticmethod
    def _check_same(claim: ClaimDocument, lease: LeaseId, epoch: int, plan: PlanId, window: Window) -> None:
        if (claim.lease, claim.epoch, claim.plan, claim.window) != (lease, epoch, plan, window):
            raise RemoteProtocolError("a claim document says something else than the answer it came with")

    # --- relay and operator

    async def announce_relay(self, url: str, load: RelayLoad | None = None) -> None:
        """List this relay with the market (every 15 s); the client's key and certificate say who."""
        await self._post("/relays", m.RelayAnnouncement(url, load), m.Done)

    async def gaps(self) -> m.GapsAnswer:
        """Every window of the active plans, scarcest first, and the coverage."""
        return await self._get("/gaps", m.GapsAnswer, limit=LARGE_ANSWER, signed=False)

    async def nodes(self) -> tuple[m.NodeRow, ...]:
        """Every device seen within a day."""
        return (await self._get("/nodes", m.NodesAnswer, limit=LARGE_ANSWER)).nodes

    async def credit_table(self, *, whole: bool = False) -> m.CreditTable:
        """Every wallet's balance, and whether the ledger holds.

        The market checks what is new in it; with `whole` it checks everything again.
        """
        target = "/credit-table?whole=1" if whole else "/credit-table"
        return await self._get(target, m.CreditTable, limit=LARGE_ANSWER, timeout=60.0)

    # --- one exchange

    async def _get(
        self,
        target: str,
        answer: type[T],
        *,
        signed: bool = True,
        limit: int = SMALL_ANSWER,
        timeout: float | None = None,
    ) -> T:
        key = self._own_key() if signed else None
        return await self._exchange("GET", target, b"", answer, key, limit, timeout or self._timeout)

    async def _post(
        self,
        target: str,
        message: object,
        answer: type[T],
        *,
        signed: bool = True,
        key: SigningKey | None = None,
        timeout: float | None = None,
    ) -> T:
        signer = (key or self._own_key()) if signed else None
        body = json.dumps(to_json(message), separators=(",", ":")).encode("utf-8")
        return await self._exchange(
            "POST", target, body, answer, signer, SMALL_ANSWER, timeout or self._timeout
        )

    def _own_key(self) -> SigningKey:
        if self.key is None:
            raise ConfigError("this market client was made without a key, and the request must be signed")
        return self.key

    async def _exchange(
        self,
        method: str,
        target: str,
        body: bytes,
        answer: type[T],
        key: SigningKey | None,
        limit: int,
        timeout: float,
    ) -> T:
        try:
            async with asyncio.timeout(timeout):
                async with self._open(method, target, body, key) as response:
                    data = await _read(response, limit)
                    status = response.status
        except TimeoutError:
            raise Unreachable(f"the market at {self.url} did not answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"the market at {self.url} cannot be reached: {error}") from None
        if status != 200:
            raise _refusal(data, status)
        if len(data) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(lambda: from_json(answer, _parse(data)))
        return from_json(answer, _parse(data))

    def _open(
        self, method: str, target: str, body: bytes, key: SigningKey | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        path = PREFIX + target
        headers = {"Content-Type": "application/json"} if body else {}
        if key is not None:
            certificate = self.certificate if key is self.key else None
            headers |= sign_request(key, method, path, body, now=self._clock(), certificate=certificate)
        return self._http.request(
            method,
            URL(self.url + path, encoded=True),
            data=body or None,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=WATCH_SILENCE_S),
        )


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_chunked(65536):
        size += len(chunk)
        if size > limit:
            raise RemoteProtocolError(f"the market's answer is over {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    parser = SseParser()
    async for chunk in response.content.iter_any():
        for data in parser.receive_data(chunk):
            yield data


def _parse(data: bytes | str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise RemoteProtocolError("the market's answer is not JSON") from None


def _refusal(data: bytes, status: int) -> Refused | Unreachable:
    """The market's typed refusal; or what is in front of it, if that answered instead."""
    try:
        error = from_json(m.ErrorAnswer, _parse(data)).error
    except RemoteProtocolError:
        return Unreachable(f"something that is not a market answered with HTTP status {status}")
    return Refused(error.code, error.message, retry_after_s=error.retry_after_s)

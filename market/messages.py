"""What node, backbone and market say to each other over HTTP: one frozen dataclass a message.

Ids are bytes here and text in JSON (see `market.wire`). Sizes are in bytes, durations in seconds; a
duration counts from the moment the request was sent, so no two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, Literal

from relay.errors import KvasirError
from relay.identity import Certificate, ExchangePublic, PublicKey, SignedDocument
from relay.load import RelayLoad

from .plans import PlanId
from .wallet import Grant
from .windows import Window
from .wire import BackboneId, Hash, LeaseId, MoveId, RecordId

LeaseState = Literal["HELD", "LOADED", "PROVEN", "DRAINING", "ENDED"]
"""HELD: claimed, loading. LOADED: the device says so. PROVEN: a real call gave the right answer.
DRAINING: no new calls. ENDED: released, expired or revoked, with a reason."""

MoveState = Literal["offered", "taken", "moved", "declined", "ignored", "overtaken", "failed"]
"""offered: the device is asked. taken: it has claimed the new window. moved: that one is proven.
declined: the device said no. ignored: it did not answer. overtaken: the move is no longer needed, or its
lease is over. failed: the new window was not proven; what the device held before it may have kept or not."""

MAX_REASON: Final = 500
"""Characters of a reason that are kept."""

CREDIT_BYTES: Final = 1_000_000
"""One credit is a million carried bytes."""


class ResyncNeeded(KvasirError):  # noqa: N818 - tells the caller what to do
    """A watch lost its place (gap, silence, or a closed stream): take a new snapshot and watch on."""

    code = "conflict"


# --- the swarm -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RelayListing:
    """A relay as the market lists it. `url` may be relative to the market's own URL.

    `load` is what the relay said of itself with its last heartbeat; `rtt_s` the median of the round trips
    that `seen_by` devices reported lately.
    """

    url: str
    certificate: SignedDocument
    load: RelayLoad | None = None
    rtt_s: float | None = None
    seen_by: int = 0


@dataclass(frozen=True, slots=True)
class SwarmListing:
    """Which swarm this is, who its market is, and where its relays are. `time` is Unix seconds."""

    v: int
    swarm: PublicKey
    certificate: SignedDocument
    relays: tuple[RelayListing, ...]
    public_urls: tuple[str, ...]
    time: float


@dataclass(frozen=True, slots=True)
class RelayInfo:
    """A relay, its certificate verified: absolute `url`, Ed25519 `key`; the rest as in `RelayListing`."""

    url: str
    key: PublicKey
    certificate: Certificate
    load: RelayLoad | None = None
    rtt_s: float | None = None
    seen_by: int = 0


@dataclass(frozen=True, slots=True)
class SwarmInfo:
    """A verified `SwarmListing`: `certificate` is the market's."""

    root: PublicKey
    certificate: Certificate
    relays: tuple[RelayInfo, ...]
    public_urls: tuple[str, ...]
    time: float


# --- the wallet proof ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChallengeRequest:
    """Asks for a text to sign. `url` is the market's URL as the client dialled it."""

    v: int
    url: str
    wallet: PublicKey
    device: PublicKey
    exchange: ExchangePublic
    scope: str
    lifetime_s: int


@dataclass(frozen=True, slots=True)
class ChallengeOffer:
    """The exact text to sign, good for 300 s."""

    text: str


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """The signed text. The request itself is signed by the device key that the text names."""

    v: int
    text: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class GrantAnswer:
    """The grant's hash: the SHA-256 of its text."""

    grant: Hash


# --- what is needed, and who takes it -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a device can do.

    `budget_bytes` is all it gives to expert weights; the market itself takes off what its leases keep.
    `precisions` are in its order of preference; `numerics` names its numerics class at each; `formulas`
    are the gate formulas it executes (empty: not said); `network` is a name that devices behind one
    connection share. `start_generation`, where given, ends the leases of the device's earlier starts.
    `cached` lists windows whose bytes it has already: the market prefers them among equals. `moves`: whether
    it understands a `MoveOffer`.
    """

    budget_bytes: int
    precisions: tuple[str, ...]
    wire_dtypes: tuple[str, ...]
    numerics: Mapping[str, str]
    network: str
    formulas: tuple[str, ...]
    start_generation: int = 0
    cached: tuple[tuple[PlanId, Window], ...] = ()
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A window that is needed and fits: `kept_bytes` in memory at `precision`, `download_bytes` to fetch."""

    plan: PlanId
    window: Window
    precision: str
    kept_bytes: int
    download_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class VolunteerAnswer:
    """The scarcest windows that fit, scarcest first; or none, and `message` says why.

    Ask again after `retry_after_s`. `wanted_bytes` is what all the windows that are scarce and that this
    wallet may take would keep, by precision (those that every one of them allows): a device chooses its
    precision by it. `move` is the move that the device is asked to make, as in the answer to a heartbeat.
    """

    offers: tuple[Offer, ...]
    message: str
    retry_after_s: float
    wanted_bytes: Mapping[str, int] = field(default_factory=dict)
    move: MoveOffer | None = None


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Takes an offer. `numerics` is the device's numerics class at that precision; `move` names the move that
    the claim is part of, if it is.
    """

    v: int
    plan: PlanId
    window: Window
    precision: str
    numerics: str
    network: str
    start_generation: int
    move: MoveId | None = None


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The market's answer to a claim: the signed claim `document` says the same."""

    id: LeaseId
    plan: PlanId
    window: Window
    slot: int
    epoch: int
    state: LeaseState
    precision: str
    document: SignedDocument
    expires_in_s: float
    loading_deadline_s: float


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its device holds it; `document` is verified. Durations count from the claim's sending."""

    id: LeaseId
    plan: PlanId
    window: Window
    slot: int
    epoch: int
    state: LeaseState
    precision: str
    document: SignedDocument
    expires_in_s: float
    loading_deadline_s: float
    relays: tuple[RelayInfo, ...]


@dataclass(frozen=True, slots=True)
class LeaseBeat:
    """One lease in a heartbeat: how many of its bytes are fetched and verified."""

    lease: LeaseId
    epoch: int
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class RelayReading:
    """A relay as a device sees it: its round trip in seconds, and whether the device is connected to it."""

    relay: PublicKey
    rtt_s: float | None = None
    used: bool = False


@dataclass(frozen=True, slots=True)
class MoveOffer:
    """Asks a device to give `lease` up for a window that is needed more. Only `move` in its claim takes it.

    What is not taken within `within_s` is off.
    """

    id: MoveId
    lease: LeaseId
    offer: Offer
    within_s: float


@dataclass(frozen=True, slots=True)
class DeclinedMove:
    """A device does not take a move, and says why."""

    move: MoveId
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renews all leases of a device. `addresses` are URLs at which it may be dialled directly, `relays` the
    relays it has looked at, those it uses first and in its order, `declined` the moves that it does not take.
    """

    start_generation: int
    leases: tuple[LeaseBeat, ...] = ()
    addresses: tuple[str, ...] = ()
    relays: tuple[RelayReading, ...] = ()
    declined: tuple[DeclinedMove, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A lease as the market sees it. `reason` says why it is draining or ended."""

    id: LeaseId
    epoch: int
    state: LeaseState
    expires_in_s: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The state of each lease named, fresh relay tickets, what the owner should know, and the move that the
    device is asked to make, if any.
    """

    leases: tuple[LeaseStatus, ...]
    tickets: tuple[SignedDocument, ...]
    notices: tuple[str, ...]
    move: MoveOffer | None = None


@dataclass(frozen=True, slots=True)
class TicketRequest:
    """Asks for a ticket to one relay."""

    relay: PublicKey
    start_generation: int


@dataclass(frozen=True, slots=True)
class TicketAnswer:
    """A relay ticket."""

    ticket: SignedDocument


@dataclass(frozen=True, slots=True)
class LoadedRequest:
    """The window is in memory: how it was quantised (hash of the result) and what it takes."""

    epoch: int
    numerics: str
    quantised_hash: Hash
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class ReasonRequest:
    """Ends a lease, saying why."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Drains a lease, saying why. With `move`, the move that gives the lease up, it is refused where no other
    live, proven replica covers the window (conflict), or too many moved within the last minute (busy).
    """

    epoch: int
    reason: str
    move: MoveId | None = None


@dataclass(frozen=True, slots=True)
class RevokeRequest:
    """Ends a lease at a backbone's word; its wallet claims nothing for `quarantine_s` seconds from now."""

    epoch: int
    reason: str
    quarantine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProvenRequest:
    """A proving call came back right; `d` is its error measure (see the audit)."""

    epoch: int
    d: float


# --- the link --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """Carries `pad`, and asks for as many characters back as `answer_bytes` (1 MB at most)."""

    pad: tuple[str, ...]
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class LinkAnswer:
    """How many characters of padding arrived, and the padding asked for."""

    received_bytes: int
    pad: tuple[str, ...]


# --- plans -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """A document and the certificate of the backbone that signed it."""

    document: SignedDocument
    certificate: SignedDocument


@dataclass(frozen=True, slots=True)
class DocumentRequest:
    """Carries one signed document."""

    document: SignedDocument


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The id under which a plan is known."""

    plan: PlanId


@dataclass(frozen=True, slots=True)
class PlanListing:
    """One plan the market knows."""

    plan: PlanId
    model: str
    revision: str
    state: Literal["active", "retired"]
    windows: int


@dataclass(frozen=True, slots=True)
class PlansAnswer:
    """All plans, newest first."""

    plans: tuple[PlanListing, ...]


@dataclass(frozen=True, slots=True)
class WindowsAnswer:
    """Windows of a plan."""

    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class DemandReport:
    """Rows a second that one backbone routes to each window (by name), measured by it."""

    rows_per_s: Mapping[str, float]


# --- assignments -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AssignmentListing:
    """A lease as backbones follow it."""

    lease: LeaseId
    plan: PlanId
    window: Window
    slot: int
    epoch: int
    state: LeaseState
    precision: str
    numerics: str
    grant: Grant
    addresses: tuple[str, ...]
    document: SignedDocument
    expires_in_s: float
    start_generation: int
    download_bytes: int = 0
    kept_bytes: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """An `AssignmentListing` whose claim document and grant are verified; names the device's wallet too."""

    lease: LeaseId
    window: Window
    plan: PlanId
    slot: int
    epoch: int
    state: LeaseState
    precision: str
    numerics: str
    wallet: PublicKey
    device: PublicKey
    grant: Grant
    relays: tuple[RelayInfo, ...]
    addresses: tuple[str, ...]
    document: SignedDocument
    expires_in_s: float
    start_generation: int
    download_bytes: int = 0
    kept_bytes: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndedListing:
    """A lease that ended, and why."""

    lease: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotListing:
    """All leases of a plan that have not ended, at one revision."""

    revision: int
    leases: tuple[AssignmentListing, ...]


@dataclass(frozen=True, slots=True)
class ChangeListing:
    """One change: revision `previous` led to `revision`; either an assignment or an end."""

    revision: int
    previous: int
    assignment: AssignmentListing | None = None
    ended: EndedListing | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A verified `SnapshotListing`."""

    revision: int
    leases: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A verified `ChangeListing`: exactly one of `assignment` and `ended` is set."""

    revision: int
    previous: int
    assignment: Assignment | None = None
    ended: EndedListing | None = None


# --- credit ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreditStatement:
    """A wallet's balance, in whole carried bytes.

    `escrow` may still be voided, `available` may be spent, `void` was taken back. `receipts` counts the
    posted receipts, `unacknowledged` the bytes that no device has countersigned yet.
    """

    wallet: PublicKey
    escrow: int
    available: int
    void: int
    unacknowledged: int
    receipts: int
    calls: int

    @property
    def credit(self) -> Decimal:
        """Escrow and available, in credits of a million bytes."""
        return credits_of(self.escrow + self.available)


@dataclass(frozen=True, slots=True)
class ReceiptAnswer:
    """The last receipt of a chain, or null if the chain has none, with its backbone's certificate."""

    receipt: SignedDocument | None = None
    certificate: SignedDocument | None = None
    acknowledged: bool = False


# --- trust -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """One thing on record about a wallet. Times in Unix seconds, amounts in carried bytes.

    A violation has its figures (`d` against `limit`) and the quarantine that it led to; a quarantine its
    `number`, its end, and what it took (`amount`); a release what it gave. `dispute` is the owner's
    objection, `decision` the operator's word on it. `evidence`: whether the signed evidence is kept.
    """

    id: RecordId
    wallet: PublicKey
    kind: Literal["violation", "quarantine", "release"]
    at: float
    reason: str
    backbone: BackboneId | None = None
    device: PublicKey | None = None
    window: str | None = None
    layer: int | None = None
    expert: int | None = None
    call: int | None = None
    d: float | None = None
    limit: float | None = None
    numerics: str | None = None
    precision: str | None = None
    evidence: bool = False
    quarantine: RecordId | None = None
    number: int = 0
    until: float | None = None
    for_good: bool = False
    amount: int = 0
    disputed_at: float | None = None
    dispute: str | None = None
    decided_at: float | None = None
    decision: str | None = None
    decision_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ViolationReport:
    """An audited output was off: `evidence` is signed by the backbone (`market.evidence`)."""

    id: RecordId
    reason: str
    evidence: SignedDocument


@dataclass(frozen=True, slots=True)
class QuarantineRequest:
    """Puts a wallet out. `id` is drawn by the backbone, so that sending it again changes nothing."""

    id: RecordId
    wallet: PublicKey
    reason: str


@dataclass(frozen=True, slots=True)
class QuarantineAnswer:
    """The wallet's quarantine: its number, how long it lasts yet, the escrow that went void."""

    id: RecordId
    number: int
    left_s: float
    for_good: bool
    void: int


@dataclass(frozen=True, slots=True)
class TrustAnswer:
    """What is on record about a wallet, the latest first.

    `quarantines` counts those that stand; `release_in_calls` is after how many more accepted calls the next
    of its escrow is released (null: none waits). `escrow`, `available`, `void`: its balance in carried bytes.
    """

    wallet: PublicKey
    calls: int
    quarantines: int
    quarantine_left_s: float
    for_good: bool
    release_in_calls: int | None
    records: tuple[TrustRecord, ...]
    escrow: int = 0
    available: int = 0
    void: int = 0


@dataclass(frozen=True, slots=True)
class RecordAnswer:
    """One record, its evidence where it is kept, and the certificate of the backbone that signed that."""

    record: TrustRecord
    evidence: SignedDocument | None = None
    certificate: SignedDocument | None = None


@dataclass(frozen=True, slots=True)
class DisputeRequest:
    """An owner objects to a record."""

    record: RecordId
    reason: str


@dataclass(frozen=True, slots=True)
class DisputesAnswer:
    """Records for the operator."""

    records: tuple[TrustRecord, ...]


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """The operator upholds or overturns a record, and says why."""

    uphold: bool
    reason: str


def credits_of(carried_bytes: int) -> Decimal:
    """Whole bytes in credits, exactly."""
    return Decimal(carried_bytes) / CREDIT_BYTES


# --- for the operator ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """One window: its target, its supply by state, the demand, and why it is scarce or not."""

    plan: PlanId
    window: Window
    target: int
    proven: int
    loading: int
    demand_rows_per_s: float
    scarcity: float
    reason: str


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One move of a replica from window `leaves` to window `takes`, offered `age_s` ago.

    `reason` says why it was offered, and for one that has ended otherwise than `moved` why it did.
    """

    plan: PlanId
    leaves: Window
    to_plan: PlanId
    takes: Window
    state: MoveState
    reason: str
    age_s: float


@dataclass(frozen=True, slots=True)
class GapsAnswer:
    """All windows of the active plans, scarcest first. `coverage` is the share with a proven replica.

    `moves` are the moves of the last hour, the latest first, 100 at most.
    """

    coverage: float
    gaps: tuple[Gap, ...]
    moves: tuple[MoveRow, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLease:
    """One lease of a device, in short."""

    lease: LeaseId
    plan: PlanId
    window: Window
    state: LeaseState
    epoch: int
    precision: str
    download_bytes: int
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One device: whose it is, what it holds, and its last ended lease's reason."""

    device: PublicKey
    wallet: PublicKey
    network: str
    budget_bytes: int
    addresses: tuple[str, ...]
    seen_s_ago: float
    leases: tuple[NodeLease, ...]
    last_reason: str | None = None
    relays: tuple[RelayReading, ...] = ()


@dataclass(frozen=True, slots=True)
class NodesAnswer:
    """All devices seen within a day, the latest first."""

    nodes: tuple[NodeRow, ...]


@dataclass(frozen=True, slots=True)
class CreditTable:
    """Every wallet's balance, and whether the whole ledger adds up and its hash chain holds."""

    balanced: bool
    issued: int
    entries: int
    wallets: tuple[CreditStatement, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class RelayAnnouncement:
    """A relay says where and how busy it is; the request carries its certificate."""

    url: str
    load: RelayLoad | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """It is done."""

    done: bool = True


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the market answers from its store. `outcome` is "ok" or says what is wrong."""

    outcome: str
    version: str
    leases: int
    plans: int


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """A typed refusal."""

    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What every refusal carries."""

    error: ErrorBody

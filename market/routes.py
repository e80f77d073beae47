"""The market's HTTP routes, each described once: the server serves them, `market.openapi` documents them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from . import messages as m

PREFIX: Final = "/market/v1"
SMALL_BODY: Final = 256 * 1024
LARGE_BODY: Final = 96 * 1024 * 1024
LINK_BODY: Final = 1_040_000

Who = Literal["anyone", "device", "signed", "backbone", "relay"]
"""Who may ask: anyone; a device's key; a device or a backbone; a certified backbone; a certified relay."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `name` is the method of `market.server.Market` that serves it; `body` and `answer` are
    messages (`answer` None: the handler writes its own stream). `query` maps parameters to descriptions.
    """

    method: Literal["GET", "POST"]
    path: str
    name: str
    who: Who
    summary: str
    answer: type | None
    body: type | None = None
    query: tuple[tuple[str, str], ...] = ()
    max_body: int = SMALL_BODY


ROUTES: Final[tuple[Route, ...]] = (
    Route(
        "GET", "/swarm", "swarm", "anyone", "Which swarm this is, and where its relays are", m.SwarmListing
    ),
    Route("GET", "/health", "health", "anyone", "Whether the market answers from its store", m.Health),
    Route(
        "POST", "/challenges", "challenge", "anyone", "A sign-in text", m.ChallengeOffer, m.ChallengeRequest
    ),
    Route("POST", "/grants", "grant", "device", "Hand in the signed text", m.GrantAnswer, m.GrantRequest),
    Route("POST", "/volunteer", "volunteer", "device", "What is needed most", m.VolunteerAnswer, m.Abilities),
    Route("POST", "/claims", "claim", "device", "Take a window", m.LeaseGrant, m.ClaimRequest),
    Route("POST", "/heartbeat", "heartbeat", "device", "Renew all leases", m.HeartbeatAnswer, m.Heartbeat),
    Route(
        "POST",
        "/link",
        "link",
        "device",
        "Carry padding to and fro, to measure the link",
        m.LinkAnswer,
        m.LinkProbe,
        max_body=LINK_BODY,
    ),
    Route("POST", "/tickets", "ticket", "signed", "A ticket for a relay", m.TicketAnswer, m.TicketRequest),
    Route(
        "POST", "/leases/{lease}/loaded", "loaded", "device", "It is loaded", m.LeaseStatus, m.LoadedRequest
    ),
    Route(
        "POST",
        "/leases/{lease}/drain",
        "drain",
        "device",
        "No new calls, please",
        m.LeaseStatus,
        m.DrainRequest,
    ),
    Route(
        "POST",
        "/leases/{lease}/release",
        "release",
        "device",
        "Give a lease back",
        m.LeaseStatus,
        m.ReasonRequest,
    ),
    Route(
        "POST",
        "/leases/{lease}/proven",
        "proven",
        "backbone",
        "A proving call was right",
        m.LeaseStatus,
        m.ProvenRequest,
    ),
    Route(
        "POST",
        "/leases/{lease}/revoke",
        "revoke",
        "backbone",
        "End a lease for a reason, and keep its wallet out for a time",
        m.LeaseStatus,
        m.RevokeRequest,
    ),
    Route("GET", "/plans", "plans", "anyone", "All plans, newest first", m.PlansAnswer),
    Route(
        "POST",
        "/plans",
        "publish_plan",
        "backbone",
        "Publish a plan",
        m.PlanAnswer,
        m.DocumentRequest,
        max_body=LARGE_BODY,
    ),
    Route("GET", "/plans/{plan}", "plan", "anyone", "A signed plan", m.Published),
    Route(
        "GET",
        "/plans/{plan}/hashes",
        "hashes",
        "anyone",
        "The signed chunk hashes of a window",
        m.Published,
        query=(("window", "the window's name"), ("wait", "seconds to wait until they are made (10 at most)")),
    ),
    Route(
        "POST",
        "/hashes",
        "publish_hashes",
        "backbone",
        "Publish a window's hashes",
        m.Done,
        m.DocumentRequest,
        max_body=LARGE_BODY,
    ),
    Route(
        "GET",
        "/plans/{plan}/wanted-hashes",
        "wanted_hashes",
        "backbone",
        "Claimed windows without hashes",
        m.WindowsAnswer,
    ),
    Route(
        "POST",
        "/plans/{plan}/demand",
        "demand",
        "backbone",
        "Rows a second by window",
        m.Done,
        m.DemandReport,
        max_body=16 * 1024 * 1024,
    ),
    Route(
        "GET",
        "/plans/{plan}/assignments",
        "assignments",
        "backbone",
        "All leases of a plan, at one revision",
        m.SnapshotListing,
    ),
    Route(
        "GET",
        "/plans/{plan}/watch",
        "watch",
        "backbone",
        "Changes as they happen: server-sent events, each a ChangeListing",
        None,
        query=(("since", "the revision to follow on from"),),
    ),
    Route(
        "POST",
        "/receipts",
        "post_receipt",
        "backbone",
        "Post a receipt",
        m.Done,
        m.DocumentRequest,
        max_body=4 * 1024 * 1024,
    ),
    Route(
        "GET",
        "/receipts/{device}",
        "receipt",
        "backbone",
        "The last receipt of the asking backbone's chain with a device",
        m.ReceiptAnswer,
    ),
    Route(
        "POST",
        "/acknowledgements",
        "acknowledge",
        "device",
        "Countersign a receipt",
        m.Done,
        m.DocumentRequest,
    ),
    Route("GET", "/credits", "own_credits", "device", "The asking device's wallet", m.CreditStatement),
    Route("GET", "/credits/{wallet}", "credits", "anyone", "Any wallet's balance", m.CreditStatement),
    Route(
        "GET",
        "/credit-table",
        "credit_table",
        "backbone",
        "Every balance, checked",
        m.CreditTable,
        query=(("whole", "1: check the ledger from its first entry on, not what is new alone"),),
    ),
    Route(
        "POST",
        "/violations",
        "report_violation",
        "backbone",
        "Put a violation and its evidence on record",
        m.Done,
        m.ViolationReport,
        max_body=1024 * 1024,
    ),
    Route(
        "POST",
        "/quarantines",
        "quarantine",
        "backbone",
        "Put a wallet out: its escrow is void, its claims end",
        m.QuarantineAnswer,
        m.QuarantineRequest,
    ),
    Route("GET", "/trust", "own_trust", "device", "What is on record about its wallet", m.TrustAnswer),
    Route("GET", "/trust/{wallet}", "trust", "backbone", "What is on record about any wallet", m.TrustAnswer),
    Route("GET", "/records", "records", "backbone", "The latest records of all wallets", m.DisputesAnswer),
    Route(
        "GET",
        "/records/{record}",
        "record",
        "signed",
        "One record of its wallet, or any for a backbone, with its evidence",
        m.RecordAnswer,
    ),
    Route("POST", "/disputes", "dispute", "device", "Object to a record", m.TrustRecord, m.DisputeRequest),
    Route("GET", "/disputes", "disputes", "backbone", "The disputes, open ones first", m.DisputesAnswer),
    Route(
        "POST",
        "/records/{record}/decision",
        "decide",
        "backbone",
        "Uphold or overturn a record",
        m.TrustRecord,
        m.DecisionRequest,
    ),
    Route("GET", "/gaps", "gaps", "anyone", "Every window's target and supply", m.GapsAnswer),
    Route("GET", "/nodes", "nodes", "backbone", "Every device and what it holds", m.NodesAnswer),
    Route("POST", "/relays", "announce_relay", "relay", "List a relay", m.Done, m.RelayAnnouncement),
)
"""Every route below `PREFIX`. `/openapi.json` and `/metrics` stand beside them."""

"""The life of a claim: a lease on one replica of one window, fenced by an epoch.

    HELD ----> LOADED ----> PROVEN
      \\           \\           \\
       `-----------`-----------`--> DRAINING --> ENDED

HELD and LOADED may end without draining; every end has a reason that the device is told. A lease lives for
`ttl_s` from each renewal, and a HELD one must be loaded by its deadline, which only verified bytes extend.

Pure: decisions over frozen facts, time as an argument. Also the claim document, which says in the market's
name who holds what, so that backbones and devices need not ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from relay.errors import ConfigError, Refused, RemoteProtocolError
from relay.identity import (
    PublicKey,
    SignedDocument,
    SigningKey,
    check_public_key,
    open_document,
    require,
    sign_document,
)

from .messages import LeaseState
from .plans import PRECISIONS, PlanId
from .windows import Window
from .wire import Hash, LeaseId

NEXT: Final[dict[LeaseState, frozenset[LeaseState]]] = {
    "HELD": frozenset({"LOADED", "DRAINING", "ENDED"}),
    "LOADED": frozenset({"PROVEN", "DRAINING", "ENDED"}),
    "PROVEN": frozenset({"DRAINING", "ENDED"}),
    "DRAINING": frozenset({"ENDED"}),
    "ENDED": frozenset(),
}
"""The transition table."""

LOADING_BASE_S: Final = 60.0
DEFAULT_RATE: Final = 1_000_000.0
"""Bytes a second assumed of a device whose rate is not measured yet."""

REVOKED_REST_S: Final = 60.0
"""A wallet whose lease was revoked is not offered that window again for so long."""

SLOWEST_RATE: Final = 50_000.0
"""However slowly bytes arrive, a window must be loaded within `LOADING_BASE_S` + 2 x bytes / this."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """The durations, in seconds: a lease's life after a renewal, a proof's and a drain's time."""

    ttl_s: float = 60.0
    proving_s: float = 120.0
    draining_s: float = 60.0


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """What decides a lease's fate. Times are the database's, in Unix seconds.

    `deadline` is when a HELD lease must be LOADED, a LOADED one counts as supply no longer, and a DRAINING
    one ends; None for a PROVEN one. `size` is the window's bytes to fetch, `verified` those fetched.
    """

    state: LeaseState
    epoch: int
    claimed_at: float
    expires_at: float
    deadline: float | None
    size: int
    verified: int = 0


def check_epoch(lease: LeaseFacts, epoch: int) -> None:
    """Refuse whoever speaks of an epoch that is not the lease's."""
    if epoch != lease.epoch:
        raise Refused("stale_epoch", f"the lease is at epoch {lease.epoch}, not {epoch}: it was given anew")


def move(lease: LeaseFacts, state: LeaseState, *, now: float, rules: LeaseRules) -> LeaseFacts:
    """The lease in its next `state`. Raises `Refused` (conflict) if the table has no such step."""
    if state not in NEXT[lease.state]:
        raise Refused("conflict", f"a lease that is {lease.state} cannot become {state}")
    deadline = {"LOADED": now + rules.proving_s, "DRAINING": now + rules.draining_s}.get(state)
    return replace(lease, state=state, deadline=deadline)


def new_lease(*, epoch: int, size: int, now: float, rate: float | None, rules: LeaseRules) -> LeaseFacts:
    """A lease just claimed. `rate` is the device's measured bytes a second, or None."""
    deadline = now + loading_time(size, rate)
    return LeaseFacts("HELD", epoch, now, now + rules.ttl_s, deadline, size)


def loading_time(size: int, rate: float | None) -> float:
    """Seconds to load `size` bytes: 60 + 2 x bytes / rate."""
    return LOADING_BASE_S + 2 * size / max(rate or DEFAULT_RATE, SLOWEST_RATE)


def renew(lease: LeaseFacts, *, verified: int, now: float, rules: LeaseRules) -> LeaseFacts:
    """The lease after a heartbeat that reports `verified` bytes.

    A rise in verified bytes moves a HELD lease's deadline to a minute from now at least, up to the bound
    that `SLOWEST_RATE` sets; nothing else moves it.
    """
    verified = min(verified, lease.size)
    deadline = lease.deadline
    if lease.state == "HELD" and deadline is not None and verified > lease.verified:
        bound = lease.claimed_at + loading_time(lease.size, SLOWEST_RATE)
        deadline = max(deadline, min(now + LOADING_BASE_S, bound))
    return replace(
        lease,
        verified=max(lease.verified, verified),
        deadline=deadline,
        expires_at=max(lease.expires_at, now + rules.ttl_s),
    )


def why_over(lease: LeaseFacts, *, now: float) -> str | None:
    """Why this lease must end now, or None. A LOADED one whose proof is late stays, but is no supply."""
    if lease.state == "ENDED":
        return None
    if now > lease.expires_at:
        return "expired: the device's heartbeat stopped"
    if lease.deadline is None or now <= lease.deadline:
        return None
    if lease.state == "HELD":
        return (
            f"expired: not loaded in time ({lease.verified} of {lease.size} bytes verified within "
            f"{lease.deadline - lease.claimed_at:.0f} s)"
        )
    return "drained" if lease.state == "DRAINING" else None


def counts_as_supply(lease: LeaseFacts, *, now: float) -> bool:
    """Whether the lease is a replica, now or soon: PROVEN, or loading within its deadline."""
    if lease.state == "PROVEN":
        return True
    return lease.state in ("HELD", "LOADED") and lease.deadline is not None and now <= lease.deadline


# --- the claim document ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimDocument:
    """What the market signs for a claim: who may serve which window, under which epoch.

    `grant` is the grant's hash, `relays` the relays' URLs and keys, `issued_at` in Unix seconds.
    """

    swarm: PublicKey
    lease: LeaseId
    window: Window
    slot: int
    epoch: int
    grant: Hash
    wallet: PublicKey
    device: PublicKey
    relays: tuple[tuple[str, PublicKey], ...]
    plan: PlanId
    precision: str
    issued_at: int
    document: SignedDocument | None = field(default=None, repr=False, compare=False)


def sign_claim(claim: ClaimDocument, key: SigningKey) -> SignedDocument:
    """Sign a claim with the market's operating key, as kind "claim"."""
    fields = {
        "swarm": claim.swarm,
        "lease": claim.lease,
        "window": claim.window.name,
        "slot": claim.slot,
        "epoch": claim.epoch,
        "grant": claim.grant,
        "wallet": claim.wallet,
        "device": claim.device,
        "relays": [[url, relay] for url, relay in claim.relays],
        "plan": claim.plan,
        "precision": claim.precision,
        "issued_at": claim.issued_at,
    }
    return sign_document("claim", fields, key)


def open_claim(document: SignedDocument, *, market_key: bytes, root: bytes) -> ClaimDocument:
    """Verify a claim document. Raises as `open_document` does, and `Refused` (wrong_swarm)."""
    fields = open_document(document, "claim", market_key)
    if fields.get("swarm") != root:
        raise Refused("wrong_swarm", "the claim is for another swarm")
    precision = require(fields, "precision", str)
    slot, epoch = require(fields, "slot", int), require(fields, "epoch", int)
    if precision not in PRECISIONS or slot < 0 or epoch < 1:
        raise RemoteProtocolError("the claim's precision, slot or epoch is out of range")
    try:
        window = Window.parse(require(fields, "window", str))
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None
    return ClaimDocument(
        swarm=PublicKey(fields["swarm"]),
        lease=LeaseId(require(fields, "lease", bytes, size=16)),
        window=window,
        slot=slot,
        epoch=epoch,
        grant=Hash(require(fields, "grant", bytes, size=32)),
        wallet=check_public_key(require(fields, "wallet", bytes, size=32)),
        device=check_public_key(require(fields, "device", bytes, size=32)),
        relays=_relays(require(fields, "relays", list)),
        plan=PlanId(require(fields, "plan", bytes, size=32)),
        precision=precision,
        issued_at=require(fields, "issued_at", int),
        document=document,
    )


def _relays(items: list[Any]) -> tuple[tuple[str, PublicKey], ...]:
    relays = []
    for item in items:
        match item:
            case [str(url), bytes(key)] if len(url) <= 512 and len(key) == 32:
                relays.append((url, PublicKey(key)))
            case _:
                raise RemoteProtocolError("a relay of the claim is not a URL and a key")
    return tuple(relays)


def as_state(text: str) -> LeaseState:
    """A state read from the store."""
    assert text in NEXT, text
    return text

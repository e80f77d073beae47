"""Tickets: what the market signs so that one key may use one relay for two minutes.

A ticket names its subject, so a copy opens nothing: the relay asks its holder to sign a fresh nonce.
Knows formats and rules; no sockets and no clock (time is an argument, Unix seconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .errors import IdentityError, RemoteProtocolError
from .identity import (
    PublicKey,
    SignedDocument,
    SigningKey,
    address_of,
    check_public_key,
    open_document,
    pre_authentication,
    require,
    sign_document,
    unpack_canonical,
    verify,
)

TICKET_LIFETIME_S: Final = 120
"""A ticket lives two minutes; the market's heartbeat answer renews it."""

UNREACHABLE_GRACE_S: Final = 3600
"""How much longer a relay honours a ticket while it cannot reach the market."""

PeerRole = Literal["device", "backbone"]
PEER_ROLES: Final[tuple[PeerRole, ...]] = ("device", "backbone")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One key's right to use one relay.

    `start_generation` rises each time the subject's daemon starts and settles duplicates.
    """

    subject: PublicKey
    role: PeerRole
    relay: PublicKey
    start_generation: int
    issued_at: int
    expires_at: int
    document: SignedDocument = field(repr=False, compare=False)


def issue_ticket(
    key: SigningKey,
    *,
    subject: PublicKey,
    role: PeerRole,
    relay: PublicKey,
    start_generation: int,
    now: float,
    lifetime_s: int = TICKET_LIFETIME_S,
) -> SignedDocument:
    """Sign a ticket with the market's operating `key`."""
    assert role in PEER_ROLES
    assert 0 <= start_generation < 1 << 64
    assert 0 < lifetime_s <= TICKET_LIFETIME_S
    return sign_document(
        "ticket",
        {
            "subject": subject,
            "role": role,
            "relay": relay,
            "start_generation": start_generation,
            "issued_at": int(now),
            "expires_at": int(now) + lifetime_s,
        },
        key,
    )


def open_ticket(
    document: SignedDocument,
    *,
    market_key: bytes,
    relay_key: bytes,
    now: float,
    grace_s: float = 0.0,
    skew_s: float = 60.0,
) -> Ticket:
    """Verify a ticket: signed by the market, for this relay, within its time plus `grace_s`.

    Raises `IdentityError` (code "expired" for a ticket out of time) and `RemoteProtocolError`.
    """
    ticket = _ticket(open_document(document, "ticket", market_key), document)
    check_public_key(ticket.subject)
    if ticket.relay != relay_key:
        raise IdentityError(f"the ticket is for relay {address_of(ticket.relay)}, not for this one")
    if not 0 < ticket.expires_at - ticket.issued_at <= TICKET_LIFETIME_S:
        raise IdentityError(f"a ticket lives {TICKET_LIFETIME_S} s at most")
    if now > ticket.expires_at + grace_s:
        raise IdentityError("the ticket has expired: get a new one from the market", code="expired")
    if now + skew_s < ticket.issued_at:
        raise IdentityError("the ticket is not valid yet: check both clocks", code="expired")
    return ticket


def read_ticket(document: SignedDocument) -> Ticket:
    """What a ticket says, not verified: for its holder, who cannot forge it to anybody's harm.

    Raises `RemoteProtocolError`.
    """
    fields = unpack_canonical(document.body, max_bytes=4096)
    if document.kind != "ticket" or not isinstance(fields, dict):
        raise RemoteProtocolError("not a ticket")
    return _ticket(fields, document)


def auth_message(nonce: bytes, relay_key: bytes, ticket: SignedDocument) -> bytes:
    """What a ticket's subject signs for one connection to one relay: nonce, relay key, ticket digest."""
    return pre_authentication("relay-auth", nonce + relay_key + ticket.digest)


def welcome_message(nonce: bytes, auth_signature: bytes) -> bytes:
    """What the relay signs in return, so that the peer knows it dialled the relay it meant."""
    return pre_authentication("relay-welcome", nonce + auth_signature)


def check_auth(ticket: Ticket, *, nonce: bytes, relay_key: bytes, generation: int, signature: bytes) -> None:
    """Check that whoever presents `ticket` holds its key. Raises `IdentityError`."""
    if generation != ticket.start_generation:
        raise IdentityError("the start generation is not the ticket's")
    verify(ticket.subject, signature, auth_message(nonce, relay_key, ticket.document))


def _ticket(fields: dict[str, Any], document: SignedDocument) -> Ticket:
    role = require(fields, "role", str)
    generation = require(fields, "start_generation", int)
    if role not in PEER_ROLES or not 0 <= generation < 1 << 64:
        raise RemoteProtocolError("the ticket's role or start generation is out of range")
    return Ticket(
        subject=PublicKey(require(fields, "subject", bytes, size=32)),
        role=role,
        relay=PublicKey(require(fields, "relay", bytes, size=32)),
        start_generation=generation,
        issued_at=require(fields, "issued_at", int),
        expires_at=require(fields, "expires_at", int),
        document=document,
    )

"""Who may speak to the market: challenges, grants and operating certificates, in the store.

Each function is one piece of work inside a `Session` of `market.store`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, func, insert, select, update

from relay.errors import IdentityError, Refused, version_refusal
from relay.identity import (
    PROTOCOL_VERSION,
    Certificate,
    PublicKey,
    SerialBook,
    SignedDocument,
    address_of,
    open_certificate,
)

from . import messages as m
from . import relays
from . import tables as t
from .requests import Author
from .store import Session
from .wallet import CHALLENGE_LIFETIME_S, CLOCK_SKEW_S, Challenge, Grant, open_grant
from .wire import Hash

MAX_CHALLENGES: Final = 10_000
ADDRESS_CHALLENGES: Final = 64
"""Most sign-ins that one address may have begun and not finished within 300 s."""

WALLET_CHALLENGES: Final = 16
"""Most of these for one wallet. Counted by address: anybody can name a wallet, and must not lock it out."""

_NONCE: Final = re.compile(r"\nNonce: ([A-Za-z0-9]{22,64})\n")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that has a valid grant."""

    key: PublicKey
    wallet: PublicKey
    grant: Hash
    grant_ends_at: int
    start_generation: int
    network: str
    budget_bytes: int
    addresses: tuple[str, ...]
    relays: tuple[PublicKey, ...]  # those it uses, in its order
    rate: float | None


class SignIns:
    """Sign-ins begun and not finished, by address: nobody proved anything yet, so each address has a share.

    Kept by this process alone; the store's own bound is for all of them.
    """

    def __init__(self) -> None:
        self._begun: OrderedDict[str, tuple[float, str, bytes]] = OrderedDict()
        self._addresses: Counter[str] = Counter()
        self._wallets: Counter[tuple[str, bytes]] = Counter()

    def enter(self, address: str, wallet: bytes, nonce: str, *, now: float) -> None:
        """Note a sign-in. Raises `Refused` (quota) if its address or wallet has begun too many."""
        while self._begun and now - next(iter(self._begun.values()))[0] > CHALLENGE_LIFETIME_S:
            self.leave(next(iter(self._begun)))
        if self._addresses[address] >= ADDRESS_CHALLENGES:
            raise Refused("quota", f"too many sign-ins begun from {address}", retry_after_s=30)
        if self._wallets[address, wallet] >= WALLET_CHALLENGES:
            raise Refused("quota", "too many sign-ins begun for this wallet: finish one", retry_after_s=30)
        self._begun[nonce] = (now, address, wallet)
        self._addresses[address] += 1
        self._wallets[address, wallet] += 1

    def leave(self, nonce: str | None) -> None:
        """A sign-in is finished, or failed. One that is not known changes nothing."""
        if nonce is None or nonce not in self._begun:
            return
        _, address, wallet = self._begun.pop(nonce)
        self._addresses[address] -= 1
        self._wallets[address, wallet] -= 1
        if not self._addresses[address]:
            del self._addresses[address]
        if not self._wallets[address, wallet]:
            del self._wallets[address, wallet]


def nonce_of(text: str) -> str | None:
    """The nonce that a sign-in text carries, or None."""
    match = _NONCE.search(text)
    return None if match is None else match[1]


def offer_challenge(
    session: Session, request: m.ChallengeRequest, *, root: PublicKey, public_urls: Sequence[str], nonce: str
) -> m.ChallengeOffer:
    """Store a challenge and return its text. Raises `Refused`, or `IdentityError` for unusable parts."""
    if request.v != PROTOCOL_VERSION:
        raise version_refusal(PROTOCOL_VERSION, request.v)
    if request.url not in public_urls:
        raise Refused(
            "forbidden",
            f"this market does not answer for {request.url}; it is reached at {', '.join(public_urls)} "
            "(its operator adds others with --public-url)",
        )
    outstanding = session.value(
        select(func.count())
        .select_from(t.challenges)
        .where(t.challenges.c.issued_at >= session.now - CHALLENGE_LIFETIME_S)
    )
    if outstanding >= MAX_CHALLENGES:
        raise Refused("overloaded", "too many sign-ins at once", retry_after_s=30)
    issued_at = int(session.now)
    challenge = Challenge(
        url=request.url,
        wallet=request.wallet,
        device=request.device,
        exchange=request.exchange,
        swarm=root,
        scope=request.scope,
        nonce=nonce,
        issued_at=issued_at,
        expires_at=issued_at + request.lifetime_s,
    )
    text = challenge.text
    session.run(insert(t.challenges).values(nonce=nonce, text=text, issued_at=issued_at))
    return m.ChallengeOffer(text)


def take_challenge(session: Session, text: str) -> str | None:
    """Use up the challenge whose nonce `text` carries; returns the text stored for it, or None.

    Runs in a transaction of its own, so the nonce is gone whatever is found out about the rest.
    """
    nonce = nonce_of(text)
    if nonce is None:
        return None
    taken: str | None = session.value(
        delete(t.challenges).where(t.challenges.c.nonce == nonce).returning(t.challenges.c.text)
    )
    return taken


def check_grant(
    stored: str | None, request: m.GrantRequest, author: Author, *, root: PublicKey, now: float
) -> Grant:
    """Verify a signed text against what was stored for its nonce. Raises `Refused` or `IdentityError`."""
    if request.v != PROTOCOL_VERSION:
        raise version_refusal(PROTOCOL_VERSION, request.v)
    if stored is None:
        raise Refused(
            "replay", "this sign-in text was used already, has expired, or is not ours: ask for a new one"
        )
    if stored != request.text:
        raise IdentityError("the signed text is not the one that was offered for its nonce")
    grant = open_grant(request.text, request.signature, root=root, now=now)
    if now > grant.issued_at + CHALLENGE_LIFETIME_S or now < grant.issued_at - CLOCK_SKEW_S:
        raise Refused("expired", "a sign-in text is good for 300 s: ask for a new one")
    if author.key != grant.device or author.certificate is not None:
        raise IdentityError("a grant is handed in by the device that it names, signed with the device's key")
    return grant


def store_grant(session: Session, grant: Grant) -> m.GrantAnswer:
    """Keep a verified grant and bind its device to its wallet."""
    session.insert_once(
        insert(t.grants).values(
            hash=grant.hash,
            text=grant.text,
            signature=grant.signature,
            wallet=grant.wallet,
            device=grant.device,
            scope=grant.scope,
            issued_at=grant.issued_at,
            expires_at=grant.expires_at,
        )
    )
    session.insert_once(insert(t.wallets).values(wallet=grant.wallet))
    bound = {"wallet": grant.wallet, "grant": grant.hash, "seen_at": session.now}
    if not session.run(update(t.devices).where(t.devices.c.device == grant.device).values(**bound)):
        session.insert_once(insert(t.devices).values(device=grant.device, addresses=[], **bound))
    return m.GrantAnswer(Hash(grant.hash))


def find_device(session: Session, author: Author, *, lock: bool = False) -> Device:
    """The device that signed a request. Raises `Refused` unless its wallet's grant for it still holds."""
    if author.certificate is not None:
        raise Refused("forbidden", "this is for devices; an operating key holds no windows")
    statement = (
        select(t.devices, t.grants.c.expires_at)
        .join(t.grants, t.devices.c.grant == t.grants.c.hash)
        .where(t.devices.c.device == author.key)
    )
    row = session.row(statement.with_for_update(of=t.devices) if lock else statement)
    if row is None:
        raise Refused(
            "forbidden", f"device {address_of(author.key)} has no grant here: sign in (kvasir-node login)"
        )
    if session.now > row.expires_at:
        raise Refused("expired", "the device's grant has expired: sign in again (kvasir-node login)")
    return Device(
        key=PublicKey(row.device),
        wallet=PublicKey(row.wallet),
        grant=Hash(row.grant),
        grant_ends_at=row.expires_at,
        start_generation=row.start_generation,
        network=row.network,
        budget_bytes=row.budget_bytes,
        addresses=tuple(row.addresses),
        relays=relays.used(relays.readings_of(row.relays)),
        rate=row.rate,
    )


def load_serials(session: Session, serials: SerialBook, *, root: PublicKey) -> None:
    """Teach a process which certificates were replaced while it was not running."""
    for (data,) in session.rows(select(t.operators.c.certificate)):
        document = SignedDocument.from_bytes(data)
        try:
            serials.accept(open_certificate(document, swarm=root, now=session.now))
        except IdentityError:
            continue  # it has run out since, and cannot be used anyway


def note_operator(session: Session, certificate: Certificate) -> None:
    """Remember an operating certificate, if its serial is the highest of its id."""
    here = (t.operators.c.role == certificate.role) & (t.operators.c.id == certificate.id)
    values = {"serial": certificate.serial, "certificate": certificate.document.to_bytes()}
    highest = session.value(select(t.operators.c.serial).where(here))
    if highest is None:
        session.insert_once(insert(t.operators).values(role=certificate.role, id=certificate.id, **values))
    elif certificate.serial > highest:
        session.run(update(t.operators).where(here).values(**values))


def purge(session: Session) -> None:
    """Forget challenges and nonces whose time is over."""
    session.run(delete(t.challenges).where(t.challenges.c.issued_at < session.now - 2 * CHALLENGE_LIFETIME_S))
    session.run(delete(t.nonces).where(t.nonces.c.expires_at < session.now))

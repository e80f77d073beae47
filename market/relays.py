"""The relays a swarm has: who says it is there, how busy, how far from the devices, and who uses which.

A relay stays listed for as long as it keeps saying that it is there. Its round trip is the median of what
devices reported lately, so no few of them can make a relay look near or far. Each function on a session is
one piece of work inside a `Session` of `market.store`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import structlog
from sqlalchemy import insert, select, update

from relay.errors import IdentityError, RemoteProtocolError
from relay.identity import Certificate, PublicKey, SignedDocument, address_of, open_certificate, parse_address
from relay.load import RelayLoad

from . import messages as m
from . import tables as t
from .store import Session

log = structlog.get_logger("market")

RELAY_SILENCE_S: Final = 50.0
"""A relay that was not heard for so long is listed no more; it speaks every 15 s."""

READING_S: Final = 120.0
READERS: Final = 1000
"""Whose round trips count: those of devices heard within so long, the latest so many."""

MAX_READINGS: Final = 16
"""Relays that one device may report of."""

CLAIM_RELAYS: Final = 8
"""Relays that one claim names at most."""

LONGEST_RTT_S: Final = 60.0


class RelayBook:
    """The relays listed now: those that `static` names, and those that announced themselves lately."""

    def __init__(
        self, root: PublicKey, static: Callable[[], Sequence[m.RelayListing]], clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._static = static
        self._clock = clock
        self._said: set[str] = set()
        self.listed: list[tuple[str, PublicKey, m.RelayListing]] = []
        """URL, key and listing of each."""

    def refresh(
        self, announced: Iterable[m.RelayListing], round_trips: dict[PublicKey, list[float]] | None = None
    ) -> None:
        """Verify all again; one whose certificate ran out is left out. `round_trips`: what devices saw.

        Without `round_trips` those known before stay.
        """
        before = {key: (listing.rtt_s, listing.seen_by) for _, key, listing in self.listed}
        listed: dict[PublicKey, tuple[str, PublicKey, m.RelayListing]] = {}
        now = self._clock()
        for listing in (*self._static(), *announced):
            try:
                certificate = open_certificate(listing.certificate, swarm=self._root, now=now, role="relay")
            except IdentityError as error:
                if listing.url not in self._said:
                    self._said.add(listing.url)
                    log.warning("relay.unlisted", url=listing.url, reason=str(error))
                continue
            key = certificate.ed25519
            if round_trips is None:
                rtt_s, seen_by = before.get(key, (None, 0))
            else:
                seen = round_trips.get(key, [])
                rtt_s, seen_by = (round(statistics.median(seen), 6) if seen else None), len(seen)
            shown = m.RelayListing(listing.url, listing.certificate, listing.load, rtt_s, seen_by)
            listed.setdefault(key, (listing.url, key, shown))
        self.listed = list(listed.values())

    def for_claims(self) -> tuple[tuple[str, PublicKey], ...]:
        """What a claim names while its device has not said which relays it uses: the idlest."""
        staying = [entry for entry in self.listed if entry[2].load is None or not entry[2].load.draining]
        staying.sort(key=lambda entry: 0.0 if entry[2].load is None else entry[2].load.share)
        return tuple((url, key) for url, key, _ in staying[:CLAIM_RELAYS])


def check_announcement(announcement: m.RelayAnnouncement) -> None:
    """Raises `RemoteProtocolError` for what no relay says of itself."""
    url, load = announcement.url, announcement.load
    if len(url) > 512 or not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise RemoteProtocolError("a relay's URL starts with http, https, ws or wss")
    if load is not None and not (
        0 <= load.share <= 1 and load.peers >= 0 and load.circuits >= 0 and load.bytes_per_s >= 0
    ):
        raise RemoteProtocolError("a relay's load is a share from 0 to 1, and no figure is below zero")


def announce_relay(session: Session, certificate: Certificate, announcement: m.RelayAnnouncement) -> m.Done:
    """List a relay until it falls silent, with the load that it says."""
    load = announcement.load
    values: dict[str, Any] = {
        "url": announcement.url,
        "certificate": certificate.document.to_bytes(),
        "load": None if load is None else load.to_fields(),
        "seen_at": session.now,
    }
    if not session.run(update(t.relays).where(t.relays.c.id == certificate.id).values(**values)):
        session.insert_once(insert(t.relays).values(id=certificate.id, **values))
    return m.Done()


def announced_relays(session: Session) -> list[m.RelayListing]:
    """The relays that were heard lately."""
    rows = session.rows(
        select(t.relays).where(t.relays.c.seen_at > session.now - RELAY_SILENCE_S).order_by(t.relays.c.id)
    )
    return [
        m.RelayListing(
            row.url,
            SignedDocument.from_bytes(row.certificate),
            None if row.load is None else RelayLoad.from_fields(row.load),
        )
        for row in rows
    ]


def round_trips(session: Session) -> dict[PublicKey, list[float]]:
    """Each relay's round trips in seconds, as devices reported them lately."""
    rows = session.rows(
        select(t.devices.c.relays)
        .where(t.devices.c.seen_at > session.now - READING_S)
        .order_by(t.devices.c.seen_at.desc())
        .limit(READERS)
    )
    found: dict[PublicKey, list[float]] = {}
    for (stored,) in rows:
        for reading in readings_of(stored):
            if reading.rtt_s is not None:
                found.setdefault(reading.relay, []).append(reading.rtt_s)
    return found


def check_readings(readings: Sequence[m.RelayReading]) -> tuple[m.RelayReading, ...]:
    """A device's readings, each relay once and no more than `MAX_READINGS`. Raises `RemoteProtocolError`."""
    kept: dict[PublicKey, m.RelayReading] = {}
    for reading in readings[:MAX_READINGS]:
        if reading.rtt_s is not None and not 0 <= reading.rtt_s <= LONGEST_RTT_S:
            raise RemoteProtocolError(f"a round trip is from 0 to {LONGEST_RTT_S:g} s")
        kept.setdefault(reading.relay, reading)
    return tuple(kept.values())


def stored_readings(readings: Iterable[m.RelayReading]) -> list[list[Any]]:
    """Readings as the store keeps them: relay, round trip, used."""
    return [[address_of(reading.relay), reading.rtt_s, reading.used] for reading in readings]


def readings_of(stored: Any) -> tuple[m.RelayReading, ...]:
    """What `stored_readings` wrote."""
    return tuple(m.RelayReading(parse_address(relay), rtt_s, used) for relay, rtt_s, used in stored or ())


def used(readings: Iterable[m.RelayReading]) -> tuple[PublicKey, ...]:
    """The relays that a device is connected to, in its order."""
    return tuple(reading.relay for reading in readings if reading.used)

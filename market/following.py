"""What backbones follow: a plan's leases at one revision, and what changed since.

Each function is one piece of work inside a `Session` of `market.store`.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Select, select

from relay.errors import Refused
from relay.identity import SignedDocument

from . import messages as m
from . import tables as t
from .claims import as_state
from .plans import PlanId
from .publishing import require_plan
from .requests import encode_bytes
from .store import Session
from .wallet import Grant
from .windows import Window
from .wire import LeaseId, from_json

BATCH: Final = 500
"""How many changes one step of a watch carries at most."""


def snapshot(session: Session, plan: bytes) -> m.SnapshotListing:
    """All leases of a plan that have not ended, and the revision that this is."""
    revision = require_plan(session, plan).revision
    rows = session.rows(
        _followed().where(t.leases.c.plan == plan, t.leases.c.state != "ENDED").order_by(t.leases.c.name)
    )
    return m.SnapshotListing(revision, tuple(_listing(row, session.now) for row in rows))


def changes(session: Session, plan: bytes, since: int) -> tuple[m.ChangeListing, ...]:
    """What changed after revision `since`, at most `BATCH` changes, oldest first.

    A lease that changed several times appears once, as it is now. Raises `Refused` (conflict) if `since` is
    before what is remembered, or after what is.
    """
    row = require_plan(session, plan)
    if since < row.pruned or since > row.revision:
        raise Refused("conflict", f"revision {since} cannot be followed: take a new snapshot")
    rows = session.rows(
        _followed()
        .where(t.leases.c.plan == plan, t.leases.c.revision > since)
        .order_by(t.leases.c.revision)
        .limit(BATCH)
    )
    previous = since
    found = []
    for row in rows:
        if row.state == "ENDED":
            ended = m.EndedListing(LeaseId(row.lease), row.reason or "ended")
            found.append(m.ChangeListing(row.revision, previous, None, ended))
        else:
            found.append(m.ChangeListing(row.revision, previous, _listing(row, session.now), None))
        previous = row.revision
    return tuple(found)


def _followed() -> Select[Any]:
    return (
        select(t.leases, t.grants.c.text, t.grants.c.signature, t.devices.c.addresses)
        .join(t.grants, t.leases.c.grant == t.grants.c.hash)
        .join(t.devices, t.leases.c.device == t.devices.c.device)
    )


def _listing(row: Any, now: float) -> m.AssignmentListing:
    return m.AssignmentListing(
        lease=LeaseId(row.lease),
        plan=PlanId(row.plan),
        window=Window.parse(row.name),
        slot=row.slot,
        epoch=row.epoch,
        state=as_state(row.state),
        precision=row.precision,
        numerics=row.numerics,
        grant=_grant(row),
        addresses=tuple(row.addresses),
        document=SignedDocument.from_bytes(row.document),
        expires_in_s=row.expires_at - now,
        start_generation=row.start_generation,
        download_bytes=row.download_bytes,
        kept_bytes=row.kept_bytes,
        verified_bytes=row.verified_bytes,
    )


def _grant(row: Any) -> Grant:
    """The grant as it goes onto the wire, where only text and signature count."""
    return from_json(Grant, {"text": row.text, "signature": encode_bytes(row.signature)})

"""What the swarm has on record about this node's wallet, kept for the owner: trust, escrow, decisions.

Asks the market seldom, a minute after a receipt came, and at once when a backbone or the market speaks of a
quarantine. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from random import Random
from typing import Any, Final

import structlog

from market.client import MarketClient
from market.messages import TrustAnswer, TrustRecord, credits_of
from relay.errors import KvasirError
from relay.identity import address_of

from .status import NodeStatus

log = structlog.get_logger("node")

EVERY_S: Final = 600.0
"""How often the market is asked."""

CREDITED_S: Final = 60.0
"""How soon after it was asked last, where this node has earned something since."""

SOON_S: Final = (1.0, 3.0, 10.0)
"""When it is asked after a quarantine was spoken of: it may hear of it a little later itself."""

SHOWN: Final = 20
"""Records kept in the status, the latest."""


class Standing:
    """Keeps `status.trust`. `market` gives the present client."""

    def __init__(self, market: Callable[[], MarketClient], status: NodeStatus, *, rng: Random) -> None:
        self._market = market
        self._status = status
        self._rng = rng
        self._soon: list[float] = []
        self._hurried = self._credited = False
        self._wake = asyncio.Event()
        self._told: set[tuple[bytes, str | None, bool]] | None = None

    def hurry(self) -> None:
        """Ask soon: a quarantine was spoken of."""
        self._soon = list(SOON_S)
        self._hurried = True
        self._wake.set()

    def credited(self) -> None:
        """A receipt came: what the market says of the wallet has changed."""
        self._credited = True
        self._wake.set()

    async def run(self) -> None:
        """Ask, until cancelled."""
        while True:
            try:
                self._take(await self._market().trust())
            except KvasirError as error:
                log.debug("trust.unknown", code=error.code, reason=str(error))
            self._credited = False
            await self._pause(self._soon.pop(0) if self._soon else EVERY_S * self._rng.uniform(0.9, 1.1))

    async def _pause(self, longest: float) -> None:
        """Return after `longest` seconds, or when there is a reason to ask before."""
        asked = time.monotonic()
        while not self._hurried:
            left = asked + (min(longest, CREDITED_S) if self._credited else longest) - time.monotonic()
            if left <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            self._wake.clear()
        self._hurried = False

    def _take(self, answer: TrustAnswer) -> None:
        self._status.trust = trust_fields(answer)
        now: set[tuple[bytes, str | None, bool]] = {
            (record.id, record.decision, record.disputed_at is not None) for record in answer.records
        }
        if self._told is not None:
            for record in reversed(answer.records):
                key = (record.id, record.decision, record.disputed_at is not None)
                if key not in self._told and record.kind != "release":
                    self._status.notify(describe_record(record))
        self._told = now


def trust_fields(answer: TrustAnswer) -> dict[str, Any]:
    """What is on record, as plain JSON values; amounts in credits as text, times in Unix seconds."""
    return {
        "wallet": address_of(answer.wallet),
        "calls": answer.calls,
        "quarantines": answer.quarantines,
        "quarantine_left_s": answer.quarantine_left_s,
        "for_good": answer.for_good,
        "release_in_calls": answer.release_in_calls,
        "escrow": str(credits_of(answer.escrow)),
        "available": str(credits_of(answer.available)),
        "void": str(credits_of(answer.void)),
        "records": [record_fields(record) for record in answer.records[:SHOWN]],
    }


_PLAIN: Final = (
    "kind", "at", "reason", "window", "layer", "expert", "call", "d", "limit", "numerics", "precision",
    "evidence", "number", "until", "for_good", "disputed_at", "dispute", "decided_at", "decision",
    "decision_reason",
)  # fmt: skip


def plain_fields(record: TrustRecord) -> dict[str, Any]:
    """What everybody is shown of a record, as plain JSON values; times in Unix seconds."""
    return {
        "id": record.id.hex(),
        "device": None if record.device is None else address_of(record.device),
        "quarantine": None if record.quarantine is None else record.quarantine.hex(),
        **{name: getattr(record, name) for name in _PLAIN},
    }


def record_fields(record: TrustRecord) -> dict[str, Any]:
    """One record as plain JSON values."""
    amount, text = str(credits_of(record.amount)), describe_record(record)
    return {**plain_fields(record), "amount": amount, "text": text}


def describe_record(record: TrustRecord) -> str:
    """One record in a line for its owner."""
    credit = f"{credits_of(record.amount)} credits"
    if record.kind == "release":
        text = f"{credit} became available: {record.reason}"
    elif record.kind == "violation":
        text = f"an audit found {record.reason} (this device's call {record.call})"
    else:
        end = "for good" if record.for_good else f"until {_moment(record.until)}"
        taken = f"; {credit} of escrow are void" if record.amount else ""
        text = f"quarantine {record.number} {end}: {record.reason}{taken}"
    if record.decision is not None:
        text += f"; {record.decision} by the operator: {record.decision_reason}"
    elif record.disputed_at is not None:
        text += "; you dispute it, and the operator has not decided yet"
    elif record.kind != "release":
        text += f"; see `kvasir-node audit show {record.id.hex()[:8]}`"
    return text


def _moment(at: float | None) -> str:
    return "an unknown time" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))

"""What the operator sees of a running backbone: windows, nodes, calls, credit, speed, as plain JSON.

Reads the swarm, the engine and the market's word. Changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from kvasir_node.standing import plain_fields
from market.messages import CreditStatement, CreditTable, GapsAnswer, TrustAnswer, TrustRecord, credits_of
from relay.identity import PublicKey, address_of
from relay.meters import Meters

from .engine import EngineStats
from .swarm import Swarm

RATE_WINDOW_S: Final = 10.0
"""Tokens a second are those of the last seconds in which any were made."""


class TokenRate:
    """Tokens (or bytes) a second over the last `RATE_WINDOW_S`, from a rising count. Time is an argument."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def note(self, now: float, tokens: int) -> None:
        """The count at `now`."""
        if self._points and self._points[-1][1] == tokens:
            return
        self._points.append((now, tokens))
        while len(self._points) > 2 and self._points[0][0] < now - RATE_WINDOW_S:
            self._points.popleft()

    def value(self, now: float) -> float:
        """Tokens a second; 0 where none came lately."""
        if len(self._points) < 2 or self._points[-1][0] < now - RATE_WINDOW_S:
            return 0.0
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first) if last > first else 0.0


def show_windows(swarm: Swarm, gaps: GapsAnswer | None) -> list[dict[str, Any]]:
    """Every window: its replicas by state, demand, and what the market says of it."""
    said = {} if gaps is None else {gap.window: gap for gap in gaps.gaps if gap.plan == swarm.plan_id}
    roster = swarm.roster()
    fallback = swarm.dispatcher.stats.fallback_windows
    loading: dict[int, int] = {}
    for holding in swarm.directory.all():
        if holding.assignment.state in ("HELD", "LOADED"):
            number = swarm.directory.windows.number[holding.assignment.window]
            loading[number] = loading.get(number, 0) + 1
    shown = []
    for number, window in enumerate(swarm.plan.windows):
        replicas = roster.of(number)
        entry: dict[str, Any] = {
            "window": window.name,
            "replicas": len(replicas),
            "connected": sum(replica.connected for replica in replicas),
            "loading": loading.get(number, 0),
            "wallets": sorted({address_of(replica.wallet) for replica in replicas}),
            "fallback_rows": fallback.get(window.name, 0),
        }
        gap = said.get(window)
        if gap is not None:
            entry |= {
                "target": gap.target,
                "demand_rows_per_s": gap.demand_rows_per_s,
                "scarcity": gap.scarcity,
                "reason": gap.reason,
            }
        if replicas and not entry["connected"]:
            entry["reason"] = "no owner has a session; the market frees the leases when they expire"
        shown.append(entry)
    return shown


def show_moves(gaps: GapsAnswer | None) -> list[dict[str, Any]]:
    """The moves of replicas within the last hour, the latest first."""
    return [
        {
            "leaves": move.leaves.name,
            "takes": move.takes.name,
            "state": move.state,
            "reason": move.reason,
            "age_s": move.age_s,
        }
        for move in (() if gaps is None else gaps.moves)
    ]


def show_nodes(swarm: Swarm, credits: Mapping[PublicKey, CreditStatement]) -> list[dict[str, Any]]:
    """Every device with a claim, or that earned and left not long ago. `credits` is by wallet."""
    totals = swarm.book.all_totals()
    held: dict[PublicKey, list[Any]] = {}
    for holding in swarm.directory.all():
        held.setdefault(holding.device, []).append(holding.assignment)
    return [
        _show_node(swarm, device, held.get(device, []), totals.get(device, (0, 0)), credits)
        for device in sorted(held.keys() | {device for device, (size, _) in totals.items() if size})
    ]


def _show_node(
    swarm: Swarm,
    device: PublicKey,
    claims: Iterable[Any],
    totals: tuple[int, int],
    credits: Mapping[PublicKey, CreditStatement],
) -> dict[str, Any]:
    claims = sorted(claims, key=lambda claim: str(claim.window.name))
    wallet = claims[0].wallet if claims else swarm.book.wallet_of(device)
    link = swarm.links().get(device)
    owner = swarm.owners.ensure(device)
    trust = swarm.auditor.trust().get(wallet)
    credit = credits.get(wallet)
    with swarm.owners.lock:
        latency_s = owner.pace.expected_s(8) if owner.pace.calls else None
        breaker = owner.breaker.reason if owner.breaker.is_open else None
    return {
        "device": address_of(device),
        "wallet": address_of(wallet),
        "windows": [claim.window.name for claim in claims if claim.state == "PROVEN"],
        "claims": [
            {
                "window": claim.window.name,
                "state": claim.state.lower(),
                "epoch": claim.epoch,
                "precision": claim.precision,
                "numerics": claim.numerics,
            }
            for claim in claims
        ],
        "calls": totals[1],
        "carried_bytes": totals[0],
        "credit": None if credit is None else float(credit.credit),
        "escrow": None if credit is None else float(credits_of(credit.escrow)),
        "available": None if credit is None else float(credits_of(credit.available)),
        "path": "none" if link is None else link.path,
        "relay": swarm.relay_of(device),
        "latency_s": latency_s,
        "breaker": breaker,
        "audited": 0 if trust is None else trust.audited,
        "strikes": 0 if trust is None else trust.strikes,
        "worst_d": None if trust is None or not trust.audited else trust.worst_d,
        "last_error": None if link is None or link.session is not None else link.last_error or None,
    }


def mode_of(swarm: Swarm) -> str:
    """What a reply holds in this swarm: `weighted`, one partial sum a row, or `ids`, one output an expert."""
    return "weighted" if swarm.plan.weighted else "ids"


def show_audit(swarm: Swarm) -> dict[str, Any]:
    """What audits did since the start, and what they take: `rate` audits a valid call and `cpu_share` of the
    process's CPU time lately; `cpu_s` and `process_cpu_s` since the start.
    """
    spending = swarm.auditor.spending
    return {"rate": spending.rate, "cpu_share": spending.cpu_share, **asdict(swarm.auditor.stats)}


def show_carried(swarm: Swarm, rate: TokenRate, now: float) -> dict[str, Any]:
    """Carried bytes since the start and a second, with the mode that they were carried in."""
    rate.note(now, swarm.book.paid_bytes)
    return {"mode": mode_of(swarm), "bytes": swarm.book.paid_bytes, "bytes_per_s": rate.value(now)}


def show_dispatch(swarm: Swarm) -> dict[str, Any]:
    """What the dispatcher did since the start."""
    stats = swarm.dispatcher.stats
    audits = swarm.auditor.stats
    return {
        "dispatches": stats.dispatches,
        "rows": stats.rows,
        "calls": stats.calls,
        "hedges": stats.hedges,
        "redispatched": stats.redispatched,
        "late": stats.late,
        "seconds": round(stats.seconds, 6),
        "service_s": round(stats.service_s, 6),
        "outcomes": dict(stats.outcomes),
        "fallback_rows": stats.fallback_rows,
        "audits": asdict(audits),
        "receipts_posted": swarm.bookkeeper.posted,
        "receipts_acknowledged": swarm.bookkeeper.acknowledged,
    }


def show_engine(stats: EngineStats) -> dict[str, Any]:
    """The engine's figures."""
    return asdict(stats) | {"finished": dict(stats.finished)}


def show_relays(swarm: Swarm) -> list[dict[str, Any]]:
    """The relays that the market lists: load, the devices' and this side's round trips, who uses them."""
    return [
        {
            "relay": address_of(info.key),
            "url": info.url,
            "load": None if info.load is None else info.load.to_fields(),
            "devices_rtt_s": info.rtt_s,
            "devices": info.seen_by,
            "connected": client is not None and client.connected,
            "rtt_s": None if client is None else client.rtt_s,
            "sessions": sessions,
        }
        for info, client, sessions in swarm.relays()
    ]


def show_relay(meters: Meters) -> dict[str, Any]:
    """The embedded relay's figures."""
    return {
        "devices": meters.devices,
        "circuits": len(meters.circuits),
        "bytes_forwarded": meters.bytes_forwarded,
        "outcomes": meters.outcomes,
    }


def show_credits(table: CreditTable) -> dict[str, Any]:
    """Every wallet's balance, and whether the ledger holds."""
    return {
        "balanced": table.balanced,
        "issued_bytes": table.issued,
        "entries": table.entries,
        "wallets": [
            {
                "wallet": address_of(statement.wallet),
                "credit": float(statement.credit),
                "escrow": float(credits_of(statement.escrow)),
                "available": float(credits_of(statement.available)),
                "void": float(credits_of(statement.void)),
                "unacknowledged_bytes": statement.unacknowledged,
                "receipts": statement.receipts,
                "calls": statement.calls,
            }
            for statement in table.wallets
        ],
    }


def show_record(record: TrustRecord) -> dict[str, Any]:
    """One thing on record about a wallet; amounts in credits, times in Unix seconds."""
    amount = float(credits_of(record.amount))
    return {**plain_fields(record), "wallet": address_of(record.wallet), "amount": amount}


def show_trust(answer: TrustAnswer) -> dict[str, Any]:
    """One wallet's record."""
    return {
        "wallet": address_of(answer.wallet),
        "calls": answer.calls,
        "quarantines": answer.quarantines,
        "quarantine_left_s": answer.quarantine_left_s,
        "for_good": answer.for_good,
        "release_in_calls": answer.release_in_calls,
        "records": [show_record(record) for record in answer.records],
    }


def metrics_text(swarm: Swarm | None, engine: EngineStats | None, meters: Meters, uptime_s: float) -> str:
    """The daemon's figures in the Prometheus text format (version 0.0.4)."""
    lines = [
        ("kvasir_uptime_seconds", "", uptime_s),
        ("kvasir_relay_bytes_forwarded_total", "", meters.bytes_forwarded),
    ]
    lines += [
        ("kvasir_relay_circuits", "", len(meters.circuits)),
        ("kvasir_relay_devices", "", meters.devices),
    ]
    if engine is not None:
        lines += [
            ("kvasir_tokens_total", "", engine.generated_tokens),
            ("kvasir_steps_total", "", engine.steps),
            ("kvasir_requests_running", "", engine.running),
            ("kvasir_requests_waiting", "", engine.waiting),
            ("kvasir_preemptions_total", "", engine.preemptions),
            ("kvasir_micro_batches", "", engine.micro_batches),
            ("kvasir_trips_total", "", engine.trips),
            ("kvasir_drafted_tokens_total", "", engine.drafted),
            ("kvasir_accepted_tokens_total", "", engine.accepted),
            ("kvasir_tokens_per_trip", "", engine.tokens_per_trip),
        ]
    if swarm is not None:
        stats, audit = swarm.dispatcher.stats, show_audit(swarm)
        lines += [
            ("kvasir_coverage", "", swarm.roster().coverage()),
            ("kvasir_calls_total", "", stats.calls),
            ("kvasir_hedges_total", "", stats.hedges),
            ("kvasir_redispatched_total", "", stats.redispatched),
            ("kvasir_fallback_rows_total", "", stats.fallback_rows),
            ("kvasir_carried_bytes_total", f'{{mode="{mode_of(swarm)}"}}', swarm.book.paid_bytes),
            ("kvasir_audited_total", "", audit["audited"]),
            ("kvasir_violations_total", "", audit["violations"]),
            ("kvasir_audit_rate", "", audit["rate"]),
            ("kvasir_audit_cpu_share", "", audit["cpu_share"]),
            ("kvasir_audit_cpu_seconds_total", "", audit["cpu_s"]),
            ("kvasir_audits_dropped_total", "", audit["dropped"]),
            ("kvasir_audits_skipped_total", "", audit["skipped"]),
            ("kvasir_replies_compared_total", "", audit["compared"]),
            ("kvasir_replies_disagreed_total", "", audit["disagreed"]),
            ("kvasir_arbitrated_total", "", audit["arbitrated"]),
        ]
        paths = [link.path for link in swarm.links().values()]
        lines += [
            ("kvasir_sessions", f'{{path="{path}"}}', paths.count(path)) for path in ("relay", "direct")
        ]
        lines += [
            ("kvasir_call_outcomes_total", f'{{outcome="{name}"}}', count)
            for name, count in sorted(stats.outcomes.items())
        ]
    return "".join(f"{name}{labels} {value:g}\n" for name, labels, value in lines)

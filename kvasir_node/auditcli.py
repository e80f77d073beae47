"""`kvasir-node audit`: what is on record about this node's wallet, its figures, and objecting to it.

Knows arguments and lines. The market's word is `market.client`'s, making an output again the daemon's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from market.client import MarketClient
from market.evidence import Evidence
from market.messages import TrustAnswer, TrustRecord
from relay.errors import ConfigError, KvasirError, Refused
from relay.identity import PublicKey, address_of
from relay.loop import run as run_loop

from .control import ask_daemon
from .standing import describe_record, record_fields, trust_fields
from .state import NodeState

T = TypeVar("T")

RECOMPUTE_S: Final = 60.0
"""How long the daemon has to make one output again."""

FIRST_VALUES: Final = 4
"""Values of each row that are printed."""


def add_audit(audit: argparse.ArgumentParser) -> None:
    """The arguments of `audit show` and `audit dispute`."""
    what = audit.add_subparsers(title="commands", dest="what", required=True)
    show = what.add_parser("show", help="what is on record, or one record with its figures")
    show.add_argument("record", metavar="ID", nargs="?", help="a record's id, or how it begins")
    show.add_argument(
        "--recompute", action="store_true", help="have the running node make the output again, and compare"
    )
    show.add_argument("--json", action="store_true", help="as JSON")
    dispute = what.add_parser("dispute", help="object to a violation or quarantine; the operator decides")
    dispute.add_argument("record", metavar="ID", help="the record's id, or how it begins")
    dispute.add_argument("--reason", required=True, help="why it is wrong; the operator reads it")
    for one in (show, dispute):
        one.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help="as before `show`")


def run_audit(arguments: argparse.Namespace) -> int:
    """Carry `kvasir-node audit` out; the exit status."""
    state = NodeState(arguments.state_dir)
    roots = state.roots()
    if not roots:
        raise ConfigError(f"{arguments.state_dir} knows no swarm: `kvasir-node run JOINLINK` joins one")
    if arguments.what == "dispute":
        return _dispute(state, roots, arguments.record, arguments.reason)
    if arguments.record is None:
        if arguments.recompute:
            raise ConfigError("say which record to make again: `kvasir-node audit show ID --recompute`")
        return _show_all(state, roots, as_json=arguments.json)
    return _show_one(state, roots, arguments)


def _ask(state: NodeState, url: str, root: PublicKey, question: Callable[[MarketClient], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with aiohttp.ClientSession() as http:
            market = MarketClient(url, http=http, root=root, key=state.device_keys().signing, timeout=10.0)
            return await question(market)

    return run_loop(ask(), use_uvloop=os.environ.get("KVASIR_LOOP") != "default")


def _find(
    state: NodeState, roots: Mapping[str, PublicKey], begins: str
) -> tuple[str, PublicKey, TrustRecord]:
    """The market and the record whose id begins so. Raises `ConfigError` unless there is exactly one."""
    found = [
        (url, root, record)
        for url, root in sorted(roots.items())
        for record in _ask(state, url, root, lambda market: market.trust()).records
        if record.id.hex().startswith(begins.lower())
    ]
    if len(found) != 1 or not begins:
        raise ConfigError(
            f"{len(found)} records have an id that begins with {begins!r}: see `kvasir-node audit show`"
        )
    return found[0]


# --- show ----------------------------------------------------------------------------------------------


def _show_all(state: NodeState, roots: Mapping[str, PublicKey], *, as_json: bool) -> int:
    answers = []
    for url, root in sorted(roots.items()):
        try:
            answer = _ask(state, url, root, lambda market: market.trust())
            answers.append({"swarm": address_of(root), "market": url, **trust_fields(answer)})
            if not as_json:
                print("\n".join(describe_trust(url, answer)))
        except KvasirError as error:
            answers.append({"swarm": address_of(root), "market": url, "error": str(error)})
            if not as_json:
                print(f"{url} gives no answer: {error}")
    if as_json:
        print(json.dumps(answers, indent=1))
    return 0


def describe_trust(url: str, answer: TrustAnswer) -> list[str]:
    """One swarm's word on the wallet, for a person."""
    left = answer.quarantine_left_s
    out = "for good" if answer.for_good else f"for {left / 60:.0f} min more"
    lines = [
        f"swarm at {url}, wallet {address_of(answer.wallet)}: {answer.calls:,} accepted calls, "
        f"{answer.quarantines} quarantines, " + (f"in quarantine {out}" if left > 0 else "not in quarantine")
    ]
    lines += [f"  {record.id.hex()}  {describe_record(record)}" for record in answer.records]
    return lines if answer.records else [*lines, "  nothing on record"]


def _show_one(state: NodeState, roots: Mapping[str, PublicKey], arguments: argparse.Namespace) -> int:
    url, root, record = _find(state, roots, arguments.record)
    _, evidence = _ask(state, url, root, lambda market: market.record(record.id))
    again = _recompute(arguments.state_dir, record) if arguments.recompute else None
    if arguments.json:
        shown = {"record": record_fields(record), "evidence": evidence_fields(evidence), "again": again}
        print(json.dumps(shown, indent=1))
        return 0
    print(describe_record(record))
    print("\n".join(_evidence_lines(evidence)))
    if again is not None:
        print("\n".join(_again_lines(again)))
    return 0


def _recompute(folder: Path, record: TrustRecord) -> dict[str, Any]:
    answer = ask_daemon(folder, "POST", f"/recompute/{record.id.hex()}", timeout_s=RECOMPUTE_S)
    if "error" in answer:
        raise Refused("not_found", f"the output cannot be made again: {answer['error']}")
    return answer


def evidence_fields(evidence: Evidence | None) -> dict[str, Any] | None:
    """The figures of some evidence, rows in hexadecimal in the wire dtype."""
    if evidence is None:
        return None
    return {
        "backbone": evidence.backbone.hex(),
        "device": address_of(evidence.device),
        "lease": evidence.lease.hex(),
        "epoch": evidence.epoch,
        "plan": evidence.plan.hex(),
        "window": evidence.window.name,
        "call": evidence.call,
        "layer": evidence.layer,
        "expert": evidence.expert,
        "experts": list(evidence.ids),
        "d": evidence.d,
        "limit": evidence.limit,
        "at": evidence.at,
        "numerics": evidence.numerics,
        "precision": evidence.precision,
        "wire_dtype": evidence.wire_dtype,
        "row_sha256": evidence.row_digest.hex(),
        "output_sha256": evidence.output_digest.hex(),
        "row": evidence.row.hex(),
        "output": evidence.output.hex(),
        "expected": evidence.expected.hex(),
    }


def _evidence_lines(evidence: Evidence | None) -> list[str]:
    if evidence is None:
        return ["no evidence is kept for it"]
    lines = [
        f"call {evidence.call}, layer {evidence.layer}, "
        + (f"experts {list(evidence.ids)} (partial sum)" if evidence.ids else f"expert {evidence.expert}")
        + f" of {evidence.window} at {evidence.precision}, epoch {evidence.epoch}",
        f"device    {address_of(evidence.device)}",
        f"numerics  {evidence.numerics}",
        f"d         {evidence.d:.3g}; an honest replica of that class is off by {evidence.limit:g} at most",
        f"row       sha256 {evidence.row_digest.hex()}",
        f"output    sha256 {evidence.output_digest.hex()}",
    ]
    names = {"row sent": evidence.row, "answered": evidence.output, "expected": evidence.expected}
    lines += [f"{name:<9} {_row_line(data, evidence.wire_dtype)}" for name, data in names.items() if data]
    if not evidence.row:
        lines.append("the row itself is not kept")
    return lines


def _row_line(data: bytes, wire_dtype: str) -> str:
    from .tensors import WIRE_TORCH, from_buffer

    row = from_buffer(data, WIRE_TORCH[wire_dtype]).float()
    first = ", ".join(f"{value:.5g}" for value in row[:FIRST_VALUES].tolist())
    return f"{len(row)} values of {wire_dtype}, norm {float(row.norm()):.5g}: {first}, ..."


def _again_lines(again: Mapping[str, Any]) -> list[str]:
    """What this node's own kernel gives now, and what follows from it."""
    answered, expected, limit = again["d_answered"], again["d_expected"], again["limit"]
    lines = [
        f"made again here: d = {answered:.3g} from what was answered"
        + ("" if expected is None else f", {expected:.3g} from what the backbone expected")
    ]
    if not again["digests_match"]:
        lines.append("the rows are not those that the digests name: dispute it")
    elif answered <= limit < (expected if expected is not None else 0.0):
        lines.append(
            "this node stands by its answer: dispute it (kvasir-node audit dispute ID --reason TEXT)"
        )
    elif expected is not None and expected <= limit < answered:
        lines.append(
            "this node now gives what the backbone expected: the answer was wrong when it was given; look "
            "at this machine's memory and `kvasir-node doctor`"
        )
    return lines


# --- dispute -------------------------------------------------------------------------------------------


def _dispute(state: NodeState, roots: Mapping[str, PublicKey], begins: str, reason: str) -> int:
    url, root, record = _find(state, roots, begins)
    filed = _ask(state, url, root, lambda market: market.dispute(record.id, reason=reason))
    print(f"the operator is told: {describe_record(filed)}")
    if filed.id != record.id:
        print(f"(the violation led to quarantine {filed.id.hex()}, which is what is disputed)")
    return 0

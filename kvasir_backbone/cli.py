"""The `kvasir-backbone` command. The only place where this package reads arguments and the environment."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvasir_node.config import format_size, parse_size
from kvasir_node.sources import HUB
from market.moving import parse_patience
from relay import logs
from relay.errors import ConfigError, IdentityError, KvasirError, Refused, Unreachable
from relay.loop import run as run_loop
from relay.places import state_folder

from .addresses import Door, find_door
from .admission import AdmissionConfig
from .bundled import bundled_model_path
from .config import (
    DEFAULT_PORT,
    DRAFTINGS,
    DTYPES,
    FALLBACKS,
    MAX_RUNNING,
    MAX_WAITING,
    STEP_THREADS,
    BackboneConfig,
)
from .hub import HubAccess, HubReference, parse_model

if TYPE_CHECKING:
    from .daemon import Backbone

USAGE_ERROR: Final = 2
FAILED: Final = 1
HARD_EXIT: Final = 130
_TIMEOUT_S: Final = 60.0
_MAX_ANSWER: Final = 256 << 20
_MOVES_SHOWN: Final = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `kvasir-backbone` command; the process's exit status.

    0: done. 1: it did not work out (nothing answers, refused). 2: something that the operator must change.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except (ConfigError, IdentityError) as error:
        print(f"kvasir-backbone: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (KvasirError, OSError) as error:
        print(f"kvasir-backbone: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return HARD_EXIT


def default_state_dir(environment: Mapping[str, str], platform: str = sys.platform) -> Path:
    """The state folder where none is named: as each system wants it."""
    return state_folder("backbone", environment, platform)


# --- arguments ---------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvasir-backbone",
        description="Serve a Mixture-of-Experts model whose experts live on a swarm of other machines.",
    )
    commands = parser.add_subparsers(title="commands", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--state-dir",
        type=Path,
        default=default_state_dir(os.environ),
        help="the swarm's keys, ledger and receipts (default: %(default)s)",
    )

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[shared])
        sub.set_defaults(command=command)
        return sub

    _add_up(add("up", _up, "Run backbone, market and relay on one port, until stopped (Ctrl-C)."))
    for name, command, text in (
        ("status", _status, "What the running backbone does, as JSON."),
        ("gaps", _gaps, "Which expert windows lack owners, and why."),
        ("nodes", _nodes, "Every node: wallet, windows, calls, carried bytes, credit, path."),
        ("relays", _relays, "Every relay: load, round trips, sessions."),
        ("credits", _credits, "Every wallet's balance, and whether the ledger holds."),
    ):
        add(name, command, text).add_argument("--json", action="store_true", help="as JSON")
    trust = add("trust", _trust, "Violations, quarantines and disputes: the latest, or one wallet's.")
    trust.add_argument("wallet", nargs="?", help="a wallet's address (see `nodes`)")
    trust.add_argument("--json", action="store_true", help="as JSON")
    disputes = add("disputes", _disputes, "What owners object to, what waits for a decision first.")
    disputes.add_argument("--json", action="store_true", help="as JSON")
    decide = add("decide", _decide, "Uphold or overturn a violation or quarantine.")
    decide.add_argument("record", metavar="ID", help="the record's id (see `trust`, `disputes`)")
    word = decide.add_mutually_exclusive_group(required=True)
    word.add_argument("--uphold", action="store_true", help="it was right")
    word.add_argument(
        "--overturn", action="store_true", help="it was wrong: the quarantine ends, what it took goes back"
    )
    decide.add_argument("--reason", required=True, help="why; the owner reads it")
    drain = add("drain", _drain, "End a node's claims in order, or the whole backbone without one.")
    drain.add_argument("device", nargs="?", help="the node's device address, or how it begins (see `nodes`)")
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "model",
        nargs="?",
        default=str(bundled_model_path()),
        help="folder of a Hugging Face MoE checkpoint, or OWNER/NAME[@REVISION] on the hub "
        "(default: the bundled tiny model)",
    )
    up.add_argument("--model", dest="model_option", help="the same, as an option")
    up.add_argument("--model-name", default="", help="its name in the API (default: the folder's)")
    up.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines join"
    )
    up.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s; 0: any free one")
    up.add_argument(
        "--public-url",
        action="append",
        default=[],
        help="a URL that nodes reach this port by, where it is not http://HOST:PORT; may be repeated",
    )
    up.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="NETWORK",
        help="a reverse proxy whose X-Forwarded-For counts, such as 10.0.0.0/8; may be repeated",
    )
    up.add_argument("--dtype", choices=DTYPES, default="auto", help="compute and wire dtype")
    up.add_argument("--kv-bytes", type=_size, help="attention cache (default: a quarter of free memory)")
    up.add_argument(
        "--max-slowdown",
        type=float,
        default=AdmissionConfig().stretch,
        metavar="N",
        help="refuse requests (429) that would make texts come more than N times slower than one by itself "
        "(default: %(default)g)",
    )
    up.add_argument(
        "--max-wait",
        type=float,
        default=AdmissionConfig().max_wait_s,
        metavar="SECONDS",
        help="refuse requests (429) that would wait in line longer (default: a tenth of a first token)",
    )
    up.add_argument(
        "--max-running",
        type=int,
        default=MAX_RUNNING,
        help="requests computed at one time, as far as the attention cache holds them (default: %(default)s)",
    )
    up.add_argument(
        "--max-waiting",
        type=int,
        default=MAX_WAITING,
        help="requests that wait for that; more are answered 429 (default: %(default)s)",
    )
    up.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the part of the model without experts (default: 1)",
    )
    up.add_argument(
        "--step-threads",
        type=int,
        default=STEP_THREADS,
        help="threads that compute while others wait for experts (default: %(default)s)",
    )
    up.add_argument(
        "--drafting",
        choices=DRAFTINGS,
        default=DRAFTINGS[0],
        help="guess coming tokens where that pays; never changes a text (default: %(default)s)",
    )
    up.add_argument("--window-bytes", type=_size, default="256MiB", help="size of a window")
    up.add_argument(
        "--local-layers",
        type=int,
        default=0,
        metavar="N",
        help="run the experts of the first N MoE layers here and give them to no node (default: 0)",
    )
    up.add_argument("--fallback", choices=FALLBACKS, default="disk", help="what computes ownerless experts")
    up.add_argument(
        "--weighted",
        action="store_true",
        help="nodes get the combine weights too and send one sum a row: up to k times less upload",
    )
    up.add_argument(
        "--move-after",
        default="60",
        metavar="SECONDS",
        help="how long a window lacks owners before one of another window is asked to move; or never "
        "(default: %(default)s)",
    )
    up.add_argument(
        "--relay-only",
        action="store_true",
        help="never dial nodes directly, even where it works",
    )
    up.add_argument(
        "--no-relay",
        action="store_true",
        help="list no relay here: those that announce themselves (kvasir-relay) carry all circuits",
    )
    up.add_argument("--expert-memory", type=_size, default="1GiB", help="memory for fallback and audits")
    up.add_argument(
        "--expert-cache", type=_size, default="8GB", help="disk for single experts of a hub model"
    )
    up.add_argument("--log-level", default="info", choices=tuple(logs.LEVELS))
    up.add_argument("--json-logs", action="store_true", help="JSON log lines on a terminal, too")
    up.add_argument("--log-file", type=Path, help="log to this file instead of standard error")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- up ----------------------------------------------------------------------------------------------


def _up(arguments: argparse.Namespace) -> int:
    logs.configure(
        json=True if arguments.json_logs else None, level=arguments.log_level, file=arguments.log_file
    )
    model = parse_model(arguments.model_option or arguments.model)
    config = BackboneConfig(
        **({"hub": model} if isinstance(model, HubReference) else {"model": model}),
        hub_access=HubAccess(os.environ.get("HF_ENDPOINT") or HUB, os.environ.get("HF_TOKEN") or None),
        model_name=arguments.model_name,
        host=arguments.host,
        port=arguments.port,
        state_dir=arguments.state_dir,
        public_urls=tuple(arguments.public_url),
        trusted_proxies=tuple(arguments.trusted_proxy),
        dtype=arguments.dtype,
        window_bytes=arguments.window_bytes,
        kv_bytes=arguments.kv_bytes,
        max_running=arguments.max_running,
        max_waiting=arguments.max_waiting,
        step_threads=arguments.step_threads,
        tensor_parallel=arguments.tensor_parallel,
        drafting=arguments.drafting,
        admission=AdmissionConfig(stretch=arguments.max_slowdown, max_wait_s=arguments.max_wait),
        local_layers=arguments.local_layers,
        fallback=arguments.fallback,
        expert_memory_bytes=arguments.expert_memory,
        move_after_s=parse_patience(arguments.move_after),
        relay_only=arguments.relay_only,
        relay=not arguments.no_relay,
        weighted=arguments.weighted,
        expert_cache_bytes=arguments.expert_cache,
        use_uvloop=os.environ.get("KVASIR_LOOP") != "default",
    )
    # One compute thread: two spinning OpenMP pools on few cores are far slower than one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_loop(_run(config), use_uvloop=config.use_uvloop)
    return 0


async def _run(config: BackboneConfig) -> None:
    from .daemon import run

    stop = asyncio.Event()
    _on_signals(stop)
    await run(config, stop=stop, on_open=_greet)


def _on_signals(stop: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM ends the daemon in order, the second at once."""
    loop = asyncio.get_running_loop()

    def ask(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ask, int(number))
        except NotImplementedError:  # Windows
            signal.signal(number, lambda received, _: loop.call_soon_threadsafe(ask, received))


def _greet(backbone: Backbone) -> None:
    """Tell the operator how to join and use the swarm."""
    name, url = backbone.config.name, backbone.url
    body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 40})
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold]Kvasir[/bold] serves {name} at {url}/v1 once it is loaded.")
    console.print(f"Nodes join with:  kvasir-node run '{backbone.join}'")
    console.print(f"Then try:         curl {url}/v1/completions \\")
    console.print(f"                    -H 'Content-Type: application/json' -d '{body}'", markup=False)


# --- asking the running daemon -----------------------------------------------------------------------


def _ask(door: Door, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Ask the daemon behind `door`. Raises `Unreachable` or `Refused`."""
    parts = urlsplit(door.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {door.token}"}
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body)
    try:
        connection.request(method, f"/backbone/v1/{path}", body=data, headers=headers)
        response = connection.getresponse()
        answer = json.loads(response.read(_MAX_ANSWER))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(f"the backbone at {door.url} does not answer ({error}): is it running?") from None
    finally:
        connection.close()
    if response.status != 200:
        failure = answer.get("error", {}) if isinstance(answer, dict) else {}
        raise Refused(str(failure.get("code")), str(failure.get("message", f"HTTP {response.status}")))
    assert isinstance(answer, dict)
    return answer


def _show(arguments: argparse.Namespace, path: str, table: Callable[[dict[str, Any]], list[Any]]) -> int:
    answer = _ask(find_door(arguments.state_dir), "GET", path)
    if arguments.json:
        print(json.dumps(answer))
        return 0
    console = _console()
    for part in table(answer):
        console.print(part)
    return 0


def _console() -> Console:
    """Standard output; wide where it is no terminal, so that nothing is cut."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in ("why", "windows", "state"))
    return table


def _short(address: str) -> str:
    """Enough of an address to tell it from others; `--json` has the whole."""
    return address[:8]


def _status(arguments: argparse.Namespace) -> int:
    answer = _ask(find_door(arguments.state_dir), "GET", "status")
    if arguments.json:
        print(json.dumps(answer))
        return 0
    console = _console()
    console.print(f"{answer['model']} at {answer['url']}: {answer['phase']}, up {answer['uptime_s']:.0f} s")
    if "engine" in answer:
        engine = answer["engine"]
        console.print(
            f"{engine['running']} requests running, {engine['waiting']} waiting, "
            f"{engine['micro_batches']} micro-batches, {engine['tokens_per_trip']:.2f} tokens a trip "
            f"({engine['accepted']:,} of {engine['drafted']:,} drafted tokens stood)"
        )
    if "coverage" in answer:
        dispatch = answer["dispatch"]
        console.print(
            f"coverage {answer['coverage']:.0%}, {answer.get('tokens_per_s', 0.0):.1f} tokens/s, "
            f"{dispatch['calls']:,} calls, {answer['fallback_rows']:,} rows by the fallback, "
            f"numerics {answer['numerics']}"
        )
        audit, carried = answer["audit"], answer["carried"]
        console.print(
            f"{carried['bytes']:,} bytes carried ({carried['mode']}), {carried['bytes_per_s']:,.0f}/s; "
            f"{audit['rate']:.1%} of calls audited, {audit['cpu_share']:.1%} of the CPU, "
            f"{audit['violations']:,} violations"
        )
    console.print(f"join: {answer['join']}")
    return 0


def _gaps(arguments: argparse.Namespace) -> int:
    return _show(arguments, "gaps", _gaps_table)


def _gaps_table(answer: dict[str, Any]) -> list[Any]:
    table = _table("window", "owners", "loading", "target", "demand", "by fallback", "why")
    rows = sorted(answer["windows"], key=lambda row: (row["connected"], row["window"]))
    for row in rows:
        owners = f"{row['connected']}"
        if row["connected"] < row["replicas"]:
            owners += f" of {row['replicas']}"
        style = "red" if not row["connected"] else None
        demand = f"{row.get('demand_rows_per_s', 0.0):.1f} rows/s"
        counts = (owners, str(row["loading"]), str(row.get("target", "?")))
        why = row.get("reason", "the market does not answer")
        table.add_row(row["window"], *counts, demand, f"{row['fallback_rows']:,}", why, style=style)
    uncovered = sum(not row["connected"] for row in rows)
    summary = f"coverage {answer['coverage']:.0%}"
    if uncovered:
        served = "served from the checkpoint" if answer["fallback"] == "disk" else "not served: 503"
        summary += f"; {uncovered} of {len(rows)} windows have no owner ({served})"
    moves = [
        f"{_ago(move['age_s'])} ago: {move['leaves']} to {move['takes']}, {move['state']}: {move['reason']}"
        for move in answer["moves"][:_MOVES_SHOWN]
    ]
    return [table, summary, *(["moves of the last hour:", *map(escape, moves)] if moves else [])]


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _nodes(arguments: argparse.Namespace) -> int:
    return _show(arguments, "nodes", _nodes_table)


def _nodes_table(answer: dict[str, Any]) -> list[Any]:
    table = _table("device", "wallet", "windows", "state", "calls", "carried", "escrow", "available", "path")
    for row in answer["nodes"]:
        states = sorted({claim["state"] for claim in row["claims"]}) or ["gone"]
        state = ", ".join(states) + (f" ({row['breaker']})" if row["breaker"] else "")
        credit = ("?" if row[name] is None else f"{row[name]:.6f}" for name in ("escrow", "available"))
        path = row["path"] if row["relay"] is None else f"relay {_place(row['relay'])}"
        cells = (f"{row['calls']:,}", format_size(row["carried_bytes"]), *credit, path)
        windows = ", ".join(row["windows"]) or "-"
        table.add_row(_short(row["device"]), row["wallet"], windows, state, *cells)
    return [table if answer["nodes"] else "no nodes yet"]


def _relays(arguments: argparse.Namespace) -> int:
    return _show(arguments, "relays", _relays_table)


def _relays_table(answer: dict[str, Any]) -> list[Any]:
    table = _table("relay", "state", "load", "circuits", "rate", "round trip", "devices'", "sessions")
    for row in answer["relays"]:
        load = row["load"]
        state = "connected" if row["connected"] else "not connected"
        if load is not None and load["draining"]:
            state = "draining"
        busy = ("?", "?", "?")
        if load is not None:
            busy = (f"{load['share']:.0%}", f"{load['circuits']:,}", f"{format_size(load['bytes_per_s'])}/s")
        devices = "?" if row["devices_rtt_s"] is None else f"{_ms(row['devices_rtt_s'])} ({row['devices']})"
        table.add_row(_place(row["url"]), state, *busy, _ms(row["rtt_s"]), devices, f"{row['sessions']:,}")
    return [table if answer["relays"] else "the market lists no relay"]


def _place(url: str) -> str:
    """A relay's URL without what all have."""
    return url.removesuffix("/relay/v1")


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.1f} ms"


def _credits(arguments: argparse.Namespace) -> int:
    return _show(arguments, "credits", _credits_table)


def _credits_table(answer: dict[str, Any]) -> list[Any]:
    table = _table("wallet", "credit", "escrow", "available", "void", "receipts", "calls")
    for row in answer["wallets"]:
        amounts = (f"{row[name]:.6f}" for name in ("credit", "escrow", "available", "void"))
        table.add_row(row["wallet"], *amounts, f"{row['receipts']:,}", f"{row['calls']:,}")
    verdict = "the ledger is balanced" if answer["balanced"] else "[red]THE LEDGER DOES NOT BALANCE[/red]"
    return [table, f"{verdict}: {answer['entries']:,} entries, {answer['issued_bytes']:,} bytes issued"]


def _trust(arguments: argparse.Namespace) -> int:
    wallet = "" if arguments.wallet is None else f"?wallet={quote(arguments.wallet, safe='')}"
    return _show(arguments, f"trust{wallet}", _trust_table)


def _trust_table(answer: dict[str, Any]) -> list[Any]:
    table = _table("when", "wallet", "what", "credit", "state", "why")
    for row in answer["records"]:
        table.add_row(*_record_cells(row))
    parts: list[Any] = [table if answer["records"] else "nothing on record"]
    if "calls" in answer:
        left = answer["quarantine_left_s"]
        out = "for good" if answer["for_good"] else f"for {left / 60:.0f} min more"
        standing = f"in quarantine {out}" if left > 0 else "not in quarantine"
        parts.append(f"{answer['calls']:,} accepted calls, {answer['quarantines']} quarantines, {standing}")
    return parts


def _record_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    what = f"{row['kind']} {row['number']}" if row["kind"] == "quarantine" else row["kind"]
    state = row["decision"] or ("disputed" if row["disputed_at"] is not None else "")
    why = f"{row['reason']} [{row['id']}]"
    if row["dispute"]:
        why += f"; the owner says: {row['dispute']}"
    if row["decision_reason"]:
        why += f"; {row['decision']}: {row['decision_reason']}"
    when = time.strftime("%m-%d %H:%M", time.localtime(row["at"]))
    amount = f"{row['amount']:.6f}" if row["amount"] else ""
    return (when, _short(row["wallet"]), what, amount, state, escape(why))


def _disputes(arguments: argparse.Namespace) -> int:
    return _show(arguments, "disputes", _trust_table)


def _decide(arguments: argparse.Namespace) -> int:
    body = {"record": arguments.record, "uphold": arguments.uphold, "reason": arguments.reason}
    answer = _ask(find_door(arguments.state_dir), "POST", "decide", body)
    print(f"{answer['kind']} {answer['id']} of wallet {answer['wallet']} is {answer['decision']}")
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    body = {} if arguments.device is None else {"device": arguments.device}
    answer = _ask(find_door(arguments.state_dir), "POST", "drain", body)
    if arguments.device is None:
        print("the backbone is draining and will stop")
    else:
        print(f"ended {answer['claims']} claims of {arguments.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

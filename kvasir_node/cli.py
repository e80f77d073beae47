"""The `kvasir-node` command. The only place where this package reads arguments and the environment."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar, cast

import aiohttp
import base58
import structlog
from structlog.typing import EventDict, WrappedLogger

from market.client import MarketClient
from market.messages import CreditStatement, credits_of
from market.plans import PRECISIONS
from market.wallet import create_wallet, load_wallet, parse_challenge, sign_challenge
from relay import logs
from relay.errors import ConfigError, IdentityError, KvasirError, Refused, Unreachable
from relay.identity import PublicKey, address_of, fingerprint, parse_address
from relay.keyfiles import MAGIC
from relay.links import JoinLink, parse_join_link
from relay.loop import run as run_loop
from relay.places import state_folder

from .auditcli import add_audit, run_audit
from .config import DEVICES, NodeConfig, parse_size
from .control import ask_daemon
from .limits import OwnerRules, parse_hours, parse_share
from .logbook import LOG_FILE, LogBook, last_lines, new_lines
from .receipts import Balance, read_balances
from .sources import HUB
from .state import NodeState
from .status import NodeStatus, describe

if TYPE_CHECKING:
    from .doctor import Check

T = TypeVar("T")

USAGE_ERROR: Final = 2
FAILED: Final = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `kvasir-node` command; the process's exit status.

    0: done. 1: it did not work out (nothing answers, refused). 2: something that the owner must change.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except (ConfigError, IdentityError) as error:
        print(f"kvasir-node: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (KvasirError, OSError) as error:
        print(f"kvasir-node: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


def default_state_dir(environment: Mapping[str, str], platform: str = sys.platform) -> Path:
    """The state folder where none is named: as each system wants it."""
    return state_folder("node", environment, platform)


# --- arguments ---------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvasir-node", description="Lend this machine's memory to a swarm that runs big MoE models."
    )
    commands = parser.add_subparsers(title="commands", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--state-dir",
        type=Path,
        default=default_state_dir(os.environ),
        help="this node's keys, receipts, cache and log (default: %(default)s)",
    )
    wallet = argparse.ArgumentParser(add_help=False)
    wallet.add_argument(
        "--wallet", type=Path, help="the wallet's key file, Solana's id.json (default: in the state folder)"
    )

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, *parents: Any) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[shared, *parents])
        sub.set_defaults(command=command)
        return sub

    _add_run(add("run", _run, "Join a swarm and serve until stopped (Ctrl-C).", wallet))
    login = add("login", _login, "Prove the wallet for this device, without serving.", wallet)
    login.add_argument("join", metavar="JOINLINK", help="http://HOST:PORT#SWARM, from the operator")
    login.add_argument(
        "--address", help="the wallet is elsewhere: print the text, read its signature (see `wallet --sign`)"
    )
    keys = add("wallet", _wallet, "Show, make or use a wallet.", wallet)
    what = keys.add_mutually_exclusive_group()
    what.add_argument("--create", action="store_true", help="make the wallet file")
    what.add_argument("--sign", action="store_true", help="sign the login text given on standard input")
    keys.add_argument("--encrypt", action="store_true", help="with --create: protect it by a passphrase")
    status = add("status", _status, "What the running node does.")
    status.add_argument("--json", action="store_true", help="the whole status as JSON")
    credits = add("credits", _credits, "What this node earned, by its receipts and by the market's word.")
    credits.add_argument("--json", action="store_true", help="as JSON")
    credits.add_argument("--offline", action="store_true", help="the receipts alone, no market")
    credits.add_argument("--verify", action="store_true", help="check every receipt's signature")
    add_audit(add("audit", run_audit, "What audits found, and objecting to it."))
    show = add("logs", _logs, "The node's log.")
    show.add_argument("-n", "--lines", type=int, default=50, help="how many (default: %(default)s)")
    show.add_argument("-f", "--follow", action="store_true", help="go on as lines come")
    doctor = add("doctor", _doctor, "Look for what keeps this node from serving, and how to mend it.", wallet)
    doctor.add_argument(
        "join", metavar="JOINLINK", nargs="?", help="the swarm (default: those joined before)"
    )
    doctor.add_argument("--json", action="store_true", help="as JSON")
    _add_resources(doctor)
    add("pause", _pause, "Stop serving until `resume`: windows are given back, weights stay on disk.")
    add("resume", _resume, "Serve again after `pause`.")
    add("stop", _stop, "Stop the running node in order.")
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("join", metavar="JOINLINK", help="http://HOST:PORT#SWARM, from the operator")
    run.add_argument("--name", default="", help="a name for people")
    _add_resources(run)
    run.add_argument(
        "--weights-from",
        default="auto",
        metavar="auto|backbone|hub|URL",
        help="where weights come from (default: mirrors, the hub for a hub model, the backbone)",
    )
    run.add_argument("--mirror", action="append", default=[], help="an HTTP server with the model's files")
    run.add_argument("--no-hub", action="store_true", help="never fetch from the Hugging Face hub")
    run.add_argument("--threads", type=int, default=1, help="threads for experts (default: %(default)s)")
    run.add_argument("--nice", type=int, default=5, help="lower priority, 0 to 19 (default: %(default)s)")
    run.add_argument(
        "--max-cpu", type=_typed(parse_share), default=1.0, help="share of all processors, e.g. 25%%"
    )
    run.add_argument("--upload-limit", type=_size, help="bytes a second to send at most, e.g. 2MB")
    run.add_argument(
        "--hours", type=_typed(parse_hours), help="serve at these hours of the day only, e.g. 22-7"
    )
    run.add_argument("--on-battery", action="store_true", help="serve on battery too (default: pause)")
    run.add_argument(
        "--on-metered", action="store_true", help="serve over a metered connection too (default: pause)"
    )
    run.add_argument(
        "--no-measure", action="store_true", help="do not try out memory, disk and link at the start"
    )
    direct = run.add_mutually_exclusive_group()
    direct.add_argument(
        "--listen",
        default="",
        metavar="ADDRESS:PORT",
        help="take direct links there (default: a free port of every interface)",
    )
    direct.add_argument("--no-direct", action="store_true", help="take none: relays only")
    run.add_argument(
        "--public-address",
        default="",
        metavar="ADDRESS:PORT",
        help="the internet reaches --listen there, by a port that your router forwards",
    )
    run.add_argument(
        "--upnp", action="store_true", help="ask the router for such a port by UPnP; given back at the end"
    )
    run.add_argument("--log-level", default="info", choices=tuple(logs.LEVELS))
    run.add_argument(
        "--json-logs", action="store_true", help="log lines instead of the display on a terminal"
    )


def _add_resources(command: argparse.ArgumentParser) -> None:
    """What of the machine a node uses: `run` takes it, `doctor` checks it."""
    command.add_argument(
        "--budget", type=_size, help="memory for experts, e.g. 4GB (default: half of what is free)"
    )
    command.add_argument(
        "--precision", default="auto", choices=("auto", *PRECISIONS), help="how experts are kept in memory"
    )
    command.add_argument("--cache-dir", type=Path, help="the weight cache (default: in the state folder)")
    command.add_argument("--cache-bytes", type=_size, help="hard cap of the weight cache, e.g. 50GB")
    command.add_argument(
        "--reserve-bytes", type=_size, default=1_000_000_000, help="disk to leave free (default: 1GB)"
    )
    command.add_argument(
        "--device",
        default="auto",
        choices=DEVICES,
        help="where experts run (auto: a GPU if torch finds one)",
    )


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser of ours as argparse wants it: its `ConfigError` is a usage error."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


_size: Final = _typed(parse_size)


def config_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> NodeConfig:
    """The configuration that arguments and environment ask for. Raises `ConfigError`."""
    return NodeConfig(
        join=parse_join_link(arguments.join),
        state_dir=arguments.state_dir,
        name=arguments.name,
        wallet=arguments.wallet,
        budget_bytes=arguments.budget,
        precision=arguments.precision,
        cache_dir=arguments.cache_dir,
        cache_bytes=arguments.cache_bytes,
        reserve_bytes=arguments.reserve_bytes,
        weights_from=arguments.weights_from,
        mirrors=tuple(arguments.mirror),
        hub=not arguments.no_hub,
        hub_endpoint=environment.get("HF_ENDPOINT") or HUB,
        hub_token=environment.get("HF_TOKEN") or None,
        device=arguments.device,
        threads=arguments.threads,
        nice=arguments.nice,
        max_cpu=arguments.max_cpu,
        upload_limit=arguments.upload_limit,
        rules=OwnerRules(arguments.hours, arguments.on_battery, arguments.on_metered),
        measure=not arguments.no_measure,
        direct=not arguments.no_direct,
        listen=arguments.listen,
        public_address=arguments.public_address,
        upnp=arguments.upnp,
    )


# --- run ---------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments, os.environ)
    try:
        import torch  # noqa: F401 - said here, in words, rather than by a traceback later
    except ImportError:
        raise ConfigError("a node needs torch: pip install 'kvasir[node]'") from None
    passphrase = _passphrase(config.wallet_file)
    live = sys.stderr.isatty() and not arguments.json_logs
    book = LogBook(config.state_dir / LOG_FILE, copy=None if live else sys.stderr)
    logs.configure(json=True, level=arguments.log_level)
    stream = cast(TextIO, book)

    def named(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**event, "node": config.name} if config.name else event

    structlog.configure(
        processors=[named, *structlog.get_config()["processors"]],
        logger_factory=lambda *names: logs.LineLogger(names[0] if names else "kvasir", stream),
    )
    use_uvloop = os.environ.get("KVASIR_LOOP") != "default"
    try:
        run_loop(_serve(config, passphrase, live=live), use_uvloop=use_uvloop)
    finally:
        book.close()
    return 0


async def _serve(config: NodeConfig, passphrase: bytes | None, *, live: bool) -> None:
    from rich.console import Console

    from .daemon import run
    from .display import show

    status = NodeStatus(name=config.name)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    shown = asyncio.create_task(show(status, Console(stderr=True))) if live else None
    try:
        await run(config, stop=stop, status=status, passphrase=passphrase)
    finally:
        if shown is not None:
            shown.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await shown


def _stop_on_signals(stop: asyncio.Event) -> None:
    """SIGINT and SIGTERM set `stop`; a second one, or one while the process ends, ends it at once.

    The handlers stay: serving is the last thing that this process does.
    """
    loop = asyncio.get_running_loop()
    stopped: list[int] = []

    def handle(number: int, frame: object = None) -> None:
        if stopped or stop.is_set() or loop.is_closed():
            os._exit(128 + number)
        stopped.append(number)
        loop.call_soon_threadsafe(stop.set)

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), handle)


# --- wallet ------------------------------------------------------------------------------------------


def _passphrase(path: Path, *, twice: bool = False) -> bytes | None:
    """The passphrase of an encrypted key file (or a new one, `twice`); None where none is needed."""
    if not twice:
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    return None
        except OSError:
            return None
    known = _known_passphrase()
    if known is not None:
        return known
    if not sys.stdin.isatty():
        raise ConfigError(f"{path} is encrypted: set KVASIR_WALLET_PASSPHRASE, or run this on a terminal")
    first = getpass.getpass(f"Passphrase of {path}: ")
    if twice and getpass.getpass("Again: ") != first:
        raise ConfigError("the two passphrases differ: try again")
    return first.encode("utf-8")


def _known_passphrase() -> bytes | None:
    known = os.environ.get("KVASIR_WALLET_PASSPHRASE")
    return None if known is None else known.encode("utf-8")


def _wallet(arguments: argparse.Namespace) -> int:
    path: Path = arguments.wallet or arguments.state_dir / "wallet.json"
    if arguments.create:
        secret = _passphrase(path, twice=True) if arguments.encrypt else None
        key = create_wallet(path, passphrase=secret)
        print(f"{key.address}\nkept in {path}: make a copy of that file, it cannot be made again")
        return 0
    try:
        key = load_wallet(path, passphrase=_passphrase(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no wallet at {path}: `kvasir-node wallet --create` makes one") from None
    if not arguments.sign:
        print(key.address)
        return 0
    text = sys.stdin.read().rstrip("\n")
    challenge = parse_challenge(text)
    if challenge.wallet != key.public:
        raise IdentityError(
            f"the text is for wallet {address_of(challenge.wallet)}, and this is {key.address}"
        )
    print(base58.b58encode(sign_challenge(text, key)).decode("ascii"))
    return 0


def _login(arguments: argparse.Namespace) -> int:
    link = parse_join_link(arguments.join)
    return run_loop(_login_at(arguments, link), use_uvloop=os.environ.get("KVASIR_LOOP") != "default")


async def _login_at(arguments: argparse.Namespace, link: JoinLink) -> int:
    state = NodeState(arguments.state_dir)
    keys = state.device_keys()
    pinned = state.pin(link.url, link.root)
    async with aiohttp.ClientSession() as http:
        market = MarketClient(link.url, http=http, root=pinned, key=keys.signing)
        root = (await market.swarm()).root
        if pinned is None:
            state.pin(link.url, root)
            print(f"first contact with this swarm; its key is {fingerprint(root)}", file=sys.stderr)
        if arguments.address:
            wallet = parse_address(arguments.address)
            text = await market.challenge(wallet, keys.signing.public, keys.exchange.public)
            print(text)
            print("\nSign this within 5 minutes (`kvasir-node wallet --sign`), then paste:", file=sys.stderr)
            signature = _signature(await asyncio.to_thread(sys.stdin.readline))
            grant = await market.submit_grant(text, signature, keys.signing)
        else:
            path: Path = arguments.wallet or arguments.state_dir / "wallet.json"
            key = state.wallet(path, create=arguments.wallet is None, passphrase=_passphrase(path))
            grant = await market.login(key, keys.signing, keys.exchange)
    state.store_grant(grant)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(grant.expires_at))
    print(f"device {address_of(grant.device)} may serve for wallet {address_of(grant.wallet)} until {until}")
    return 0


def _signature(line: str) -> bytes:
    try:
        signature: bytes = base58.b58decode(line.strip())
    except ValueError:
        signature = b""
    if len(signature) != 64:
        raise ConfigError("a signature is 64 bytes in base58: copy the whole line")
    return signature


# --- what the owner asks -----------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    snapshot = ask_daemon(arguments.state_dir, "GET", "/status")
    print(json.dumps(snapshot, indent=1) if arguments.json else "\n".join(describe(snapshot)))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    ask_daemon(arguments.state_dir, "POST", "/stop")
    print("the node drains and stops")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import describe_checks, exit_status

    checks = run_loop(_examine(arguments), use_uvloop=os.environ.get("KVASIR_LOOP") != "default")
    if arguments.json:
        print(json.dumps({"v": 1, "checks": [check.fields() for check in checks]}, indent=1))
    else:
        print("\n".join(describe_checks(checks)))
    return exit_status(checks)


async def _examine(arguments: argparse.Namespace) -> list[Check]:
    """The machine's checks, then those of each swarm: the one given, or those joined before."""
    from .doctor import Tools, examine_machine, no_swarm
    from .doctor_swarm import examine_swarm

    logs.configure(level="error")
    known: dict[str, PublicKey] = {}
    with contextlib.suppress(ConfigError, IdentityError):  # the state folder has a check of its own
        known = NodeState(arguments.state_dir).roots()
    if arguments.join is not None:
        links = [parse_join_link(arguments.join)]
    else:
        links = [JoinLink(url, root) for url, root in sorted(known.items())]
    config = _doctor_config(arguments, links[0] if links else JoinLink("http://no-swarm.invalid", None))
    passphrase = _passphrase(config.wallet_file) if sys.stdin.isatty() else _known_passphrase()
    checks = await examine_machine(config, passphrase=passphrase, tools=Tools())
    async with aiohttp.ClientSession() as http:
        for link in links:
            checks += await examine_swarm(replace(config, join=link), http=http, tools=Tools())
    return checks if links else [*checks, no_swarm()]


def _doctor_config(arguments: argparse.Namespace, link: JoinLink) -> NodeConfig:
    return NodeConfig(
        join=link,
        state_dir=arguments.state_dir,
        wallet=arguments.wallet,
        budget_bytes=arguments.budget,
        precision=arguments.precision,
        cache_dir=arguments.cache_dir,
        cache_bytes=arguments.cache_bytes,
        reserve_bytes=arguments.reserve_bytes,
        device=arguments.device,
    )


def _pause(arguments: argparse.Namespace) -> int:
    ask_daemon(arguments.state_dir, "POST", "/pause")
    print("the node gives its windows back and pauses; `kvasir-node resume` goes on")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    ask_daemon(arguments.state_dir, "POST", "/resume")
    answer = ask_daemon(arguments.state_dir, "GET", "/status")
    print(f"the node may serve again; it is {answer['phase']}")
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    path = arguments.state_dir / LOG_FILE
    if not path.exists() and not arguments.follow:
        raise ConfigError(f"there is no log in {arguments.state_dir}: no node has run there yet")
    for line in last_lines(path, max(0, arguments.lines)):
        print(line)
    if arguments.follow:
        for fresh in new_lines(path):
            if fresh is None:
                time.sleep(0.2)
            else:
                print(fresh, flush=True)
    return 0


def _credits(arguments: argparse.Namespace) -> int:
    state = NodeState(arguments.state_dir)
    roots = state.roots()
    if not roots:
        raise ConfigError(f"{arguments.state_dir} knows no swarm: `kvasir-node run JOINLINK` joins one")
    answers = [
        _credit_of(state, url, root, offline=arguments.offline, verify=arguments.verify)
        for url, root in sorted(roots.items())
    ]
    if arguments.json:
        print(json.dumps(answers, indent=1))
        return 0
    for answer in answers:
        print("\n".join(_credit_lines(answer)))
    return 0


def _credit_of(state: NodeState, url: str, root: PublicKey, *, offline: bool, verify: bool) -> dict[str, Any]:
    balances = read_balances(state.receipts_folder(root), root, verify=verify)
    answer: dict[str, Any] = {
        "swarm": address_of(root),
        "market": url,
        "receipts": [_balance_fields(balance) for balance in balances],
        "credit": str(credits_of(sum(balance.bytes for balance in balances))),
    }
    if not offline:
        use_uvloop = os.environ.get("KVASIR_LOOP") != "default"
        answer["statement"] = run_loop(_statement(state, url, root), use_uvloop=use_uvloop)
    return answer


async def _statement(state: NodeState, url: str, root: PublicKey) -> dict[str, Any]:
    """What the market says of the wallet, or why it says nothing."""
    async with aiohttp.ClientSession() as http:
        market = MarketClient(url, http=http, root=root, key=state.device_keys().signing, timeout=5.0)
        try:
            return _statement_fields(await market.credits())
        except (Unreachable, Refused) as error:
            return {"error": str(error)}


def _statement_fields(statement: CreditStatement) -> dict[str, Any]:
    return {
        "wallet": address_of(statement.wallet),
        "credit": str(statement.credit),
        "escrow": str(credits_of(statement.escrow)),
        "available": str(credits_of(statement.available)),
        "void": str(credits_of(statement.void)),
        "unacknowledged_bytes": statement.unacknowledged,
        "receipts": statement.receipts,
        "calls": statement.calls,
    }


def _balance_fields(balance: Balance) -> dict[str, Any]:
    return {
        "backbone": balance.backbone,
        "wallet": address_of(balance.wallet),
        "credit": str(balance.credit),
        "bytes": balance.bytes,
        "calls": balance.calls,
        "receipts": balance.receipts,
        "sequence": balance.sequence,
        "gaps": balance.gaps,
        "issued_at": balance.issued_at,
    }


def _credit_lines(answer: Mapping[str, Any]) -> list[str]:
    lines = [f"swarm {answer['swarm']} at {answer['market']}"]
    lines += [
        f"  backbone {row['backbone'][:8]}: {row['credit']} credits for {row['calls']:,} calls, receipt "
        f"{row['sequence']}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(row['issued_at']))}"
        + (f", {row['gaps']} gaps in the chain" if row["gaps"] else "")
        for row in answer["receipts"]
    ]
    lines.append(f"  this device's receipts prove {answer['credit']} credits")
    statement = answer.get("statement")
    if statement is None:
        return lines
    if "error" in statement:
        return [*lines, f"  the market gives no statement: {statement['error']}"]
    return [
        *lines,
        f"  the market says of wallet {statement['wallet']}: {statement['credit']} credits "
        f"({statement['escrow']} in escrow, {statement['available']} available, {statement['void']} void)",
    ]


if __name__ == "__main__":
    sys.exit(main())

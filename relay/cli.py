"""`kvasir-relay`: run a relay, or ask for its certificate."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import logs
from .config import RelayConfig
from .daemon import run
from .errors import ConfigError, KvasirError
from .guard import RESERVED_DESCRIPTORS, raise_descriptor_limit
from .loop import run as run_loop
from .operator import load_key

DEFAULTS = RelayConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 0 in order, 1 failed, 2 cannot be done as asked."""
    arguments = _parser().parse_args(argv)
    try:
        logs.configure(json=True if arguments.json_logs else None, level=arguments.log_level)
        if arguments.command == "request":
            print(load_key(arguments.state_dir).request())
            return 0
        config = _config(arguments)
        raise_descriptor_limit(2 * (config.connections + RESERVED_DESCRIPTORS))
        run_loop(_serve(config), use_uvloop=os.environ.get("KVASIR_LOOP") != "default")
    except ConfigError as error:
        print(f"kvasir-relay: {error}", file=sys.stderr)
        return 2
    except (KvasirError, OSError) as error:
        print(f"kvasir-relay: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvasir-relay", description="A relay that cannot read what it carries."
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--state-dir", type=Path, default=_state_dir(), help="where its keys lie (%(default)s)"
    )
    shared.add_argument("--log-level", choices=tuple(logs.LEVELS), default="info")
    shared.add_argument("--json-logs", action="store_true", help="JSON lines even on a terminal")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "request", parents=[shared], help="print what the holder of the swarm's root must certify"
    )
    serve = commands.add_parser("run", parents=[shared], help="serve until SIGTERM")
    serve.add_argument("market", help="the swarm's join link: http://HOST:PORT#SWARM")
    serve.add_argument("--host", default=DEFAULTS.host, help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=DEFAULTS.port, help="port to listen on (%(default)s)")
    serve.add_argument("--public-url", default="", help="where peers reach it; the market lists it there")
    serve.add_argument(
        "--connections", type=int, default=DEFAULTS.connections, help="most in all (%(default)s)"
    )
    serve.add_argument(
        "--address-connections",
        type=int,
        default=DEFAULTS.address_connections,
        help="most from one address (%(default)s)",
    )
    serve.add_argument(
        "--bandwidth",
        type=float,
        default=DEFAULTS.bandwidth / 1e6,
        metavar="MB",
        help="megabytes a second that count as full load, both directions together (0: no bound)",
    )
    serve.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="NETWORK",
        help="a reverse proxy whose X-Forwarded-For counts, such as 10.0.0.0/8; may be repeated",
    )
    serve.add_argument(
        "--drain", type=float, default=DEFAULTS.drain_s, help="seconds for circuits to finish (%(default)s)"
    )
    return parser


def _config(arguments: argparse.Namespace) -> RelayConfig:
    return RelayConfig(
        host=arguments.host,
        port=arguments.port,
        market_url=arguments.market,
        public_url=arguments.public_url,
        state_dir=arguments.state_dir,
        connections=arguments.connections,
        address_connections=arguments.address_connections,
        drain_s=arguments.drain,
        bandwidth=arguments.bandwidth * 1e6,
        trusted_proxies=tuple(arguments.trusted_proxy),
    )


def _state_dir() -> Path:
    named = os.environ.get("KVASIR_STATE_DIR")
    return Path(named) / "relay" if named else Path.home() / ".kvasir" / "relay"


async def _serve(config: RelayConfig) -> None:
    """Run until SIGTERM or SIGINT; a second one exits hard."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    await run(config, stop=stop)


if __name__ == "__main__":
    sys.exit(main())

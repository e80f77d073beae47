"""The command `kvasir-market`: run a market on its own, and keep a swarm's keys.

The environment and the arguments are read here and nowhere else.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from relay.errors import ConfigError, KvasirError
from relay.identity import ROLES, SignedDocument, address_of, fingerprint, open_certificate
from relay.links import JoinLink
from relay.logs import LEVELS, configure
from relay.loop import run

from .config import MarketConfig
from .moving import MoveRules, parse_patience
from .requests import decode_bytes, encode_bytes
from .server import serve
from .swarm import (
    CertificateRequest,
    OperatingKey,
    SwarmKeys,
    certify,
    load_operating_secret,
    load_root,
)
from .wallet import normalise_url


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 0 in order, 1 failed, 2 cannot be done as asked."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except ConfigError as error:
        print(f"kvasir-market: {error}", file=sys.stderr)
        return 2
    except (KvasirError, OSError) as error:
        print(f"kvasir-market: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _state_dir() -> Path:
    named = os.environ.get("KVASIR_STATE_DIR")
    return Path(named) / "market" if named else Path.home() / ".kvasir" / "market"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvasir-market", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    running = commands.add_parser("run", help="run a market on its own")
    _state(running)
    running.add_argument("--database", help="SQLAlchemy URL (default: market.db in the state folder)")
    running.add_argument("--host", default="0.0.0.0", help="address to listen on")
    running.add_argument("--port", type=int, default=8422, help="port to listen on; 0 takes a free one")
    running.add_argument(
        "--public-url",
        action="append",
        default=[],
        metavar="URL",
        help="a URL at which people reach this market; may be given several times",
    )
    running.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="NETWORK",
        help="a reverse proxy whose X-Forwarded-For counts, such as 10.0.0.0/8; may be repeated",
    )
    running.add_argument(
        "--move-after",
        default="60",
        metavar="SECONDS",
        help="how long a window lacks owners before one of another window is asked to move; or never "
        "(default: %(default)s)",
    )
    running.add_argument("--log-level", choices=sorted(LEVELS), default="info")
    running.set_defaults(command=_run)

    swarm = commands.add_parser("swarm", help="the swarm's keys").add_subparsers(required=True)
    making = swarm.add_parser("init", help="make a swarm: its root key and operating keys")
    _state(making)
    making.set_defaults(command=_init)
    showing = swarm.add_parser("show", help="which swarm this is, and until when its certificates last")
    _state(showing)
    showing.set_defaults(command=_show)
    requesting = swarm.add_parser("request", help="ask for a certificate, where the root is kept elsewhere")
    _state(requesting)
    requesting.add_argument("--role", choices=ROLES, required=True)
    requesting.set_defaults(command=_request)
    certifying = swarm.add_parser("certify", help="certify an operating key with the root key kept here")
    _state(certifying)
    certifying.add_argument("request", help="the word that `request` printed where the key is")
    certifying.add_argument("--serial", type=int, help="serial (default: the present minute)")
    certifying.add_argument("--out", type=Path, required=True, help="where to write the certificate")
    certifying.set_defaults(command=_certify)
    return parser


def _state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir", type=Path, default=_state_dir(), help="where its keys lie (%(default)s)"
    )


def _run(arguments: argparse.Namespace) -> None:
    configure(level=arguments.log_level)
    database = arguments.database or f"sqlite:///{arguments.state_dir.absolute() / 'market.db'}"
    config = MarketConfig(
        database=database,
        public_urls=tuple(normalise_url(url) for url in arguments.public_url),
        host=arguments.host,
        port=arguments.port,
        state_dir=arguments.state_dir,
        trusted_proxies=tuple(arguments.trusted_proxy),
        moving=MoveRules(patience_s=parse_patience(arguments.move_after)),
    )
    use_uvloop = os.environ.get("KVASIR_LOOP") != "default"
    run(serve(config, ready=_say), use_uvloop=use_uvloop)


def _say(link: JoinLink) -> None:
    print(f"market ready: {link}", flush=True)


def _init(arguments: argparse.Namespace) -> None:
    folder = arguments.state_dir / "swarm"
    if folder.exists():
        raise ConfigError(f"{folder} exists already: this is a swarm (kvasir-market swarm show)")
    SwarmKeys.load_or_create(arguments.state_dir, now=time.time())
    _show(arguments)


def _show(arguments: argparse.Namespace) -> None:
    folder = arguments.state_dir / "swarm"
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist: make a swarm with `kvasir-market swarm init`")
    roles = tuple(role for role in ROLES if (folder / f"{role}.key").exists())
    keys = SwarmKeys.load_or_create(arguments.state_dir, now=time.time(), roles=roles)
    print(f"swarm        {address_of(keys.root_public)}")
    print(f"fingerprint  {fingerprint(keys.root_public)}")
    print(f"root key     {'here' if keys.root is not None else 'kept elsewhere'}")
    for role in roles:
        print(_describe(keys.key(role)))


def _describe(key: OperatingKey) -> str:
    days = (key.certificate.expires_at - time.time()) / 86_400
    return (
        f"{key.role:<11}  {address_of(key.signing.public)}  id {key.id.hex()}  "
        f"serial {key.certificate.serial}  {days:.0f} days left"
    )


def _request(arguments: argparse.Namespace) -> None:
    id_, signing, exchange = load_operating_secret(arguments.state_dir / "swarm", arguments.role)
    request = CertificateRequest(arguments.role, id_, signing.public, exchange.public)
    print(encode_bytes(request.to_bytes()))


def _certify(arguments: argparse.Namespace) -> None:
    root = load_root(arguments.state_dir / "swarm")
    request = CertificateRequest.from_bytes(decode_bytes(arguments.request, "the request"))
    serial = arguments.serial if arguments.serial is not None else int(time.time()) // 60
    certificate = certify(root, request, serial=serial, now=time.time())
    arguments.out.write_bytes(certificate.document.to_bytes())
    checked = open_certificate(
        SignedDocument.from_bytes(arguments.out.read_bytes()), swarm=root.public, now=time.time()
    )
    print(f"certified the {checked.role} {checked.id.hex()} with serial {checked.serial}, for 30 days")


if __name__ == "__main__":
    sys.exit(main())

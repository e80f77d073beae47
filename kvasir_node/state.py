"""What a node keeps between two starts: its keys, the swarms it knows, its grants, a start counter.

    wallet.json        the wallet (Solana's id.json), unless the configuration names another
    device.key         the device's Ed25519 and X25519 keys
    swarms.json        market URL -> swarm root, pinned from the join link or on first use
    grants/ROOT        the signed grant for that swarm
    generation         the last start generation
    receipts/ROOT/ID   the receipts of one backbone
    cache/             weights
    node.log           the log, JSON lines
    control.json       how to reach the running daemon

Knows files and their formats; nothing of the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from market.wallet import Grant, create_wallet, load_wallet, open_grant
from relay.errors import ConfigError, IdentityError, KvasirError, RemoteProtocolError
from relay.identity import (
    ExchangeKey,
    PublicKey,
    SigningKey,
    address_of,
    fingerprint,
    pack,
    parse_address,
    require,
    unpack_canonical,
)
from relay.keyfiles import load_or_create


@dataclass(frozen=True, slots=True)
class DeviceKeys:
    """The device's own keys: `signing` for requests and acknowledgements, `exchange` for Noise."""

    signing: SigningKey
    exchange: ExchangeKey


class NodeState:
    """The state folder. All methods block briefly; call them at the start or off the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def device_keys(self) -> DeviceKeys:
        """The device's keys, made at the first call. Raises `IdentityError` for an unsafe file."""
        path = self.folder / "device.key"

        def make() -> bytes:
            return pack({"v": 1, "ed25519": secrets.token_bytes(32), "x25519": secrets.token_bytes(32)})

        try:
            fields = unpack_canonical(load_or_create(path, make), max_bytes=4096)
            if not isinstance(fields, dict) or fields.get("v") != 1:
                raise RemoteProtocolError("another version")
            return DeviceKeys(
                SigningKey(require(fields, "ed25519", bytes, size=32)),
                ExchangeKey(require(fields, "x25519", bytes, size=32)),
            )
        except RemoteProtocolError as error:
            raise IdentityError(f"{path} is not a device key file of version 1: {error}") from None

    def wallet(self, path: Path, *, create: bool, passphrase: bytes | None = None) -> SigningKey:
        """The wallet in `path`; with `create`, made if it is not there.

        Raises `ConfigError` if it is missing and may not be made, `IdentityError` for an unsafe file.
        """
        try:
            return load_wallet(path, passphrase=passphrase)
        except FileNotFoundError:
            if not create:
                raise ConfigError(
                    f"there is no wallet at {path}: name yours with --wallet FILE, or make one with "
                    "`kvasir-node wallet --create`"
                ) from None
        return create_wallet(path, passphrase=passphrase)

    def pin(self, url: str, root: PublicKey | None) -> PublicKey | None:
        """The root that `url` must show, remembered from now on; None if it is not known yet.

        Raises `IdentityError` if another root was pinned for that URL before.
        """
        pins = self._pins()
        known = pins.get(url)
        if known is None:
            if root is not None:
                pins[url] = address_of(root)
                self._write("swarms.json", json.dumps(pins, indent=1, sort_keys=True).encode("utf-8"))
            return root
        pinned = parse_address(known)
        if root is not None and root != pinned:
            raise IdentityError(
                f"{url} was pinned to swarm {fingerprint(pinned)}, and now it is to be {fingerprint(root)}. "
                f"If its operator really began anew, remove that line from {self.folder / 'swarms.json'}",
                code="wrong_swarm",
            )
        return pinned

    def grant(self, root: PublicKey, device: PublicKey, *, now: float) -> Grant | None:
        """The stored grant of `device` for that swarm, if it still holds at `now` (Unix seconds)."""
        try:
            data = (self.folder / "grants" / address_of(root)).read_bytes()
            fields = unpack_canonical(data, max_bytes=65536)
            grant = open_grant(
                require(fields, "text", str), require(fields, "signature", bytes, size=64), root=root, now=now
            )
        except (OSError, AttributeError, KvasirError):
            return None
        return grant if grant.device == device else None

    def store_grant(self, grant: Grant) -> None:
        """Keep a grant for later starts."""
        fields = {"v": 1, "text": grant.text, "signature": grant.signature}
        self._write(f"grants/{address_of(grant.swarm)}", pack(fields))

    def next_generation(self, *, now: float) -> int:
        """A start generation above every earlier one, even if the state folder was lost: see `now`."""
        last = 0
        with contextlib.suppress(OSError, ValueError):
            last = int((self.folder / "generation").read_text("ascii"))
        generation = max(last + 1, int(now))
        self._write("generation", str(generation).encode("ascii"))
        return generation

    def receipts_folder(self, root: PublicKey) -> Path:
        """Where that swarm's receipts are."""
        return self.folder / "receipts" / address_of(root)

    def roots(self) -> dict[str, PublicKey]:
        """Every pinned market URL and its swarm's root."""
        return {url: parse_address(address) for url, address in self._pins().items()}

    def _pins(self) -> dict[str, str]:
        path = self.folder / "swarms.json"
        try:
            pins: Any = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            pins = None
        if not isinstance(pins, dict) or not all(isinstance(root, str) for root in pins.values()):
            raise ConfigError(f"{path} is damaged: restore it, or remove it and join again")
        return pins

    def _write(self, name: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        descriptor = os.open(
            staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, target)

"""`kvasir-node doctor`: everything that a node needs, tried one after another, each with how to mend it.

Looks and tries; changes nothing but the state folder's first files (the device's keys, the swarm's pin are
read, not made). A running node is left alone: nothing here signs in, connects as this device or takes its
locks.

Knows what a node needs and what its owner can do about it. How things are measured is `device`'s and
`measuring`'s, what they are to others `config`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import torch
from yarl import URL

from market.client import MarketClient
from market.messages import RelayInfo, SwarmInfo
from market.plans import Plan, PlanId
from market.requests import sign_request
from relay.errors import ConfigError, IdentityError, KvasirError, Refused, Unreachable
from relay.frames import MAX_FRAME, FrameType, decode
from relay.identity import PublicKey, SigningKey, address_of, fingerprint, open_certificate
from relay.messages import Hello
from relay.wire import dial

from .accelerator import choose_accelerated, describe_device, device_memory, find_device
from .config import NodeConfig, format_size
from .control import ask_daemon
from .device import Device, allow, measure
from .fitting import AUTO_PRECISIONS, describe_capacity, working_bytes
from .joining import RENEW_GRANT_S
from .measuring import cpu_features, kernel_name, measure_disk, measure_link, measure_memory
from .sources import backbone_source
from .state import NodeState

Outcome = Literal["ok", "warn", "fail"]

SKEW_WARN_S: Final = 5.0
SKEW_FAIL_S: Final = 60.0
"""The swarm takes nothing that is signed more than a minute before or after its own time."""

SLOW_DISK: Final = 20e6
SLOW_LINK: Final = 125_000.0
"""Bytes a second below which the owner is told that it will be slow."""

ANSWER_S: Final = 10.0
"""How long each part of the swarm has to answer."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what was found, and what to do about it where it is not well."""

    name: str
    outcome: Outcome
    found: str
    mend: str = ""

    def fields(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tools:
    """What is measured and asked of this machine: replaced in tests."""

    clock: Callable[[], float] = time.time
    measure: Callable[..., Device] = measure
    disk_speed: Callable[[Path], tuple[float | None, float | None]] = measure_disk
    memory_speed: Callable[[], float] = measure_memory
    kernel: Callable[[], str] = kernel_name
    find_device: Callable[[str], torch.device | None] = find_device


async def examine(
    config: NodeConfig, *, joined: bool, passphrase: bytes | None, http: aiohttp.ClientSession, tools: Tools
) -> list[Check]:
    """All checks, in order. With `joined` False there is no join link, and the swarm is not asked.

    None raises: whatever goes wrong in a check is what it found.
    """
    state = NodeState(config.state_dir)
    checks = [check_daemon(config.state_dir), check_state(state)]
    checks.append(check_wallet(config, state, passphrase))
    device = await asyncio.to_thread(_measure, config, tools)
    checks += [
        await asyncio.to_thread(check_kernel, config, tools),
        await asyncio.to_thread(check_disk, config, device, tools),
    ]
    if not joined:
        mend = "give the join link that the operator has: kvasir-node doctor 'http://HOST:PORT#SWARM'"
        missing = Check("market", "fail", "no swarm is known to the state folder", mend)
        return [*checks, await asyncio.to_thread(check_memory, config, device, [], tools), missing]
    swarm = _Swarm(config, state, http, tools)
    checks.append(await swarm.check_market())
    checks.append(await swarm.check_clock())
    checks.append(await asyncio.to_thread(check_memory, config, device, swarm.plans, tools))
    if swarm.info is not None:
        checks.append(check_grant(state, swarm.info.root, config, tools))
        checks.append(await swarm.check_relays())
        checks.append(await swarm.check_weights())
        checks.append(await swarm.check_link())
    return checks


def exit_status(checks: Sequence[Check]) -> int:
    """0 if nothing failed (warnings are allowed), else 1."""
    return 1 if any(check.outcome == "fail" for check in checks) else 0


def describe_checks(checks: Sequence[Check]) -> list[str]:
    """The checks as lines for a person."""
    lines = []
    for check in checks:
        lines.append(f"{check.outcome:<4}  {check.name:<8}  {check.found}")
        if check.mend:
            lines.append(f"      {'':<8}  -> {check.mend}")
    return lines


# --- this machine ------------------------------------------------------------------------------------


def check_daemon(folder: Path) -> Check:
    """Whether a node runs with this state folder."""
    try:
        snapshot = ask_daemon(folder, "GET", "/status")
    except Unreachable as error:
        if "no node runs" in str(error):
            return Check("daemon", "ok", "no node runs with this state folder now")
        return Check("daemon", "warn", str(error), "end that process, then start the node again")
    except ConfigError as error:
        return Check("daemon", "fail", str(error), "stop the node, remove control.json, and start it again")
    reach = "reachable" if snapshot.get("reachable") else "not reachable"
    return Check("daemon", "ok", f"a node runs: {snapshot.get('phase')}, {reach}")


def check_state(state: NodeState) -> Check:
    """The state folder: writable, its key files safe."""
    mend = f"make {state.folder} a folder of yours that you may write to, or name another with --state-dir"
    try:
        state.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=state.folder):
            pass
        if (state.folder / "device.key").exists():
            state.device_keys()
        state.roots()
    except OSError as error:
        return Check("state", "fail", f"{state.folder}: {error.strerror or error}", mend)
    except (IdentityError, ConfigError) as error:
        return Check("state", "fail", str(error), "do what it says, or name another folder with --state-dir")
    return Check("state", "ok", f"{state.folder} can be written, and its keys are this user's alone")


def check_wallet(config: NodeConfig, state: NodeState, passphrase: bytes | None) -> Check:
    """The wallet's file."""
    path = config.wallet_file
    if not path.exists():
        if config.wallet is None:
            return Check("wallet", "ok", f"none yet: {path} is made when the node joins")
        mend = "name the file you have with --wallet, or make one: kvasir-node wallet --create"
        return Check("wallet", "fail", f"there is no wallet at {path}", mend)
    try:
        key = state.wallet(path, create=False, passphrase=passphrase)
    except (ConfigError, IdentityError) as error:
        mend = "do what it says; a passphrase may be in KVASIR_WALLET_PASSPHRASE"
        return Check("wallet", "fail", str(error), mend)
    except OSError as error:
        return Check("wallet", "fail", f"{path}: {error.strerror or error}", "make the file readable to you")
    return Check("wallet", "ok", f"{key.address}, kept in {path}")


def check_grant(state: NodeState, root: PublicKey, config: NodeConfig, tools: Tools) -> Check:
    """Whether the wallet has signed for this device in that swarm."""
    now = tools.clock()
    grant = None
    if (state.folder / "device.key").exists():
        with contextlib.suppress(IdentityError):
            grant = state.grant(root, state.device_keys().signing.public, now=now)
    here = config.wallet is None or config.wallet.exists()
    if grant is None:
        if here:
            return Check("grant", "ok", "none yet: the wallet here signs when the node joins")
        mend = "run `kvasir-node login` where the wallet is"
        return Check("grant", "fail", "the wallet has not signed for this device", mend)
    left = grant.expires_at - now
    found = f"wallet {address_of(grant.wallet)} has signed for this device, {left / 86400:.0f} days left"
    if left < RENEW_GRANT_S and not config.wallet_file.exists():
        return Check("grant", "warn", found, "run `kvasir-node login` where the wallet is")
    return Check("grant", "ok", found)


def check_kernel(config: NodeConfig, tools: Tools) -> Check:
    """What runs experts here."""
    try:
        accelerator = tools.find_device(config.device)
    except ConfigError as error:
        return Check("kernel", "fail", str(error), "leave --device out, or mend the driver")
    if accelerator is not None:
        return Check("kernel", "ok", f"{describe_device(accelerator)}, checked against the CPU for each plan")
    name = tools.kernel()
    found = f"experts run on {name}; CPU with {cpu_features()}"
    if name.startswith("torch"):
        mend = "install a C compiler (gcc or clang; on Debian: apt install gcc), and start the node again"
        return Check("kernel", "warn", found, mend)
    return Check("kernel", "ok", found)


def check_disk(config: NodeConfig, device: Device, tools: Tools) -> Check:
    """Room and speed of the cache's disk."""
    folder = config.cache_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = sum(path.stat().st_size for path in folder.glob("*/*.bin"))
        room = min(
            config.cache_bytes or device.disk_free + used, device.disk_free + used - config.reserve_bytes
        )
    except OSError as error:
        mend = "name a folder that you may write to with --cache-dir"
        return Check("disk", "fail", f"{folder}: {error.strerror or error}", mend)
    if room <= 0:
        found = (
            f"the disk of {folder} has {format_size(device.disk_free)} free, and "
            f"{format_size(config.reserve_bytes)} are kept in reserve"
        )
        return Check("disk", "fail", found, "free some disk, or name another one with --cache-dir")
    write, read = tools.disk_speed(folder)
    if write is None or read is None:
        mend = "name a folder that you may write to with --cache-dir"
        return Check("disk", "fail", f"nothing can be written to {folder}", mend)
    found = (
        f"{format_size(room)} for weights in {folder}, writes {format_size(write)}/s, "
        f"reads {format_size(read)}/s"
    )
    if write < SLOW_DISK:
        return Check("disk", "warn", found, "loading will be slow: name a faster disk with --cache-dir")
    return Check("disk", "ok", found)


def check_memory(
    config: NodeConfig, device: Device, plans: Sequence[tuple[PlanId, Plan]], tools: Tools
) -> Check:
    """Memory free now, against the swarm's windows where they are known."""
    try:
        budget = allow(config, device).budget
    except ConfigError as error:
        if "--budget" in str(error):
            return Check("memory", "fail", str(error), "give a smaller --budget")
        budget = config.budget_bytes or device.expert_memory[0] // 2  # the disk has a check of its own
    free, total = device.expert_memory
    found = (
        f"{format_size(free)} of {format_size(total)} free, {format_size(budget)} for experts, one thread "
        f"reads {format_size(tools.memory_speed())}/s"
    )
    if budget > free:
        mend = "close something, or give a smaller --budget"
        return Check("memory", "fail", f"{found}: the budget is more than what is free", mend)
    precisions = AUTO_PRECISIONS if config.precision == "auto" else (config.precision,)
    needs = [_smallest(plan, precisions) for _, plan in plans]
    if needs and min(kept for kept, _ in needs) > budget:
        least = min(kept for kept, _ in needs)
        mend = f"raise --budget to {format_size(least)} or more, or ask the operator for smaller windows"
        return Check("memory", "fail", f"{found}: the smallest window keeps {format_size(least)}", mend)
    if needs and min(kept + work for kept, work in needs) > free:
        mend = "close something first: a window is refused while it does not fit"
        return Check("memory", "warn", f"{found}: too little for a window and its loading", mend)
    holds = "".join(f"; {describe_capacity(plan, budget, precisions)}" for _, plan in plans)
    return Check("memory", "ok", found + holds)


def _smallest(plan: Plan, precisions: Sequence[str]) -> tuple[int, int]:
    """(kept, working) bytes of the plan's smallest window at the smallest precision that both allow."""
    allowed = [name for name in precisions if name in plan.precisions]
    if not allowed:
        return 1 << 62, 0
    return min(
        (plan.kept_bytes(window, name), working_bytes(plan, window))
        for window in plan.windows
        for name in allowed
    )


def _measure(config: NodeConfig, tools: Tools) -> Device:
    accelerator = None
    with contextlib.suppress(ConfigError):
        found = tools.find_device(config.device)
        if found is not None:
            accelerator = (describe_device(found), device_memory(found))
    return tools.measure(config.cache_folder, accelerator=accelerator)


# --- the swarm ---------------------------------------------------------------------------------------


class _Swarm:
    """The checks that ask the swarm; each fills in what the later ones need."""

    def __init__(
        self, config: NodeConfig, state: NodeState, http: aiohttp.ClientSession, tools: Tools
    ) -> None:
        self._config = config
        self._state = state
        self._http = http
        self._tools = tools
        self._key = SigningKey.generate()  # a running node's requests and nonces are not touched
        self._market = MarketClient(
            config.join.url, http=http, root=config.join.root, key=self._key, timeout=ANSWER_S
        )
        self._skew: float | None = None
        self.info: SwarmInfo | None = None
        self.plans: list[tuple[PlanId, Plan]] = []

    async def check_market(self) -> Check:
        """The market answers, is the pinned swarm's, and speaks our version."""
        url, pinned = self._config.join.url, None
        try:
            pinned = self._state.roots().get(url)
            if pinned is not None and self._config.join.root not in (None, pinned):
                raise IdentityError(f"this state folder has pinned another swarm for {url}")
            self._market.root = self._config.join.root or pinned
            sent = self._tools.clock()
            info = self.info = await self._market.swarm()
            self._skew = (sent + self._tools.clock()) / 2 - info.time
            for listing in await self._market.plans():
                if listing.state == "active" and len(self.plans) < 4:
                    self.plans.append((listing.plan, (await self._market.plan(listing.plan))[1]))
        except Unreachable as error:
            mend = "check the address, this machine's network, and that the backbone (`up`) or market runs"
            return Check("market", "fail", str(error), mend)
        except IdentityError as error:
            mend = "compare the join link with the operator's; if it is right, see the clock below"
            return Check("market", "fail", str(error), mend)
        except KvasirError as error:
            mend = "the node and the market may be of two versions: update both"
            return Check("market", "fail", f"{error.code}: {error}", mend)
        found = f"{url} answers for swarm {fingerprint(info.root)}"
        if self._market.root is not None and pinned is None and self._config.join.root is None:
            mend = "compare that key with what the operator says: the link does not hold it"
            return Check("market", "warn", found, mend)
        if not self.plans:
            mend = "wait until a backbone has published its plan"
            return Check("market", "warn", f"{found}; no model is served there yet", mend)
        models = ", ".join(plan.model for _, plan in self.plans)
        return Check("market", "ok", f"{found}; it serves {models}")

    async def check_clock(self) -> Check:
        """This machine's clock against the market's."""
        skew = self._skew if self._skew is not None else await self._skew_by_http()
        if skew is None:
            return Check("clock", "warn", "not compared: the market does not answer", "mend the market first")
        found = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the market"
        mend = "set the clock, best by network time (Linux: timedatectl set-ntp true)"
        if abs(skew) > SKEW_FAIL_S:
            return Check("clock", "fail", f"{found}: what this device signs is refused", mend)
        if abs(skew) > SKEW_WARN_S:
            return Check("clock", "warn", found, mend)
        return Check("clock", "ok", found)

    async def _skew_by_http(self) -> float | None:
        """By the Date header of whatever answers there: to the second."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError):
            async with asyncio.timeout(ANSWER_S), self._http.get(self._config.join.url) as response:
                date = email.utils.parsedate_to_datetime(response.headers["Date"])
                return self._tools.clock() - date.timestamp()
        return None

    async def check_relays(self) -> Check:
        """Each relay takes WebSockets and shows a certificate of this swarm."""
        assert self.info is not None
        relays = self.info.relays
        if not relays:
            mend = "the operator must start a relay, or wait until one has announced itself"
            return Check("relay", "fail", "the market lists no relay", mend)
        faults = await asyncio.gather(*(self._relay_fault(relay) for relay in relays))
        wrong = [f"{relay.url}: {fault}" for relay, fault in zip(relays, faults, strict=True) if fault]
        mend = (
            "if a proxy or firewall stands between, let it pass WebSockets; if not, the operator must look at "
            "the relay"
        )
        if len(wrong) == len(relays):
            return Check("relay", "fail", "; ".join(wrong), mend)
        if wrong:
            good = len(relays) - len(wrong)
            return Check("relay", "warn", f"{good} of {len(relays)} answer; {'; '.join(wrong)}", mend)
        return Check("relay", "ok", f"{', '.join(relay.url for relay in relays)} shows this swarm's certificate")

    async def _relay_fault(self, relay: RelayInfo) -> str | None:
        """What is wrong with a relay, from its first frame; nobody signs in."""
        assert self.info is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                socket = await dial(self._http, relay_url(relay.url), max_bytes=MAX_FRAME)
                try:
                    kind, _, payload = decode(await socket.receive())
                    if kind is not FrameType.HELLO:
                        return f"it said {kind.name} first"
                    document = Hello.from_bytes(payload).certificate
                    now = self.info.time
                    certificate = open_certificate(document, swarm=self.info.root, now=now, role="relay")
                finally:
                    socket.close()
        except TimeoutError:
            return f"no answer within {ANSWER_S:.0f} s"
        except KvasirError as error:
            return str(error)
        return None if certificate.ed25519 == relay.key else "it shows another relay's certificate"

    async def check_weights(self) -> Check:
        """The backbone's weights endpoint answers as one: with a typed refusal, for nothing is leased."""
        if not self.plans:
            return Check("weights", "warn", "not asked: no model is served yet", "wait for a backbone's plan")
        plan_id, _ = self.plans[0]
        base = self._config.join.url
        source = backbone_source(base, plan_id, self._sign)
        try:
            found = await self._weights_answer(source.url(0))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            mend = "the backbone serves them beside the market: check that it runs and can be reached"
            return Check("weights", "fail", f"{base}: {str(error) or 'no answer'}", mend)
        if found in (None, "forbidden", "not_mine"):
            return Check("weights", "ok", f"{base} serves them to who holds a claim")
        if found in ("overloaded", "busy", "quota"):
            return Check("weights", "warn", f"{base} is busy ({found})", "nothing: nodes wait and ask again")
        mend = (
            "weights may come from a mirror or the hub all the same (--mirror, --weights-from); if a proxy "
            "stands before the backbone, it must pass /weights/"
        )
        return Check("weights", "warn" if found == "not_found" else "fail", f"{base} answers: {found}", mend)

    async def _weights_answer(self, url: URL) -> str | None:
        """None for bytes, else the code of the refusal, or what answered in its place."""
        headers = {**self._sign("GET", url), "Range": "bytes=0-0"}
        async with (
            asyncio.timeout(ANSWER_S),
            self._http.get(url, headers=headers, allow_redirects=False) as response,
        ):
            if response.status == 206:
                return None
            body = await response.content.read(65536)
        try:
            return str(json.loads(body)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return f"HTTP status {response.status}, not as a backbone answers"

    def _sign(self, method: str, url: URL) -> dict[str, str]:
        return sign_request(self._key, method, url.raw_path_qs, now=self._tools.clock() - (self._skew or 0.0))

    async def check_link(self) -> Check:
        """The link to the swarm, by carrying bytes."""
        link = await measure_link(self._market.probe_link)
        if link is None:
            mend = "the market did not carry the padding: try again when it has less to do"
            return Check("link", "warn", "not measured", mend)
        found = (
            f"{format_size(link.download)}/s down, {format_size(link.upload)}/s up, "
            f"{1000 * link.rtt_s:.1f} ms round trip"
        )
        if min(link.upload, link.download) < SLOW_LINK:
            mend = "calls will be slow: backbones prefer nodes that answer sooner; a cable may help"
            return Check("link", "warn", found, mend)
        return Check("link", "ok", found)


def relay_url(url: str) -> str:
    """The relay's WebSocket endpoint at the URL that the market lists."""
    return url if url.endswith("/relay/v1") else f"{url.rstrip('/')}/relay/v1"


__all__ = ["Awaitable", "Check", "Tools", "choose_accelerated", "describe_checks", "examine", "exit_status"]

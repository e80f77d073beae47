"""What `kvasir-node doctor` asks of a swarm: market, clock, relays, weights, link, whether its windows fit.

With a key made up for the occasion, so that a running node is left alone. Knows the swarm's endpoints and
what their answers mean to an owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
from collections.abc import Sequence
from typing import Final

import aiohttp
from yarl import URL

from market.client import MarketClient
from market.messages import RelayInfo, SwarmInfo
from market.plans import Plan, PlanId
from market.requests import sign_request
from relay.errors import IdentityError, KvasirError, Unreachable
from relay.frames import MAX_FRAME, FrameType, decode
from relay.identity import PublicKey, SigningKey, address_of, fingerprint, open_certificate
from relay.messages import Hello
from relay.transport import relay_endpoint
from relay.wire import dial

from .config import NodeConfig, format_size
from .device import Device
from .doctor import Check, Tools, measure_device
from .fitting import AUTO_PRECISIONS, describe_capacity, working_bytes
from .joining import RENEW_GRANT_S
from .measuring import measure_link
from .sources import backbone_source
from .state import NodeState

SKEW_WARN_S: Final = 5.0
SKEW_FAIL_S: Final = 60.0
"""The swarm takes nothing that is signed more than a minute before or after its own time."""

SLOW_LINK: Final = 125_000.0
"""Bytes a second below which the owner is told that it will be slow."""

ANSWER_S: Final = 10.0
"""How long each part of the swarm has to answer."""


async def examine_swarm(config: NodeConfig, *, http: aiohttp.ClientSession, tools: Tools) -> list[Check]:
    """What the swarm of `config.join` says, and whether its windows fit. Never raises."""
    swarm = SwarmChecks(config, NodeState(config.state_dir), http, tools)
    checks = [await swarm.check_market(), await swarm.check_clock()]
    if swarm.info is None:
        return checks
    checks.append(check_grant(NodeState(config.state_dir), swarm.info.root, config, tools))
    checks += [await swarm.check_relays(), await swarm.check_weights(), await swarm.check_link()]
    if swarm.plans:
        device = await asyncio.to_thread(measure_device, config, tools)
        checks.append(check_windows(config, device, swarm.plans))
    return checks


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


def check_windows(config: NodeConfig, device: Device, plans: Sequence[tuple[PlanId, Plan]]) -> Check:
    """Whether any of the swarm's windows fits the budget and the memory that is free now."""
    free, _ = device.expert_memory
    budget = config.budget_bytes or free // 2
    precisions = AUTO_PRECISIONS if config.precision == "auto" else (config.precision,)
    found = "; ".join(describe_capacity(plan, budget, precisions) for _, plan in plans)
    needs = [need for _, plan in plans if (need := _smallest(plan, precisions)) is not None]
    if not needs:
        mend = "give another --precision, or leave it out"
        return Check("windows", "fail", found, mend)
    least = min(kept for kept, _ in needs)
    if least > budget:
        mend = f"raise --budget to {format_size(least)} or more, or ask the operator for smaller windows"
        return Check("windows", "fail", found, mend)
    if min(kept + working for kept, working in needs) > free:
        mend = "close something first: a window is refused while it does not fit"
        return Check("windows", "warn", f"{found}; too little memory is free to load one now", mend)
    return Check("windows", "ok", f"this machine can hold {found}")


def _smallest(plan: Plan, precisions: Sequence[str]) -> tuple[int, int] | None:
    """(kept, working) bytes of the plan's smallest window at the smallest precision that both allow."""
    allowed = [name for name in precisions if name in plan.precisions]
    sizes = [
        (plan.kept_bytes(window, name), working_bytes(plan, window))
        for window in plan.windows
        for name in allowed
    ]
    return min(sizes, default=None)


class SwarmChecks:
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
            "if a proxy or firewall stands between, let it pass WebSockets; if not, the operator must look "
            "at the relay"
        )
        if len(wrong) == len(relays):
            return Check("relay", "fail", "; ".join(wrong), mend)
        if wrong:
            good = len(relays) - len(wrong)
            return Check("relay", "warn", f"{good} of {len(relays)} answer; {'; '.join(wrong)}", mend)
        return Check(
            "relay", "ok", f"{', '.join(relay.url for relay in relays)} shows this swarm's certificate"
        )

    async def _relay_fault(self, relay: RelayInfo) -> str | None:
        """What is wrong with a relay, from its first frame; nobody signs in."""
        assert self.info is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                socket = await dial(self._http, relay_endpoint(relay.url), max_bytes=MAX_FRAME)
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

"""Into the swarm: find it, pin its root, prove the wallet.

Knows the order of the proof and what to tell the owner. The proof itself is `market.wallet`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import aiohttp
import structlog

from market.client import MarketClient
from market.wallet import Grant
from relay.errors import IdentityError, Refused, Unreachable
from relay.identity import PublicKey, SigningKey, address_of, fingerprint
from relay.links import JoinLink

from .state import DeviceKeys, NodeState
from .status import Backoff, NodeStatus

log = structlog.get_logger("node")

RENEW_GRANT_S: Final = 3 * 86400
"""A grant with less than this left is replaced at a start, where the wallet is here."""

_PASSING: Final = frozenset({"overloaded", "busy", "internal", "unreachable", "draining", "quota"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Membership:
    """This device in one swarm: the market to talk to, the pinned root, the grant, the device's keys."""

    market: MarketClient
    root: PublicKey
    grant: Grant
    keys: DeviceKeys


async def join_swarm(
    link: JoinLink,
    *,
    state: NodeState,
    keys: DeviceKeys,
    wallet: Callable[[bool], SigningKey | None],
    http: aiohttp.ClientSession,
    status: NodeStatus,
    rng: Random,
    fresh: bool = False,
) -> Membership:
    """Reach the market (for as long as it takes), pin the swarm's root, and hold a grant.

    A stored grant is used while it lasts (unless `fresh`); else `wallet` signs a new one. `wallet(create)`
    gives None where the wallet's key is elsewhere; only with `create` may it make one. Raises
    `IdentityError` if the swarm is not the pinned one or the wallet is needed and not here, and `Refused`
    where the market says no for good.
    """
    pinned = state.pin(link.url, link.root)
    market = MarketClient(link.url, http=http, root=pinned, key=keys.signing)
    swarm = await patiently(market.swarm, status=status, rng=rng)
    if pinned is None:
        state.pin(link.url, swarm.root)
        key = fingerprint(swarm.root)
        status.notify(f"first contact with this swarm: compare its key {key} with what the operator says")
        log.info("swarm.pinned", url=link.url, swarm=address_of(swarm.root))
    status.market.swarm = address_of(swarm.root)
    now = time.time()
    grant = None if fresh else state.grant(swarm.root, keys.signing.public, now=now)
    if grant is None or grant.expires_at - now < RENEW_GRANT_S:
        grant = await _sign_in(market, keys, wallet(grant is None), status, rng) or grant
    if grant is None:
        raise IdentityError(
            "this device has no grant for the swarm, and the wallet is not here: run `kvasir-node login` "
            "where the wallet is, or name its file with --wallet"
        )
    state.store_grant(grant)
    status.wallet, status.device = address_of(grant.wallet), address_of(grant.device)
    return Membership(market, swarm.root, grant, keys)


async def _sign_in(
    market: MarketClient, keys: DeviceKeys, wallet: SigningKey | None, status: NodeStatus, rng: Random
) -> Grant | None:
    """A new grant, or None where the wallet's key is elsewhere."""
    if wallet is None:
        return None
    grant = await patiently(lambda: market.login(wallet, keys.signing, keys.exchange), status=status, rng=rng)
    log.info("wallet.proven", wallet=address_of(grant.wallet), device=address_of(grant.device))
    return grant


async def patiently(ask: Callable[[], Awaitable[T]], *, status: NodeStatus, rng: Random) -> T:
    """Ask the market until it answers, with growing waits, and tell the owner while it does not.

    Typed refusals that do not pass by waiting, and broken identities, are raised.
    """
    backoff = Backoff()
    while True:
        try:
            answer = await ask()
        except Unreachable as error:
            status.market_failed(str(error))
            wait = backoff.next_s(rng.random())
        except Refused as error:
            if error.code not in _PASSING:
                raise
            status.market_failed(str(error))
            wait = max(error.retry_after_s or 0.0, backoff.next_s(rng.random()))
        else:
            status.market_answered()
            return answer
        log.warning(
            "market.unreachable", url=status.market.url, reason=status.market.error, retry_s=round(wait, 1)
        )
        await asyncio.sleep(wait)

"""What the swarm makes of claims and refusals: who is called, who is proven again, what is forgotten."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvasir_backbone.credit import LeaseShare, Totals
from kvasir_backbone.directory import Holding
from kvasir_backbone.links import DeviceLink
from kvasir_backbone.swarm import FORGET_S, Swarm, SwarmConfig
from market.messages import Assignment, Change, EndedListing, Snapshot
from relay.identity import PublicKey
from tests.backbone.test_directory import PLAN, PLAN_ID, claim
from tests.support.markets import stall
from tests.support.rosters import device
from tests.support.waiting import until

A = device("a")


class Link:
    """Stands where the link of a device with a session stands; counts announcements."""

    session: object = object()
    draining = False
    path = "relay"

    def __init__(self) -> None:
        self.announced: list[str] = []

    def announce(self) -> None:
        self.announced.append("changes")

    def announce_again(self) -> None:
        self.announced.append("all")

    def hurry(self) -> None:
        return

    def readdressed(self) -> None:
        return

    def send_receipt(self, receipt: bytes) -> None:
        return


class Bench:
    """A swarm that follows no market: claims are put in by hand, and no device is ever dialled."""

    def __init__(self, swarm: Swarm, group: asyncio.TaskGroup) -> None:
        self.swarm = swarm
        self.link = Link()
        swarm._group = group
        self.tended: list[PublicKey] = []
        swarm._tend = self.tend  # type: ignore[assignment,method-assign]

    async def tend(self, tended: PublicKey) -> None:
        self.tended.append(tended)
        await asyncio.Event().wait()

    async def hold(self, *claims: Assignment) -> None:
        self.swarm.book.open(A, Totals(claims[0].wallet))
        self.swarm._links[A] = cast(DeviceLink, self.link)
        await self.swarm._update(self.swarm.directory.replace_all(Snapshot(10, claims)))

    async def change(self, **change: Any) -> None:
        revision = self.swarm.directory.revision
        await self.swarm._update(self.swarm.directory.apply(Change(revision + 1, revision, **change)))

    def next(self) -> Holding | None:
        return self.swarm._next_to_prove(A)[0]

    def served(self) -> list[int]:
        return sorted(number for number, found in self.swarm.roster().replicas.items() if found)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with stall(tmp_path / "market") as market:
        key = market.keys.backbone
        with ThreadPoolExecutor(1) as threads:
            swarm = Swarm(
                PLAN,
                PLAN_ID,
                SwarmConfig(1, tmp_path / "receipts.db"),
                market=market.backbone(),
                http=cast(Any, None),
                keys=lambda: key,
                hash_window=cast(Any, None),
                references=cast(Any, SimpleNamespace(numerics="n", run=None)),
                threads=threads,
                rng=random.Random(1),
            )
            await swarm.open()
            async with asyncio.TaskGroup() as group:
                made = Bench(swarm, group)
                yield made
                for task in swarm._tasks.values():
                    task.cancel()
            await swarm.close()


async def test_a_stale_lease_is_left_out_alone_and_comes_back_when_it_is_proven(bench: Bench) -> None:
    await bench.hold(claim("a", 0, epoch=3), claim("a", 1))
    assert bench.served() == [0, 1]
    assert bench.next() is None
    (replica,) = bench.swarm.roster().of(0)
    bench.swarm.stale([replica], "stale_epoch: the lease is at epoch 4")
    await until(lambda: bench.served() == [1], what="the lease to be left out")
    assert bench.link.announced[-1] == "all"
    assert not bench.swarm.owners.ensure(A).breaker.is_open
    holding = bench.next()
    assert holding is not None
    assert holding.assignment.lease == replica.lease
    bench.swarm._prover.prove = proven  # type: ignore[assignment,method-assign]
    assert await bench.swarm._prove(cast(DeviceLink, SimpleNamespace(device=A)), holding)
    assert bench.served() == [0, 1]
    assert bench.next() is None


async def proven(*arguments: object) -> float:
    return 0.0


async def test_a_stale_lease_is_forgotten_with_its_epoch(bench: Bench) -> None:
    await bench.hold(claim("a", 0, epoch=3))
    (replica,) = bench.swarm.roster().of(0)
    bench.swarm._on_stale([replica], "stale_epoch")
    assert bench.served() == []
    await bench.change(assignment=claim("a", 0, epoch=4))
    assert bench.served() == [0]
    assert bench.swarm._stale == set()


async def test_a_stale_lease_that_fails_again_and_again_keeps_no_breaker_open(bench: Bench) -> None:
    await bench.hold(claim("a", 0), claim("a", 1))
    (replica,) = bench.swarm.roster().of(0)
    bench.swarm._on_stale([replica], "not_mine")
    breaker = bench.swarm.owners.ensure(A).breaker
    breaker.trip(time.monotonic() - 60.0, "missed")
    holding = bench.next()
    assert holding is not None
    assert holding.assignment.window == PLAN.windows[1]


async def test_a_wallet_change_of_a_device_already_followed_is_noticed(bench: Bench) -> None:
    first = claim("a", 0)
    await bench.hold(first)
    bench.swarm.book.pay(A, 1, 0, [LeaseShare(first.lease, 1, 500)], time.monotonic())
    other = device("another wallet")
    grant = SimpleNamespace(wallet=other, issued_at=5)
    await bench.change(assignment=claim("a", 0, epoch=2, wallet=other, grant=grant))
    assert bench.served() == [], "no call is paid to a wallet that the device has left"
    await until(lambda: bench.served() == [0], what="the change")
    assert bench.swarm.book.wallet_of(A) == other
    assert bench.swarm.book.unsigned() == [], "what the first wallet earned is signed for that one"
    await bench.change(assignment=claim("a", 1, "HELD", wallet=other, grant=grant))
    assert bench.served() == [0]


async def test_what_is_known_of_a_device_is_forgotten_long_after_its_last_claim(bench: Bench) -> None:
    await bench.hold(claim("a", 0, addresses=("http://192.0.2.1:1",)))
    await until(lambda: bench.tended == [A], what="the device's task")
    swarm = bench.swarm
    assert A in swarm._wakes
    assert A in swarm._starts
    await bench.change(ended=EndedListing(claim("a", 0).lease, "released"))
    assert A not in swarm._wakes
    assert A not in swarm._starts
    assert A not in swarm._addresses
    swarm._forget_gone(1000.0)
    swarm._forget_gone(999.0 + FORGET_S)
    assert A in swarm.owners.owners
    swarm.owners.ensure(A).pace.begin(8)
    swarm._forget_gone(1000.0 + FORGET_S)
    assert A in swarm.owners.owners, "a call to it is out"
    swarm.owners.ensure(A).pace.end(8, None)
    swarm._forget_gone(1001.0 + FORGET_S)
    assert A not in swarm.owners.owners
    assert not swarm.book.knows(A)
    assert swarm._gone == {}


async def test_a_device_that_comes_back_in_time_is_not_forgotten(bench: Bench) -> None:
    await bench.hold(claim("a", 0))
    await bench.change(ended=EndedListing(claim("a", 0).lease, "released"))
    bench.swarm._forget_gone(1000.0)
    await bench.change(assignment=claim("a", 1))
    bench.swarm._forget_gone(1001.0 + FORGET_S)
    assert A in bench.swarm.owners.owners
    assert bench.swarm._gone == {}

"""Which relays a node keeps: what it looks at, when it moves, what it tells the market."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvasir_node import relays
from kvasir_node.relays import CONNECT_S, SETTLE_S, SHUN_S, RelayKeeper
from kvasir_node.status import NodeStatus
from market.messages import RelayInfo, RelayReading
from relay.errors import Unreachable
from relay.identity import Certificate, PublicKey, SigningKey
from relay.load import RelayLoad
from relay.measuring import Look


def _key(number: int) -> PublicKey:
    return PublicKey(number.to_bytes(32, "big"))


@dataclass
class FakeCircuits:
    """Connections as the test says they are."""

    wanted: list[str] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    going: set[str] = field(default_factory=set)
    on_change: Any = None

    def want(self, infos: Iterable[RelayInfo]) -> None:
        self.wanted = [info.url for info in infos]

    def connected(self, url: str) -> bool:
        return url in self.up

    def leaving(self, url: str) -> bool:
        return url in self.going

    def round_trip(self, url: str) -> float | None:
        return 0.02 if url in self.up else None


@dataclass
class World:
    """A swarm with relays of these round trips and loads; None: it answers nothing."""

    monkeypatch: pytest.MonkeyPatch
    seen: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    now: float = 100.0
    told: int = 0
    market_up: bool = True
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.circuits = FakeCircuits()
        keys = SimpleNamespace(signing=SigningKey(bytes(32)))
        member = SimpleNamespace(market=SimpleNamespace(swarm=self._swarm), keys=keys)
        self.keeper = RelayKeeper(
            lambda: cast(Any, member),
            cast(Any, self.circuits),
            http=cast(Any, None),
            status=NodeStatus(),
            rng=Random(3),
            clock=lambda: self.now,
        )
        self.keeper.on_change = self._tell
        self.monkeypatch.setattr(relays, "looks", self._looks)

    def _tell(self) -> None:
        self.told += 1

    async def _swarm(self) -> Any:
        if not self.market_up:
            raise Unreachable("no market")
        infos = [
            RelayInfo(url, _key(int(url[1:])), cast(Certificate, None), RelayLoad(0.0, 0, 0, 0.0))
            for url in self.seen
        ]
        return SimpleNamespace(relays=tuple(infos))

    async def _looks(self, urls: dict[bytes, str], **_: Any) -> dict[bytes, Look | None]:
        self.asked = list(urls.values())
        found: dict[bytes, Look | None] = {}
        for key, url in urls.items():
            seen = self.seen.get(url)
            found[key] = None if seen is None else Look(seen[0], RelayLoad(seen[1], 0, 0, 0.0))
        return found

    async def look(self, *, after: float = 0.0) -> list[str]:
        """One round; what is wanted then. Wanted relays that answer are connected."""
        self.now += after
        await self.keeper._look(False)
        return self.circuits.wanted

    def connect(self) -> None:
        self.circuits.up |= {url for url in self.circuits.wanted if self.seen.get(url)}
        self.circuits.on_change()


async def test_nothing_is_connected_before_a_window_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"r1": (0.05, 0.0), "r2": (0.01, 0.0), "r3": (0.2, 0.0)})
    assert await world.look() == []
    world.keeper.need()
    assert world.circuits.wanted == ["r2", "r1"]
    world.connect()
    assert world.told >= 1
    readings = world.keeper.readings()
    assert readings[:2] == (RelayReading(_key(2), 0.01, True), RelayReading(_key(1), 0.05, True))
    assert readings[2] == RelayReading(_key(3), 0.2, False)
    world.keeper.leave()
    assert world.circuits.wanted == []


async def _settled(monkeypatch: pytest.MonkeyPatch, **more: tuple[float, float] | None) -> World:
    world = World(monkeypatch, {"r1": (0.05, 0.0), "r2": (0.06, 0.0), "r3": (0.2, 0.0), **more})
    world.keeper.need()
    await world.look()
    world.connect()
    return world


async def test_a_relay_that_goes_away_or_answers_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await _settled(monkeypatch)
    first, second = world.circuits.wanted
    assert {first, second} == {"r1", "r2"}
    before = world.told
    world.circuits.going.add(first)
    world.circuits.on_change()
    assert world.told > before  # the market hears at once
    assert await world.look() == [second, "r3"]
    world.connect()
    world.circuits.going.clear()
    world.circuits.up.discard(second)
    world.seen[second] = None
    assert (await world.look(after=1.0))[0] == "r3"


async def test_a_better_relay_is_worth_a_move_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await _settled(monkeypatch)
    before = list(world.circuits.wanted)
    world.seen["r4"] = (0.001, 0.0)
    assert await world.look(after=SETTLE_S * 2) == ["r4", before[0]]
    world.connect()
    world.seen["r5"] = (0.0001, 0.0)
    assert (await world.look(after=SETTLE_S / 2))[0] == "r4"


async def test_a_relay_that_does_not_take_the_node_in_is_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"r1": (0.01, 0.0), "r2": (0.05, 0.0), "r3": (0.06, 0.0)})
    world.keeper.need()
    await world.look()
    assert world.circuits.wanted[0] == "r1"
    world.circuits.up = {"r2"}
    await world.look(after=1.0)
    assert "r1" in world.circuits.wanted
    await world.look(after=CONNECT_S)
    assert world.circuits.wanted == ["r2", "r3"]
    world.circuits.up = {"r2", "r3"}
    await world.look(after=SHUN_S / 2)
    assert "r1" not in world.asked


async def test_without_the_market_what_is_known_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await _settled(monkeypatch)
    before = list(world.circuits.wanted)
    world.market_up = False
    assert await world.look(after=1000.0) == before
    lonely = World(monkeypatch)
    lonely.market_up = False
    with pytest.raises(Unreachable):
        await lonely.look()


async def test_where_no_relay_answers_a_look_the_listed_ones_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, {"r1": None, "r2": None})
    world.keeper.need()
    assert set(await world.look()) == {"r1", "r2"}


async def test_of_many_relays_a_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {f"r{n}": (0.01 + n / 1000, 0.0) for n in range(1, 300)})
    world.keeper.need()
    await world.look()
    assert len(world.asked) == relays.OTHERS
    world.connect()
    await world.look(after=30.0)
    assert len(world.asked) == relays.OTHERS + 2
    assert len(world.keeper.readings()) <= 16

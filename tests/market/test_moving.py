"""The rule of moves: it never uncovers a window, keeps to its bound, helps the worst, and comes to an end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from market.messages import Abilities
from market.moving import (
    MINUTE_S,
    Move,
    Mover,
    MoveRules,
    Place,
    allowed_a_minute,
    choose_moves,
    is_worth_it,
    parse_patience,
)
from market.plans import PlanId
from market.scarcity import ScarcityRules, WindowNeed, next_target
from market.windows import Window
from market.wire import LeaseId
from relay.errors import ConfigError
from relay.identity import PublicKey

PLAN, OTHER = PlanId(bytes(32)), PlanId(bytes([1]) * 32)
RULES = MoveRules()
ABLE = Abilities(1000, ("stored", "int8"), ("float32",), {}, "home", ("swiglu",), moves=True)


def window(number: int) -> Window:
    return Window(number, number + 1, 0, 8)


def place(number: int = 0, *, proven: int = 0, target: int = 2, loading: int = 0, **changes: Any) -> Place:
    """A window, short since 0 unless it has enough."""
    need = WindowNeed(
        plan=changes.pop("plan", PLAN),
        window=window(number),
        target=target,
        proven=proven,
        loading=loading,
        demand=changes.pop("demand", 0.0),
        download_bytes=2000,
        kept_bytes=changes.pop("kept_bytes", {"stored": 1000, "int8": 300}),
        wire_dtype="float32",
        formulas=changes.pop("formulas", frozenset({"swiglu"})),
        networks=changes.pop("networks", frozenset()),
    )
    made = Place(need, live=proven, short_since=0.0 if need.scarcity > 0 else None)
    return replace(made, **changes)


def mover(device: int, at: int, **changes: Any) -> Mover:
    key = device.to_bytes(32, "big")
    made = Mover(LeaseId(key[16:]), PublicKey(key), PLAN, window(at), "stored", 1000, 0, ABLE)
    return replace(made, **changes)


def choose(
    places: Sequence[Place],
    movers: Sequence[Mover],
    *,
    now: float = 100.0,
    budget: int = 1,
    rules: MoveRules = RULES,
    seed: int = 0,
) -> list[tuple[int, int, int]]:
    """The moves as (device, from, to)."""
    draw = random.Random(seed).random
    moves = choose_moves(places, movers, budget=budget, now=now, rules=rules, draw=draw)
    return [
        (
            int.from_bytes(move.mover.device, "big"),
            move.mover.window.layer_start,
            move.offer.window.layer_start,
        )
        for move in moves
    ]


# --- what is worth a move ----------------------------------------------------------------------------------


def test_two_devices_at_one_window_and_none_at_another() -> None:
    moves = choose([place(0, proven=2), place(1)], [mover(1, 0), mover(2, 0)])
    assert [(source, goal) for _, source, goal in moves] == [(0, 1)]


@pytest.mark.parametrize(
    ("source", "goal", "worth"),
    [
        ((2, 2), (0, 2), True),  # 1.0 becomes 0.5
        ((1, 2), (0, 2), False),  # the last replica
        ((2, 2), (1, 2), False),  # 0.5 for 0.5
        ((3, 2), (1, 2), True),  # one more than it needs
        ((3, 3), (1, 2), False),  # 0.5 becomes 0.33: not markedly
        ((4, 4), (1, 2), True),  # 0.5 becomes 0.25
        ((2, 2), (1, 8), True),  # one of eight is all that a replica can do there
        ((2, 2), (3, 8), False),  # 0.625 becomes 0.5
        ((8, 8), (3, 8), True),
        ((2, 2), (2, 2), False),
    ],
)
def test_only_a_marked_gain_of_the_worse_window_is_worth_it(
    source: tuple[int, int], goal: tuple[int, int], worth: bool
) -> None:
    leaves = place(0, proven=source[0], target=source[1])
    takes = place(1, proven=goal[0], target=goal[1])
    assert is_worth_it(leaves, takes, RULES) == worth
    assert len(choose([leaves, takes], [mover(1, 0)])) == worth
    if worth:  # and never back
        back = replace(takes.need, proven=goal[0] + 1), replace(leaves.need, proven=source[0] - 1)
        assert not is_worth_it(Place(back[0], goal[0] + 1), Place(back[1], source[0] - 1), RULES)


def test_a_replica_whose_device_is_silent_covers_nothing() -> None:
    assert not choose([place(0, proven=2, live=1), place(1)], [mover(1, 0)])


def test_what_is_coming_and_leaving_counts() -> None:
    goal = place(1, coming=1)
    assert not choose([place(0, proven=2), goal], [mover(1, 0)])
    assert not choose([place(0, proven=3, leaving=1, live=1), place(1)], [mover(1, 0)])
    assert not choose([place(0, proven=2), place(1, loading=1)], [mover(1, 0)])


def test_a_window_is_given_time_to_be_claimed() -> None:
    places = [place(0, proven=2), place(1, short_since=50.0)]
    assert not choose(places, [mover(1, 0)], now=109.9)
    assert choose(places, [mover(1, 0)], now=110.0)
    assert not choose(places, [mover(1, 0)], now=1e9, rules=MoveRules(patience_s=None))


def test_the_worst_window_is_helped_first_then_the_one_that_is_asked_for_most() -> None:
    full = place(9, proven=4)
    movers = [mover(number, 9) for number in range(4)]
    worst = [place(0, proven=1), place(1), place(2, proven=1)]
    assert [goal for *_, goal in choose([full, *worst], movers)] == [1]
    asked = [place(0, demand=1.0), place(1, demand=3.0), place(2)]
    assert [goal for *_, goal in choose([full, *asked], movers)] == [1]


def test_a_worst_window_that_nobody_can_serve_does_not_keep_others_waiting() -> None:
    huge = place(0, kept_bytes={"stored": 10**9})
    assert [goal for *_, goal in choose([huge, place(1), place(2, proven=2)], [mover(1, 2)])] == [1]


def test_the_best_off_gives_first_then_the_one_least_asked_for() -> None:
    goal = place(0)
    richer = [place(1, proven=2), place(2, proven=3), place(3, proven=2)]
    movers = [mover(number, number) for number in (1, 2, 3)]
    assert choose([goal, *richer], movers)[0][1] == 2
    asked = [place(1, proven=2, demand=9.0), place(2, proven=2, demand=1.0), place(3, proven=2, demand=5.0)]
    assert choose([goal, *asked], movers)[0][1] == 2


def test_ties_are_drawn() -> None:
    places = [place(0, proven=2), place(1)]
    movers = [mover(1, 0), mover(2, 0)]
    assert {choose(places, movers, seed=seed)[0][0] for seed in range(30)} == {1, 2}


# --- who can ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "goal"),
    [
        ({"taken": frozenset({(PLAN, window(1))})}, {}),
        ({"rests_until": 101.0}, {}),
        ({"kept_bytes": 999}, {}),
        ({"abilities": replace(ABLE, formulas=("relu2",))}, {}),
        ({"abilities": replace(ABLE, wire_dtypes=("bfloat16",))}, {}),
        ({"precision": "bf16"}, {}),
        ({"abilities": replace(ABLE, precisions=("int4",))}, {"plan": OTHER}),
    ],
)
def test_who_cannot_is_not_asked(changes: dict[str, Any], goal: dict[str, Any]) -> None:
    assert not choose([place(0, proven=2), place(1, **goal)], [mover(1, 0, **changes)])


def test_free_budget_adds_to_what_is_given_up() -> None:
    assert choose([place(0, proven=2), place(1)], [mover(1, 0, kept_bytes=600, free_bytes=400)])


def test_the_precision_stays_within_a_plan_and_is_chosen_anew_in_another() -> None:
    def offered(goal: Place, **changes: Any) -> str:
        draw = random.Random(0).random
        moving = mover(1, 0, **changes)
        (move,) = choose_moves([place(0, proven=2), goal], [moving], budget=1, now=99, rules=RULES, draw=draw)
        return move.offer.precision

    assert offered(place(1), precision="int8", kept_bytes=5000) == "int8"
    assert offered(place(1, plan=OTHER), precision="int8", kept_bytes=5000) == "stored"
    assert offered(place(1, plan=OTHER), precision="stored", kept_bytes=500) == "int8"


def test_the_reason_says_both_sides() -> None:
    draw = random.Random(0).random
    places = [place(0, proven=2), place(1)]
    (move,) = choose_moves(places, [mover(1, 0)], budget=1, now=99, rules=RULES, draw=draw)
    assert move.offer.reason == (
        "0 of 2 replicas, demand 0.0 rows/s, and L00-00/E000-007 has 2 of 2 replicas, demand 0.0 rows/s"
    )


# --- how many ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "allowed"), [(0, 1), (1, 1), (199, 1), (200, 2), (12_345, 123)])
def test_one_percent_a_minute_and_one_at_least(devices: int, allowed: int) -> None:
    assert allowed_a_minute(devices, RULES) == allowed


def test_moves_of_one_decision_count_for_each_other() -> None:
    places = [place(0, proven=3), place(1), place(2)]
    movers = [mover(number, 0) for number in range(3)]
    moves = choose(places, movers, budget=10)
    assert [goal for *_, goal in moves] in ([1, 2], [2, 1])  # the third stays, and no window gets two
    assert len({device for device, *_ in moves}) == 2
    assert choose(places, movers, budget=0) == []


def test_a_device_makes_one_move_at_a_time() -> None:
    one = mover(1, 0)
    other = replace(one, lease=LeaseId(bytes(16)), window=window(3))
    places = [place(0, proven=2), place(3, proven=2), place(1), place(2)]
    assert len(choose(places, [one, other], budget=10)) == 1


@pytest.mark.parametrize(
    "wrong", [{"patience_s": -1.0}, {"margin": 0.0}, {"share": 2.0}, {"offer_s": 0.0}, {"rest_s": -1.0}]
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        MoveRules(**wrong)


@pytest.mark.parametrize(("text", "seconds"), [("60", 60.0), ("0", 0.0), ("1.5", 1.5), ("never", None)])
def test_the_patience_as_it_is_given(text: str, seconds: float | None) -> None:
    assert parse_patience(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "soon", "inf", "nan"])
def test_a_patience_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--move-after"):
        parse_patience(text)


# --- over many minutes ------------------------------------------------------------------------------------

TICK_S = 20.0


@dataclass
class Lives:
    """A small swarm over time: who holds what, where each device has room for one or two windows."""

    rng: random.Random
    windows: int
    devices: int
    rules: MoveRules
    demand: list[float]
    targets: list[int]

    def __post_init__(self) -> None:
        self.now = 0.0
        self.room = [self.rng.choice((1, 1, 2)) for _ in range(self.devices)]
        self.held: list[set[int]] = [set() for _ in range(self.devices)]
        self.short: dict[int, float] = {}
        self.rests = [0.0] * self.devices
        self.moved: list[tuple[float, int, int, int]] = []

    def replicas(self, number: int) -> int:
        return sum(number in held for held in self.held)

    def covered(self) -> set[int]:
        return set().union(*self.held)

    def places(self) -> list[Place]:
        found = []
        for number in range(self.windows):
            made = place(
                number, proven=self.replicas(number), target=self.targets[number], demand=self.demand[number]
            )
            short = made.scarcity() > 0
            since = self.short.setdefault(number, self.now) if short else None
            if not short:
                self.short.pop(number, None)
            found.append(replace(made, short_since=since))
        return found

    def movers(self) -> Iterable[Mover]:
        for device, held in enumerate(self.held):
            taken = frozenset((PLAN, window(number)) for number in held)
            free = 1000 * (self.room[device] - len(held))
            for number in held:
                made = mover(device * 100 + number, number, free_bytes=free, taken=taken)
                key = PublicKey(device.to_bytes(32, "big"))
                yield replace(made, device=key, rests_until=self.rests[device])

    def volunteer(self) -> None:
        """Everybody with room takes one of the scarcest windows."""
        for device in self.rng.sample(range(self.devices), self.devices):
            if len(self.held[device]) < self.room[device]:
                short = [p for p in self.places() if p.scarcity() > 0]
                new = [p for p in short if p.need.window.layer_start not in self.held[device]]
                if new:
                    best = max(new, key=lambda p: (p.scarcity(), self.rng.random()))
                    self.held[device].add(best.need.window.layer_start)

    def tick(self, carry_out: Callable[[Move], bool]) -> None:
        """Decide and carry out."""
        self.now += TICK_S
        recent = sum(at > self.now - MINUTE_S for at, *_ in self.moved)
        places = self.places()
        if not any(place.scarcity() for place in places):
            return
        moves = choose_moves(
            places,
            list(self.movers()),
            budget=allowed_a_minute(self.devices, self.rules) - recent,
            now=self.now,
            rules=self.rules,
            draw=self.rng.random,
        )
        for move in moves:
            device = int.from_bytes(move.mover.device, "big")
            source, goal = move.mover.window.layer_start, move.offer.window.layer_start
            self.rests[device] = self.now + self.rules.rest_s
            if not carry_out(move):
                continue
            assert self.replicas(source) >= 2, "the last replica moves"
            assert self.replicas(goal) < self.targets[goal]
            self.held[device].remove(source)
            self.held[device].add(goal)
            self.moved.append((self.now, device, source, goal))


def a_swarm(seed: int, *, hot: bool = True) -> Lives:
    rng = random.Random(seed)
    windows = rng.randint(2, 12)
    demand = [rng.random() * (3000 if hot and rng.random() < 0.2 else 10) for _ in range(windows)]
    targets = [next_target(2, demand=d, chance=0.0, windows=windows, rules=ScarcityRules()) for d in demand]
    devices = rng.choice((3, windows, 2 * windows))
    share = rng.choice((0.01, 0.2))
    return Lives(rng, windows, devices, MoveRules(rest_s=120.0, share=share), demand, targets)


def within_a_minute(moved: Sequence[tuple[float, int, int, int]]) -> int:
    """The most moves within any minute."""
    return max((sum(0 <= at - start < MINUTE_S for at, *_ in moved) for start, *_ in moved), default=0)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30))
def test_with_steady_demand_moves_come_to_an_end_and_leave_nothing_worth_one(seed: int) -> None:
    swarm = a_swarm(seed)
    for held, room in zip(swarm.held, swarm.room, strict=True):  # claimed at the same moment, blindly
        held.update(swarm.rng.sample(range(swarm.windows), min(room, swarm.windows)))
    for _ in range(240):
        covered = swarm.covered()
        swarm.tick(lambda move: True)
        assert covered <= swarm.covered()
    assert within_a_minute(swarm.moved) <= allowed_a_minute(swarm.devices, swarm.rules)
    gone: set[tuple[int, int, int]] = set()
    for _, device, source, goal in swarm.moved:  # nobody goes back to where it came from
        assert (device, goal, source) not in gone
        gone.add((device, source, goal))
    if swarm.moved:
        assert swarm.now - swarm.moved[-1][0] > MINUTE_S, "still moving after 80 minutes"
    places = swarm.places()
    uncovered = [p for p in places if p.live == 0]
    spare = (
        [p for p in places if p.live > 1 and is_worth_it(p, uncovered[0], swarm.rules)] if uncovered else []
    )
    for source in spare:  # whoever could give is at that window already, or holds nothing that may go
        number = source.need.window.layer_start
        goal = uncovered[0].need.window.layer_start
        assert all(goal in held for held in swarm.held if number in held)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30))
def test_whatever_happens_nothing_is_uncovered_and_the_bounds_hold(seed: int) -> None:
    swarm = a_swarm(seed)
    rng, rules = swarm.rng, ScarcityRules()
    for _ in range(150):
        if rng.random() < 0.3:
            swarm.volunteer()
        if rng.random() < 0.1:  # a device goes, and comes back empty
            swarm.held[rng.randrange(swarm.devices)].clear()
        number = rng.randrange(swarm.windows)
        swarm.demand[number] *= rng.choice((0.5, 1.0, 2.0))
        swarm.targets[number] = next_target(
            swarm.targets[number], demand=swarm.demand[number], chance=0.0, windows=swarm.windows, rules=rules
        )
        covered = swarm.covered()
        swarm.tick(lambda move: rng.random() < 0.8)  # some decline, or fail
        assert covered <= swarm.covered()
    assert within_a_minute(swarm.moved) <= allowed_a_minute(swarm.devices, swarm.rules)
    last: dict[int, float] = {}
    for at, device, *_ in swarm.moved:
        assert at - last.get(device, -1e9) >= swarm.rules.rest_s
        last[device] = at


def test_a_swarm_that_claimed_blindly_is_covered_in_a_few_minutes() -> None:
    swarm = Lives(random.Random(7), 4, 8, MoveRules(), [1.0] * 4, [2] * 4)
    swarm.room = [1] * 8
    for device, held in enumerate(swarm.held):
        held.add(0 if device < 6 else 1)
    for _ in range(60):
        swarm.tick(lambda move: True)
    assert [swarm.replicas(number) for number in range(4)] == [2, 2, 2, 2]
    assert len(swarm.moved) == 4

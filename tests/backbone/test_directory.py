"""The backbone's view of claims: snapshots, changes, gaps, references, rosters."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_backbone.directory import Directory
from market.messages import Assignment, Change, EndedListing, ResyncNeeded, Snapshot
from market.plans import PlanId
from market.wallet import Grant
from market.wire import LeaseId
from relay.identity import ExchangePublic, SignedDocument
from tests.support.rosters import device, flat_plan

PLAN = flat_plan()
PLAN_ID = PlanId(bytes(32))
DOCUMENT = SignedDocument("claim", b"", device("market"), bytes(64))


def claim(name: str, window: int, state: str = "PROVEN", **changes: Any) -> Assignment:
    """A claim of device `name` on window number `window`."""
    key, wallet = device(name), device(f"wallet of {name}")
    grant = Grant(
        bytes(32), "", bytes(64), wallet, key, ExchangePublic(bytes(32)), "serve", 0, 1, device("root")
    )
    fields: dict[str, Any] = {
        "lease": LeaseId(hashlib.sha256(f"{name}{window}".encode()).digest()[:16]),
        "window": PLAN.windows[window],
        "plan": PLAN_ID,
        "slot": 0,
        "epoch": 1,
        "state": state,
        "precision": "stored",
        "numerics": "n",
        "wallet": wallet,
        "device": key,
        "grant": grant,
        "relays": (),
        "addresses": (),
        "document": DOCUMENT,
        "expires_in_s": 60.0,
        "start_generation": 1,
    }
    return Assignment(**{**fields, **changes})


def directory(*claims: Assignment, revision: int = 10) -> Directory:
    made = Directory(PLAN)
    made.replace_all(Snapshot(revision, claims))
    return made


def test_a_snapshot_makes_the_roster_of_proven_replicas_only() -> None:
    made = directory(claim("a", 0), claim("a", 1, "LOADED"), claim("b", 0, "HELD"), claim("c", 2, "DRAINING"))
    both = {device("a"), device("b"), device("c")}
    roster = made.roster({device("a")}, usable=both)
    assert [replica.device for replica in roster.of(0)] == [device("a")]
    assert roster.of(0)[0].connected
    assert roster.of(1) == roster.of(2) == ()
    assert roster.coverage() == 1 / 4
    assert made.devices() == {device("a"), device("c")}
    assert made.leased_windows(device("b")) == {PLAN.windows[0]}


def test_replies_are_honoured_under_proven_and_draining_claims_of_the_current_epoch() -> None:
    made = directory(claim("a", 0, epoch=3), claim("c", 2, "DRAINING"), claim("a", 1, "LOADED"))
    honoured = made.roster(set(), usable=set()).honoured
    assert honoured == {(claim("a", 0).lease, 3), (claim("c", 2).lease, 1)}


def test_a_device_that_is_not_usable_yet_is_left_out() -> None:
    made = directory(claim("a", 0))
    assert made.roster({device("a")}, usable=set()).of(0) == ()
    (replica,) = made.roster(set(), usable={device("a")}).of(0)
    assert not replica.connected


def test_changes_follow_each_other_and_a_gap_asks_for_a_snapshot() -> None:
    made = directory(claim("a", 0, "HELD"))
    difference = made.apply(Change(11, 10, assignment=claim("a", 0, "LOADED")))
    assert difference.devices == {device("a")}
    with pytest.raises(ResyncNeeded):
        made.apply(Change(13, 12, assignment=claim("a", 0)))
    assert made.all()[0].assignment.state == "LOADED"
    ended = made.apply(Change(12, 11, ended=EndedListing(claim("a", 0).lease, "expired")))
    assert [reason for _, reason in ended.ended.values()] == ["expired"]
    assert made.all() == ()


def test_a_snapshot_ends_what_it_does_not_list_and_names_the_devices_concerned() -> None:
    made = directory(claim("a", 0), claim("b", 1))
    difference = made.replace_all(Snapshot(20, (claim("b", 1), claim("c", 2))))
    assert difference.devices == {device("a"), device("c")}
    assert set(difference.ended) == {claim("a", 0).lease}
    assert made.revision == 20


def test_references_are_kept_through_changes_and_never_shared_in_a_device() -> None:
    made = directory(claim("a", 0), claim("a", 1), claim("b", 2))
    refs = {holding.assignment.window: holding.ref for holding in made.of(device("a"))}
    assert len(set(refs.values())) == 2
    made.apply(Change(11, 10, assignment=claim("a", 1, epoch=2)))
    assert {holding.assignment.window: holding.ref for holding in made.of(device("a"))} == refs
    made.apply(Change(12, 11, ended=EndedListing(claim("a", 0).lease, "released")))
    made.apply(Change(13, 12, assignment=claim("a", 3)))
    assert len({holding.ref for holding in made.of(device("a"))}) == 2


def test_what_the_market_confirmed_counts_before_its_change_arrives_but_only_for_that_epoch() -> None:
    made = directory(claim("a", 0, "LOADED"))
    made.mark(claim("a", 0).lease, 2, state="PROVEN")
    assert made.all()[0].assignment.state == "LOADED"
    made.mark(claim("a", 0).lease, 1, state="PROVEN")
    assert made.all()[0].assignment.state == "PROVEN"


def test_a_lease_that_is_stale_at_its_epoch_is_left_out_until_the_epoch_moves_on() -> None:
    made = directory(claim("a", 0, epoch=3), claim("a", 1, epoch=3))
    stale = {(claim("a", 0).lease, 3)}
    roster = made.roster({device("a")}, usable={device("a")}, stale=stale)
    assert roster.of(0) == ()
    assert len(roster.of(1)) == 1
    made.apply(Change(11, 10, assignment=claim("a", 0, epoch=4)))
    assert len(made.roster({device("a")}, usable={device("a")}, stale=stale).of(0)) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans(), st.integers(1, 3)), max_size=30
    )
)
def test_the_claims_of_a_device_are_those_of_all_claims_that_are_its_own(
    changes: list[tuple[str, int, bool, int]],
) -> None:
    made = Directory(PLAN)
    for revision, (name, window, ends, epoch) in enumerate(changes):
        if ends:
            ended = EndedListing(claim(name, window).lease, "released")
            made.apply(Change(revision + 1, revision, ended=ended))
        else:
            made.apply(Change(revision + 1, revision, assignment=claim(name, window, epoch=epoch)))
        for other in map(device, "abc"):
            assert set(made.of(other)) == {holding for holding in made.all() if holding.device == other}
        assert made.holders() == {holding.device for holding in made.all()}
    made.replace_all(Snapshot(99, ()))
    assert made._by_device == {}
    assert made._next_ref == {}


def test_a_lease_that_another_device_has_now_is_no_longer_the_first_ones() -> None:
    made = directory(claim("a", 0))
    lease = claim("a", 0).lease
    difference = made.apply(Change(11, 10, assignment=claim("b", 0, lease=lease)))
    assert difference.devices == {device("a"), device("b")}
    assert made.of(device("a")) == ()
    assert [holding.assignment.lease for holding in made.of(device("b"))] == [lease]

"""The life of a claim, as pure decisions; and the claim document."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market.claims import (
    DEFAULT_RATE,
    LOADING_BASE_S,
    NEXT,
    SLOWEST_RATE,
    ClaimDocument,
    LeaseFacts,
    LeaseRules,
    check_epoch,
    counts_as_supply,
    loading_time,
    move,
    new_lease,
    open_claim,
    renew,
    sign_claim,
    why_over,
)
from market.plans import PlanId
from market.windows import Window
from market.wire import Hash, LeaseId
from relay.errors import IdentityError, KvasirError, Refused
from relay.identity import SigningKey, sign_document

RULES = LeaseRules(ttl_s=60, proving_s=120, draining_s=60)
SIZE = 100_000_000
KEY, ROOT, WALLET, DEVICE, RELAY = (SigningKey(bytes([n]) * 32) for n in range(1, 6))


def held(now: float = 0.0) -> LeaseFacts:
    return new_lease(epoch=1, size=SIZE, now=now, rate=None, rules=RULES)


def test_the_table_has_exactly_these_steps() -> None:
    allowed = {(a, b) for a, follow in NEXT.items() for b in follow}
    assert allowed == {
        ("HELD", "LOADED"),
        ("HELD", "DRAINING"),
        ("HELD", "ENDED"),
        ("LOADED", "PROVEN"),
        ("LOADED", "DRAINING"),
        ("LOADED", "ENDED"),
        ("PROVEN", "DRAINING"),
        ("PROVEN", "ENDED"),
        ("DRAINING", "ENDED"),
    }


@pytest.mark.parametrize(("before", "after"), list(product(NEXT, NEXT)))
def test_moves_follow_the_table(before: Any, after: Any) -> None:
    lease = replace(held(), state=before)
    if after in NEXT[before]:
        assert move(lease, after, now=5, rules=RULES).state == after
    else:
        with pytest.raises(Refused) as refused:
            move(lease, after, now=5, rules=RULES)
        assert refused.value.code == "conflict"


def test_the_loading_deadline_is_60_s_and_twice_the_bytes_over_the_rate() -> None:
    assert loading_time(SIZE, None) == 60 + 2 * SIZE / DEFAULT_RATE
    assert loading_time(SIZE, 50e6) == 60 + 4
    assert loading_time(SIZE, 1.0) == 60 + 2 * SIZE / SLOWEST_RATE
    assert held(100).deadline == 100 + 260


def test_a_lease_expires_one_ttl_after_its_last_renewal() -> None:
    lease = held()
    assert why_over(lease, now=60) is None
    assert "heartbeat stopped" in (why_over(lease, now=60.1) or "")
    renewed = renew(lease, verified=0, now=50, rules=RULES)
    assert why_over(renewed, now=110) is None
    assert why_over(renewed, now=110.1) is not None


def test_only_verified_bytes_extend_the_loading_deadline() -> None:
    lease = held()
    silent = renew(lease, verified=0, now=259, rules=RULES)
    assert silent.deadline == 260
    loading = renew(lease, verified=4_000_000, now=259, rules=RULES)
    assert loading.deadline == 259 + LOADING_BASE_S
    same = renew(loading, verified=4_000_000, now=300, rules=RULES)
    assert same.deadline == loading.deadline
    assert "not loaded in time" in (why_over(replace(silent, expires_at=1e9), now=261) or "")


@given(st.lists(st.tuples(st.floats(0, 60), st.integers(0, 2 * SIZE)), max_size=200))
def test_no_trickle_of_bytes_holds_a_window_beyond_the_bound(beats: list[tuple[float, int]]) -> None:
    lease, now, verified = held(), 0.0, 0
    for pause, more in beats:
        now += pause
        verified += more
        lease = renew(lease, verified=verified, now=now, rules=RULES)
        assert lease.deadline is not None
        assert lease.deadline <= loading_time(SIZE, SLOWEST_RATE)
        assert lease.verified <= SIZE


def test_supply_is_proven_or_loading_within_its_deadline() -> None:
    lease = held()
    assert counts_as_supply(lease, now=260)
    assert not counts_as_supply(lease, now=261)
    loaded = move(lease, "LOADED", now=10, rules=RULES)
    assert counts_as_supply(loaded, now=130)
    assert not counts_as_supply(loaded, now=131)
    assert why_over(replace(loaded, expires_at=1e9), now=131) is None
    proven = move(loaded, "PROVEN", now=20, rules=RULES)
    assert counts_as_supply(proven, now=1e9)
    draining = move(proven, "DRAINING", now=30, rules=RULES)
    assert not counts_as_supply(draining, now=31)
    assert why_over(replace(draining, expires_at=1e9), now=91) == "drained"


def test_an_ended_lease_is_not_over_again() -> None:
    assert why_over(move(held(), "ENDED", now=1, rules=RULES), now=1e9) is None


def test_another_epoch_is_refused() -> None:
    check_epoch(held(), 1)
    for epoch in (0, 2):
        with pytest.raises(Refused) as refused:
            check_epoch(held(), epoch)
        assert refused.value.code == "stale_epoch"


def claim_document(**changes: Any) -> ClaimDocument:
    made = ClaimDocument(
        swarm=ROOT.public,
        lease=LeaseId(bytes(16)),
        window=Window(3, 6, 0, 128),
        slot=1,
        epoch=7,
        grant=Hash(bytes(32)),
        wallet=WALLET.public,
        device=DEVICE.public,
        relays=(("/relay/v1", RELAY.public),),
        plan=PlanId(bytes(32)),
        precision="int8",
        issued_at=1_700_000_000,
    )
    return replace(made, **changes)


def test_a_claim_document_is_read_back() -> None:
    document = sign_claim(claim_document(), KEY)
    assert open_claim(document, market_key=KEY.public, root=ROOT.public) == claim_document()


def test_a_claim_of_another_market_or_swarm_is_refused() -> None:
    document = sign_claim(claim_document(), KEY)
    with pytest.raises(IdentityError):
        open_claim(document, market_key=ROOT.public, root=ROOT.public)
    with pytest.raises(Refused) as refused:
        open_claim(document, market_key=KEY.public, root=KEY.public)
    assert refused.value.code == "wrong_swarm"


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": b"short"},
        {"window": "L1"},
        {"slot": -1},
        {"epoch": 0},
        {"precision": "fp3"},
        {"relays": [["url"]]},
        {"relays": [["url", b"short"]]},
        {"wallet": bytes(32)},
        {"plan": None},
    ],
    ids=str,
)
def test_a_claim_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    fields = {
        "swarm": ROOT.public,
        "lease": bytes(16),
        "window": "L03-05/E000-127",
        "slot": 0,
        "epoch": 1,
        "grant": bytes(32),
        "wallet": WALLET.public,
        "device": DEVICE.public,
        "relays": [],
        "plan": bytes(32),
        "precision": "stored",
        "issued_at": 0,
    }
    open_claim(sign_document("claim", fields, KEY), market_key=KEY.public, root=ROOT.public)
    with pytest.raises(KvasirError):
        open_claim(
            sign_document("claim", {**fields, **changes}, KEY), market_key=KEY.public, root=ROOT.public
        )

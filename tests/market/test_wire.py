"""Messages to JSON and back, the refusal of what does not fit, and the OpenAPI document made of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from market import messages as m
from market.openapi import document
from market.plans import PlanId
from market.routes import PREFIX, ROUTES
from market.windows import Window
from market.wire import LeaseId, from_json, nested, object_schema, to_json
from relay.errors import RemoteProtocolError
from relay.identity import SigningKey, sign_document

KEY = SigningKey(bytes([1]) * 32)
PLAN = PlanId(bytes(range(32)))
WINDOW = Window(3, 6, 0, 128)

texts = st.text(max_size=20)
numbers = st.integers(-(2**63) + 1, 2**63 - 1)


@given(
    st.builds(
        m.Abilities,
        budget_bytes=numbers,
        precisions=st.lists(texts, max_size=3).map(tuple),
        wire_dtypes=st.lists(texts, max_size=3).map(tuple),
        numerics=st.dictionaries(texts, texts, max_size=3),
        network=texts,
        formulas=st.lists(texts, max_size=3).map(tuple),
        start_generation=numbers,
        cached=st.lists(st.just((PLAN, WINDOW)), max_size=2).map(tuple),
    )
)
def test_messages_are_read_back(abilities: m.Abilities) -> None:
    assert from_json(m.Abilities, json.loads(json.dumps(to_json(abilities)))) == abilities


def test_every_kind_of_field_is_read_back() -> None:
    document = sign_document("x", {"y": 1}, KEY)
    status = m.LeaseStatus(LeaseId(bytes(range(16))), 3, "PROVEN", 1.5, None)
    answer = m.HeartbeatAnswer((status,), (document,), ("é",))
    assert from_json(m.HeartbeatAnswer, to_json(answer)) == answer
    assert to_json(status) == {
        "id": "000102030405060708090a0b0c0d0e0f",
        "epoch": 3,
        "state": "PROVEN",
        "expires_in_s": 1.5,
        "reason": None,
    }


GOOD = to_json(m.LeaseBeat(LeaseId(bytes(16)), 1, 0))
BAD: list[Any] = [
    None,
    [],
    "x",
    {},
    {**GOOD, "lease": "0" * 31},
    {**GOOD, "lease": "0" * 31 + "G"},
    {**GOOD, "lease": "A" * 32},
    {**GOOD, "lease": 0},
    {**GOOD, "epoch": 1.0},
    {**GOOD, "epoch": True},
    {**GOOD, "epoch": "1"},
    {**GOOD, "epoch": 2**63},
    {**GOOD, "verified_bytes": None},
]


@pytest.mark.parametrize("data", BAD, ids=repr)
def test_what_does_not_fit_is_refused(data: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        from_json(m.LeaseBeat, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (m.LeaseStatus, {"id": "0" * 32, "epoch": 1, "state": "GONE", "expires_in_s": 0.0}),
        (m.LeaseStatus, {"id": "0" * 32, "epoch": 1, "state": ["HELD"], "expires_in_s": 0.0}),
        (m.LeaseStatus, {"id": "0" * 32, "epoch": 1, "state": "HELD", "expires_in_s": float("nan")}),
        (m.WindowsAnswer, {"windows": ["L1"]}),
        (m.WindowsAnswer, {"windows": {}}),
        (m.DemandReport, {"rows_per_s": []}),
        (m.DemandReport, {"rows_per_s": {"a": "b"}}),
        (m.TicketAnswer, {"ticket": "AAAA"}),
        (m.TicketAnswer, {"ticket": 1}),
        (m.TicketRequest, {"relay": "1" * 32, "start_generation": 0}),
        (m.ReasonRequest, {"epoch": 1, "reason": "x" * 5000}),
        (m.Abilities, {**to_json(m.Abilities(0, (), (), {}, "", ())), "cached": [["00"]]}),
    ],
    ids=str,
)
def test_other_kinds_that_do_not_fit_are_refused(kind: type, data: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        from_json(kind, data)


def test_unknown_fields_are_ignored_and_absent_ones_take_their_default() -> None:
    data = {"id": "0" * 32, "epoch": 1, "state": "HELD", "expires_in_s": 1, "later": True}
    assert from_json(m.LeaseStatus, data).reason is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_is_taken_or_refused(data: Any) -> None:
    for kind in (m.Abilities, m.ChangeListing, m.SnapshotListing, m.GrantRequest):
        with pytest.raises(RemoteProtocolError):
            from_json(kind, data)


# --- OpenAPI -----------------------------------------------------------------------------------------------


def test_the_document_names_every_route_and_resolves_every_reference() -> None:
    made = document()
    assert {path for path in made["paths"]} == {PREFIX + route.path for route in ROUTES}
    text = json.dumps(made)
    for reference in text.split('"$ref": "#/components/schemas/')[1:]:
        assert reference.partition('"')[0] in made["components"]["schemas"]


def test_the_schema_of_each_message_has_its_fields() -> None:
    for route in ROUTES:
        for kind in (route.body, route.answer):
            for message in nested(kind) if kind is not None else ():
                names = {field.name for field in dataclasses.fields(message)}
                assert object_schema(message)["properties"].keys() == names

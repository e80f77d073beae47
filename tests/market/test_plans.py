"""Plans and window hashes: round trips, and every field refused that does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from market.plans import (
    OP_ARGUMENTS,
    OPS,
    PlanId,
    WindowHashes,
    open_hashes,
    open_plan,
    parse_plan,
    plan_fields,
    plan_id,
    sign_hashes,
    sign_plan,
)
from market.windows import Window
from relay.errors import IdentityError, RemoteProtocolError
from relay.identity import SigningKey, sign_document, unpack

from ..support.markets import small_plan

KEY = SigningKey(bytes(range(32)))
Fields = dict[str, Any]


def test_a_signed_plan_is_read_back_equal_and_keeps_its_id_whoever_signs() -> None:
    plan = small_plan(layers=3, windows_a_layer=2)
    document = sign_plan(plan, KEY)
    assert open_plan(document, KEY.public) == plan
    assert plan_id(document) == plan_id(sign_plan(plan, SigningKey.generate()))


def test_another_signer_is_refused() -> None:
    with pytest.raises(IdentityError):
        open_plan(sign_plan(small_plan(), KEY), SigningKey.generate().public)


def test_every_step_says_what_its_arguments_are() -> None:
    assert set(OPS) == OP_ARGUMENTS.keys()


def test_steps_with_right_arguments_are_taken() -> None:
    fields = _fields()
    ops = [["transpose"], ["rows", 0, 4, 2], ["dequant_fp8_block", 128, 128], ["dequant_mxfp4"]]
    _tensor(fields)["ops"] = [*ops, ["dequant_int4_packed", 32, True], ["add", 1.0]]
    assert len(parse_plan(fields).layers[0].tensors[0].ops) == 6


def _fields() -> Fields:
    fields: Fields = unpack(sign_plan(small_plan(), KEY).body)
    return fields


def _tensor(fields: Fields) -> Fields:
    tensor: Fields = fields["layers"][0]["tensors"][0]
    return tensor


def _source(fields: Fields) -> Fields:
    source: Fields = _tensor(fields)["sources"][0]
    return source


def _set(where: Callable[[Fields], Fields], **changes: Any) -> Callable[[Fields], None]:
    return lambda fields: where(fields).update(changes)


def _top(**changes: Any) -> Callable[[Fields], None]:
    return lambda fields: fields.update(changes)


def _layer(**changes: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["layers"][0].update(changes)


def _formula(**changes: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["layers"][0]["formula"].update(changes)


BAD: dict[str, Callable[[Fields], None]] = {
    "no model": _top(model=None),
    "model with a line feed": _top(model="a\nb"),
    "endless model": _top(model="x" * 513),
    "no files": _top(files=None),
    "absolute file": _top(files=[["/etc/passwd", 10**9]]),
    "file above": _top(files=[["../model.safetensors", 10**9]]),
    "file above, inside": _top(files=[["a/../../b", 10**9]]),
    "dots alone": _top(files=[["a/..../b", 10**9]]),
    "backslash": _top(files=[["a\\b", 10**9]]),
    "file of no bytes": _top(files=[["a", 0]]),
    "file too large": _top(files=[["a", 1 << 51]]),
    "file twice": _top(files=[["a", 10**9], ["a", 10**9]]),
    "no width": _top(width=0),
    "width as text": _top(width="8"),
    "width true": _top(width=True),
    "wire dtype": _top(wire_dtype="float8"),
    "no precisions": _top(precisions=[]),
    "precision twice": _top(precisions=["stored", "stored"]),
    "unknown precision": _top(precisions=["fp3"]),
    "precision a list": _top(precisions=[["stored"]]),
    "weighted a number": _top(weighted=1),
    "window not a name": _top(windows=[7]),
    "window malformed": _top(windows=["L0-0/E0-7"]),
    "window beyond experts": _top(windows=["L00-00/E000-008"]),
    "window beyond layers": _top(windows=["L02-02/E000-007"]),
    "windows overlap": _top(windows=["L00-00/E000-004", "L00-01/E004-007"]),
    "window twice": _top(windows=["L00-00/E000-007", "L00-00/E000-007"]),
    "layers not a list": _top(layers={}),
    "layer not a map": _top(layers=[1]),
    "layer twice": lambda fields: fields["layers"].append(copy.deepcopy(fields["layers"][1])),
    "layer negative": _layer(layer=-1),
    "no experts": _layer(experts=0),
    "too many experts": _layer(experts=65_536),
    "top_k zero": _layer(top_k=0),
    "top_k over experts": _layer(top_k=9),
    "no formula": _layer(formula=None),
    "formula two words": _formula(name="swi glu"),
    "formula limit infinite": _formula(limit=float("inf")),
    "formula limit a text": _formula(limit="7"),
    "tensor missing": lambda fields: fields["layers"][0]["tensors"].pop(),
    "tensor twice": lambda fields: fields["layers"][0]["tensors"].append(copy.deepcopy(_tensor(fields))),
    "unknown role": _set(_tensor, role="router"),
    "shape of other width": _set(_tensor, shape=[4, 9]),
    "shape of three": _set(_tensor, shape=[4, 8, 1]),
    "shape zero": _set(_tensor, shape=[0, 8]),
    "no sources": _set(_tensor, sources=[]),
    "five sources": lambda fields: _tensor(fields).update(sources=[_source(fields)] * 5),
    "unknown step": _set(_tensor, ops=[["eval", "x"]]),
    "step without a name": _set(_tensor, ops=[[]]),
    "step a text": _set(_tensor, ops=["transpose"]),
    "step with too much": _set(_tensor, ops=[["transpose", 1]]),
    "step of no rows": _set(_tensor, ops=[["rows", 0, 0, 1]]),
    "step of step zero": _set(_tensor, ops=[["rows", 0, 4, 0]]),
    "step adds nothing finite": _set(_tensor, ops=[["add", float("nan")]]),
    "too many steps": _set(_tensor, ops=[["transpose"]] * 9),
    "file index": _set(_source, file=1),
    "stored dtype": _set(_source, dtype="F4"),
    "beyond the file": _set(_source, start=10**6),
    "stride beyond the file": _set(_source, stride=10**6),
    "experts overlap": _set(_source, stride=4),
    "negative start": _set(_source, start=-1),
    "offsets too few": _set(_source, start=0, stride=0, offsets=[0, 1]),
    "offset beyond the file": _set(_source, start=0, stride=0, offsets=[0] * 7 + [10**6]),
    "offset negative": _set(_source, start=0, stride=0, offsets=[0] * 7 + [-1]),
    "offset true": _set(_source, start=0, stride=0, offsets=[0] * 7 + [True]),
    "offsets and stride": _set(_source, start=0, stride=128, offsets=[0] * 8),
    "files without offsets": _set(_source, files=[0] * 8),
    "file of an offset": _set(_source, start=0, stride=0, offsets=[0] * 8, files=[0] * 7 + [1]),
    "source of a huge shape": _set(_source, shape=[1 << 20, 1 << 20, 1 << 20, 1 << 20]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_is_refused(name: str) -> None:
    fields = _fields()
    BAD[name](fields)
    with pytest.raises(RemoteProtocolError):
        parse_plan(fields)


def test_a_plan_may_leave_layers_to_the_backbone() -> None:
    fields = _fields()
    fields["windows"] = fields["windows"][1:]
    assert len(parse_plan(fields).windows) == 1


def test_offsets_may_name_a_file_each() -> None:
    fields = _fields()
    fields["files"].append(["b.safetensors", 10**6])
    _source(fields).update(start=0, stride=0, offsets=[0] * 8, files=[0, 1] * 4)
    source = parse_plan(fields).layers[0].tensors[0].sources[0]
    assert source.locate(1).file == 1


def test_fields_are_those_of_the_document() -> None:
    assert {"v": 1, **plan_fields(small_plan())} == _fields()


def test_hashes_are_read_back_and_fit_their_plan() -> None:
    plan = small_plan()
    window = plan.windows[0]
    chunks = tuple(bytes([n]) * 32 for n in range(len(plan.window_chunks(window))))
    hashes = WindowHashes(PlanId(bytes(32)), window, chunks)
    assert open_hashes(sign_hashes(hashes, KEY), KEY.public) == hashes
    hashes.check(plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": b"x"},
        {"window": "L1"},
        {"window": None},
        {"chunks": [b"short"]},
        {"chunks": [1]},
        {"chunks": 7},
    ],
)
def test_hashes_that_do_not_fit_are_refused(changes: Fields) -> None:
    fields = {"plan": bytes(32), "window": "L00-00/E000-007", "chunks": [bytes(32)], **changes}
    with pytest.raises(RemoteProtocolError):
        open_hashes(sign_document("hashes", fields, KEY), KEY.public)


def test_hashes_of_another_count_or_window_do_not_fit_a_plan() -> None:
    plan = small_plan()
    with pytest.raises(RemoteProtocolError):
        WindowHashes(PlanId(bytes(32)), plan.windows[0], ()).check(plan)
    with pytest.raises(RemoteProtocolError):
        WindowHashes(PlanId(bytes(32)), Window(7, 8, 0, 8), ()).check(plan)

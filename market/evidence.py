"""Evidence: what a backbone signs when an audited output was off, so that the owner can check it alone.

It names the call and the expert, and carries the row that was sent, the output that came back and the one
that was expected, where they are not too large. The row went to that device already; nothing else is in it.

Pure format. Rows are bytes in the plan's wire dtype here; what they mean is not known.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Final

from relay.errors import ConfigError, IdentityError, RemoteProtocolError
from relay.identity import (
    Certificate,
    PublicKey,
    SignedDocument,
    SigningKey,
    check_public_key,
    open_document,
    require,
    sign_document,
)

from .plans import PRECISIONS, PlanId
from .windows import Window
from .wire import BackboneId, Hash, LeaseId

MAX_ROW_BYTES: Final = 64 * 1024
"""Longer rows are left out of a document, their digests stay."""

MAX_D: Final = 1e9
"""What is told of an output whose d is not finite."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One audited output that was off.

    `d` is its measure against `expected`, `limit` the largest d of an honest replica of `numerics`, `at` in
    Unix seconds. `row`, `output`, `expected` are one row each in `wire_dtype`, empty where left out; the
    digests are SHA-256 of the row and the output as they were. Where the output is a partial sum, `ids`,
    `precisions` and `weights` (fp32, little endian) say of which experts; else they are empty.
    """

    swarm: PublicKey
    backbone: BackboneId
    wallet: PublicKey
    device: PublicKey
    lease: LeaseId
    epoch: int
    plan: PlanId
    window: Window
    precision: str
    numerics: str
    wire_dtype: str
    call: int
    layer: int
    expert: int
    d: float
    limit: float
    at: float
    row_digest: Hash
    output_digest: Hash
    row: bytes = b""
    output: bytes = b""
    expected: bytes = b""
    ids: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    weights: bytes = b""
    document: SignedDocument | None = field(default=None, repr=False, compare=False)


_BYTES: Final = {"swarm": 32, "backbone": 16, "wallet": 32, "device": 32, "lease": 16, "plan": 32}
_NAMES: Final = ("precision", "numerics", "wire_dtype")
_NUMBERS: Final = ("epoch", "call", "layer", "expert")
_ROWS: Final = ("row", "output", "expected")
MAX_IDS: Final = 256


def told(d: float) -> float:
    """`d` as a document can carry it: finite."""
    return d if math.isfinite(d) and d < MAX_D else MAX_D


def digest(row: bytes) -> Hash:
    """SHA-256 of one row's bytes."""
    return Hash(hashlib.sha256(row).digest())


def sign_evidence(evidence: Evidence, key: SigningKey) -> SignedDocument:
    """Sign with the backbone's operating key, as kind "evidence"; rows over `MAX_ROW_BYTES` are left out."""
    fields: dict[str, object] = {name: getattr(evidence, name) for name in (*_BYTES, *_NAMES, *_NUMBERS)}
    fields |= {"window": evidence.window.name, "d": told(evidence.d), "limit": evidence.limit}
    fields |= {"at": evidence.at, "row_digest": evidence.row_digest, "output_digest": evidence.output_digest}
    kept = all(len(getattr(evidence, name)) <= MAX_ROW_BYTES for name in _ROWS)
    fields |= {name: getattr(evidence, name) if kept else b"" for name in _ROWS}
    fields |= {
        "ids": list(evidence.ids),
        "precisions": list(evidence.precisions),
        "weights": evidence.weights,
    }
    return sign_document("evidence", fields, key)


def open_evidence(document: SignedDocument, *, certificate: Certificate, root: bytes) -> Evidence:
    """Verify evidence signed by the key that `certificate` (verified already) names.

    Raises as `open_document` does; `IdentityError` for another swarm or backbone; `RemoteProtocolError`.
    """
    evidence = read_evidence(open_document(document, "evidence", certificate.ed25519), document)
    if evidence.swarm != root or certificate.swarm != root:
        raise IdentityError("the evidence is of another swarm", code="wrong_swarm")
    if certificate.role != "backbone" or certificate.id != evidence.backbone:
        raise IdentityError("the evidence is not signed by the backbone that it names")
    return evidence


def read_evidence(fields: dict[str, Any], document: SignedDocument) -> Evidence:
    """The evidence in the fields of its document. Raises `RemoteProtocolError`."""
    try:
        window = Window.parse(require(fields, "window", str))
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None
    values = {name: require(fields, name, bytes, size=size) for name, size in _BYTES.items()}
    values |= {name: require(fields, name, str) for name in _NAMES}
    values |= {name: require(fields, name, int) for name in _NUMBERS}
    values |= {name: require(fields, name, bytes) for name in _ROWS}
    values |= {name: require(fields, name, bytes, size=32) for name in ("row_digest", "output_digest")}
    values |= {name: require(fields, name, float) for name in ("d", "limit", "at")}
    values |= {"ids": _items(fields, "ids", int), "precisions": _items(fields, "precisions", str)}
    values["weights"] = require(fields, "weights", bytes)
    if not len(values["ids"]) == len(values["precisions"]) == len(values["weights"]) / 4:
        raise RemoteProtocolError("the experts of a partial sum and their weights do not match")
    for name in ("wallet", "device"):
        check_public_key(values[name])
    if values["precision"] not in PRECISIONS or any(values[name] < 0 for name in _NUMBERS):
        raise RemoteProtocolError("a number or the precision of the evidence is out of range")
    if any(not math.isfinite(values[name]) for name in ("d", "limit", "at")):
        raise RemoteProtocolError("a figure of the evidence is not finite")
    if any(len(values[name]) > MAX_ROW_BYTES for name in _ROWS) or len(values["numerics"]) > 512:
        raise RemoteProtocolError("a part of the evidence is too long")
    if not window.contains(values["layer"], values["expert"]):
        raise RemoteProtocolError(f"layer {values['layer']}, expert {values['expert']} is not in {window}")
    return Evidence(window=window, document=document, **values)


def _items(fields: dict[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    items = require(fields, name, list)
    if len(items) > MAX_IDS or any(type(item) is not kind for item in items):
        raise RemoteProtocolError(f"field {name!r} of the evidence is not a short list of {kind.__name__}")
    return tuple(items)

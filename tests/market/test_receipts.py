"""Receipt chains: what a device can prove with no server, and every link that does not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from market.receipts import (
    NO_PREVIOUS,
    LeaseLeaf,
    Receipt,
    check_successor,
    open_acknowledgement,
    open_receipt,
    sign_acknowledgement,
    sign_receipt,
    verify_chain,
)
from market.wire import BackboneId, LeaseId
from relay.errors import IdentityError, KvasirError, Refused, RemoteProtocolError
from relay.identity import (
    Certificate,
    ExchangeKey,
    SignedDocument,
    SigningKey,
    issue_certificate,
    sign_document,
)

ROOT, BACKBONE, DEVICE, WALLET = (SigningKey(bytes([n]) * 32) for n in range(1, 5))
NOW = 1_700_000_000
ID = BackboneId(bytes(range(16)))
LEASE = LeaseId(bytes([7]) * 16)


def certificate(key: SigningKey = BACKBONE, **changes: Any) -> Certificate:
    given = {"role": "backbone", "id": ID, "serial": 1, "now": NOW, **changes}
    exchange = ExchangeKey(bytes([5]) * 32).public
    return issue_certificate(ROOT, ed25519=key.public, x25519=exchange, **given)


CERTIFICATE = certificate()


def receipt(**changes: Any) -> Receipt:
    made = Receipt(
        swarm=ROOT.public,
        backbone=ID,
        device=DEVICE.public,
        wallet=WALLET.public,
        sequence=1,
        issued_at=NOW,
        bytes=100,
        calls=2,
        leases=(LeaseLeaf(LEASE, 1, 100, 2),),
        call_root=bytes(32),
        previous=NO_PREVIOUS,
    )
    return replace(made, **changes)


def chain(count: int = 4, key: SigningKey = BACKBONE) -> list[SignedDocument]:
    documents: list[SignedDocument] = []
    for n in range(1, count + 1):
        previous = documents[-1].digest if documents else NO_PREVIOUS
        link = receipt(
            sequence=n,
            bytes=100 * n,
            calls=n,
            previous=previous,
            issued_at=NOW + n,
            leases=(LeaseLeaf(LEASE, 1, 100 * n, n),),
        )
        documents.append(sign_receipt(link, key))
    return documents


def test_a_receipt_is_read_back() -> None:
    document = sign_receipt(receipt(), BACKBONE)
    assert open_receipt(document, certificate=CERTIFICATE, root=ROOT.public) == receipt()


def test_a_device_proves_its_balance_from_its_receipts_alone() -> None:
    documents = chain()
    proved = verify_chain(documents, certificates=[CERTIFICATE], root=ROOT.public)
    assert (proved.sequence, proved.bytes, proved.calls) == (4, 400, 4)
    assert proved.head == documents[-1].digest


def test_a_chain_survives_the_renewal_of_the_backbones_key() -> None:
    newer = SigningKey(bytes([9]) * 32)
    first, last = chain(2), receipt(sequence=3, bytes=150, calls=3, issued_at=NOW + 9, leases=())
    third = sign_receipt(replace(last, bytes=300, previous=first[-1].digest), newer)
    certificates = [CERTIFICATE, certificate(newer, serial=2)]
    assert verify_chain([*first, third], certificates=certificates, root=ROOT.public).bytes == 300
    with pytest.raises(IdentityError, match="without a certificate"):
        verify_chain([*first, third], certificates=[CERTIFICATE], root=ROOT.public)


def test_a_renewed_certificate_covers_what_its_key_signed_before() -> None:
    renewed = certificate(serial=2, now=NOW + 10)
    assert verify_chain(chain(), certificates=[renewed], root=ROOT.public).bytes == 400
    late = sign_receipt(receipt(issued_at=renewed.expires_at + 1), BACKBONE)
    with pytest.raises(IdentityError, match="ran out"):
        open_receipt(late, certificate=renewed, root=ROOT.public)


def test_a_chain_with_a_link_missing_moved_or_repeated_is_refused() -> None:
    a, b, c, d = chain()
    for broken in ([b, c, d], [a, c, d], [a, b, b], [b, a], [a, b, d, c], []):
        with pytest.raises((Refused, RemoteProtocolError)):
            verify_chain(broken, certificates=[CERTIFICATE], root=ROOT.public)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sequence": 1}, "replay"),
        ({"sequence": 3}, "conflict"),
        ({"previous": bytes(32)}, "conflict"),
        ({"bytes": 99}, "bad_request"),
        ({"calls": 1}, "bad_request"),
        ({"issued_at": NOW - 1}, "bad_request"),
        ({"device": WALLET.public}, "bad_request"),
        ({"leases": (LeaseLeaf(LEASE, 1, 99, 2),)}, "bad_request"),
    ],
    ids=str,
)
def test_what_does_not_follow_is_refused(changes: dict[str, Any], code: str) -> None:
    document = sign_receipt(receipt(), BACKBONE)
    first = open_receipt(document, certificate=CERTIFICATE, root=ROOT.public)
    good: dict[str, Any] = {
        "sequence": 2,
        "bytes": 200,
        "calls": 3,
        "previous": first.digest,
        "leases": (LeaseLeaf(LEASE, 1, 150, 3), LeaseLeaf(LEASE, 2, 50, 0)),
    }
    check_successor(first, receipt(**good))
    with pytest.raises(Refused) as refused:
        check_successor(first, receipt(**{**good, **changes}))
    assert refused.value.code == code


def test_a_chain_begins_at_one() -> None:
    check_successor(None, receipt())
    for changes in ({"sequence": 2}, {"previous": bytes([1]) * 32}):
        with pytest.raises(Refused):
            check_successor(None, receipt(**changes))


@pytest.mark.parametrize(
    "wrong",
    [
        certificate(role="market"),
        certificate(id=bytes(16)),
        certificate(now=NOW - 1000, lifetime_s=10),
        certificate(WALLET),
    ],
    ids=["role", "id", "after its life", "key"],
)
def test_a_certificate_that_does_not_vouch_for_it_is_refused(wrong: Certificate) -> None:
    with pytest.raises(IdentityError):
        open_receipt(sign_receipt(receipt(), BACKBONE), certificate=wrong, root=ROOT.public)


def test_a_receipt_of_another_swarm_is_refused() -> None:
    document = sign_receipt(receipt(swarm=WALLET.public), BACKBONE)
    with pytest.raises(IdentityError) as refused:
        open_receipt(document, certificate=CERTIFICATE, root=ROOT.public)
    assert refused.value.code == "wrong_swarm"


@pytest.mark.parametrize(
    "changes",
    [
        {"backbone": b"short"},
        {"device": bytes(32)},
        {"sequence": 0},
        {"bytes": -1},
        {"bytes": 2**63},
        {"calls": "1"},
        {"leases": [[bytes(16), 1, 101, 0]]},
        {"leases": [[bytes(16), 1, 0, 3]]},
        {"leases": [[bytes(16), 0, 1, 1]]},
        {"leases": [[bytes(15), 1, 1, 1]]},
        {"leases": [[bytes(16), 1, 1, 1]] * 2},
        {"leases": [1]},
        {"call_root": b""},
        {"previous": None},
    ],
    ids=str,
)
def test_fields_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "swarm": ROOT.public,
        "backbone": ID,
        "device": DEVICE.public,
        "wallet": WALLET.public,
        "sequence": 1,
        "issued_at": NOW,
        "bytes": 100,
        "calls": 2,
        "leases": [],
        "call_root": bytes(32),
        "previous": bytes(32),
    }
    open_receipt(sign_document("receipt", fields, BACKBONE), certificate=CERTIFICATE, root=ROOT.public)
    with pytest.raises(KvasirError):
        open_receipt(
            sign_document("receipt", {**fields, **changes}, BACKBONE),
            certificate=CERTIFICATE,
            root=ROOT.public,
        )


def test_an_acknowledgement_is_the_devices_alone() -> None:
    digest = sign_receipt(receipt(), BACKBONE).digest
    ack = sign_acknowledgement(digest, DEVICE)
    assert open_acknowledgement(ack, DEVICE.public) == digest
    with pytest.raises(IdentityError):
        open_acknowledgement(ack, WALLET.public)

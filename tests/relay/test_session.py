from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.errors import IdentityError, KvasirError, LocalProtocolError, Refused, RemoteProtocolError
from relay.identity import ExchangeKey, SerialBook, pack, unpack
from relay.messages import SessionAnswer, SessionOffer
from relay.noise import HandshakeState
from relay.session import (
    MAX_BODY,
    MAX_MESSAGE,
    GenerationBook,
    GenerationClock,
    Initiator,
    Message,
    RekeyLimits,
    Responder,
    SessionCore,
    prologue,
)
from tests.support.relays import Device, Operator, Swarm

SWARM = Swarm()
NOW = time.time()


def _initiator(
    device: Device, generation: int = 1, *, operator: Operator | None = None, grant: bytes | None = None
) -> Initiator:
    backbone = operator or SWARM.backbone
    return Initiator(
        certificate=backbone.certificate,
        key=backbone.exchange,
        device_key=device.exchange.public,
        root=SWARM.root,
        grant_hash=grant or device.grant_hash,
        generation=generation,
        ephemeral=ExchangeKey.generate(),
    )


def _responder(device: Device) -> Responder:
    return Responder(
        key=device.exchange,
        root=SWARM.root,
        grant_hash=device.grant_hash,
        generations=device.generations,
        serials=device.serials,
        ephemeral=ExchangeKey.generate(),
    )


def _cores(limits: RekeyLimits | None = None) -> tuple[SessionCore, SessionCore]:
    device = Device()
    initiator = _initiator(device)
    answer, theirs = _responder(device).receive_offer(initiator.offer(), unix_now=NOW, now=0.0, limits=limits)
    return initiator.receive_answer(answer, 0.0, limits), theirs


def _packets(core: SessionCore, message: Message, now: float = 0.0) -> list[bytes]:
    packets = []
    for record in core.records(message):
        if core.rekey_due(now):
            packets.append(core.seal_rekey(now))
        packets.append(core.seal(record))
    return packets


def _deliver(core: SessionCore, packets: list[bytes], now: float = 0.0) -> list[bytes]:
    received = (core.receive(packet, now) for packet in packets)
    return [message for message in received if message is not None]


# --- handshake ---


def test_both_sides_agree() -> None:
    ours, theirs = _cores()
    assert ours.binding == theirs.binding
    assert (ours.generation, theirs.certificate.id) == (1, SWARM.backbone.certificate.id)
    assert ours.confirmed
    assert not theirs.confirmed
    assert _deliver(theirs, _packets(ours, b"")) == []
    assert theirs.confirmed


def test_the_prologue_byte_by_byte() -> None:
    made = prologue(b"r" * 32, b"c" * 32, b"g" * 32, 5)
    parts = [b"kvasir/1", b"r" * 32, b"c" * 32, b"g" * 32, bytes(7) + b"\x05"]
    assert made == b"".join(len(part).to_bytes(2, "big") + part for part in parts)


def _refused(change: Callable[[dict[str, object]], object], device: Device | None = None) -> KvasirError:
    device = device or Device()
    fields = unpack(_initiator(device).offer())
    change(fields)
    with pytest.raises(KvasirError) as caught:
        _responder(device).receive_offer(pack(fields), unix_now=NOW, now=0.0)
    return caught.value


def test_an_offer_of_another_version_is_refused_naming_both() -> None:
    error = _refused(lambda fields: fields.update(v=9))
    assert error.code == "version"
    assert "9" in str(error)


def test_an_offer_for_another_grant_is_refused() -> None:
    assert isinstance(_refused(lambda fields: fields.update(grant=b"x" * 32)), IdentityError)


def test_an_offer_whose_fields_do_not_match_its_handshake_fails() -> None:
    assert isinstance(_refused(lambda fields: fields.update(generation=2)), RemoteProtocolError)
    assert isinstance(_refused(lambda fields: fields.update(noise=bytes(48))), IdentityError)


def test_certificates_are_checked_before_anything_else() -> None:
    def offer(operator: Operator, at: float = NOW) -> KvasirError:
        device = Device()
        with pytest.raises(KvasirError) as caught:
            _responder(device).receive_offer(
                _initiator(device, operator=operator).offer(), unix_now=at, now=0.0
            )
        return caught.value

    assert offer(Swarm().backbone).code == "wrong_swarm"
    assert "backbone" in str(offer(SWARM.relay))
    assert offer(SWARM.backbone, NOW + 31 * 86_400).code == "expired"
    assert offer(SWARM.backbone, NOW - 3600).code == "expired"


def test_a_replaced_serial_is_refused() -> None:
    device = Device()
    id = b"b" * 16
    old, newer, newest = (SWARM.certify("backbone", id=id, serial=serial) for serial in (1, 2, 3))
    for operator in (old, newest, newer):
        _responder(device).receive_offer(
            _initiator(device, operator=operator).offer(), unix_now=time.time(), now=0.0
        )
    with pytest.raises(IdentityError, match="replaced"):
        _responder(device).receive_offer(
            _initiator(device, operator=old).offer(), unix_now=time.time(), now=0.0
        )


def test_generations_rise() -> None:
    device = Device()
    device.generations.complete(SWARM.backbone.certificate.id, 5)
    for generation in (0, 4, 5):
        with pytest.raises(Refused) as caught:
            _responder(device).receive_offer(_initiator(device, generation).offer(), unix_now=NOW, now=0.0)
        assert caught.value.code == "replay"
    _responder(device).receive_offer(_initiator(device, 6).offer(), unix_now=NOW, now=0.0)


def test_a_book_keeps_backbones_apart_and_a_clock_never_repeats() -> None:
    book = GenerationBook()
    book.complete(b"a" * 16, 9)
    book.complete(b"b" * 16, 1)
    with pytest.raises(Refused):
        book.complete(b"a" * 16, 9)
    clock = GenerationClock()
    given = [clock.next(now) for now in (100.0, 100.0, 50.0, 101.0)]
    assert given == sorted(set(given))
    assert GenerationClock().next(102.0) > given[-1]


def test_a_refusal_reaches_the_backbone() -> None:
    device = Device()
    initiator = _initiator(device)
    initiator.offer()
    with pytest.raises(Refused) as caught:
        initiator.receive_answer(Responder.refusal(IdentityError("another grant")), 0.0)
    assert (caught.value.code, str(caught.value)) == ("bad_signature", "another grant")


def test_a_stranger_cannot_answer() -> None:
    device, stranger = Device(), Device()
    initiator = _initiator(device)
    offer = initiator.offer()
    with pytest.raises(RemoteProtocolError):
        _responder(stranger).receive_offer(offer, unix_now=NOW, now=0.0)
    with pytest.raises(RemoteProtocolError):
        initiator.receive_answer(SessionAnswer(ExchangeKey.generate().public + bytes(16)).to_bytes(), 0.0)


def test_handshake_payloads_are_refused() -> None:
    device = Device()
    certificate = SWARM.backbone.certificate
    handshake = HandshakeState(
        initiator=True,
        prologue=prologue(SWARM.root, certificate.hash, device.grant_hash, 1),
        static=SWARM.backbone.exchange,
        remote_static=device.exchange.public,
        ephemeral=ExchangeKey.generate(),
    )
    noise = handshake.write_message(b"early data")
    offer = SessionOffer(certificate.document, device.grant_hash, 1, noise).to_bytes()
    with pytest.raises(RemoteProtocolError, match="payload"):
        _responder(device).receive_offer(offer, unix_now=NOW, now=0.0)


@given(st.binary(max_size=300))
@settings(max_examples=50)
def test_any_bytes_as_an_offer_or_answer(data: bytes) -> None:
    with pytest.raises(KvasirError):
        _responder(Device()).receive_offer(data, unix_now=NOW, now=0.0)
    initiator = _initiator(Device())
    initiator.offer()
    with pytest.raises(KvasirError):
        initiator.receive_answer(data, 0.0)


# --- records ---


@pytest.mark.parametrize("size", [1, MAX_BODY - 1, MAX_BODY, MAX_BODY + 1, 2 * MAX_BODY, 200_000])
def test_messages_of_any_size_both_ways(size: int) -> None:
    ours, theirs = _cores()
    message = bytes(i & 0xFF for i in range(size))
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        packets = _packets(sender, message)
        assert all(len(packet) <= 65_535 for packet in packets)
        assert len(packets) == -(-size // MAX_BODY)
        assert _deliver(receiver, packets) == [message]


@given(st.lists(st.binary(max_size=90_000), max_size=4), st.integers(1, 40))
@settings(max_examples=20)
def test_parts_are_sent_as_if_joined(parts: list[bytes], limit: int) -> None:
    ours, theirs = _cores(RekeyLimits(records=limit))
    whole = b"".join(parts)
    views: list[bytes | memoryview] = [memoryview(part) for part in parts]
    assert _deliver(theirs, _packets(ours, views)) == ([whole] if whole else [])


def test_a_message_over_the_bound_is_not_sent() -> None:
    ours, _ = _cores()
    with pytest.raises(LocalProtocolError, match="over the bound"):
        list(ours.records([bytes(MAX_MESSAGE), b"x"]))


def test_a_message_over_the_bound_is_not_received() -> None:
    ours, theirs = _cores()
    more = b"\x01" + bytes(MAX_BODY)
    with pytest.raises(RemoteProtocolError, match="over"):  # noqa: PT012 - the last one
        for _ in range(MAX_MESSAGE // MAX_BODY + 1):
            theirs.receive(ours.seal(more), 0.0)


def test_no_message_is_gathered_that_is_larger_than_the_receiver_has_asked_for() -> None:
    ours, theirs = _cores()
    allowed = [3 * MAX_BODY]
    theirs.bound_messages(MAX_BODY, lambda: allowed[0])
    assert _deliver(theirs, _packets(ours, bytes(3 * MAX_BODY))) == [bytes(3 * MAX_BODY)]
    allowed[0] = 0
    assert _deliver(theirs, _packets(ours, b"small")) == [b"small"]
    packets = _packets(ours, bytes(3 * MAX_BODY))
    assert theirs.receive(packets[0], 0.0) is None
    with pytest.raises(RemoteProtocolError, match="nothing was asked for"):
        theirs.receive(packets[1], 0.0)


@pytest.mark.parametrize(
    "limits", [RekeyLimits(records=3), RekeyLimits(bytes=5_000), RekeyLimits(seconds=2.5)]
)
def test_keys_change_and_messages_go_on(limits: RekeyLimits) -> None:
    ours, theirs = _cores(limits)
    rekeys = 0
    for second in range(20):
        packets = _packets(ours, b"m" * 1_500, float(second))
        rekeys += len(packets) - 1
        assert _deliver(theirs, packets) == [b"m" * 1_500]
        assert _deliver(ours, _packets(theirs, b"back", float(second))) == [b"back"]
    assert rekeys >= 4


def test_a_rekey_in_the_middle_of_a_message() -> None:
    ours, theirs = _cores(RekeyLimits(records=1))
    message = bytes(5 * MAX_BODY)
    packets = _packets(ours, message)
    assert len(packets) == 5 + 4
    assert _deliver(theirs, packets) == [message]


def test_a_peer_that_never_changes_its_key_is_refused() -> None:
    ours, theirs = _cores(RekeyLimits(records=3))
    for _ in range(6):
        theirs.receive(ours.seal(b"\0x"), 0.0)
    with pytest.raises(RemoteProtocolError, match="new keys"):
        theirs.receive(ours.seal(b"\0x"), 0.0)


def test_a_message_given_up_is_never_seen() -> None:
    ours, theirs = _cores()
    records = ours.records(bytes(3 * MAX_BODY))
    packets = [ours.seal(next(records))]
    packets += _packets(ours, b"the next")
    assert _deliver(theirs, packets) == [b"the next"]


@pytest.mark.parametrize("record", [b"\x05", b"\x02x", b"\x04x", b"\x01", b"\x03junk", b"\xff"])
def test_malformed_records_end_the_session(record: bytes) -> None:
    ours, theirs = _cores()
    with pytest.raises(RemoteProtocolError):
        theirs.receive(ours.seal(record), 0.0)
    with pytest.raises(RemoteProtocolError):
        theirs.receive(ours.seal(b"\0fine"), 0.0)


def test_nothing_follows_close() -> None:
    ours, theirs = _cores()
    assert theirs.receive(ours.seal(ours.close_record("draining", "bye")), 0.0) is None
    assert theirs.peer_close == ("draining", "bye")
    with pytest.raises(RemoteProtocolError):
        theirs.receive(ours.seal(b"\0more"), 0.0)


@given(st.data())
@settings(max_examples=40)
def test_flips_replays_swaps_and_drops_are_noticed(data: st.DataObject) -> None:
    ours, theirs = _cores()
    packets = [packet for i in range(4) for packet in _packets(ours, b"message %d" % i)]
    index = data.draw(st.integers(0, 3))
    match data.draw(st.sampled_from(["flip", "replay", "swap", "drop", "truncate"])):
        case "flip":
            bit = data.draw(st.integers(0, 8 * len(packets[index]) - 1))
            altered = bytearray(packets[index])
            altered[bit // 8] ^= 1 << (bit % 8)
            packets[index] = bytes(altered)
        case "replay":
            packets.insert(index + 1, packets[index])
        case "swap":
            other = (index + 1) % 4
            packets[index], packets[other] = packets[other], packets[index]
        case "drop":
            packets = packets[:index] + packets[index + 1 :] if index < 3 else [packets[3], *packets]
        case "truncate":
            packets[index] = packets[index][: data.draw(st.integers(0, len(packets[index]) - 1))]
    received = []
    with pytest.raises(RemoteProtocolError):  # noqa: PT012 - what came before the damage counts too
        for packet in packets:
            received.append(theirs.receive(packet, 0.0))
    assert received == [b"message %d" % i for i in range(len(received))]


def test_a_packet_of_the_other_direction_is_refused() -> None:
    ours, _ = _cores()
    packet = ours.seal(b"\0reflected")
    with pytest.raises(RemoteProtocolError):
        ours.receive(packet, 0.0)


def test_an_hour_is_enough() -> None:
    ours, _ = _cores()
    assert not ours.needs_handshake(3599.0)
    assert ours.needs_handshake(3600.0)


def test_serial_books_are_shared_between_handshakes() -> None:
    device = Device(serials=SerialBook())
    answer, _ = _responder(device).receive_offer(_initiator(device).offer(), unix_now=NOW, now=0.0)
    assert SessionAnswer.from_bytes(answer).refusal is None


# --- one packet at once ---


@pytest.mark.parametrize("size", [0, 1, 6_144, MAX_BODY])
@pytest.mark.parametrize(
    "shape", [bytes, bytearray, memoryview, lambda body: (body[:1], memoryview(body)[1:])]
)
def test_a_message_that_fits_one_packet(size: int, shape: Callable[[bytes], Message]) -> None:
    ours, theirs = _cores()
    _deliver(theirs, _packets(ours, b""))
    body = bytes(number % 251 for number in range(size))
    packet = ours.pack(shape(body), 0.0, 13)
    assert packet is not None
    assert packet[:13] == bytes(13)
    assert _deliver(theirs, [bytes(packet[13:]), *_packets(ours, b"after it")]) == [
        *([body] if size else []),
        b"after it",
    ]


def test_what_takes_more_than_one_packet_is_left_to_the_slow_way() -> None:
    ours, theirs = _cores()
    assert ours.pack(bytes(MAX_BODY + 1), 0.0) is None
    records = ours.records(bytes(2 * MAX_BODY))
    packets = [ours.seal(next(records))]
    assert ours.pack(b"a message before was given up", 0.0) is None
    packets += [bytearray(packet) for packet in _packets(ours, b"said so")]
    assert ours.pack(b"after it", 0.0) is not None
    assert _deliver(theirs, [bytes(packet) for packet in packets]) == [b"said so"]


@pytest.mark.parametrize(
    ("limits", "now"),
    [(RekeyLimits(records=2), 0.0), (RekeyLimits(bytes=40), 0.0), (RekeyLimits(seconds=5.0), 5.0)],
)
def test_a_key_that_is_due_is_replaced_before_the_next_packet(limits: RekeyLimits, now: float) -> None:
    ours, _ = _cores(limits)
    assert ours.pack(b"first", 0.0) is not None
    assert ours.pack(b"second, 24 bytes of text", 0.0) is not None
    assert ours.pack(b"third", now) is None
    assert ours.rekey_due(now)
    ours.seal_rekey(now)
    assert ours.pack(b"third", now) is not None

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relay.circuit import (
    OUTCOMES,
    Admission,
    CircuitRecord,
    Drop,
    Ended,
    Instruction,
    Peer,
    Rules,
    Send,
    Switchboard,
)
from relay.errors import Refused, RemoteProtocolError
from relay.frames import FrameType, cost, decode, decode_u32
from relay.identity import PublicKey
from relay.messages import Close, Incoming
from relay.tickets import PeerRole

WINDOW = 1 << 17
RULES = Rules(
    window_bytes=WINDOW, device_circuits=2, backbone_circuits=3, address_connections=2, connections=3
)


def _key(number: int) -> PublicKey:
    return PublicKey(bytes([number]) * 32)


def _join(board: Switchboard, number: int, role: PeerRole, generation: int = 1) -> Peer:
    peer, _ = board.join(_key(number), role, generation, "10.0.0.1", 0.0)
    return peer


def _frames(instructions: list[Instruction], peer: Peer) -> list[tuple[FrameType, int, bytes]]:
    """What `peer` is sent."""
    sent = [decode(i.frame) for i in instructions if isinstance(i, Send) and i.peer is peer]
    return [(kind, id, bytes(payload)) for kind, id, payload in sent]


def _ended(instructions: list[Instruction]) -> list[CircuitRecord]:
    return [i.record for i in instructions if isinstance(i, Ended)]


def _joined() -> tuple[Switchboard, Peer, Peer]:
    board = Switchboard(RULES)
    backbone, device = _join(board, 1, "backbone"), _join(board, 2, "device")
    board.open(backbone, 1, device.key, 0.0)
    return board, backbone, device


def test_a_circuit_is_announced_to_both() -> None:
    board = Switchboard(RULES)
    backbone, device = _join(board, 1, "backbone"), _join(board, 2, "device")
    told = board.open(backbone, 1, device.key, 0.0)
    assert _frames(told, backbone) == [(FrameType.OPENED, 1, b"")]
    ((kind, id, payload),) = _frames(told, device)
    assert (kind, id) == (FrameType.INCOMING, 2)
    assert Incoming.from_bytes(payload) == Incoming(backbone.key, "backbone")


def test_data_goes_to_the_other_leg_and_is_counted() -> None:
    board, backbone, device = _joined()
    there = board.forward(backbone, 1, 1000)
    back = board.forward(device, 2, 10)
    assert there is not None
    assert back is not None
    assert (there.peer, there.id) == (device, 2)
    assert (back.peer, back.id) == (backbone, 1)
    (record,) = board.live(5.0)
    assert (record.bytes_to_device, record.frames_to_device) == (1000, 1)
    assert (record.bytes_to_backbone, record.frames_to_backbone) == (10, 1)
    assert (record.outcome, record.seconds) == ("open", 5.0)
    assert board.bytes_forwarded == 1010


def test_only_a_backbone_opens() -> None:
    board = Switchboard(RULES)
    device = _join(board, 2, "device")
    _join(board, 3, "device")
    with pytest.raises(RemoteProtocolError, match="only a backbone"):
        board.open(device, 1, _key(3), 0.0)


@pytest.mark.parametrize("ids", [[2], [1, 1], [3, 1]])
def test_circuit_ids_are_odd_and_rise(ids: list[int]) -> None:
    board = Switchboard(RULES)
    backbone = _join(board, 1, "backbone")
    with pytest.raises(RemoteProtocolError, match="odd and rising"):  # noqa: PT012 - the last one
        for id in ids:
            board.open(backbone, id, _key(9), 0.0)


def _refusal(instructions: list[Instruction], peer: Peer) -> Close:
    ((kind, _, payload),) = _frames(instructions, peer)
    assert kind is FrameType.CLOSE
    return Close.from_bytes(payload)


def test_a_device_that_is_not_here() -> None:
    board = Switchboard(RULES)
    backbone = _join(board, 1, "backbone")
    _join(board, 3, "backbone")
    for absent in (_key(9), _key(3), backbone.key):
        close = _refusal(board.open(backbone, 2 * absent[0] + 100 * 2 + 1, absent, 0.0), backbone)
        assert (close.code, close.outcome) == ("unreachable", "refused")
        board = Switchboard(RULES)
        backbone = _join(board, 1, "backbone")


def test_quotas_of_circuits() -> None:
    board, backbone, device = _joined()
    board.open(backbone, 3, device.key, 0.0)
    assert _refusal(board.open(backbone, 5, device.key, 0.0), backbone).code == "quota"
    others = [_join(board, number, "device") for number in (3, 4)]
    board.open(backbone, 7, others[0].key, 0.0)
    assert _refusal(board.open(backbone, 9, others[1].key, 0.0), backbone).code == "quota"
    board.close(backbone, 7, Close("closed", "", "closed"), 0.0)
    assert _frames(board.open(backbone, 11, others[1].key, 0.0), backbone)[0][0] is FrameType.OPENED


def test_over_the_window_the_sender_is_told_and_the_circuit_ends() -> None:
    board, backbone, device = _joined()
    for _ in range(2):
        leg = board.forward(backbone, 1, WINDOW // 2)
        assert leg is not None
        assert leg.other.credit >= 0
    leg = board.forward(backbone, 1, 100)
    assert leg is not None
    assert leg.other.credit < 0
    told = board.busy(leg, 100, 1.0)
    kinds = _frames(told, backbone)
    assert [kind for kind, _, _ in kinds] == [FrameType.BUSY, FrameType.CLOSE]
    assert decode_u32(kinds[0][2]) == 100
    assert _refusal(told, device).outcome == "busy"
    (record,) = _ended(told)
    assert (record.outcome, record.bytes_to_device) == ("busy", WINDOW)


def test_tiny_frames_use_the_window_up_too() -> None:
    board, backbone, _ = _joined()
    for _ in range(WINDOW // 64):
        leg = board.forward(backbone, 1, 1)
        assert leg is not None
        assert leg.other.credit >= 0
    leg = board.forward(backbone, 1, 1)
    assert leg is not None
    assert leg.other.credit < 0


def test_credit_is_passed_on_and_never_invented() -> None:
    board, backbone, device = _joined()
    board.forward(backbone, 1, 5000)
    told = board.credit(device, 2, 3000)
    ((kind, id, payload),) = _frames(told, backbone)
    assert (kind, id, decode_u32(payload)) == (FrameType.CREDIT, 1, 3000)
    with pytest.raises(RemoteProtocolError, match="more than was sent"):
        board.credit(device, 2, 2001)
    with pytest.raises(RemoteProtocolError, match="more than was sent"):
        board.credit(backbone, 1, 1)


def test_frames_that_cross_a_close_are_late_and_ids_that_never_were_a_breach() -> None:
    board, backbone, device = _joined()
    board.close(device, 2, Close("closed", "", "closed"), 0.0)
    assert board.forward(backbone, 1, 10) is None
    assert board.credit(backbone, 1, 10) == []
    assert board.close(backbone, 1, Close("closed", "", "closed"), 0.0) == []
    assert board.late_frames == 3
    for peer, id in ((backbone, 3), (backbone, 2), (device, 4), (device, 1)):
        with pytest.raises(RemoteProtocolError, match="never opened"):
            board.forward(peer, id, 10)


@pytest.mark.parametrize(
    ("said", "recorded"),
    [
        ("closed", "closed"),
        ("refused", "refused"),
        ("drained", "drained"),
        ("duplicate", "closed"),
        ("?", "closed"),
    ],
)
def test_a_close_is_told_with_its_reason(said: str, recorded: str) -> None:
    board, backbone, device = _joined()
    told = board.close(device, 2, Close("draining", "going home", said), 3.0)
    assert _refusal(told, backbone) == Close("draining", "going home", recorded)
    assert [record.outcome for record in _ended(told)] == [recorded]
    assert board.circuits == {}


def test_a_lost_peer_ends_its_circuits() -> None:
    board, backbone, device = _joined()
    told = board.leave(device, "peer_gone", 2.0)
    assert _refusal(told, backbone).outcome == "peer_gone"
    assert [record.outcome for record in _ended(told)] == ["peer_gone"]
    assert board.leave(device, "peer_gone", 2.0) == []
    assert board.peers == [backbone]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_newer_connection_of_the_same_start_or_a_later_one_takes_over(generation: int) -> None:
    board, backbone, device = _joined()
    newer, told = board.join(device.key, "device", generation, "10.0.0.2", 1.0)
    (drop,) = [i for i in told if isinstance(i, Drop)]
    assert (drop.peer, drop.code) == (device, "duplicate")
    assert [record.outcome for record in _ended(told)] == ["duplicate"]
    assert _refusal(told, backbone).code == "duplicate"
    assert board.leave(device, "peer_gone", 1.0) == []
    assert newer in board.peers


def test_an_older_start_is_refused() -> None:
    board = Switchboard(RULES)
    device = _join(board, 2, "device", generation=5)
    with pytest.raises(Refused) as caught:
        _join(board, 2, "device", generation=4)
    assert caught.value.code == "duplicate"
    assert board.peers == [device]


def test_admission_counts_by_address_and_in_all() -> None:
    admission = Admission(RULES)
    admission.enter("a")
    admission.enter("a")
    with pytest.raises(Refused) as caught:
        admission.enter("a")
    assert caught.value.code == "quota"
    admission.enter("b")
    with pytest.raises(Refused) as caught:
        admission.enter("c")
    assert caught.value.code == "overloaded"
    admission.leave("a")
    admission.enter("c")
    for address in ("a", "b", "c"):
        admission.leave(address)
    assert admission.total == 0


class Board(RuleBasedStateMachine):
    """Any order of facts: credit is conserved, meters reconcile, every circuit ends once in a known way."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Switchboard(RULES)
        self.now = 0.0
        self.generation = 1
        self.next_id = 1
        self.carried = 0
        self.ended: list[CircuitRecord] = []
        self.opened = 0

    def take(self, instructions: list[Instruction]) -> None:
        self.ended += _ended(instructions)
        self.opened += sum(
            decode(i.frame)[0] is FrameType.OPENED for i in instructions if isinstance(i, Send)
        )

    def legs(self) -> list[Any]:
        return [leg for circuit in self.board.circuits.values() for leg in (circuit.backbone, circuit.device)]

    @rule(number=st.integers(1, 4))
    def join(self, number: int) -> None:
        self.generation += 1
        role: PeerRole = "backbone" if number == 1 else "device"
        _, instructions = self.board.join(_key(number), role, self.generation, "x", self.now)
        self.take(instructions)

    @rule(data=st.data(), to=st.integers(1, 5))
    def open(self, data: st.DataObject, to: int) -> None:
        backbones = [peer for peer in self.board.peers if peer.role == "backbone"]
        if backbones:
            self.next_id += 2
            self.take(
                self.board.open(data.draw(st.sampled_from(backbones)), self.next_id, _key(to), self.now)
            )

    @precondition(lambda self: self.board.circuits)
    @rule(data=st.data(), size=st.integers(1, 65_535))
    def forward(self, data: st.DataObject, size: int) -> None:
        leg = data.draw(st.sampled_from(self.legs()))
        destination = self.board.forward(leg.peer, leg.id, size)
        assert destination is leg.other
        if leg.credit < 0:
            self.take(self.board.busy(destination, size, self.now))
        else:
            self.carried += size

    @precondition(lambda self: self.board.circuits)
    @rule(data=st.data())
    def credit(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.legs()))
        owed = WINDOW - leg.other.credit
        if owed:
            self.take(self.board.credit(leg.peer, leg.id, data.draw(st.integers(1, owed))))
        else:
            with pytest.raises(RemoteProtocolError):
                self.board.credit(leg.peer, leg.id, 1)

    @precondition(lambda self: self.board.circuits)
    @rule(data=st.data(), outcome=st.sampled_from(sorted(OUTCOMES)))
    def close(self, data: st.DataObject, outcome: str) -> None:
        leg = data.draw(st.sampled_from(self.legs()))
        self.take(self.board.close(leg.peer, leg.id, Close("closed", "", outcome), self.now))
        assert self.board.forward(leg.peer, leg.id, 5) is None

    @precondition(lambda self: self.board.peers)
    @rule(data=st.data(), outcome=st.sampled_from(["peer_gone", "timeout", "drained", "protocol_error"]))
    def leave(self, data: st.DataObject, outcome: Any) -> None:
        self.take(self.board.leave(data.draw(st.sampled_from(self.board.peers)), outcome, self.now))

    @invariant()
    def credit_is_conserved(self) -> None:
        for leg in self.legs():
            assert 0 <= leg.credit <= WINDOW
            assert leg.peer.legs[leg.id] is leg
            assert leg.other.other is leg

    @invariant()
    def meters_reconcile(self) -> None:
        assert self.board.bytes_forwarded == self.carried
        live = self.board.live(self.now)
        both = sum(r.bytes_to_device + r.bytes_to_backbone for r in [*live, *self.ended])
        assert both == self.carried
        assert self.opened == self.board.opened == len(live) + len(self.ended)
        assert {record.outcome for record in self.ended} <= OUTCOMES
        assert len({record.circuit for record in self.ended}) == len(self.ended)

    @invariant()
    def quotas_hold(self) -> None:
        for peer in self.board.peers:
            assert len(peer.legs) <= RULES.circuits(peer.role)


TestBoard = Board.TestCase
TestBoard.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_the_cost_of_a_frame_is_what_the_wire_says() -> None:
    board, backbone, _ = _joined()
    board.forward(backbone, 1, 10)
    (circuit,) = board.circuits.values()
    assert WINDOW - circuit.backbone.credit == cost(10) == 64

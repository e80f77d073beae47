"""A relay's rules, without I/O: who is here, which circuits join them, who may send how much.

Facts go in (`join`, `open`, `forward`, `credit`, `close`, `leave`), instructions come out (`Send`, `Drop`,
`Ended`); the shell in `server.py` carries them out. Only a backbone opens circuits, only to a device. A
circuit has two legs, one for each peer; each leg counts what its peer has sent and may still send. Every
circuit ends in exactly one of `OUTCOMES`. Time is an argument, in seconds of a steady clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .errors import Refused, RemoteProtocolError
from .frames import MIN_COST, WINDOW_BYTES, FrameType, encode, encode_u32
from .identity import PublicKey, address_of
from .messages import Close, Incoming
from .tickets import PeerRole

Outcome = Literal[
    "closed",  # a peer ended the circuit in order
    "peer_gone",  # a peer's connection was lost
    "busy",  # a sender went over its window, or a receiver's bound
    "drained",  # the relay went away in order
    "duplicate",  # a newer connection of the same identity took over
    "timeout",  # a peer stopped reading or answering
    "protocol_error",  # a peer broke the protocol
    "refused",  # the circuit was never made, or the device said no
]
OUTCOMES: Final[frozenset[str]] = frozenset(
    {"closed", "peer_gone", "busy", "drained", "duplicate", "timeout", "protocol_error", "refused"}
)
"""The closed set of ways a circuit ends."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of a relay.

    `window_bytes`: each circuit's window in a direction. `device_circuits`, `backbone_circuits`: most
    circuits of one peer. `address_connections`: most connections from one address. `connections`: most in
    all.
    """

    window_bytes: int = WINDOW_BYTES
    device_circuits: int = 64
    backbone_circuits: int = 20_000
    address_connections: int = 1_024
    connections: int = 20_000

    def circuits(self, role: PeerRole) -> int:
        """Most circuits of a peer of `role`."""
        return self.backbone_circuits if role == "backbone" else self.device_circuits


@dataclass(slots=True, eq=False)
class Peer:
    """An authenticated connection. `number` is unique in this relay's life; `link` is the shell's."""

    number: int
    key: PublicKey
    role: PeerRole
    generation: int
    address: str
    legs: dict[int, Leg] = field(default_factory=dict)
    highest: int = 0  # the highest circuit id ever used on this connection
    link: Any = None

    def __hash__(self) -> int:
        return self.number


@dataclass(slots=True, eq=False)
class Leg:
    """One peer's end of a circuit: its `id` there, and what that peer has sent and may still send."""

    peer: Peer
    id: int
    circuit: Circuit
    credit: int
    bytes: int = 0
    frames: int = 0
    other: Leg = field(init=False, repr=False)


@dataclass(slots=True, eq=False)
class Circuit:
    """A pair of legs. `number` is unique in this relay's life."""

    number: int
    opened_at: float
    counted: bool
    backbone: Leg = field(init=False, repr=False)
    device: Leg = field(init=False, repr=False)


@dataclass(frozen=True, slots=True)
class CircuitRecord:
    """What is left of a circuit: who, how long, how much each way, and how it ended."""

    circuit: int
    backbone: str
    device: str
    seconds: float
    bytes_to_device: int
    bytes_to_backbone: int
    frames_to_device: int
    frames_to_backbone: int
    outcome: Outcome | Literal["open"]


@dataclass(frozen=True, slots=True)
class Send:
    """Write `frame` to `peer`."""

    peer: Peer
    frame: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell `peer` why and close its connection; it has left the board already."""

    peer: Peer
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Log this circuit's canonical line."""

    record: CircuitRecord


Instruction = Send | Drop | Ended


class Admission:
    """How many connections each address has; decided before anything is read from one."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._counts: Counter[str] = Counter()
        self.total = 0

    def enter(self, address: str) -> None:
        """Count a connection. Raises `Refused` (quota, overloaded) and counts nothing."""
        if self.total >= self._rules.connections:
            raise Refused("overloaded", "this relay is full: try another", retry_after_s=30.0)
        if self._counts[address] >= self._rules.address_connections:
            raise Refused("quota", f"too many connections from {address}", retry_after_s=30.0)
        self._counts[address] += 1
        self.total += 1

    def leave(self, address: str) -> None:
        """A counted connection ended."""
        self.total -= 1
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


class Switchboard:
    """Peers and circuits of one relay."""

    def __init__(self, rules: Rules, *, uncounted: frozenset[PublicKey] = frozenset()) -> None:
        self._rules = rules
        self._uncounted = uncounted  # a health check's own
        self._peers: dict[tuple[PublicKey, PeerRole], Peer] = {}
        self._next_peer = 1
        self._next_circuit = 1
        self.circuits: dict[int, Circuit] = {}
        self.opened = 0
        self.outcomes: Counter[str] = Counter()
        self.late_frames = 0
        self._ended_bytes = 0

    @property
    def peers(self) -> list[Peer]:
        """Everybody connected."""
        return list(self._peers.values())

    @property
    def bytes_forwarded(self) -> int:
        """DATA payload bytes since the start, both directions."""
        live = sum(c.backbone.bytes + c.device.bytes for c in self.circuits.values())
        return self._ended_bytes + live

    # --- peers ---

    def join(
        self, key: PublicKey, role: PeerRole, generation: int, address: str, now: float
    ) -> tuple[Peer, list[Instruction]]:
        """An authenticated peer arrives; an older connection of its identity is dropped.

        Raises `Refused` ("duplicate") if a connection of a higher start generation is here.
        """
        found = self._peers.get((key, role))
        instructions: list[Instruction] = []
        if found is not None:
            if generation < found.generation:
                raise Refused(
                    "duplicate",
                    f"a later start of {address_of(key)} is connected: stop one of the two daemons",
                )
            instructions = self.leave(found, "duplicate", now)
            message = "another connection of this identity took over: stop one of the two daemons"
            instructions.append(Drop(found, "duplicate", message))
        peer = Peer(self._next_peer, key, role, generation, address)
        self._next_peer += 1
        self._peers[(key, role)] = peer
        return peer, instructions

    def leave(self, peer: Peer, outcome: Outcome, now: float) -> list[Instruction]:
        """A peer is gone; its circuits end with `outcome`. Leaving twice changes nothing."""
        if self._peers.get((peer.key, peer.role)) is not peer:
            return []
        del self._peers[(peer.key, peer.role)]
        code = {"drained": "draining", "duplicate": "duplicate"}.get(outcome, "unreachable")
        close = Close(code, f"the other side's connection to the relay ended ({outcome})", outcome)
        instructions: list[Instruction] = []
        for leg in list(peer.legs.values()):
            instructions += self._end(leg.circuit, outcome, now)
            instructions.append(_close(leg.other, close))
        return instructions

    # --- circuits ---

    def open(self, peer: Peer, id: int, to: PublicKey, now: float) -> list[Instruction]:
        """A backbone asks for a circuit. A no goes back as CLOSE on the same id.

        Raises `RemoteProtocolError` for a device that opens, or an id that is even or not rising.
        """
        if peer.role != "backbone":
            raise RemoteProtocolError("only a backbone opens circuits", code="forbidden")
        if id % 2 == 0 or id <= peer.highest:
            raise RemoteProtocolError(f"circuit id {id} is not odd and rising")
        peer.highest = id
        device = self._peers.get((to, "device"))
        if device is None:
            return self._refuse(peer, id, "unreachable", f"device {address_of(to)} is not connected here")
        for side in (peer, device):
            if len(side.legs) >= self._rules.circuits(side.role):
                return self._refuse(peer, id, "quota", f"the {side.role} has all the circuits it may have")
        device_id = device.highest + 2
        device.highest = device_id
        circuit = Circuit(self._next_circuit, now, peer.key not in self._uncounted)
        self._next_circuit += 1
        window = self._rules.window_bytes
        circuit.backbone = Leg(peer, id, circuit, window)
        circuit.device = Leg(device, device_id, circuit, window)
        circuit.backbone.other, circuit.device.other = circuit.device, circuit.backbone
        peer.legs[id], device.legs[device_id] = circuit.backbone, circuit.device
        self.circuits[circuit.number] = circuit
        self.opened += circuit.counted
        return [
            Send(device, encode(FrameType.INCOMING, device_id, Incoming(peer.key, peer.role).to_bytes())),
            Send(peer, encode(FrameType.OPENED, id)),
        ]

    def forward(self, peer: Peer, id: int, size: int) -> Leg | None:
        """`peer` sends DATA of `size` payload bytes: the leg to write it to, or None (the circuit is over).

        If the leg it comes from has no credit left, its `credit` is below zero: call `busy`. Raises
        `RemoteProtocolError` for an id that never was.
        """
        leg = peer.legs.get(id)
        if leg is None:
            self._late(peer, id)
            return None
        leg.credit -= size if size > MIN_COST else MIN_COST  # frames.cost
        if leg.credit >= 0:
            leg.bytes += size
            leg.frames += 1
        return leg.other

    def busy(self, destination: Leg, size: int, now: float) -> list[Instruction]:
        """A frame of `size` bytes for `destination` was not forwarded: tell its sender, end the circuit."""
        sender = destination.other
        close = Close("busy", "more was sent than the circuit's window or the receiver's bound holds", "busy")
        return [
            Send(sender.peer, encode(FrameType.BUSY, sender.id, encode_u32(max(1, size)))),
            _close(sender, close),
            _close(destination, close),
            *self._end(sender.circuit, "busy", now),
        ]

    def credit(self, peer: Peer, id: int, amount: int) -> list[Instruction]:
        """`peer` has consumed `amount` bytes: the other side may send so much more.

        Raises `RemoteProtocolError` if that is more than was ever sent.
        """
        leg = peer.legs.get(id)
        if leg is None:
            self._late(peer, id)
            return []
        sender = leg.other
        if sender.credit + amount > self._rules.window_bytes:
            raise RemoteProtocolError("credit for more than was sent")
        sender.credit += amount
        return [Send(sender.peer, encode(FrameType.CREDIT, sender.id, encode_u32(amount)))]

    def close(self, peer: Peer, id: int, close: Close, now: float) -> list[Instruction]:
        """`peer` ends a circuit; the other side is told its code and message."""
        leg = peer.legs.get(id)
        if leg is None:
            self._late(peer, id)
            return []
        outcome: Outcome = "closed"
        if close.outcome in ("refused", "timeout", "protocol_error", "busy", "drained"):
            outcome = close.outcome  # type: ignore[assignment]  # narrowed by the membership test above
        told = Close(close.code, close.message, outcome)
        return [_close(leg.other, told), *self._end(leg.circuit, outcome, now)]

    def live(self, now: float) -> list[CircuitRecord]:
        """Every circuit that is open, as the operator sees it."""
        return [_record(circuit, "open", now) for circuit in self.circuits.values()]

    def _late(self, peer: Peer, id: int) -> None:
        """Frames may cross a CLOSE; ids that never were are a breach."""
        if id > peer.highest or (id % 2 == 1) != (peer.role == "backbone"):
            raise RemoteProtocolError(f"circuit {id} was never opened")
        self.late_frames += 1

    def _refuse(self, peer: Peer, id: int, code: str, message: str) -> list[Instruction]:
        self.outcomes["refused"] += 1
        return [Send(peer, encode(FrameType.CLOSE, id, Close(code, message, "refused").to_bytes()))]

    def _end(self, circuit: Circuit, outcome: Outcome, now: float) -> list[Instruction]:
        if self.circuits.pop(circuit.number, None) is None:
            return []
        for leg in (circuit.backbone, circuit.device):
            leg.peer.legs.pop(leg.id, None)
        if not circuit.counted:
            return []
        self._ended_bytes += circuit.backbone.bytes + circuit.device.bytes
        self.outcomes[outcome] += 1
        return [Ended(_record(circuit, outcome, now))]


def _close(leg: Leg, close: Close) -> Send:
    return Send(leg.peer, encode(FrameType.CLOSE, leg.id, close.to_bytes()))


def _record(circuit: Circuit, outcome: Outcome | Literal["open"], now: float) -> CircuitRecord:
    return CircuitRecord(
        circuit=circuit.number,
        backbone=address_of(circuit.backbone.peer.key),
        device=address_of(circuit.device.peer.key),
        seconds=max(0.0, now - circuit.opened_at),
        bytes_to_device=circuit.backbone.bytes,
        bytes_to_backbone=circuit.device.bytes,
        frames_to_device=circuit.backbone.frames,
        frames_to_backbone=circuit.device.frames,
        outcome=outcome,
    )

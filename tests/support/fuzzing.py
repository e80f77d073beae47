"""Mutated input for everything in `relay` that reads what strangers send.

A target has honest samples and a way to read bytes; whatever is read, only a `KvasirError` may come out, in
time, and nothing may be left behind. The short form runs in the tests, the long one by `scripts/fuzz.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relay import messages
from relay.addresses import client_address, parse_networks, quota_key
from relay.errors import KvasirError
from relay.frames import MAX_FRAME, FrameType, decode, decode_u32, decode_u64, encode
from relay.identity import ExchangeKey, SignedDocument, SigningKey, open_certificate, unpack_canonical
from relay.links import parse_join_link
from relay.noise import HandshakeState
from relay.session import Initiator, Responder, SessionCore
from relay.tickets import issue_ticket, open_ticket
from relay.websocket import BINARY, MessageReader, header, mask_in_place
from tests.support.relays import Device, Swarm

SLOW_S = 1.0
"""No input may take longer."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes: honest `samples`, and `read`, which may raise a `KvasirError`.

    `weight`: its share of the inputs; handshakes cost a hundred times what a frame does.
    """

    name: str
    samples: Sequence[bytes]
    read: Callable[[bytes], object]
    weight: int = 10


class Finding(AssertionError):  # noqa: N818 - what a fuzzer has, whatever it raised
    """An input that broke a target; the message has it in hex."""


def mutate(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """One sample, altered in one to four ways; sometimes left as it is."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        way = rng.randrange(8)
        if way == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif way == 1 and data:
            data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDF, 0xFF, rng.randrange(256)))
        elif way == 2:
            del data[at:]
        elif way == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 200)))
        elif way == 4:
            del data[at : at + rng.choice((1, 2, 8, 64))]
        elif way == 5:
            piece = data[at : at + rng.choice((1, 4, 32, 500))]
            data[at:at] = piece * rng.choice((1, 2, 30))
        elif way == 6:
            other = rng.choice(samples)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice((0, 1, 125, 126, 65_535, 65_536, MAX_FRAME + 1, (1 << 8 * size) - 1))
            data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "big")
        if len(data) > 200_000:
            del data[200_000:]
    return bytes(data)


def run(
    targets: Sequence[Target], *, count: int, seed: int, progress: Callable[[int], None] | None = None
) -> int:
    """Read `count` mutated inputs. Returns how many were accepted. Raises `Finding`."""
    rng, accepted = random.Random(seed), 0
    weights = [target.weight for target in targets]
    for number in range(count):
        (target,) = rng.choices(targets, weights)
        data = mutate(rng, target.samples)
        started = time.perf_counter()
        try:
            target.read(data)
            accepted += 1
        except KvasirError:
            pass
        except Exception as error:
            raise Finding(f"{target.name}: {error!r} for {data[:5_000].hex()}") from error
        if time.perf_counter() - started > SLOW_S:
            raise Finding(f"{target.name}: over {SLOW_S} s for {data[:5_000].hex()}")
        if progress is not None and number % 20_000 == 0:
            progress(number)
    return accepted


def targets() -> list[Target]:
    """All of them, around one swarm's honest messages."""
    swarm, device = Swarm(), Device()
    now = time.time()
    found = [*_documents(swarm, device, now), *_messages(swarm, device, now)]
    found += [*_streams(rng_frames(swarm)), *_sessions(swarm, device, now), *_texts()]
    return found


def rng_frames(swarm: Swarm) -> list[bytes]:
    """Honest frames of every type."""
    close = messages.Close("closed", "bye", "closed").to_bytes()
    return [
        encode(FrameType.OPEN, 1, messages.Open(swarm.backbone.key.public).to_bytes()),
        encode(FrameType.OPENED, 1),
        encode(FrameType.DATA, 1, bytes(300)),
        encode(FrameType.DATA, 3, bytes(20_000)),
        encode(FrameType.CREDIT, 1, (4096).to_bytes(4, "big")),
        encode(FrameType.CLOSE, 1, close),
        encode(FrameType.BUSY, 1, (77).to_bytes(4, "big")),
        encode(FrameType.PING, 0, bytes(8)),
        encode(FrameType.GOAWAY, 0, messages.GoAway("bye", 1.5).to_bytes()),
        encode(FrameType.WELCOME, 0, messages.Welcome(15.0, 1 << 20, MAX_FRAME, 64, bytes(64)).to_bytes()),
    ]


def _documents(swarm: Swarm, device: Device, now: float) -> list[Target]:
    certificate = swarm.backbone.certificate.document
    ticket = swarm.ticket(device.key.public, "device")

    def read_certificate(data: bytes) -> None:
        open_certificate(SignedDocument.from_bytes(data), swarm=swarm.root, now=now)

    def read_ticket(data: bytes) -> None:
        open_ticket(
            SignedDocument.from_bytes(data),
            market_key=swarm.market.key.public,
            relay_key=swarm.relay.key.public,
            now=now,
        )

    def read_self_signed(data: bytes) -> None:
        """A market that lies well: its signature is right, its fields are not."""
        document = SignedDocument("ticket", data, swarm.market.key.public, b"")
        fields = unpack_canonical(document.body, max_bytes=4096)
        if isinstance(fields, dict):
            subject = fields.get("subject")
            if isinstance(subject, bytes) and len(subject) == 32:
                issue_ticket(
                    swarm.market.key,
                    subject=swarm.root,
                    role="device",
                    relay=swarm.root,
                    start_generation=1,
                    now=now,
                )

    return [
        Target("certificate", [certificate.to_bytes()], read_certificate, 4),
        Target("ticket", [ticket.to_bytes()], read_ticket, 4),
        Target("document body", [ticket.body, certificate.body], read_self_signed, 6),
    ]


def _messages(swarm: Swarm, device: Device, now: float) -> list[Target]:
    certificate = swarm.relay.certificate.document
    ticket = swarm.ticket(device.key.public, "device")
    honest: dict[Any, Any] = {
        messages.Hello: messages.Hello(certificate, bytes(32)),
        messages.Auth: messages.Auth(ticket, 1, bytes(64)),
        messages.Welcome: messages.Welcome(15.0, 1 << 20, MAX_FRAME, 64, bytes(64)),
        messages.RefusedMessage: messages.RefusedMessage("quota", "no", 3.5),
        messages.Open: messages.Open(device.key.public),
        messages.Incoming: messages.Incoming(device.key.public, "backbone"),
        messages.Close: messages.Close("closed", "bye", "closed"),
        messages.GoAway: messages.GoAway("bye", 1.0),
        messages.Renewal: messages.Renewal(ticket),
        messages.SessionOffer: messages.SessionOffer(certificate, bytes(32), 7, bytes(48)),
        messages.SessionAnswer: messages.SessionAnswer(bytes(48)),
    }
    found = [Target(kind.__name__, [value.to_bytes()], kind.from_bytes) for kind, value in honest.items()]
    return [
        *found,
        Target("close record", [messages.pack_close_record("closed", "x")], messages.unpack_close_record),
    ]


def _streams(frames: list[bytes]) -> list[Target]:
    def read_frame(data: bytes) -> None:
        kind, _, payload = decode(data)
        if kind in (FrameType.CREDIT, FrameType.BUSY):
            decode_u32(payload)
        elif kind in (FrameType.PING, FrameType.PONG):
            decode_u64(payload)

    def stream(masked: bool) -> bytes:
        parts = []
        for frame in frames:
            mask, body = (b"\1\2\3\4" if masked else b""), bytearray(frame)
            if masked:
                mask_in_place(mask, body)
            parts.append(header(len(body), BINARY, mask) + body)
        return b"".join(parts)

    def reading(masked: bool) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            reader = MessageReader(
                lambda payload: None, lambda opcode, payload: None, masked=masked, max_bytes=MAX_FRAME
            )
            cut = len(data) // 3
            for piece in (data[:cut], data[cut : cut + 1], data[cut + 1 :]):
                reader.feed(piece)

        return read

    return [
        Target("frame", frames, read_frame, 30),
        Target("websocket of a client", [stream(True)], reading(True), 20),
        Target("websocket of a server", [stream(False)], reading(False), 20),
    ]


def _sessions(swarm: Swarm, device: Device, now: float) -> list[Target]:
    ephemeral = ExchangeKey.generate()

    def initiator() -> Initiator:
        return Initiator(
            certificate=swarm.backbone.certificate,
            key=swarm.backbone.exchange,
            device_key=device.exchange.public,
            root=swarm.root,
            grant_hash=device.grant_hash,
            generation=1,
            ephemeral=ephemeral,
        )

    def responder() -> Responder:
        return Responder(
            key=device.exchange,
            root=swarm.root,
            grant_hash=device.grant_hash,
            generations=device.generations,
            serials=device.serials,
            ephemeral=ephemeral,
        )

    first = initiator()
    offer = first.offer()
    answer, _ = responder().receive_offer(offer, unix_now=now, now=0.0)

    def read_answer(data: bytes) -> None:
        trying = initiator()
        trying.offer()
        trying.receive_answer(data, 0.0)

    def read_offer(data: bytes) -> None:
        responder().receive_offer(data, unix_now=now, now=0.0)

    def pair() -> tuple[SessionCore, SessionCore]:
        dialling = initiator()
        reply, accepted = responder().receive_offer(dialling.offer(), unix_now=now, now=0.0)
        return dialling.receive_answer(reply, 0.0), accepted

    sender, receiver = pair()
    packets = [bytes(sender.seal(record)) for record in sender.records(b"hello")]

    def read_packet(data: bytes) -> None:
        receiver._ended = None  # each input meets a session that has not ended
        receiver.receive(data, 0.0)

    honest, believing = pair()
    records = [b"\0hello", b"\1part", b"\4", honest.close_record("closed", "bye")]

    def read_record(data: bytes) -> None:
        """What a peer with the right keys may put into a record."""
        believing._ended, believing.peer_close = None, None
        if len(data) <= 65_519 and data != b"\2":  # a new key would put the two out of step
            believing.receive(honest._sending.encrypt(data), 0.0)

    def read_handshake(data: bytes) -> None:
        state = HandshakeState(
            initiator=False,
            prologue=b"x",
            static=device.exchange,
            remote_static=swarm.backbone.exchange.public,
            ephemeral=ephemeral,
        )
        state.read_message(data)

    return [
        Target("session answer", [answer], read_answer, 1),
        Target("session offer", [offer], read_offer, 1),
        Target("handshake message", [first._handshake._e.public + bytes(16)], read_handshake, 1),
        Target("packet", packets, read_packet, 10),
        Target("record", records, read_record, 10),
    ]


def _texts() -> list[Target]:
    key = SigningKey(bytes(32)).public
    networks = parse_networks(["10.0.0.0/8"])

    def read_link(data: bytes) -> None:
        parse_join_link(data.decode("latin-1"))

    def read_forwarded(data: bytes) -> None:
        text = data.decode("latin-1")
        quota_key(client_address("10.0.0.1", [text], networks))

    from relay.links import JoinLink

    return [
        Target("join link", [JoinLink("http://host:8420", key).text.encode()], read_link),
        Target("forwarded address", [b"1.2.3.4, [2001:db8::1]:80, 10.0.0.9"], read_forwarded),
    ]

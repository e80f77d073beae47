from __future__ import annotations

from typing import Any

import pytest
from noise.connection import Keypair, NoiseConnection

from relay.errors import IdentityError, LocalProtocolError, RemoteProtocolError
from relay.identity import ExchangeKey, ExchangePublic
from relay.noise import MAX_NOISE_MESSAGE, CipherState, HandshakeState
from tests.support.vectors import load_vectors

NAME = "Noise_KK_25519_ChaChaPoly_SHA256"


def _pair(prologue: bytes = b"p") -> tuple[HandshakeState, HandshakeState]:
    first, second = ExchangeKey.generate(), ExchangeKey.generate()
    return (
        HandshakeState(
            initiator=True,
            prologue=prologue,
            static=first,
            remote_static=second.public,
            ephemeral=ExchangeKey.generate(),
        ),
        HandshakeState(
            initiator=False,
            prologue=prologue,
            static=second,
            remote_static=first.public,
            ephemeral=ExchangeKey.generate(),
        ),
    )


def _vector_side(vector: dict[str, Any], side: str) -> HandshakeState:
    def raw(name: str) -> bytes:
        return bytes.fromhex(vector[f"{side}_{name}"])

    return HandshakeState(
        initiator=side == "init",
        prologue=raw("prologue"),
        static=ExchangeKey(raw("static")),
        remote_static=ExchangePublic(raw("remote_static")),
        ephemeral=ExchangeKey(raw("ephemeral")),
    )


def test_the_published_vectors() -> None:
    found = [
        vector
        for vector in load_vectors("noise_25519_chachapoly.json")["vectors"]
        if vector["protocol_name"] == NAME
    ]
    assert found
    for vector in found:
        sides = [_vector_side(vector, "init"), _vector_side(vector, "resp")]
        messages = [
            (bytes.fromhex(message["payload"]), bytes.fromhex(message["ciphertext"]))
            for message in vector["messages"]
        ]
        for turn, (payload, ciphertext) in enumerate(messages[:2]):
            writer, reader = sides[turn], sides[1 - turn]
            assert writer.write_message(payload) == ciphertext
            assert reader.read_message(ciphertext) == payload
        assert {side.hash.hex() for side in sides} == {vector["handshake_hash"]}
        ciphers = [side.split() for side in sides]
        for turn, (payload, ciphertext) in enumerate(messages[2:]):
            sending, receiving = ciphers[turn % 2][0], ciphers[1 - turn % 2][1]
            assert sending.encrypt(payload) == ciphertext
            assert receiving.decrypt(ciphertext) == payload


def _theirs(initiator: bool, static: ExchangeKey, remote: ExchangePublic, prologue: bytes) -> NoiseConnection:
    noise = NoiseConnection.from_name(NAME.encode())
    noise.set_prologue(prologue)
    (noise.set_as_initiator if initiator else noise.set_as_responder)()
    noise.set_keypair_from_private_bytes(Keypair.STATIC, static.secret)
    noise.set_keypair_from_public_bytes(Keypair.REMOTE_STATIC, remote)
    noise.start_handshake()
    return noise


@pytest.mark.parametrize("we_initiate", [True, False])
def test_against_an_independent_implementation(we_initiate: bool) -> None:
    our_key, their_key = ExchangeKey.generate(), ExchangeKey.generate()
    ours = HandshakeState(
        initiator=we_initiate,
        prologue=b"kvasir/1",
        static=our_key,
        remote_static=their_key.public,
        ephemeral=ExchangeKey.generate(),
    )
    theirs = _theirs(not we_initiate, their_key, our_key.public, b"kvasir/1")
    if we_initiate:
        assert theirs.read_message(ours.write_message(b"hello")) == b"hello"
        assert ours.read_message(bytes(theirs.write_message(b"back"))) == b"back"
    else:
        assert ours.read_message(bytes(theirs.write_message(b"hello"))) == b"hello"
        assert theirs.read_message(ours.write_message(b"back")) == b"back"
    assert theirs.get_handshake_hash() == ours.hash
    sending, receiving = ours.split()
    for round_ in range(5):
        message = b"m" * (1000 * round_)
        assert theirs.decrypt(sending.encrypt(message)) == message
        assert receiving.decrypt(bytes(theirs.encrypt(message))) == message
        if round_ == 2:
            sending.rekey()
            theirs.rekey_inbound_cipher()
            receiving.rekey()
            theirs.rekey_outbound_cipher()


def test_a_stranger_fails_at_the_first_message() -> None:
    initiator, _ = _pair()
    _, responder = _pair()
    with pytest.raises(RemoteProtocolError):
        responder.read_message(initiator.write_message())


def test_another_prologue_fails() -> None:
    key, other = ExchangeKey.generate(), ExchangeKey.generate()
    initiator = HandshakeState(
        initiator=True,
        prologue=b"a",
        static=key,
        remote_static=other.public,
        ephemeral=ExchangeKey.generate(),
    )
    responder = HandshakeState(
        initiator=False,
        prologue=b"b",
        static=other,
        remote_static=key.public,
        ephemeral=ExchangeKey.generate(),
    )
    with pytest.raises(RemoteProtocolError):
        responder.read_message(initiator.write_message())


def test_every_flipped_bit_of_a_handshake_message_fails() -> None:
    initiator, responder = _pair()
    message = initiator.write_message(b"payload")
    for index in range(len(message)):
        # Bit 255 of an X25519 key is ignored by the curve, but not by the transcript hash.
        altered = message[:index] + bytes([message[index] ^ 0x80]) + message[index + 1 :]
        fresh = _responder_like(responder)
        with pytest.raises((RemoteProtocolError, IdentityError)):
            fresh.read_message(altered)


def _responder_like(responder: HandshakeState) -> HandshakeState:
    return HandshakeState(
        initiator=False,
        prologue=b"p",
        static=responder._s,
        remote_static=responder._rs,
        ephemeral=ExchangeKey.generate(),
    )


def test_turns_are_kept() -> None:
    initiator, responder = _pair()
    with pytest.raises(LocalProtocolError):
        responder.write_message()
    with pytest.raises(LocalProtocolError):
        initiator.read_message(bytes(48))
    with pytest.raises(LocalProtocolError):
        initiator.split()
    responder.read_message(initiator.write_message())
    with pytest.raises(LocalProtocolError):
        initiator.write_message()
    initiator.read_message(responder.write_message())
    with pytest.raises(LocalProtocolError):
        responder.write_message()


@pytest.mark.parametrize("size", [0, 31, 47, MAX_NOISE_MESSAGE + 1])
def test_handshake_messages_of_no_possible_size(size: int) -> None:
    _, responder = _pair()
    with pytest.raises(RemoteProtocolError):
        responder.read_message(bytes(size))


def test_a_small_order_ephemeral_key_fails() -> None:
    _, responder = _pair()
    with pytest.raises(IdentityError):
        responder.read_message(bytes(48))


def test_a_cipher_refuses_replays_and_goes_on_after_a_bad_message() -> None:
    sender, receiver = CipherState(b"k" * 32), CipherState(b"k" * 32)
    first, second = sender.encrypt(b"one"), sender.encrypt(b"two")
    with pytest.raises(RemoteProtocolError):
        receiver.decrypt(second)
    assert receiver.decrypt(first) == b"one"
    with pytest.raises(RemoteProtocolError):
        receiver.decrypt(first)
    assert receiver.decrypt(second) == b"two"


def test_nonces_end_before_the_reserved_one() -> None:
    cipher = CipherState(b"k" * 32)
    cipher.nonce = (1 << 64) - 2
    cipher.encrypt(b"the last")
    with pytest.raises(LocalProtocolError, match="handshake again"):
        cipher.encrypt(b"one too many")
    with pytest.raises(LocalProtocolError, match="handshake again"):
        cipher.decrypt(bytes(16))


def test_rekeying_changes_the_key_and_keeps_the_counter() -> None:
    sender, receiver = CipherState(b"k" * 32), CipherState(b"k" * 32)
    receiver.decrypt(sender.encrypt(b"old"))
    sender.rekey()
    packet = sender.encrypt(b"new")
    with pytest.raises(RemoteProtocolError):
        receiver.decrypt(packet)
    receiver.rekey()
    assert receiver.decrypt(packet) == b"new"
    assert sender.nonce == receiver.nonce == 2

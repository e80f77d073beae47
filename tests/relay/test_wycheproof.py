"""Ed25519 and X25519 against C2SP's Wycheproof vectors, by the stricter reading that this project takes."""

from __future__ import annotations

from typing import Any

from relay.errors import IdentityError
from relay.identity import ExchangeKey, verify
from tests.support.vectors import load_vectors


def test_ed25519() -> None:
    counted = {"valid": 0, "invalid": 0}
    for group in load_vectors("wycheproof_ed25519.json")["testGroups"]:
        public = bytes.fromhex(group["publicKey"]["pk"])
        for test in group["tests"]:
            accepted = _verifies(public, bytes.fromhex(test["sig"]), bytes.fromhex(test["msg"]))
            assert accepted == (test["result"] == "valid"), test
            counted[test["result"]] += 1
    assert min(counted.values()) > 30, counted


def _verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        verify(public, signature, message)
    except IdentityError:
        return False
    return True


def test_x25519() -> None:
    counted = {"valid": 0, "acceptable": 0}
    for group in load_vectors("wycheproof_x25519.json")["testGroups"]:
        for test in group["tests"]:
            shared = _exchange(test)
            if test["shared"] == "00" * 32:
                assert shared is None, f"a small-order key was taken: {test}"
            else:
                assert shared == test["shared"], test
            counted[test["result"]] += 1
    assert min(counted.values()) > 30, counted


def _exchange(test: dict[str, Any]) -> str | None:
    try:
        return ExchangeKey(bytes.fromhex(test["private"])).exchange(bytes.fromhex(test["public"])).hex()
    except IdentityError:
        return None

"""Every error that Kvasir raises on purpose, and the code each has on the wire.

    KvasirError
     |-- ConfigError            what a person asked for cannot be done; the message says what to do
     |-- LocalProtocolError     our own code broke a protocol's rules
     |-- RemoteProtocolError    a peer broke a protocol's rules; the peer is closed
     |-- IdentityError          a key, signature, certificate, ticket or grant is not acceptable
     |-- Unreachable            a peer did not answer in time, or the way to it is gone; retry may help
     `-- Refused                a peer answered, and the answer is a typed no

Knows the codes; knows nothing of who raises them. Packages above derive their own errors from these.
"""

from __future__ import annotations

from typing import Final

CODES: Final = frozenset(
    {
        "bad_request",  # malformed, or a value out of its range
        "bad_signature",  # a signature, key or certificate does not verify
        "busy",  # a credit window or a bound on what is outstanding is used up
        "conflict",  # somebody else holds it
        "draining",  # the peer is going away in order
        "duplicate",  # another connection of the same identity took over
        "expired",  # too late: ticket, grant, certificate, challenge or deadline
        "forbidden",  # known, verified, and not allowed
        "internal",  # the peer's own fault
        "not_found",  # no such thing
        "not_mine",  # the worker holds no such expert under that lease
        "overloaded",  # the queue is full; see retry_after_s
        "quarantined",  # the wallet is in quarantine
        "quota",  # a quota per peer or address is used up
        "replay",  # a nonce, generation or sequence was used before
        "stale_epoch",  # the lease has moved on
        "unreachable",  # the peer is not connected, or did not answer in time
        "version",  # the two sides speak different versions
        "wrong_swarm",  # signed for another swarm
    }
)
"""The closed set of codes that a refusal may carry on any wire."""


class KvasirError(Exception):
    """The root of the tree. `code` is one of `CODES`; `str(error)` tells a person what to do next."""

    code: str = "internal"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            assert code in CODES, code
            self.code = code

    @property
    def message(self) -> str:
        """The text for a person."""
        return str(self)


class ConfigError(KvasirError):
    """A setting, argument, file or model that cannot be used. Commands print it and exit with status 2."""

    code = "bad_request"


class LocalProtocolError(KvasirError):
    """Our own code asked a protocol core for something its state does not allow: a bug here."""

    code = "internal"


class RemoteProtocolError(KvasirError):
    """A peer sent something its state, the format or a bound does not allow. Nothing more is read from it."""

    code = "bad_request"


class IdentityError(KvasirError):
    """A key, signature, certificate, ticket, grant or key file is not acceptable."""

    code = "bad_signature"


class Unreachable(KvasirError):  # noqa: N818 - the design's name: a state, not a failure of ours
    """A peer did not answer before its deadline, or the connection to it is gone."""

    code = "unreachable"


class Refused(KvasirError):  # noqa: N818 - the design's name: a typed answer
    """A peer answered with a typed refusal.

    `code` is one of `CODES`; `retry_after_s` is the peer's own estimate in seconds, or None.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code if code in CODES else "internal")
        self.retry_after_s = retry_after_s


def version_refusal(ours: int, theirs: object) -> Refused:
    """The refusal of a peer that speaks another version; names both."""
    return Refused(
        "version",
        f"this side speaks version {ours} and the peer speaks version {theirs!r}: "
        "update the older one (pip install --upgrade kvasir)",
    )

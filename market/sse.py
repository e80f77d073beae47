"""Server-sent events (WHATWG HTML, section 9.2), the part the market uses: written and read incrementally.

Sans-IO: bytes in, event data out. Events carry `data:` lines only; comments keep the stream alive.
"""

from __future__ import annotations

from typing import Final

from relay.errors import RemoteProtocolError

MAX_EVENT_BYTES: Final = 1024 * 1024
KEEP_ALIVE: Final = b": alive\n\n"
"""A comment: says that the stream lives."""


def encode_event(data: str) -> bytes:
    """One event. `data` has no line breaks (JSON written compactly has none)."""
    assert "\n" not in data
    assert "\r" not in data
    return f"data: {data}\n\n".encode()


class SseParser:
    """Takes a stream apart: feed it chunks of any size, get the data of each complete event."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []
        self._size = 0

    def receive_data(self, chunk: bytes) -> list[str]:
        """The data of every event that `chunk` completes. Raises `RemoteProtocolError` over the bound."""
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise RemoteProtocolError(f"an event is over {MAX_EVENT_BYTES} bytes")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> str | None:
        if not line:
            event = "\n".join(self._data) if self._data else None
            self._data, self._size = [], 0
            return event
        if line.startswith(b"data:"):
            self._size += len(line)
            if self._size > MAX_EVENT_BYTES:
                raise RemoteProtocolError(f"an event is over {MAX_EVENT_BYTES} bytes")
            try:
                self._data.append(line[5:].decode("utf-8").removeprefix(" "))
            except UnicodeDecodeError:
                raise RemoteProtocolError("an event is not UTF-8") from None
        return None

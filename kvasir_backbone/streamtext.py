"""Token ids become text as they arrive: whole characters only, and never a part of a stop string.

Pure: no clock, no socket, no tensor. One `TextStream` serves one choice of one request.

Two rules make the streamed text equal to the text decoded at once, whatever the chunking:

- A character whose bytes are spread over several tokens is held until it is complete. Tokenizers show an
  incomplete one as U+FFFD, so a trailing run of U+FFFD is held back.
- Text that could still turn out to be the beginning of a stop string is held until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of a tokenizer: ids -> text, special tokens left out."""

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...


@dataclass(slots=True)
class Detokeniser:
    """Incremental ids -> text. The concatenation of all that `feed` and `finish` return is the whole text.

    Keeps a short window of ids as context, because some tokenizers drop a leading space at the start of
    what they decode. A step costs O(window), not O(text so far).
    """

    decode: Decoder
    _window: list[int] = field(default_factory=list)
    _read: int = 0  # ids of the window whose text was given out
    _text: str = ""  # the text of those ids, decoded alone

    def feed(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._window.append(token)
        whole = self.decode(self._window)
        if whole.endswith(REPLACEMENT) or len(whole) <= len(self._text):
            return ""
        return self._advance(whole)

    def finish(self) -> str:
        """What was still held: at the end of a text an incomplete character stays U+FFFD."""
        return self._advance(self.decode(self._window))

    def _advance(self, whole: str) -> str:
        new = whole[len(self._text) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._text = self.decode(self._window)
        return new


@dataclass(slots=True)
class StopScanner:
    """Finds the stop string that completes first and holds back what may become one.

    Of several that complete at the same character, the one that began first counts. `stopped` is True
    once a stop string was found; nothing after (or of) it is ever given out.
    """

    stops: Sequence[str]
    stopped: bool = False
    _held: str = ""

    def feed(self, text: str) -> str:
        """The part of the text so far that is safe to show."""
        if self.stopped:
            return ""
        buffer = self._held + text
        found = self._first_match(buffer)
        if found is not None:
            self.stopped, self._held = True, ""
            return buffer[:found]
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """What was held, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> int | None:
        matches = [(at + len(stop), at) for stop in self.stops if (at := buffer.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _possible_start(self, buffer: str) -> int:
        """The index from which the buffer's end is the beginning of some stop string."""
        longest = max((len(stop) for stop in self.stops), default=1)
        for at in range(max(0, len(buffer) - longest + 1), len(buffer)):
            tail = buffer[at:]
            if any(stop.startswith(tail) for stop in self.stops):
                return at
        return len(buffer)


class TextStream:
    """One choice's text: tokens in, showable text out, with `stopped` once a stop string was reached."""

    def __init__(self, decode: Decoder, stops: Sequence[str] = ()) -> None:
        self._detokeniser = Detokeniser(decode)
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._scanner.stopped

    def feed(self, token: int) -> str:
        """The text that may be shown after `token`; may be empty."""
        return self._scanner.feed(self._detokeniser.feed(token))

    def finish(self) -> str:
        """The rest, once the last token was fed."""
        rest = self._scanner.feed(self._detokeniser.finish())
        return rest + self._scanner.finish()

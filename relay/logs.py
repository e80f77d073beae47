"""Logging for every daemon: structlog, pretty on a terminal, one JSON object a line otherwise.

Event names are constants of the form `noun.participle`; data goes into keys. The standard library's
loggers (aiohttp, asyncio) are written in the same form. Knows nothing of which events exist: the closed
set is in `docs/logging.md`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""The levels that `configure` takes."""


class LineLogger:
    """Writes finished lines to one text stream, flushed; `name` is the component's name."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self._stream = stream

    def msg(self, message: str) -> None:
        """Write one line. A closed or broken stream loses the line, never the daemon."""
        try:
            self._stream.write(message + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    log = debug = info = warn = warning = err = error = critical = fatal = exception = failure = msg


def configure(*, json: bool | None = None, level: str = "info", file: str | Path | None = None) -> None:
    """Set the process's logging up: to standard error, or appended to `file`.

    `json` None means: JSON unless the stream is a terminal. `level` is one of `LEVELS`. Call it once, from a
    command. Raises `OSError` if `file` cannot be opened and `KeyError` for an unknown level.
    """
    stream = sys.stderr if file is None else Path(file).open("a", encoding="utf-8")  # noqa: SIM115
    as_json = not stream.isatty() if json is None else json
    number = LEVELS[level]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add_component,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _readable_bytes,
    ]
    rendering: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if as_json
        else [  # the default traceback prints local variables: keys, and what people wrote
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *names: LineLogger(names[0] if names else "kvasir", stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))


def _add_component(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    record = event.get("_record")  # of the standard library's loggers
    name = getattr(logger if record is None else record, "name", None)
    if name is not None:
        event.setdefault("component", name)
    return event


def _readable_bytes(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Ids are logged in hexadecimal, whoever forgot to convert them."""
    found: dict[str, Any] = {key: value.hex() for key, value in event.items() if isinstance(value, bytes)}
    event.update(found)
    return event

"""A completion read token by token from the swarm's API, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from _processes import Failed


@dataclass(slots=True)
class Written:
    """What came back. Times are `time.time()`, unix seconds."""

    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0
    numerics: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first."""
        span = self.last_at - self.first_at
        return (len(self.token_ids) - 1) / span if len(self.token_ids) > 1 and span > 0 else None


def complete(
    url: str, model: str, prompt: str, max_tokens: int, show: Callable[[str], None], *, timeout: float
) -> Written:
    """Ask for a greedy completion, call `show` with each new piece of text. Raises `Failed`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body=json.dumps(body), headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(
                f"the API answered {response.status}: {response.read(2000).decode(errors='replace')}"
            )
        written = Written(numerics=response.headers.get("X-Kvasir-Numerics", ""))
        while line := response.readline():
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                _take(json.loads(line[6:]), written, show)
        return written
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"the API went away: {error}") from error
    finally:
        connection.close()


def _take(event: dict[str, Any], written: Written, show: Callable[[str], None]) -> None:
    if "error" in event:
        raise Failed(f"the API ended the text: {event['error']['message']}")
    for choice in event["choices"]:
        written.prompt_ids += choice.get("prompt_token_ids", [])
        if choice["token_ids"]:
            written.last_at = time.time()
            written.first_at = written.first_at or written.last_at
        written.token_ids += choice["token_ids"]
        if choice["text"]:
            written.text += choice["text"]
            show(choice["text"])

"""What a worker is told: references, expert ids and hidden rows. What the wire shows: none of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvasir_backbone.dispatch import SwarmDispatcher
from kvasir_backbone.seam import RowKey
from kvasir_node.calls import Call, Notice, ReceiptMessage, References, decode
from kvasir_node.serving import ExpertServer
from tests.support.swarms import running_swarm

pytestmark = [pytest.mark.any_loop, pytest.mark.timeout(300)]
"""A swarm in one process needs seconds; on a busy machine minutes."""

PROMPT = "And the king said unto Canary, son of Zephyr, "


class Recorder:
    """A session that keeps every message it delivers."""

    def __init__(self, session: Any, delivered: list[bytes]) -> None:
        self._session = session
        self._delivered = delivered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def listen(self, handler: Callable[[bytes], None]) -> None:
        def note(message: bytes) -> None:
            self._delivered.append(bytes(message))
            handler(message)

        self._session.listen(note)


async def test_a_worker_gets_references_ids_and_rows_and_the_relay_sees_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered: list[bytes] = []
    dispatched: dict[int, set[bytes]] = {}
    original_serve = ExpertServer.handle_session
    original_dispatch = SwarmDispatcher.dispatch

    async def serve(self: ExpertServer, session: Any, *rest: Any, **more: Any) -> None:
        await original_serve(self, Recorder(session, delivered), *rest, **more)  # type: ignore[arg-type]

    def dispatch(
        self: SwarmDispatcher,
        layer: int,
        rows: Tensor,
        ids: Tensor,
        keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:
        dispatched.setdefault(layer, set()).update(row.numpy().tobytes() for row in rows)
        return original_dispatch(self, layer, rows, ids, keys, deadline_s)

    monkeypatch.setattr(ExpertServer, "handle_session", serve)
    monkeypatch.setattr(SwarmDispatcher, "dispatch", dispatch)
    async with running_swarm(tmp_path, nodes=1) as swarm:
        await swarm.covered()
        proving = len(delivered)
        text = await swarm.text(PROMPT, 24)
        tokenizer = swarm.backbone.model.tokenizer  # type: ignore[union-attr]
        tokens = tokenizer(PROMPT)["input_ids"]
        row_bytes = swarm.backbone.plan.row_bytes  # type: ignore[union-attr]
        capture = bytes(swarm.wires[0].to_node)
    calls = [message for message in map(decode, delivered[proving:]) if isinstance(message, Call)]
    assert len(calls) > 24
    for raw in delivered:
        assert isinstance(decode(raw), (References, Call, ReceiptMessage, Notice))
    # Every row that a worker got during the generation is a hidden row that the engine dispatched.
    for call in calls:
        rows = [bytes(call.rows[i : i + row_bytes]) for i in range(0, len(call.rows), row_bytes)]
        assert call.weights is None
        assert set(rows) <= dispatched[call.layer]
    # Neither the text nor its token ids are in any of it, in any width that an implementation would use.
    everything = b"".join(delivered)
    assert b"Canary" not in everything
    assert text.encode() not in everything
    for letter in "hHiIqQ":
        for order in "<>":
            run = struct.pack(f"{order}4{letter}", *tokens[-4:])
            assert run not in everything, letter
    # On the wire, through the relay, not even the rows are to be seen.
    assert len(capture) > len(everything)
    for call in calls:
        assert bytes(call.rows[:row_bytes]) not in capture

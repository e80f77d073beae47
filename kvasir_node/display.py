"""What `kvasir-node run` shows on a terminal: the phase, a bar while loading, the work, the notices.

Knows rich and the status. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .config import format_size
from .status import NodeStatus, Phase

REFRESH_S: Final = 0.25
_COLOURS: Final = {
    Phase.SERVING: "bold green",
    Phase.PAUSED: "yellow",
    Phase.DRAINING: "yellow",
    Phase.STOPPED: "dim",
}


async def show(status: NodeStatus, console: Console) -> None:
    """Keep the terminal up to date until cancelled; notices scroll by above."""
    last: list[Phase] = []

    def notice(text: str) -> None:
        console.print(Text(text, style="dim"))

    def follow() -> None:
        phase = status.phase
        if last != [phase]:
            last[:] = [phase]
            console.print(Text(f"{phase} ...", style=_COLOURS.get(phase, "bold")))

    status.listen(notice)
    status.follow(follow)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while True:
                follow()
                live.update(render(status.snapshot()), refresh=True)
                await asyncio.sleep(REFRESH_S)
        finally:
            status.listen(lambda text: None)


def render(snapshot: Mapping[str, Any]) -> RenderableType:
    """The live part of the screen."""
    phase = Phase(snapshot["phase"])
    reach = "reachable" if snapshot["reachable"] else "not reachable yet"
    lines: list[RenderableType] = [
        Text.assemble((str(phase), _COLOURS.get(phase, "bold")), f", {reach}", style="default")
    ]
    if snapshot["message"] and phase is not Phase.SERVING:
        lines.append(Text(snapshot["message"], style="dim"))
    if snapshot["market"]["error"]:
        lines.append(Text(f"the market does not answer: {snapshot['market']['error']}", style="red"))
    if snapshot["windows"]:
        lines.append(_windows(snapshot["windows"]))
    counters, credit = snapshot["counters"], snapshot["credit"]
    if counters.get("calls"):
        paths = ", ".join(sorted({session["path"] for session in snapshot["sessions"]})) or "no session"
        lines.append(
            Text(
                f"{counters['calls']:,} calls, {format_size(counters['carried bytes'])} carried, "
                f"{credit.get('credit', '0')} credits, over {paths}"
            )
        )
    return Group(*lines)


def _windows(windows: list[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for window in windows:
        table.add_row(
            Text(window["window"]), Text(window["model"]), Text(window["precision"]), *_cells(window)
        )
    return table


def _cells(window: Mapping[str, Any]) -> tuple[RenderableType, RenderableType]:
    loading = window["state"] == "HELD" and window["total_bytes"]
    if not loading:
        detail = window["step"] or format_size(window["kept_bytes"])
        return Text(window["state"].lower()), Text(detail)
    left = "" if window["left_s"] is None else f", {window['left_s']:.0f} s left"
    rate = f", {format_size(window['rate'])}/s" if window["rate"] else ""
    bar = ProgressBar(total=window["total_bytes"], completed=window["done_bytes"], width=30)
    sizes = f"{format_size(window['done_bytes'])} of {format_size(window['total_bytes'])}"
    return bar, Text(f"{window['step']}: {sizes}{rate}{left}")

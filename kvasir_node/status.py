"""What a node is doing, for its owner: kept by the daemon, read by `status`, `run` and the control endpoint.

Knows phases, words and numbers. Decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from .config import format_size

STATUS_VERSION: Final = 1
NOTICES: Final = 50
"""How many notices are kept."""


class Phase(StrEnum):
    """What the node as a whole is doing, in words its owner understands."""

    STARTING = "starting"
    WALLET = "proving the wallet"
    VOLUNTEERING = "volunteering"
    LOADING = "loading"
    PROVING = "proving calls"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(slots=True)
class WindowStatus:
    """One window that this node holds or loads. Sizes in bytes, `rate` in bytes a second."""

    window: str
    plan: str
    model: str
    precision: str
    lease: str
    epoch: int
    reason: str
    """Why the market wanted this window."""
    state: str = "HELD"
    step: str = "waiting for its hashes"
    """What loading is at: words for a person; empty once loaded."""
    done_bytes: int = 0
    total_bytes: int = 0
    rate: float = 0.0
    kept_bytes: int = 0
    d: float = 0.0
    """The measured error of its experts against the stored precision."""
    numerics: str = ""
    lease_left_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the download is done at this rate, or None."""
        if self.rate <= 0 or self.done_bytes >= self.total_bytes:
            return None
        return (self.total_bytes - self.done_bytes) / self.rate


class RelayView(Protocol):
    """What is shown of a relay connection; `rtt_s` in seconds."""

    url: str
    rtt_s: float | None

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        ...


class SessionView(Protocol):
    """What is shown of a session. Bytes as they are on the link."""

    bytes_sent: int
    bytes_received: int

    @property
    def path(self) -> str:
        """ "relay" or "direct"."""
        ...

    @property
    def generation(self) -> int:
        """The handshake's generation."""
        ...


@dataclass(slots=True)
class SessionStatus:
    """One session with the backbone of that id (hex), through `relay` (its URL) unless that is empty.

    `since` in Unix seconds.
    """

    backbone: str
    session: SessionView
    since: float
    relay: str = ""


@dataclass(slots=True)
class MarketStatus:
    """The market: `error` is None while it answers, else what is wrong."""

    url: str = ""
    swarm: str = ""
    error: str | None = None
    seen_at: float | None = None


@dataclass(slots=True)
class Notice:
    """Something the owner should know. `at` in Unix seconds."""

    at: float
    text: str


class NodeStatus:
    """The live status. Written by the daemon's loop alone; `snapshot` may be called there at any time.

    `counters` and `balance` are callables set by the daemon: the expert server's counters, the receipts'
    carried bytes.
    """

    def __init__(self, *, name: str = "", clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.name = name
        self.started_at = clock()
        self.wallet = ""
        self.device = ""
        self.machine = ""
        self.allowance = ""
        self.limits = ""
        """What the owner allows and when, for a person; empty: no limits."""
        self.speed: dict[str, Any] = {}
        """What was measured at the start (`kvasir_node.measuring.Speed.facts`)."""
        self.speed_text = self.link_text = ""
        self.capacity: dict[str, str] = {}
        """Plan (hex) -> what this machine can hold of it, for a person."""
        self.budget_bytes = 0
        self.market = MarketStatus()
        self.windows: dict[bytes, WindowStatus] = {}
        self.relays: dict[str, RelayView] = {}
        self.relay_loads: dict[str, float] = {}
        """URL -> how busy that relay says it is, from 0 to 1."""
        self.sessions: dict[int, SessionStatus] = {}
        self.notices: deque[Notice] = deque(maxlen=NOTICES)
        self._base = Phase.STARTING
        self.message = ""
        """Why nothing more happens now, for a person."""
        self.listening: Callable[[], tuple[str, ...]] = tuple
        """Where backbones may dial this node directly, set by the daemon."""
        self.counters: Callable[[], Mapping[str, Any]] = dict
        self.balance: Callable[[], Mapping[str, Any]] = dict
        self.trust: dict[str, Any] = {}
        """What is on record about the wallet (`kvasir_node.standing.trust_fields`); empty: not known yet."""
        self._listeners: list[Callable[[str], None]] = []
        self._followers: list[Callable[[], None]] = []

    @property
    def base(self) -> Phase:
        """The phase while no window is held."""
        return self._base

    @base.setter
    def base(self, phase: Phase) -> None:
        self._base = phase
        for follower in self._followers:
            follower()

    def follow(self, follower: Callable[[], None]) -> None:
        """Call `follower` whenever `base` is set: a phase that is over soon is seen too."""
        self._followers.append(follower)

    @property
    def phase(self) -> Phase:
        """The phase of the whole: the furthest that any window is, unless the node pauses or drains."""
        if self.base in (Phase.STARTING, Phase.WALLET, Phase.PAUSED, Phase.DRAINING, Phase.STOPPED):
            return self.base
        states = {window.state for window in self.windows.values()}
        for state, phase in (("PROVEN", Phase.SERVING), ("LOADED", Phase.PROVING), ("HELD", Phase.LOADING)):
            if state in states:
                return phase
        return self.base

    @property
    def reachable(self) -> bool:
        """Whether a backbone could call this node now: a relay is connected, or a session is open."""
        return bool(self.sessions) or any(relay.connected for relay in self.relays.values())

    def notify(self, text: str) -> None:
        """Add a notice, unless it repeats the last one."""
        if not self.notices or self.notices[-1].text != text:
            self.notices.append(Notice(self._clock(), text))
            for listener in self._listeners:
                listener(text)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with each new notice."""
        self._listeners.append(listener)

    def market_answered(self) -> None:
        """The market is there."""
        if self.market.error is not None:
            self.notify("the market answers again")
        self.market.error = None
        self.market.seen_at = self._clock()

    def market_failed(self, error: str) -> None:
        """The market did not answer: says so once."""
        if self.market.error is None:
            self.notify(f"the market does not answer: {error}. Trying again, and serving on meanwhile")
        self.market.error = error

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        now = self._clock()
        return {
            "v": STATUS_VERSION,
            "name": self.name,
            "phase": str(self.phase),
            "running": self.phase is not Phase.STOPPED,
            "reachable": self.reachable,
            "message": self.message,
            "uptime_s": round(now - self.started_at, 1),
            "wallet": self.wallet,
            "device": self.device,
            "machine": self.machine,
            "allowance": self.allowance,
            "limits": self.limits,
            "speed": {**self.speed, "text": self.speed_text, "link": self.link_text},
            "capacity": list(self.capacity.values()),
            "budget_bytes": self.budget_bytes,
            "market": {
                "url": self.market.url,
                "swarm": self.market.swarm,
                "error": self.market.error,
                "seen_s_ago": None if self.market.seen_at is None else round(now - self.market.seen_at, 1),
            },
            "windows": [_window_fields(window) for window in self.windows.values()],
            "relays": [
                {
                    "url": url,
                    "connected": relay.connected,
                    "rtt_s": relay.rtt_s,
                    "load": self.relay_loads.get(url),
                    "sessions": sum(session.relay == url for session in self.sessions.values()),
                }
                for url, relay in self.relays.items()
            ],
            "direct": list(self.listening()),
            "sessions": [
                {
                    "backbone": session.backbone,
                    "path": session.session.path,
                    "relay": session.relay or None,
                    "generation": session.session.generation,
                    "age_s": round(now - session.since, 1),
                    "bytes_sent": session.session.bytes_sent,
                    "bytes_received": session.session.bytes_received,
                }
                for session in self.sessions.values()
            ],
            "counters": dict(self.counters()),
            "credit": dict(self.balance()),
            "trust": self.trust,
            "notices": [{"at": notice.at, "text": notice.text} for notice in self.notices],
        }


def _window_fields(window: WindowStatus) -> dict[str, Any]:
    names = (
        "window", "plan", "model", "precision", "lease", "epoch", "reason", "state", "step", "done_bytes",
        "total_bytes", "kept_bytes", "d", "numerics",
    )  # fmt: skip
    return {
        **{name: getattr(window, name) for name in names},
        "rate": round(window.rate),
        "left_s": None if window.left_s is None else round(window.left_s, 1),
        "lease_left_s": round(window.lease_left_s, 1),
    }


def describe(snapshot: Mapping[str, Any]) -> list[str]:
    """A snapshot as lines for a person."""
    market = snapshot["market"]
    lines = [
        f"{snapshot['name'] or 'node'}: {snapshot['phase']}, "
        f"{'reachable' if snapshot['reachable'] else 'not reachable'}, up {_duration(snapshot['uptime_s'])}",
    ]
    if snapshot["message"]:
        lines.append(f"  {snapshot['message']}")
    lines += [
        f"wallet   {snapshot['wallet']}",
        f"device   {snapshot['device']}",
        f"machine  {snapshot['machine']}",
        *([f"speed    {snapshot['speed']['text']}"] if snapshot["speed"]["text"] else []),
        *([f"link     {snapshot['speed']['link']}"] if snapshot["speed"]["link"] else []),
        f"uses     {snapshot['allowance']}",
        *([f"limits   {snapshot['limits']}"] if snapshot["limits"] else []),
        *(f"can hold {line}" for line in snapshot["capacity"]),
        f"market   {market['url']} "
        + (f"does not answer: {market['error']}" if market["error"] else "answers"),
    ]
    lines += [
        f"relay    {relay['url']} "
        + (f"connected{_rtt(relay['rtt_s'])}{_load(relay)}" if relay["connected"] else "not connected")
        for relay in snapshot["relays"]
    ]
    if snapshot["direct"]:
        lines.append(f"direct   {', '.join(snapshot['direct'])}")
    lines += [
        f"session  backbone {session['backbone'][:8]} over {_way(session)}, {_duration(session['age_s'])}, "
        f"{format_size(session['bytes_received'])} in, {format_size(session['bytes_sent'])} out"
        for session in snapshot["sessions"]
    ]
    lines += [_window_line(window) for window in snapshot["windows"]]
    if counters := snapshot["counters"]:
        lines.append("work     " + ", ".join(f"{value:,} {name}" for name, value in counters.items()))
    if credit := snapshot["credit"]:
        lines.append(f"credit   {credit['credit']} from receipts ({credit['calls']:,} calls)")
    if trust := snapshot["trust"]:
        lines += _trust_lines(trust)
    lines += [
        f"{time.strftime('%H:%M:%S', time.localtime(notice['at']))} {notice['text']}"
        for notice in snapshot["notices"][-5:]
    ]
    return lines


def _trust_lines(trust: Mapping[str, Any]) -> list[str]:
    """Escrow and standing, and the latest of what is on record; releases only where nothing else is."""
    left = trust["quarantine_left_s"]
    if left > 0:
        standing = "in quarantine " + ("for good" if trust["for_good"] else f"for {_duration(left)} more")
    else:
        standing = "in good standing" if not trust["quarantines"] else f"{trust['quarantines']} quarantines"
    more = trust["release_in_calls"]
    next_ = "" if more is None else f"; the next of it is available after {more:,} more calls"
    lines = [
        f"escrow   {trust['escrow']} credits in escrow, {trust['available']} available, {trust['void']} void"
        + next_,
        f"trust    {standing}",
    ]
    told = [record for record in trust["records"] if record["kind"] != "release"]
    lines += [f"         {record['text']}" for record in told[:3]]
    return lines


def _window_line(window: Mapping[str, Any]) -> str:
    head = (
        f"window   {window['window']} of {window['model']}, {window['precision']}, {window['state'].lower()}"
    )
    if window["state"] == "HELD" and window["total_bytes"]:
        share = 100 * window["done_bytes"] / window["total_bytes"]
        left = "" if window["left_s"] is None else f", {_duration(window['left_s'])} left"
        rate = f" at {format_size(window['rate'])}/s" if window["rate"] else ""
        return f"{head}: {window['step']}, {share:.0f} % of {format_size(window['total_bytes'])}{rate}{left}"
    error = f", d = {window['d']:.1e} from stored" if window["d"] else ""
    step = f": {window['step']}" if window["step"] else ""
    return f"{head}, {format_size(window['kept_bytes'])}{error}{step}"


def _rtt(seconds: float | None) -> str:
    return "" if seconds is None else f", {1000 * seconds:.0f} ms"


def _load(relay: Mapping[str, Any]) -> str:
    load = "" if relay.get("load") is None else f", {relay['load']:.0%} busy"
    return f"{load}, carries {relay['sessions']}" if relay.get("sessions") else f"{load}, standing by"


def _way(session: Mapping[str, Any]) -> str:
    return f"the relay {session['relay']}" if session.get("relay") else str(session["path"])


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@dataclass(slots=True)
class Backoff:
    """Growing waits with full jitter, for retries that may go on for ever. Seconds."""

    first_s: float = 0.5
    most_s: float = 30.0
    failures: int = field(default=0)

    def next_s(self, jitter: float) -> float:
        """The next wait; `jitter` is drawn from [0, 1)."""
        ceiling: float = min(self.most_s, self.first_s * 2.0**self.failures)
        self.failures = min(self.failures + 1, 32)
        return ceiling * (0.5 + 0.5 * jitter)

    def reset(self) -> None:
        """It worked."""
        self.failures = 0

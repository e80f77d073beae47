"""What the owner sees: phases, notices, the control endpoint, the log, the local lease clock, receipts."""

from __future__ import annotations

import asyncio
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from kvasir_node.control import CONTROL_FILE, ask_daemon, control_endpoint
from kvasir_node.display import render, show
from kvasir_node.leases import GRACE_S, HURRIES, LeaseClock, next_beat_s
from kvasir_node.logbook import LogBook, last_lines, new_lines
from kvasir_node.receipts import ReceiptBook, read_balances
from kvasir_node.status import Backoff, NodeStatus, Phase, WindowStatus, describe
from market.messages import Lease, LeaseStatus
from market.plans import PlanId
from market.receipts import Receipt, open_acknowledgement, sign_receipt
from market.windows import Window
from market.wire import BackboneId, LeaseId
from relay.errors import ConfigError, IdentityError, Refused, Unreachable
from relay.identity import (
    Certificate,
    ExchangeKey,
    SignedDocument,
    SigningKey,
    issue_certificate,
    sign_document,
)
from tests.support.waiting import until

NOW = 1_800_000_000


def window(state: str = "HELD", **changes: object) -> WindowStatus:
    shown = WindowStatus("L00-01/E000-003", "aa", "tiny", "stored", "bb", 1, "1 of 2 replicas", state)
    for name, value in changes.items():
        setattr(shown, name, value)
    return shown


# --- phases ------------------------------------------------------------------------------------------


def test_the_phase_is_the_furthest_any_window_is() -> None:
    status = NodeStatus(clock=lambda: 0.0)
    assert status.phase is Phase.STARTING
    status.base = Phase.VOLUNTEERING
    assert status.phase is Phase.VOLUNTEERING
    for number, (state, phase) in enumerate(
        [("HELD", Phase.LOADING), ("LOADED", Phase.PROVING), ("PROVEN", Phase.SERVING)]
    ):
        status.windows[bytes([number])] = window(state)
        assert status.phase is phase
    status.base = Phase.DRAINING
    assert status.phase is Phase.DRAINING


def test_running_and_reachable_are_apart() -> None:
    class Relay:
        url, rtt_s, connected = "http://r", 0.012, False

    status, relay = NodeStatus(), Relay()
    status.relays[relay.url] = relay
    snapshot = status.snapshot()
    assert (snapshot["running"], snapshot["reachable"]) == (True, False)
    relay.connected = True
    assert status.snapshot()["reachable"]
    assert "connected, 12 ms" in "\n".join(describe(status.snapshot()))


def test_the_market_s_silence_is_said_once_and_its_return_too() -> None:
    status = NodeStatus()
    heard: list[str] = []
    status.listen(heard.append)
    status.market_failed("no route")
    status.market_failed("no route")
    assert status.snapshot()["market"]["error"] == "no route"
    status.market_answered()
    assert [text.split(":")[0] for text in heard] == [
        "the market does not answer",
        "the market answers again",
    ]


def test_what_is_shown_of_a_window() -> None:
    status = NodeStatus(name="den")
    status.base = Phase.VOLUNTEERING
    status.windows[b"1"] = window(step="fetching", done_bytes=50, total_bytes=200, rate=10.0)
    status.windows[b"2"] = window("PROVEN", kept_bytes=4_000_000)
    text = "\n".join(describe(status.snapshot()))
    assert "fetching, 25 % of 200 B at 10 B/s, 15 s left" in text
    assert "proven, 4.0 MB" in text
    assert json.loads(json.dumps(status.snapshot()))["v"] == 1
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(render(status.snapshot()))
    shown = console.export_text()
    assert "serving, not reachable yet" in shown
    assert "fetching: 50 B of 200 B, 10 B/s, 15 s left" in shown


async def test_the_display_follows_and_prints_notices() -> None:
    status = NodeStatus()
    console = Console(record=True, width=120, file=io.StringIO())
    task = asyncio.create_task(show(status, console))
    await until(lambda: "starting" in console.export_text(clear=False), what="the first phase")
    status.notify("a word to the owner")
    status.base = Phase.VOLUNTEERING
    await until(lambda: "volunteering ..." in console.export_text(clear=False), what="the next phase")
    assert "a word to the owner" in console.export_text(clear=False)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_backoff_grows_and_is_bounded() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0)
    assert [backoff.next_s(1.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    backoff.reset()
    assert backoff.next_s(0.0) == 0.5


# --- the control endpoint ----------------------------------------------------------------------------


async def test_the_status_is_for_who_can_read_the_token(tmp_path: Path) -> None:
    stopped = asyncio.Event()
    async with control_endpoint(tmp_path, status=lambda: {"phase": "serving"}, stop=stopped.set):
        path = tmp_path / CONTROL_FILE
        assert os.name != "posix" or path.stat().st_mode & 0o777 == 0o600
        answer = await asyncio.to_thread(ask_daemon, tmp_path, "GET", "/status")
        assert answer == {"phase": "serving"}
        control = json.loads(path.read_text())
        path.write_text(json.dumps(control | {"token": "guess"}))
        with pytest.raises(Unreachable, match="401"):
            await asyncio.to_thread(ask_daemon, tmp_path, "GET", "/status")
        path.write_text(json.dumps(control))
        await asyncio.to_thread(ask_daemon, tmp_path, "POST", "/stop")
        assert stopped.is_set()
    assert not path.exists()
    with pytest.raises(Unreachable, match="no node runs"):
        ask_daemon(tmp_path, "GET", "/status")


async def test_a_killed_daemons_control_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / CONTROL_FILE
    path.write_text('{"v": 1, "port": 1, "token": "x", "pid": 1}')
    path.chmod(0o600)
    with pytest.raises(Unreachable, match="does not answer"):
        ask_daemon(tmp_path, "GET", "/status")
    async with control_endpoint(tmp_path, status=dict, stop=lambda: None):
        assert await asyncio.to_thread(ask_daemon, tmp_path, "GET", "/status") == {}
    path.write_text("{}")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        ask_daemon(tmp_path, "GET", "/status")


# --- the log -----------------------------------------------------------------------------------------


def test_the_log_is_bounded_and_read_across_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    with LogBook(path, max_bytes=100) as book:
        for number in range(12):
            book.write(f"line {number:03} ........\n")  # 18 bytes each, five a file
    assert path.stat().st_size <= 100
    assert (tmp_path / "node.log.1").stat().st_size <= 100
    assert last_lines(path, 4) == [f"line {number:03} ........" for number in range(8, 12)]
    assert last_lines(tmp_path / "none.log", 4) == []


def test_following_goes_on_after_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    with LogBook(path, max_bytes=60) as book:
        book.write("before\n")
        lines = new_lines(path)
        assert next(lines) is None
        book.write("one\n")
        assert next(lines) == "one"
        book.write("half")
        assert next(lines) is None
        book.write(" and half\n")
        assert next(lines) == "half and half"
        assert next(lines) is None
        book.write("x" * 50 + "\n")
        assert next(lines) is None  # sees the turn
        assert next(lines) == "x" * 50
        lines.close()  # type: ignore[attr-defined]


# --- leases by the local clock -----------------------------------------------------------------------

LEASE = Lease(
    LeaseId(b"l" * 16),
    PlanId(b"p" * 32),
    Window(0, 1, 0, 4),
    0,
    3,
    "HELD",
    "stored",
    SignedDocument("claim", b"", SigningKey(b"k" * 32).public, b""),
    60.0,
    90.0,
    (),
)


def test_a_lease_counts_from_when_the_renewal_was_sent() -> None:
    clock = LeaseClock.start(LEASE, 100.0)
    assert (clock.deadline, clock.loading_deadline) == (160.0, 190.0)
    clock.renew(LeaseStatus(LEASE.id, 3, "LOADED", 60.0), 120.0)
    clock.renew(LeaseStatus(LEASE.id, 3, "LOADED", 60.0), 110.0)  # an answer that was overtaken
    assert (clock.deadline, clock.state) == (180.0, "LOADED")
    clock.renew(LeaseStatus(LEASE.id, 2, "ENDED", 0.0), 130.0)  # of an older epoch
    assert (clock.epoch, clock.state) == (3, "LOADED")
    assert not clock.lapsed(180.0 + GRACE_S, called=False)
    assert clock.lapsed(180.1 + GRACE_S, called=False)
    assert not clock.lapsed(1e6, called=True)  # the market is silent, a backbone calls on


def test_heartbeats_hurry_only_while_a_proving_call_is_awaited() -> None:
    rng, clock = Random(1), LeaseClock.start(LEASE, 0.0)
    calm = [next_beat_s([clock], every_s=20.0, hurries=0, rng=rng) for _ in range(100)]
    assert 18.0 <= min(calm) < 19.0
    assert 21.0 < max(calm) <= 22.0
    clock.state = "LOADED"
    assert next_beat_s([clock], every_s=20.0, hurries=0, rng=rng) <= 2.2
    assert next_beat_s([clock], every_s=20.0, hurries=HURRIES, rng=rng) >= 18.0


# --- receipts ----------------------------------------------------------------------------------------


class Chain:
    """A backbone that signs a chain of receipts for one device."""

    def __init__(self) -> None:
        self.root, self.key = SigningKey.generate(), SigningKey.generate()
        self.device, self.wallet = SigningKey.generate(), SigningKey.generate()
        self.certificate = self.certify(self.key, 1)
        self.last: Receipt | None = None

    def certify(self, key: SigningKey, serial: int) -> Certificate:
        return issue_certificate(
            self.root, role="backbone", id=b"b" * 16, serial=serial, ed25519=key.public,
            x25519=ExchangeKey.generate().public, now=NOW,
        )  # fmt: skip

    def next(self, carried: int, **changes: object) -> SignedDocument:
        receipt = Receipt(
            swarm=self.root.public,
            backbone=BackboneId(b"b" * 16),
            device=self.device.public,
            wallet=self.wallet.public,
            sequence=1 if self.last is None else self.last.sequence + 1,
            issued_at=NOW + 1,
            bytes=carried,
            calls=carried // 100,
            leases=(),
            call_root=bytes(32),
            previous=bytes(32) if self.last is None else self.last.digest,
        )
        document = sign_receipt(replace(receipt, **changes), self.key)  # type: ignore[arg-type]
        self.last = replace(receipt, document=document)
        return document

    def book(self, folder: Path) -> ReceiptBook:
        return ReceiptBook(folder, root=self.root.public, device=self.device)

    def accept(self, book: ReceiptBook, document: SignedDocument) -> SignedDocument:
        return book.accept(document, self.certificate, wallet=self.wallet.public)


def test_receipts_are_kept_countersigned_and_prove_the_balance_alone(tmp_path: Path) -> None:
    chain = Chain()
    book = chain.book(tmp_path)
    documents = [chain.next(1_500_000), chain.next(2_500_000)]
    acks = [chain.accept(book, document) for document in documents]
    assert [open_acknowledgement(ack, chain.device.public) for ack in acks] == [d.digest for d in documents]
    again = chain.accept(book, documents[1])
    assert again == acks[1]
    chain.key = SigningKey.generate()
    chain.certificate = chain.certify(chain.key, 2)  # the backbone renews its key: the chain goes on
    last = chain.next(3_500_000)
    chain.accept(chain.book(tmp_path), last)
    (balance,) = read_balances(tmp_path, chain.root.public, verify=True)
    assert (balance.bytes, balance.calls, balance.receipts, balance.gaps) == (3_500_000, 35_000, 3, 0)
    assert str(balance.credit) == "3.5"
    assert balance.wallet == chain.wallet.public
    reopened = chain.book(tmp_path)
    assert reopened.balances() == (balance,)
    (ack,) = reopened.acknowledgements()
    assert open_acknowledgement(ack, chain.device.public) == last.digest


def test_a_receipt_that_does_not_hold_is_not_signed(tmp_path: Path) -> None:
    chain = Chain()
    book = chain.book(tmp_path)
    first = chain.next(1_000_000)
    chain.accept(book, first)
    good = chain.last
    for changes, error in [
        ({"sequence": 1}, Refused),
        ({"bytes": 999_999}, Refused),
        ({"previous": b"f" * 32}, Refused),
        ({"device": SigningKey.generate().public}, IdentityError),
        ({"wallet": SigningKey.generate().public}, IdentityError),
        ({"swarm": SigningKey.generate().public}, IdentityError),
    ]:
        chain.last = good
        with pytest.raises(error):
            chain.accept(book, chain.next(2_000_000, **changes))
    with pytest.raises(IdentityError):
        chain.accept(book, sign_document("receipt", {}, SigningKey.generate()))
    assert book.balances()[0].bytes == 1_000_000


def test_missed_receipts_are_counted_not_refused(tmp_path: Path) -> None:
    chain = Chain()
    book = chain.book(tmp_path)
    chain.accept(book, chain.next(1_000_000))
    chain.next(2_000_000)  # never arrives
    chain.accept(book, chain.next(3_000_000))
    (balance,) = read_balances(tmp_path, chain.root.public, verify=True)
    assert (balance.bytes, balance.gaps, balance.sequence) == (3_000_000, 1, 3)


def test_a_torn_record_is_cut_off_and_a_forged_one_found(tmp_path: Path) -> None:
    chain = Chain()
    chain.accept(chain.book(tmp_path), chain.next(1_000_000))
    (path,) = tmp_path.glob("*.receipts")
    whole = path.read_bytes()
    path.write_bytes(whole + (8 << 20).to_bytes(4, "big"))
    with pytest.raises(ConfigError, match="damaged"):
        read_balances(tmp_path, chain.root.public)
    path.write_bytes(whole + (500).to_bytes(4, "big") + b"torn")
    book = chain.book(tmp_path)
    assert path.read_bytes() == whole
    chain.accept(book, chain.next(2_000_000))
    assert read_balances(tmp_path, chain.root.public)[0].bytes == 2_000_000
    data = bytearray(path.read_bytes())
    data[-10] ^= 1  # within the last signature
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="does not verify"):
        read_balances(tmp_path, chain.root.public)

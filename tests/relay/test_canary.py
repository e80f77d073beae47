"""What a relay's own process and the wire hold of what peers say: nothing. A real process, looked into."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from relay.channel import Channel
from relay.frames import MAX_PACKET
from relay.operator import load_key
from relay.secure import SecureSession
from relay.transport import RelayClient
from tests.support.relays import FAST, Device
from tests.support.standalone import certify_folder, free_port, swarm_page
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="optional: /proc/PID/mem is Linux's"
)
READ_BYTES = 1 << 24


@asynccontextmanager
async def talking(folder: Path) -> AsyncIterator[tuple[int, int, Device, SecureSession]]:
    """A relay's process and a session through it: pid and port, the device (which echoes), the session."""
    async with swarm_page() as page, aiohttp.ClientSession() as http:
        certify_folder(page.swarm, folder)
        key, port, device = load_key(folder).signing.public, free_port(), Device()
        command = ("-m", "relay.cli", "run", page.link, "--host", "127.0.0.1", "--port", str(port))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--state-dir", str(folder), stderr=asyncio.subprocess.DEVNULL
        )

        async def serve(channel: Channel) -> None:
            session = await page.swarm.accept(channel, device)
            while True:
                await session.send(await session.receive())

        def client(signing: object, role: str, **options: object) -> RelayClient:
            async def ticket() -> object:
                return page.swarm.ticket(signing.public, role, relay=key)  # type: ignore[attr-defined, arg-type]

            return RelayClient(
                f"http://127.0.0.1:{port}",
                signing,  # type: ignore[arg-type]
                role=role,  # type: ignore[arg-type]
                root=page.swarm.root,
                ticket=ticket,  # type: ignore[arg-type]
                start_generation=1,
                config=FAST,
                http=http,
                **options,  # type: ignore[arg-type]
            )

        backbone = client(page.swarm.backbone.key, "backbone")
        answering = client(device.key, "device", on_circuit=serve)
        tasks = [asyncio.create_task(answering.run()), asyncio.create_task(backbone.run())]
        try:
            await answering.wait_connected(30.0)
            await backbone.wait_connected(30.0)
            channel = await backbone.open(device.key.public, timeout=5.0)
            yield process.pid, port, device, await page.swarm.connect(channel, device)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            process.terminate()
            await process.wait()


async def _say(session: SecureSession, canary: bytes) -> None:
    """The canary in messages of every kind: one record, many records, both ways."""
    for message in (canary, canary * 1_000, canary * (3 * MAX_PACKET // len(canary))):
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(session.send(message))
            assert await session.receive() == message


def _holds(pid: int, *needles: bytes) -> list[bool]:
    """Which of the needles are anywhere in the writable memory of a process."""
    found = [False] * len(needles)
    with (
        Path(f"/proc/{pid}/maps").open(encoding="ascii") as maps,
        Path(f"/proc/{pid}/mem").open("rb", 0) as memory,
    ):
        for line in maps:
            span, rights, *_ = line.split()
            if not rights.startswith("rw") or "[vvar" in line:
                continue
            start, end = (int(edge, 16) for edge in span.split("-"))
            try:
                for at in range(start, end, READ_BYTES):
                    memory.seek(at)
                    data = memory.read(min(READ_BYTES + 4_096, end - at))
                    found = [seen or needle in data for seen, needle in zip(found, needles, strict=True)]
            except OSError:
                continue  # a mapping that cannot be read
    return found


async def test_the_memory_of_a_relay_never_holds_what_is_said(tmp_path: Path) -> None:
    canary = secrets.token_bytes(32)
    async with talking(tmp_path) as (pid, _, device, session):
        for _ in range(3):
            await _say(session, canary)
            try:
                held, sees = await asyncio.to_thread(_holds, pid, canary, bytes(device.key.public))
            except PermissionError:
                pytest.skip("optional: this user may not read another process's memory")
            assert sees, "the search finds what the relay does know"
            assert not held


async def test_a_capture_of_the_wire_never_holds_what_is_said(tmp_path: Path) -> None:
    canary, packets = secrets.token_bytes(32), bytearray()
    try:
        capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    except PermissionError:
        pytest.skip("optional: capturing needs CAP_NET_RAW")
    with capture:
        capture.bind(("lo", 0))
        capture.settimeout(0.2)
        capture.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                try:
                    packets.extend(capture.recv(1 << 17))
                except TimeoutError:
                    continue

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            async with talking(tmp_path) as (_, port, _, session):
                await _say(session, canary)
                upgrade = f"GET /relay/v1 HTTP/1.1\r\nHost: 127.0.0.1:{port}".encode()
                await until(lambda: upgrade in packets)
                await until(lambda: len(packets) > 4 * MAX_PACKET)
        finally:
            stop.set()
            listener.join()
    assert canary not in packets

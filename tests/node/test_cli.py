"""The `kvasir-node` command: real processes, signals, exit statuses, what the owner reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvasir_node.cli import _parser as parser
from kvasir_node.cli import config_of, default_state_dir, main
from relay.errors import ConfigError
from relay.identity import address_of
from tests.support.node_swarm import NodeSwarm, node_swarm
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[NodeSwarm]:
    async with node_swarm(tmp_path) as made:
        await made.publish()
        yield made


async def command(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str, str]:
    """Run `kvasir-node` to its end: (exit status, standard output, standard error)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvasir_node.cli", *arguments, cwd=ROOT, env={**os.environ, **environment},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class Daemon:
    """A `kvasir-node run` process and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, object]] = []

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            assert line.startswith(b"{"), (line, await self.process.stderr.read())
            self.lines.append(json.loads(line))

    def events(self) -> list[object]:
        return [line["event"] for line in self.lines]


@asynccontextmanager
async def daemon(swarm: NodeSwarm, folder: Path, *extra: str, loop: str = "") -> AsyncIterator[Daemon]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvasir_node.cli", "run", swarm.link.text, "--state-dir", str(folder),
        "--budget", "10MB", "--reserve-bytes", "0", *extra,
        cwd=ROOT, env={**os.environ, "KVASIR_LOOP": loop}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = Daemon(process)
    reading = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(10):
            await process.wait()
            await reading


async def all_proven(swarm: NodeSwarm, count: int = 2) -> None:
    """Prove what the node loads, until `count` windows are."""
    proven: set[bytes] = set()

    async def done() -> bool:
        for lease in await swarm.leases("LOADED"):
            if lease.lease not in proven:
                await (await swarm.prove(lease)).session.close()
                proven.add(lease.lease)
        return len(proven) >= count

    await until(done, timeout=40.0, what="windows loaded by the process")


async def test_run_status_credits_logs_and_a_clean_end(swarm: NodeSwarm, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    state = ("--state-dir", str(folder))
    async with daemon(swarm, folder, "--name", "den") as running:
        await all_proven(swarm)
        (lease, _) = await swarm.leases("PROVEN")
        session = await swarm.call_node(lease)
        await session.check()
        await session.pay(1_234_000)

        async def serving() -> bool:
            status, out, _ = await command("status", *state, "--json")
            return status == 0 and json.loads(out)["phase"] == "serving"

        await until(serving, timeout=20.0, what="serving, by kvasir-node status")
        _, out, _ = await command("status", *state)
        assert out.startswith("den: serving, reachable")
        assert lease.window.name in out
        assert address_of(lease.wallet) in out
        status, out, _ = await command("credits", *state)
        assert status == 0
        assert "this device's receipts prove 1.234 credits" in out
        assert f"the market says of wallet {address_of(lease.wallet)}: 1.234 credits" in out
        status, out, _ = await command("credits", *state, "--json", "--verify", "--offline")
        assert json.loads(out)[0]["receipts"][0]["bytes"] == 1_234_000
        status, out, _ = await command("logs", *state, "-n", "1000")
        logged = [json.loads(line) for line in out.splitlines()]
        assert {"node.started", "claim.granted", "window.loaded"} <= {line["event"] for line in logged}
        assert all(line["node"] == "den" for line in logged)
        running.process.send_signal(signal.SIGTERM)
        assert await session.drained() == "the owner stopped the node"
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0
    assert await swarm.leases() == []
    assert running.events()[-1] == "node.stopped"
    assert (await command("status", *state))[0] == 1


async def test_a_killed_node_comes_back_without_fetching_again(swarm: NodeSwarm, tmp_path: Path) -> None:
    async with daemon(swarm, tmp_path / "node") as running:
        await all_proven(swarm)
        running.process.kill()
    served = swarm.weights.bytes_served
    old = {lease.lease for lease in await swarm.leases()}
    async with daemon(swarm, tmp_path / "node") as running:

        async def replaced() -> bool:
            leases = await swarm.leases("LOADED")
            return bool(leases) and not old & {lease.lease for lease in await swarm.leases()}

        await until(replaced, timeout=30.0, what="new leases instead of the old start's")
        await all_proven(swarm)
    assert swarm.weights.bytes_served == served


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
async def test_a_terminal_shows_phases_and_the_file_gets_the_log(swarm: NodeSwarm, tmp_path: Path) -> None:
    import pty

    own, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvasir_node.cli", "run", swarm.link.text, "--state-dir", str(tmp_path / "n"),
        "--budget", "10MB", "--reserve-bytes", "0", cwd=ROOT, stderr=theirs, stdin=theirs,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = bytearray()

    def look() -> None:
        with contextlib.suppress(OSError):
            shown.extend(os.read(own, 65536))

    loop = asyncio.get_running_loop()
    loop.add_reader(own, look)
    try:
        await all_proven(swarm)
        await until(lambda: b"serving ..." in shown, timeout=20.0, what="the phase on the terminal")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        loop.remove_reader(own)
        os.close(own)
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = shown.decode()
    for expected in ("volunteering ...", "is proven and serves", "tiny", "reachable", "draining ..."):
        assert expected in text
    assert '"event"' not in text
    events = [json.loads(line)["event"] for line in (tmp_path / "n" / "node.log").read_text().splitlines()]
    assert events[-1] == "node.stopped"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_a_second_signal_ends_at_once(swarm: NodeSwarm, tmp_path: Path) -> None:
    async with daemon(swarm, tmp_path / "node") as running:
        await all_proven(swarm, 1)
        await swarm.stop_market()
        async with deaf_server(swarm.market_site.port):  # leaving in order now waits for answers
            running.process.send_signal(signal.SIGINT)
            await until(lambda: "node.draining" in running.events(), what="the drain begun")
            running.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(4):
                assert await running.process.wait() == 130


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_leaving_has_a_deadline_when_the_market_is_deaf(swarm: NodeSwarm, tmp_path: Path) -> None:
    async with daemon(swarm, tmp_path / "node") as running:
        await all_proven(swarm, 1)
        await swarm.stop_market()
        async with deaf_server(swarm.market_site.port):
            running.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await running.process.wait() == 0


@asynccontextmanager
async def deaf_server(port: int) -> AsyncIterator[None]:
    """Takes connections on `port` and never answers."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(
        lambda reader, writer: writers.append(writer), "127.0.0.1", port, reuse_address=True
    )
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_stop_ends_a_node_on_the_default_loop(swarm: NodeSwarm, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    async with daemon(swarm, folder, loop="default") as running:
        await all_proven(swarm, 1)
        assert (await command("stop", "--state-dir", str(folder)))[0] == 0
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0


async def test_the_wallet_may_stay_elsewhere(swarm: NodeSwarm, tmp_path: Path) -> None:
    node, home = tmp_path / "node", tmp_path / "home.json"
    status, out, _ = await command("wallet", "--create", "--wallet", str(home))
    assert status == 0
    address = out.splitlines()[0]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvasir_node.cli", "login", swarm.link.text, "--state-dir", str(node),
        "--address", address, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    text = b""
    async with asyncio.timeout(30):
        while b"urn:kvasir:scope:" not in text:
            text += await process.stdout.readline()
        status, signature, _ = await command("wallet", "--sign", "--wallet", str(home), stdin=text.decode())
        assert status == 0
        out, _ = await process.communicate(signature.encode())
    assert process.returncode == 0
    assert f"may serve for wallet {address}" in out.decode()
    assert not (node / "wallet.json").exists()
    async with daemon(swarm, node):
        await all_proven(swarm, 1)
        (lease, *_) = await swarm.leases("PROVEN")
        assert address_of(lease.wallet) == address


async def test_login_then_run_with_a_named_wallet(swarm: NodeSwarm, tmp_path: Path) -> None:
    wallet = tmp_path / "id.json"
    secret = {"KVASIR_WALLET_PASSPHRASE": "a long passphrase"}
    status, out, _ = await command("wallet", "--create", "--encrypt", "--wallet", str(wallet), **secret)
    assert status == 0
    arguments = ("login", swarm.link.text, "--state-dir", str(tmp_path / "node"), "--wallet", str(wallet))
    assert (await command(*arguments))[0] == 2  # encrypted, and nobody to ask
    status, said, _ = await command(*arguments, **secret)
    assert status == 0
    assert out.splitlines()[0] in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "ftp://x"], "not a join link"),
        (["run", "http://127.0.0.1:1", "--threads", "0"], "--threads"),
        (["run", "http://127.0.0.1:1", "--budget", "9999999GB"], "more than this machine"),
        (["run", "http://127.0.0.1:1", "--wallet", "/nowhere/id.json"], "--wallet"),
        (["wallet"], "wallet --create"),
        (["credits"], "knows no swarm"),
        (["logs"], "no node has run there yet"),
    ],
)
async def test_what_the_owner_must_mend_ends_with_status_two(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    if "/nowhere/id.json" in arguments:
        async with node_swarm(tmp_path / "swarm") as swarm:
            arguments[1] = swarm.link.text
            status, _, err = await command(*arguments, "--state-dir", str(tmp_path / "n"))
    else:
        status, _, err = await command(*arguments, "--state-dir", str(tmp_path / "n"))
    assert status == 2
    assert expected in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.skipif(os.name != "posix", reason="POSIX file modes")
async def test_a_key_that_others_can_read_is_refused(swarm: NodeSwarm, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    await command("wallet", "--create", "--state-dir", str(folder))
    (folder / "wallet.json").chmod(0o644)
    status, _, err = await command("run", swarm.link.text, "--state-dir", str(folder), "--reserve-bytes", "0")
    assert status == 2
    assert "chmod 600" in err.splitlines()[-1]


def test_bad_sizes_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "http://127.0.0.1:1", "--budget", "lots"])
    assert end.value.code == 2
    assert "not a size" in capsys.readouterr().err


def test_nobody_home_is_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == 1
    assert "kvasir-node run JOINLINK" in capsys.readouterr().err


def test_arguments_and_environment_become_the_configuration(tmp_path: Path) -> None:
    arguments = parser().parse_args(
        ["run", "http://h:1", "--state-dir", str(tmp_path), "--budget", "4GB", "--precision", "int8",
         "--mirror", "https://a", "--mirror", "https://b", "--no-hub", "--cache-bytes", "1TiB"]
    )  # fmt: skip
    config = config_of(arguments, {"HF_TOKEN": "t", "HF_ENDPOINT": "https://hub"})
    assert (config.budget_bytes, config.precision, config.cache_bytes) == (4 * 10**9, "int8", 2**40)
    assert (config.mirrors, config.hub) == (("https://a", "https://b"), False)
    assert (config.hub_token, config.hub_endpoint) == ("t", "https://hub")
    assert "t'" not in repr(config)
    with pytest.raises(ConfigError):
        config_of(parser().parse_args(["run", "nonsense"]), {})


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_DATA_HOME": "/d"}, "/d/kvasir/node"),
        ("linux", {}, str(Path.home() / ".local/share/kvasir/node")),
        ("darwin", {}, str(Path.home() / "Library/Application Support/kvasir/node")),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/kvasir/node"),
        ("linux", {"KVASIR_NODE_STATE": "/s"}, "/s"),
    ],
)
def test_the_state_folder_of_each_system(platform: str, environment: dict[str, str], expected: str) -> None:
    assert default_state_dir(environment, platform) == Path(expected)

"""The stand-alone relay: its keys, its market, its command as a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from relay import cli, daemon
from relay.config import RelayConfig
from relay.errors import ConfigError, IdentityError, Unreachable
from relay.identity import SigningKey, address_of, unpack
from relay.links import JoinLink
from relay.operator import load_certificate, load_key
from relay.transport import RelayClient
from tests.support.relays import FAST, Swarm
from tests.support.standalone import certify_folder, free_port, swarm_page
from tests.support.waiting import until


async def test_a_stand_alone_relay_serves_announces_itself_and_ends_in_order(tmp_path: Path) -> None:
    async with swarm_page() as page, aiohttp.ClientSession() as http:
        certify_folder(page.swarm, tmp_path)
        port, stop = free_port(), asyncio.Event()
        config = RelayConfig(
            host="127.0.0.1",
            port=port,
            market_url=page.link,
            public_url=f"http://127.0.0.1:{port}",
            state_dir=tmp_path,
            market_poll_s=0.05,
            drain_s=0.1,
        )
        serving = asyncio.create_task(daemon.run(config, stop=stop))
        await until(lambda: len(page.announced) >= 2)
        assert page.announced[0] == ("relay", config.public_url)
        relay_key = load_key(tmp_path).signing.public
        key = SigningKey.generate()

        async def ticket() -> object:
            return page.swarm.ticket(key.public, "device", relay=relay_key)

        client = RelayClient(
            config.public_url,
            key,
            role="device",
            root=page.swarm.root,
            ticket=ticket,  # type: ignore[arg-type]
            start_generation=1,
            config=FAST,
            http=http,
        )
        running = asyncio.create_task(client.run())
        await client.wait_connected(5.0)
        text = await (await http.get(f"{config.public_url}/metrics")).text()
        assert 'kvasir_relay_peers{role="device"} 1' in text
        health = await (await http.get(f"{config.public_url}/health")).json()
        assert health["market_reachable"] is True
        page.up = False

        async def market_lost() -> bool:
            body = await (await http.get(f"{config.public_url}/health")).json()
            return body["market_reachable"] is False

        await until(market_lost)
        stop.set()
        await asyncio.wait_for(serving, 10.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_newer_certificate_on_disk_is_taken(tmp_path: Path) -> None:
    async with swarm_page() as page, aiohttp.ClientSession() as http:
        certify_folder(page.swarm, tmp_path, serial=1)
        port, stop = free_port(), asyncio.Event()
        config = RelayConfig(
            host="127.0.0.1", port=port, market_url=page.link, state_dir=tmp_path, market_poll_s=0.02
        )
        serving = asyncio.create_task(daemon.run(config, stop=stop))
        await until(lambda: _listens(port))
        certify_folder(page.swarm, tmp_path, serial=7)

        async def renewed() -> bool:
            from relay.frames import decode
            from relay.messages import Hello

            async with http.ws_connect(f"http://127.0.0.1:{port}/relay/v1") as peer:
                hello = Hello.from_bytes(decode((await peer.receive()).data)[2])
            return bool(unpack(hello.certificate.body)["serial"] == 7)

        await until(renewed)
        stop.set()
        await asyncio.wait_for(serving, 10.0)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_market_that_is_none_is_told_apart() -> None:
    async with swarm_page() as page, aiohttp.ClientSession() as http:
        other = daemon.MarketLink(JoinLink(page.url, Swarm().root), http)
        with pytest.raises(IdentityError):
            await other.look()
        link = daemon.MarketLink(JoinLink(page.url, page.swarm.root), http)
        assert list(link.keys()) == []
        await link.look()
        assert list(link.keys()) == [page.swarm.market.key.public]
        assert link.reachable()
        page.up = False
        with pytest.raises(Unreachable, match="503"):
            await link.look()
        assert not link.reachable()
        assert list(link.keys()) == [page.swarm.market.key.public]
        elsewhere = daemon.MarketLink(JoinLink("http://127.0.0.1:1", page.swarm.root), http)
        with pytest.raises(Unreachable, match="does not answer"):
            await elsewhere.look()


async def test_a_renewed_market_key_and_the_one_before_count() -> None:
    async with swarm_page() as page, aiohttp.ClientSession() as http:
        link = daemon.MarketLink(JoinLink(page.url, page.swarm.root), http)
        keys = []
        for serial in (1, 2, 3):
            page.swarm.market = page.swarm.certify("market", serial=serial)
            keys.append(page.swarm.market.key.public)
            await link.look()
        assert set(link.keys()) == set(keys[1:])


def test_keys_without_a_usable_certificate(tmp_path: Path) -> None:
    swarm, now = Swarm(), time.time()
    key = load_key(tmp_path)
    assert load_key(tmp_path).signing.public == key.signing.public
    with pytest.raises(ConfigError, match="certify"):
        load_certificate(tmp_path, key, root=swarm.root, now=now)
    certify_folder(swarm, tmp_path)
    assert load_certificate(tmp_path, key, root=swarm.root, now=now).ed25519 == key.signing.public
    with pytest.raises(IdentityError):
        load_certificate(tmp_path, key, root=Swarm().root, now=now)
    with pytest.raises(IdentityError, match="expired"):
        load_certificate(tmp_path, key, root=swarm.root, now=now + 31 * 86_400)
    other = tmp_path / "other"
    other.mkdir()
    (other / "relay.cert").write_bytes((tmp_path / "relay.cert").read_bytes())
    with pytest.raises(IdentityError, match="not of the key"):
        load_certificate(other, load_key(other), root=swarm.root, now=now)
    (tmp_path / "relay.cert").write_bytes(b"junk")
    with pytest.raises(IdentityError, match="not a certificate"):
        load_certificate(tmp_path, key, root=swarm.root, now=now)
    (tmp_path / "relay.key").write_bytes(b"junk")
    with pytest.raises(IdentityError, match="not a relay's key file"):
        load_key(tmp_path)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(tmp_path)]
    root = address_of(Swarm().root)
    assert cli.main(["run", "http://127.0.0.1:1", *state]) == 2
    assert "#SWARM" in capsys.readouterr().err
    assert cli.main(["run", f"http://127.0.0.1:1#{root}", *state]) == 2
    assert "relay.cert is missing" in capsys.readouterr().err
    assert cli.main(["run", "nonsense", *state]) == 2
    assert cli.main(["run", f"http://127.0.0.1:1#{root}", *state, "--port", "99999"]) == 2
    capsys.readouterr()
    assert cli.main(["request", *state]) == 0
    assert capsys.readouterr().out.strip() == load_key(tmp_path).request()


async def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    swarm = Swarm()
    certify_folder(swarm, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = RelayConfig(
            host="127.0.0.1",
            port=taken.getsockname()[1],
            market_url=JoinLink("http://127.0.0.1:1", swarm.root).text,
            state_dir=tmp_path,
        )
        with pytest.raises(ConfigError, match="--port"):
            await daemon.run(config)


@pytest.mark.skipif(sys.platform == "win32", reason="optional: POSIX signals")
async def test_the_command_as_a_process_ends_in_order_on_sigterm(tmp_path: Path) -> None:
    async with swarm_page() as page:
        certify_folder(page.swarm, tmp_path)
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "relay.cli",
            "run",
            page.link,
            "--state-dir",
            str(tmp_path),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"KVASIR_LOOP": "default"},
        )
        try:
            assert process.stderr is not None
            lines = []
            async with asyncio.timeout(20.0):
                while not lines or lines[-1]["event"] != "relay.listening":
                    lines.append(json.loads(await process.stderr.readline()))
                assert lines[-1]["address"] == f"127.0.0.1:{port}"
                assert lines[-1]["component"] == "relay"
                process.send_signal(signal.SIGTERM)
                rest = (await process.stderr.read()).decode()
                assert await process.wait() == 0
            assert "relay.draining" in rest
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_a_relay_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="--state-dir"):
        asyncio.run(daemon.run(RelayConfig()))
    with pytest.raises(ConfigError):
        RelayConfig(public_url="host:1")

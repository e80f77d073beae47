"""The node's own door: where it listens, what it announces, whom it lets in."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
import pytest
import structlog

from kvasir_node import listening
from kvasir_node.config import NodeConfig, parse_endpoint
from kvasir_node.listening import RULES, Listener, interface_addresses
from relay.channel import Channel
from relay.direct import connect_direct
from relay.errors import ConfigError, Unreachable
from relay.identity import PublicKey, SigningKey
from relay.links import JoinLink
from tests.support.waiting import until

KEY = SigningKey(bytes(range(32))).public


def config(folder: Path, **changes: object) -> NodeConfig:
    return NodeConfig(join=JoinLink("http://127.0.0.1:1", None), state_dir=folder, **changes)  # type: ignore[arg-type]


async def echo(channel: Channel) -> None:
    while True:
        await channel.send(bytes(await channel.receive()))


def listener(folder: Path, *, local: bool = True, **changes: object) -> Listener:
    return Listener(config(folder, **changes), on_channel=echo, key=KEY, local=local)


def reached(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        return probe.connect_ex((address, port)) == 0


async def test_with_the_market_on_this_machine_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    async with listener(tmp_path) as door, aiohttp.ClientSession() as http:
        (url,) = door.addresses()
        assert url == f"http://127.0.0.1:{door.port}"
        channel = await connect_direct(url, KEY, http=http, timeout=5)
        await channel.send(b"packet")
        assert bytes(await channel.receive()) == b"packet"
        assert not any(reached(address, door.port) for address in interface_addresses())
        await channel.close()
    assert door.addresses() == ()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(Unreachable):
            await connect_direct(url, KEY, http=http, timeout=5)


async def test_otherwise_every_address_of_this_machine_is_announced_but_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening.discovery, "available", lambda: False)
    async with listener(tmp_path, local=False) as door, aiohttp.ClientSession() as http:
        assert door.addresses() == tuple(
            f"http://[{text}]:{door.port}" if ":" in text else f"http://{text}:{door.port}"
            for text in interface_addresses()
        )
        for url in door.addresses():
            assert "127.0.0.1" not in url
            await (await connect_direct(url, KEY, http=http, timeout=5)).close()


async def test_without_direct_links_there_is_no_listener(tmp_path: Path) -> None:
    async with listener(tmp_path, direct=False) as door:
        assert door.port == 0
        assert door.addresses() == ()


async def test_the_public_address_is_announced_first_and_only_if_the_owner_gives_one(tmp_path: Path) -> None:
    async with listener(tmp_path, public_address="8.8.8.8:9000") as door:
        assert door.addresses()[0] == "http://8.8.8.8:9000"
        assert door.addresses()[1] == f"http://127.0.0.1:{door.port}"


async def test_an_address_that_is_taken_is_an_error_only_if_the_owner_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="--listen"):
            await listener(tmp_path, listen=address).__aenter__()
        monkeypatch.setattr(listening, "_bound", _no_socket)
        with structlog.testing.capture_logs() as logs:
            async with listener(tmp_path) as door:
                assert door.addresses() == ()
        assert [line["event"] for line in logs] == ["listener.unavailable"]


def _no_socket(host: str, port: int) -> socket.socket:
    raise OSError("no sockets left")


async def test_one_address_gets_only_so_many_connections(tmp_path: Path) -> None:
    async with listener(tmp_path) as door:
        made = [
            await asyncio.open_connection("127.0.0.1", door.port) for _ in range(RULES.address_connections)
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        assert b"429" in await asyncio.wait_for(reader.read(100), 5)
        writer.close()
        for _, one in made:
            one.close()

        async def let_in() -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(b"GET /session/v1 HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(100), 5)
            writer.close()
            return b" 426 " in answer  # a place is free again: the request is answered

        await until(let_in, what="a free place")


async def test_it_is_announced_on_the_lan_anew_at_each_address_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[PublicKey, int, tuple[str, ...]]] = []
    addresses = ["192.168.1.7"]

    class Recorder:
        def __init__(self, key: PublicKey, port: int, addresses: list[str]) -> None:
            self._what = (key, port, tuple(addresses))

        async def __aenter__(self) -> Recorder:
            announced.append(self._what)
            return self

        async def __aexit__(self, *_: object) -> None:
            announced.remove(self._what)

    monkeypatch.setattr(listening.discovery, "available", lambda: True)
    monkeypatch.setattr(listening.discovery, "Announcer", Recorder)
    monkeypatch.setattr(listening, "interface_addresses", lambda: list(addresses))
    monkeypatch.setattr(listening, "LOOK_S", 0.01)
    async with listener(tmp_path, local=False) as door:
        task = asyncio.create_task(door.announce())
        await until(lambda: announced == [(KEY, door.port, ("192.168.1.7",))], what="the announcement")
        addresses[:] = ["192.168.1.8"]
        await until(lambda: announced == [(KEY, door.port, ("192.168.1.8",))], what="the new address")
        task.cancel()
        await asyncio.wait([task])
        assert announced == []
    async with listener(tmp_path, local=True) as door:
        await door.announce()
        assert announced == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.0.0.0:9000", ("0.0.0.0", 9000)), ("[::]:9000", ("::", 9000)), ("127.0.0.1:0", ("127.0.0.1", 0))],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    "text", ["", "9000", ":9000", "home:9000", "::1:9000", "[1.2.3.4]:9000", "1.2.3.4:x"]
)
def test_texts_that_are_no_endpoints(text: str) -> None:
    with pytest.raises(ConfigError, match="ADDRESS:PORT"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"direct": False, "listen": "0.0.0.0:9000"},
        {"direct": False, "public_address": "8.8.8.8:9000"},
        {"public_address": "8.8.8.8:443"},
        {"public_address": "my.home.example:9000"},
        {"listen": "everywhere"},
    ],
)
def test_settings_that_contradict_themselves(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config(tmp_path, **wrong)

from __future__ import annotations

import pytest

from relay.errors import ConfigError
from relay.identity import SigningKey
from relay.links import JoinLink, parse_join_link


def test_a_link_comes_back_as_it_was() -> None:
    root = SigningKey.generate().public
    link = JoinLink("http://192.168.1.5:8420", root)
    assert parse_join_link(link.text) == link
    assert parse_join_link(f"  {link}\n") == link


def test_without_a_root_nothing_is_pinned() -> None:
    assert parse_join_link("https://swarm.example/") == JoinLink("https://swarm.example", None)
    assert parse_join_link("http://[::1]:8420#") == JoinLink("http://[::1]:8420", None)


def test_a_path_prefix_stays() -> None:
    assert parse_join_link("https://Example.org/kvasir/").url == "https://example.org/kvasir"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:8420",
        "ftp://host",
        "http://",
        "http://user:secret@host:1",
        "http://host:99999",
        "http://host:0",
        "http://host?x=1",
        "http://host:1#not-a-key",
        "http://host:1#" + "1" * 32,  # the all-zero key has small order
        "http://host :1",
        "http://host\r\nX: y",
    ],
)
def test_anything_else_is_refused_with_words(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_join_link(text)

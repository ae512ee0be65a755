"""Parsing of redis.url, and the errors for invalid ones."""

from __future__ import annotations

import pytest

from async_rl.errors import ConfigError
from buffer.server.addresses import Node, parse_address


@pytest.mark.parametrize(
    ("url", "kind", "tls", "nodes"),
    [
        ("redis://host", "server", False, [Node("host", 6379)]),
        ("rediss://host:1", "server", True, [Node("host", 1)]),
        ("redis://[::1]:7", "server", False, [Node("::1", 7)]),
        ("redis://[::1]", "server", False, [Node("::1", 6379)]),
        ("redis+sentinel://a,b:5/main", "sentinel", False, [Node("a", 26379), Node("b", 5)]),
        ("rediss+sentinel://a/main", "sentinel", True, [Node("a", 26379)]),
        ("redis+cluster://a:1,[::2]:2", "cluster", False, [Node("a", 1), Node("::2", 2)]),
        ("unix:///run/redis.sock", "socket", False, []),
    ],
)
def test_every_kind_of_address(url: str, kind: str, tls: bool, nodes: list[Node]):
    found = parse_address(url)
    assert (found.kind, found.tls, list(found.nodes)) == (kind, tls, nodes)


def test_the_other_parts():
    assert parse_address("redis://me:p%40ss@host/3").db == 3
    assert parse_address("redis://host?db=4").db == 4
    assert (parse_address("redis://me:p%40ss@host").user, parse_address("redis://me:p%40ss@host").password) == ("me", "p@ss")
    assert parse_address("unix://:secret@/run/my%20redis.sock?db=2").path == "/run/my redis.sock"
    assert parse_address("redis+sentinel://a/main").master == "main"


@pytest.mark.parametrize(
    "url", ["redis://me:secret@host/1", "unix://:secret@/run/s?password=secret", "redis+cluster://:secret@a,b"]
)
def test_secrets_are_not_shown(url: str):
    assert "secret" not in parse_address(url).shown


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("host:6379", "must begin with one of"),
        ("http://host", "must begin with one of"),
        ("redis://host:port", "'port' is not a port"),
        ("redis://:6379", "a host is missing"),
        ("redis+cluster://a,,b", "a host is missing"),
        ("redis+sentinel://a:1", "the master's name is missing"),
        ("redis+cluster://a/1", "a Cluster has database 0 only"),
        ("redis://host/name", "'name' is not a database number"),
        ("redis://host?retry=5", "'retry' after the . is not known"),
        ("unix://", "the path of the socket is missing"),
    ],
)
def test_a_wrong_address_is_one_sentence_without_secrets(url: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint) as found:
        parse_address(url.replace("://", "://me:secret@", 1))
    assert str(found.value).startswith("redis.url: ")
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    ("url", "foreign"),
    [
        ("redis://localhost", []),
        ("redis://127.8.8.8", []),
        ("redis://[::1]", []),
        ("redis://0.0.0.0", ["0.0.0.0"]),
        ("redis+sentinel://localhost,10.0.0.1/main", ["10.0.0.1"]),
        ("unix:///run/redis.sock", []),
    ],
)
def test_what_is_reached_over_a_network(url: str, foreign: list[str]):
    assert parse_address(url).remote_hosts == foreign

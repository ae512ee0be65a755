"""Tables of what a Redis says of itself, and what the doctor says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from async_rl.doctor.verdict import GIB
from buffer.doctor.redis_facts import RedisFacts
from buffer.doctor.redis_rules import judge_redis

INFO: Mapping[str, Any] = {
    "redis_version": "7.0.15",
    "role": "master",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "connected_slaves": 0,
    "maxmemory_policy": "noeviction",
    "maxmemory": 8 * GIB,
    "used_memory": GIB,
}
SETTINGS = {"appendfsync": "always", "min-replicas-to-write": "0"}
SOUND = RedisFacts(
    url="rediss://redis.internal:6379",
    is_remote=True,
    tls=True,
    user="shapes-learner",
    info=INFO,
    settings=SETTINGS,
    ping_s=(0.001, 0.002, 0.001),
)


def judged(facts: RedisFacts) -> dict[str, str]:
    """Check -> level, of all that is not ok."""
    return {each.check: each.level for each in judge_redis(facts) if each.level != "ok"}


def found(facts: RedisFacts, check: str) -> str:
    (line,) = (each.line for each in judge_redis(facts) if each.check == check)
    return line


def test_a_sound_server_passes_every_check() -> None:
    assert judged(SOUND) == {}
    assert [each.check for each in judge_redis(SOUND)] == [
        *("redis", "redis persistence", "redis eviction", "redis memory", "redis access", "redis latency", "clock")
    ]


def test_a_server_that_does_not_answer_is_all_that_is_said() -> None:
    (verdict,) = judge_redis(RedisFacts(url="redis://nowhere:1", problem="no Redis has answered"))
    assert verdict.line.startswith("bad   redis: no Redis has answered — start the server, or mend redis.url")


def test_a_user_who_may_not_ask_hears_who_may() -> None:
    facts = replace(SOUND, info={}, settings={})
    assert judged(facts) == {"redis settings": "look"}
    assert "user shapes-learner may not ask for INFO and CONFIG" in found(facts, "redis settings")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"redis_version": "6.2.0"}, {}),
        ({"redis_version": "6.0.16"}, {"redis": "bad"}),
        ({"redis_version": "5.9"}, {"redis": "bad"}),
        ({"redis_version": "10.0.1"}, {}),
        ({"redis_version": "5.0", "valkey_version": "8.1.0"}, {}),
        ({"role": "slave"}, {"redis": "bad"}),
    ],
)
def test_server(info: dict[str, object], expected: dict[str, str]) -> None:
    assert judged(replace(SOUND, info={**INFO, **info})) == expected


@pytest.mark.parametrize(
    ("info", "settings", "expected"),
    [
        ({"aof_enabled": 0}, {}, {"redis persistence": "bad"}),
        ({"aof_last_write_status": "err"}, {}, {"redis persistence": "bad"}),
        ({}, {"appendfsync": "no"}, {}),
        ({}, {"appendfsync": "everysec"}, {"redis persistence": "look"}),
        ({"connected_slaves": 1}, {}, {"redis persistence": "look"}),
        ({"connected_slaves": 1}, {"min-replicas-to-write": "1"}, {}),
    ],
)
def test_persistence(info: dict[str, object], settings: dict[str, str], expected: dict[str, str]) -> None:
    assert judged(replace(SOUND, info={**INFO, **info}, settings={**SETTINGS, **settings})) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, {"redis eviction": "bad"}),
        ({"maxmemory_policy": "volatile-ttl"}, {"redis eviction": "bad"}),
        ({"maxmemory": 0}, {"redis memory": "look"}),
        ({"used_memory": 7 * GIB}, {}),
        ({"used_memory": 8 * GIB}, {"redis memory": "look"}),
    ],
)
def test_eviction_and_memory(info: dict[str, object], expected: dict[str, str]) -> None:
    assert judged(replace(SOUND, info={**INFO, **info})) == expected


def test_a_server_without_a_limit_of_memory_is_named_so() -> None:
    line = found(replace(SOUND, info={**INFO, "maxmemory": 0}), "redis memory")
    assert "1.0 GiB used, and no limit — set maxmemory" in line


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        ({}, {}, "user shapes-learner, role learner, TLS"),
        ({"tls": False}, {"redis access": "look"}, "no TLS — use rediss://"),
        ({"user": "chief"}, {"redis access": "look"}, "user chief, TLS — give each role its user"),
        ({"user": ""}, {"redis access": "look"}, "user default, TLS"),
        ({"is_remote": False, "tls": False, "user": ""}, {}, "user default, no TLS"),
        ({"is_private": True, "is_remote": False, "tls": False, "user": ""}, {}, "a socket that this user alone may open"),
    ],
)
def test_access(change: dict[str, object], expected: dict[str, str], said: str) -> None:
    facts = replace(SOUND, **change)  # pyright: ignore
    assert judged(facts) == expected
    assert said in found(facts, "redis access")


@pytest.mark.parametrize(
    ("ping_s", "expected"),
    [
        ((0.019,), {}),
        ((0.021,), {"redis latency": "look"}),
        ((0.001, 0.001, 0.5), {}),  # one slow answer is no slow server
        ((0.001, 0.5, 0.5), {"redis latency": "look"}),
    ],
)
def test_latency(ping_s: tuple[float, ...], expected: dict[str, str]) -> None:
    assert judged(replace(SOUND, ping_s=ping_s)) == expected


def test_latency_tells_the_slowest_of_a_hundred() -> None:
    line = found(replace(SOUND, ping_s=(0.001,) * 98 + (0.004, 0.25)), "redis latency")
    assert "PING takes 1.00 ms, 1 in 100 more than 4.00 ms" in line


@pytest.mark.parametrize(
    ("ahead_s", "expected", "said"),
    [
        (0.9, {}, "0.900 s ahead of that of Redis"),
        (-0.9, {}, "0.900 s behind that of Redis"),
        (1.1, {"clock": "look"}, "1.100 s ahead"),
        (-1.1, {"clock": "look"}, "1.100 s behind that of Redis — start a time service"),
    ],
)
def test_clock(ahead_s: float, expected: dict[str, str], said: str) -> None:
    facts = replace(SOUND, ahead_s=ahead_s)
    assert judged(facts) == expected
    assert said in found(facts, "clock")

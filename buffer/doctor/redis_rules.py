"""Pure: whether a run can trust this Redis (docs/redis.md says why each setting is needed)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from async_rl.doctor.verdict import Verdict, bad, in_size, look, ok
from buffer.doctor.redis_facts import RedisFacts
from buffer.server.users import run_of

OLDEST = (6, 2)
SLOW_S = 0.02
"""Each step and each group needs tens of round trips."""
SKEW_S = 1.0
ALMOST_FULL = 0.9


def judge_redis(facts: RedisFacts) -> Iterator[Verdict]:
    if facts.problem:
        yield bad("redis", facts.problem, "start the server, or mend redis.url and its credentials (docs/redis.md)")
        return
    if facts.info:
        yield _judge_server(facts)
        yield _judge_persistence(facts)
        yield _judge_eviction(facts)
        yield _judge_memory(facts)
    else:
        yield look(
            "redis settings",
            f"user {facts.user or 'default'} may not ask for INFO and CONFIG",
            "run this once as an administrator of the server",
        )
    yield _judge_access(facts)
    yield _judge_latency(facts)
    yield _judge_clock(facts)


def _judge_server(facts: RedisFacts) -> Verdict:
    kind = "valkey" if "valkey_version" in facts.info else "redis"
    version = str(facts.info.get(f"{kind}_version", "0"))
    found = f"{kind} {version} at {facts.url}"
    if kind == "redis" and tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        return bad("redis", found, "install Redis 6.2 or newer, or Valkey")
    if facts.info.get("role", "master") != "master":
        return bad("redis", f"{found} is a replica", "name the master in redis.url, or its Sentinels")
    return ok("redis", found)


def _judge_persistence(facts: RedisFacts) -> Verdict:
    if not int(facts.info.get("aof_enabled", 0)):
        return bad("redis persistence", "appendonly is no: what it holds is lost when it ends", "CONFIG SET appendonly yes")
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        return bad("redis persistence", "its last write to the append-only file failed", "make room on the server's disk")
    flush = facts.settings.get("appendfsync", "of unknown flushes")
    found = f"appendonly yes, appendfsync {flush}"
    if int(facts.info.get("connected_slaves", 0)) and facts.settings.get("min-replicas-to-write") == "0":
        return look("redis persistence", f"{found}, and writes do not wait for a replica", "CONFIG SET min-replicas-to-write 1")
    if flush == "everysec":
        return look("redis persistence", found, "appendfsync always or no: with everysec a kill loses up to 2 s")
    return ok("redis persistence", found)


def _judge_eviction(facts: RedisFacts) -> Verdict:
    policy = str(facts.info.get("maxmemory_policy", "noeviction"))
    found = f"maxmemory-policy {policy}"
    if policy != "noeviction":
        return bad("redis eviction", f"{found}: a full server deletes groups", "CONFIG SET maxmemory-policy noeviction")
    return ok("redis eviction", found)


def _judge_memory(facts: RedisFacts) -> Verdict:
    used, most = int(facts.info.get("used_memory", 0)), int(facts.info.get("maxmemory", 0))
    if not most:
        return look(
            "redis memory", f"{in_size(used)} used, and no limit", "set maxmemory, else the kernel kills what is too large"
        )
    found = f"{in_size(used)} used of {in_size(most)}"
    if used > ALMOST_FULL * most:
        return look(
            "redis memory",
            found,
            "raise maxmemory, or free some with `async-rl buffer vacuum`; a full server lets commits wait",
        )
    return ok("redis memory", found)


def _judge_access(facts: RedisFacts) -> Verdict:
    role = facts.user.rpartition("-")[2] if run_of(facts.user) else ""
    user = f"user {facts.user or 'default'}{f', role {role}' if role else ''}"
    if facts.is_private:
        return ok("redis access", "a socket that this user alone may open")
    found = f"{user}, {'TLS' if facts.tls else 'no TLS'}"
    if facts.is_remote and not facts.tls:
        return look("redis access", found, "use rediss:// unless that network is private")
    if facts.is_remote and not role:
        return look("redis access", found, "give each role its user: `async-rl buffer users create`")
    return ok("redis access", found)


def _judge_latency(facts: RedisFacts) -> Verdict:
    slowest = sorted(facts.ping_s)[max(0, round(0.99 * len(facts.ping_s)) - 1)]
    found = f"PING takes {1000 * median(facts.ping_s):.2f} ms, 1 in 100 more than {1000 * slowest:.2f} ms"
    if median(facts.ping_s) > SLOW_S:
        return look("redis latency", found, "move Redis nearer, or look for what keeps it busy (SLOWLOG)")
    return ok("redis latency", found)


def _judge_clock(facts: RedisFacts) -> Verdict:
    found = f"{abs(facts.ahead_s):.3f} s {'ahead of' if facts.ahead_s > 0 else 'behind'} that of Redis"
    if abs(facts.ahead_s) > SKEW_S:
        return look("clock", found, "start a time service (chrony): leases do not mind, but logs and certificates do")
    return ok("clock", found)

"""Users of a Redis that others use too: one for each role of a run. Each reaches that run's keys alone, and of these it writes
only what its scripts and topics need.

What separates the roles are the keys. A worker cannot write who the learner is and by which fence, which versions there are,
what is offered over the wire, the mix of environments and operators' requests: with its password, nobody moves weights or has
other processes load code. It can still spoil the groups of its own run, and stop it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from redis.exceptions import ResponseError

from async_rl.board import weight_requests
from async_rl.board.evaluations import EVALUATIONS
from async_rl.board.worker_reports import BLOCKED, NOTES
from async_rl.errors import ConfigError
from async_rl.telemetry import WORKER_METRICS
from async_rl.transport.messages import TO_LEARNER
from buffer import keys
from buffer.server.client import Server
from buffer.server.scripts import NAMES, load_script

PASSWORD_BYTES = 32

_MEET: Final = ("store_set", "store_add", "store_compare_set")

SCRIPTS: Final[Mapping[str, Collection[str]]] = {
    "learner": NAMES,
    "worker": (
        *("reserve", "renew", "commit", "quarantine", "drop", "starve", "unwanted"),
        *("agree", "announce", "leave", "members", "post", *_MEET),
    ),
    "operator": (
        *("change_limits", "change_mix", "readmit", "forget", "unwanted", "stats"),
        *("members", "post"),
    ),
    "monitor": (),
}
"""What each role changes: it may write the keys that these scripts declare. The monitor runs others, which then only read."""
TOPICS: Final[Mapping[str, Collection[str]]] = {
    "learner": ("*",),
    "worker": (TO_LEARNER, WORKER_METRICS, EVALUATIONS, NOTES, BLOCKED),
    "operator": (weight_requests.REQUESTS,),
    "monitor": (),
}
"""What each role posts. A topic that no other role posts is the learner's."""
GROUP_STORES: Final[Mapping[str, Collection[str]]] = {"learner": ("*",), "worker": ("wire*",), "operator": (), "monitor": ()}
"""The stores in which each role may form process groups, by the first part of their names; `ranks` is the learner's alone."""
ROLES: Final = tuple(SCRIPTS)

_CONNECT: Final = ("ping", "auth", "hello", "select", "cluster|slots", "subscribe", "unsubscribe")
_SINCE_7_2: Final = "+client|setinfo"
"""Our client tells its name, and does not mind if it may not; but each refusal is logged by the server."""
_RUN_SCRIPTS: Final = ("eval", "evalsha", "multi", "exec", "discard")
_READ: Final = ("+@read", "-@dangerous", "-scan", "-randomkey", "-dbsize", "+time")
"""Everything there is to know about the run's keys, and not what other keys there are."""
_WORKERS_READ: Final = ("hget", "hgetall", "hmget", "hvals", "lrange", "xread", "xrevrange", "get", "exists")
"""Beside its scripts."""
_OUTSIDE_SCRIPTS: Final[Mapping[str, Collection[str]]] = {
    "learner": ("hsetnx", "unlink"),
    "worker": ("hsetnx", "unlink"),  # a payload that comes with its commit; an entry of a group store
    "operator": (),
    "monitor": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedUsers:
    """What an operator hands out."""

    users: dict[str, str]
    """By role."""
    password_files: dict[str, Path]
    acl_file: Path
    """The same users for an `aclfile`: each node of a Cluster and each replica needs them, and knows only what it is told."""
    survives_restart: bool
    """Whether the server has written the users down itself."""
    separates_roles: bool
    """Whether the server can let a user read a key that it may not write. Redis before 7 cannot: there every role that changes
    anything may write all of the run's keys."""


async def create_users(server: Server, run: str, *, folder: Path) -> CreatedUsers:
    """Users with new passwords, in files that only we can read. Again: the old passwords end at once."""
    passwords = {role: secrets.token_urlsafe(PASSWORD_BYTES) for role in ROLES}
    separates_roles = await _separates_roles(server)
    rules = {
        role: await _set(server, user_name(run, role), _rules(role, run, password, separates_roles=separates_roles))
        for role, password in passwords.items()
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {role: _write_secret(folder / f"{role}.password", f"{password}\n") for role, password in passwords.items()}
    lines = [f"user {user_name(run, role)} {' '.join(words)}\n" for role, words in rules.items()]
    return CreatedUsers(
        users={role: user_name(run, role) for role in ROLES},
        password_files=files,
        acl_file=_write_secret(folder / "users.acl", "".join(lines)),
        survives_restart=await _saved(server),
        separates_roles=separates_roles,
    )


async def list_users(server: Server, run: str) -> dict[str, str]:
    """The rules of the run's users, by name, as the server shows them; passwords are hashed."""
    redis = cast("Any", server.commands)
    lines = [line.decode() for line in await server.ask(lambda: redis.execute_command("ACL", "LIST"))]
    known = {user_name(run, role) for role in ROLES}
    return {name: rules for _, name, rules in (line.split(" ", 2) for line in lines) if name in known}


def user_name(run: str, role: str) -> str:
    return f"{run}-{role}"


def writable(role: str) -> list[str]:
    """Names of the run's keys that a role may write, as patterns."""
    if role == "learner":
        return ["*"]
    declared = {name for script in SCRIPTS[role] for name in load_script(script).keys}.difference(keys.GIVEN)
    stores = (f"store:{name}" for name in GROUP_STORES[role])
    return sorted({*declared, *(f"topic:{topic}" for topic in TOPICS[role]), *stores})


def _rules(role: str, run: str, password: str, *, separates_roles: bool) -> list[str]:
    digest = hashlib.sha256(password.encode()).hexdigest()
    whole = keys.key(run, "*")
    # The monitor's scripts declare what they read, which the server takes for written; its commands hold them to reading.
    reach = [f"~{keys.key(run, name)}" for name in writable(role)] if separates_roles and role != "monitor" else [f"~{whole}"]
    reading = [f"%R~{whole}"] if f"~{whole}" not in reach else []
    return ["reset", "resetchannels", "on", f"#{digest}", *reach, *reading, f"&{whole}", "-@all", *_permissions(role)]


def _permissions(role: str) -> list[str]:
    reading = [f"+{command}" for command in _WORKERS_READ] if role == "worker" else _READ
    changing = [f"+{command}" for command in (*commands_of(SCRIPTS[role]), *_OUTSIDE_SCRIPTS[role])]
    return [*reading, *changing, *(f"+{command}" for command in (*_CONNECT, *_RUN_SCRIPTS))]


def commands_of(scripts: Collection[str]) -> list[str]:
    """Redis asks for each command of a script whether the user may give it."""
    text = "".join(load_script(name).text for name in scripts)
    return sorted({command.lower() for command in re.findall(r"\bcall\('([A-Z]+)'", text)})


async def _separates_roles(server: Server) -> bool:
    """Read-only keys came with Redis 7. A user that stays off is made to find out, and deleted."""
    redis = cast("Any", server.commands)
    trial = f"trial-{secrets.token_hex(8)}"
    try:
        await server.ask(lambda: redis.execute_command("ACL", "SETUSER", trial, "%R~trial"))
    except ResponseError:
        return False
    await server.ask(lambda: redis.execute_command("ACL", "DELUSER", trial))
    return True


async def _set(server: Server, user: str, rules: list[str]) -> list[str]:
    redis = cast("Any", server.commands)
    await server.ask(lambda: redis.execute_command("ACL", "SETUSER", user, *rules))
    try:
        await server.ask(lambda: redis.execute_command("ACL", "SETUSER", user, _SINCE_7_2))
    except ResponseError:
        return rules
    return [*rules, _SINCE_7_2]


async def _saved(server: Server) -> bool:
    redis = cast("Any", server.commands)
    try:
        await server.ask(lambda: redis.execute_command("ACL", "SAVE"))
    except ResponseError:  # the server has no `aclfile`
        return False
    return True


def _write_secret(path: Path, text: str) -> Path:
    try:
        path.unlink(missing_ok=True)  # whoever could read an older one cannot read this one
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path

"""Redis users (ACL) for a shared server: one for each role of a run. Each reaches that run's keys alone, and writes only those
that its scripts and topics need.

The keys separate the roles. A worker cannot write the learner's lease and fence, the version table, offers on the weight wire,
the run's configuration, the mix of environments or operators' requests: its password does not let anyone move weights or make
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

from async_rl.board import fleet_requests, weight_requests
from async_rl.board.evaluations import EVALUATIONS
from async_rl.board.machines import MACHINES
from async_rl.board.worker_reports import BLOCKED, NOTES, RECORDS
from async_rl.errors import ConfigError
from async_rl.telemetry import WORKER_METRICS
from async_rl.transport.messages import TO_LEARNER
from buffer import keys
from buffer.server.client import Server
from buffer.server.scripts import NAMES, load_script

PASSWORD_BYTES = 32

SCRIPTS: Final[Mapping[str, Collection[str]]] = {
    "learner": NAMES,
    "worker": (
        *("reserve", "renew", "commit", "quarantine", "drop", "starve", "unwanted"),
        *("agree", "announce", "leave", "members", "post", "store_set", "store_add"),
    ),
    "operator": (
        *("change_limits", "change_mix", "readmit", "forget", "unwanted", "stats"),
        *("members", "post"),
    ),
    "monitor": (),
}
"""Scripts of each role, which may write the keys that they declare. The monitor runs scripts that read only."""
TOPICS: Final[Mapping[str, Collection[str]]] = {
    "learner": ("*",),
    "worker": (TO_LEARNER, WORKER_METRICS, EVALUATIONS, MACHINES, NOTES, BLOCKED, RECORDS),
    "operator": (weight_requests.REQUESTS, fleet_requests.REQUESTS),
    "monitor": (),
}
"""Topics that each role posts to; the learner posts to all of them."""
GROUP_STORES: Final[Mapping[str, Collection[str]]] = {"learner": ("*",), "worker": ("wire*",), "operator": (), "monitor": ()}
"""Stores in which each role may form process groups, by the first part of their name; `ranks` is the learner's alone."""
ROLES: Final = tuple(SCRIPTS)

_CONNECT: Final = ("ping", "auth", "hello", "select", "cluster|slots", "subscribe", "unsubscribe")
_SINCE_7_2: Final = "+client|setinfo"
"""redis-py sends its name on connecting; a refusal does no harm, but the server logs each."""
_RUN_SCRIPTS: Final = ("eval", "evalsha", "multi", "exec", "discard")
_READ: Final = ("+@read", "-@dangerous", "-scan", "-randomkey", "-dbsize", "+time")
"""Reads any key of the run, but cannot list the server's keys."""
_WORKERS_READ: Final = ("hget", "hgetall", "hmget", "hvals", "lrange", "xread", "xrevrange", "get", "exists")
"""What workers read outside scripts."""
_OUTSIDE_SCRIPTS: Final[Mapping[str, Collection[str]]] = {
    "learner": ("hsetnx",),
    "worker": ("hsetnx",),  # a payload that comes with its commit
    "operator": (),
    "monitor": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedUsers:
    """The users that were created, with the files that hold their passwords."""

    users: dict[str, str]
    """Role -> user name."""
    password_files: dict[str, Path]
    acl_file: Path
    """These users, the administrator who created them and the default user, as an `aclfile`: replicas and nodes of a Cluster
    do not pass users on, so each needs it."""
    default_is_open: bool
    """Whether the file leaves the default user as it is on the server, and that is an administrator without a password."""
    survives_restart: bool
    """Whether the server has saved the users to its own ACL file."""
    separates_roles: bool
    """Whether the server supports read-only keys. Redis before 7 does not: there every role except the monitor may write all of
    the run's keys."""


async def create_users(server: Server, run: str, *, folder: Path, default_off: bool = False) -> CreatedUsers:
    """Create the run's users with new passwords, in files of mode 0600. If they exist, their old passwords end at once.

    `default_off`: the ACL file turns the default user off; else it has the default user as the server has it. That of the
    server is not changed.
    """
    passwords = {role: secrets.token_urlsafe(PASSWORD_BYTES) for role in ROLES}
    separates_roles = await _separates_roles(server)
    rules = {
        role: await _set_user(server, user_name(run, role), _rules(role, run, password, separates_roles=separates_roles))
        for role, password in passwords.items()
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {role: _write_secret(folder / f"{role}.password", f"{password}\n") for role, password in passwords.items()}
    others = await _others(server, run)
    if default_off:
        others["default"] = "off"
    shown = {**others, **{user_name(run, role): " ".join(words) for role, words in rules.items()}}
    lines = [f"user {name} {words}\n" for name, words in shown.items()]
    return CreatedUsers(
        users={role: user_name(run, role) for role in ROLES},
        password_files=files,
        acl_file=_write_secret(folder / "users.acl", "".join(lines)),
        default_is_open={"on", "nopass", "+@all"} <= {*others["default"].split()},
        survives_restart=await _save_acl(server),
        separates_roles=separates_roles,
    )


async def list_users(server: Server, run: str) -> dict[str, str]:
    """Return name -> rules of the run's users, as the server shows them; passwords are hashed."""
    known = {user_name(run, role) for role in ROLES}
    return {name: rules for name, rules in (await _all_users(server)).items() if name in known}


async def _all_users(server: Server) -> dict[str, str]:
    lines = [line.decode() for line in await _acl(server, "LIST")]
    return {name: rules for _, name, rules in (line.split(" ", 2) for line in lines)}


async def _others(server: Server, run: str) -> dict[str, str]:
    """Return name -> rules of the default user and of the one who asks. A file without `default` would make everyone who
    connects an administrator, whatever `requirepass` says."""
    asks = (await _acl(server, "WHOAMI")).decode()
    own = {user_name(run, role) for role in ROLES}
    return {name: rules for name, rules in (await _all_users(server)).items() if name in {"default", asks} - own}


def user_name(run: str, role: str) -> str:
    return f"{run}-{role}"


def run_of(user: str) -> str:
    """The run whose user this is; empty if it is not one of `user_name`."""
    run, _, role = user.rpartition("-")
    return run if role in ROLES else ""


def writable(role: str) -> list[str]:
    """Return the names of the run's keys that a role may write, as patterns."""
    if role == "learner":
        return ["*"]
    declared = {name for script in SCRIPTS[role] for name in load_script(script).keys}.difference(keys.GIVEN)
    stores = (f"store:{name}" for name in GROUP_STORES[role])
    return sorted({*declared, *(f"topic:{topic}" for topic in TOPICS[role]), *stores})


def _rules(role: str, run: str, password: str, *, separates_roles: bool) -> list[str]:
    digest = hashlib.sha256(password.encode()).hexdigest()
    whole = keys.key(run, "*")
    # The monitor's scripts declare the keys they read, which requires write permission; its commands allow reading only.
    reach = [f"~{keys.key(run, name)}" for name in writable(role)] if separates_roles and role != "monitor" else [f"~{whole}"]
    reading = [f"%R~{whole}"] if f"~{whole}" not in reach else []
    return ["reset", "resetchannels", "on", f"#{digest}", *reach, *reading, f"&{whole}", "-@all", *_permissions(role)]


def _permissions(role: str) -> list[str]:
    reading = [f"+{command}" for command in _WORKERS_READ] if role == "worker" else _READ
    changing = [f"+{command}" for command in (*commands_of(SCRIPTS[role]), *_OUTSIDE_SCRIPTS[role])]
    return [*reading, *changing, *(f"+{command}" for command in (*_CONNECT, *_RUN_SCRIPTS))]


def commands_of(scripts: Collection[str]) -> list[str]:
    """Return the commands that scripts call: Redis checks the user's permission for each."""
    text = "".join(load_script(name).text for name in scripts)
    return sorted({command.lower() for command in re.findall(r"\bcall\('([A-Z]+)'", text)})


async def _acl(server: Server, *words: str) -> Any:
    return await server.ask(lambda: cast("Any", server.commands).execute_command("ACL", *words))


async def _separates_roles(server: Server) -> bool:
    """Whether the server supports read-only keys (Redis 7): tries to create a disabled user, and deletes it."""
    trial = f"trial-{secrets.token_hex(8)}"
    try:
        await _acl(server, "SETUSER", trial, "%R~trial")
    except ResponseError:
        return False
    await _acl(server, "DELUSER", trial)
    return True


async def _set_user(server: Server, user: str, rules: list[str]) -> list[str]:
    await _acl(server, "SETUSER", user, *rules)
    try:
        await _acl(server, "SETUSER", user, _SINCE_7_2)
    except ResponseError:
        return rules
    return [*rules, _SINCE_7_2]


async def _save_acl(server: Server) -> bool:
    try:
        await _acl(server, "SAVE")
    except ResponseError:  # the server has no `aclfile`
        return False
    return True


def _write_secret(path: Path, text: str) -> Path:
    try:
        path.unlink(missing_ok=True)  # a new file, so that an older one's permissions and readers do not apply
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path

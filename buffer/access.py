"""Users of a Redis that others use too: one for each role of a run, who can reach that run's keys and nothing else.

A user who may run scripts may do to the run whatever the scripts' commands allow. So what this protects is everybody else:
other runs, and the server itself. What one role does to another is the fence's and the leases' business.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from redis.exceptions import ResponseError

from async_rl.errors import ConfigError
from buffer import keys
from buffer.redis_client import Server

SCRIPTS = Path(__file__).parent / "scripts"
PASSWORD_BYTES = 32

_CONNECT: Final = ("ping", "auth", "hello", "select", "cluster|slots", "subscribe", "unsubscribe")
_SINCE_7_2: Final = "+client|setinfo"
"""Our client tells its name, and does not mind if it may not; but each refusal is logged by the server."""
_RUN_SCRIPTS: Final = ("eval", "evalsha", "multi", "exec", "discard")
_READ: Final = ("+@read", "-@dangerous", "-scan", "-randomkey", "-dbsize", "+time")
"""Everything there is to know about the run's keys, and not what other keys there are."""
_TOPICS: Final = ("xadd", "xread", "hvals")
_GROUP_STORES: Final = ("get", "exists", "unlink")

ROLES: Final = ("worker", "learner", "monitor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """What an operator hands out."""

    users: dict[str, str]
    """By role."""
    password_files: dict[str, Path]
    acl_file: Path
    """The same users for an `aclfile`: each node of a Cluster and each replica needs them, and knows only what it is told."""
    survives_restart: bool
    """Whether the server has written the users down itself."""


async def create_users(server: Server, run: str, *, folder: Path) -> Created:
    """Users with new passwords, in files that only we can read. Again: the old passwords end at once."""
    passwords = {role: secrets.token_urlsafe(PASSWORD_BYTES) for role in ROLES}
    rules = {
        role: await _set(server, user_name(run, role), _rules(role, run, password)) for role, password in passwords.items()
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {role: _write_secret(folder / f"{role}.password", f"{password}\n") for role, password in passwords.items()}
    lines = [f"user {user_name(run, role)} {' '.join(words)}\n" for role, words in rules.items()]
    return Created(
        users={role: user_name(run, role) for role in ROLES},
        password_files=files,
        acl_file=_write_secret(folder / "users.acl", "".join(lines)),
        survives_restart=await _saved(server),
    )


async def list_users(server: Server, run: str) -> dict[str, str]:
    """The rules of the run's users, by name, as the server shows them; passwords are hashed."""
    redis = cast("Any", server.commands)
    lines = [line.decode() for line in await server.ask(lambda: redis.execute_command("ACL", "LIST"))]
    known = {user_name(run, role) for role in ROLES}
    return {name: rules for _, name, rules in (line.split(" ", 2) for line in lines) if name in known}


def user_name(run: str, role: str) -> str:
    return f"{run}-{role}"


def _rules(role: str, run: str, password: str) -> list[str]:
    digest = hashlib.sha256(password.encode()).hexdigest()
    reach = [f"~{keys.key(run, '*')}", f"&{keys.key(run, '*')}"]
    return ["reset", "resetchannels", "on", f"#{digest}", *reach, "-@all", *_permissions(role)]


def _permissions(role: str) -> list[str]:
    allowed = [f"+{command}" for command in (*_CONNECT, *_RUN_SCRIPTS)]
    if role == "monitor":
        return [*_READ, *allowed]  # its scripts are held to reading
    changing = [f"+{command}" for command in (*commands_of_scripts(), *_TOPICS, *_GROUP_STORES)]
    return [*(_READ if role == "learner" else ()), *changing, *allowed]


def commands_of_scripts() -> list[str]:
    """Redis asks for each command of a script whether the user may give it."""
    text = "".join(path.read_text() for path in SCRIPTS.glob("*.lua"))
    return sorted({command.lower() for command in re.findall(r"\bp?call\('([A-Z]+)'", text)})


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

"""`buffer users`: one Redis user per role of the run, on a shared server."""

from __future__ import annotations

from dataclasses import asdict

from async_rl.cli.grammar import CommandLine
from async_rl.errors import ConfigError
from buffer.server.users import create_users, list_users
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, print_json, print_table


async def create(run: OpenRun, line: CommandLine) -> None:
    if not run.config.redis.url:
        raise ConfigError("the embedded server admits you alone; users are for a server of yours (redis.url)")
    made = await create_users(
        run.redis.server, run.redis.name, folder=run.config.run_folder / "users", default_off=line.has("default-off")
    )
    if line.has("json"):
        paths = {role: str(path) for role, path in made.password_files.items()}
        print_json({**asdict(made), "password_files": paths, "acl_file": str(made.acl_file)})
        return
    page = console()
    rows = [(role, made.users[role], str(path)) for role, path in made.password_files.items()]
    print_table(page, ("role", "redis.user", "redis.password_file"), rows)
    page.print("passwords of earlier users of these names no longer work")
    if not made.separates_roles:
        page.print(
            "roles are not separated: this server (before Redis 7) cannot let a user read keys that it may not write, so "
            "worker, learner and operator may each write all of this run's keys"
        )
    if not made.survives_restart:
        page.print(f"the server keeps no ACL file and forgets them when it restarts; {made.acl_file} can be its aclfile")
    if made.default_is_open:
        page.print(
            "everyone who connects to this server is its administrator, and that of a server that loads the file: give its "
            "default user a password, or --default-off here"
        )
    if line.has("default-off"):
        page.print(
            f"with {made.acl_file} as its aclfile a server has no default user; where it should have an administrator, add the "
            "line: user admin on >PASSWORD ~* &* +@all"
        )


async def ls(run: OpenRun, line: CommandLine) -> None:
    listed = await list_users(run.redis.server, run.redis.name)
    # Without the hashed password.
    users = {name: " ".join(word for word in rules.split() if word[0] != "#") for name, rules in listed.items()}
    if line.has("json"):
        print_json({"users": users})
    elif users:
        print_table(console(), ("redis.user", "may"), list(users.items()))
    else:
        console().print(f"run {run.redis.name!r} has no users; `async-rl buffer users create` makes them")

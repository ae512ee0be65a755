"""`buffer erase NAME`: deletes a run's keys from a server that other runs may share."""

from __future__ import annotations

from async_rl.cli.grammar import CommandLine
from async_rl.errors import ConfigError
from buffer import keys
from buffer.board import RedisBoard
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, visible

KEYS_AT_ONCE = 500


async def erase(run: OpenRun, line: CommandLine) -> None:
    name = run.config.run.name
    if line.operands[0] != name:
        raise ConfigError(f"this is the configuration of run {name!r}, not of {line.operands[0]!r}; give its name exactly")
    if not run.config.redis.url:
        raise ConfigError(f"run {name!r} has its own server, in {run.config.redis_folder}: async-rl runs rm {name} removes it")
    learner = (await run.inspection.run_state()).learner
    members = await RedisBoard(run.redis.server, name).members()
    if learner or members:
        who = learner if learner else f"{len(members)} workers"
        raise ConfigError(f"run {name!r} is running: {who} holds it; stop it first")
    cursor, erased = 0, 0
    while True:
        cursor, found = await run.redis.run_command("scan", cursor, match=keys.key(name, "*"), count=KEYS_AT_ONCE)
        if found:
            erased += await run.redis.run_command("unlink", *found)
        if cursor == 0:
            break
    console().print(visible(f"{erased} keys of run {name!r} are deleted"))

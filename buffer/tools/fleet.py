"""`async-rl fleet ...` over the run's Redis: lists the processes that hold it and are members, and asks them to drain."""

from __future__ import annotations

import asyncio

from async_rl.board.fleet_requests import LEARNER, ask_to_drain
from async_rl.cli.grammar import CommandLine, nearest
from async_rl.config import HEARTBEAT_S
from async_rl.errors import ConfigError
from async_rl.protocols import Member
from buffer.board import RedisBoard
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, visible


async def ls(run: OpenRun, _line: CommandLine) -> None:
    learner, workers = await _processes(run)
    rows = [*([(LEARNER, learner)] if learner else []), *((each.id, _where(each)) for each in workers)]
    width = max((len(name) for name, _ in rows), default=0)
    for name, where in rows:
        console().print(visible(f"{name:<{width}}  {where}"))


async def drain(run: OpenRun, line: CommandLine) -> None:
    """Ask a worker to drain, and wait until it is no member any more: it has left, or its lease has ended."""
    name = line.operands[0]
    names = [each.id for each in (await _processes(run))[1]]
    if name not in names:
        raise ConfigError(f"there is no worker {name!r}{nearest(name, names)}; there are {', '.join(names) or 'none'}")
    await ask_to_drain(_board(run), name)
    while name in [each.id for each in await _board(run).members_now()]:  # noqa: ASYNC110  # ends by leaving or by time: no event
        await asyncio.sleep(HEARTBEAT_S)
    console().print(visible(f"{name} has drained"))


async def stop(run: OpenRun, _line: CommandLine) -> None:
    learner, workers = await _processes(run)
    if not learner and not workers:
        raise ConfigError(f"run {run.config.run.name!r} has neither a learner nor workers")
    await ask_to_drain(_board(run))
    console().print(f"the fleet drains: {'the learner' if learner else 'no learner'}, workers: {len(workers)}")


async def _processes(run: OpenRun) -> tuple[str, list[Member]]:
    """Who holds the learner's lease (empty: no process), and the workers. Evaluators are members only now and then."""
    if run.was_asleep:
        return "", []
    members = await _board(run).members_now()
    return (await run.inspection.run_state()).learner, [each for each in members if not each.is_evaluator]


def _where(member: Member) -> str:
    return f"{member.host} {member.device}, {f'version {member.version}' if member.version >= 0 else 'waits for weights'}"


def _board(run: OpenRun) -> RedisBoard:
    return RedisBoard(run.redis.server, run.redis.name)

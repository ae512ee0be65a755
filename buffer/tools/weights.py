"""`async-rl weights ...`: shows the versions that workers serve, and sends requests about them to the learner."""

from __future__ import annotations

from dataclasses import asdict

from async_rl.board.weight_requests import WeightAction, WeightAnswer, ask
from async_rl.cli.grammar import CommandLine
from async_rl.errors import ConfigError
from async_rl.protocols import Member
from async_rl.types import VersionRecord
from buffer.board import RedisBoard
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, format_size, moment, one_line, print_json, print_table, visible

ANSWERED_WITHIN_S = 30.0
"""A learner answers while it trains, so this only allows for a busy machine."""
REASON_WIDTH = 200


async def status(run: OpenRun, line: CommandLine) -> None:
    board = _board(run)
    answer = await _ask(run, "status")
    live, members = await board.live_version(), await board.members()
    if line.has("json"):
        print_json(
            {
                "live": None if live is None else asdict(live),
                "learner": None if answer is None else answer.state.model_dump(mode="json"),
                "workers": [{**asdict(member), "behind": _served(member, live)[1]} for member in members],
            }
        )
        return
    page = console()
    for sentence in (*_live(live, answer), *_learner(answer)):
        page.print(visible(sentence))
    if members:
        rows = [(member.id, *_served(member, live), member.host, member.device) for member in members]
        print_table(page, ("worker", "version", "behind by", "host", "device"), rows)
    else:
        page.print("no worker is listed")


async def push(run: OpenRun, _line: CommandLine) -> None:
    await _request(run, "push")


async def pin(run: OpenRun, line: CommandLine) -> None:
    if line.operands == ("off",):
        await _request(run, "unpin")
    else:
        await _request(run, "pin", version=_version(line.operands[0]) if line.operands else None)


async def rollback(run: OpenRun, line: CommandLine) -> None:
    step = line.integer("step")
    if (step is None) == (not line.operands):
        raise ConfigError("weights rollback needs a VERSION or --step STEP; `async-rl checkpoints ls` lists both")
    await _request(run, "roll back", version=_version(line.operands[0]) if line.operands else None, step=step)


async def _request(run: OpenRun, action: WeightAction, *, version: int | None = None, step: int | None = None) -> None:
    answer = await _ask(run, action, version=version, step=step)
    if answer is None:
        raise ConfigError(f"no learner of run {run.config.run.name} answers; `async-rl learner` starts one")
    if answer.is_refusal:
        raise ConfigError(answer.text)
    console().print(visible(answer.text))


async def _ask(
    run: OpenRun, action: WeightAction, *, version: int | None = None, step: int | None = None
) -> WeightAnswer | None:
    if run.was_asleep or not (await run.inspection.run_state()).learner:
        return None
    return await ask(_board(run), action, ANSWERED_WITHIN_S, version=version, step=step)


def _board(run: OpenRun) -> RedisBoard:
    return RedisBoard(run.redis.server, run.redis.name)


def _version(word: str) -> int:
    if not word.isdigit():
        raise ConfigError(f"{word!r} is not a version")
    return int(word)


def _live(live: VersionRecord | None, answer: WeightAnswer | None) -> list[str]:
    if live is None:
        return ["no version is live yet"]
    pushed = answer.state.last_push if answer is not None else None
    is_known = pushed is not None and pushed.record == live
    since = f" since {moment(pushed.at)}" if pushed is not None and is_known else ""
    return [f"version {live.version} is live{since}: the weights after step {live.step}, timeline {live.timeline}"]


def _learner(answer: WeightAnswer | None) -> list[str]:
    if answer is None:
        return ["no learner answers"]
    state, said = answer.state, list[str]()
    said.append(f"the learner holds version {state.version}, after step {state.step}")
    if state.pinned:
        said.append(f"pinned: {state.pinned}; `async-rl weights pin off` lets newer versions out")
    if (pushed := state.last_push) is not None:
        said.append(
            f"last push: version {pushed.record.version} to {len(pushed.staged)} workers in {pushed.seconds:.2f} s, "
            f"{format_size(pushed.bytes)} each"
        )
        said += [f"  without {member}: {one_line(reason, REASON_WIDTH)}" for member, reason in pushed.dropped.items()]
    return said


def _served(member: Member, live: VersionRecord | None) -> tuple[int | None, int | None]:
    """Return a member's version and how far it is behind the live one."""
    if member.version < 0:
        return None, None
    return member.version, max(0, live.version - member.version) if live is not None else 0

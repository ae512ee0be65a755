"""`env ls | attach | detach | weight`: shows and changes the mix of environments during a run."""

from __future__ import annotations

from async_rl.board.attached_code import refuse_foreign_code
from async_rl.board.environment_mix import EnvironmentChange, MixSchedule
from async_rl.cli.env import CHANGES
from async_rl.cli.grammar import CommandLine
from async_rl.errors import ConfigError
from async_rl.types import MixChange
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, print_json, print_table

ATTEMPTS = 5
"""Tries before giving up: a try fails if another client changes the mix, or while a learner takes over."""


async def change(run: OpenRun, line: CommandLine) -> None:
    wanted, entry = await _append(run, line)
    schedule = MixSchedule(run.config.environments, await run.buffer.mix())
    await _change_quotas(run, schedule)
    when = f"in even steps until task {entry.at + wanted.ramp}" if wanted.ramp else "at once"
    shares = ", ".join(f"{name} {share:.1%}" for name, share in _shares(schedule.final_weights).items())
    console().print(f"from task {entry.at} on, {when}: {shares}")


async def _append(run: OpenRun, line: CommandLine) -> tuple[EnvironmentChange, MixChange]:
    for _ in range(ATTEMPTS):
        log = await run.buffer.mix()
        wanted = CHANGES[line.verb.words](line, MixSchedule(run.config.environments, log))
        if wanted.environment is not None:
            refuse_foreign_code(wanted.environment, run.config.environments, run.config.environments_from)
        known = log[-1].id if log else ""
        if entry := await run.buffer.change_mix(known, wanted.model_dump_json(exclude_defaults=True)):
            return wanted, entry
    raise ConfigError("the mix was not changed, because a learner is recovering or another client changes it, too; try again")


async def _change_quotas(run: OpenRun, schedule: MixSchedule) -> None:
    """Update the limit `quotas` to the environments' max_share, so that it applies to the learner's next step."""
    limits = await run.buffer.limits()
    in_force = limits if limits is not None else run.config.limits
    quotas = {
        name: quota
        for name in schedule.final_weights
        if (quota := schedule.sections[name].quota(in_force.groups_per_step)) is not None
    }
    if quotas != dict(in_force.quotas):
        await run.buffer.change_limits({"quotas": quotas})


async def ls(run: OpenRun, line: CommandLine) -> None:
    schedule = MixSchedule(run.config.environments, await run.buffer.mix())
    next_task = int((await run.inspection.run_state()).fields.get("next_task", "0"))
    tally = (await run.inspection.tally()).environments
    now, later = schedule.weights_at(next_task), schedule.final_weights
    shares = _shares(now)
    rows = [
        {
            "name": name,
            "type": section.type,
            "weight": now.get(name, 0.0),
            "later": later.get(name, 0.0),
            "share": shares.get(name, 0.0),
            "stored": tally.get(name, {}).get("stored", 0),
            "failed": tally.get(name, {}).get("dropped:failed", 0),
            "no_signal": tally.get(name, {}).get("dropped:no_signal", 0),
        }
        for name, section in schedule.sections.items()
    ]
    if line.has("json"):
        print_json({"next_task": next_task, "environments": rows})
        return
    page = console()
    shown = [row | {"share": f"{row['share']:.1%}"} for row in rows]
    names = ("weight", "later", "share", "stored", "failed", "no_signal", "name", "type")
    print_table(page, [name.replace("_", " ") for name in names], ([row[name] for name in names] for row in shown))
    page.print(f"the next task is number {next_task}; groups are counted since the run began")


def _shares(weights: dict[str, float]) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}

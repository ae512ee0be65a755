"""`buffer limits`: shows the limits in force, and changes them during the run.

A change is validated by the configuration's own model, so errors read the same as in a file. It overrides the configuration of
every later learner of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from async_rl.cli.grammar import CommandLine, nearest
from async_rl.config import Config
from async_rl.config.loading import load_with_origins
from async_rl.errors import ConfigError
from async_rl.replay_protocol import Limits
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, print_json, print_table

KEYS = {
    "staleness.max_age": "max_age",
    "staleness.pace": "pace",
    "staleness.selector": "selector",
    "leases.ticket_s": "lease_s",
    "leases.max_attempts": "max_attempts",
    "retention.keep_steps": "keep_steps",
}
"""Key in the configuration -> field of `Limits`, for the limits that can change during a run."""


async def limits(run: OpenRun, line: CommandLine) -> None:
    in_force = await run.buffer.limits()
    if line.operands:
        changes = _changes(line, in_force)
        await run.buffer.change_limits(changes)
        in_force = await run.buffer.limits()
    _show(in_force, run.config, line)


def _changes(line: CommandLine, in_force: Limits | None) -> Mapping[str, int | float | str]:
    """Return field of `Limits` -> new value. Raises ConfigError naming a key that is wrong."""
    wanted = dict(_assignment(text) for text in line.operands)
    # Checked together with the limits in force, because some values are only wrong in combination.
    present = {} if in_force is None else {key: _text(in_force, field) for key, field in KEYS.items()}
    words = [word for key, text in (present | wanted).items() for word in (f"--{key}", text)]
    changed = load_with_origins([*line.config, *words]).config
    if "staleness.pace" in wanted and changed.staleness.pace == "auto":
        if (configured := load_with_origins(line.config).config.staleness.pace) != "auto":
            raise ConfigError(f"the learner of this run does not find a pace: its staleness.pace is {configured}")
        return {KEYS[key]: getattr(changed.limits, KEYS[key]) for key in wanted} | {"pace": "auto"}
    return {KEYS[key]: getattr(changed.limits, KEYS[key]) for key in wanted}


def _text(limits: Limits, field: str) -> str:
    value = getattr(limits, field)
    return "full" if value is None else json.dumps(value)  # the pace alone may be None


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if key not in KEYS:
        meant, others = nearest(key, list(KEYS)), f"; {', '.join(KEYS)} can"
        raise ConfigError(f"{key} cannot be changed during a run{meant if meant else others}")
    if not equals or not value:
        raise ConfigError(f"{key} needs a value: {key}=VALUE")
    return key, value


def _show(in_force: Limits | None, config: Config, line: CommandLine) -> None:
    if line.has("json"):
        print_json({"limits": None if in_force is None else asdict(in_force)})
        return
    page = console()
    if in_force is None:
        page.print("no learner has set the limits yet; these are the configured ones")
    shown = config.limits if in_force is None else in_force
    rows = [(key, *(_text(limits, field).strip('"') for limits in (shown, config.limits))) for key, field in KEYS.items()]
    if config.staleness.pace == "auto":
        rows = [(key, now, "auto" if key == "staleness.pace" else configured) for key, now, configured in rows]
    print_table(page, ("limit", "in force", "configured"), rows)
    page.print(f"{shown.slots} slots: groups that may exist at once")

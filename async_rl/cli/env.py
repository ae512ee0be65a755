"""`async-rl env ...`: what can be typed, and how a line becomes a change of the mix, or one sentence that says why not."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from async_rl.board.environment_mix import EnvironmentChange, MixSchedule
from async_rl.cli.grammar import Line, Option, Tool, nearest
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError

CHECK = Tool(
    words="env check",
    operands="[ENVIRONMENT]",
    help="Play some episodes of an environment, show them, and say what is wrong with it.",
    options=(
        Option(name="episodes", value="TASKS", read=int, help="so many tasks, each answered several times (3)"),
        Option(name="args", value="JSON", help="arguments of its class, as an object"),
        Option(name="script", value="TEXT|FILE", help="say this; a file's lines are said one after the other"),
        Option(name="model", value="WHAT", help="let a model answer: a folder, http://... of a server, a name under policies"),
        Option(name="json", help="one JSON document"),
    ),
)
"""ENVIRONMENT is a name in the configuration, or any type; without one, all of the configuration are checked."""

SERVE = Tool(
    words="env serve",
    operands="TYPE",
    help="Serve an environment to workers elsewhere; they name it as {type: remote, args: {url: http://...}}.",
    options=(
        Option(name="args", value="JSON", help="arguments of its class, as an object"),
        Option(name="host", value="ADDRESS", help="where to listen (127.0.0.1)"),
        Option(name="port", value="PORT", read=int, help="0 takes a free one (0)"),
        Option(name="token-file", value="FILE", help="workers must know what stands there; required beyond this machine"),
        Option(name="tokenizer", value="FOLDER", help="the run's, for agents that need it (Hugging Face; needs transformers)"),
        Option(name="max-episodes", value="N", read=int, help="at most so many at once (1024)"),
    ),
)

PRINTABLE = "".join(sorted({*string.printable} - {*"\r\v\f"}))

UNSET: Mapping[str, Any] = {"weight": 1.0}
"""The weight of a mix that changes stands in its changes."""


def section_of(line: Line) -> EnvironmentConfig:
    """The environment that `env attach` describes, as a configuration would."""
    given = {
        "type": line.operands[0],
        "name": line.text("name"),
        "args": arguments(line.text("args")),
        "max_share": line.number("max-share"),
        "max_in_flight": line.integer("max-in-flight"),
    }
    try:
        section = EnvironmentConfig.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise ConfigError(f"--{'.'.join(map(str, wrong['loc'])).replace('_', '-')}: {wrong['msg']}") from error
    return section.seen_from_anywhere()


def config_words(line: Line) -> tuple[str, ...]:
    """A type can be tried without a file: then with the limits of the quickstart, and a tokenizer that reads English."""
    if any(word.startswith("@") for word in line.config):
        return line.config
    return ("@", "configs/quickstart.yaml", "--tokenizer.alphabet", json.dumps(PRINTABLE), *line.config)


def arguments(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args must be a JSON object, for example '{{\"length\": 8}}': {error}") from error


def attached(line: Line, schedule: MixSchedule) -> EnvironmentChange:
    section = section_of(line)
    name, weight = section.label, line.number("weight")
    known = schedule.sections.get(name)
    if known is not None and known.seen_from_anywhere().model_copy(update=UNSET) != section:
        raise ConfigError(
            f"{name} was another environment in this run ({known.type}, {json.dumps(known.args)}): "
            "give this one a --name of its own"
        )
    if name in schedule.final_weights:
        raise ConfigError(f"{name} is in the mix already; `async-rl env weight {name} WEIGHT` changes its weight")
    return _change(name, weight if weight is not None else 1.0, line, environment=None if known is not None else section)


def detached(line: Line, schedule: MixSchedule) -> EnvironmentChange:
    name = _present(line.operands[0], schedule)
    if list(schedule.final_weights) == [name]:
        raise ConfigError(f"{name} is the last environment of the run: attach another one before")
    return _change(name, 0.0, line)


def reweighed(line: Line, schedule: MixSchedule) -> EnvironmentChange:
    name, text = line.operands
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"the weight of {name} must be a number, not {text!r}") from None
    return _change(_present(name, schedule), weight, line)


CHANGES: Mapping[str, Callable[[Line, MixSchedule], EnvironmentChange]] = {
    "env attach": attached,
    "env detach": detached,
    "env weight": reweighed,
}


def _present(name: str, schedule: MixSchedule) -> str:
    present = list(schedule.final_weights)
    if name not in present:
        raise ConfigError(f"{name} is not in the mix{nearest(name, present)}; it consists of {', '.join(present)}")
    return name


def _change(name: str, weight: float, line: Line, environment: EnvironmentConfig | None = None) -> EnvironmentChange:
    ramp = line.integer("ramp")
    if weight <= 0 and line.tool.words != "env detach":
        raise ConfigError(f"a weight must be above 0; `async-rl env detach {name}` takes it out of the mix")
    try:
        return EnvironmentChange(name=name, weight=weight, ramp=ramp if ramp is not None else 0, environment=environment)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise ConfigError(f"{wrong['loc'][0]} {wrong['input']!r}: {wrong['msg']}") from error

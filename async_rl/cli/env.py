"""`async-rl env ...`: play, serve, attach, detach and reweigh environments, and how a line becomes a change of the mix."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from async_rl.cli.grammar import PORT, CommandLine, Option, Verb, nearest
from async_rl.cli.role_process import become, in_buffer, in_role
from async_rl.config.loading import load
from async_rl.errors import ConfigError
from async_rl.launch.commands import command

if TYPE_CHECKING:
    from async_rl.board.environment_mix import EnvironmentChange, MixSchedule
    from async_rl.config.rollout import EnvironmentConfig


def check(line: CommandLine) -> NoReturn:
    become(command("rollout_workers.checking", line.words), load(config_words(line)))


def serve(line: CommandLine) -> NoReturn:
    """No run is needed: this may be a machine, or a virtual environment, that has only what the environment needs."""
    become(command("rollout_workers.remote", line.words))


_ARGS = Option(name="args", value="JSON", help="arguments of its class, as a JSON object")

CHECK = Verb(
    words="env check",
    operands="[ENVIRONMENT]",
    help="Play some episodes of an environment, print them, and report what is wrong with it.",
    run=check,
    config="@ FILE",
    details="ENVIRONMENT is a name in the configuration, or a type; without it, all of the configuration are checked.",
    options=(
        Option(name="episodes", value="TASKS", read=int, help="number of tasks, each played several times (3)"),
        _ARGS,
        Option(name="script", value="TEXT|FILE", help="answer with this text, or with the lines of a file in turn"),
        Option(name="model", value="WHAT", help="answer with a model: a folder, a server's http://..., a name under policies"),
        Option(name="json", help="print one JSON document"),
    ),
)

SERVE = Verb(
    words="env serve",
    operands="TYPE",
    help="Serve an environment to workers elsewhere; they name it as {type: remote, args: {url: http://...}}.",
    run=serve,
    config="",
    options=(
        _ARGS,
        Option(name="host", value="ADDRESS", help="address to listen on (127.0.0.1)"),
        PORT,
        Option(
            name="token-file", value="FILE", help="file with the token that workers must send; required beyond this machine"
        ),
        Option(name="tokenizer", value="FOLDER", help="the run's, for agents that need it (Hugging Face; needs transformers)"),
        Option(name="max-episodes", value="N", read=int, least=1, help="maximum concurrent episodes (1024)"),
    ),
)

_WEIGHT = Option(name="weight", value="WEIGHT", read=float, help="weight relative to the other environments (1)")
_RAMP = Option(name="ramp", value="TASKS", read=int, help="reach the weight in equal steps over this many tasks")
MIX_VERBS = (
    Verb(
        words="env ls",
        help="List the environments of a run with their current weights and the outcomes of their groups.",
        run=in_buffer,
        options=(Option(name="json", help="print one JSON document instead of tables"),),
    ),
    Verb(
        words="env attach",
        operands="TYPE",
        help="Add an environment to a running run, from the next unassigned task on.",
        run=in_role("rollout_workers.attaching", "env", "attach"),
        options=(
            _WEIGHT,
            Option(name="name", value="NAME", help="name in metrics (default: its type)"),
            _ARGS,
            _RAMP,
            Option(name="max-share", value="SHARE", read=float, help="maximum share of a step batch"),
            Option(name="max-in-flight", value="GROUPS", read=int, help="maximum concurrent groups per worker"),
            Option(name="unchecked", help="do not create it on this machine first: only the workers have what it needs"),
        ),
    ),
    Verb(
        words="env detach",
        operands="NAME",
        help="Remove an environment from the mix; groups in flight are finished.",
        run=in_buffer,
        options=(Option(name="ramp", value="TASKS", read=int, help="fade it out over this many tasks"),),
    ),
    Verb(
        words="env weight",
        operands="NAME WEIGHT",
        help="Change the weight of an environment in a running run.",
        run=in_buffer,
        options=(_RAMP,),
    ),
)
"""Verbs that read or change the mix of environments; the buffer's process does them."""
VERBS = (CHECK, SERVE, *MIX_VERBS)

PRINTABLE = "".join(sorted({*string.printable} - {*"\r\v\f"}))

UNSET: Mapping[str, Any] = {"weight": 1.0}
"""Ignored when an environment is compared with one attached earlier: its weight is part of the mix."""


def section_of(line: CommandLine) -> EnvironmentConfig:
    """The environment that an `env attach` line describes. Raises ConfigError."""
    from async_rl.config.rollout import EnvironmentConfig

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


def config_words(line: CommandLine) -> tuple[str, ...]:
    """The words of the configuration. Without a file: the quickstart's, with a tokenizer for printable ASCII."""
    if any(word.startswith("@") for word in line.config):
        return line.config
    return ("@", "configs/quickstart.yaml", "--tokenizer.alphabet", json.dumps(PRINTABLE), *line.config)


def arguments(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args must be a JSON object, for example '{{\"length\": 8}}': {error}") from error


def attached(line: CommandLine, schedule: MixSchedule) -> EnvironmentChange:
    section = section_of(line)
    name = section.label
    known = schedule.sections.get(name)
    if known is not None and known.seen_from_anywhere().model_copy(update=UNSET) != section:
        raise ConfigError(
            f"{name} was another environment in this run ({known.type}, {json.dumps(known.args)}): "
            "give this one a --name of its own"
        )
    if name in schedule.final_weights:
        raise ConfigError(f"{name} is in the mix already; `async-rl env weight {name} WEIGHT` changes its weight")
    return _change(name, line.number("weight", 1.0), line, environment=None if known is not None else section)


def detached(line: CommandLine, schedule: MixSchedule) -> EnvironmentChange:
    name = _present(line.operands[0], schedule)
    if list(schedule.final_weights) == [name]:
        raise ConfigError(f"{name} is the last environment of the run: attach another one before")
    return _change(name, 0.0, line)


def reweighed(line: CommandLine, schedule: MixSchedule) -> EnvironmentChange:
    name, text = line.operands
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"the weight of {name} must be a number, not {text!r}") from None
    return _change(_present(name, schedule), weight, line)


CHANGES: Mapping[str, Callable[[CommandLine, MixSchedule], EnvironmentChange]] = {
    "env attach": attached,
    "env detach": detached,
    "env weight": reweighed,
}


def _present(name: str, schedule: MixSchedule) -> str:
    present = list(schedule.final_weights)
    if name not in present:
        raise ConfigError(f"{name} is not in the mix{nearest(name, present)}; it consists of {', '.join(present)}")
    return name


def _change(name: str, weight: float, line: CommandLine, environment: EnvironmentConfig | None = None) -> EnvironmentChange:
    from async_rl.board.environment_mix import EnvironmentChange

    if weight <= 0 and line.verb.words != "env detach":
        raise ConfigError(f"a weight must be above 0; `async-rl env detach {name}` takes it out of the mix")
    try:
        return EnvironmentChange(name=name, weight=weight, ramp=line.integer("ramp", 0), environment=environment)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise ConfigError(f"{wrong['loc'][0]} {wrong['input']!r}: {wrong['msg']}") from error

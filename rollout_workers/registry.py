"""Make an environment from its `type`: a built-in name, an installed plug-in, or a class in the user's own code."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from pydantic import JsonValue

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.imports.references import load_reference
from async_rl.protocols import Agent

ENTRY_POINT_GROUP = "async_rl.environments"

MAKE_AGENT = "make_agent"
"""Attribute of a decorated function: makes its agent from a name and a seed."""

BUILT_IN = {
    "calculator": "rollout_workers.environments.calculator:Calculator",
    "counting": "rollout_workers.environments.counting:Counting",
    "dataset": "rollout_workers.agents.dataset:DatasetAgent",
    "even_digits": "rollout_workers.environments.even_digits:EvenDigits",
    "guess_number": "rollout_workers.environments.guess_number:GuessNumber",
    "gymnasium": "rollout_workers.adapters.gymnasium:Gymnasium",
    "multi_task": "rollout_workers.agents.multi_task:from_config",
    "nim": "rollout_workers.environments.nim:NimHeadToHead",
    "nim_self_play": "rollout_workers.environments.nim:NimSelfPlay",
    "openenv": "rollout_workers.adapters.openenv:OpenEnv",
    "reasoning_gym": "rollout_workers.adapters.reasoning_gym:ReasoningGym",
    "remote": "rollout_workers.remote.client:RemoteAgent",
    "textarena": "rollout_workers.adapters.textarena:TextArena",
    "textarena_self_play": "rollout_workers.adapters.textarena:TextArenaSelfPlay",
    "verifiers": "rollout_workers.adapters.verifiers:Verifiers",
}


def build_agent(config: EnvironmentConfig, seed: int) -> Agent:
    """Make the agent that a section of the configuration describes. An environment without `rollout` is played by an
    EnvironmentAgent. Raises ConfigError for anything wrong with it.
    """
    make = _maker(find_agent_type(config.type))
    arguments = _arguments(make, config, seed)
    try:
        made = make(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {config.label!r} ({config.type}) cannot be made: {error}") from error
    return _playable(made, f"{config.label!r} ({config.type})", name=config.label, seed=seed)


def agent_of(maker: Callable[..., Any], *, name: str, seed: int = 0) -> Agent:
    """Make the agent of a class or a decorated function, as a configuration that names it would."""
    return _playable(_maker(maker)(name=name, seed=seed), repr(name), name=name, seed=seed)


def _playable(made: Any, described: str, *, name: str, seed: int) -> Agent:
    if not _has(made, "task"):
        raise ConfigError(f"environment {described} has no method task(index), which poses its tasks")
    if _has(made, "rollout"):
        return made
    if _has(made, "reward") or _has(made, "trajectory_reward"):
        from rollout_workers.agents.environment_agent import EnvironmentAgent  # late: agents import this module

        return EnvironmentAgent(made, name=name, seed=seed)
    raise ConfigError(
        f"environment {described} has neither reward(task, response), which scores an answer, "
        "nor rollout(task, inference, context), which plays and scores an episode"
    )


def _has(made: object, method: str) -> bool:
    return callable(getattr(made, method, None))


def find_agent_type(type_name: str) -> Callable[..., Any]:
    """Find `even_digits`, `package.module:Class`, `folder/file.py:Class`, or a name registered as an entry point."""
    if type_name in BUILT_IN:
        return load_attribute(BUILT_IN[type_name])
    if ":" in type_name:
        return load_attribute(type_name)
    plug_ins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if type_name in plug_ins:
        return load_attribute(plug_ins[type_name].value)
    known = sorted({*BUILT_IN, *plug_ins})
    raise ConfigError(
        f"no environment is called {type_name!r}{_nearest(type_name, known)}; known are {', '.join(known)}, "
        "and a class of yours is named module:Class or path/to/file.py:Class"
    )


def load_attribute(reference: str) -> Callable[..., Any]:
    """Import the callable named by `package.module:name` or `path/to/file.py:name`."""
    found = load_reference(reference)
    if not callable(found):
        raise ConfigError(f"{reference} names {type(found).__name__} {found!r}, which cannot be called")
    return found


def _maker(found: Callable[..., Any]) -> Callable[..., Any]:
    """A decorated function stays what it was and carries what makes its agent."""
    return getattr(found, MAKE_AGENT, found)


def _arguments(make: Callable[..., Any], config: EnvironmentConfig, seed: int) -> dict[str, JsonValue]:
    """The configured arguments, plus `name` and `seed` where the callable takes them."""
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any:
        for name in config.args:
            if name not in parameters:
                known = ", ".join(sorted(set(parameters) - {"name", "seed"}))
                raise ConfigError(
                    f"environment {config.label!r} ({config.type}) takes no argument {name!r}"
                    f"{_nearest(name, parameters)}; it takes {known if known else 'none'}"
                )
    given: dict[str, JsonValue] = {"name": config.label, "seed": seed}
    ours = {name: value for name, value in given.items() if takes_any or name in parameters}
    arguments = {**ours, **config.args}
    missing = [name for name, parameter in parameters.items() if _is_required(parameter) and name not in arguments]
    if missing:
        raise ConfigError(f"environment {config.label!r} ({config.type}) needs args: {', '.join(missing)}")
    return arguments


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variable


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""

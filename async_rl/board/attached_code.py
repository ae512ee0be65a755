"""Decides which code an environment may name that is attached to a running run. Pure.

Without this check, write access to the mix of environments would be enough to choose what every worker imports and calls. Code
that the run's file names is allowed; everything else must be allowed in that file by `environments_from`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.imports.references import absolute_reference

HARMLESS: Final = frozenset(
    {
        *("calculator", "counting", "dataset", "even_digits", "guess_number", "multi_task", "nim", "nim_self_play"),
        *("openenv", "reasoning_gym", "remote", "textarena", "textarena_self_play"),
    }
)
"""Shipped environments that load no code except what references in their arguments name."""
_REFERENCE: Final = re.compile(r"(?!\w+://).+:[^\s/\]]+", re.DOTALL)
"""`package.module:name`, `path/to/file.py:name`, also gymnasium's `module:Name-v0`; but not a URL, nor `train[:95%]`."""


def refuse_foreign_code(
    attached: EnvironmentConfig, configured: Sequence[EnvironmentConfig], environments_from: Sequence[str]
) -> None:
    """Raise ConfigError for a type, or a reference in the arguments, that is neither configured, shipped nor allowed."""
    known = {name for section in configured for name in _named(section)}
    for name in _named(attached):
        if name not in known and name not in HARMLESS and not any(_is_inside(name, place) for place in environments_from):
            module = name.rpartition(":")[0] or name
            raise ConfigError(
                f"environment {attached.label!r} may not be attached: it names {name}, which this run's file does not; "
                f"`environments_from: [{module}]` in that file allows it"
            )


def _named(section: EnvironmentConfig) -> Iterator[str]:
    yield from _names(absolute_reference(section.type), section.args)


def _names(kind: str, args: Any) -> Iterator[str]:
    yield kind
    yield from _references(args)
    if kind == "multi_task" and isinstance(args, dict):
        for member in cast("dict[str, Any]", args).get("environments") or ():
            if isinstance(member, dict):
                described = cast("dict[str, Any]", member)
                yield from _names(str(described.get("type")), described.get("args"))


def _references(value: Any) -> Iterator[str]:
    """Every string in the arguments that may name code, at any depth."""
    if isinstance(value, dict):
        yield from (name for entry in cast("dict[str, Any]", value).values() for name in _references(entry))
    elif isinstance(value, list):
        yield from (name for entry in cast("list[Any]", value) for name in _references(entry))
    elif isinstance(value, str) and _REFERENCE.fullmatch(value):
        yield value


def _is_inside(name: str, place: str) -> bool:
    """Whether a reference, or a plug-in's name, is the module, file or folder `place`, or inside it."""
    module = name.rpartition(":")[0] or name
    if module.endswith(".py"):
        return Path(module).resolve().is_relative_to(Path(place).resolve())
    return module == place or module.startswith(f"{place}.")

"""Decides which code an environment may name that is attached to a running run, or that a worker gets from the run it joins.

Without this check, write access to the mix of environments would be enough to choose what every worker imports and calls. Code
that the run's file names is allowed; everything else must be allowed in that file by `environments_from`. A worker that joins
has no file of the run: `environments_from` of its own must allow everything, files to read as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
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
    name = foreign_code(attached, environments_from, known={name for section in configured for name in _named(section)})
    if name is not None:
        module = name.rpartition(":")[0] or name
        raise ConfigError(
            f"environment {attached.label!r} may not be attached: it names {name}, which this run's file does not; "
            f"`environments_from: [{module}]` in that file allows it"
        )


def refuse_foreign_files(attached: EnvironmentConfig, environments_from: Sequence[str]) -> None:
    """Raise ConfigError for arguments that name files of a machine which joined the run and did not allow them."""
    for text in strings(attached.args):
        if foreign_file(text, environments_from):
            raise ConfigError(
                f"environment {attached.label!r} may not be attached: it names {text}, which this worker was not allowed to "
                f"read; its own --environments_from '[{text}]' allows it"
            )


def foreign_code(section: EnvironmentConfig, environments_from: Sequence[str], known: Collection[str] = ()) -> str | None:
    """The first type or reference that a section names and that is neither known, shipped nor allowed."""
    for name in _named(section):
        if name not in known and name not in HARMLESS and not any(_is_inside(name, place) for place in environments_from):
            return name
    return None


def foreign_file(text: str, environments_from: Sequence[str], *, is_path: bool = False) -> bool:
    """Whether a text names a file or folder here (`is_path`: it is known to be a path) that is not allowed."""
    path = Path(text)
    if not (is_path or path.is_absolute() or text.startswith("~") or ".." in path.parts or _exists(path)):
        return False
    return not any(path.resolve().is_relative_to(Path(place).resolve()) for place in environments_from)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name, or in a folder that may not be entered
        return False


def strings(value: Any) -> Iterator[str]:
    """All strings in the arguments of an environment, at any depth."""
    if isinstance(value, dict):
        yield from (text for entry in cast("dict[str, Any]", value).values() for text in strings(entry))
    elif isinstance(value, list):
        yield from (text for entry in cast("list[Any]", value) for text in strings(entry))
    elif isinstance(value, str):
        yield value


def _named(section: EnvironmentConfig) -> Iterator[str]:
    yield from _names(absolute_reference(section.type), section.args)


def _names(kind: str, args: Any) -> Iterator[str]:
    yield kind
    yield from (text for text in strings(args) if _REFERENCE.fullmatch(text))
    if kind == "multi_task" and isinstance(args, dict):
        for member in cast("dict[str, Any]", args).get("environments") or ():
            if isinstance(member, dict):
                described = cast("dict[str, Any]", member)
                yield from _names(str(described.get("type")), described.get("args"))


def _is_inside(name: str, place: str) -> bool:
    """Whether a reference, or a plug-in's name, is the module, file or folder `place`, or inside it."""
    module = name.rpartition(":")[0] or name
    if module.endswith(".py"):
        return Path(module).resolve().is_relative_to(Path(place).resolve())
    return module == place or module.startswith(f"{place}.")

"""A line that somebody typed after `async-rl`: what may stand in it, reading it, explaining it.

Verbs are data, so that the `async-rl` command explains and checks a line without importing the role that does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from async_rl.config import Config
from async_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    name: str
    help: str
    value: str = ""
    """What is written after it; empty for a switch."""
    read: Callable[[str], object] = str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    words: str
    help: str
    family: str = ""
    """What is typed before its words, and left out where only this family is spoken of."""
    operands: str = ""
    """`ID`: exactly one; `NAME WEIGHT`: exactly two; `ID...`: at least one; `[KEY=VALUE]...`: any number."""
    options: tuple[Option, ...] = ()
    describes_run: bool = True
    """Its line also says which run is meant."""

    @property
    def typed(self) -> str:
        """All that is typed after `async-rl`."""
        return f"{self.family} {self.words}".lstrip()

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One command, understood."""

    tool: Tool
    config: tuple[str, ...]
    """The words that describe the run: `@ FILE` and `--dotted.key value`."""
    operands: tuple[str, ...]
    chosen: Mapping[str, object]

    def has(self, name: str) -> bool:
        return name in self.chosen

    def text(self, name: str) -> str | None:
        return None if (value := self.chosen.get(name)) is None else str(value)

    def integer(self, name: str) -> int | None:
        value = self.chosen.get(name)
        return value if isinstance(value, int) else None

    def number(self, name: str) -> float | None:
        value = self.chosen.get(name)
        return float(value) if isinstance(value, int | float) else None


def read(tool: Tool, words: Sequence[str]) -> Line:
    config: list[str] = []
    operands: list[str] = []
    chosen: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word[2:].partition("=")
        if word.startswith("@"):
            config += [word, *([] if len(word) > 1 else _following(rest))]
        elif not word.startswith("-"):
            operands.append(word)
        elif option := tool.option(name) if word.startswith("--") else None:
            chosen[name] = _value(option, [text] if equals else _following(rest) if option.value else [])
        elif "." in name or name in Config.model_fields:
            config += [word, *([] if equals else _following(rest))]
        else:
            raise ConfigError(_unknown_option(tool, word))
    _check_operands(tool, operands)
    return Line(tool=tool, config=tuple(config), operands=tuple(operands), chosen=chosen)


def manual(tool: Tool) -> str:
    flags = [(f"--{option.name} {option.value}".rstrip(), _option_help(option)) for option in tool.options]
    width = max((len(flag) for flag, _ in flags), default=0)
    options = "".join(f"\n  {flag:<{width}}  {text}" for flag, text in flags)
    return f"{_line_of(tool)}\n\n{tool.help}" + (f"\n{options}" if flags else "")


def nearest(asked: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing."""
    found = get_close_matches(asked, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _line_of(tool: Tool) -> str:
    return f"async-rl {tool.typed} {tool.operands}".rstrip() + (" @ run/config.yaml" if tool.describes_run else "")


def _option_help(option: Option) -> str:
    return f"{option.help} ({', '.join(option.choices)})" if option.choices else option.help


def _following(rest: Iterator[str]) -> list[str]:
    return [word for word in (next(rest, None),) if word is not None]


def _value(option: Option, given: list[str]) -> object:
    if not option.value:
        if given:
            raise ConfigError(f"--{option.name} is a switch and takes no value")
        return True
    if not given or given[0].startswith(("--", "@")):
        raise ConfigError(f"--{option.name} needs a value: --{option.name} {option.value}")
    if option.choices and given[0] not in option.choices:
        raise ConfigError(f"--{option.name} {given[0]}: choose one of {', '.join(option.choices)}")
    try:
        return option.read(given[0])
    except ValueError:
        raise ConfigError(f"--{option.name} {given[0]!r} is not a number") from None


def _check_operands(tool: Tool, operands: Sequence[str]) -> None:
    wanted = tool.operands
    count = len(wanted.split())
    least = 0 if wanted.startswith("[") else count
    most = len(operands) if wanted.endswith("...") else count
    if len(operands) < least:
        raise ConfigError(f"{tool.typed} needs {wanted.removesuffix('...')}: {_line_of(tool)}")
    if len(operands) > most:
        raise ConfigError(
            f"{tool.typed} does not know what to do with {operands[most]!r}: {_line_of(tool)} {_flags(tool)}".rstrip()
        )


def _flags(tool: Tool) -> str:
    return " ".join(f"[--{option.name} {option.value}".rstrip() + "]" for option in tool.options)


def _unknown_option(tool: Tool, word: str) -> str:
    known = [f"--{option.name}" for option in tool.options]
    return f"{tool.typed} has no option {word}{nearest(word, known)}"

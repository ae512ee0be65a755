"""The grammar of `async-rl VERB ...`: what a verb accepts, how a command line is parsed, and its `--help` text.

A verb is a value, so that the `async-rl` command can explain and check a line without importing the role that does the work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from async_rl.errors import ConfigError

DefaultT = TypeVar("DefaultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    name: str
    help: str
    value: str = ""
    """Placeholder of its value; empty for a switch."""
    read: Callable[[str], object] = str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    """The range of a number."""

    @property
    def usage(self) -> str:
        return f"--{self.name} {self.value}".rstrip()

    @property
    def meaning(self) -> str:
        return f"{self.help} ({', '.join(self.choices)})" if self.choices else self.help


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    words: str
    """All that is typed after `async-rl` to choose it."""
    help: str
    run: Callable[[CommandLine], int]
    operands: str = ""
    """`ID`: exactly one; `NAME WEIGHT`: exactly two; `[FOLDER]`: at most one; `ID...`: at least one; `[KEY=VALUE]...`: any
    number."""
    options: tuple[Option, ...] = ()
    config: str = "@ run/config.yaml"
    """How its usage line names the configuration; empty if it takes none."""
    details: str = ""
    """What `--help` prints after the help sentence."""

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.name == name), None)

    @property
    def usage(self) -> str:
        return " ".join(part for part in ("async-rl", self.words, self.operands, self.config) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A parsed command line."""

    verb: Verb
    words: tuple[str, ...]
    """All words after the verb's, as typed."""
    config: tuple[str, ...]
    """The words that describe the configuration: `@ FILE` and `--dotted.key value`."""
    operands: tuple[str, ...]
    chosen: Mapping[str, object]
    """Values of the options that were given; True for a switch."""

    def has(self, name: str) -> bool:
        return name in self.chosen

    def text(self, name: str, default: DefaultT = None) -> str | DefaultT:
        return default if (value := self.chosen.get(name)) is None else str(value)

    def integer(self, name: str, default: DefaultT = None) -> int | DefaultT:
        value = self.chosen.get(name)
        return value if isinstance(value, int) else default

    def number(self, name: str, default: DefaultT = None) -> float | DefaultT:
        value = self.chosen.get(name)
        return float(value) if isinstance(value, int | float) else default


PORT = Option(name="port", value="PORT", read=int, least=0, most=65535, help="port to listen on; 0 takes a free one (0)")


def read(verb: Verb, words: Sequence[str]) -> CommandLine:
    """Parse the words after the verb's. Raises ConfigError.

    Words of the configuration are only collected here; `async_rl.config.loading` checks them. To a verb without options, every
    flag is one of them.
    """
    config: list[str] = []
    operands: list[str] = []
    chosen: dict[str, object] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, text = word[2:].partition("=")
        if word.startswith("@"):
            config += [word, *([rest.popleft()] if word == "@" and rest else [])]
        elif not word.startswith("-"):
            operands.append(word)
        elif option := verb.option(name) if word.startswith("--") else None:
            chosen[name] = _value(option, [text] if equals else _following(rest) if option.value else [])
        elif word.startswith("--") and _is_setting(verb, name):
            config += [word, *([] if equals else _following(rest))]
        else:
            known = [f"--{option.name}" for option in verb.options]
            raise ConfigError(f"{verb.words} has no option {word}{nearest(word, known)}")
    _check_operands(verb, operands)
    return CommandLine(verb=verb, words=tuple(words), config=tuple(config), operands=tuple(operands), chosen=chosen)


def manual(verb: Verb) -> str:
    """The `--help` text."""
    options = aligned({option.usage: option.meaning for option in verb.options})
    return "\n\n".join(part for part in (verb.usage, verb.help, verb.details, options) if part)


def find_verb(verbs: Iterable[Verb], words: Sequence[str], *, family: str = "") -> tuple[Verb, Sequence[str]] | None:
    """The verb that a line begins with, where `family` (`buffer `) is left out, and the rest of the line."""
    for verb in verbs:
        own = verb.words.removeprefix(family).split()
        if list(words[: len(own)]) == own:
            return verb, words[len(own) :]
    return None


def unknown_verb(verbs: Iterable[Verb], words: Sequence[str], *, family: str = "") -> str:
    """Say that there is no such verb, with the most similar ones; `words` are the first of the line, without `family`."""
    known = [verb.words.removeprefix(family) for verb in verbs]
    starting = [verb for verb in known if words and verb.startswith(f"{words[0]} ")]
    asked = " ".join(words if starting or family else words[:1])
    found = get_close_matches(asked, starting, n=1) or starting or get_close_matches(asked, known, n=1)
    if not (found := found or get_close_matches("".join(words[:1]), known, n=1)):
        return f"there is no verb '{family}{asked}'; `async-rl {family}--help` lists them"
    return f"there is no verb '{family}{asked}'; did you mean {' or '.join(f'`async-rl {family}{verb}`' for verb in found)}?"


def aligned(texts: Mapping[str, str]) -> str:
    """Indented lines of a name and its text, in two columns."""
    width = max(map(len, texts), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in texts.items())


def nearest(asked: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing."""
    found = get_close_matches(asked, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _is_setting(verb: Verb, name: str) -> bool:
    from async_rl.config import Config

    return "." in name or name in Config.model_fields or (bool(verb.config) and not verb.options)


def _following(rest: deque[str]) -> list[str]:
    """The next word, if it can be a value."""
    return [rest.popleft()] if rest and not rest[0].startswith(("--", "@")) else []


def _value(option: Option, given: list[str]) -> object:
    if not option.value:
        if given:
            raise ConfigError(f"--{option.name} is a switch and takes no value")
        return True
    if not given:
        raise ConfigError(f"--{option.name} needs a value: {option.usage}")
    if option.choices and given[0] not in option.choices:
        raise ConfigError(f"--{option.name} {given[0]}: choose one of {', '.join(option.choices)}")
    try:
        value = option.read(given[0])
    except ValueError:
        raise ConfigError(f"--{option.name} {given[0]!r} is not a number") from None
    if isinstance(value, int | float) and not option.least <= value <= option.most:
        most = "" if option.most == math.inf else f" and at most {option.most:g}"
        raise ConfigError(f"--{option.name} {given[0]}: must be at least {option.least:g}{most}")
    return value


def _check_operands(verb: Verb, operands: Sequence[str]) -> None:
    wanted = verb.operands
    count = len(wanted.split())
    least = 0 if wanted.startswith("[") else count
    most = len(operands) if wanted.endswith("...") else count
    if len(operands) < least:
        raise ConfigError(f"{verb.words} needs {wanted.removesuffix('...')}: {verb.usage}")
    if len(operands) > most:
        flags = " ".join(f"[{option.usage}]" for option in verb.options)
        raise ConfigError(f"{verb.words} takes no operand {operands[most]!r}: {verb.usage} {flags}".rstrip())

"""What people can type after `async-rl buffer`: the verbs, their options, and the reader of such a line.

It is data and stands here, so that the `async-rl` command explains and checks a line without importing the role that does
the work. What each verb does is found under the same words in `buffer/tools/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from async_rl.config import Config
from async_rl.errors import ConfigError

STATES = ("reserved", "ready", "again", "taken", "kept")


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
    operands: str = ""
    """`ID`: exactly one; `NAME WEIGHT`: exactly two; `ID...`: at least one; `[KEY=VALUE]...`: any number."""
    options: tuple[Option, ...] = ()

    @property
    def typed(self) -> str:
        """Its words after `async-rl`."""
        return self.words if self.words.startswith("env ") else f"buffer {self.words}"

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


def find(words: Sequence[str]) -> tuple[Tool, Sequence[str]]:
    """The tool that a line begins with, and the rest of the line."""
    for tool in TOOLS:
        own = tool.words.split()
        if list(words[: len(own)]) == own:
            return tool, words[len(own) :]
    raise ConfigError(_unknown_verb([word for word in words[:2] if not word.startswith(("-", "@"))]))


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


def listing() -> str:
    """Every verb in one line."""
    own = [tool for tool in TOOLS if tool not in MIX]
    width = max(len(_usage(tool)) for tool in own)
    lines = "\n".join(f"  {_usage(tool):<{width}}  {tool.help}" for tool in own)
    return (
        f"async-rl buffer VERB @ run/config.yaml\n\n{lines}\n\n"
        "`async-rl buffer VERB --help` says more. A run that has ended is woken for as long as it takes to look."
    )


def manual(tool: Tool) -> str:
    flags = [(f"--{option.name} {option.value}".rstrip(), _option_help(option)) for option in tool.options]
    width = max((len(flag) for flag, _ in flags), default=0)
    options = "".join(f"\n  {flag:<{width}}  {text}" for flag, text in flags)
    return f"{_line_of(tool)}\n\n{tool.help}" + (f"\n{options}" if flags else "")


def nearest(asked: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing."""
    found = get_close_matches(asked, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _usage(tool: Tool) -> str:
    return f"{tool.words} {tool.operands}".rstrip()


def _line_of(tool: Tool) -> str:
    return f"async-rl {tool.typed} {tool.operands}".rstrip() + " @ run/config.yaml"


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
        raise ConfigError(f"{tool.typed} does not know what to do with {operands[most]!r}")


def _unknown_verb(words: Sequence[str]) -> str:
    known = [tool.words for tool in TOOLS]
    asked = " ".join(words)
    starting = [verb for verb in known if words and verb.startswith(f"{words[0]} ")]
    found = get_close_matches(asked, starting, n=1) or starting or get_close_matches(asked, known, n=1)
    found = found if found else get_close_matches(words[0] if words else "", known, n=1)
    if not found:
        return f"there is no verb 'buffer {asked}'; `async-rl buffer --help` lists them"
    return f"there is no verb 'buffer {asked}'; did you mean {' or '.join(f'`async-rl buffer {verb}`' for verb in found)}?"


def _unknown_option(tool: Tool, word: str) -> str:
    known = [f"--{option.name}" for option in tool.options]
    return f"buffer {tool.words} has no option {word}{nearest(word, known)}"


_JSON = Option(name="json", help="one JSON document instead of tables")
_READING = (
    Option(name="rollout", value="N", read=int, help="the conversation of this rollout, with its rewards"),
    Option(name="tokens", help="token by token, with probabilities and versions"),
    _JSON,
)
_ENVIRONMENT = Option(name="environment", value="NAME", help="only groups of this environment")

LIMITS = Tool(
    words="limits",
    operands="[KEY=VALUE]...",
    help="The limits in force; with KEY=VALUE, change them while the run goes on.",
    options=(_JSON,),
)

_WEIGHT = Option(name="weight", value="WEIGHT", read=float, help="beside the weights of the others (1)")
_RAMP = Option(
    name="ramp", value="TASKS", read=int, help="reach the weight in even steps over so many tasks, instead of at once"
)
MIX = (
    Tool(
        words="env ls", help="The environments of a run: their weights now, and what became of their groups.", options=(_JSON,)
    ),
    Tool(
        words="env attach",
        operands="TYPE",
        help="Add an environment while the run goes on; workers begin with the next task that nobody has.",
        options=(
            _WEIGHT,
            Option(name="name", value="NAME", help="how it is called in metrics; its type, if not given"),
            Option(name="args", value="JSON", help="arguments of its class, as an object"),
            _RAMP,
            Option(name="max-share", value="SHARE", read=float, help="at most this share of a batch's groups"),
            Option(name="max-in-flight", value="GROUPS", read=int, help="at most so many of its groups at once in one worker"),
            Option(name="unchecked", help="do not make it here first: only the workers have what it needs"),
        ),
    ),
    Tool(
        words="env detach",
        operands="NAME",
        help="Take an environment out of the mix; groups that are being rolled out are finished.",
        options=(Option(name="ramp", value="TASKS", read=int, help="fade it out over so many tasks"),),
    ),
    Tool(
        words="env weight",
        operands="NAME WEIGHT",
        help="Give an environment another weight while the run goes on.",
        options=(_RAMP,),
    ),
)
"""What changes the mix of environments; their words stand after `async-rl` itself."""

TOOLS = (
    *MIX,
    Tool(words="serve", help="Be the run's own Redis server, and keep it alive."),
    Tool(
        words="stats",
        help="What the buffer holds, how fast it moves, and what the learner waits for.",
        options=(
            Option(name="watch", help="again every second, until Ctrl-C"),
            Option(name="over", value="SECONDS", read=float, help="count for this long, to say rates per second"),
            _JSON,
        ),
    ),
    Tool(words="audit", help="Prove that every ticket is in exactly one place; exits 1 if not.", options=(_JSON,)),
    Tool(
        words="ls",
        help="The groups that have not ended, one a line, in the order of admission.",
        options=(
            Option(name="state", value="STATE", choices=STATES, help="only groups in this state"),
            _ENVIRONMENT,
            Option(name="worker", value="NAME", help="only groups of this worker"),
            Option(name="older-than", value="VERSION", read=int, help="only groups with a token from before this version"),
            Option(name="limit", value="N", read=int, help="at most so many (50)"),
            _JSON,
        ),
    ),
    Tool(
        words="show",
        operands="ID",
        help="A group: its history, its rollouts and rewards; from the buffer, the quarantine or the archive.",
        options=_READING,
    ),
    Tool(
        words="tail",
        help="Follow what happens, one line per group, until Ctrl-C.",
        options=(_ENVIRONMENT, Option(name="json", help="one JSON document per line")),
    ),
    Tool(words="quarantine ls", help="The payloads that were refused, and why.", options=(_JSON,)),
    Tool(
        words="quarantine show", operands="ID", help="What a refused payload holds, as far as it can be read.", options=_READING
    ),
    Tool(words="quarantine release", operands="ID", help="Make it ready again, if it is sound now.", options=(_JSON,)),
    Tool(words="quarantine forget", operands="ID...", help="Delete refused payloads and their reports.", options=(_JSON,)),
    Tool(words="archive ls", help="What the archive of spent groups holds.", options=(_JSON,)),
    Tool(
        words="archive export",
        help="The archived rollouts as JSON lines.",
        options=(
            Option(name="out", value="FILE", help="a file instead of the standard output"),
            Option(name="tokens", help="with token ids, log-probabilities and versions"),
        ),
    ),
    Tool(
        words="vacuum",
        help="Free what nobody needs any more: memory and disk. Groups that are alive are never touched.",
        options=(
            Option(name="quarantine", help="also refused payloads and the reports on them"),
            Option(name="dry-run", help="only say what would be freed"),
            _JSON,
        ),
    ),
    LIMITS,
    Tool(
        words="users create",
        help="Redis users for workers, learner and monitor, with passwords of their own.",
        options=(_JSON,),
    ),
    Tool(words="users ls", help="The run's Redis users and what they may do.", options=(_JSON,)),
)

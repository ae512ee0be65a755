"""What people can type after `async-rl buffer`, and the verbs after `async-rl env` and `weights` that the same process does.

What each of them does is found under the same words in `buffer/tools/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial

from async_rl.cli import weights as weights_verbs
from async_rl.cli.grammar import Option, Tool
from async_rl.errors import ConfigError

STATES = ("reserved", "ready", "again", "taken", "kept")


def find(words: Sequence[str]) -> tuple[Tool, Sequence[str]]:
    """The tool that a line begins with, and the rest of the line."""
    for tool in TOOLS:
        own = tool.words.split()
        if list(words[: len(own)]) == own:
            return tool, words[len(own) :]
    raise ConfigError(_unknown_verb([word for word in words[:2] if not word.startswith(("-", "@"))]))


def listing() -> str:
    """Every verb in one line."""
    own = [tool for tool in TOOLS if tool not in ELSEWHERE]
    width = max(len(_usage(tool)) for tool in own)
    lines = "\n".join(f"  {_usage(tool):<{width}}  {tool.help}" for tool in own)
    return (
        f"async-rl buffer VERB @ run/config.yaml\n\n{lines}\n\n"
        "`async-rl buffer VERB --help` says more. A run that has ended is woken for as long as it takes to look."
    )


def _usage(tool: Tool) -> str:
    return f"{tool.words} {tool.operands}".rstrip()


def _unknown_verb(words: Sequence[str]) -> str:
    known = [tool.words for tool in TOOLS]
    asked = " ".join(words)
    starting = [verb for verb in known if words and verb.startswith(f"{words[0]} ")]
    found = get_close_matches(asked, starting, n=1) or starting or get_close_matches(asked, known, n=1)
    found = found if found else get_close_matches(words[0] if words else "", known, n=1)
    if not found:
        return f"there is no verb 'buffer {asked}'; `async-rl buffer --help` lists them"
    return f"there is no verb 'buffer {asked}'; did you mean {' or '.join(f'`async-rl buffer {verb}`' for verb in found)}?"


_verb = partial(Tool, family="buffer")
_JSON = Option(name="json", help="one JSON document instead of tables")
_READING = (
    Option(name="rollout", value="N", read=int, help="the conversation of this rollout, with its rewards"),
    Option(name="tokens", help="token by token, with probabilities and versions"),
    _JSON,
)
_ENVIRONMENT = Option(name="environment", value="NAME", help="only groups of this environment")

RUN_AUDIT = Tool(
    words="audit",
    help="Prove from Redis, journal, checkpoints and archive that a run lost and repeated nothing; exits 1 if not.",
    options=(
        Option(name="bytes", help="read every byte of the checkpoints, not only their sizes"),
        Option(name="files-only", help="leave Redis out, for a copy of a run's folder"),
        _JSON,
    ),
)
"""Stands after `async-rl` itself; a process of its own does it (buffer/run_audit)."""

LIMITS = _verb(
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
"""What changes the mix of environments."""

ELSEWHERE = (*MIX, *weights_verbs.TOOLS)
"""Their words stand after `async-rl` itself."""

TOOLS = (
    *ELSEWHERE,
    _verb(words="serve", help="Be the run's own Redis server, and keep it alive."),
    _verb(
        words="stats",
        help="What the buffer holds, how fast it moves, and what the learner waits for.",
        options=(
            Option(name="watch", help="again every second, until Ctrl-C"),
            Option(name="over", value="SECONDS", read=float, help="count for this long, to say rates per second"),
            _JSON,
        ),
    ),
    _verb(words="audit", help="Prove that every ticket is in exactly one place; exits 1 if not.", options=(_JSON,)),
    _verb(
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
    _verb(
        words="show",
        operands="ID",
        help="A group: its history, its rollouts and rewards; from the buffer, the quarantine or the archive.",
        options=_READING,
    ),
    _verb(
        words="tail",
        help="Follow what happens, one line per group, until Ctrl-C.",
        options=(_ENVIRONMENT, Option(name="json", help="one JSON document per line")),
    ),
    _verb(words="quarantine ls", help="The payloads that were refused, and why.", options=(_JSON,)),
    _verb(
        words="quarantine show", operands="ID", help="What a refused payload holds, as far as it can be read.", options=_READING
    ),
    _verb(words="quarantine release", operands="ID", help="Make it ready again, if it is sound now.", options=(_JSON,)),
    _verb(words="quarantine forget", operands="ID...", help="Delete refused payloads and their reports.", options=(_JSON,)),
    _verb(words="archive ls", help="What the archive of spent groups holds.", options=(_JSON,)),
    _verb(
        words="archive export",
        help="The archived rollouts as JSON lines.",
        options=(
            Option(name="out", value="FILE", help="a file instead of the standard output"),
            Option(name="tokens", help="with token ids, log-probabilities and versions"),
        ),
    ),
    _verb(
        words="vacuum",
        help="Free what nobody needs any more: memory and disk. Groups that are alive are never touched.",
        options=(
            Option(name="quarantine", help="also refused payloads and the reports on them"),
            Option(name="dry-run", help="only say what would be freed"),
            _JSON,
        ),
    ),
    LIMITS,
    _verb(
        words="users create",
        help="Redis users for workers, learner, operators and monitors, with passwords of their own.",
        options=(_JSON,),
    ),
    _verb(words="users ls", help="The run's Redis users and what they may do.", options=(_JSON,)),
)

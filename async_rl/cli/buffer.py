"""`async-rl buffer ...` and `ctl ...`; buffer/tools does the work, under the same words."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.cli import env, fleet, weights
from async_rl.cli.grammar import CommandLine, Option, Verb, aligned, find_verb, unknown_verb
from async_rl.cli.role_process import become, in_buffer
from async_rl.config.loading import load_unfetched
from async_rl.errors import ConfigError
from async_rl.launch.commands import command

STATES = ("reserved", "ready", "again", "taken", "kept")
FAMILY = "buffer "


def find(words: Sequence[str]) -> tuple[Verb, Sequence[str]]:
    """The verb of the buffer's process that a line begins with (`buffer ` is left out), and the rest of the line."""
    if found := find_verb((*env.MIX_VERBS, *weights.VERBS, *fleet.REDIS_VERBS, *BUFFER_VERBS), words, family=FAMILY):
        return found
    raise ConfigError(
        unknown_verb(BUFFER_VERBS, [word for word in words[:2] if not word.startswith(("-", "@"))], family=FAMILY)
    )


def listing() -> str:
    """All verbs, one line each."""
    usages = {f"{verb.words.removeprefix(FAMILY)} {verb.operands}".rstrip(): verb.help for verb in BUFFER_VERBS}
    return (
        f"async-rl buffer VERB @ run/config.yaml\n\n{aligned(usages)}\n\n"
        "`async-rl buffer VERB --help` prints details. If the run has ended, its server is started for the command."
    )


def list_verbs(line: CommandLine) -> int:
    """Reached by `async-rl buffer` alone, and by words that are no verb."""
    if line.words:
        find(line.words)
    print(listing())
    return 0


def limits(line: CommandLine) -> int:
    become(command("buffer", ["limits", *line.words]), load_unfetched(line.config))


def _verb(*, words: str, help: str, operands: str = "", options: tuple[Option, ...] = ()) -> Verb:
    return Verb(words=FAMILY + words, help=help, run=in_buffer, operands=operands, options=options)


_JSON = Option(name="json", help="print one JSON document instead of tables")
_READING = (
    Option(name="rollout", value="N", read=int, help="show this rollout's conversation and rewards"),
    Option(name="tokens", help="show every token with probability and version"),
    _JSON,
)
_ENVIRONMENT = Option(name="environment", value="NAME", help="only groups of this environment")

BUFFER_VERBS = (
    _verb(words="serve", help="Start the run's embedded Redis server, and restart it when it dies."),
    _verb(
        words="stats",
        help="Show what the buffer holds, its throughput, and what the learner waits for.",
        options=(
            Option(name="watch", help="repeat every second, until Ctrl-C"),
            Option(name="over", value="SECONDS", read=float, help="measure rates over this long"),
            _JSON,
        ),
    ),
    _verb(words="audit", help="Check that every ticket is in exactly one state; exits 1 if not.", options=(_JSON,)),
    _verb(
        words="ls",
        help="List the groups that have not ended, in the order of admission.",
        options=(
            Option(name="state", value="STATE", choices=STATES, help="only groups in this state"),
            _ENVIRONMENT,
            Option(name="worker", value="NAME", help="only groups of this worker"),
            Option(name="older-than", value="VERSION", read=int, help="only groups with a token older than this version"),
            Option(name="limit", value="N", read=int, help="maximum number of groups (50)"),
            _JSON,
        ),
    ),
    _verb(
        words="show",
        operands="ID",
        help="Show a group with its history, rollouts and rewards; from the buffer, the quarantine or the archive.",
        options=_READING,
    ),
    _verb(
        words="tail",
        help="Follow events, one line per group, until Ctrl-C.",
        options=(_ENVIRONMENT, Option(name="json", help="one JSON document per line")),
    ),
    _verb(words="quarantine ls", help="List payloads that failed validation, with the reason.", options=(_JSON,)),
    _verb(
        words="quarantine show",
        operands="ID",
        help="Show a quarantined payload, as far as it can be decoded.",
        options=_READING,
    ),
    _verb(
        words="quarantine release", operands="ID", help="Make a quarantined group ready, if it is valid now.", options=(_JSON,)
    ),
    _verb(words="quarantine forget", operands="ID...", help="Delete quarantined payloads and their reports.", options=(_JSON,)),
    _verb(words="archive ls", help="Summarise the archive of spent groups.", options=(_JSON,)),
    _verb(
        words="archive export",
        help="Write archived rollouts as JSON lines.",
        options=(
            Option(name="out", value="FILE", help="write to a file instead of stdout"),
            Option(name="tokens", help="include token ids, log-probabilities and versions"),
        ),
    ),
    _verb(
        words="vacuum",
        help="Free unused memory and disk space. Groups that have not ended are never touched.",
        options=(
            Option(name="quarantine", help="also delete quarantined payloads and their reports"),
            Option(name="dry-run", help="only print what would be freed"),
            _JSON,
        ),
    ),
    _verb(
        words="limits",
        operands="[KEY=VALUE]...",
        help="Print the limits in force; with KEY=VALUE, change them in the running run.",
        options=(_JSON,),
    ),
    _verb(
        words="erase",
        operands="NAME",
        help="Delete the keys of an ended run from an external server (`redis.url`); NAME must be the run's.",
    ),
    _verb(
        words="users create",
        help="Create Redis users with passwords for workers, learner, operators and monitors.",
        options=(Option(name="default-off", help="turn the default user off in the written users.acl"), _JSON),
    ),
    _verb(words="users ls", help="List the run's Redis users and their permissions.", options=(_JSON,)),
)

VERBS = (
    *BUFFER_VERBS,
    Verb(words="buffer", operands="[VERB]...", help="List the verbs of the buffer.", run=list_verbs, details=listing()),
    Verb(words="ctl show", help="Print the limits in force.", run=limits, options=(_JSON,)),
    Verb(words="ctl set", operands="[KEY=VALUE]...", help="Change limits in the running run.", run=limits, options=(_JSON,)),
)

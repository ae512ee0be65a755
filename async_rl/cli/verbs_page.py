"""`async-rl verbs`: the page of all verbs, docs/verbs.md, made from what `--help` prints."""

from __future__ import annotations

from collections.abc import Iterable

from async_rl.cli.grammar import CommandLine, Verb
from async_rl.cli.markdown_table import markdown_table

_HEAD = """\
# Every verb

Made from the code by `async-rl verbs`; `async-rl VERB --help` prints one of them. `@ FILE` is a YAML file; several are merged
in order. `--KEY VALUE` sets one value by its dotted key: [configuration](configuration.md), [settings](configuration_keys.md).
"""


def verbs_page(verbs: Iterable[Verb]) -> str:
    """Return the page in Markdown, a section for each verb."""
    return "\n".join([_HEAD, *map(_section, verbs)])


def _section(verb: Verb) -> str:
    usage = "\n\n".join(part for part in (verb.usage, verb.details) if part)
    rows = [(f"`{option.usage}`", option.meaning) for option in verb.options]
    table = [markdown_table(("option", ""), rows)] if rows else []
    return "\n".join([f"## {verb.words}", "", verb.help, "", "```text", usage, "```", "", *table])


def verbs(_line: CommandLine) -> int:
    from async_rl.cli.main import VERBS as ALL

    print(verbs_page(ALL), end="")
    return 0


VERBS = (Verb(words="verbs", help="Print every verb with its options, as Markdown.", run=verbs, config=""),)

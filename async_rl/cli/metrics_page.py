"""`async-rl metrics`: the page of all metrics, docs/metric_names.md, made from the table of metrics."""

from __future__ import annotations

from itertools import groupby

from async_rl.cli.grammar import CommandLine, Verb
from async_rl.cli.markdown_table import markdown_table

_HEAD = """\
# Every metric

Made from the code by `async-rl metrics`. Which metric answers which question, and where metrics go: [metrics](metrics.md).
`{...}` stands for one word: an environment, a reason, an age. Prometheus names `reward/mean` `async_rl_reward_mean`.
"""


def metrics_page() -> str:
    """Return the page in Markdown, a table for each prefix."""
    from async_rl.telemetry.table import METRICS

    parts = [_HEAD]
    by_prefix = sorted(METRICS, key=lambda metric: metric.name.partition("/")[0])
    for prefix, metrics in groupby(by_prefix, key=lambda metric: metric.name.partition("/")[0]):
        rows = [(f"`{each.name}`", each.unit, each.help) for each in metrics]
        parts.append(f"## {prefix}\n\n{markdown_table(('metric', 'unit', ''), rows)}")
    return "\n".join(parts)


def metrics(_line: CommandLine) -> int:
    print(metrics_page(), end="")
    return 0


VERBS = (Verb(words="metrics", help="Print every metric with its unit and meaning, as Markdown.", run=metrics, config=""),)

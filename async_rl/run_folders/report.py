"""Writes a run as one HTML file: no scripts, nothing loaded from elsewhere, all text of models escaped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from async_rl.config.loading import leaves
from async_rl.durable.whole_file import write_whole
from async_rl.run_folders.charts import Curve, Point, draw_chart
from async_rl.run_folders.folder import RunFolder
from async_rl.run_folders.glance import RunGlance, glance
from async_rl.run_folders.visible_text import shortened, visible
from async_rl.run_folders.waits_for import CAUSES, idle_shares
from async_rl.telemetry.evaluation_rows import EvaluationRow, read_evaluations
from async_rl.telemetry.rows import MetricRow, SeriesReader, read_objects
from async_rl.telemetry.table import find_metric
from async_rl.telemetry.warning_file import read_warnings

CHARTS: Mapping[str, Mapping[str, str]] = {
    "Reward": {"reward/mean": "trained rollouts", "rollout/reward": "all episodes"},
    "Loss": {"train/loss": "trained", "held_out/loss": "held out"},
    "Age (versions)": {
        "staleness/mean": "mean",
        "staleness/max": "maximum",
        "staleness/in_queue": "in the queue",
        "staleness/in_flight": "in flight",
    },
    "Throughput (tokens/s)": {"perf/tok_s": "trained", "rollout/tok_s": "sampled"},
    "Idle share of the learner's time": {f"idle/{cause}": name for cause, name in CAUSES.items()},
    "Gradient norm": {"optim/grad_norm": "before clipping"},
    "Step (s)": {"time/step": "training", "time/wait_data": "waiting for groups"},
}
"""Title -> metric -> label of its curve."""
EVALUATIONS_SHOWN, WARNINGS_SHOWN, ROLLOUTS_SHOWN = 100, 40, 6
LONGEST_TEXT = 3000
"""Characters of a prompt or an answer."""
LONGEST_VALUE = 500
"""Characters of a setting."""
MOST_SETTINGS = 1000

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #1f2937; }
h1 { margin-bottom: .2rem } h2 { margin: 2rem 0 .5rem; border-bottom: 1px solid #d1d5db }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 14px 2px 0; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums } code, pre { font: 12.5px/1.4 ui-monospace, monospace }
pre { background: #f3f4f6; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 1rem } figure { margin: 0 }
svg { width: 100%; background: #f9fafb } svg text { font-size: 11px; fill: #6b7280 } .grid { stroke: #e5e7eb }
.legend span { margin-left: 1rem; font-size: 12px; color: #4b5563 }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px }
@media (prefers-color-scheme: dark) { body { background: #111827; color: #e5e7eb } pre, svg { background: #1f2937 }
.grid { stroke: #374151 } .legend span { color: #9ca3af } }
"""


def write_report(run: RunFolder, path: Path) -> int:
    """Write the report and return its size in bytes. Raises OSError."""
    page = report_page(run).encode(errors="replace")
    write_whole(path, page)
    return len(page)


def report_page(run: RunFolder) -> str:
    each = glance(run)
    evaluations = read_evaluations(run.metrics)
    rows = SeriesReader(run.metrics, [name for chart in CHARTS.values() for name in chart]).read()
    sections = {
        "Curves": f'<div class="charts">{"".join(_charts(rows, evaluations))}</div>',
        "Evaluations": _evaluations(evaluations),
        "Where the learner's time went": _idle(rows),
        "Warnings": _warnings(run),
        "Rollouts": "".join(_rollouts(run)),
        "Last figures": _figures(each),
        "Settings": _settings(run),
    }
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in sections.items() if content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(run.name)}</title><style>{STYLE}</style></head><body>{_head(each)}{body}</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(visible(str(value)))


def _head(each: RunGlance) -> str:
    label, value = each.outcome
    facts = [f"step {each.progress}", f"{label} {value}", f"age {each.age}", f"trained for {each.elapsed}"]
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    state = f"{each.state.kind}: {each.state.how}"
    return f"<h1>{_text(each.run.name)}</h1><p>{_text(state)}. {_text(', '.join(facts))}. Written {written}.</p>"


def _charts(rows: Sequence[MetricRow], evaluations: Sequence[EvaluationRow]) -> Iterable[str]:
    for title, curves in CHARTS.items():
        yield draw_chart(title, [Curve(label=label, points=_points(rows, name)) for name, label in curves.items()])
        if title == "Loss":
            yield draw_chart("Evaluation", _evaluation_curves(evaluations))


def _points(rows: Sequence[MetricRow], name: str) -> list[Point]:
    return [Point(x=row.step, y=row.values[name]) for row in rows if name in row.values]


def _evaluation_curves(evaluations: Sequence[EvaluationRow]) -> list[Curve]:
    """The first measure of each environment, with its interval."""
    points: dict[str, list[Point]] = {}
    for row in evaluations:
        for name, each in row.environments.items():
            for measure, value in islice(each.measures.items(), 1):
                point = Point(x=row.step, y=value.mean, low=value.low, high=value.high)
                points.setdefault(f"{name} {measure}", []).append(point)
    return [Curve(label=label, points=found) for label, found in points.items()]


def _evaluations(evaluations: Sequence[EvaluationRow]) -> str:
    rows = [
        (row.step, row.version, name, each.tasks, "; ".join(f"{measure} {value}" for measure, value in each.measures.items()))
        for row in evaluations[-EVALUATIONS_SHOWN:]
        for name, each in row.environments.items()
    ]
    return _table(("step", "version", "environment", "tasks", "measures, with 95 % intervals over tasks"), rows)


def _idle(rows: Sequence[MetricRow]) -> str:
    shares = idle_shares([row.values for row in rows])
    if not shares:
        return ""
    named = {"training": 1 - sum(shares.values()), **{CAUSES[cause]: share for cause, share in shares.items()}}
    return _table(("", "mean share over all steps"), [(name, f"{share:.1%}") for name, share in named.items()])


def _warnings(run: RunFolder) -> str:
    rows = [
        (cause.count, cause.role, cause.level, time.strftime("%H:%M:%S", time.gmtime(cause.last)), cause.event)
        for cause in read_warnings(run.path)[:WARNINGS_SHOWN]
    ]
    return _table(("times", "role", "level", "last (UTC)", "what it said last"), rows)


def _rollouts(run: RunFolder) -> Iterable[str]:
    samples = list(read_objects(run.path / "samples.jsonl"))
    half = ROLLOUTS_SHOWN // 2
    shown = samples if len(samples) <= ROLLOUTS_SHOWN else [*samples[:half], *samples[-half:]]
    for each in shown:
        reward = "failed" if each["reward"] is None else f"reward {each['reward']:.4g}"
        yield f"<p>step {_text(each['step'])}, {_text(each.get('environment', ''))}, {reward}, age {_text(each['age'])}</p>"
        prompt, answer = (_text(shortened(each[part], LONGEST_TEXT)) for part in ("prompt", "text"))
        yield f"<pre>{prompt}\n<b>{answer}</b></pre>"


def _figures(each: RunGlance) -> str:
    rows: list[tuple[object, ...]] = []
    for name, value in sorted(each.values.items()):
        metric = find_metric(name)
        unit, meaning = ("", "") if metric is None else (metric.unit, metric.help)
        rows.append((name, f"{value:.6g}", unit, meaning))
    return _table(("metric", "last step", "unit", "meaning"), rows)


def _settings(run: RunFolder) -> str:
    """All settings as written to config.yaml, secrets masked."""
    settings: list[tuple[tuple[str, ...], Any]] = leaves(run.config) if run.config else []
    rows = [(".".join(keys), shortened(json.dumps(value), LONGEST_VALUE)) for keys, value in settings[:MOST_SETTINGS]]
    return _table(("key", "value"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td class="n">{value if isinstance(value, int) else f"{value:g}"}</td>'
    return f"<td>{_text(value)}</td>"

"""`async-rl runs ls | show | compare | report | rm`: the runs in a folder, from what they left there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from async_rl.cli.grammar import CommandLine, Option, Verb, nearest
from async_rl.config.loading import parse, read_key
from async_rl.errors import ConfigError
from async_rl.launch.commands import command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from async_rl.run_folders.folder import RunFolder
    from async_rl.run_folders.glance import RunGlance

WARNINGS_SHOWN = 5


def folder_of_runs(words: Sequence[str]) -> Path:
    """`run.folder` of a configuration, which need not be complete."""
    section = read_key("run", words)
    folder = section.get("folder") if isinstance(section, dict) else None
    return Path(folder) if isinstance(folder, str) else Path("runs")


def chosen_run(line: CommandLine) -> RunFolder:
    """The run that a line names: by its name or folder, or by its configuration. Raises ConfigError."""
    from async_rl.run_folders.folder import find_run, newest_of

    parent = folder_of_runs(line.config)
    if line.operands:
        return find_run(line.operands[0], parent)
    section = read_key("run", line.config)
    name = section.get("name") if isinstance(section, dict) else None
    if isinstance(name, str) and name:
        return find_run(name, parent)
    files, _ = parse(line.config)
    if not files:
        raise ConfigError(f"{line.verb.words} needs a run: async-rl {line.verb.words} NAME, or @ FILE")
    return newest_of(files, parent)


def ls(line: CommandLine) -> int:
    from rich.filesize import decimal

    from async_rl.run_folders.folder import find_runs
    from async_rl.run_folders.glance import glance
    from async_rl.telemetry.durations import ago

    parent = folder_of_runs(line.config)
    found = [glance(run) for run in find_runs(parent)]
    if line.has("json"):
        print(json.dumps([_document(each) for each in found], indent=2))
        return 0
    if not found:
        print(f"there is no run in {parent.absolute()}")
        return 0
    heads = ("run", "state", "step", "reward", "evaluation", "age", "trained for", "last step", "size")
    table = _table(heads, right=("step", "reward", "trained for", "last step", "size"))
    for each in found:
        label, value = each.outcome
        table.add_row(
            each.run.name,
            each.state.kind,
            each.progress,
            value if label == "reward" else f"{label} {value}",
            each.evaluated,
            each.age,
            each.elapsed,
            "-" if each.row is None else f"{ago(each.row.time)} ago",
            decimal(each.run.size()),
        )
    _console().print(table)
    return 0


def show(line: CommandLine) -> int:
    from rich.filesize import decimal

    from async_rl.run_folders.glance import glance
    from async_rl.run_folders.visible_text import visible
    from async_rl.run_folders.waits_for import waits_for
    from async_rl.telemetry.durations import ago
    from async_rl.telemetry.table import find_metric
    from async_rl.telemetry.warning_file import read_warnings
    from async_rl.view.processes import local_processes

    each = glance(chosen_run(line))
    if line.has("json"):
        print(json.dumps({**_document(each), "metrics": dict(each.values)}, indent=2))
        return 0
    page = _console()
    page.print(f"run {each.run.name}: {each.state.kind}, {each.state.how}", markup=False)
    if each.row is not None:
        page.print(f"step {each.progress}, {ago(each.row.time)} ago, trained for {each.elapsed}", markup=False)
    if each.state.is_running:
        page.print(waits_for([each.values] if each.values else []), markup=False)
    for process in local_processes(each.run.path) if each.state.is_running else ():
        page.print(f"  {process.name} is process {process.pid}{'' if process.is_alive else ', which is gone'}", markup=False)
    if each.evaluation is not None:
        page.print()
        for sentence in each.evaluation.lines:
            page.print(sentence, markup=False)
    if each.values:
        page.print()
        table = _table(("metric", "last", "unit", "meaning"), right=("last",))
        for name in sorted(each.values):
            metric = find_metric(name)
            unit, help = ("", "") if metric is None else (metric.unit, metric.help)
            if line.has("all") or _is_main(name):
                table.add_row(name, f"{each.values[name]:.6g}", unit, help)
        page.print(table)
    if causes := read_warnings(each.run.path)[:WARNINGS_SHOWN]:
        page.print()
        for cause in causes:
            said = f"{cause.role}: {visible(cause.event)}"
            page.print(f"{cause.level}, {cause.count} times, {ago(cause.last)} ago: {said}", markup=False)
    page.print()
    table = _table(("in the folder", "", ""), right=())
    for name, what in each.run.files().items():
        path = each.run.path / name
        table.add_row(name, what, decimal(path.stat().st_size) if path.is_file() else "")
    page.print(table)
    page.print(f"{each.run.path} ({decimal(each.run.size())})", markup=False)
    return 0


def compare(line: CommandLine) -> int:
    from rich.text import Text

    from async_rl.run_folders.comparison import differing_settings, last_figures, paired_differences
    from async_rl.run_folders.folder import find_run
    from async_rl.telemetry.rows import read_rows
    from async_rl.telemetry.table import find_metric

    parent = folder_of_runs(line.config)
    if len(line.operands) < 2:
        raise ConfigError("runs compare needs at least two runs: async-rl runs compare NAME NAME")
    runs = [find_run(name, parent) for name in line.operands]
    settings = differing_settings(runs)
    figures = [last_figures(read_rows(run.metrics)) if run.metrics.exists() else {} for run in runs]
    pairs = {other.name: paired_differences(runs[0], other) for other in runs[1:]}
    if line.has("json"):
        print(json.dumps(_comparison(runs, settings, figures, pairs), indent=2))
        return 0
    page = _console()
    table = _table(("setting", *(run.name for run in runs)), right=())
    for key, values in settings.items():
        table.add_row(key, *(Text(value) for value in values))
    page.print(table if settings else "the configurations are equal")
    page.print()
    table = _table(("mean of the last 3 steps", *(run.name for run in runs), "unit"), right=tuple(run.name for run in runs))
    for name in dict.fromkeys(name for each in figures for name in each):
        metric = find_metric(name)
        table.add_row(name, *(f"{each[name]:.4g}" if name in each else "-" for each in figures), metric.unit if metric else "")
    page.print(table)
    page.print()
    for other, found in pairs.items():
        if not found:
            page.print(f"{runs[0].name} and {other} have no evaluation of the same tasks", markup=False)
        for each in found:
            steps = f"step {each.step}" + ("" if each.step == each.other_step else f" and step {each.other_step}")
            verdict = "the interval excludes 0" if each.is_clear else "the interval contains 0"
            page.print(
                f"evaluation of {each.environment} ({steps}): {runs[0].name} {each.mean:.3f}, {other} {each.other_mean:.3f}; "
                f"paired difference over {each.difference.tasks} tasks {each.difference}, {verdict}",
                markup=False,
            )
    return 0


def report(line: CommandLine) -> int:
    from async_rl.run_folders.report import write_report

    run = chosen_run(line)
    out = Path(line.text("out", run.path / "report.html"))
    try:
        size = write_report(run, out)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from error
    print(f"{out} ({size / 1e3:,.0f} kB)")
    return 0


def rm(line: CommandLine) -> int:
    from rich.filesize import decimal

    from async_rl.run_folders.folder import CONFIG, find_runs
    from async_rl.run_folders.removal import owned_paths, refuse_copy, remove

    parent, name = folder_of_runs(line.config), line.operands[0]
    runs = {run.name: run for run in find_runs(parent)}
    if name not in runs:
        raise ConfigError(f"there is no run {name!r} in {parent.absolute()}{nearest(name, list(runs))}; give its name exactly")
    run, is_dry = runs[name], line.has("dry-run")
    refuse_copy(run, keeps_redis=line.has("keep-redis"))
    size, paths = run.size(), owned_paths(run)

    def erase_keys() -> None:
        if run.setting("redis", "url") and not line.has("keep-redis"):
            erase = command("buffer", ["erase", name, "@", str(run.path / CONFIG)])
            if subprocess.run(erase, check=False).returncode:
                raise ConfigError(f"nothing is removed, see above; --keep-redis leaves the keys of {name!r} on the server")

    if not is_dry:
        remove(run, before=erase_keys)
    for path in paths:
        print(f"{path} {'would be' if is_dry else 'is'} removed{f' ({decimal(size)})' if path == run.path else ''}")
    return 0


def _is_main(name: str) -> bool:
    """Whether `runs show` prints a metric without --all."""
    from async_rl.run_folders.comparison import COMPARED

    return name in COMPARED or name.startswith("idle/")


def _document(each: RunGlance) -> dict[str, Any]:
    evaluation = each.evaluation
    return {
        "run": each.run.name,
        "folder": str(each.run.path),
        "state": each.state.kind,
        "how": each.state.how,
        "step": None if each.row is None else each.row.step,
        "steps": each.run.steps,
        "reward": each.values.get("reward/mean"),
        "age": each.values.get("staleness/mean"),
        "training_s": each.values.get("progress/wall_s"),
        "evaluation": None if evaluation is None else {"step": evaluation.step, "lines": evaluation.lines},
        "bytes": each.run.size(),
    }


def _comparison(
    runs: Sequence[RunFolder], settings: dict[str, list[str]], figures: Sequence[dict[str, float]], pairs: dict[str, Any]
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "runs": [run.name for run in runs],
        "settings": {
            key: [value if value == "-" else json.loads(value) for value in values] for key, values in settings.items()
        },
        "figures": {run.name: each for run, each in zip(runs, figures, strict=True)},
        "paired": {other: [asdict(each) for each in cast("list[Any]", found)] for other, found in pairs.items()},
    }


def _console() -> Console:
    """A console that breaks no line of a pipe."""
    from rich.console import Console

    page = Console(highlight=False, emoji=False)
    return page if page.is_terminal else Console(highlight=False, emoji=False, width=400)


def _table(heads: Sequence[str], *, right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    return table


_JSON = Option(name="json", help="print one JSON document instead of tables")
_CONFIG = "[--run.folder FOLDER]"
VERBS = (
    Verb(words="runs ls", help="List the runs in a folder, the newest first.", run=ls, config=_CONFIG, options=(_JSON,)),
    Verb(
        words="runs show",
        operands="[NAME]",
        help="Show a run: how it ended, its last figures, warnings, and where its files are.",
        run=show,
        config=_CONFIG,
        options=(Option(name="all", help="all metrics of the last step, not only the main ones"), _JSON),
    ),
    Verb(
        words="runs compare",
        operands="NAME...",
        help="Compare runs: settings that differ, last figures, and evaluations task by task.",
        run=compare,
        config=_CONFIG,
        options=(_JSON,),
    ),
    Verb(
        words="runs report",
        operands="[NAME]",
        help="Write a run as one HTML file to send around: curves, figures, evaluations, warnings, rollouts, settings.",
        run=report,
        config=_CONFIG,
        options=(Option(name="out", value="FILE", help="file to write (report.html in the run's folder)"),),
    ),
    Verb(
        words="runs rm",
        operands="NAME",
        help="Remove an ended run with its folder, snapshots and keys in Redis. NAME must be exact.",
        run=rm,
        config=_CONFIG,
        options=(
            Option(name="dry-run", help="only print what would be removed"),
            Option(name="keep-redis", help="leave the keys on an external server, for example one that is gone"),
        ),
    ),
)

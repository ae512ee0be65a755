"""`async-rl top`: a run at a glance in a terminal, refreshed each second."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.runs import chosen_run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from async_rl.run_folders.folder import RunFolder
    from async_rl.run_folders.glance import RunGlance
    from async_rl.telemetry.rows import MetricRow

REFRESH_S = 1.0
CURVE = ("reward/mean", "train/loss")
"""Metrics drawn as a curve; a run has one of them."""
PACE_STEPS = 20
"""Recent steps from which the remaining time is estimated."""
WARNINGS_SHOWN = 4
FIGURES = (
    ("version", "weights/version", "{:.0f}"),
    ("live", "weights/live", "{:.0f}"),
    ("age", "staleness/mean", "{:.2f}"),
    ("oldest", "staleness/max", "{:.0f}"),
    ("pace", "pace/target", "{:.2f} steps"),
    ("slots used", "buffer/slots_used", "{:.0f}"),
    ("ready", "buffer/depth", "{:.0f} groups"),
    ("in flight", "rollout/inflight", "{:.0f} groups"),
    ("workers", "rollout/workers", "{:.0f}"),
    ("sampled", "rollout/tok_s", "{:,.0f} tok/s"),
    ("trained", "perf/tok_s", "{:,.0f} tok/s"),
    ("step", "time/step", "{:.2f} s"),
    ("push", "weights/push_s", "{:.2f} s"),
    ("KV cache", "engine/kv_used", "{:.0%}"),
    ("truncated", "episode/truncated", "{:.0%}"),
    ("failed", "episode/failed", "{:.0%}"),
)
"""Label, metric and format."""


def top(line: CommandLine) -> int:
    from rich.console import Console

    run = chosen_run(line)
    console = Console(highlight=False, emoji=False)
    view = TopFrames(run)
    if line.has("once") or not console.is_terminal:
        console.print(view.frame(console.width))
        return 0
    with suppress(KeyboardInterrupt):
        _follow(view, console)
    return 0


def _follow(view: TopFrames, console: Console) -> None:
    """Draw frames until q is pressed."""
    from rich.live import Live

    with _single_keys() as keys, Live(view.frame(console.width), console=console, screen=True, auto_refresh=False) as live:
        while not _pressed(keys, "q", within_s=REFRESH_S):
            live.update(view.frame(console.width), refresh=True)


class TopFrames:
    """Draws frames of one run; keeps what it has read of its curve."""

    def __init__(self, run: RunFolder) -> None:
        from async_rl.recording import Recording
        from async_rl.telemetry.rows import SeriesReader
        from async_rl.view.recorded.slowdown import Slowdowns

        self._run = run
        self._slowdowns = Slowdowns(Recording(run.path), None)
        self._series = SeriesReader(run.metrics, (*CURVE, "progress/wall_s"))

    def frame(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.rule import Rule
        from rich.text import Text

        from async_rl.run_folders.glance import glance

        each, rows = glance(self._run), self._series.read()
        now = self._waits(each) if each.state.is_running else [f"{each.state.kind}: {each.state.how}"]
        style = {"running": "green", "finished": "green", "failed": "red", "lost": "red"}.get(each.state.kind, "yellow")
        parts: list[RenderableType] = [
            Rule(Text.assemble((self._run.name, "bold"), "  ", (each.state.kind, style)), align="left"),
            Text(self._progress(rows, each.progress, each.elapsed)),
            *(Text(sentence, style="bold" if each.state.is_running else style) for sentence in now),
            Text(),
            *_curve(rows, width),
            _figures(each.values),
            *_idle(each.values),
        ]
        if each.evaluation is not None:
            parts += [Text(), *(Text(sentence) for sentence in each.evaluation.lines)]
        parts += [Text(), *self._processes(is_running=each.state.is_running), *self._warnings()]
        return Group(*parts)

    def _waits(self, each: RunGlance) -> list[str]:
        """What the run waits for: from its recorded events if there are any, else from its last row."""
        from async_rl.run_folders.waits_for import waits_for

        self._slowdowns.refresh()
        recorded = [cause.sentence for cause in self._slowdowns.causes]
        return recorded if recorded else [waits_for([each.values] if each.values else [])]

    def _progress(self, rows: Sequence[MetricRow], progress: str, elapsed: str) -> str:
        from async_rl.run_folders.glance import time_left
        from async_rl.telemetry.durations import ago, duration

        left = time_left(rows[-PACE_STEPS:], self._run.steps)
        said = [f"step {progress}", f"elapsed {elapsed}"]
        said += [f"left {duration(left)}"] if left is not None else []
        said += [f"last step {ago(rows[-1].time)} ago"] if rows else []
        return "   ".join(said)

    def _processes(self, *, is_running: bool) -> list[RenderableType]:
        from rich.text import Text

        from async_rl.view.processes import local_processes

        found = local_processes(self._run.path) if is_running else []
        said = [f"{each.name} {f'{each.pid}{_memory(each.pid)}' if each.is_alive else 'gone'}" for each in found]
        return [Text(f"processes  {'   '.join(said)}")] if said else []

    def _warnings(self) -> list[RenderableType]:
        from rich.text import Text

        from async_rl.run_folders.visible_text import visible
        from async_rl.telemetry.durations import ago
        from async_rl.telemetry.warning_file import read_warnings

        return [
            Text(
                f"{ago(cause.last):>6} ago  {cause.count:>4} x  {cause.role}: {visible(cause.event)}",
                style="yellow",
                overflow="ellipsis",
            )
            for cause in read_warnings(self._run.path)[:WARNINGS_SHOWN]
        ]


def _curve(rows: Sequence[MetricRow], width: int) -> list[RenderableType]:
    from rich.text import Text

    from async_rl.telemetry.console import sparkline

    for name in CURVE:
        values = [row.values[name] for row in rows if name in row.values]
        if values:
            label = f"{name} {values[-1]:.4g}  "
            drawn = sparkline(values, max(10, width - len(label) - 22))
            return [Text.assemble(label, (drawn, "cyan"), f"  {min(values):.3g} to {max(values):.3g}"), Text()]
    return []


def _figures(values: Mapping[str, float]) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    cells = [
        Text.assemble((f"{label} ", "dim"), form.format(values[metric])) for label, metric, form in FIGURES if metric in values
    ]
    return Columns(cells, equal=True, padding=(0, 3, 0, 0))


def _idle(values: Mapping[str, float]) -> list[RenderableType]:
    from rich.text import Text

    from async_rl.run_folders.waits_for import CAUSES, idle_shares

    if not (shares := idle_shares([values])):
        return []
    busy = max(0.0, 1 - sum(shares.values()))
    parts = {"trains": busy, **{CAUSES[cause]: share for cause, share in shares.items()}}
    bar = [(("█" * round(share * BAR)), colour) for share, colour in zip(parts.values(), COLOURS, strict=True)]
    words = [(f"  {name} {share:.0%}", colour) for (name, share), colour in zip(parts.items(), COLOURS, strict=True)]
    return [Text(), Text.assemble("learner  ", *bar, *words)]


BAR = 30
"""Characters of the bar of the learner's time."""
COLOURS = ("green", "yellow", "magenta", "blue", "bright_black")


def _memory(pid: int) -> str:
    """The memory of a process, in brackets; nothing once it is gone."""
    from rich.filesize import decimal

    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return ""
    return f" ({decimal(pages * os.sysconf('SC_PAGE_SIZE'))})"


@contextmanager
def _single_keys() -> Generator[int | None]:
    """Read keys of the terminal without Enter; the descriptor, or None if stdin is no terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _pressed(descriptor: int | None, key: str, *, within_s: float) -> bool:
    """Whether a key is pressed within a time; returns early for any key."""
    if descriptor is None:
        time.sleep(within_s)  # a clock: nothing else announces a new row
        return False
    ready, _, _ = select.select([descriptor], [], [], within_s)
    return bool(ready) and key.encode() in os.read(descriptor, 64)


VERBS = (
    Verb(
        words="top",
        operands="[NAME]",
        help="Watch a run in the terminal: progress, reward, throughput, what it waits for, warnings. q quits.",
        run=top,
        config="@ FILE",
        options=(Option(name="once", help="print one frame and end"),),
    ),
)

"""What the page shows of one run: the state as it is now, and the metrics since the client's last request."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, cast

from async_rl.config.tree import Config
from async_rl.recording import Recording
from async_rl.run_folders.state import RunStatus, read_state
from async_rl.telemetry.durations import ago
from async_rl.telemetry.evaluation_rows import read_evaluation
from async_rl.telemetry.table import find_metric
from async_rl.telemetry.warning_file import WarningCause, read_warnings
from async_rl.view.causes import metric_warnings, run_means, slowest_part, token_fates
from async_rl.view.followed_file import FollowedFile
from async_rl.view.live import LiveSource, LiveState
from async_rl.view.metric_columns import MetricColumns
from async_rl.view.opened_run import METRICS_FILE, OpenedRun
from async_rl.view.processes import ProcessState, local_processes
from async_rl.view.recorded.episodes import read_episodes
from async_rl.view.recorded.lanes import read_lanes
from async_rl.view.recorded.rollouts import RolloutBrowser
from async_rl.view.recorded.slowdown import Slowdowns

MOST_CAUSES, LONGEST_CAUSE = 50, 300
"""Logged warnings that are sent, the most recent ones, and characters of each."""


class RunView:
    """Not thread-safe; `refresh` reads files and takes a second at the first call of a long run."""

    def __init__(self, folder: OpenedRun, live: LiveSource | None = None) -> None:
        self.folder = folder
        self._live = live
        self._rows = FollowedFile(folder.path / METRICS_FILE)
        self.columns = MetricColumns()
        config = folder.config if isinstance(folder.config, Config) else None
        self._recording = Recording(folder.path)
        self.rollouts = RolloutBrowser(self._recording, config, lambda: self._status("").is_running)
        self._slowdowns = Slowdowns(self._recording, config)
        self._evaluations: dict[int, tuple[int, dict[str, Any]]] = {}
        """Evaluated step -> the file's row, and the evaluation."""
        self._resumed_at = 0
        """The file's row of the last resume: evaluations of later steps were of weights that are gone."""
        self._id = secrets.token_hex(8)
        """Names this server: positions that another one gave mean nothing."""

    def close(self) -> None:
        self._rows.close()

    def refresh(self) -> None:
        """Read what was appended to metrics.jsonl."""
        for line in self._rows.new_rows():
            try:
                row: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                self._add(cast("dict[str, Any]", row))

    def _add(self, row: dict[str, Any]) -> None:
        self.columns.add(row)
        if (resumed_after := row.get("resumed_after")) is not None:
            self._evaluations = {step: each for step, each in self._evaluations.items() if step <= resumed_after}
            self._resumed_at = self.columns.num_rows
        if (found := read_evaluation({name: value for name, value in row.items() if value is not None})) is not None:
            self._evaluations[found.step] = self.columns.num_rows, asdict(found)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations, in order of their steps."""
        return [self._evaluations[step][1] for step in sorted(self._evaluations)]

    async def live_state(self) -> LiveState | str:
        """What its Redis says, or why it says nothing."""
        if self._live is None:
            return "a run of `async-rl train` has no Redis" if self.folder.config is not None else self.folder.problem
        return await self._live.read()

    def state(self, live: LiveState | str) -> dict[str, Any]:
        """Everything but curves."""
        self._slowdowns.refresh()
        config, latest = self.folder.config, self.columns.latest()
        processes = local_processes(self.folder.path)
        status = self._status(live)
        return {
            "run": self.folder.name,
            "folder": str(self.folder.path),
            "now": time.time(),
            "kind": status.kind,
            "is_running": status.is_running,
            "sentence": self._sentence(status, processes),
            "waits_for": live.waits_for if isinstance(live, LiveState) and status.is_running else "",
            "slowest_part": slowest_part(latest),
            "slowdowns": [asdict(each) for each in self._slowdowns.causes],
            "processes": [asdict(process) for process in processes],
            "live": asdict(live) if isinstance(live, LiveState) else None,
            "live_problem": "" if isinstance(live, LiveState) else self._without_live(status, live),
            "step": self.columns.steps[-1] if self.columns.steps else None,
            "steps": config.learner.steps if config is not None else None,
            "last_row": self.columns.last_time,
            "max_age": config.limits.age_bound if isinstance(config, Config) else None,
            "latest": latest,
            "warnings": [asdict(warning) for warning in metric_warnings(latest)],
            "logged": [_logged(cause) for cause in read_warnings(self.folder.path)[:MOST_CAUSES]],
            "means": asdict(run_means(self.columns)),
            "fates": token_fates(latest, is_running=status.is_running),
            "let_go": self._let_go(),
            "problem": self.folder.problem,
        }

    def lanes(self, *, seconds: float, since: float = 0.0, until: float = 0.0, worker: str = "") -> dict[str, Any]:
        """What every process did from `since` to `until`, in seconds since 1970; with `worker`, what its episodes did.

        Without times: in the last `seconds` of the run (0: in all of it), until now or until its last row.
        """
        begin: float | None = since
        if not until > since > 0:
            last = self.columns.last_time
            until = time.time() if last is None or self._status("").is_running else last
            begin = until - seconds if seconds else None
        found = read_lanes(self._recording, begin=begin, end=until, worker=worker)
        if not worker:
            return found
        episodes, left_out = read_episodes(self._recording, worker, begin=found["begin"], end=until)
        return {**found, "lanes": [*found["lanes"], *episodes], "left_out": found["left_out"] + left_out}

    def series(self, patterns: Sequence[str], *, points: int, since: int, server: str) -> dict[str, Any]:
        """The columns that changed since the row `since` that `server` sent last: the client replaces the steps from `from`.

        `from` is None if nothing changed, and below all steps if the client has to begin anew.
        """
        known = since if server == self._id else 0
        changed = self.columns.first_changed(known) if known else -1
        has_resumed = self._resumed_at > known
        found = self.columns.series(
            patterns if changed is not None else (),
            points=points,
            from_step=changed if changed is not None else 0,
        )
        return {
            "server": self._id,
            "rows": self.columns.num_rows,
            "from": changed,
            "steps": found.steps if changed is not None else [],
            "times": found.times if changed is not None else [],
            "values": found.values,
            "about": {} if known else {name: _about(name) for name in found.values},
            "evaluations": [evaluation for row, evaluation in self._evaluations.values() if row > known or has_resumed],
            "evaluations_begin_anew": has_resumed,
        }

    def _status(self, live: LiveState | str) -> RunStatus:
        config, last = self.folder.config, self.columns.last_time
        status = read_state(
            self.folder.path,
            step=self.columns.steps[-1] if self.columns.steps else None,
            last_row=last if last is not None and math.isfinite(last) else None,
            steps=config.learner.steps if config is not None else None,
        )
        if not status.is_running and isinstance(live, LiveState) and live.learner:
            return RunStatus(kind="running", how="its Redis says that a learner has it")
        return status

    def _sentence(self, status: RunStatus, processes: Sequence[ProcessState]) -> str:
        if not status.is_running:
            return f"{status.kind.capitalize()}: {status.how}."
        dead = [process.name for process in processes if not process.is_alive]
        without = f", without {', '.join(dead)}" if dead and len(dead) < len(processes) else ""
        last = self.columns.last_time
        quiet = "it has written no row yet" if last is None else f"its last row is {ago(last)} old"
        return f"Running: {status.how}{without}; {quiet}."

    def _without_live(self, status: RunStatus, problem: str) -> str:
        """Return why there is nothing about workers: of a run that ended this is no problem."""
        has_redis = self.folder.config is None or isinstance(self.folder.config, Config)
        if has_redis and status.kind in ("finished", "stopped"):
            return "The run has ended, and with it its Redis, its learner and its workers."
        return problem

    def _let_go(self) -> list[str]:
        """What these pages cannot show because it is no longer there."""
        first = self.columns.steps[0] if self.columns.steps else 0
        return [f"Steps before {first} were let go: metrics.jsonl is limited by metrics.max_mb."] if first > 1 else []


def _logged(cause: WarningCause) -> dict[str, Any]:
    details = "".join(f" {name}={value}" for name, value in cause.details.items())
    text = f"{cause.event}{details}"[:LONGEST_CAUSE]
    return {"role": cause.role, "level": cause.level, "text": text, "times": cause.count, "last": cause.last}


@cache
def _about(name: str) -> dict[str, str]:
    metric = find_metric(name)
    return {"unit": metric.unit, "help": metric.help} if metric is not None else {"unit": "", "help": ""}

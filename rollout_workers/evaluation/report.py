"""Write an evaluation: NAME.md to read, NAME.jsonl for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from async_rl.config.evaluation import EvaluationConfig
from async_rl.durable.whole_file import write_whole
from async_rl.telemetry.estimates import Estimate
from async_rl.types import Rollout, Task
from rollout_workers.evaluation.evaluator import TaskResult
from rollout_workers.evaluation.measures import EnvironmentMeasures, measure, num_right, scored


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """Names and versions of the evaluated model."""

    name: str
    """Stem of the files."""
    title: str
    step: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The results of one evaluation."""

    evaluated: EvaluatedModel
    settings: EvaluationConfig
    results: Sequence[TaskResult]

    @property
    def measures(self) -> list[EnvironmentMeasures]:
        return measure(self.results, self.settings)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for each in self.measures for name, value in each.metrics.items()}

    @property
    def summary(self) -> str:
        """The table of the environments, as Markdown."""
        measures = self.measures
        names = list(dict.fromkeys(name for each in measures for name in each.estimates))
        rows = [
            (
                each.environment,
                str(each.tasks),
                *(str(each.estimates[name]) if name in each.estimates else "" for name in names),
                f"{each.length:.1f}",
                f"{each.truncated / each.episodes:.1%}",
                f"{each.failed}/{each.episodes}",
            )
            for each in measures
        ]
        return _table(("environment", "tasks", *names, "tokens", "truncated", "failed"), rows)

    def write(self, folder: Path) -> Path:
        """Write both files into `folder`, replacing older ones; return the page."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps(row) + "\n" for row in self._rows())
        write_whole(folder / f"{self.evaluated.name}.jsonl", rows)
        page = folder / f"{self.evaluated.name}.md"
        write_whole(page, self._page())
        return page

    def _page(self) -> str:
        settings = self.settings
        explained = (
            f"{settings.samples} samples of each task{', and a greedy one' if settings.greedy else ''}; a sample is right from "
            f"a reward of {settings.solved_at:g}. Brackets hold the 95 % interval over tasks."
        )
        return f"# {self.evaluated.title}\n\n{explained}\n\n{self.summary}\n## Tasks\n\n{self._tasks()}"

    def _tasks(self) -> str:
        rows = [
            (
                result.task.key,
                _prompt(result.task),
                f"{num_right(scored(result.samples), self.settings)}/{len(scored(result.samples))}",
                " ".join(_number(rollout) for rollout in result.samples),
                _number(result.greedy) if result.greedy is not None else "",
            )
            for result in self.results
        ]
        return _table(("task", "prompt", "right", "rewards", "greedy"), rows)

    def _rows(self) -> Iterable[dict[str, Any]]:
        """First the model, settings and measures, then each task with its answers."""
        yield {
            "evaluated": self.evaluated.title,
            "step": self.evaluated.step,
            "version": self.evaluated.version,
            "settings": self.settings.model_dump(mode="json"),
            "environments": {each.environment: _measures_row(each) for each in self.measures},
        }
        for result in self.results:
            yield {
                "task": result.task.key,
                "environment": result.task.environment,
                "prompt": _prompt(result.task),
                "samples": [_episode_row(rollout) for rollout in result.samples],
                "greedy": _episode_row(result.greedy) if result.greedy is not None else None,
            }


def _measures_row(each: EnvironmentMeasures) -> dict[str, Any]:
    counts = {name: getattr(each, name) for name in ("tasks", "episodes", "failed", "truncated", "length")}
    return counts | {name: _estimate_row(estimate) for name, estimate in each.estimates.items()}


def _estimate_row(estimate: Estimate) -> dict[str, float | None]:
    """JSON has no infinite bounds."""
    order = ("mean", "tasks", "low", "high")
    return {name: value if isfinite(value := getattr(estimate, name)) else None for name in order}


def _episode_row(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "status": str(rollout.status),
        "reward": rollout.reward if failure is None else None,
        "parts": dict(rollout.reward_parts),
        "tokens": rollout.num_sampled,
        "said": [message.content for message in rollout.conversation if message.role == "assistant"],
        "failure": f"{failure.boundary}: {failure.kind}: {failure.message}" if failure is not None else None,
    }


def _prompt(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content


def _number(rollout: Rollout) -> str:
    return f"{rollout.reward:.3g}" if rollout.failure is None else "failed"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


LONGEST_CELL = 80


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST_CELL else line[: LONGEST_CELL - 1] + "…"

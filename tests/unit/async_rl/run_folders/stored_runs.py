"""Folders of runs as real ones leave them, written by the sinks and the configuration that runs use."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.config.loading import to_yaml
from async_rl.run_folders.folder import RunFolder
from async_rl.run_folders.state import recorded_end
from async_rl.telemetry import open_sinks
from async_rl.telemetry.warning_file import WarningFile

EVALUATED = {
    "eval/counting/tasks": 3.0,
    "eval/counting/mean@1": 0.5,
    "eval/counting/mean@1_low": 0.25,
    "eval/counting/mean@1_high": 0.75,
}


def store_run(
    parent: Path,
    name: str,
    *,
    steps: int = 5,
    trained: int = 5,
    exit_code: int | None = 0,
    rewards: Sequence[float] = (0.0, 0.5, 1.0),
    **sections: Any,
) -> RunFolder:
    """A run that trained some steps and evaluated the last; `exit_code` None: it did not say how it ended."""
    config = Config.model_validate(
        {
            "run": {"name": name, "folder": parent},
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 4}},
            "environments": [{"type": "counting", "args": {"length": 4}}],
            "learner": {"steps": steps},
            "metrics": {"console": False},
            **sections,
        }
    )
    folder = config.run_folder
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "run.lock").touch()
    with recorded_end(folder) as codes:
        codes.append(exit_code if exit_code is not None else 1)
        with open_sinks(config) as sinks:
            for step in range(1, trained + 1):
                sinks.log(step, row_of(step))
            sinks.log(trained, {"eval/step": trained, "eval/version": trained, **EVALUATED})
        store_evaluation(folder, trained, rewards)
        warn(folder, "the worker w1 was blocked for 5 s")
        warn(folder, "the worker w2 was blocked for 7 s")
    if exit_code is None:
        (folder / "ended.json").unlink()
    return RunFolder(path=folder)


def row_of(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 10,
        "rollout/reward": step / 20,
        "staleness/mean": 1.5,
        "staleness/max": 2,
        "idle/no_groups": 0.4,
        "idle/pushing": 0.05,
        "idle/checkpoint": 0.0,
        "idle/other": 0.01,
        "rollout/workers": 2,
        "rollout/inflight": 7,
        "engine/running": 0,
        "engine/waiting": 0,
        "perf/tok_s": 1000.0 * step,
        "progress/wall_s": 2.0 * step,
        "progress/tokens": 100 * step,
    }


def store_evaluation(folder: Path, step: int, rewards: Sequence[float]) -> None:
    (folder / "eval").mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = [{"evaluated": "it", "step": step, "version": step, "settings": {}, "environments": {}}]
    rows += [
        {"task": f"t{index}", "environment": "counting", "prompt": "1=", "samples": [{"reward": reward}, {"reward": None}]}
        for index, reward in enumerate(rewards)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "eval" / f"step-{step:08d}-version-{step}.jsonl").write_text(text)


def warn(folder: Path, text: str) -> None:
    handler = WarningFile(folder, "learner")
    handler.handle(logging.LogRecord("learner", logging.WARNING, "file.py", 1, text, None, None))

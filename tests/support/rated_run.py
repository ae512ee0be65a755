"""A recorded run whose rates are known: a worker rolls out 1, 2, ... 6 groups at once, again and again."""

from __future__ import annotations

import json
from pathlib import Path

from async_rl.config import Config
from async_rl.config.loading import to_yaml
from async_rl.recording.recorded import GroupFacts
from async_rl.recording.recorder import Recorder
from async_rl.types import EpisodeSpan, GroupTimes, RolloutGroup, Task
from tests.support.recorded_run import BEGAN, rollout

TOKENS, SIBLINGS, STEPS = 12, 4, 40
A_TOKEN_S, BESIDE_S, WAITED_S = 0.01, 0.002, 0.3
"""A token takes A_TOKEN_S + BESIDE_S x generations; then each group waits."""


def record_rates(folder: Path, config: Config) -> None:
    """Record a run of `config`, with groups of SIBLINGS. A step takes 2 s, a quarter of which the learner waits."""
    (folder / "config.yaml").write_text(to_yaml(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {
                "step": step,
                "time": BEGAN + 2 * step,
                "time/step": 1.5,
                "progress/wall_s": 2.0 * step,
                "idle/no_groups": 0.25,
                "staleness/mean": 1.5,
                "episode/length": TOKENS,
                "weights/push_s": 0.25,
                "weights/wait_s": 0.05,
                "weights/workers": 1,
                "weights/bytes": 1000,
                "rollout/workers": 1,
                "buffer/dropped/no_signal": 2 * step,
            }
            file.write(json.dumps(row) + "\n")
    answer = rollout("1+1=", "2" * TOKENS, reward=1.0, versions=[1] * TOKENS)
    with Recorder(folder, "learner", events_bytes=0, rollouts_bytes=2**24) as recorder:
        at, number = BEGAN + 60, 0
        for groups in [1, 2, 3, 4, 5, 6] * 4:
            took = TOKENS * (A_TOKEN_S + BESIDE_S * groups * SIBLINGS)
            spans = [
                EpisodeSpan(stage, sibling, start, stop)
                for sibling in range(SIBLINGS)
                for stage, start, stop in (("inference", 0.0, took), ("reward", took, took + WAITED_S))
            ]
            for _ in range(groups):
                number += 1
                made = RolloutGroup(
                    id=f"t{number:09d}",
                    task=Task(key=str(number), environment="counting", prompt="1+1="),
                    rollouts=(answer,) * SIBLINGS,
                    worker="worker-0",
                    times=GroupTimes(reserved_at=at, seconds=took + WAITED_S, spans=tuple(spans)),
                )
                recorder.group(GroupFacts(fate="trained", task_index=number, step=1, reserved_at=at), made)
            at += took

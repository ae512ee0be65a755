"""Writes the folder of a run that is made up, to try the page (`async-rl view --demo`) and to test it."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

from async_rl.view.opened_run import CONFIG_FILE, METRICS_FILE
from async_rl.view.recorded.demo import record_demo

CONFIG = """\
model: {size: {hidden: 64, layers: 2, heads: 4}}
tokenizer: {type: characters, alphabet: "0123456789="}
environments: [{type: counting}]
staleness: {max_age: 3}
batch: {groups_per_step: 8, group_size: 16}
evaluation: {every: %d}
learner: {steps: %d}
"""
WRONG_AT = 0.55
"""Share of the run after which its workers are too slow for a while, so that the page has something to show."""


def write_demo(folder: Path, *, steps: int = 2000, seed: int = 0) -> None:
    """Write a run of that many steps that ended an hour ago."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(CONFIG % (max(1, steps // 20), steps))
    totals: dict[str, float] = dict.fromkeys(("tokens", "samples", "wall_s", "stale", "no_signal"), 0.0)
    start = time.time() - 3600 - steps * 0.6  # about what its steps take
    with (folder / METRICS_FILE).open("w") as file:
        for step in range(1, steps + 1):
            row = _row(step, steps, draw, totals)
            file.write(json.dumps({"step": step, "time": start + totals["wall_s"], **row}) + "\n")
    record_demo(folder, steps=steps, ended=start + totals["wall_s"], draw=draw)
    _write_warnings(folder / "warnings.jsonl", start + totals["wall_s"])


def _row(step: int, steps: int, draw: random.Random, totals: dict[str, float]) -> dict[str, float]:
    progress = step / steps
    is_slow = WRONG_AT < progress < WRONG_AT + 0.12

    def noise(spread: float) -> float:
        return draw.gauss(0, spread)

    reward = min(1.0, max(0.0, 1.05 / (1 + math.exp(5 - 12 * progress)) + noise(0.03)))
    step_s, wait_s = 0.33 + abs(noise(0.02)), (1.2 if is_slow else 0.05) + abs(noise(0.03))
    span_s, trained = step_s + wait_s, round(1500 + 400 * progress + noise(60))
    ages = _ages(draw, mean=2.6 if is_slow else 1.2)
    mean_age = sum(age * count for age, count in ages.items()) / sum(ages.values())
    totals["tokens"] += trained
    totals["samples"] += 128
    totals["wall_s"] += span_s
    totals["stale"] += 40 if is_slow else 2
    totals["no_signal"] += 300 * progress
    generated = totals["tokens"] + totals["stale"] + totals["no_signal"] + 3 * trained
    entropy = 2.4 * math.exp(-3 * progress) + 0.2 + abs(noise(0.02))
    row: dict[str, float] = {
        "reward/mean": reward,
        "reward/std": 0.3 * (1 - reward) + 0.05,
        "rollout/reward": max(0.0, reward - 0.03 + noise(0.02)),
        "reward/counting/mean": reward,
        "episode/length": 9 + 3 * progress + noise(0.2),
        "episode/truncated": max(0.0, 0.1 * (1 - progress) + noise(0.01)),
        "episode/failed": 0.0,
        "staleness/mean": mean_age,
        "staleness/max": max(ages),
        "staleness/p95": max(ages),
        "staleness/in_flight": 0.6 * mean_age,
        "staleness/in_queue": 0.4 * mean_age,
        "staleness/dropped": totals["stale"] // 40,
        **{f"staleness/age_{age}": count for age, count in ages.items()},
        "policy/loss": noise(0.02),
        "policy/entropy_estimate": entropy,
        "policy/ess": max(0.3, 0.98 - 0.06 * mean_age + noise(0.01)),
        "policy/kl_behave": 0.004 * (1 + mean_age) + abs(noise(0.001)),
        "policy/clip_frac": min(1.0, 0.03 * (1 + mean_age) + abs(noise(0.01))),
        "policy/logprob_abs_diff": 0.02 * (1 + mean_age) + abs(noise(0.004)),
        "policy/ratio_max": 1.5 + abs(noise(0.4)),
        "optim/grad_norm": 0.4 + 2 * math.exp(-4 * progress) + abs(noise(0.1)),
        "optim/lr": 1e-3,
        "optim/skipped": 0.0,
        "batch/fill": 0.82 + noise(0.03),
        "batch/imbalance": 1.0 + abs(noise(0.03)),
        "batch/no_signal_frac": 0.1 * progress,
        "batch/trained_tokens": trained,
        "batch/tokens": trained * 1.3,
        "time/step": step_s,
        "time/pack": 0.012 + abs(noise(0.001)),
        "time/wait_data": wait_s,
        "idle/learner": wait_s / span_s,
        "idle/no_groups": 0.9 * wait_s / span_s,
        "idle/pushing": 0.06 * wait_s / span_s,
        "idle/checkpoint": 0.04 * wait_s / span_s,
        "idle/other": 0.003,
        "perf/tok_s": trained / span_s,
        "rollout/tok_s": trained / span_s * 1.08,
        "rollout/inflight": 14 + round(noise(2)),
        "rollout/workers": 2.0 if not is_slow else 1.0,
        "rollout/episodes": step * 130,
        "engine/running": 90 + round(noise(8)),
        "engine/waiting": 20 + round(noise(4)),
        "engine/kv_used": min(1.0, 0.5 + 0.2 * progress + noise(0.03)),
        "buffer/depth": 0.0 if is_slow else max(0.0, 8 + round(noise(3))),
        "buffer/reserved": 14 + round(noise(2)),
        "buffer/slots_used": 24.0,
        "buffer/bytes": 60_000 + noise(4000),
        "buffer/quarantined": 0.0,
        "buffer/dropped/stale": totals["stale"] // 40,
        "buffer/dropped/no_signal": totals["no_signal"] // 300,
        "tokens/generated": generated,
        "tokens/trained": totals["tokens"],
        "tokens/in_flight": 3 * trained,
        "tokens/dropped/stale": totals["stale"],
        "tokens/dropped/no_signal": totals["no_signal"],
        "pace/target": 2.5,
        "pace/slots": 32.0,
        "weights/version": step,
        "weights/live": step - 1,
        "weights/pushes": step - 1,
        "weights/push_s": 0.03 + abs(noise(0.005)),
        "weights/wait_s": 0.01,
        "weights/bytes": 2_107_392.0,
        "weights/workers": 2.0,
        "weights/dropped": 0.0,
        "checkpoint/stall_s": 0.02,
        "checkpoint/write_s": 0.4,
        "checkpoint/failed": 0.0,
        "metrics/dropped": 0.0,
        "memory/host": 1.9e9 + noise(2e6),
        "memory/gpu": 5.2e9 + 0.4e9 * progress + noise(1e7),
        "progress/tokens": totals["tokens"],
        "progress/samples": totals["samples"],
        "progress/wall_s": totals["wall_s"],
    }
    for age, bucket in ((0, "0"), (1, "1"), (2, "2_3")):
        if ages.get(age, 0):
            row[f"policy/age_{bucket}/ess"] = max(0.3, 0.99 - 0.06 * age + noise(0.01))
            row[f"policy/age_{bucket}/kl_behave"] = 0.004 * (1 + age) + abs(noise(0.001))
            row[f"policy/age_{bucket}/clip_frac"] = 0.03 * (1 + age) + abs(noise(0.01))
            row[f"policy/age_{bucket}/logprob_abs_diff"] = 0.02 * (1 + age) + abs(noise(0.004))
    if step % max(1, steps // 20) == 0:
        row |= _evaluation(step, reward, draw)
    return row


def _ages(draw: random.Random, *, mean: float) -> dict[int, int]:
    """Ages of the eight groups of a step, at most 3."""
    drawn = [min(3, max(0, round(draw.gauss(mean, 0.7)))) for _ in range(8)]
    return {age: drawn.count(age) for age in sorted(set(drawn))}


def _evaluation(step: int, reward: float, draw: random.Random) -> dict[str, Any]:
    mean = min(0.99, max(0.01, reward - 0.02 + draw.gauss(0, 0.01)))
    measures = {"mean@4": mean, "mean@4_low": mean - 0.03, "mean@4_high": min(1.0, mean + 0.03), "pass@1": mean, "tasks": 64}
    named = {f"eval/counting/{name}": value for name, value in measures.items()}
    return {"eval/step": step, "eval/version": step, **named}


def _write_warnings(path: Path, at: float) -> None:
    """Two of one cause, as the processes of a run log them."""
    rows = [
        {"time": at - 60 * ago, "role": "worker", "pid": 4711, "level": "warning", "details": {"cause": "TimeoutError"}}
        | {"event": f"counting: {failed} of 128 episodes failed at reward"}
        for ago, failed in ((9, 3), (2, 4))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

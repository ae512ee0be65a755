"""The row of metrics of each step, and samples of rollouts (samples.jsonl)."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from async_rl.durable.best_effort import BestEffortRows
from async_rl.protocols import MetricsSink
from async_rl.replay_protocol import BufferStats
from async_rl.telemetry.durations import duration
from async_rl.types import Message, Rollout, Status, TakenGroup
from learner.loop import FinishedStep
from learner.versions.publish import Publisher

SAMPLES_PER_STEP = 2


class Reporter:
    """Writes the metrics row of each step, with totals of the run."""

    def __init__(self, *, sink: MetricsSink, samples: BestEffortRows, publisher: Publisher, before: Mapping[str, float]):
        """`before`: the last row of a resumed run; totals continue from it."""
        self._sink, self._publisher = sink, publisher
        self._samples = samples
        self._tokens = before.get("progress/tokens", 0.0)
        self._rollouts = before.get("progress/samples", 0.0)
        self._reward: float | None = None
        """Mean reward of the last reported step."""
        self._started = time.monotonic() - before.get("progress/wall_s", 0.0)

    def write(self, finished: FinishedStep, buffer: BufferStats, workers: Mapping[str, float]) -> None:
        groups = finished.step_batch.groups
        rollouts = [rollout for taken in groups for rollout in taken.group.rollouts]
        tokens = sum(rollout.num_sampled for rollout in rollouts)
        self._tokens += tokens
        self._rollouts += len(rollouts)
        row = {
            **reward_metrics(groups),
            **environment_metrics(groups),
            **episode_metrics(rollouts),
            **age_metrics(groups),
            **finished.result.metrics,
            **finished.result.experts,
            "optim/lr": finished.result.learning_rate,
            "optim/grad_norm": finished.result.grad_norm,
            "optim/skipped": float(finished.result.skipped),
            "time/step": finished.step_s,
            "time/wait_data": finished.idle_s,
            "idle/learner": finished.idle_s / max(finished.idle_s + finished.step_s, 1e-9),
            **finished.idle,
            "perf/tok_s": tokens / max(finished.idle_s + finished.step_s, 1e-9),
            "progress/tokens": self._tokens,
            "progress/samples": self._rollouts,
            "progress/wall_s": time.monotonic() - self._started,
            "samples/dropped": self._samples.dropped,
            "weights/version": finished.progress.version,
            **finished.checkpoint,
            **push_metrics(self._publisher),
            **buffer_metrics(buffer),
            **workers,
        }
        self._sink.log(finished.step_batch.step, row)
        self._reward = row["reward/mean"]
        self._keep_samples(finished)

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Write further metrics of a step."""
        self._sink.log(step, row)

    def closing_sentence(self, step: int, steps: int) -> str:
        """Return a closing sentence for the log."""
        took = duration(time.monotonic() - self._started)
        reward = f", reward {self._reward:.3f} in the last of them" if self._reward is not None else ""
        again = "" if step >= steps else "; start the learner again to resume from its last checkpoint"
        return f"ends after step {step} of {steps}, {took} of training{reward}{again}"

    def _keep_samples(self, finished: FinishedStep) -> None:
        for taken in finished.step_batch.groups[:SAMPLES_PER_STEP]:
            first = taken.group.rollouts[0]
            prompt, answer = split_conversation(first.conversation)
            row = {
                "step": finished.step_batch.step,
                "environment": taken.group.task.environment,
                "prompt": prompt,
                "text": answer,
                "reward": first.reward if math.isfinite(first.reward) else None,
                "age": taken.age,
            }
            self._samples.add(json.dumps(row).encode())


def split_conversation(conversation: Sequence[Message]) -> tuple[str, str]:
    """Split a conversation into the prompt (without system messages) and everything from the first answer on."""
    first = next((place for place, each in enumerate(conversation) if each.role == "assistant"), len(conversation))
    prompt = [message.content for message in conversation[:first] if message.role != "system"]
    shown = prompt if prompt else [message.content for message in conversation[:first]]
    return "\n".join(shown), " ".join(message.content for message in conversation[first:])


def reward_metrics(groups: list[TakenGroup]) -> dict[str, float]:
    scored = [
        (taken.group.task.environment, rollout)
        for taken in groups
        for rollout in taken.group.rollouts
        if rollout.status is not Status.FAILED
    ]
    rewards = [rollout.reward for _, rollout in scored]
    named: dict[str, list[float]] = defaultdict(list)
    for environment, rollout in scored:
        named[f"reward/{environment}/mean"].append(rollout.reward)
        for part, value in rollout.reward_parts.items():
            named[f"reward/{environment}/{part}"].append(value)
    row = {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    return row | {name: float(np.mean(values)) for name, values in named.items()}


def environment_metrics(groups: list[TakenGroup]) -> dict[str, float]:
    """Return the share of each environment in the batch."""
    counts = Counter(taken.group.task.environment for taken in groups)
    return {f"environment/{name}/share": count / len(groups) for name, count in counts.items()}


def episode_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    count = len(rollouts)
    return {
        "episode/length": sum(rollout.num_sampled for rollout in rollouts) / count,
        "episode/turns": sum(rollout.metrics.get("turns", 1.0) for rollout in rollouts) / count,
        "episode/truncated": sum(rollout.status is Status.TRUNCATED for rollout in rollouts) / count,
        "episode/failed": sum(rollout.status is Status.FAILED for rollout in rollouts) / count,
    }


def age_metrics(groups: list[TakenGroup]) -> dict[str, float]:
    ages = np.array([taken.age for taken in groups])
    row = {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/p95": float(np.percentile(ages, 95)),
        "staleness/in_flight": float(np.mean([taken.age_in_flight for taken in groups])),
        "staleness/in_queue": float(np.mean([taken.age_in_queue for taken in groups])),
    }
    return row | {f"staleness/age_{age}": float(count) for age, count in sorted(Counter(ages.tolist()).items())}


def push_metrics(publisher: Publisher) -> dict[str, float]:
    row = {
        "weights/pushes": float(publisher.num_pushes),
        "weights/coalesced": float(publisher.num_coalesced),
        "weights/pinned": float(bool(publisher.pinned)),
    }
    if (pushed := publisher.last_push) is None:
        return row
    return row | {
        "weights/live": float(pushed.record.version),
        "weights/push_s": pushed.report.seconds,
        "weights/wait_s": pushed.waited_s,
        "weights/bytes": float(pushed.report.num_bytes),
        "weights/workers": float(len(pushed.report.staged)),
        "weights/dropped": float(len(pushed.report.dropped)),
    }


def buffer_metrics(stats: BufferStats) -> dict[str, float]:
    return {
        "buffer/depth": stats.ready,
        "buffer/again": stats.again,
        "buffer/reserved": stats.reserved,
        "buffer/slots_used": stats.slots_used,
        "buffer/bytes": stats.bytes,
        "buffer/quarantined": stats.quarantined,
        "buffer/kept": stats.kept,
        "buffer/expired": stats.expired,
        "buffer/lost_to_rollback": stats.lost_to_rollback,
        "buffer/owed": stats.owed,
        "staleness/dropped": stats.dropped.get("stale", 0),
        **{f"buffer/dropped/{reason}": count for reason, count in stats.dropped.items()},
        **token_metrics(stats),
    }


def token_metrics(stats: BufferStats) -> dict[str, float]:
    """Return the tokens generated and where they went: generated = trained + dropped + in flight."""
    row = {"tokens/in_flight": float(stats.tokens_in_flight)}
    for fate in ("generated", "trained"):
        row[f"tokens/{fate}"] = float(stats.tokens.get(fate, 0))
    dropped = {fate: tokens for fate, tokens in stats.tokens.items() if f"tokens/{fate}" not in row}
    return row | {f"tokens/dropped/{reason}": float(tokens) for reason, tokens in dropped.items()}

"""Records the last steps of the made-up run of `async-rl view --demo`: groups that count, some of them dropped, and events."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np

from async_rl.recording.events import Event
from async_rl.recording.recorded import GroupFacts, head_of
from async_rl.recording.recorder import Recorder
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import EpisodeSpan, GroupTimes, Message, Rollout, RolloutGroup, Sample, Status, Task, spans_of

ALPHABET = "0123456789="
TOKENIZER = Characters(ALPHABET)
STEPS, GROUPS, SIBLINGS, LENGTH = 20, 8, 8, 12
STEP_S = 0.6
BEGAN_S = 40.0
"""The recording begins that long before the end."""
BLOCKED_S = 5.0
"""A worker was blocked for that long, before the steps that are recorded: the timeline shows it, and it slows nothing now."""


def record_demo(folder: Path, *, steps: int, ended: float, draw: random.Random) -> None:
    """Record the last of `steps` steps, the very last of which ended at the time `ended`."""
    first = max(1, steps - STEPS + 1)
    with Recorder(folder, "learner", events_bytes=2**22, rollouts_bytes=2**24) as recorder:
        recorder.event("start", at=ended - BEGAN_S, step=first - 1, version=first - 1, timeline="demo")
        for step in range(first, steps + 1):
            at = ended - STEP_S * (steps - step)
            for number in range(step * GROUPS, (step + 1) * GROUPS):
                group = _group(number, step, at - 3.0, draw)
                if draw.random() < 0.15:
                    head, counts = head_of(group)
                    facts = GroupFacts(fate="no_signal", reserved_at=at - 3.0, ready_at=at - 1.5, is_head=True, counts=counts)
                    recorder.group(facts, head)
                else:
                    recorder.group(_trained(step, at, group), group)
            idle = {"idle/no_groups": 0.1, "idle/pushing": 0.03, "idle/checkpoint": 0.01, "idle/other": 0.02}
            recorder.event("take", at=at - 0.6, seconds=0.1, step=step)
            recorder.event("step", at=at - 0.5, seconds=0.5, step=step, version=step, wait_s=0.1, idle=idle)
            recorder.event(
                "push", at=at, seconds=0.05, wait_s=0.01, version=step, step=step, bytes=400_000, staged=["w-0", "w-1"],
                how={"w-0": "gloo, delta", "w-1": "gloo, delta"},
            )  # fmt: skip
            for worker in ("w-0", "w-1"):
                recorder.event("swap", at=at + 0.05, seconds=0.02, worker=worker, version=step, how="push")
        place = {"worker": "w-1", "environment": "counting", "place": "counting.py:31 in reward"}
        recorder.event("blocked", at=ended - STEP_S * (STEPS + 10), seconds=BLOCKED_S, **place)
        recorder.add(Event(kind="fates", at=ended, fields=_fates(steps)))


def _trained(step: int, at: float, group: RolloutGroup) -> GroupFacts:
    rewards = [rollout.reward for rollout in group.rollouts]
    mean, spread = fmean(rewards), pstdev(rewards)
    return GroupFacts(
        fate="trained",
        task_index=step,
        step=step,
        version_at_take=step,
        version_at_commit=step - 1,
        reserved_at=at - 3.0,
        ready_at=at - 1.5,
        taken_at=at - 1.0,
        trained_from=at - 0.5,
        trained_at=at,
        advantages=tuple((reward - mean) / (spread + 1e-6) for reward in rewards),
    )


def _group(number: int, step: int, reserved_at: float, draw: random.Random) -> RolloutGroup:
    start = draw.randrange(10)
    answer = "".join(str((start + place) % 10) for place in range(1, LENGTH + 1))
    spans = [
        EpisodeSpan(stage, sibling, begins, ends)
        for sibling in range(SIBLINGS)
        for stage, begins, ends in (("queue", 0.0, 0.2), ("inference", 0.2, 1.4), ("reward", 1.4, 1.5))
    ]
    return RolloutGroup(
        id=f"t{number:09d}",
        task=Task(key=f"counting/0/{number}", environment="counting", prompt=f"{start}=", answer=answer),
        rollouts=tuple(_rollout(f"{start}=", answer, step, draw) for _ in range(SIBLINGS)),
        worker=f"w-{number % 2}",
        times=GroupTimes(reserved_at=reserved_at, seconds=1.5, spans=tuple(spans)),
    )


def _rollout(prompt: str, answer: str, step: int, draw: random.Random) -> Rollout:
    wrong = draw.randrange(2 * LENGTH)
    said = "".join(draw.choice("0123456789") if place == wrong else right for place, right in enumerate(answer))
    reward = sum(left == right for left, right in zip(said, answer, strict=True)) / LENGTH
    given = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
    chances = [draw.uniform(0.1, 0.4) if place == wrong else draw.uniform(0.7, 0.99) for place in range(LENGTH)]
    swapped = draw.randrange(LENGTH)
    return Rollout(
        samples=(
            Sample(
                token_ids=np.array([*given, *TOKENIZER.encode(said)], np.int32),
                loss_mask=np.array([0] * len(given) + [1] * LENGTH, np.uint8),
                logprobs=np.array([0.0] * len(given) + np.log(chances).tolist(), np.float32),
                versions=spans_of([step - 2] * swapped + [step - 1] * (LENGTH - swapped), offset=len(given)),
            ),
        ),
        reward=reward,
        status=Status.OK,
        reward_parts={"begins": float(said[0] == answer[0])},
        metrics={"turns": 1.0, "steps_right": float(sum((int(b) - int(a)) % 10 == 1 for a, b in pairwise(said)))},
        conversation=(Message(role="user", content=prompt), Message(role="assistant", content=said)),
    )


def _fates(steps: int) -> dict[str, object]:
    trained, no_signal, stale = steps * GROUPS, steps * GROUPS // 6, steps // 2
    in_flight = {"reserved": 12, "ready": 5, "again": 0, "taken": 8}
    tickets = {
        "issued": trained + no_signal + stale + sum(in_flight.values()),
        "trained": trained,
        "dropped": {"no_signal": no_signal, "stale": stale},
        "in_flight": in_flight,
    }
    each = SIBLINGS * (LENGTH + 3)
    tokens = {"trained": trained * each, "dropped/no_signal": no_signal * each, "dropped/stale": stale * each}
    tokens["in_flight"] = 5 * each
    return {"step": steps, "tickets": tickets, "tokens": {"generated": sum(tokens.values()), **tokens}}

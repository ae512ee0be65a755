"""A recorded run with a bit of everything: two environments, conversations with tools, dropped groups, hostile text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.recording.events import Event
from async_rl.recording.recorded import GroupFacts, head_of
from async_rl.recording.recorder import Recorder
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import (
    EpisodeSpan,
    Failure,
    GroupTimes,
    Message,
    Rollout,
    RolloutGroup,
    Sample,
    Status,
    Task,
    ToolCall,
    spans_of,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 =+?\n"
TOKENIZER = Characters(ALPHABET)
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\x00\x1b[31m\u202eevil\u202c\u200b</pre>"
LONG = "0123456789" * 100_000
BEGAN = 1767225600.0
"""Time of the first ticket."""
MAX_MB = 64


def sample(prompt: str, answer: str, versions: list[int]) -> Sample:
    """`versions`: one per character of the answer."""
    given = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
    token_ids = [*given, *TOKENIZER.encode(answer)]
    sampled = np.arange(len(token_ids)) >= len(given)
    chances = np.linspace(0.99, 0.05, len(token_ids), dtype=np.float32)
    return Sample(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=sampled.astype(np.uint8),
        logprobs=np.where(sampled, np.log(chances), 0).astype(np.float32),
        versions=spans_of(versions, offset=len(given)),
    )


def rollout(prompt: str, answer: str, *, reward: float, versions: list[int], text: str = "") -> Rollout:
    said = (
        Message(role="user", content=prompt),
        Message(role="assistant", content=answer + text, tool_calls=(ToolCall(name="add", arguments='{"a": 1}', id="c1"),)),
        Message(role="tool", content=f"2{text}", tool_call_id="c1"),
    )
    return Rollout(
        samples=(sample(prompt, answer, versions),),
        reward=reward,
        status=Status.OK,
        reward_parts={"right": reward, "format": 1.0},
        metrics={"turns": 1.0},
        conversation=said,
    )


def group(number: int, *, environment: str = "sums", text: str = "") -> RolloutGroup:
    """Siblings whose answers begin alike; the third is the best, the last one failed."""
    prompt = f"{number}+1=?"
    answers = ("the sum is 12", "the sum is 13", f"the sum is {number + 1}")
    scored = [
        rollout(prompt, answer, reward=float(place) / 2, versions=[number] * 5 + [number + 1] * (len(answer) - 5), text=text)
        for place, answer in enumerate(answers)
    ]
    failure = Failure(boundary="environment", kind="ToolError", message=f"no such tool {text[:80]}")
    failed = Rollout(samples=(), reward=0.0, status=Status.FAILED, failure=failure)
    spans = tuple(
        EpisodeSpan(stage, sibling, start, stop)
        for sibling in range(4)
        for stage, start, stop in (
            ("queue", 0.1, 0.4),
            ("inference", 0.4, 2.0),
            ("environment", 2.0, 2.5),
            ("reward", 2.5, 3.0),
        )
    )
    return RolloutGroup(
        id=f"t{number:09d}",
        task=Task(key=f"{environment}/0/{number}", environment=environment, prompt=prompt, answer=str(number + 1)),
        rollouts=(*scored, failed),
        worker=f"worker-{number % 2}",
        times=GroupTimes(reserved_at=BEGAN + number, seconds=3.0, spans=spans),
    )


def record_run(folder: Path, groups: int = 30) -> None:
    """Record into a run's folder. Every fifth group was dropped, the last one is hostile."""
    with Recorder(folder, "learner", events_bytes=2**20, rollouts_bytes=MAX_MB * 2**20) as recorder:
        for number in range(groups):
            hostile = HOSTILE + LONG if number == groups - 1 else ""
            made = group(number, environment="sums" if number % 3 else "games", text=hostile)
            is_trained, began = number % 5 != 0, BEGAN + number
            if is_trained:
                facts = GroupFacts(
                    fate="trained",
                    task_index=number,
                    step=number // 5 + 1,
                    version_at_take=number + 2,
                    version_at_commit=number + 1,
                    reserved_at=began,
                    ready_at=began + 3,
                    taken_at=began + 4,
                    trained_from=began + 5,
                    trained_at=began + 6,
                    advantages=(-1.0, 0.0, 1.0, None),
                )
                recorder.group(facts, made)
            else:
                head, counts = head_of(made)
                recorder.group(GroupFacts(fate="no_signal", is_head=True, counts=counts, task_index=number), head)
        trained = sum(number % 5 != 0 for number in range(groups))
        tickets = {
            "issued": groups + 3,
            "trained": trained - 2,
            "dropped": {"no_signal": groups - trained},
            "in_flight": {"reserved": 2, "ready": 1, "again": 0, "taken": 2},
        }
        tokens = {"generated": 900, "trained": 600, "dropped/no_signal": 200, "in_flight": 100}
        fields = {"step": groups // 5, "tickets": tickets, "tokens": tokens}
        recorder.add(Event(kind="fates", at=BEGAN + groups, fields=fields))
        checkpoint = {"step": groups // 5 + 1, "bytes": 100, "stall_s": 0.5}
        recorder.add(Event(kind="checkpoint", at=BEGAN + groups + 9, seconds=1.0, fields=checkpoint))

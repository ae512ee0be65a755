"""Check what user code returns. The buffer would quarantine a whole group for one invalid rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from async_rl.types import Failure, Message, Rollout, Sample, Scalar, Status, Task


def failed(failure: Failure) -> Rollout:
    return Rollout(samples=(), reward=0.0, status=Status.FAILED, failure=failure)


def invalid_result(boundary: str, message: str) -> Failure:
    return Failure(boundary=boundary, kind="InvalidResult", message=message)


def problem_with_task(task: object) -> str | None:
    """Return what is wrong with a task, before it breaks something far from the environment, such as a codec."""
    if not isinstance(task, Task):
        return f"task() must return a Task, got {type(task).__name__}"
    texts: dict[str, object] = {"key": task.key, "environment": task.environment, "answer": task.answer}
    for name, value in texts.items():
        if not isinstance(value, str):
            return f"a Task's {name} must be text, got {value!r:.100}"
    prompt: object = task.prompt
    if not isinstance(prompt, str) and not _is_conversation(prompt):
        return f"a Task's prompt must be text or a tuple of Messages, got {prompt!r:.100}"
    data: Mapping[str, object] = task.data
    wrong = [name for name, value in data.items() if not isinstance(value, Scalar)]
    if wrong:
        return f"a Task's data must be text, numbers and booleans, but {wrong[0]!r} is {data[wrong[0]]!r:.100}"
    return None


def _is_conversation(prompt: object) -> bool:
    """A list of messages is accepted like a tuple."""
    if not isinstance(prompt, list | tuple):
        return False
    messages = cast("Sequence[object]", prompt)
    return bool(messages) and all(
        isinstance(each, Message) and isinstance(cast("object", each.content), str) for each in messages
    )


def checked(rollout: object) -> Rollout:
    """Return the rollout if it is valid, else a failed rollout that says what is wrong."""
    if not isinstance(rollout, Rollout):
        return _invalid(f"rollout() must return a Rollout, got {type(rollout).__name__}")
    if rollout.status is Status.FAILED:
        return failed(rollout.failure) if rollout.failure is not None else _invalid("failed without a reason")
    if not math.isfinite(rollout.reward):
        return failed(invalid_result("reward", f"the reward must be a finite number, got {rollout.reward!r}"))
    problem = next((problem for sample in rollout.samples if (problem := _problem_of(sample)) is not None), None)
    return _invalid(problem) if problem is not None else rollout


def trainable(rollout: Rollout) -> Rollout:
    """Return the rollout if it can be trained on, else a failed one. Masked rollouts need no samples."""
    if rollout.status in (Status.FAILED, Status.MASKED) or rollout.num_sampled:
        return rollout
    return _invalid(
        "the rollout holds no sampled token: a backend that returns no token ids, logprobs and versions "
        "can be evaluated, but not trained"
    )


def _invalid(message: str) -> Rollout:
    return failed(invalid_result("environment", message))


def _problem_of(sample: Sample) -> str | None:
    length = len(sample)
    if len(sample.loss_mask) != length or len(sample.logprobs) != length:
        return f"a row of {length} tokens has {len(sample.loss_mask)} mask entries and {len(sample.logprobs)} logprobs"
    if not np.isfinite(sample.logprobs).all():
        return "a row has a logprob that is not a finite number"
    if np.any(sample.logprobs[sample.loss_mask == 0]):
        return "a row has a logprob where nothing was sampled"
    covered = np.zeros(length, np.uint8)
    for span in sample.versions:
        if not 0 <= span.start < span.stop <= length:
            return f"the version span [{span.start}, {span.stop}) lies outside its row of {length} tokens"
        covered[span.start : span.stop] += 1
    if not np.array_equal(covered, sample.loss_mask):
        return "the version spans of a row do not cover exactly its sampled tokens"
    return None

"""The one place where failures become data: whatever breaks in an episode, a rollout comes out of it.

Only a real cancellation passes through, and, once nothing but failures come, FailureBudgetSpent.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_rl.errors import FailureBudgetSpent
from async_rl.protocols import Agent, EpisodeContext, GenerationArgs, InferenceInterface
from async_rl.types import Completion, Failure, Message, Rollout, Sample, Status, Task
from rollout_workers.rewards import RewardFailed
from rollout_workers.tasks import TaskMix

# Code of the user's may also call sys.exit(), which must not take the worker along.
ANYTHING_RAISED = (Exception, SystemExit)


async def play(
    agent: Agent, task: Task, inference: InferenceInterface, context: EpisodeContext, *, timeout_s: float
) -> Rollout:
    """Play one episode. It always ends in a rollout; a failed one says at which boundary it broke."""
    watched = _WatchedInference(inference)
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            rollout = await agent.rollout(task, watched, context)
        return _checked(rollout)
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        return failed(_failure("environment", error))  # a library cancelled a future of its own
    except ANYTHING_RAISED as error:
        if deadline.expired():
            return failed(Failure(boundary="deadline", kind="TimeoutError", message=f"no end within {timeout_s:g} s"))
        if isinstance(error, RewardFailed):
            return failed(_failure("reward", error.__cause__ if error.__cause__ is not None else error))
        return failed(_failure("inference" if watched.raised is error else "environment", error))


def pose(tasks: TaskMix, task_index: int) -> tuple[Agent, Task] | Failure:
    """The task of an index, or why its environment could not pose it."""
    try:
        return tasks.draw(task_index)
    except ANYTHING_RAISED as error:
        return _failure("environment", error)


def failed(failure: Failure) -> Rollout:
    return Rollout(samples=(), reward=0.0, status=Status.FAILED, failure=failure)


class FailureBudget:
    """How many episodes may fail in a row, over all groups of a worker, before it gives up loudly."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failed_in_a_row = 0

    def succeeded(self) -> None:
        self._failed_in_a_row = 0

    def spend(self, failure: Failure) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._limit:
            raise FailureBudgetSpent(
                f"{self._failed_in_a_row} episodes failed in a row; "
                f"the last one at the {failure.boundary} boundary with {failure.kind}: {failure.message}"
            )


class _WatchedInference:
    """The agent's handle, remembering what it raised, so that a broken engine is not blamed on the environment."""

    def __init__(self, inference: InferenceInterface) -> None:
        self._inference = inference
        self.tokenizer = inference.tokenizer
        self.raised: Exception | None = None

    async def generate(self, prompt: str | Sequence[Message] | Sequence[int], args: GenerationArgs | None = None) -> Completion:
        try:
            return await self._inference.generate(prompt, args)
        except Exception as error:
            self.raised = error
            raise


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure(boundary: str, error: BaseException) -> Failure:
    return Failure(boundary=boundary, kind=type(error).__name__, message=f"{error}{_place_of(error)}")


def _place_of(error: BaseException) -> str:
    """Where it was raised: whoever wrote the environment wants to go there."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _checked(rollout: object) -> Rollout:
    """Refuse here what the buffer would quarantine together with its healthy siblings."""
    if not isinstance(rollout, Rollout):
        return failed(_nonsense("environment", f"rollout() must return a Rollout, got {type(rollout).__name__}"))
    if rollout.status is Status.FAILED:
        return failed(rollout.failure if rollout.failure is not None else _nonsense("environment", "failed without a reason"))
    if not math.isfinite(rollout.reward):
        return failed(_nonsense("reward", f"the reward must be a finite number, got {rollout.reward!r}"))
    if not rollout.num_sampled:
        return failed(_nonsense("environment", "the rollout holds no sampled token"))
    for sample in rollout.samples:
        if (problem := _problem_of(sample)) is not None:
            return failed(_nonsense("environment", problem))
    return rollout


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


def _nonsense(boundary: str, message: str) -> Failure:
    return Failure(boundary=boundary, kind="Nonsense", message=message)

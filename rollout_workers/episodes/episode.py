"""The episode boundary: the one place where exceptions of user code become failed rollouts.

Only a real cancellation, a broken engine (ServiceStopped) and FailureBudgetSpent pass through.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from async_rl.config.rollout import TimeoutsConfig
from async_rl.errors import FailureBudgetSpent, ServiceStopped
from async_rl.protocols import EpisodeContext, GroupAgent, InferenceInterface
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.types import Failure, Rollout, Task
from rollout_workers.episodes.leaked_tasks import run_episode, running_environment
from rollout_workers.episodes.rewards import RewardFailed
from rollout_workers.episodes.stage_timeouts import StageTimeout, apply_timeouts, stage
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.episodes.validation import checked, failed, invalid_result, problem_with_task
from rollout_workers.episodes.watched_inference import WatchedInference
from rollout_workers.user_functions import awaited

T = TypeVar("T")
RolloutFunction = Callable[[Task, InferenceInterface, EpisodeContext], Coroutine[Any, Any, Rollout]]

# User code may also call sys.exit(), which must not end the worker.
USER_ERRORS = (Exception, SystemExit)


async def play(
    rollout: RolloutFunction,
    task: Task,
    inference: InferenceInterface,
    context: EpisodeContext,
    *,
    timeout_s: float,
    timeouts: TimeoutsConfig | None = None,
) -> Rollout:
    """Play one episode with an agent's `rollout`. Whatever goes wrong is a failed rollout that names the broken boundary."""
    name = f"{task.environment}: task {task.key}, sibling {context.sibling}"
    played = await _attempt(lambda model: rollout(task, model, context), task, name, inference, timeout_s, timeouts)
    return failed(played) if isinstance(played, Failure) else checked(played)


async def play_group(
    agent: GroupAgent,
    task: Task,
    inference: InferenceInterface,
    contexts: Sequence[EpisodeContext],
    *,
    timeout_s: float,
    timeouts: TimeoutsConfig | None = None,
) -> tuple[Rollout, ...]:
    """Play the siblings together under one deadline. Returns one rollout per context; if the call raises, all have failed."""
    name = f"{task.environment}: task {task.key}, all siblings"
    played = await _attempt(
        lambda model: agent.rollout_group(task, model, contexts), task, name, inference, timeout_s, timeouts
    )
    if not isinstance(played, Failure) and (problem := _problem_with(played, len(contexts))) is not None:
        played = invalid_result("environment", problem)
    if isinstance(played, Failure):
        return tuple(failed(played) for _ in contexts)
    return tuple(checked(rollout) for rollout in played)


async def pose_task(
    source: TaskSource, timeouts: TimeoutsConfig | None = None, lock: AbstractAsyncContextManager[object] | None = None
) -> Task | Failure:
    """Return the task, or the failure of `task()`, which runs on a thread of its own. `lock` is held meanwhile."""
    try:
        async with lock if lock is not None else nullcontext(), stage("task", timeouts):
            posed = await in_daemon_thread(lambda: source.agent.task(source.index), name=f"task of {source.environment.label}")
            with running_environment(source.environment.label):
                task = await awaited(posed)
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        return _failure("task", error)
    except USER_ERRORS as error:
        return _failure("task", error)
    problem = problem_with_task(task)
    return invalid_result("task", problem) if problem is not None else task


@dataclass(slots=True)
class FailureBudget:
    """Count failures in a row over all groups of a worker. `spend` raises FailureBudgetSpent at the limit."""

    limit: int
    _failed_in_a_row: int = 0

    def succeeded(self) -> None:
        self._failed_in_a_row = 0

    def spend(self, failure: Failure) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.limit:
            raise FailureBudgetSpent(
                f"{self._failed_in_a_row} episodes failed in a row; "
                f"the last one at the {failure.boundary} boundary with {failure.kind}: {failure.message}"
            )


async def _attempt(
    episode: Callable[[InferenceInterface], Coroutine[Any, Any, T]],
    task: Task,
    name: str,
    inference: InferenceInterface,
    timeout_s: float,
    timeouts: TimeoutsConfig | None,
) -> T | Failure:
    deadline = asyncio.timeout(timeout_s)
    with apply_timeouts(timeouts):
        watched = WatchedInference(inference)
        try:
            async with deadline:
                return await run_episode(episode(watched), environment=task.environment, name=name)
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            return _failure("environment", error)  # a library cancelled a future of its own
        except USER_ERRORS as error:
            if isinstance(watched.raised, ServiceStopped):
                raise watched.raised from None  # a broken engine is not a failed episode
            if deadline.expired():
                return Failure(boundary="deadline", kind="TimeoutError", message=f"no end within {timeout_s:g} s")
            return _failure_of(error, watched)


def _failure_of(error: BaseException, watched: WatchedInference) -> Failure:
    boundary = "inference" if watched.raised is error else "environment"
    if isinstance(error, RewardFailed):
        boundary, error = "reward", error.__cause__ if error.__cause__ is not None else error
    return _failure(boundary, error)


def _failure(boundary: str, error: BaseException) -> Failure:
    if isinstance(error, StageTimeout):
        return Failure(boundary=error.stage, kind="TimeoutError", message=str(error))
    return Failure(boundary=boundary, kind=type(error).__name__, message=f"{error}{_location_of(error)}")


def _location_of(error: BaseException) -> str:
    """The file and line that raised, for the author of the environment."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _problem_with(played: object, count: int) -> str | None:
    if not isinstance(played, Sequence):
        return f"rollout_group() must return one rollout for each of {count} siblings, got {type(played).__name__}"
    if len(played) != count:  # pyright: ignore[reportUnknownArgumentType]
        return f"rollout_group() returned {len(played)} rollouts for {count} siblings"  # pyright: ignore[reportUnknownArgumentType]
    return None


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

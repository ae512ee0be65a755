"""Scoring functions by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.util import find_spec

from async_rl.errors import ConfigError
from async_rl.types import Task
from rollout_workers.datasets.numbers import final_number
from rollout_workers.episodes.rewards import Score
from rollout_workers.graders import in_process
from rollout_workers.registry import load_attribute
from rollout_workers.reward_model.client import ServedReward

MATH_S = 10.0

Scoring = Callable[[Task, str], float | Score | Awaitable[float | Score]]


def exact_match(task: Task, response: str) -> float:
    """1 if the response equals the answer, ignoring surrounding spaces; else 0."""
    return float(response.strip() == task.answer.strip())


def contains(task: Task, response: str) -> float:
    """1 if the response contains the answer; else 0."""
    return float(task.answer.strip() in response)


def number(task: Task, response: str) -> float:
    """1 if the final number of the response equals the answer, such as 1,000.0 and 1000; else 0."""
    wanted = final_number(task.answer)
    if wanted is None:
        raise ValueError(f"the answer {task.answer!r:.80} of task {task.key} is not a number; use another scoring")
    return float(final_number(response) == wanted)


async def math(task: Task, response: str) -> float:
    """1 if both are mathematically equal, such as 0.5 and 1/2. Needs the package math-verify."""
    return await in_process("rollout_workers.datasets.mathematics:is_same", task.answer, response, timeout_s=MATH_S)


BUILT_IN: dict[str, Scoring] = {"exact_match": exact_match, "contains": contains, "number": number, "math": math}


def find_scoring(name: str) -> Scoring:
    """Find a scoring by its configured name. Raises ConfigError."""
    if name == "math" and find_spec("math_verify") is None:
        raise ConfigError("scoring 'math' needs the package math-verify: pip install 'async-rl[math]'")
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(("http://", "https://")):
        return ServedReward(name)
    if ":" not in name:
        raise ConfigError(
            f"no scoring is called {name!r}; there are {', '.join(BUILT_IN)}, the http://... of a served reward model, and a "
            "function of your own: module:function"
        )
    return load_attribute(name)

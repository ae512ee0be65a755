"""Tasks and rollouts as JSON, for `buffer show --json` and `archive export`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from async_rl.types import Message, Rollout, Status, Task


def task_fields(task: Task) -> dict[str, Any]:
    prompt = task.prompt if isinstance(task.prompt, str) else [_message_fields(message) for message in task.prompt]
    return {
        "key": task.key,
        "environment": task.environment,
        "prompt": prompt,
        "answer": task.answer,
        "data": dict(task.data),
    }


def rollout_fields(rollout: Rollout) -> dict[str, Any]:
    """Return everything but the samples; the reward of a failed rollout is None."""
    return {
        "status": rollout.status.value,
        "failure": asdict(rollout.failure) if rollout.failure is not None else None,
        "reward": rollout.reward if rollout.status is not Status.FAILED else None,
        "reward_parts": dict(rollout.reward_parts),
        "metrics": dict(rollout.metrics),
        "conversation": [_message_fields(message) for message in rollout.conversation],
    }


def _message_fields(message: Message) -> dict[str, object]:
    """Return role and content, and the fields of tools where they are set."""
    return {name: value for name, value in asdict(message).items() if value or name in ("role", "content")}


def dump_json(document: object) -> str:
    """Return one line of JSON; NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(document, allow_nan=False)
    except ValueError:  # rare, for example a refused group with a reward of NaN
        return json.dumps(_finite(document))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in cast("Sequence[object]", value)]
    return value

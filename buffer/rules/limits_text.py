"""The limits as they stand in Redis: numbers and names in the hash `state`, which the scripts read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from async_rl.replay_protocol import Limits, Selector

CHANGEABLE = ("max_age", "lease_s", "max_attempts", "selector", "keep_steps", "quotas")
"""What may change while the run goes on: the rest shapes the learner's steps, or the books of samples per insert."""


def write_limits(limits: Limits) -> dict[str, str]:
    """An empty text says that there is no such limit."""
    is_rated = limits.samples_per_insert is not None
    return {
        **write_changes({name: getattr(limits, name) for name in CHANGEABLE}),
        "groups_per_step": str(limits.groups_per_step),
        "max_uses": str(limits.max_uses),
        "samples_per_insert": repr(limits.samples_per_insert) if is_rated else "",
        "min_size": str(limits.min_size),
        "error_buffer": repr(limits.error_buffer),
        "min_diff": repr(limits.min_diff) if is_rated else "",
        "max_diff": repr(limits.max_diff) if is_rated else "",
    }


def write_changes(changes: Mapping[str, Any]) -> dict[str, str]:
    written: dict[str, str] = {}
    for name, value in changes.items():
        if name not in CHANGEABLE:
            raise ValueError(f"{name} cannot be changed while the run goes on")
        if name == "lease_s":
            written["lease_ms"] = str(round(float(value) * 1000))
        elif name == "quotas":
            written[name] = json.dumps(dict(value))
        else:
            written[name] = str(value)
    return written


def read_limits(state: Mapping[str, str]) -> Limits | None:
    if "groups_per_step" not in state:
        return None
    return Limits(
        max_age=float(state["max_age"]),
        groups_per_step=int(state["groups_per_step"]),
        lease_s=int(state["lease_ms"]) / 1000,
        max_attempts=int(state["max_attempts"]),
        selector=cast("Selector", state["selector"]),
        max_uses=int(state["max_uses"]),
        samples_per_insert=float(state["samples_per_insert"]) if "samples_per_insert" in state else None,
        min_size=int(state["min_size"]),
        error_buffer=float(state["error_buffer"]),
        quotas=json.loads(state.get("quotas", "{}")),
        keep_steps=int(state["keep_steps"]),
    )

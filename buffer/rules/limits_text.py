"""Converts `Limits` to and from the fields of the Redis hash `state` that the scripts read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from async_rl.replay_protocol import Limits

CHANGEABLE = ("max_age", "lease_s", "max_attempts", "selector", "keep_steps", "quotas", "pace")
"""Limits that may change during a run. The others shape the learner's steps or the accounting of samples_per_insert."""
_LIMITS = TypeAdapter(Limits)


def write_limits(limits: Limits) -> dict[str, str]:
    """Return field -> text; an empty text stands for no limit."""
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
    """Return field -> text for some limits. Raises ValueError for one that cannot change during a run."""
    written: dict[str, str] = {}
    for name, value in changes.items():
        if name not in CHANGEABLE:
            raise ValueError(f"{name} cannot be changed during a run")
        if name == "lease_s":
            written["lease_ms"] = str(round(float(value) * 1000))
        elif value is None:
            written[name] = ""
        elif name == "quotas":
            written[name] = json.dumps(dict(value))
        else:
            written[name] = str(value)
    return written


def read_limits(state: Mapping[str, str]) -> Limits | None:
    """Return the limits in force; None before the first learner. Raises ValueError or KeyError."""
    if "groups_per_step" not in state:
        return None
    converted = {"lease_s": int(state["lease_ms"]) / 1000, "quotas": json.loads(state.get("quotas", "{}"))}
    return _LIMITS.validate_python({**state, **converted})

"""Random configurations that a file may contain, and groups of any shape, for the state machine tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from async_rl.config import Config
from async_rl.types import Rollout, RolloutGroup, Sample, Status, Task, Ticket, spans_of

WORKERS = ("a", "b", "c")
ENVIRONMENTS = ("quick", "slow")
LEASE_S = 100

Some = st.integers(0, 10**6)
Workers = st.sampled_from(WORKERS)
Environments = st.sampled_from(ENVIRONMENTS)
Prompts = st.integers(1, 12)
Settings = st.fixed_dictionaries(
    {
        "max_age": st.sampled_from([2, 1, 0, 0.5, 1.5, 3]),
        "groups_per_step": st.integers(1, 3),
        "selector": st.sampled_from(["windowed_fifo", "fifo", "freshest", "uniform", "prioritized"]),
        "max_uses": st.integers(1, 3),
        "samples_per_insert": st.sampled_from([None, None, 1.0, 0.5, 1.5, 2.0]),
        "min_groups": st.integers(1, 6),
        "error_buffer": st.sampled_from([None, 1.0, 2.0, 3.0, 4.5]),
        "shares": st.sampled_from([(1, 1), (0.5, 1), (0.1, 1), (0.5, 0.5), (0.7, 0.7)]),
        "tokens_per_step": st.sampled_from([None, None, 12, 20]),
        "keep_steps": st.sampled_from([0, 2]),
        "max_attempts": st.integers(1, 3),
    }
)
Changes = st.sampled_from(
    [
        *({"max_age": age} for age in (0.5, 1, 3)),
        *({"selector": selector} for selector in ("fifo", "freshest", "uniform", "windowed_fifo")),
        {"keep_steps": 1},
        {"max_attempts": 2},
    ]
)


def configured(**chosen: Any) -> Config:
    """Build a configuration as from a file; each accepted one must work. Raises ValidationError."""
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
            "environments": [
                {"type": "counting", "name": name, "max_share": share}
                for name, share in zip(ENVIRONMENTS, chosen["shares"], strict=True)
            ],
            "staleness": {name: chosen[name] for name in ("max_age", "selector")},
            "replay": {name: chosen[name] for name in ("max_uses", "samples_per_insert", "min_groups", "error_buffer")},
            "batch": {name: chosen[name] for name in ("groups_per_step", "tokens_per_step")},
            "retention": {"keep_steps": chosen["keep_steps"]},
            "leases": {"ticket_s": LEASE_S, "max_attempts": chosen["max_attempts"]},
        }
    )


def rolled(
    ticket: Ticket, worker: str, *, newest: int, environment: str = "quick", prompt: int = 2, logprob: float = -0.5
) -> RolloutGroup:
    """Make a group of two tokens, the first of the ticket's version and the second of `newest`."""
    versions = (ticket.version, newest)
    length = prompt + len(versions)
    sampled = np.arange(length) >= prompt
    sample = Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=sampled.astype(np.uint8),
        logprobs=np.where(sampled, np.float32(logprob), np.float32(0)).astype(np.float32),
        versions=spans_of(versions, offset=prompt),
    )
    return RolloutGroup(
        id=ticket.id,
        task=Task(key=f"k{ticket.task_index}", environment=environment, prompt="p"),
        rollouts=(Rollout(samples=(sample,), reward=1.0, status=Status.OK),),
        worker=worker,
    )


def task_of(group: RolloutGroup) -> int:
    return int(group.task.key.removeprefix("k"))

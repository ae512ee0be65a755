"""What a worker is made of: put together in the composition root, read by the worker and the rollout of its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from async_rl.config import HEARTBEAT_S, BatchConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import Gateway, InferenceInterface
from async_rl.replay_protocol import ReplayBuffer
from rollout_workers.episodes.task_mix import TaskMix
from rollout_workers.limits.concurrency import EngineLoad


class VersionedInference(InferenceInterface, Protocol):
    """Inference whose weights are numbered."""

    @property
    def version(self) -> int:
        """The version that new generations are sampled with; -1 before the first weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    name: str
    buffer: ReplayBuffer
    inference: VersionedInference
    tasks: TaskMix
    batch: BatchConfig
    settings: WorkerConfig
    seed: int
    gateway: Gateway | None = None
    policies: Mapping[str, InferenceInterface] = field(default_factory=dict[str, InferenceInterface])
    load: Callable[[], EngineLoad] = EngineLoad
    """Returns how busy the engine is; `groups_in_flight: auto` follows it."""
    heartbeat_s: float = HEARTBEAT_S
    keeps_dropped: bool = True
    """Whether heads of dropped groups are sent to the learner, which records them."""

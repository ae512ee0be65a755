"""The seam between a rollout worker and its engine: what `worker.backend` makes, and from what (docs/engines.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, InferenceInterface, Tokenizer
from async_rl.transport.receiving.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Counters and load of an engine. What an engine does not measure stays 0."""

    tokens_generated: int = 0
    steps: int = 0
    busy_s: float = 0.0
    """Seconds spent inside engine steps."""
    active_requests: int = 0
    """Running or waiting for room."""
    waiting_requests: int = 0
    """Active generations that wait for room."""
    queue_s: float = 0.0
    """Mean time of recent generations until the step that samples their first token."""
    kv_blocks_used: int = 0
    """Blocks used by running generations."""
    kv_blocks: int = 0
    prefix_tokens_reused: int = 0
    """Prompt tokens that were not computed because their prefix was in the cache."""
    preemptions: int = 0
    """Times a generation lost its blocks of the KV cache to others and was queued again."""

    def snapshot(self) -> Mapping[str, float]:
        """The part posted for the run's metrics."""
        return {
            "kv_blocks": self.kv_blocks,
            "kv_blocks_used": self.kv_blocks_used,
            "engine/running": self.active_requests - self.waiting_requests,
            "engine/waiting": self.waiting_requests,
            "engine/prefix_tokens_reused": self.prefix_tokens_reused,
            "engine/preemptions": self.preemptions,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is made from: the only argument of the callable that `worker.backend` names."""

    shape: ModelShape
    tokenizer: Tokenizer
    worker: WorkerConfig
    sampling: GenerationArgs
    """The run's defaults for arguments that a generation leaves unset."""
    devices: tuple[torch.device, ...]
    """worker.engines x worker.tensor devices, engine by engine."""
    dtype: torch.dtype
    """Precision of the weights that `swap` brings."""
    seed: int
    """Differs between workers: with equal ones they would sample alike."""


def placement_of(engine: RolloutEngine) -> Placement:
    """Where received weights are put: on the engine's device, unless it has a `placement`."""
    return getattr(engine, "placement", Placement(devices=(engine.device,)))


class RolloutEngine(InferenceInterface, Protocol):
    """Inference with numbered weights that change while it generates. Its completions carry log-probabilities and versions."""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; -1 before the first."""
        ...

    @property
    def device(self) -> torch.device:
        """Where received weights are put: the device from which a swap reads them fastest."""
        ...

    @property
    def metrics(self) -> EngineMetrics: ...

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve other weights from the next token on; `tensors` are full parameters under canonical names.

        The caller overwrites them once this returns. Raises ValueError, and changes nothing, when they do not fit or `version`
        does not exceed the one held.
        """
        ...

    async def watch(self) -> None:
        """Service: return when the engine is closed, raise what broke it."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

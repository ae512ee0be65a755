"""The sections of the configuration that a rollout worker reads: environments, sampling, engine, episodes, evaluation."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from async_rl.config_section import Section
from async_rl.protocols import GenerationArgs
from async_rl.types import Scalar


class EnvironmentConfig(Section):
    type: str
    """A registered name, or a class of yours: `package.module:Class` or `path/to/file.py:Class`."""
    name: str = ""
    """How it is called in metrics; unset means its type."""
    weight: PositiveFloat = 1.0
    """Share of the tasks."""
    max_share: float = Field(default=1.0, gt=0, le=1)
    """At most this share of a batch's groups, so that an environment of quick episodes does not crowd out the others."""
    evaluation_only: bool = False
    """Its tasks are evaluated, never trained on."""
    max_in_flight: PositiveInt | None = None
    """At most so many of its groups at once in one worker: for environments that are scarce or heavy."""
    args: dict[str, Scalar] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def label(self) -> str:
        return self.name if self.name else self.type.rpartition(":")[2]


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    """The learner divides its logits by it too, so that both sides speak of the same distribution."""
    max_tokens: PositiveInt = 256
    """Per generation."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that hold this much probability. The learner sees the whole distribution: with
    less than 1 its ratios are off by what was cut (docs/inference.md)."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the likeliest tokens; 0 means all. As for top_p."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )


class WorkerConfig(Section):
    processes: PositiveInt = 1
    """Workers that `async-rl run` starts on this machine."""
    groups_in_flight: PositiveInt = 4
    """Groups that one worker rolls out at a time."""
    kv_cache_gb: PositiveFloat = 0.25
    kv_block_tokens: PositiveInt = 64
    """Of one page of the KV cache. On GPUs it is rounded up to a multiple of 256, which is what FlashAttention reads."""
    episode_timeout_s: PositiveFloat = 300.0
    drain_s: PositiveFloat = 30.0
    """After SIGTERM, running groups have this long to finish before their tickets are handed back."""
    failure_budget: PositiveInt = 100
    """Episodes that may fail without a success between them before the worker gives up loudly."""

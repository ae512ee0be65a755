"""The sections of the configuration that a rollout worker reads: environments, sampling, engine, episodes, evaluation."""

from __future__ import annotations

from math import ceil
from typing import Literal

from pydantic import Field, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from async_rl.config.references import absolute_reference
from async_rl.config.section import Section
from async_rl.protocols import GenerationArgs


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
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def label(self) -> str:
        return self.name if self.name else self.type.rpartition(":")[2]

    def quota(self, groups_per_step: int) -> int | None:
        """At most so many of a step's groups; None where nothing limits it."""
        return ceil(self.max_share * groups_per_step) if self.max_share < 1 else None

    def seen_from_anywhere(self) -> EnvironmentConfig:
        """The same one, also for a process that was started in another folder."""
        return self.model_copy(update={"type": absolute_reference(self.type)})


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    """The learner divides its logits by it too, so that both sides speak of the same distribution."""
    max_tokens: PositiveInt = 256
    """Per generation."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that hold this much probability, of what top_k leaves. The learner cuts its
    distribution in the same way, so that both sides speak of the same one (docs/inference.md)."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the likeliest tokens; 0 means all. As for top_p."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

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


class GatewayConfig(Section):
    """OpenAI-compatible endpoints for agents that bring a loop of their own (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """Where it listens. Agents on other machines need an address that they reach, or 0.0.0.0."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes any free one, so that several workers fit on a machine."""
    advertised_host: str | None = None
    """The host in the base_url that agents get; unset means `host`, or this machine's name where that is 0.0.0.0."""
    max_body_mb: PositiveFloat = 32.0
    """A larger request is refused."""
    max_concurrent: PositiveInt = 64
    """Generations that one episode may run at once; more are answered with 429, which SDKs try again."""
    request_timeout_s: PositiveFloat | None = None
    """A request that is not answered by then fails. Unset leaves time to the episode: requests end with it."""
    tool_calls: Literal["hermes", "llama3_json"] = "hermes"
    """How the model writes tool calls: <tool_call>{...}</tool_call> as Qwen does, or JSON alone as Llama 3 does."""
    override_sampling: bool = False
    """Ignore temperature, top_p, top_k and seed of requests, so that the run's apply: for agents that ask for
    temperature 0, with which all siblings of a group say the same."""


class TimeoutsConfig(Section):
    """Of the stages of an episode, in seconds; 0 means that only `episode_timeout_s` bounds a stage."""

    task_s: NonNegativeFloat = 60.0
    """Posing a task. It is done before the episodes begin, so nothing else bounds it."""
    generation_s: NonNegativeFloat = 0.0
    """One generation, waiting for the engine included."""
    observation_s: NonNegativeFloat = 0.0
    """What the environment does between two generations."""
    reward_s: NonNegativeFloat = 0.0
    """Scoring an episode, or the siblings of a group together."""


class BreakerConfig(Section):
    """When a worker leaves an environment alone for a while, and goes on with the others."""

    after: NonNegativeInt = 5
    """Groups of one environment that fail completely, one after the other. 0 means never."""
    pause_s: PositiveFloat = 30.0
    """Then one group tries whether it works again."""


class WorkerConfig(Section):
    processes: PositiveInt = 1
    """Workers that `async-rl run` starts on this machine."""
    groups_in_flight: PositiveInt | Literal["auto"] = 4
    """As many episodes as so many groups have, one worker plays at a time. `auto` follows the engine's load, at most
    groups_at_most."""
    groups_at_most: PositiveInt = 256
    """Where groups_in_flight is `auto`."""
    engines: PositiveInt = 1
    """That share one worker's generations, each on GPUs of its own."""
    tensor: PositiveInt = 1
    """GPUs that divide each engine's layers among them (docs/inference.md)."""
    kv_cache_gb: PositiveFloat = 0.25
    """On each of these GPUs."""
    kv_block_tokens: PositiveInt = 64
    """Of one page of the KV cache. On GPUs it is rounded up to a multiple of 256, which is what FlashAttention reads."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """What becomes of the keys and values of generations that are running when new weights come: `keep` goes on with them,
    `recompute` computes them again under the new weights before the next token."""
    prefix_reuse: bool = True
    """Siblings of a group and turns of an episode share the keys and values of the tokens that they begin with, in whole
    blocks of kv_block_tokens."""
    prompt_tokens_per_step: PositiveInt = 4096
    """A step computes at most so many tokens of prompts beside those that it samples: longer prompts take several steps,
    so that nobody who is generating waits long. It also bounds the memory of a step."""
    episode_timeout_s: PositiveFloat = 300.0
    """A whole episode, or a whole group of an agent that plays its siblings together."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    refills: NonNegativeInt = 0
    """Failed siblings of a group that are played again, so that groups stay full."""
    breaker: BreakerConfig = BreakerConfig()
    grader_processes: PositiveInt = 2
    """For graders that block (docs/episodes.md); they start when they are first needed."""
    stall_limit_s: PositiveFloat = 20.0
    """A worker whose event loop is blocked for so long, by code of an environment that does not await, is replaced, and the
    environment left alone for breaker.pause_s, twice as long each further time (docs/episodes.md)."""
    drain_s: PositiveFloat = 30.0
    """After SIGTERM, running groups have this long to finish before their tickets are handed back."""
    failure_budget: PositiveInt = 100
    """Episodes that may fail without a success between them before the worker gives up loudly."""
    gateway: GatewayConfig = GatewayConfig()

"""The sections of a rollout worker: `environments`, `sampling` and `worker`."""

from __future__ import annotations

from difflib import get_close_matches
from math import ceil
from typing import Literal

from pydantic import (
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from async_rl.config.section import Section
from async_rl.imports.references import absolute_reference
from async_rl.protocols import GenerationArgs


class EnvironmentConfig(Section):
    """An environment of the run and its share of the tasks."""

    type: str
    """A registered name, or your class: `package.module:Class` or `path/to/file.py:Class`."""
    name: str = ""
    """Name in metrics and commands; must be unique. Empty: the type."""
    weight: PositiveFloat = 1.0
    """Relative share of tasks among all environments."""
    max_share: float = Field(default=1.0, gt=0, le=1)
    """Maximum share of a step batch, so that an environment with fast episodes does not crowd out the others. 1: no limit."""
    evaluation_only: bool = False
    """Use its tasks for evaluation only, never for training."""
    max_in_flight: PositiveInt | None = None
    """Maximum concurrent groups per worker, for environments with limited capacity. Unset: no limit."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""

    @property
    def label(self) -> str:
        return self.name if self.name else self.type.rpartition(":")[2]

    def quota(self, groups_per_step: int) -> int | None:
        """Maximum groups of this environment in a step batch; None: no limit."""
        return ceil(self.max_share * groups_per_step) if self.max_share < 1 else None

    def seen_from_anywhere(self) -> EnvironmentConfig:
        """Return the same configuration with an absolute path, for processes with another working directory."""
        return self.model_copy(update={"type": absolute_reference(self.type)})


class SamplingConfig(Section):
    """How rollouts are sampled from the policy."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature. The learner divides its logits by it as well, so that its probabilities match the sampled ones."""
    max_tokens: PositiveInt = 1024
    """Maximum tokens per generation."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens with this total probability, after top_k. 1: off. The learner
    truncates its distribution in the same way (docs/inference.md)."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens. 0: all. The learner truncates in the same way."""
    stop: tuple[str, ...] = ()
    """Strings that end a generation; they are part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a generation."""

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(**self.model_dump())


class GatewayConfig(Section):
    """OpenAI-compatible endpoints for agents with their own loop (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """Address to listen on. For agents on other machines: an address they can reach, or 0.0.0.0."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on. 0: any free port, so that several workers can share a machine."""
    advertised_host: str | None = None
    """Host in the base_url given to agents. Unset: `host`, or this machine's name if that is 0.0.0.0."""
    max_body_mb: PositiveFloat = 32.0
    """Maximum size of a request, in MB. Larger ones are refused with 413."""
    max_concurrent: PositiveInt = 64
    """Maximum concurrent generations per episode. Further requests get 429, which SDKs retry."""
    request_timeout_s: PositiveFloat | None = None
    """Seconds until a request fails. Unset: requests end with their episode."""
    tool_calls: Literal["hermes", "llama3_json"] = "hermes"
    """Format of the model's tool calls: `hermes` is <tool_call>{...}</tool_call> (Qwen), `llama3_json` bare JSON (Llama 3)."""
    override_sampling: bool = False
    """Ignore temperature, top_p, top_k and seed of requests and use those of the run. For agents that request temperature 0,
    which would make all rollouts of a group identical."""


class TimeoutsConfig(Section):
    """Time limits of the stages of an episode, in seconds. 0: only `episode_timeout_s` applies."""

    task_s: NonNegativeFloat = 60.0
    """Making a task. This happens before the episodes start, so `episode_timeout_s` does not cover it. 0: no limit."""
    generation_s: NonNegativeFloat = 0.0
    """One generation, including the wait for the engine."""
    observation_s: NonNegativeFloat = 0.0
    """One step of the environment between two generations."""
    reward_s: NonNegativeFloat = 0.0
    """Scoring one episode, or all rollouts of a group together."""


class BreakerConfig(Section):
    """Circuit breaker: stop playing an environment that fails repeatedly, and continue with the others."""

    after: NonNegativeInt = 5
    """Consecutive groups of one environment in which every episode failed that open the breaker. 0: never."""
    pause_s: PositiveFloat = 30.0
    """Seconds until one group tries the environment again."""


class WorkerConfig(Section):
    """Rollout workers: concurrency, inference engine, time limits."""

    processes: PositiveInt = 1
    """Number of workers that `async-rl run` starts."""
    groups_in_flight: PositiveInt | Literal["auto"] = 16
    """Groups that one worker rolls out concurrently. `auto`: follow the engine's load, up to groups_at_most."""
    groups_at_most: PositiveInt = 256
    """Upper bound with groups_in_flight `auto`."""
    backend: str = "megatron"
    """Inference engine: `megatron`, `hf` (transformers), or yours: `module:NAME`, `path/to/file.py:NAME` (docs/engines.md)."""
    engines: PositiveInt = 1
    """Inference engines per worker (data parallel), each on its own GPUs."""
    tensor: PositiveInt = 1
    """Tensor-parallel GPUs per engine (docs/inference.md)."""
    expert: PositiveInt = 1
    """Expert parallelism: GPUs of an engine that divide the experts of a layer. It must divide `tensor`. 1: each of them holds
    all experts."""
    kv_cache_gb: PositiveFloat | Literal["auto"] = 8.0
    """Size of the KV cache per GPU, in GB. It is allocated at the start, on a CPU too: 0.25 is enough for tiny models. `auto`:
    what gpu_share leaves beside weights and a step; on a CPU, room for max_running sequences, at most 1 GB (docs/memory.md)."""
    gpu_share: float = Field(default=0.9, gt=0, le=1)
    """With kv_cache_gb `auto`: the share of a GPU's memory that one engine takes in all. Lower it where the learner, another
    worker or the evaluator is on the same GPU; `config check --gpus` says whether all of them fit."""
    kv_block_tokens: PositiveInt = 64
    """Tokens per block of the paged KV cache. Multiples of 256 let FlashAttention read it, if that is installed."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Kernels of the engine. `auto`: Triton on GPUs, torch on a CPU. With cuda_graphs `never`, FlashAttention where it is
    installed and can read the cache. `torch` on a GPU is slow, and good for comparing (docs/inference.md)."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Replay steps that decode, and compute at most short prompts, as CUDA graphs, one launch each. `auto`: on GPUs, with
    Triton's kernels and layer_spec `local`, one GPU per engine, and experts, if there are any, computed together (bfloat16,
    capability 9.0). `always`: refused where `auto` would not; without a GPU, a dry run of the same steps. `never`: also lets
    FlashAttention decode, if it is installed."""
    async_scheduling: bool = False
    """Launch the next decode step before the host has read the tokens of the last one. On GPUs the host's work is then hidden
    behind the device's; a generation that ends costs one row of a step. Needs megatron-core 0.19 (Python 3.12 and later) and
    `tensor` 1. Not run on a GPU yet (docs/gpu.md)."""
    max_running: PositiveInt = 256
    """Generations that an engine decodes at once; more wait in its queue. Small models on large GPUs can use 512 or 1024."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of running generations when weights change: `keep` continues with it, `recompute` computes
    it again under the new weights before the next token."""
    prefix_reuse: bool = True
    """Prefix caching: rollouts of a group and turns of an episode share KV blocks of their common prefix, in whole blocks of
    kv_block_tokens."""
    prompt_tokens_per_step: PositiveInt = 4096
    """Chunked prefill: maximum prompt tokens per engine step. Longer prompts take several steps, so that running generations
    are not delayed. It also bounds the memory of a step."""
    episode_timeout_s: PositiveFloat = 300.0
    """Seconds for one episode, or for a whole group if the agent plays its rollouts together."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    refills: NonNegativeInt = 0
    """Failed rollouts per group that are played again, so that groups stay complete. 0: none."""
    breaker: BreakerConfig = BreakerConfig()
    grader_processes: PositiveInt = 2
    """Processes for blocking graders (docs/episodes.md), started on first use."""
    stall_limit_s: PositiveFloat = 20.0
    """Seconds that environment code may block a worker's event loop. After that the worker is restarted and the environment
    paused for breaker.pause_s, doubling each further time (docs/episodes.md)."""
    drain_s: PositiveFloat = 30.0
    """Seconds that running groups may take to finish after SIGTERM before their tickets are returned."""
    failure_budget: PositiveInt = 100
    """Consecutive failed episodes after which the worker exits with code 8."""
    gateway: GatewayConfig = GatewayConfig()

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, backend: str) -> str:
        if backend in BACKENDS or ":" in backend:
            return backend
        near = get_close_matches(backend, BACKENDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{backend!r} is no inference engine{hint}; there are {' and '.join(BACKENDS)}, and your own is named module:NAME "
            "or path/to/file.py:NAME"
        )

    @model_validator(mode="after")
    def _backend_fits(self) -> WorkerConfig:
        if self.tensor % self.expert:
            raise ValueError(
                f"expert ({self.expert}) must divide tensor ({self.tensor}): the ranks of an engine divide its experts"
            )
        if self.cuda_graphs == "always" and self.backend != "megatron":
            raise ValueError("cuda_graphs: always needs backend megatron; auto decodes without in other engines")
        if self.async_scheduling and (self.backend != "megatron" or self.tensor > 1):
            raise ValueError(
                "async_scheduling needs backend megatron and tensor 1: other engines decode one step after the other"
            )
        if self.backend == "hf" and self.engines * self.tensor > 1:
            raise ValueError(
                f"backend hf is one engine on one device, so engines ({self.engines}) and tensor ({self.tensor}) must be 1; "
                "use more worker.processes, or backend megatron"
            )
        return self


BACKENDS = ("megatron", "hf")

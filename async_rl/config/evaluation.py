"""The `policies` and `evaluation` sections: models that are served but not trained, and how the trained one is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.pretrained import Required
from async_rl.config.section import Section
from async_rl.config.tokenizer import TokenizerConfig
from async_rl.protocols import GenerationArgs


class PolicySampling(Section):
    """Sampling defaults for requests that do not set their own. Unset fields use the model's defaults."""

    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy decoding."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens per generation."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many of the most likely tokens; 0: all."""
    stop: tuple[str, ...] | None = None
    """Strings that end a generation."""

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(**self.model_dump())


class OpenAIPolicy(Section):
    """A model behind an OpenAI-compatible server: vLLM, SGLang, our gateway, a hosted provider."""

    type: Literal["openai"] = "openai"
    url: str = Field(pattern=r"^https?://")
    """Base URL including the API version: http://HOST:PORT/v1"""
    model: str = ""
    """Model name sent to the server. Empty: the server's only model."""
    tokenizer: TokenizerConfig | None = None
    """The served model's tokenizer; if set, prompts are sent as token ids. Unset: prompts are sent as chat messages."""
    api_key_file: Path | None = None
    """File with the API key, so that the key never appears in a configuration or on a command line."""
    sampling: PolicySampling = PolicySampling()
    timeout_s: PositiveFloat = 300.0
    """Seconds for one generation, including retries."""
    attempts: PositiveInt = 5
    """Attempts per generation when the server is busy or unreachable, with exponential backoff."""
    max_in_flight: PositiveInt = 64
    """Maximum concurrent requests; further ones wait in the client."""


class HuggingFacePolicy(Required):
    """A model with its tokenizer, run with transformers, one generation at a time. For small models and for comparisons."""

    type: Literal["hf"]
    sampling: PolicySampling = PolicySampling()


PolicyConfig = Annotated[OpenAIPolicy | HuggingFacePolicy, Field(discriminator="type")]


NumTasks = PositiveInt | Literal["all"]

TASKS = 32


class EvaluationConfig(Section):
    """Evaluation during a run and by `async-rl eval` (docs/evaluation.md)."""

    every: int = Field(default=0, ge=0)
    """Evaluate every N optimizer steps, concurrently with training. 0: never."""
    environments: tuple[str, ...] = ()
    """Names of the environments to evaluate. Empty: all, including those that are `evaluation_only`."""
    tasks: NumTasks | dict[str, NumTasks] = TASKS
    """Distinct tasks per environment: a number, `all` (every row of a dataset), or a mapping from environment to either
    (environments it does not name get 32). A dataset with fewer rows is evaluated once in full."""
    samples: PositiveInt = 4
    """Rollouts per task."""
    k: tuple[PositiveInt, ...] = (1,)
    """Values of k for pass@k; at most `samples`."""
    greedy: bool = True
    """Also play each task once with temperature 0 and report it as `greedy`."""
    solved_at: float = 1.0
    """A rollout counts as solved when its reward is at least this."""
    seed: int = 1_000_003
    """Used instead of run.seed for generated tasks, so that evaluation tasks differ from training tasks."""
    episodes_in_flight: PositiveInt = 32
    """Maximum concurrent episodes."""
    wait_s: float = Field(default=120.0, ge=0, le=500)
    """Seconds that a finished run waits for the evaluation of its last step."""

    def tasks_of(self, environment: str) -> NumTasks:
        return self.tasks.get(environment, TASKS) if isinstance(self.tasks, dict) else self.tasks

    @field_validator("k")
    @classmethod
    def _sorted(cls, k: tuple[int, ...]) -> tuple[int, ...]:
        if not k:
            raise ValueError("evaluation.k names no number; [1] is the usual one")
        return tuple(sorted(set(k)))

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationConfig:
        if max(self.k) > self.samples:
            raise ValueError(
                f"evaluation.k has {max(self.k)}, but pass@{max(self.k)} needs as many samples of a task and "
                f"evaluation.samples is {self.samples}; raise one or lower the other"
            )
        return self

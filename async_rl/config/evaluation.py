"""The sections of the configuration about models that are not trained: other policies, and evaluating the one that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.section import Section
from async_rl.config.tokenizer import TokenizerConfig
from async_rl.protocols import GenerationArgs


class PolicySampling(Section):
    """How a policy samples where the agent does not say. What is unset follows the model's own defaults."""

    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy."""
    max_tokens: PositiveInt | None = None
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop: tuple[str, ...] | None = None

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop
        )


class OpenAIPolicy(Section):
    """A model behind any server that speaks OpenAI's protocol: vLLM, SGLang, a gateway of ours, a provider."""

    type: Literal["openai"] = "openai"
    url: str = Field(pattern=r"^https?://")
    """Up to and including its version: http://HOST:PORT/v1"""
    model: str = ""
    """Unset means the only one that the server has."""
    tokenizer: TokenizerConfig | None = None
    """The served model's own: then prompts go as token ids. Unset means that the server is spoken to in messages."""
    api_key_file: Path | None = None
    """A file that holds the key, so that it never appears in a command line."""
    sampling: PolicySampling = PolicySampling()
    timeout_s: PositiveFloat = 300.0
    """For one generation, with all its attempts."""
    attempts: PositiveInt = 5
    """When the server is busy or cannot be reached, with growing pauses between them."""
    max_in_flight: PositiveInt = 64
    """Requests at once; more of them wait here."""


class HuggingFacePolicy(Section):
    """A Hugging Face folder run by transformers, one generation after another: for small models and for comparing."""

    type: Literal["hf"]
    folder: Path
    sampling: PolicySampling = PolicySampling()


PolicyConfig = Annotated[OpenAIPolicy | HuggingFacePolicy, Field(discriminator="type")]


NumTasks = PositiveInt | Literal["all"]

TASKS = 32


class EvaluationConfig(Section):
    every: int = Field(default=0, ge=0)
    """`async-rl run` evaluates the weights after every so many steps, beside the training; 0 switches it off."""
    environments: tuple[str, ...] = ()
    """Which, by name; unset means all, those that are `evaluation_only` too."""
    tasks: NumTasks | dict[str, NumTasks] = TASKS
    """Different tasks of each environment: a number, `all` rows of a table, or a mapping from environment to either (those that
    it does not name get 32). A table with fewer rows is evaluated whole: no row counts twice."""
    samples: PositiveInt = 4
    """Of each task."""
    k: tuple[PositiveInt, ...] = (1,)
    """Which pass@k to estimate; none may be above `samples`."""
    greedy: bool = True
    """Play each task once more with temperature 0."""
    solved_at: float = 1.0
    """A sample counts as right when its reward is at least this."""
    seed: int = 1_000_003
    """Stands for run.seed when environments make up tasks, so that these are others than the ones trained on."""
    episodes_in_flight: PositiveInt = 32
    wait_s: float = Field(default=120.0, ge=0, le=500)
    """How long a run that has trained its last step waits for the evaluation of it."""

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

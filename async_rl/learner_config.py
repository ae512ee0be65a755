"""The sections of the configuration that the learner reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from async_rl.config_section import Section


class OptimizerConfig(Section):
    learning_rate: PositiveFloat = 1e-3
    warmup_steps: int = Field(default=0, ge=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """0 switches clipping off."""


class ParallelConfig(Section):
    """How the learner's torchrun ranks are divided; what is left after tensor x pipeline is data-parallel."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    processes: PositiveInt = 1
    """Learner ranks on this machine, when `async-rl` starts them itself."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> ParallelConfig:
        if self.processes % (self.tensor * self.pipeline) and self.processes != 1:
            raise ValueError(
                f"processes ({self.processes}) must be a multiple of tensor x pipeline ({self.tensor * self.pipeline})"
            )
        return self


class LearnerConfig(Section):
    steps: PositiveInt = 100
    """The run ends after this many optimizer steps."""
    objective: str = "async_default"
    """A preset under configs/objectives/, or the path of a YAML file like them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    max_bad_steps: PositiveInt = 3
    """This many non-finite steps in a row end the run."""

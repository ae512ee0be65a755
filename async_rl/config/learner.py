"""The sections of the configuration that the learner reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from async_rl.config.section import Section

Forgetting = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: PositiveFloat = 1e-3
    warmup_steps: int = Field(default=0, ge=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[Forgetting, Forgetting] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """0 switches clipping off."""
    offload: bool = False
    """Adam's moments wait in host memory while rows are computed (CUDA): less memory, two copies over the bus per update."""


class ParallelConfig(Section):
    """How the learner's ranks are divided; what is left after tensor x pipeline x context is data-parallel."""

    tensor: PositiveInt = 1
    """Ranks that share every layer: its heads, its columns."""
    pipeline: PositiveInt = 1
    """Stages of consecutive layers, one per rank."""
    virtual_stages: PositiveInt = 1
    """Chunks of layers on each pipeline rank, dealt round: shorter waits at the ends of a step for more messages within it."""
    sequence: bool = False
    """Tensor ranks divide a row's tokens between the matrices that they share: less memory. Experts need it with `tensor`."""
    context: PositiveInt = 1
    """Ranks that share every row, for sequences too long for one."""
    expert: PositiveInt = 1
    """Ranks that share the experts of a layer. They are found among those of one pipeline stage, and need no others."""
    processes: PositiveInt = 1
    """Learner ranks on this machine, when `async-rl` starts them itself. 1 stands for as few as the others need."""

    @model_validator(mode="after")
    def _is_possible(self) -> ParallelConfig:
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError("virtual_stages interleaves the stages of a pipeline: it needs pipeline above 1")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence divides a row's tokens among tensor ranks: it needs tensor above 1")
        if self.processes == 1:
            return self
        model = self.tensor * self.pipeline * self.context
        if self.processes % model:
            raise ValueError(f"processes ({self.processes}) must be a multiple of tensor x pipeline x context ({model})")
        if self.processes // self.pipeline % self.expert:
            raise ValueError(f"expert ({self.expert}) must divide processes / pipeline ({self.processes // self.pipeline})")
        return self

    @property
    def ranks(self) -> int:
        """As many as `async-rl` starts on this machine; under another launcher WORLD_SIZE counts."""
        fewest = math.lcm(self.tensor * self.pipeline * self.context, self.pipeline * self.expert)
        return max(self.processes, fewest)

    @property
    def slot_multiple(self) -> int:
        """Context ranks lengthen every sequence to a multiple of this, which bins must leave room for."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def bins_multiple(self) -> int:
        """Interleaved stages take so many bins at a time."""
        return self.pipeline if self.virtual_stages > 1 else 1


class GuardConfig(Section):
    """Acts when rollouts say too little about the policy that they train (docs/objectives.md). Needs a band to watch."""

    action: Literal["off", "lower_learning_rate", "tighten_max_age", "stop"] = "off"
    min_ess: float | None = Field(default=None, gt=0, lt=1)
    """The band ends below this effective sample size (policy/ess)."""
    max_kl: PositiveFloat | None = None
    """The band ends above this KL divergence from the sampling policy (policy/kl_behave), in nats a token."""
    patience: PositiveInt = 3
    """Steps in a row outside of the band before the guard acts, and between two acts."""
    recovery: PositiveInt = 20
    """Steps in a row well inside before it takes one act back."""
    margin: float = Field(default=0.1, ge=0, lt=1)
    """Well inside is this share of the way from the band's edge to no divergence at all."""
    factor: float = Field(default=0.5, gt=0, lt=1)
    """What each act multiplies the learning rate with."""
    lowest_scale: float = Field(default=0.05, gt=0, le=1)
    """All of them together multiply it with no less."""
    lowest_max_age: int = Field(default=1, ge=0)
    """Each act of the other kind lowers staleness.max_age by 1, not below this."""

    @model_validator(mode="after")
    def _has_a_band(self) -> GuardConfig:
        if self.action != "off" and self.min_ess is None and self.max_kl is None:
            raise ValueError(f"action {self.action} needs min_ess or max_kl, the edges of the band that it guards")
        return self


class UpdatesConfig(Section):
    """How weights are updated and kept, whatever they learn from."""

    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """What layers compute in; `auto` is bfloat16 on CUDA and float32 on a CPU. `fp8` needs the Transformer Engine layers."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of remembering it: each layer's MLP, or whole layers."""
    deterministic: bool = False
    """The same batches give the same bits, at some cost on CUDA; an operation that cannot ends the run."""
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    disk_wait_s: float = Field(default=600.0, ge=0)
    """How long a full or failing disk may hold up the journal and the checkpoints; training waits for it, then the run ends."""
    max_bad_steps: PositiveInt = 3
    """This many non-finite steps in a row end the run."""


class OwnCritic(Section):
    """A model of its own, divided among the ranks as the policy is."""

    type: Literal["own"]
    folder: Path | None = None
    """A Hugging Face folder to begin from, of any architecture; unset: the policy's initial weights. Values begin near 0."""
    optimizer: OptimizerConfig = OptimizerConfig()
    warmup_steps: int = Field(default=0, ge=0)
    """For so many steps the critic learns alone, from what the policy does as it is."""


class SharedCritic(Section):
    """The policy's layers, with one more output."""

    type: Literal["shared"]
    coefficient: PositiveFloat = 0.5
    """Of the value loss, beside the policy's."""


CriticConfig = Annotated[OwnCritic | SharedCritic, Field(discriminator="type")]


class ReferenceConfig(Section):
    """The policy that the trained one shall stay near. It is there only where the objective asks for it."""

    folder: Path | None = None
    """A Hugging Face folder with the policy's vocabulary; unset: the run's initial weights."""


class TeacherConfig(Section):
    """The model that an objective with advantages of type `distillation` learns from."""

    folder: Path
    """A Hugging Face folder with the policy's vocabulary, of any architecture."""


class LearnerConfig(UpdatesConfig):
    steps: PositiveInt = 100
    """The run ends after this many optimizer steps."""
    objective: str = "async_default"
    """A preset under configs/objectives/, a YAML file like them, or code of yours: `module:NAME`, `path/to/file.py:NAME`."""
    guard: GuardConfig = GuardConfig()
    critic: CriticConfig | None = None
    """Who foretells rewards, for objectives with advantages of type `gae` (PPO)."""
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = None
    measure_entropy: bool = False
    """Report `policy/entropy` also where the objective does not ask for it; it costs one more pass over the logits."""

"""The sections of the learner: `learner`, `batch` and `wire`."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.exposure import is_loopback, is_wildcard
from async_rl.config.pretrained import Pretrained, Required
from async_rl.config.section import Section

TooLong = Literal["truncate", "mask", "drop"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The Adam optimizer and its learning rate schedule."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate. The default is for RL of all weights of a pretrained model. Adapters take 1e-5 to 1e-4, a small model
    of `model.size` with random weights 1e-3."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup from 0. 0: none."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warmup, over the run's steps."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay. 0: none."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum gradient norm. 0: no clipping."""
    offload: bool = False
    """Keep Adam's moments in host memory; updates bring them in chunks (CUDA): less GPU memory, two transfers per update."""


class FasterOptimizer(OptimizerConfig):
    """The same, with the learning rate of losses that are less noisy than a policy gradient."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""


class ParallelConfig(Section):
    """Parallelism of the learner (docs/parallelism.md). Ranks beyond tensor x pipeline x context are data-parallel."""

    tensor: PositiveInt = 1
    """Tensor parallelism: ranks that split every layer by heads and columns."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism: stages of consecutive layers."""
    virtual_stages: PositiveInt = 1
    """Interleaved pipeline: chunks of layers per pipeline rank. More chunks make the bubble smaller and add messages."""
    sequence: bool = False
    """Sequence parallelism among tensor ranks, which saves memory. Required for experts with `tensor` above 1."""
    context: PositiveInt = 1
    """Context parallelism: ranks that split every packed row, for sequences too long for one GPU."""
    expert: PositiveInt = 1
    """Expert parallelism: ranks that split the experts of a layer. They are taken from the ranks of one pipeline stage."""
    processes: PositiveInt = 1
    """Learner ranks that `async-rl` starts on this machine. 1: the minimum that the other settings need."""

    @model_validator(mode="after")
    def _is_possible(self) -> ParallelConfig:
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError("virtual_stages interleaves the stages of a pipeline: it needs pipeline above 1")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence splits tokens among tensor ranks, so it needs tensor above 1")
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
        """Number of ranks that `async-rl` starts on this machine. Under another launcher WORLD_SIZE applies."""
        return max(self.processes, self.fewest_ranks)

    @property
    def fewest_ranks(self) -> int:
        """Smallest number of ranks; every other is a multiple of it."""
        return math.lcm(self.tensor * self.pipeline * self.context, self.pipeline * self.expert)

    @property
    def slot_multiple(self) -> int:
        """Sequences are padded to a multiple of this for context parallelism; bins need room for the padding."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def bins_multiple(self) -> int:
        """The number of bins per rank must be a multiple of this (interleaved pipeline)."""
        return self.pipeline if self.virtual_stages > 1 else 1


class GuardConfig(Section):
    """Reacts when rollouts are too far off-policy (docs/objectives.md). min_ess and max_kl define the allowed band."""

    action: Literal["off", "lower_learning_rate", "tighten_max_age", "stop"] = "off"
    """What to do after `patience` steps outside of the band."""
    min_ess: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of the effective sample size (policy/ess), between 0 and 1. Unset: not checked."""
    max_kl: PositiveFloat | None = None
    """Upper bound of the KL divergence from the sampling policy (policy/kl_behave), in nats per token. Unset: not checked."""
    patience: PositiveInt = 3
    """Consecutive steps outside of the band before the guard acts, and again before it acts once more."""
    recovery: PositiveInt = 20
    """Steps well inside of the band, without one in between that is not, before the guard relaxes by one: the learning rate by
    `factor`, max_age by 1. For max_age only steps count in which the learner waits for groups."""
    margin: float = Field(default=0.1, ge=0, lt=1)
    """Distance from the bound that counts as well inside, as a share of the way from the bound to zero divergence."""
    factor: float = Field(default=0.5, gt=0, lt=1)
    """lower_learning_rate: factor applied to the learning rate by each action."""
    lowest_scale: float = Field(default=0.05, gt=0, le=1)
    """lower_learning_rate: lower bound of the product of all factors."""
    lowest_max_age: int = Field(default=1, ge=0)
    """tighten_max_age: each action halves staleness.max_age, down to this. It watches the oldest tokens of each step."""

    @model_validator(mode="after")
    def _has_a_band(self) -> GuardConfig:
        if self.action != "off" and self.min_ess is None and self.max_kl is None:
            raise ValueError(f"action {self.action} needs min_ess or max_kl, the bounds that it watches")
        return self


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraConfig(Section):
    """Train low-rank adapters and leave the model's own weights as they are (docs/models.md): W + alpha / rank x B A."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale: adapters count alpha / rank times."""
    targets: tuple[LoraTarget, ...] = Field(default=LORA_TARGETS, min_length=1)
    """Adapted matrices, by the names that Hugging Face gives them. Default: all of attention and MLP."""

    @field_validator("targets")
    @classmethod
    def _in_one_order(cls, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        return tuple(each for each in LORA_TARGETS if each in targets)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ExpertsConfig(Section):
    """Losses of the routers of a model with experts, beside that of the objective (docs/models.md)."""

    model_config = ConfigDict(allow_inf_nan=False)

    balancing_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the balancing loss (Switch Transformer) of each layer. 0: none; `router_aux_loss_coef` in a model's
    config.json is not applied."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the z-loss of each layer, which keeps router logits small. 0: none."""


class UpdatesConfig(Section):
    """Settings shared by `async-rl run` and `async-rl train`: optimizer, parallelism, precision, checkpoints."""

    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Train low-rank adapters of the model. Unset: all its weights."""
    experts: ExpertsConfig = ExpertsConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """Compute precision. `auto`: bfloat16 on CUDA, float32 on a CPU. `fp8` needs model.layer_spec: transformer_engine."""
    kernels: Literal["auto", "torch"] = "auto"
    """Kernels of norms, heads, SwiGLU and logits. `auto`: Triton on GPUs, torch on a CPU. `torch` on a GPU is slower and takes
    more memory; it trains on a device where a Triton kernel fails (docs/learner.md)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: `selective` recomputes each layer's MLP in the backward pass, `full` whole layers."""
    logits_gb: PositiveFloat = 2.0
    """Memory for logits in float32 and their gradients, in GB. A row that needs more is computed in chunks of tokens, whose
    logits are computed again in the backward pass."""
    deterministic: bool = False
    """Use deterministic algorithms: the same batches give identical weights, more slowly on CUDA. An operation
    without one ends the run."""
    checkpoint_every: PositiveInt = 10
    """Steps between two checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep."""
    disk_wait_s: float = Field(default=600.0, ge=0)
    """Seconds that training waits for a full or failing disk when it writes the journal or a checkpoint, before it exits with
    code 10. 0: exit at once."""
    max_bad_steps: PositiveInt = 3
    """Consecutive steps with a non-finite loss or gradient after which the run ends with exit code 7."""


class OwnCritic(Pretrained):
    """A critic with weights of its own, parallelised like the policy. It begins as a pretrained model of any architecture, or,
    unset, as the policy. The value head starts near 0.
    """

    type: Literal["own"]
    optimizer: FasterOptimizer = FasterOptimizer()
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the beginning that train only the critic. 0: none."""


class SharedCritic(Section):
    """A value head on the policy's layers."""

    type: Literal["shared"]
    coefficient: PositiveFloat = 0.5
    """Weight of the value loss in the total loss."""


CriticConfig = Annotated[OwnCritic | SharedCritic, Field(discriminator="type")]


class ReferenceConfig(Pretrained):
    """The reference policy of a KL penalty, with the policy's vocabulary. Loaded only if the objective has one. Unset: the
    run's initial weights.
    """


class TeacherConfig(Required):
    """The teacher of objectives with advantages of type `distillation`: of any architecture, with the policy's vocabulary."""


class LearnerConfig(UpdatesConfig):
    """The learner: objective, length of the run, models beside the policy."""

    steps: PositiveInt = 100
    """Optimizer steps of the run."""
    objective: str = "async_default"
    """A preset in configs/objectives/, the path of such a YAML file, or your code: `module:NAME`, `path/to/file.py:NAME`."""
    guard: GuardConfig = GuardConfig()
    critic: CriticConfig | None = None
    """Value model, required by objectives with advantages of type `gae` (docs/ppo.md)."""
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = None
    measure_entropy: bool = False
    """Report `policy/entropy` even if the objective does not use it. Costs one more pass over the logits."""


class BatchConfig(Section):
    """The step batch: groups and tokens of one step, and how it is divided into updates."""

    groups_per_step: PositiveInt = 32
    """Groups in one step batch."""
    group_size: PositiveInt = 8
    """Rollouts per task."""
    tokens_per_step: PositiveInt | None = None
    """Maximum tokens in a step batch: a step takes fewer groups when the next one would exceed it. Unset: no limit."""
    bin_tokens: PositiveInt = 4096
    """Token capacity of one packed row (micro-batch). A longer rollout gets a row of its own."""
    too_long: TooLong = "truncate"
    """A rollout with more tokens in a row than `model.max_sequence`, as environments that bring their own rows may have:
    `truncate` trains the tokens up to there; `mask` trains none, and the reward still counts in the baseline of its group;
    `drop` treats it as failed. Counted in `batch/too_long`."""
    minibatches: PositiveInt = 1
    """Optimizer updates per pass over the step batch. A step makes one version, however many updates it has."""
    epochs: PositiveInt = 1
    """Passes over each step batch. With more than one update per step, use an objective with `anchor: proximal`."""
    drop_no_signal: bool = True
    """Drop groups whose rewards are all equal, which have zero advantage under a group baseline, and roll out another task."""

    @model_validator(mode="after")
    def _updates_have_groups(self) -> BatchConfig:
        if self.minibatches > self.groups_per_step:
            raise ValueError(
                f"minibatches ({self.minibatches}) must not exceed groups_per_step ({self.groups_per_step}): an update "
                "consists of whole groups"
            )
        return self


class WireConfig(Section):
    """Weight pushes from the learner to workers (docs/weights.md)."""

    dtype: Literal["model", "bfloat16"] = "model"
    """Precision of weights on the wire; `model` is the learner's. Workers convert them to their engine's precision."""
    shared_memory: bool = True
    """Let processes of the same machine read weights in place (shared memory, CUDA IPC), instead of sending them."""
    bucket_mb: PositiveFloat = 16.0
    """Maximum size of one transfer, in MB. It must complete within `operation_timeout_s`."""
    deltas: Literal["auto", "always", "off"] = "auto"
    """Send bfloat16 weights to workers on other machines as differences to the version they hold. `auto`: when that is faster
    at the measured network speed. If the learner is on a CPU and has the extra `delta`, they are half as large; workers then
    need it too, and one without it makes its group receive whole weights."""
    rendezvous_timeout_s: PositiveFloat = 60.0
    """Seconds that the members of a push wait for each other to connect."""
    operation_timeout_s: PositiveFloat = 10.0
    """Seconds for one transfer; a worker that takes longer is left out of the push."""
    host: str = "127.0.0.1"
    """The learner's address on the network it shares with workers; it must belong to one interface, because the learner also
    listens on it."""
    insecure: bool = False
    """Required when `host` is not a loopback address: confirms that the network is private. Process groups (gloo, NCCL) do not
    authenticate their members, and weights are not encrypted."""
    push_every_steps: PositiveInt = 1
    """Minimum optimizer steps between two pushes."""
    push_every_s: float = Field(default=0.0, ge=0)
    """Minimum seconds between two pushes, in addition to push_every_steps. A version is pushed sooner when the learner could
    not continue without it, and with every checkpoint."""
    snapshots: str = ""
    """Folder for snapshots of live versions, relative to the run's folder unless absolute. Workers that can read it start
    without a running learner. Empty: no snapshots."""
    snapshot_every: PositiveInt = 1
    """Snapshot every Nth live version. When the disk is slower than that, only the newest one is written."""

    @model_validator(mode="after")
    def _is_private(self) -> WireConfig:
        if is_wildcard(self.host):
            raise ValueError(
                f"wire.host: {self.host!r} means every interface of this machine; give this machine's address on the private "
                "network that workers use"
            )
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"wire.host: process groups at {self.host!r} do not authenticate their members, so the network must be "
                "private; if it is, set wire.insecure: true"
            )
        return self

"""Sections of every run: `run`, `model`, `metrics` and `supervision`, for `async-rl train` too; `recording` and `launch`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.pretrained import Pretrained
from async_rl.config.section import Section
from async_rl.supervision.processes.restarts import RestartPolicy


class RunConfig(Section):
    """Name, folder and seed of the run."""

    name: str = ""
    """Name of the run in Redis and on disk: letters, digits, `.`, `_` and `-`, beginning with a letter, a digit or `_`.
    Empty: `async-rl run` generates one. Processes launched separately must all be given the same name."""
    folder: Path = Path("runs")
    """Parent directory of run folders."""
    seed: int = 0
    """Seed of initial weights, task order and sampling."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"run.name ({name!r}) is used as a folder name and in Redis keys: use letters, digits, '.', '_' and '-', "
                "beginning with a letter, a digit or '_'"
            )
        return name


class ExpertsSize(Section):
    """Mixture-of-experts layers of a model built from `model.size`."""

    number: PositiveInt
    """Experts per layer."""
    per_token: PositiveInt = 2
    """Experts that each token is routed to."""
    ffn: PositiveInt
    """MLP width of one expert."""
    every: PositiveInt = 1
    """Every Nth layer is a mixture-of-experts layer; the others have a dense MLP of width `size.ffn`."""

    @model_validator(mode="after")
    def _leaves_a_choice(self) -> ExpertsSize:
        if not 1 < self.per_token <= self.number:
            raise ValueError(
                f"per_token ({self.per_token}) must be at least 2, and at most the number of experts ({self.number})"
            )
        return self


class ModelSize(Section):
    """Dimensions of a transformer with random initial weights."""

    hidden: PositiveInt
    """Hidden size; a multiple of `heads`."""
    layers: PositiveInt
    """Number of transformer layers."""
    heads: PositiveInt
    """Attention heads per layer."""
    kv_heads: PositiveInt | None = None
    """Key/value heads; fewer than `heads` gives grouped-query attention. Unset: as many as `heads`."""
    ffn: PositiveInt | None = None
    """MLP width. Unset: 4 x hidden."""
    max_positions: PositiveInt = 512
    """Context length in tokens."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    tied_embeddings: bool = True
    """Use the input embedding as the output layer."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    experts: ExpertsSize | None = None
    """Unset: a dense model."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSize:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.experts is not None and self.experts.every > self.layers:
            raise ValueError(
                f"experts.every ({self.experts.every}) exceeds the number of layers ({self.layers}), so none would have experts"
            )
        return self


class ModelConfig(Pretrained):
    """The model to train: a new one of `size`, or a pretrained one (docs/models.md)."""

    size: ModelSize | None = None
    """A new model of these dimensions, with random weights."""
    max_sequence: PositiveInt | None = None
    """Tokens of the longest sequence that is sampled and trained: prompt, answers and observations of an episode together. The
    engine's KV cache must hold one (`worker.kv_cache_gb`). At most the model's positions. Unset: all of them."""
    layer_spec: Literal["local", "transformer_engine"] = "local"
    """Layer implementation: Megatron's local layers, or Transformer Engine (needs CUDA and the extra `gpu`)."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ModelConfig:
        if (self.size is not None) == self.is_given:
            raise ValueError(
                "give exactly one of model.name (a model on the Hugging Face Hub), model.folder and model.size "
                "(--model.size null removes the one from a file)"
            )
        return self


class MetricsConfig(Section):
    """Destinations of metrics (docs/metrics.md)."""

    console: bool = True
    """Print metrics: a live panel on a terminal, else one line per step."""
    max_mb: PositiveFloat = 512.0
    """Size limit of metrics.jsonl and of samples.jsonl, in MB. At half of it the file is rotated to FILE.1, which replaces the
    previous one."""
    wandb_project: str = ""
    """Weights & Biases project (extra `wandb`). WANDB_MODE=offline needs no account. Empty: off."""
    wandb_checkpoints: bool = False
    """Also send each complete checkpoint to W&B as an artifact; that may be many GB."""
    trackio_project: str = ""
    """Trackio project (extra `trackio`): a local file, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say. Empty: off."""
    mlflow_experiment: str = ""
    """MLflow experiment (extra `mlflow`), on the server that MLFLOW_TRACKING_URI names. Empty: off."""
    tensorboard: bool = False
    """Write TensorBoard event files to the run's folder (extra `tensorboard`)."""
    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint. 0: off."""
    prometheus_host: str = "127.0.0.1"
    """Address that the endpoint listens on. Other than loopback, it needs a token or `prometheus_insecure`."""
    prometheus_token_file: Path | None = None
    """File with the bearer token that scrapers must send (Prometheus: `authorization: {credentials_file: ...}`)."""
    prometheus_insecure: bool = False
    """Allow scraping from other machines without a token: confirms that the network is private."""

    @property
    def max_bytes(self) -> int:
        """Size limit of either file."""
        return round(self.max_mb * 1e6)


class RecordingConfig(Section):
    """What the run keeps of events and rollouts, for looking at them later (docs/recording.md)."""

    events_mb: NonNegativeFloat = 32.0
    """Size limit of events/ in the run's folder, in MB; the oldest events are deleted beyond it. 0: off."""
    rollouts_mb: NonNegativeFloat = 256.0
    """Size limit of rollouts/ in the run's folder, in MB: trained groups, and the heads of dropped ones; the oldest are deleted
    beyond it. 0: off."""
    otlp_endpoint: str = ""
    """Address that takes OpenTelemetry spans over OTLP/HTTP, such as http://127.0.0.1:4318 (extra `otel`): groups, steps and
    pushes as traces, without texts. OTEL_EXPORTER_OTLP_HEADERS may hold a token. Empty: off."""
    otlp_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups that are sent as spans. Steps and pushes always are."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str) -> str:
        if endpoint and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
            raise ValueError(f"recording.otlp_endpoint ({endpoint!r}) must be an address such as http://127.0.0.1:4318")
        return endpoint

    @property
    def wants_dropped(self) -> bool:
        """Whether workers send the heads of the groups that they drop."""
        return self.rollouts_mb > 0 or bool(self.otlp_endpoint)

    @property
    def events_bytes(self) -> int:
        return round(self.events_mb * 1e6)

    @property
    def rollouts_bytes(self) -> int:
        return round(self.rollouts_mb * 1e6)


class SupervisionConfig(Section):
    """How `async-rl run` and `train` handle processes that crash or hang (docs/operations.md)."""

    restarts: NonNegativeInt = 3
    """Maximum restarts of one process within `window_s`. A worker or evaluator that exceeds it is not restarted for another
    `window_s` while the remaining workers go on. If no other worker is left, or the process is the learner or the Redis server,
    the run ends with exit code 12."""
    window_s: PositiveFloat = 300.0
    """Seconds over which `restarts` are counted."""
    backoff_s: NonNegativeFloat = 0.5
    """Seconds before the first restart; the delay doubles with each further restart within the window."""
    silence_s: PositiveFloat = 300.0
    """Seconds without a heartbeat after which a process is killed and restarted. It counts as a crash."""
    work_limit_s: NonNegativeFloat = 3600.0
    """Seconds that one unit of blocking work may take: a training step, an engine step, loading or writing a checkpoint. After
    that the process ends with the thread's name and is restarted. The first of each kind gets five times as long, because it
    compiles. 0: no limit."""

    @property
    def policy(self) -> RestartPolicy:
        return RestartPolicy(limit=self.restarts, window_s=self.window_s, backoff_s=self.backoff_s, silence_s=self.silence_s)


Resources = dict[str, NonNegativeFloat]


class SlurmConfig(Section):
    """What `async-rl launch slurm` writes into its scripts (docs/launch/slurm.md)."""

    options: tuple[str, ...] = Field(default=(), examples=[["--partition=gpu", "--time=24:00:00"]])
    """`#SBATCH` lines of all jobs."""
    learner_options: tuple[str, ...] = Field(default=(), examples=[["--mem=200G"]])
    """Further lines of the learner's jobs."""
    worker_options: tuple[str, ...] = ()
    """Further lines of the jobs of workers and evaluator."""
    setup: tuple[str, ...] = Field(default=(), examples=[["module load cuda"]])
    """Shell commands at the beginning of each job."""
    learner_jobs: PositiveInt = 1
    """Learner jobs, one after the other: each resumes from the checkpoint of the one before. Those left when the run ends are
    cancelled."""
    warn_s: PositiveInt = 120
    """Seconds before a job's time limit at which Slurm tells its processes: the learner writes a checkpoint, workers drain.
    Slurm may tell up to a minute earlier."""

    @field_validator("options", "learner_options", "worker_options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [option for option in options if not option.startswith("-") or "\n" in option]:
            raise ValueError(f"{wrong[0]!r} is not an option of sbatch, such as --partition=gpu")
        return options


class LaunchConfig(Section):
    """Machines and resources of a run that `async-rl launch` places (docs/launch/ray.md, docs/launch/slurm.md). Of other
    verbs only `learner --node` reads it."""

    learner_nodes: PositiveInt = 1
    """Machines that the learner's ranks are divided over, in equal parts."""
    learner_nodes_min: PositiveInt | None = None
    """Fewest machines that the learner runs on when there are not `learner_nodes`: with fewer data-parallel ranks, from its
    newest checkpoint. Unset: as many as `learner_nodes`; it waits for all of them."""
    learner_resize_s: NonNegativeFloat = 60.0
    """Ray: seconds that the learner waits for all its machines before it runs on fewer, and that further ones must have been
    free before it drains and runs on more."""
    learner_resources: Resources = Field(default={}, examples=[{"GPU": 8, "h200": 1}])
    """What the learner's ranks on one machine need, by the cluster's names. Without `GPU`: one for each of these ranks if the
    cluster has GPUs. Without `CPU`: 1."""
    worker_resources: Resources = Field(default={}, examples=[{"GPU": 1, "l40s": 1}])
    """What one worker needs. Without `GPU`: one for each GPU of its engines if the cluster has GPUs. Without `CPU`: 1."""
    slurm: SlurmConfig = SlurmConfig()
    """Options of Slurm."""

    @model_validator(mode="after")
    def _has_a_range(self) -> LaunchConfig:
        if self.fewest_nodes > self.learner_nodes:
            raise ValueError(f"learner_nodes_min ({self.fewest_nodes}) is more than learner_nodes ({self.learner_nodes})")
        return self

    @property
    def fewest_nodes(self) -> int:
        """Fewest machines of the learner."""
        return self.learner_nodes_min if self.learner_nodes_min is not None else self.learner_nodes

"""`Config`, the configuration of a run, with the values derived from it. `loading.py` builds it."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.buffer import LeaseConfig, RedisConfig, ReplayConfig, RetentionConfig, StalenessConfig
from async_rl.config.evaluation import EvaluationConfig, PolicyConfig
from async_rl.config.exposure import is_loopback, is_wildcard
from async_rl.config.learner import LearnerConfig
from async_rl.config.references import absolute_reference
from async_rl.config.rollout import EnvironmentConfig, SamplingConfig, WorkerConfig
from async_rl.config.section import Section
from async_rl.config.supervision import SupervisionConfig
from async_rl.config.tokenizer import CharacterTokenizer, TokenizerConfig
from async_rl.replay_protocol import Limits


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


class ModelConfig(Section):
    """The model to train: exactly one of `size` and `folder`."""

    size: ModelSize | None = None
    """A new model of these dimensions, with random weights."""
    folder: Path | None = None
    """Hugging Face folder: config.json gives the architecture, the safetensors files the initial weights (docs/models.md)."""
    layer_spec: Literal["local", "transformer_engine"] = "local"
    """Layer implementation: Megatron's local layers, or Transformer Engine (needs CUDA and the extra `gpu`)."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ModelConfig:
        if (self.size is None) == (self.folder is None):
            raise ValueError("give exactly one of model.size and model.folder (--model.size null removes the one from a file)")
        return self


class BatchConfig(Section):
    """The step batch: groups and tokens of one step, and how it is divided into updates."""

    groups_per_step: PositiveInt = 8
    """Groups in one step batch."""
    group_size: PositiveInt = 8
    """Rollouts per task."""
    tokens_per_step: PositiveInt | None = None
    """Maximum tokens in a step batch: a step takes fewer groups when the next one would exceed it. Unset: no limit."""
    bin_tokens: PositiveInt = 4096
    """Token capacity of one packed row (micro-batch). A longer rollout gets a row of its own."""
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
    """Hand weights to workers on the learner's machine through shared memory instead of a socket."""
    bucket_mb: PositiveFloat = 16.0
    """Maximum size of one transfer, in MB. It must complete within `operation_timeout_s`."""
    deltas: Literal["auto", "always", "off"] = "auto"
    """Send bfloat16 weights to workers on other machines as differences to the version they hold. `auto`: when that is faster
    at the measured network speed. Needs the extra `delta` on both ends."""
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


class MetricsConfig(Section):
    """Destinations of metrics (docs/metrics.md)."""

    console: bool = True
    """Print metrics: a live panel on a terminal, else one line per step."""
    max_mb: PositiveFloat = 512.0
    """Size limit of metrics.jsonl and of samples.jsonl, in MB. At half of it the file is rotated to FILE.1, which replaces the
    previous one."""
    wandb_project: str = ""
    """Weights & Biases project (extra `wandb`). WANDB_MODE=offline needs no account. Empty: off."""
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


class Config(Section):
    """The configuration of a run."""

    run: RunConfig = RunConfig()
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig = CharacterTokenizer()
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    environments_from: tuple[str, ...] = ()
    """Modules, files, folders and plug-ins from which `env attach` may add environments during the run, besides the types
    in `environments`. A module includes its submodules; a folder, written with a slash (`environments/`), all of its files."""
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    replay: ReplayConfig = ReplayConfig()
    retention: RetentionConfig = RetentionConfig()
    batch: BatchConfig = BatchConfig()
    leases: LeaseConfig = LeaseConfig()
    learner: LearnerConfig = LearnerConfig()
    worker: WorkerConfig = WorkerConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Other models, by name; agents find them in `context.policies`. Never trained."""
    evaluation: EvaluationConfig = EvaluationConfig()
    wire: WireConfig = WireConfig()
    metrics: MetricsConfig = MetricsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models compute. `auto`: CUDA if an NVIDIA driver is loaded, else the CPU."""

    @model_validator(mode="after")
    def _limits_fit(self) -> Config:
        labels = [environment.label for environment in self.environments]
        if len(set(labels)) != len(labels):
            raise ValueError(f"environments must have different names, got {labels}; set `name` on each")
        if unknown := set(self.evaluation.environments) - set(labels):
            raise ValueError(f"evaluation.environments names {min(unknown)!r}, but the environments are {labels}")
        tasks = self.evaluation.tasks
        if unknown := (tasks.keys() if isinstance(tasks, dict) else set[str]()) - set(labels):
            raise ValueError(f"evaluation.tasks names {min(unknown)!r}, but the environments are {labels}")
        if self.leases.member_s <= 2 * HEARTBEAT_S or self.leases.learner_s <= 2 * HEARTBEAT_S:
            raise ValueError(f"leases.member_s and leases.learner_s must exceed two heartbeats ({2 * HEARTBEAT_S:g} s)")
        return self

    @model_validator(mode="after")
    def _replay_is_possible(self) -> Config:
        limits, replay = self.limits, self.replay
        if replay.max_uses > limits.age_bound + 1:
            raise ValueError(
                f"replay.max_uses ({replay.max_uses}) cannot be reached: a group is used at most once per step, and with "
                f"staleness.max_age {self.staleness.max_age:g} in at most {limits.age_bound + 1} steps"
            )
        if replay.samples_per_insert is None:
            return self
        if replay.samples_per_insert > replay.max_uses:
            raise ValueError(
                f"replay.samples_per_insert ({replay.samples_per_insert:g}) is above replay.max_uses ({replay.max_uses})"
            )
        needed = limits.groups_per_step + replay.samples_per_insert
        if 2 * limits.error_buffer < needed:
            raise ValueError(
                f"replay.error_buffer ({limits.error_buffer:g}) is too small: workers and learner would wait for each other; "
                f"it must be at least {needed / 2:g}"
            )
        if replay.min_groups > limits.slots:
            raise ValueError(f"replay.min_groups ({replay.min_groups}) is above the buffer's {limits.slots} slots")
        return self

    @model_validator(mode="after")
    def _pushes_come_in_time(self) -> Config:
        every, most = self.wire.push_every_steps, self.limits.steps_between_pushes
        if every > most:
            key = "max_age" if self.limits.slots == self.limits.max_slots else "pace"
            raise ValueError(
                f"wire.push_every_steps ({every}) is never reached: with staleness.{key} {getattr(self.staleness, key):g} the "
                f"learner can train {most} steps from one push to the next; lower it, or raise staleness.{key}"
            )
        return self

    @model_validator(mode="after")
    def _truncation_is_reproducible(self) -> Config:
        sampling, tensor = self.sampling, self.learner.parallel.tensor
        if tensor > 1 and sampling.is_truncated:
            raise ValueError(
                f"sampling.top_p and sampling.top_k need the whole vocabulary on one rank of the learner, but "
                f"learner.parallel.tensor is {tensor}; leave them at 1 and 0, or the tensor parallelism at 1"
            )
        return self

    @model_validator(mode="after")
    def _shares_fill_a_batch(self) -> Config:
        quotas = self.limits.quotas
        if len(quotas) == len(self.environments) and sum(quotas.values()) < self.batch.groups_per_step:
            raise ValueError(
                f"environments' max_share: together they allow {sum(quotas.values())} groups of "
                f"batch.groups_per_step ({self.batch.groups_per_step}); raise one of them"
            )
        return self

    @property
    def limits(self) -> Limits:
        groups_per_step, samples_per_insert = self.batch.groups_per_step, self.replay.samples_per_insert
        own, default = self.replay.error_buffer, groups_per_step * max(1.0, samples_per_insert or 0.0)
        return Limits(
            max_age=self.staleness.max_age,
            groups_per_step=groups_per_step,
            lease_s=self.leases.ticket_s,
            max_attempts=self.leases.max_attempts,
            selector=self.staleness.selector,
            max_uses=self.replay.max_uses,
            samples_per_insert=samples_per_insert,
            min_size=self.replay.min_groups,
            error_buffer=own if own is not None else default,
            quotas={
                environment.label: quota
                for environment in self.environments
                if (quota := environment.quota(groups_per_step)) is not None
            },
            keep_steps=self.keep_steps,
            pace=None if isinstance(self.staleness.pace, str) else self.staleness.pace,
        )

    @property
    def keep_steps(self) -> int:
        """Steps that spent groups keep their payloads: at least as long as writing the archive may take."""
        archiving = ARCHIVE_CHECKPOINTS * self.learner.checkpoint_every if self.retention.archive else 0
        return max(self.retention.keep_steps, archiving)

    @property
    def max_groups(self) -> int:
        """Upper bound of groups with a payload in the buffer: in slots, trained since the last two checkpoints (one may still
        be in writing), retained, and waiting for another use.
        """
        again = self.limits.age_bound + 1 if self.replay.max_uses > 1 else 0
        steps = 2 * self.learner.checkpoint_every + self.keep_steps + again
        return self.limits.max_slots + steps * self.batch.groups_per_step

    def buffer_mb(self, tokens_per_rollout: int) -> float:
        """Buffer memory in MiB for `max_groups` groups of rollouts of this length, with one sample each."""
        return self.max_groups * self.batch.group_size * tokens_per_rollout * PAYLOAD_BYTES_PER_TOKEN / 2**20

    @property
    def run_folder(self) -> Path:
        return (self.run.folder / self.run.name).absolute()

    def seen_from_anywhere(self) -> Config:
        """Return the same configuration with absolute paths, for processes with another working directory."""
        tree = self.with_absolute_paths()
        tree["environments"] = [environment.seen_from_anywhere() for environment in self.environments]
        tree["environments_from"] = [
            str(Path(place).absolute()) if "/" in place or place.endswith(".py") else place for place in self.environments_from
        ]
        if self.learner.objective.endswith((".yaml", ".yml")):
            tree["learner"]["objective"] = str(Path(self.learner.objective).absolute())
        else:
            tree["learner"]["objective"] = absolute_reference(self.learner.objective)
        return Config.model_validate(tree)

    @property
    def redis_folder(self) -> Path:
        """Data folder of the embedded Redis server."""
        return self.run_folder / "redis"

    @property
    def archive_folder(self) -> Path:
        """Folder of the archive of spent groups."""
        return self.run_folder / "archive"

    @property
    def payload_folder(self) -> Path | None:
        """Folder of payload files; None when payloads are stored in Redis."""
        if self.redis.payloads == "redis":
            return None
        return self.run_folder / "payloads" if self.redis.payloads == "files" else Path(self.redis.payloads)

    @property
    def snapshot_folder(self) -> Path | None:
        """Folder of weight snapshots, None without them. In an absolute `wire.snapshots`, each run has a subfolder."""
        if not self.wire.snapshots:
            return None
        given = Path(self.wire.snapshots)
        return given / self.run.name if given.is_absolute() else self.run_folder / given

    @property
    def redis_url(self) -> str:
        """The configured server, or the socket of the embedded one; its path is short because sockets allow about 100 bytes."""
        if self.redis.url:
            return self.redis.url
        mark = hashlib.sha256(str(self.redis_folder).encode()).hexdigest()[:16]
        return f"unix://{tempfile.gettempdir()}/async-rl-{mark}/redis.sock"

    @property
    def fleet_facts(self) -> dict[str, str]:
        """Settings that all processes of a run must share, by dotted key. A worker that differs is refused, naming the key."""
        shared: dict[str, object] = {
            "model": _by_content(self.model.model_dump(mode="json", exclude={"layer_spec"}), "config.json"),
            "tokenizer": _by_content(self.tokenizer.model_dump(mode="json"), "tokenizer.json"),
            "environments": [environment.model_dump(mode="json") for environment in self.environments],
            "sampling": self.sampling.model_dump(mode="json"),
            "batch.group_size": self.batch.group_size,
            "run.seed": self.run.seed,
            "protocol": PROTOCOL,
        }
        return {key: json.dumps(value, sort_keys=True) for key, value in _flat(shared)}


PAYLOAD_BYTES_PER_TOKEN = 16
"""Estimate: 9 bytes for id, mask and log-probability; the rest for text and Redis overhead."""

ARCHIVE_CHECKPOINTS = 4
"""A spent group is kept for the archive for at most this many checkpoints, then deleted and counted as expired."""

PROTOCOL = 3
"""Version of the messages between processes; incremented by every incompatible change."""

HEARTBEAT_S = 1.0
"""Interval at which leases are renewed."""


def _by_content(section: dict[str, object], file: str) -> dict[str, object]:
    """Replace a folder's path by a hash of its content, because the path may differ between machines."""
    if not section.get("folder"):
        return section
    path = Path(str(section["folder"])) / file
    says = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else f"no {file}"
    return section | {"folder": says}


def _flat(tree: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    leaves: list[tuple[str, object]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves += _flat(value, f"{prefix}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            leaves.append((prefix + key, value))
    return leaves

"""One typed tree per run, and every number derived from it beside its formula. Loading is loading.py's work."""

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
    name: str = ""
    """Names the run in Redis and on disk: letters, digits, `.`, `_` and `-`, beginning with a letter, a digit or `_`.
    `async-rl run` makes one up; fleets launched by hand must be given the same."""
    folder: Path = Path("runs")
    """Where run folders are made."""
    seed: int = 0
    """Of the initial weights, the tasks and the sampling."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"run.name ({name!r}) names a folder and keys in Redis: use letters, digits, '.', '_' and '-', beginning with "
                "a letter, a digit or '_'"
            )
        return name


class ExpertsSize(Section):
    """Several MLPs in a layer, of which every token visits a few."""

    number: PositiveInt
    per_token: PositiveInt = 2
    ffn: PositiveInt
    """Of one expert."""
    every: PositiveInt = 1
    """Every so many layers has experts, the last of each so many; the others have one MLP of the model's `ffn`."""

    @model_validator(mode="after")
    def _leaves_a_choice(self) -> ExpertsSize:
        if not 1 < self.per_token <= self.number:
            raise ValueError(
                f"per_token ({self.per_token}) must be at least 2, and at most the number of experts ({self.number})"
            )
        return self


class ModelSize(Section):
    """A model made up from its measurements, with random weights."""

    hidden: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    """Fewer than `heads` is grouped-query attention; unset means as many."""
    ffn: PositiveInt | None = None
    """Unset means 4 x hidden."""
    max_positions: PositiveInt = 512
    rope_theta: PositiveFloat = 10_000.0
    tied_embeddings: bool = True
    init_std: PositiveFloat = 0.02
    experts: ExpertsSize | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSize:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.experts is not None and self.experts.every > self.layers:
            raise ValueError(f"experts.every ({self.experts.every}) leaves no experts in a model of {self.layers} layers")
        return self


class ModelConfig(Section):
    """Either `size` or `folder`."""

    size: ModelSize | None = None
    folder: Path | None = None
    """A Hugging Face folder: its config.json gives the architecture, its safetensors the first weights."""
    layer_spec: Literal["local", "transformer_engine"] = "local"
    """Whose layers: Megatron's own with our attention, or Transformer Engine's (CUDA, extra `gpu`)."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ModelConfig:
        if (self.size is None) == (self.folder is None):
            raise ValueError("give exactly one of model.size and model.folder (--model.size null takes away a file's)")
        return self


class BatchConfig(Section):
    groups_per_step: PositiveInt = 8
    group_size: PositiveInt = 8
    """Sibling rollouts of one task."""
    tokens_per_step: PositiveInt | None = None
    """A step takes fewer than groups_per_step groups when these would hold more tokens than this."""
    bin_tokens: PositiveInt = 4096
    """Capacity of one packed micro-batch row. A longer rollout has a row of its own."""
    minibatches: PositiveInt = 1
    """A step's groups are divided into this many optimizer updates; all of them together make one version."""
    epochs: PositiveInt = 1
    """How often a step goes over its groups. More than one update wants an objective with `anchor: proximal`."""
    drop_no_signal: bool = True
    """Groups whose rewards are all equal teach nothing under a group baseline: drop them, and roll another task."""

    @model_validator(mode="after")
    def _updates_have_groups(self) -> BatchConfig:
        if self.minibatches > self.groups_per_step:
            raise ValueError(
                f"minibatches ({self.minibatches}) must not be above groups_per_step ({self.groups_per_step}): each update "
                "takes whole groups"
            )
        return self


class WireConfig(Section):
    dtype: Literal["model", "bfloat16"] = "model"
    """In which numbers weights travel. Workers convert them to what their engines compute in."""
    shared_memory: bool = True
    """Workers on the learner's machine read the weights where they lie, instead of receiving them."""
    bucket_mb: PositiveFloat = 16.0
    """The most that one transfer carries: it must get through within `operation_timeout_s`."""
    deltas: Literal["auto", "always", "off"] = "auto"
    """Whether workers on other machines get the difference to what they hold instead of whole bfloat16 weights; auto: when it
    is there sooner, by the measured speed of the wire. Needs the extra `delta`."""
    rendezvous_timeout_s: PositiveFloat = 60.0
    operation_timeout_s: PositiveFloat = 10.0
    host: str = "127.0.0.1"
    """The address under which workers reach the learner: of one interface, since it also listens there."""
    insecure: bool = False
    """Needed where `host` is not this machine alone: states that the network is private. Process groups (gloo, NCCL) take
    whoever connects for a member, and weights cross the network in the clear."""
    push_every_steps: PositiveInt = 1
    """Push a version when at least so many steps have passed since the last one that was pushed, ..."""
    push_every_s: float = Field(default=0.0, ge=0)
    """... and so many seconds. Sooner where the learner could not train on without it, and with every checkpoint."""
    snapshots: str = ""
    """A folder where the learner leaves live versions as files, within the run's folder unless it is absolute. Workers that
    see it too can start while there is no learner. Empty means none."""
    snapshot_every: PositiveInt = 1
    """Of the versions that go live, each so-manyth is written down; the newest, where the disk is slower than that."""

    @model_validator(mode="after")
    def _is_private(self) -> WireConfig:
        if is_wildcard(self.host):
            raise ValueError(
                f"wire.host: {self.host!r} means every interface of this machine; name the address of the private network "
                "under which workers reach the learner"
            )
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"wire.host: at {self.host!r} process groups take whoever connects for a member, so it must be an address in "
                "a private network; if it is, say so with wire.insecure: true"
            )
        return self


class MetricsConfig(Section):
    console: bool = True
    max_mb: PositiveFloat = 512.0
    """metrics.jsonl and samples.jsonl take at most so much each: the older half lies in FILE.1, what is older is deleted."""
    wandb_project: str = ""
    """Set to log to Weights & Biases (extra `wandb`); WANDB_MODE=offline needs no account."""
    tensorboard: bool = False
    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """0 switches it off."""
    prometheus_host: str = "127.0.0.1"
    """Where it listens. Beyond this machine it needs a token, or `prometheus_insecure`."""
    prometheus_token_file: Path | None = None
    """Whoever scrapes must send what stands there, as Prometheus does with `authorization: {credentials_file: ...}`."""
    prometheus_insecure: bool = False
    """Allows a host beyond this machine without a token: the network is private."""

    @property
    def most_bytes(self) -> int:
        """Of either file."""
        return round(self.max_mb * 1e6)


class Config(Section):
    run: RunConfig = RunConfig()
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig = CharacterTokenizer()
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    environments_from: tuple[str, ...] = ()
    """Modules, files, folders and plug-ins whose code `env attach` may bring into the run beside what `environments` names.
    A module's submodules count, and all files in a folder, which is written with a slash: `environments/`."""
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    replay: ReplayConfig = ReplayConfig()
    retention: RetentionConfig = RetentionConfig()
    batch: BatchConfig = BatchConfig()
    leases: LeaseConfig = LeaseConfig()
    learner: LearnerConfig = LearnerConfig()
    worker: WorkerConfig = WorkerConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Other models, by the name under which agents find them in `context.policies`. Never trained."""
    evaluation: EvaluationConfig = EvaluationConfig()
    wire: WireConfig = WireConfig()
    metrics: MetricsConfig = MetricsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"

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
                f"replay.max_uses ({replay.max_uses}) is never reached: a group is used once a step, and "
                f"staleness.max_age ({self.staleness.max_age:g}) lets it train {limits.age_bound + 1} steps at most"
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
            raise ValueError(
                f"wire.push_every_steps ({every}) is never reached: with staleness.max_age {self.staleness.max_age:g} the "
                f"learner can train {most} steps from one push to the next; lower it, or raise staleness.max_age"
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
        )

    @property
    def keep_steps(self) -> int:
        """An archive needs its groups for as long as it may take to write them."""
        archiving = ARCHIVE_CHECKPOINTS * self.learner.checkpoint_every if self.retention.archive else 0
        return max(self.retention.keep_steps, archiving)

    @property
    def most_groups(self) -> int:
        """That the buffer ever holds with a payload: in its slots, since the last checkpoint (twice, for one that is
        being written), kept, and waiting to be used again.
        """
        again = self.limits.age_bound + 1 if self.replay.max_uses > 1 else 0
        steps = 2 * self.learner.checkpoint_every + self.keep_steps + again
        return self.limits.slots + steps * self.batch.groups_per_step

    def buffer_mb(self, tokens_per_rollout: int) -> float:
        """The memory for that many groups, if every rollout were as long as it may be and had one sample."""
        return self.most_groups * self.batch.group_size * tokens_per_rollout * PAYLOAD_BYTES_PER_TOKEN / 2**20

    @property
    def run_folder(self) -> Path:
        return (self.run.folder / self.run.name).absolute()

    def seen_from_anywhere(self) -> Config:
        """The same run, with every path absolute."""
        tree = self.model_dump()
        tree["run"]["folder"] = self.run_folder.parent
        redis_files = (("redis", name) for name in ("password_file", "ca_file", "cert_file", "key_file"))
        token = ("metrics", "prometheus_token_file")
        for section, key in (("model", "folder"), ("tokenizer", "folder"), token, *redis_files):
            if path := tree[section].get(key):
                tree[section][key] = Path(path).absolute()
        for policy in tree["policies"].values():
            for section, key in ((policy, "folder"), (policy, "api_key_file"), (policy.get("tokenizer"), "folder")):
                if section and section.get(key):
                    section[key] = Path(section[key]).absolute()
        tree["environments"] = [environment.seen_from_anywhere() for environment in self.environments]
        tree["environments_from"] = [
            str(Path(place).absolute()) if "/" in place or place.endswith(".py") else place for place in self.environments_from
        ]
        for key in ("critic", "reference", "teacher"):
            if (section := tree["learner"][key]) and section.get("folder"):
                section["folder"] = Path(section["folder"]).absolute()
        if self.learner.objective.endswith((".yaml", ".yml")):
            tree["learner"]["objective"] = str(Path(self.learner.objective).absolute())
        else:
            tree["learner"]["objective"] = absolute_reference(self.learner.objective)
        return Config.model_validate(tree)

    @property
    def redis_folder(self) -> Path:
        """Where an embedded server keeps its data."""
        return self.run_folder / "redis"

    @property
    def archive_folder(self) -> Path:
        """Where spent groups are written down."""
        return self.run_folder / "archive"

    @property
    def payload_folder(self) -> Path | None:
        """Where large payloads lie as files; None when all of them are in Redis."""
        if self.redis.payloads == "redis":
            return None
        return self.run_folder / "payloads" if self.redis.payloads == "files" else Path(self.redis.payloads)

    @property
    def snapshot_folder(self) -> Path | None:
        """Runs that share an absolute folder do not meet in it."""
        if not self.wire.snapshots:
            return None
        given = Path(self.wire.snapshots)
        return given / self.run.name if given.is_absolute() else self.run_folder / given

    @property
    def redis_url(self) -> str:
        """The given server, or the socket of the embedded one, which has a short path: sockets allow about 100 bytes."""
        if self.redis.url:
            return self.redis.url
        mark = hashlib.sha256(str(self.redis_folder).encode()).hexdigest()[:16]
        return f"unix://{tempfile.gettempdir()}/async-rl-{mark}/redis.sock"

    @property
    def fleet_facts(self) -> dict[str, str]:
        """What every process of a run must agree on, by dotted key; a worker that differs is refused with the key's name."""
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
"""Nine for id, mask and log-probability, the rest for text and the server's own needs."""

ARCHIVE_CHECKPOINTS = 4
"""A group waits for the archive this many checkpoints at most; then it is let go, and counted."""

PROTOCOL = 3
"""Of the messages between processes. Grows with every change that an older process would not understand."""

HEARTBEAT_S = 1.0
"""Everything with a lease renews it this often."""


def _by_content(section: dict[str, object], file: str) -> dict[str, object]:
    """A folder may lie elsewhere on every machine: what counts is what it says."""
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

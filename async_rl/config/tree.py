"""`Config`, the configuration of a run, with the values derived from it. `loading.py` builds it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from async_rl.config.buffer import LeaseConfig, RedisConfig, ReplayConfig, RetentionConfig, StalenessConfig
from async_rl.config.evaluation import EvaluationConfig, PolicyConfig
from async_rl.config.learner import BatchConfig, LearnerConfig, WireConfig
from async_rl.config.rollout import EnvironmentConfig, SamplingConfig, WorkerConfig
from async_rl.config.run import LaunchConfig, MetricsConfig, ModelConfig, RecordingConfig, RunConfig, SupervisionConfig
from async_rl.config.section import Section
from async_rl.config.tokenizer import CharacterTokenizer, TokenizerConfig, with_own_tokenizer
from async_rl.imports.references import absolute_reference
from async_rl.replay_protocol import Limits


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
    recording: RecordingConfig = RecordingConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    launch: LaunchConfig = LaunchConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models compute. `auto`: CUDA if an NVIDIA driver is loaded, else the CPU."""

    @model_validator(mode="before")
    @classmethod
    def _model_has_its_tokenizer(cls, run: Any) -> Any:
        return with_own_tokenizer(run)

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
    def trains(self) -> bool:
        """Whether there is anything to train on; if not, the configuration is for `async-rl eval`."""
        return not all(environment.evaluation_only for environment in self.environments)

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
        tree["worker"]["backend"] = absolute_reference(self.worker.backend)
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
            "model": _by_content(self.model.model_dump(mode="json", exclude={"layer_spec", "name", "revision"}), "config.json"),
            "tokenizer": _by_content(self.tokenizer.model_dump(mode="json", exclude={"name", "revision"}), "tokenizer.json"),
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

PROTOCOL = 4
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

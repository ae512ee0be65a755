"""The sections of the replay buffer: `redis`, `staleness`, `replay`, `retention` and `leases`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.section import Section
from async_rl.replay_protocol import Selector


class RedisConfig(Section):
    """The Redis server behind the replay buffer (docs/redis.md)."""

    url: str = ""
    """Address of an existing server: redis://HOST:PORT, rediss:// (TLS), unix:///PATH,
    redis+sentinel://HOST:PORT,HOST:PORT/MASTER or redis+cluster://HOST:PORT,HOST:PORT (rediss+... for TLS).
    Empty: `async-rl run` and `async-rl buffer serve` start an embedded one."""
    user: str = ""
    """ACL user; `async-rl buffer users create` creates one per role. Empty: the default user."""
    password_file: Path | None = None
    """File with the password, so that it never appears on a command line. Unset: $ASYNC_RL_REDIS_PASSWORD is used."""
    ca_file: Path | None = None
    """CA certificate that signed the server's certificate. Unset: the system's trusted CAs."""
    cert_file: Path | None = None
    """Client certificate, for servers that require one."""
    key_file: Path | None = None
    """Private key of `cert_file`."""
    insecure: bool = False
    """Allow a server on a network without TLS or without a password."""
    max_memory_mb: PositiveInt = 512
    """Memory limit of an embedded server, in MiB. When it is full, commits wait; nothing is evicted."""
    payloads: str = "redis"
    """Where large payloads are stored: `redis`; `files`: in the run's folder, which is faster if learner and workers share a
    machine; or the absolute path of a folder used by this run only (docs/payload_files.md)."""
    compress_text: bool = False
    """Compress conversations in payloads with zstd. Useful for long conversations over a slow network; token ids and
    log-probabilities hardly compress and are stored as they are."""
    payloads_max_mb: PositiveInt = 4096
    """Limit of payload files, in MiB. Beyond it, commits wait as for a full server."""
    connect_timeout_s: PositiveFloat = 60.0
    """Seconds that a process waits for Redis before it exits with code 6."""

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str) -> str:
        """Refuse credentials in the URL, which is logged and written to disk; only Sentinel has no other place for them."""
        place, _, query = url.partition("://")[2].partition("?")
        credentials = place.partition("/")[0].rpartition("@")[0]
        if "+sentinel" not in url.partition("://")[0] and (":" in credentials or "password=" in query):
            raise ValueError(
                "redis.url holds a password, visible to all who see this configuration or the command line: put it "
                "into a file named by redis.password_file, or into the environment variable ASYNC_RL_REDIS_PASSWORD"
            )
        return url

    @field_validator("payloads")
    @classmethod
    def _payloads_have_a_place(cls, place: str) -> str:
        if place not in ("redis", "files") and not Path(place).is_absolute():
            raise ValueError(f"redis.payloads ({place!r}) must be redis, files, or the absolute path of a folder")
        return place

    @model_validator(mode="after")
    def _tls_files_fit(self) -> RedisConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("redis.cert_file and redis.key_file belong together: give both or none")
        if (self.ca_file or self.cert_file) and not self.url.startswith("rediss"):
            raise ValueError("redis.ca_file and redis.cert_file are for TLS, so redis.url must begin with rediss")
        return self


class StalenessConfig(Section):
    """How far off-policy training may be, and which groups are taken first (docs/buffer.md)."""

    max_age: float = Field(default=2, ge=0, le=1_000_000)
    """Maximum age of a group when it is trained: versions between the weights being trained and the oldest weights that
    sampled one of its tokens. 0 is on-policy. The buffer holds (max_age + 1) x batch.groups_per_step groups; a fraction such
    as 0.5 gives that many slots with an age bound of 1."""
    pace: Literal["auto", "full"] | Annotated[float, Field(ge=1)] = "auto"
    """How many groups may be on their way, in steps' worth of groups; at most max_age + 1, which is `full`. `auto`: as few as
    keep the learner from waiting, decided anew after every step, so that groups are younger than max_age where age buys
    nothing. A number: that many, fixed."""
    selector: Selector = "windowed_fifo"
    """Which ready groups are taken first. `windowed_fifo`: the oldest, waiting for unfinished groups that would otherwise
    become too old; `fifo`: the oldest, dropping groups that become too old and repeating their tasks; `freshest`; `uniform`;
    `prioritized` (by `replay.priority`)."""
    wait_deadline_s: PositiveFloat = 600.0
    """With `windowed_fifo`: longest wait for unfinished groups; then the step is taken without them."""


class ReplayConfig(Section):
    """Training a group more than once (docs/buffer.md). By default every group is trained once."""

    max_uses: PositiveInt = 1
    """Maximum number of steps that train one group. 1: no replay."""
    samples_per_insert: float | None = Field(default=None, ge=1)
    """Target average number of uses per group: workers wait when they are ahead of it, the learner waits when it is. Unset:
    no target."""
    min_groups: PositiveInt = 1
    """With samples_per_insert: groups that must be ready before the first step."""
    error_buffer: PositiveFloat | None = None
    """With samples_per_insert: allowed deviation of uses from samples_per_insert x inserts, in either direction. Unset:
    batch.groups_per_step x max(1, samples_per_insert)."""
    priority: str = "advantage"
    """Priority of further uses with staleness.selector `prioritized`: `advantage` (mean absolute advantage), `age` (younger
    groups first), or your function as `package.module:function`."""


class RetentionConfig(Section):
    """What happens to the payloads of groups after a checkpoint contains their training."""

    keep_steps: int = Field(default=0, ge=0)
    """Keep payloads in the buffer for this many more steps, for inspection. 0: delete them."""
    archive: bool = False
    """Write them to append-only files in the run's folder before deletion (docs/archive.md)."""
    archive_max_gb: PositiveFloat = 10.0
    """Size limit of the archive, in GB; the oldest files are deleted first."""
    archive_max_days: PositiveFloat | None = None
    """Delete archive files older than this many days. Unset: no limit."""


class LeaseConfig(Section):
    """Timeouts after which dead processes lose what they hold, and retries of failed tasks."""

    ticket_s: PositiveFloat = 30.0
    """Lease of a ticket in seconds: a worker that dies blocks its tickets this long. Renewed while the worker lives."""
    learner_s: PositiveFloat = 10.0
    """Lease of the learner in seconds: after a crash, its successor waits this long. Must exceed 2 s."""
    member_s: PositiveFloat = 10.0
    """Seconds that a dead worker stays listed as a receiver of weight pushes. Must exceed 2 s."""
    max_attempts: PositiveInt = 3
    """Attempts of a task whose episodes all fail before it is dropped."""

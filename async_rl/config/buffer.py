"""The sections of the configuration that are about the replay buffer: its server, its limits, what becomes of groups."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from async_rl.config.section import Section
from async_rl.replay_protocol import Selector


class RedisConfig(Section):
    url: str = ""
    """Empty: `async-rl run` and `buffer serve` start a server. One of yours: redis://HOST:PORT, rediss:// (TLS), unix:///PATH,
    redis+sentinel://HOST:PORT,HOST:PORT/MASTER or redis+cluster://HOST:PORT,HOST:PORT (rediss+... is TLS too)."""
    user: str = ""
    """Of the server's ACL; `async-rl buffer users create` makes one for each role. Empty is the default user."""
    password_file: Path | None = None
    """A file that holds the password, so that it never appears in a command line; else ASYNC_RL_REDIS_PASSWORD is asked."""
    ca_file: Path | None = None
    """Who signed the server's certificate. Unset means whom this machine trusts."""
    cert_file: Path | None = None
    """Our own certificate, for servers that want one."""
    key_file: Path | None = None
    """The key of `cert_file`."""
    insecure: bool = False
    """Allows a server that is reached over a network without TLS or without a password."""
    max_memory_mb: PositiveInt = 512
    """Of a server that we start. A full server makes workers wait; it never evicts."""
    payloads: str = "redis"
    """Where large payloads lie. `files`: in the run's folder beside Redis, which is faster when learner and workers share one
    machine; or the absolute path of a folder for this run alone."""
    compress_text: bool = False
    """Worth it where conversations are long and the network is slow; token ids and log-probabilities hardly shrink."""
    payloads_max_mb: PositiveInt = 4096
    """Of payload files. When they are more, workers wait as for a full server."""
    connect_timeout_s: PositiveFloat = 60.0
    """How long a process waits for Redis to answer before it gives up."""

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str) -> str:
        """The configuration is written into the run's folder and shown; only Sentinels' password has no other place."""
        place, _, query = url.partition("://")[2].partition("?")
        credentials = place.partition("/")[0].rpartition("@")[0]
        if "+sentinel" not in url.partition("://")[0] and (":" in credentials or "password=" in query):
            raise ValueError(
                "redis.url holds a password, which whoever sees this configuration or the command line would read: put it into "
                "a file and name that in redis.password_file, or into the environment variable ASYNC_RL_REDIS_PASSWORD"
            )
        return url

    @field_validator("payloads")
    @classmethod
    def _payloads_have_a_place(cls, place: str) -> str:
        if place not in ("redis", "files") and not Path(place).is_absolute():
            raise ValueError(f"redis.payloads ({place!r}) is redis, files, or the absolute path of a folder")
        return place

    @model_validator(mode="after")
    def _tls_files_fit(self) -> RedisConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("redis.cert_file and redis.key_file belong together: give both or none")
        if (self.ca_file or self.cert_file) and not self.url.startswith("rediss"):
            raise ValueError("redis.ca_file and redis.cert_file are for TLS, so redis.url must begin with rediss")
        return self


class StalenessConfig(Section):
    max_age: float = Field(default=2, ge=0, le=1_000_000)
    """A group trains only weights that are at most this many versions newer than its oldest token. 0 is on-policy. A
    fraction gives fewer groups in flight: 0.5 means half a step's groups more than a step needs, none older than 1."""
    selector: Selector = "windowed_fifo"
    """Which groups leave first: the oldest, waiting for a straggler that would become too old (windowed_fifo) or letting it
    go and having its task rolled again (fifo); the freshest; any (uniform); by priority (prioritized)."""
    wait_deadline_s: PositiveFloat = 600.0
    """After waiting this long for stragglers, the learner lets them go after all."""


class ReplayConfig(Section):
    """Training a group more than once. The defaults do not."""

    max_uses: PositiveInt = 1
    """How many steps one group may train."""
    samples_per_insert: float | None = Field(default=None, ge=1)
    """Hold the average number of uses near this: workers pause when they are ahead of it, the learner when it is."""
    min_groups: PositiveInt = 1
    """With samples_per_insert: no step before this many groups are ready."""
    error_buffer: PositiveFloat | None = None
    """With samples_per_insert: how far uses may deviate from it, to either side. Unset means a step's groups times
    max(1, samples_per_insert)."""
    priority: str = "advantage"
    """What a group's further uses depend on with staleness.selector: prioritized. `advantage` (mean |advantage|), `age`
    (the younger the likelier), or a function of yours, `package.module:function`."""


class RetentionConfig(Section):
    """What becomes of groups whose training is durable."""

    keep_steps: int = Field(default=0, ge=0)
    """Their payloads stay in the buffer for this many steps, to be looked at."""
    archive: bool = False
    """Write them to append-only files in the run's folder (docs/archive.md)."""
    archive_max_gb: PositiveFloat = 10.0
    """The oldest files go when there is more."""
    archive_max_days: PositiveFloat | None = None
    """Files older than this go too."""


class LeaseConfig(Section):
    ticket_s: PositiveFloat = 30.0
    """A worker that vanishes holds its tickets this long."""
    learner_s: PositiveFloat = 10.0
    """A learner that vanishes holds the run this long."""
    member_s: PositiveFloat = 10.0
    """A worker that vanishes stays listed for weight pushes this long."""
    max_attempts: PositiveInt = 3
    """How often a task whose episodes all failed is tried."""

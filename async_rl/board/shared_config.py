"""The run's configuration as the learner leaves it on the board for workers that join, and what such a worker takes from it.

    learner ── SharedConfig ──▶ note ──▶ async-rl worker --join
                                           │ its own words (`@ FILE --KEY VALUE`) count more
                                           ▼ code and paths must be inside its own `environments_from`

Everything that a machine has of its own, credentials and `environments_from` above all, is not shared. A note that sets it all
the same, as any holder of the learner's password can write it, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from pydantic import BaseModel, JsonValue, ValidationError

from async_rl import __version__
from async_rl.board.attached_code import foreign_code, foreign_file, strings
from async_rl.board.inbox import BoardMessage
from async_rl.config import Config
from async_rl.config.loading import LoadedConfig, load_over
from async_rl.config.pretrained import left_to_fetch
from async_rl.config.tree import PROTOCOL
from async_rl.errors import ConfigError, FleetMismatch
from async_rl.protocols import Board

NOTE = "configuration"
KEPT_S = 10 * 366 * 86400.0
"""Notes expire; this one after any run."""

SHARED = (
    *("model", "tokenizer", "environments", "sampling", "staleness", "batch", "leases", "worker", "policies", "wire"),
    *("recording",),
)
"""Sections that workers take, besides two keys of `run`."""
SHARED_OF_RUN = {"name", "seed"}
OWN_OF_GATEWAY = {"host", "port", "advertised_host"}
"""Where a worker listens is its own."""

FROM_THE_RUN = "the run's configuration"
"""Origin of the values that were shared."""


class SharedConfig(BoardMessage):
    protocol: int
    release: str
    """The learner's release of async_rl."""
    config: dict[str, JsonValue]


async def share(board: Board, config: Config, *, fence: int) -> None:
    """Leave the configuration where workers find it; only the learner that holds the run may."""
    await board.write_note(NOTE, shared(config).model_dump_json().encode(), KEPT_S, fence=fence)


def shared(config: Config) -> SharedConfig:
    tree = left_to_fetch(config, even_given=True).model_dump(
        mode="json",
        include={**dict.fromkeys(SHARED, True), "run": SHARED_OF_RUN},
        exclude={"worker": {"gateway": OWN_OF_GATEWAY}},
    )
    return SharedConfig(protocol=PROTOCOL, release=__version__, config=tree)


def _is_shared(key: str) -> bool:
    """Whether a learner shares the setting of this dotted key."""
    match key.split("."):
        case ["run", name]:
            return name in SHARED_OF_RUN
        case ["worker", "gateway", name]:
            return name not in OWN_OF_GATEWAY
        case keys:
            return keys[0] in SHARED


def read_shared(note: bytes | None, run: str, words: Sequence[str]) -> LoadedConfig[Config]:
    """The configuration of a process that joins: the shared one, and over it its own words. Nothing is imported or fetched.

    Raises ConfigError if the run has not shared one, FleetMismatch if it is of another protocol, unknown here, or sets what no
    learner shares.
    """
    if note is None:
        raise ConfigError(
            f"run {run!r} has no configuration in this Redis: its learner writes it when it starts; check the address and "
            "the run's name, and start the learner first"
        )
    try:
        found = SharedConfig.model_validate_json(note)
    except ValidationError as error:
        raise FleetMismatch(f"the configuration of run {run!r} cannot be read here; install the learner's async_rl") from error
    if found.protocol != PROTOCOL:
        raise FleetMismatch(
            f"run {run!r} speaks protocol {found.protocol} (async_rl {found.release}), and this async_rl {__version__} speaks "
            f"{PROTOCOL}; install async_rl {found.release} here"
        )
    try:
        theirs = load_over(Config, found.config, FROM_THE_RUN, ())
    except ConfigError as error:
        raise FleetMismatch(
            f"the configuration of run {run!r} (async_rl {found.release}) does not fit this async_rl {__version__}: {error}"
        ) from error
    if own := [key for key, origin in theirs.origins.items() if origin == FROM_THE_RUN and not _is_shared(key)]:
        raise FleetMismatch(
            f"the configuration of run {run!r} sets {own[0]}, which is this machine's own and which no learner shares; start "
            "the learner again, which writes the configuration anew, and find out who else has its password"
        )
    return load_over(Config, found.config, FROM_THE_RUN, [*words, "--run.name", run])


def refuse_foreign(loaded: LoadedConfig[Config]) -> Config:
    """Return the configuration. Raises ConfigError if the run's part of it names code or files that are not inside the worker's
    own `environments_from`."""
    config, places = loaded.config, loaded.config.environments_from
    for section in config.environments:
        if (name := foreign_code(section, places)) is not None:
            raise _refused(config, f"environment {section.label!r} loads {name}", name.rpartition(":")[0] or name)
        for text in strings(section.args):
            if foreign_file(text, places):
                raise _refused(config, f"environment {section.label!r} reads {text}", text)
    for key, text in _files(config):
        if loaded.origins.get(key) == FROM_THE_RUN and foreign_file(text, places, is_path=True):
            raise _refused(config, f"{key} is {text}", text, f", and --{key} PATH names one of this machine")
    return config


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """Keys outside of environments whose values name code or files here, with these."""
    if ":" in config.worker.backend:
        yield "worker.backend", config.worker.backend.rpartition(":")[0]
    if config.wire.snapshots:
        yield "wire.snapshots", config.wire.snapshots
    yield from _paths("", config)


def _paths(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    match value:
        case Path():
            yield prefix, str(value)
        case BaseModel():
            for name in type(value).model_fields:
                yield from _paths(f"{prefix}.{name}".lstrip("."), getattr(value, name))
        case dict():
            for name, each in cast("dict[str, object]", value).items():
                yield from _paths(f"{prefix}.{name}", each)
        case _:
            pass


def _refused(config: Config, what: str, place: str, otherwise: str = "") -> ConfigError:
    allowed = [*config.environments_from, place]
    return ConfigError(
        f"this worker does not join run {config.run.name!r}: {what}, which it was not allowed; "
        f"--environments_from '[{', '.join(allowed)}]' allows it{otherwise}"
    )

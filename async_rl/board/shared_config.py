"""The run's configuration as the learner leaves it on the board for workers that join, and what such a worker takes from it.

    learner ── SharedConfig ──▶ note ──▶ async-rl worker --join
                                           │ its own words (`@ FILE --KEY VALUE`) count more
                                           ▼ code and paths must be inside its own `environments_from`

Everything that a machine has of its own, credentials above all, is not shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, JsonValue, ValidationError

from async_rl import __version__
from async_rl.board.attached_code import foreign_code, foreign_file, strings
from async_rl.board.inbox import BoardMessage
from async_rl.config import Config
from async_rl.config.loading import LoadedConfig, load_over
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
"""Sections that workers take, besides the run's name and seed."""
OWN_OF_GATEWAY = {"host", "port", "advertised_host"}
"""Where a worker listens is its own."""
WITH_MODELS = ("model", "tokenizer", "policies")

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
    tree = config.model_dump(mode="json", include={*SHARED, "run"})
    tree["run"] = {key: tree["run"][key] for key in ("name", "seed")}
    tree["worker"]["gateway"] = {key: value for key, value in tree["worker"]["gateway"].items() if key not in OWN_OF_GATEWAY}
    for section in WITH_MODELS:
        _fetch_there(tree[section])
    return SharedConfig(protocol=PROTOCOL, release=__version__, config=tree)


def _fetch_there(section: Any) -> None:
    """Leave out where this machine keeps models of the Hub."""
    if not isinstance(section, dict):
        return
    described = cast("dict[str, Any]", section)
    if described.get("name") and "revision" in described:
        described["folder"] = None
    for each in described.values():
        _fetch_there(each)


def read_shared(note: bytes | None, run: str, words: Sequence[str]) -> LoadedConfig[Config]:
    """The configuration of a process that joins: the shared one, and over it its own words. Nothing is imported or fetched.

    Raises ConfigError if the run has not shared one, FleetMismatch if it is of another protocol or unknown here.
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
        load_over(Config, found.config, FROM_THE_RUN, ())
    except ConfigError as error:
        raise FleetMismatch(
            f"the configuration of run {run!r} (async_rl {found.release}) does not fit this async_rl {__version__}: {error}"
        ) from error
    return load_over(Config, found.config, FROM_THE_RUN, words)


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

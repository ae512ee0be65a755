"""The rank and world size of this process, from the environment variables that launchers set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.supervision.processes.ranks import STORE_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    rank: int = 0
    world_size: int = 1
    file: Path | None = None
    """Path of the file store, if `async-rl` started the ranks on one machine."""
    is_under_torchrun: bool = False
    """Started by torchrun, which brings its own store."""
    has_master: bool = False
    """MASTER_ADDR and MASTER_PORT are set: rank 0 opens torch's store there."""


def place_from(environ: Mapping[str, str]) -> RankPlace:
    """Read the place from `environ`. Raises ConfigError for variables that are missing or contradict each other."""
    world_size = _number(environ, "WORLD_SIZE", default=1)
    rank = _number(environ, "RANK", default=0 if world_size == 1 else None)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are numbered from 0 to WORLD_SIZE - 1")
    store = environ.get(STORE_VARIABLE)
    return RankPlace(
        rank=rank,
        world_size=world_size,
        file=Path(store) if store is not None else None,
        is_under_torchrun="TORCHELASTIC_RUN_ID" in environ,
        has_master="MASTER_ADDR" in environ and "MASTER_PORT" in environ,
    )


def _number(environ: Mapping[str, str], name: str, *, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        problem = "is not set" if text is None else f"is {text!r}, not a number"
        raise ConfigError(f"{name} {problem}: a launcher sets RANK, WORLD_SIZE and LOCAL_RANK for every rank of a learner")
    return int(text)

"""Removes a run: its folder, and its snapshots elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from async_rl.durable.file_lock import try_lock
from async_rl.errors import ConfigError
from async_rl.run_folders.folder import RunFolder
from async_rl.run_folders.state import LOCK

SERVER_LOCK = "redis/server.lock"


def owned_paths(run: RunFolder) -> list[Path]:
    """What `remove` deletes: the run's folder last, because its config.yaml names the others."""
    return [path for path in (_snapshots(run), run.path) if path is not None]


def remove(run: RunFolder, *, before: Callable[[], None] = lambda: None) -> None:
    """Delete a run. Raises ConfigError if one of its processes lives; meanwhile none can start.

    `before` is called once it is known that the run may be deleted, and while nothing is.
    """
    row = run.last_row()
    if (state := run.state(row)).is_running:
        raise ConfigError(f"run {run.name!r} is running ({state.how}); stop it first")
    for path in owned_paths(run):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link to {path.resolve()}; remove the run there, and the link yourself")
    with ExitStack() as held:
        for name, what in ((LOCK, "the run"), (SERVER_LOCK, "its Redis server")):
            if (run.path / name).exists():
                lock = held.enter_context((run.path / name).open())
                if not try_lock(lock):
                    raise ConfigError(f"{what} is running, a process holds {run.path / name}; stop it first")
        before()
        for path in owned_paths(run):
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise ConfigError(f"{path} cannot be removed: {error.strerror}") from error


def refuse_copy(run: RunFolder, *, keeps_redis: bool) -> None:
    """Raise ConfigError for a copy of a run whose snapshots or keys elsewhere, which go by the run's name, would be deleted."""
    if run.made_as is None or run.made_as.resolve() == run.path.resolve():
        return
    snapshots, url = _snapshots(run), None if keeps_redis else run.setting("redis", "url")
    elsewhere = [*([f"its snapshots in {snapshots}"] if snapshots else []), *(["its keys in Redis"] if url else [])]
    if elsewhere:
        raise ConfigError(
            f"{run.path} is a copy of {run.made_as}, or was moved: {' and '.join(elsewhere)} are those of the run there. "
            "Delete the folder of a copy yourself; if the run was moved, correct run.folder and run.name in its config.yaml"
        )


def _snapshots(run: RunFolder) -> Path | None:
    """The run's own folder in an absolute `wire.snapshots`."""
    given = run.setting("wire", "snapshots")
    if not isinstance(given, str) or not Path(given).is_absolute():
        return None
    path = Path(given) / run.name
    return path if path.is_dir() else None
